"""The CPU's side of the public ops: tensors in, checks, addresses to the compiled kernels, tensors out.

numba sees addresses and counts only (an array argument costs more than a small kernel), so everything that can be wrong with a
tensor is checked here. Compiled code is cached on disk under a key made of these files and the library versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from nanovllm_cli import system
from nanovllm_cli.folders import cache_folder
from nanovllm_cli.kernels.simd_ir import LANES  # first: it says what there is of an ARM processor


def processor_name() -> str:
    """What kernels are compiled for: a processor and its instructions."""
    name = numba.config.CPU_NAME or get_host_cpu_name()
    features = numba.config.CPU_FEATURES
    return f"{name} {get_host_cpu_features().flatten() if features is None else features}"


def _use_own_cache_folder() -> None:
    """Numba's own cache key misses changes in the functions a kernel calls; a folder named by all sources does not. What else
    numba tells apart names it, too, so that a marker there (warm.py) speaks of what this process would find."""
    folder, place = Path(__file__).parent, os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "kernels"
    known = numba.__version__, np.__version__, sys.implementation.cache_tag, processor_name(), str(folder)
    digest = hashlib.sha256(b"".join([repr(known).encode(), *(source.read_bytes() for source in sorted(folder.glob("*.py")))]))
    numba.config.CACHE_DIR = str(Path(place, digest.hexdigest()[:16]))


_use_own_cache_folder()
from nanovllm_cli.kernels import cpu_attention, cpu_cache, cpu_fused, cpu_matmul, entry  # noqa: E402
from nanovllm_cli.kernels.entry import ALIGNMENT, Kernel  # noqa: E402
from nanovllm_cli.kernels.simd import TILE_COLUMNS  # noqa: E402

CacheDTypes = tuple[torch.dtype, torch.dtype]
BLOCK = cpu_cache.BLOCK
_TAGS = {torch.bfloat16: "H", torch.float32: "f", torch.int8: "b", torch.float8_e4m3fn: "B"}
_PAIRS = {torch.bfloat16: 2, torch.float32: 1}


# Multiply-adds of a kernel below which waking the other threads costs more than they bring.
SERIAL_WORK = 1 << 19
TASKS_A_THREAD = 2
"""Of attention, where one task is a whole sequence's for a KV head: fewer leave threads idle."""


class _Thread(threading.local):
    """Of the calling thread, as two models may run in one process: threads that its next kernel uses, and at most (asking numba
    costs a microsecond, so only changes are told); its recording that is going on, if any; and where tensors come from."""

    most = current = 0
    recording: Program | None = None
    pool: Pool | None = None


_thread = _Thread()


def most_threads() -> int:
    """That there can be (NUMBA_NUM_THREADS)."""
    return int(numba.config.NUMBA_NUM_THREADS)


def num_threads() -> int:
    """That the calling thread's kernels may use."""
    return int(_thread.most or numba.config.NUMBA_NUM_THREADS)


def set_num_threads(threads: int) -> None:
    """For kernels of the calling thread. Torch is left one thread: two pools that wait by spinning rob each other."""
    _thread.most = _thread.current = max(1, min(threads, most_threads()))
    numba.set_num_threads(_thread.most)
    torch.set_num_threads(1)


def use_threads_for(work: float) -> None:
    """Choose the threads for kernels of so many multiply-adds. It changes who computes, never what: every bit is the same."""
    threads = 1 if work < SERIAL_WORK else num_threads()
    if threads != _thread.current:
        numba.set_num_threads(threads)
        _thread.current = threads


# ---- memory ----


