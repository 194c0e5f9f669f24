"""The CPU's side of the public ops: tensors in, checks, addresses to the compiled kernels, tensors out.

numba sees addresses and counts only (an array argument costs more than a small kernel), so everything that can be wrong with a
tensor is checked here. Compiled code is cached on disk under a key made of these files and the library versions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch


def _use_own_cache_folder() -> None:
    """Numba's own cache key misses changes in the functions a kernel calls; a folder named by all sources does not."""
    digest = hashlib.sha256(f"{numba.__version__} {np.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    numba.config.CACHE_DIR = str(base / "nanovllm" / "kernels" / digest.hexdigest()[:16])


if "NUMBA_CACHE_DIR" not in os.environ:
    _use_own_cache_folder()

from nanovllm_cli.kernels import cpu_attention, cpu_fused, cpu_matmul  # noqa: E402
from nanovllm_cli.kernels.simd import LANES, TILE_COLUMNS  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32)
BLOCK = cpu_attention.BLOCK
ACTIVATIONS = {"silu": cpu_fused.SILU, "gelu_tanh": cpu_fused.GELU_TANH, "gelu": cpu_fused.GELU}
_TAGS = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
_PAIRS = {torch.bfloat16: 2, torch.float32: 1}


# Multiply-adds below which waking the other threads costs more than they bring; measured at 4 us a wake-up.
SERIAL_WORK = 1 << 17
_num_threads = numba.config.NUMBA_NUM_THREADS


def set_num_threads(threads: int) -> None:
    """For the calling thread's kernels. Torch is left one thread: two pools that wait by spinning rob each other."""
    global _num_threads
    _num_threads = max(1, min(threads, numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(_num_threads)
    torch.set_num_threads(1)


def _run(kernel: Callable[..., None], work: int, *args: object) -> None:
    """kernel(*args) on all threads, or on this one if there is little to do. The code, and so every bit, is the same."""
    if work < SERIAL_WORK:
        numba.set_num_threads(1)
        kernel(*args)
        numba.set_num_threads(_num_threads)
    else:
        kernel(*args)


def _check(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a tensor that is what the kernel will take it for."""
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.shape == shape, (tensor.shape, shape)
    assert tensor.is_contiguous()
    return tensor.data_ptr()


# ---- matmul ----


def packed_size(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Elements of a packed [num_rows, width] weight."""
    pair = _PAIRS[dtype]
    return -(-num_rows // TILE_COLUMNS) * TILE_COLUMNS * -(-width // pair) * pair


def pack_rows(packed: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
    """rows [n, k] become rows first_row … first_row + n - 1 of a packed weight of the same width and dtype."""
    n, k = rows.shape
    assert (first_row + n) * k <= packed.numel()
    cpu_matmul.pack_rows(
        _TAGS[packed.dtype], _PAIRS[packed.dtype], _check(rows, packed.dtype, n, k), n, k, packed.data_ptr(), first_row
    )


def unpack_rows(packed: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Rows `ids` [n] int64 of a packed weight, as [n, width]. The caller has checked the ids."""
    n = ids.shape[0]
    out = torch.empty(n, width, dtype=packed.dtype)
    if n:
        cpu_matmul.unpack_rows(
            _TAGS[packed.dtype], _PAIRS[packed.dtype], packed.data_ptr(), _check(ids, torch.int64, n), n, width,
            out.data_ptr(),
        )  # fmt: skip
    return out


def matmul(
    x: torch.Tensor, packed: torch.Tensor, num_rows: int, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [T, k] times a packed [num_rows, k] weight, transposed: [T, num_rows] in out_dtype. bias [num_rows] in out_dtype."""
    tokens, width = x.shape
    pair = _PAIRS[x.dtype]
    if width % pair:
        x, width = torch.nn.functional.pad(x, (0, 1)), width + 1
    assert packed.numel() == packed_size(num_rows, width, x.dtype)
    out = torch.empty(tokens, num_rows, dtype=out_dtype)
    if tokens:
        _run(
            cpu_matmul.matmul, tokens * num_rows * width, _TAGS[x.dtype], _TAGS[out_dtype],
            _check(x, packed.dtype, tokens, width), tokens, width * x.element_size(),
            packed.data_ptr(), num_rows, width // pair,
            0 if bias is None else _check(bias, out_dtype, num_rows), out.data_ptr(),
        )  # fmt: skip
    return out


# ---- rows ----


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """See `reference.add_rms_norm`; residual is changed in place."""
    tokens, width = x.shape
    out = torch.empty_like(x)
    _run(
        cpu_fused.add_rms_norm, 4 * tokens * width, _TAGS[x.dtype], _check(x, x.dtype, tokens, width),
        0 if residual is None else _check(residual, x.dtype, tokens, width),
        _check(weight, x.dtype, width), out.data_ptr(), tokens, width, eps, offset,
    )  # fmt: skip
    return out


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See `reference.gated_activation`."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype)
    _run(
        cpu_fused.gated_activation, 16 * tokens * width, _TAGS[x.dtype], _check(x, x.dtype, tokens, 2 * width),
        out.data_ptr(), tokens, width, ACTIVATIONS[activation],
    )  # fmt: skip
    return out


# ---- the paged cache ----


def cache_shapes(
    num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's K and V (layout: cpu_attention)."""
    pair = _PAIRS[dtype]
    padded = -(-dim // LANES) * LANES
    return (num_blocks, kv_heads, dim // pair, BLOCK, pair), (num_blocks, kv_heads, BLOCK // pair, padded, pair)


def rope_and_cache(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    slots: torch.Tensor,
    run: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate q and k, write k and v to the cache, return q [T, heads, dim]. See `cpu_fused.rope_and_cache`."""
    tokens, dtype = qkv.shape[0], qkv.dtype
    half = cos.shape[1]
    k_shape, v_shape = cache_shapes(k_cache.shape[0], kv_heads, dim, dtype)
    out = torch.empty(tokens, heads, dim, dtype=dtype)
    _run(
        cpu_fused.rope_and_cache, 8 * qkv.numel(), _TAGS[dtype], _PAIRS[dtype],
        _check(qkv, dtype, tokens, (heads + 2 * kv_heads) * dim), tokens,
        heads, kv_heads, dim, v_shape[3],
        0 if q_norm is None else _check(q_norm, dtype, dim), 0 if k_norm is None else _check(k_norm, dtype, dim), eps,
        _check(cos, torch.float32, tokens, half), _check(sin, torch.float32, tokens, half), 2 * half, interleaved,
        _check(slots, torch.int64, tokens), _check(run, torch.int32, tokens),
        _check(k_cache, dtype, *k_shape), _check(v_cache, dtype, *v_shape), k_shape[0], out.data_ptr(),
    )  # fmt: skip
    return out


def attention_tiles(query_starts: torch.Tensor, kv_lens: torch.Tensor, group: int) -> torch.Tensor:
    """How `paged_attention` divides its work, [tiles, 4] int64: sequence, first row, tokens, first position. Once a step."""
    starts = query_starts.tolist()
    most = max(1, cpu_attention.MAX_TILE_ROWS // group)
    tiles = []
    for seq, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        first_position = kv_len - (end - begin)
        tiles += [(seq, row, min(most, end - row), first_position + row - begin) for row in range(begin, end, most)]
    return torch.tensor(tiles, dtype=torch.int64).reshape(-1, 4)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [T, heads, dim] over the cache: [T, heads * dim]. window, softcap: 0 for none. See `cpu_attention.paged_attention`."""
    tokens, heads, dim = q.shape
    blocks, kv_heads = k_cache.shape[:2]
    k_shape, v_shape = cache_shapes(blocks, kv_heads, dim, q.dtype)
    out = torch.empty(tokens, heads * dim, dtype=q.dtype)
    _run(
        cpu_attention.paged_attention, 2 * BLOCK * q.numel() * block_tables.shape[1],
        _TAGS[q.dtype], _PAIRS[q.dtype], _check(q, q.dtype, tokens, heads, dim), tokens, heads, kv_heads, dim, v_shape[3],
        _check(k_cache, q.dtype, *k_shape), _check(v_cache, q.dtype, *v_shape),
        _check(tiles, torch.int64, tiles.shape[0], 4), tiles.shape[0],
        _check(block_tables, torch.int32, *block_tables.shape), block_tables.shape[1],
        scale, window, softcap, 0 if sinks is None else _check(sinks, torch.float32, heads), out.data_ptr(),
    )  # fmt: skip
    return out