def zeros(numel: int, dtype: torch.dtype, huge_pages: bool = False, *, reserved: bool = True) -> torch.Tensor:
    """A zeroed vector straight from the system: resident page by page as it is written, which torch.zeros is not.

    huge_pages: for memory that will all be read in long strides, such as weights; it asks the system for pages of 2 MiB. Without
    reserved there may be more of it than the machine has, as parts are given back before others are written.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserved else system.NO_RESERVE)
    memory = mmap.mmap(-1, max(1, numel * dtype.itemsize), flags=flags)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


# ---- programs ----


class Pool(Protocol):
    """Where tensors between kernels come from: of a recorded step, or within `kept_memory`."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class MemoryPool:
    """Memory of tensors between kernels, kept once it was taken. Steps run one after another, so all may share one pool."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._pieces: dict[int, torch.Tensor] = {}
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the smallest free piece that holds it; the piece is free again when neither it nor a view is held."""
        numel = math.prod(shape)
        size = numel * dtype.itemsize
        fitting = [place for place, piece in enumerate(self._free) if piece.numel() >= size]
        if fitting:  # behind these another thread may put what it lets go of
            memory = self._free.pop(min(fitting, key=lambda place: self._free[place].numel()))
        else:
            memory = torch.empty(1 << max(0, size - 1).bit_length(), dtype=torch.uint8)
            self.num_bytes += memory.nbytes
            self._pieces[memory.data_ptr()] = memory
        lent = memory.numpy()[:size]  # which a tensor's storage keeps alive as long as any view has it
        weakref.finalize(lent, lambda: self._free.append(memory))
        return torch.from_numpy(lent).view(dtype).view(shape)

    def not_held(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of these as another tensor, by which its piece is not held: whoever gets that next writes over what it shows."""
        memory = self._pieces[tensor.data_ptr()]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Step(NamedTuple):
    """A kernel's address and its arguments; its multiply-adds."""

    kernel: int
    arguments: bytes
    work: int


class Program:
    """Kernels of one step, recorded once and replayed without Python in between: what a graph is to a GPU.

    A replay reads and writes the very tensors of the recording. Whoever records keeps the inputs alive and fills them in
    place, and uses an output before another program of the same pool runs.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.steps: list[Step] = []
        self._outer: Program | None = None
        self._mean_work = 0.0
        self._rows = self._arguments = torch.empty(0)

    def __enter__(self) -> Program:
        self._outer, _thread.recording = _thread.recording, self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _thread.recording, self._outer = self._outer, None
        if kind is not None:
            return
        self._mean_work = sum(step.work for step in self.steps) / max(1, len(self.steps))
        sizes = [len(step.arguments) for step in self.steps]
        assert all(size % ALIGNMENT == 0 for size in sizes)
        self._arguments = torch.frombuffer(bytearray(b"".join(step.arguments for step in self.steps)), dtype=torch.int64)
        starts = [self._arguments.data_ptr() + start for start in itertools.accumulate(sizes, initial=0)]
        self._rows = torch.tensor([(step.kernel, start) for step, start in zip(self.steps, starts, strict=False)])

    def replay(self) -> None:
        """Run every kernel in order."""
        use_threads_for(self._mean_work)
        entry.replay(self._rows.data_ptr(), len(self.steps))


@contextlib.contextmanager
def kept_memory(pool: Pool) -> Iterator[None]:
    """Within, what is not recorded takes its tensors from `pool`: for large ones that nobody else is given, and whose pages the
    system would have to clear again each time."""
    outer, _thread.pool = _thread.pool, pool
    try:
        yield
    finally:
        _thread.pool = outer


def recording() -> Program | None:
    """What the calling thread's kernels are written to; the innermost, where one is recorded for another."""
    return _thread.recording


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a kernel writes to, of the recording if there is one."""
    pool = _thread.pool if _thread.recording is None else _thread.recording.pool
    return torch.empty(shape, dtype=dtype) if pool is None else pool.empty(shape, dtype)


def launch(kernel: Kernel, work: int, tags: str, ints: tuple[int, ...], floats: tuple[float, ...] = ()) -> None:
    """Run a kernel, or write it into the recording. work: its multiply-adds. tags: `tags_of` its element types."""
    if _thread.recording is not None:
        _thread.recording.steps.append(Step(*kernel.step(tags, ints, floats), work))
        return
    use_threads_for(work)
    kernel.run(tags, ints, floats)


def tags_of(*dtypes: torch.dtype) -> str:
    """What a kernel is told of the element types of its tensors."""
    return "".join(_TAGS[dtype] for dtype in dtypes)


def address_of(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a tensor that is what the kernel will take it for."""
    assert (tensor.dtype, tensor.shape) == (dtype, shape), (tensor.dtype, dtype, tensor.shape, shape)
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def rows_of(tensor: torch.Tensor, dtype: torch.dtype, rows: int, columns: int) -> tuple[int, int]:
    """The same of what may be columns of a wider tensor, and how many numbers a row is from the next."""
    assert (tensor.dtype, *tensor.shape, tensor.stride(1)) == (dtype, rows, columns, 1), (tensor.dtype, tensor.shape)
    return tensor.data_ptr(), tensor.stride(0)


# ---- matmul ----


def recordable(width: int, dtype: torch.dtype) -> bool:
    """True if a matmul over so many columns is a kernel alone, without a padded copy of its input."""
    return width % _PAIRS[dtype] == 0


def packed_size(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Elements of a packed [num_rows, width] weight."""
    pair = _PAIRS[dtype]
    return -(-num_rows // TILE_COLUMNS) * TILE_COLUMNS * -(-width // pair) * pair


def pack_rows(packed: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
    """rows [n, k] become rows first_row … first_row + n - 1 of a packed weight of the same width and dtype."""
    n, k = rows.shape
    assert (first_row + n) * k <= packed.numel()
    ints = (_PAIRS[packed.dtype], address_of(rows, packed.dtype, n, k), n, k, packed.data_ptr(), first_row)
    launch(cpu_matmul.pack_rows, n * k, tags_of(packed.dtype), ints)


def unpack_rows(packed: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Rows `ids` [n] int64 of a packed weight, as [n, width]. The caller has checked the ids."""
    n, dtype = ids.shape[0], packed.dtype
    out = new_tensor((n, width), dtype)
    ints = (_PAIRS[dtype], packed.data_ptr(), address_of(ids, torch.int64, n), n, width, out.data_ptr())
    launch(cpu_matmul.unpack_rows, n * width, tags_of(dtype), ints)
    return out


def paired(x: torch.Tensor) -> torch.Tensor:
    """x [T, k] as a matmul reads it: with a zero behind each row of bf16 whose width is odd."""
    if x.shape[1] % _PAIRS[x.dtype] == 0:
        return x
    assert _thread.recording is None, "an odd width needs a copy, which can't be recorded"
    return torch.nn.functional.pad(x, (0, 1))


def matmul(
    x: torch.Tensor, packed: torch.Tensor, num_rows: int, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [T, k] times a packed [num_rows, k] weight, transposed: [T, num_rows] in out_dtype, which is x's or float32.
    bias [num_rows] in out_dtype."""
    x = paired(x)
    tokens, width = x.shape
    pair = _PAIRS[x.dtype]
    assert packed.numel() == packed_size(num_rows, width, x.dtype)
    out = new_tensor((tokens, num_rows), out_dtype)
    ints = (
        address_of(x, packed.dtype, tokens, width), tokens, width * x.element_size(), packed.data_ptr(), num_rows, width // pair,
        0 if bias is None else address_of(bias, out_dtype, num_rows), out.data_ptr(),
    )  # fmt: skip
    launch(cpu_matmul.matmul, tokens * num_rows * width, tags_of(x.dtype, out_dtype), ints)
    return out


# ---- the paged cache ----


def cache_shapes(
    num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype, kept: CacheDTypes | None = None, value_dim: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's K and V (layout: cpu_attention). kept: what they are kept as, where that is not the compute type
    dtype; a quantized side is bytes by block and head, codes and then scales. value_dim: of values, None: as of keys."""
    pair = _PAIRS[dtype]
    shapes = (dim // pair, BLOCK, pair), (BLOCK // pair, _padded(value_dim or dim), pair)
    k, v = (
        (num_blocks, kv_heads, *shape) if side == dtype else (num_blocks, kv_heads, math.prod(shape) + cpu_cache.SCALE_BYTES)
        for shape, side in zip(shapes, kept or (dtype, dtype), strict=True)
    )
    return k, v


def _padded(dim: int) -> int:
    return -(-dim // LANES) * LANES


def _check_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor | None, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int
) -> tuple[tuple[int, ...], CacheDTypes]:
    """(addresses of K and V, bytes of one head's part of a block of K and V), and what they are kept as. Without V it is K."""
    caches = k_cache, k_cache if v_cache is None else v_cache
    kept = caches[0].dtype, caches[1].dtype
    k_shape, v_shape = cache_shapes(len(k_cache), kv_heads, dim, dtype, kept, value_dim)
    sides = zip(caches, (k_shape, k_shape if v_cache is None else v_shape), strict=True)
    addresses = (address_of(cache, cache.dtype, *shape) for cache, shape in sides)
    return (*addresses, *(cache.stride(1) * cache.itemsize for cache in caches)), kept


def rope_and_cache(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
    eps: float,
    norm_offset: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    slots: torch.Tensor,
    run: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    reads: bool = False,
    norm_last: bool = False,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, with norm_last the other way round, and q_norm [heads, dim]; write k and v to the cache, return q
    [T, heads, dim]. Without v_cache qkv has no v, and K is V as well; reads: it has q alone. value_dim: of a head of v, None:
    dim. See `cpu_fused.rope_and_cache`."""
    tokens, dtype, half = qkv.shape[0], qkv.dtype, cos.shape[1]
    values = value_dim or dim
    cache, kept = _check_cache(k_cache, v_cache, kv_heads, dim, dtype, values)
    keys = 0 if reads else 1 if v_cache is None else 2
    out = new_tensor((tokens, heads, dim), dtype)
    sizes = (q_norm, (heads, dim) if norm_last else (dim,)), (k_norm, (dim,)), (v_norm, (values,))
    norms = (0 if norm is None else address_of(norm, dtype, *size) for norm, size in sizes)
    columns = (heads + min(keys, 1) * kv_heads) * dim + keys // 2 * kv_heads * values
    ints = (
        _PAIRS[dtype], *rows_of(qkv, dtype, tokens, columns), tokens, heads, kv_heads, dim, values, _padded(values), keys, *norms,
        address_of(cos, torch.float32, tokens, half), address_of(sin, torch.float32, tokens, half), 2 * half, int(interleaved),
        address_of(slots, torch.int64, tokens), address_of(run, torch.int32, tokens),
        *cache, out.data_ptr(), int(norm_last),
    )  # fmt: skip
    launch(cpu_fused.rope_and_cache, 8 * qkv.numel(), tags_of(dtype, *kept), ints, (eps, norm_offset))
    return out


def attention_tiles(query_starts: torch.Tensor, kv_lens: torch.Tensor, group: int) -> torch.Tensor:
    """How `paged_attention` divides its work, [tiles, 5] int64: sequence, first row, tokens, first position, keys of the
    sequence. Once a step."""
    most = max(1, cpu_attention.MAX_TILE_ROWS // group)
    starts = query_starts.tolist()
    tiles = []
    for seq, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        first_position = kv_len - (end - begin)
        tiles += [(seq, row, min(most, end - row), first_position + row - begin, kv_len) for row in range(begin, end, most)]
    return torch.from_numpy(np.array(tiles, np.int64).reshape(-1, 5))


def _num_splits(tasks: int, table_width: int) -> int:
    """Into how many parts of `cpu_attention.SPLIT` keys sequences are cut, so that no thread is without work: all that there may
    be, or 1. Like the number of threads it changes who computes, never what."""
    enough = TASKS_A_THREAD * num_threads()
    return 1 if tasks >= enough else -(-table_width * BLOCK // cpu_attention.SPLIT)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    tiles: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    unread: int = 0,
    *,
    both_ways: bool = False,
    distances: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """q [T, heads, dim] over the cache: [T, heads * value_dim], None being dim. window, softcap: 0 for none. Without v_cache keys
    are values, of whose first `unread` dims nobody asks: they may come out as zeros. both_ways: tokens see those behind them,
    too. distances [heads, 2 * reach + 64]: see `layers/distances.py`. See `cpu_attention.paged_attention`."""
    (tokens, heads, dim), kv_heads = q.shape, k_cache.shape[1]
    values = value_dim or dim
    cache, kept = _check_cache(k_cache, v_cache, kv_heads, dim, q.dtype, values)
    out = new_tensor((tokens, heads * values), q.dtype) if out is None else out
    sink_address = 0 if sinks is None else address_of(sinks, torch.float32, heads)
    splits = _num_splits(tiles.shape[0] * kv_heads, block_tables.shape[1]) if tiles.shape[0] == tokens else 1
    partials = new_tensor((tokens * heads * splits if splits > 1 else 0, _padded(values) + 2), torch.float32)
    assert distances is None or not softcap, "no model has both"
    columns = 0 if distances is None else distances.shape[1]
    table = 0 if distances is None else address_of(distances, torch.float32, heads, columns)
    ints = (
        _PAIRS[q.dtype], address_of(q, q.dtype, tokens, heads, dim), tokens, heads, kv_heads, dim, values, _padded(values),
        *cache, address_of(tiles, torch.int64, tiles.shape[0], 5), tiles.shape[0],
        address_of(block_tables, torch.int32, *block_tables.shape), block_tables.shape[1],
        window, int(both_ways), sink_address, table, columns, address_of(out, q.dtype, tokens, heads * values), splits,
        partials.data_ptr(), unread // LANES * LANES if v_cache is None else -1,
    )  # fmt: skip
    work = 2 * BLOCK * q.numel() * block_tables.shape[1]
    launch(cpu_attention.paged_attention, work, tags_of(q.dtype, *kept), ints, (scale, softcap))
    if splits > 1:
        ints = (
            heads, kv_heads, values, _padded(values), tiles.data_ptr(), tokens, window, int(both_ways), sink_address,
            out.data_ptr(), splits, partials.data_ptr(),
        )  # fmt: skip
        launch(cpu_attention.join_parts, splits * q.numel(), tags_of(q.dtype), ints)
    return out
