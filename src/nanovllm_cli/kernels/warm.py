"""Compile CPU kernels, or load them from the cache, before somebody waits for a token: those that every model needs, and apart
from them those of integer weights, of adapters, of experts, of convolutions, of the delta rule, of Mamba's first rule, of RWKV's,
of latent, sparse and compressed attention, of that to digests, of gated streams, and of n-grams.

Compiling takes one processor some 20 s on a machine's first run. So those that would be idle help: a process for each goes
through all parts and passes over what another one has under way (`compiled.passing_over`); this one does so too, and then waits
for the rest. A marker in numba's cache folder tells later runs that it is done, so that only the first says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import torch

from nanovllm_cli import system
from nanovllm_cli.children import child_environment
from nanovllm_cli.collector import come_seldom
from nanovllm_cli.folders import cache_folder, note_use, remove_unused
from nanovllm_cli.kernels import (
    adapters,
    block_index,
    compiled,
    compressed,
    connections,
    conv,
    cpu,
    cpu_sampling,
    cpu_sampling_random,
    delta,
    dense,
    digests,
    gates,
    indexer,
    integer,
    latent,
    ngrams,
    norms,
    scan,
    wkv,
)
from nanovllm_cli.kernels.cpu_mixture import CpuMixture, add_onto, route_by_table
from nanovllm_cli.kernels.mixture import Scoring
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.record_kinds import F16, RecordLayout
from nanovllm_cli.kernels.states import States
from nanovllm_cli.processors import THREADS_VARIABLE, num_processors
from nanovllm_cli.sampling_params import SamplingParams

MOST_HELPERS = 3
"""The longest part takes a quarter of the time of all."""
HELPER_BYTES = 1 << 30
"""More memory than a process that compiles takes."""


class Kind(NamedTuple):
    """name: of PARTS. dtypes: that of activations; for "all" those of the keys and values that are kept, too."""

    name: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def is_compiled(self) -> bool:
        """True if `warm_up` has been through, with these sources and versions, on this machine."""
        return self._marker.exists()

    @property
    def parts(self) -> list[Callable[[], None]]:
        return [functools.partial(part, *self.dtypes) for part in PARTS[self.name]]

    def mark(self) -> None:
        with contextlib.suppress(OSError):  # nothing can be kept: numba compiles again next time, and says nothing either
            self._marker.touch()

    @property
    def _marker(self) -> Path:
        return Path(numba.config.CACHE_DIR or ".") / "-".join(["compiled", self.name, *map(_name, self.dtypes)])


def warm_up(kinds: Sequence[Kind]) -> None:
    """Run each kernel of these once on next to nothing."""
    new = [kind for kind in kinds if not kind.is_compiled]
    with _helpers(new) as helped:
        if helped:
            _go_through(new, 0)
        for kind in kinds:
            for part in kind.parts:
                part()
            if compiled.keeps():
                kind.mark()
    note_use(Path(numba.config.CACHE_DIR))
    if new:  # perhaps of a new version
        remove_unused(cache_folder() / "kernels")  # never in NUMBA_CACHE_DIR, which may have others' files


def _go_through(kinds: Sequence[Kind], first: int) -> None:
    """Compile what nobody else is compiling, beginning with part `first` of them all."""
    parts = [part for kind in kinds for part in kind.parts]
    for part in parts[first:] + parts[:first]:
        with contextlib.suppress(compiled.UnderWay), compiled.passing_over():
            part()


def help_with(told: str) -> None:
    """What a helper is started for. told: see `_helpers`."""
    kinds, first = json.loads(told)
    _go_through([Kind(name, tuple(getattr(torch, dtype) for dtype in dtypes)) for name, dtypes in kinds], first)


@contextlib.contextmanager
def _helpers(kinds: Sequence[Kind]) -> Iterator[int]:
    """Processes that compile meanwhile, and how many. What one fails at this process meets itself."""
    num_parts = sum(len(kind.parts) for kind in kinds)
    count = _idle_processors(num_parts) if kinds else 0
    environment = child_environment() | {THREADS_VARIABLE: "1"}
    names = [(kind.name, [_name(dtype) for dtype in kind.dtypes]) for kind in kinds]
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.suppress(OSError):  # no more processes may be started
            for number in range(1, count + 1):
                told, none = json.dumps([names, num_parts * number // (count + 1)]), subprocess.DEVNULL
                command = [sys.executable, "-P", "-m", "nanovllm_cli.kernels.warm", told]
                helpers.append(subprocess.Popen(command, env=environment, stdin=none, stdout=none, stderr=none))
        yield len(helpers)
    finally:
        for helper in helpers:
            helper.kill()  # it has nothing left to do, or nobody is there who wants it
            helper.wait()


def _idle_processors(most: int) -> int:
    """Beside this process's own, for `most` parts, as far as memory goes."""
    if not sys.executable or not compiled.can_keep():
        return 0
    load = 0.0
    with contextlib.suppress(OSError):  # a system that does not say
        load = os.getloadavg()[0]
    idle = int(num_processors() - max(1.0, load) + 0.5)
    return max(0, min(most - 1, MOST_HELPERS, idle, system.available_bytes() // HELPER_BYTES))


def _norms(dtype: torch.dtype, *_: torch.dtype) -> None:
    x = torch.zeros(1, 64, dtype=dtype)

    def step() -> None:
        normed = norms.add_rms_norm(x, None, x[0], 1e-6, 0.0)
        both = norms.join_and_norm(Normed(normed, x[0], 1e-6, 0.0), x, 1.0, x[0], 1e-6, 0.0)
        gates.scale(gates.gated_activation(add_onto(both, both), "silu"), 1.0)

    _twice(step)


def _matmuls(dtype: torch.dtype, *_: torch.dtype) -> None:
    weight, ids = dense.empty(64, 64, dtype), torch.zeros(1, dtype=torch.int64)
    weight.load_rows(0, torch.zeros(1, 64, dtype=dtype))

    def step() -> None:
        weight.matmul(weight.rows(ids), None, dtype)
        gates.scale(weight.matmul(weight.rows(ids), None, torch.float32), 1.0)

    _twice(step)


def _attention(dtype: torch.dtype, *kept: torch.dtype) -> None:
    """In tables wide enough for attention in parts."""
    k_dtype, v_dtype = kept
    shapes = zip(cpu.cache_shapes(1, 1, 16, dtype, (k_dtype, v_dtype)), kept, strict=True)
    k_cache, v_cache = (torch.zeros(shape, dtype=side) for shape, side in shapes)
    qkv, angles, ids = torch.zeros(1, 48, dtype=dtype), torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    run, tables = torch.ones(1, dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    tiles = torch.tensor([[0, 0, 1, 0, 1]])

    def step() -> None:
        q = cpu.rope_and_cache(qkv, 1, 1, 16, None, None, None, 1e-6, 0.0, angles, angles, False, ids, run, k_cache, v_cache)
        cpu.paged_attention(q, k_cache, v_cache, tiles, tables, 1.0, 0, 0.0, None)

    _twice(step)


def _twice(step: Callable[[], None]) -> None:
    """As `Decoder` runs it, and from a recording."""
    step()
    with cpu.Program(cpu.MemoryPool()) as program:
        step()
    program.replay()


def _draws(*_: torch.dtype) -> None:
    logits = cpu_sampling.as_rows(torch.zeros(1, 64))
    vocab_size, copies = logits.shape[1], np.empty_like(logits)
    counter, key = np.zeros((4, 1), dtype=np.uint64), np.zeros((2, 1), dtype=np.uint64)
    cpu_sampling_random.philox4x32(counter.ctypes.data, key.ctypes.data, 1)
    cpu_sampling.edit_rows(cpu_sampling.row_addresses(logits, [0]), [[]], copies)
    rows = cpu_sampling.row_addresses(copies, [0])
    cpu_sampling.draw_tokens(rows, vocab_size, np.array([cpu_sampling.draw_settings(SamplingParams())]), [None], rows)
    cpu_sampling.logprobs(rows, vocab_size, [0], [1])


def _integer(dtype: torch.dtype) -> None:
    layout = RecordLayout(64, 32, 4, 32, F16)
    weight = integer.Packed(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8), None)
    x = integer.quantize(torch.zeros(1, 32, dtype=dtype), integer.Rounding(32, False, None))
    for out_dtype in (dtype, torch.float32):
        integer.matmul(x, weight, None, torch.zeros(1, 64, dtype=out_dtype))
    integer.rows(weight, torch.zeros(1, dtype=torch.int64), None, dtype)


class _NormExpert:
    """Norms what it gets. recordable: whether it says that it can be recorded."""

    activation, held, width = "silu", None, 16

    def __init__(self, recordable: bool) -> None:
        self.recordable = recordable
        self.bias = None

    @property
    def weight(self) -> _NormExpert:
        return self

    gate_up = down = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return norms.add_rms_norm(x, None, x[0], 1e-6, 0.0)


def _experts(dtype: torch.dtype) -> None:
    x, logits, scoring = torch.zeros(1, 16, dtype=dtype), torch.zeros(1, 2), Scoring(bias=torch.zeros(2))
    mixture, others = (
        CpuMixture(cpu.MemoryPool(), [_NormExpert(alike), _NormExpert(alike)], 1, True, scoring) for alike in (True, False)
    )
    others(x, logits)
    mixture(x, logits)
    with cpu.Program(cpu.MemoryPool()) as program:
        add_onto(mixture(x, logits), x)
    program.replay()


def _adapters(dtype: torch.dtype) -> None:
    down, up = torch.zeros(16, 64, dtype=dtype), torch.zeros(64, 16, dtype=dtype)
    sides, x = adapters.Sides([adapters.Side(down, up, 0)], 64, dtype), torch.zeros(1, 64, dtype=dtype)
    for y in (torch.zeros(1, 64, dtype=dtype), torch.zeros(1, 64)):
        sides.onto(y, sides.ranks(x, None), None)


def _conv(dtype: torch.dtype) -> None:
    x, one = torch.zeros(1, 48, dtype=dtype), torch.ones(1, dtype=torch.int32)
    taps, cache = torch.zeros(3, 16, dtype=dtype), torch.zeros(1, cpu.BLOCK, 16, dtype=dtype)
    conv.gated_conv(x, taps, None, cache, torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros(1, 1, dtype=torch.int32))


def _delta(dtype: torch.dtype) -> None:
    one, f32 = torch.ones(1, dtype=torch.int32), torch.float32
    stamps, rows, none = (torch.zeros(1, 2, 1, dtype=torch.int32) for _ in range(2)), *torch.zeros(2, 1, 2, 1, 12, dtype=dtype)
    state = States(torch.zeros(1, 2, 1, 4, 4), rows, none, torch.zeros(1, 2, 1, 2), *stamps)
    delta.gated_delta(
        torch.zeros(1, 16, dtype=dtype), torch.zeros(1, 2), torch.zeros(2, 12, dtype=dtype), torch.zeros(1), torch.zeros(1),
        torch.zeros(4), 1e-6, None, None, False, state, torch.tensor([0, 1], dtype=torch.int32), one, one,
        torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    for gate in (torch.zeros(1, 4, dtype=dtype), torch.zeros(1, 1, dtype=f32)):
        gates.sigmoid_gate(torch.zeros(1, 4, dtype=dtype), gate)


def _scan(dtype: torch.dtype) -> None:
    one, stamps = torch.ones(1, dtype=torch.int32), (torch.zeros(1, 2, 1, dtype=torch.int32) for _ in range(2))
    inputs, guesses = torch.zeros(1, 2, 1, 4, dtype=dtype), torch.zeros(1, 2, 1, 8, dtype=dtype)
    state = States(torch.zeros(1, 2, 1, 2, 4), inputs, guesses, torch.zeros(1, 2, 1, 6), *stamps)
    step = state, torch.tensor([0, 1], dtype=torch.int32), one, one, torch.zeros(1, dtype=torch.int32)
    projected, row = torch.zeros(1, 8, dtype=dtype), torch.zeros(1, 4)
    x = scan.causal_conv(projected, torch.zeros(2, 4, dtype=dtype), None, *step)
    scan.scan_parts(row, 2, None, 1e-6, dtype)
    scan.selective_scan(projected, x, row, row, torch.zeros(1, 2, 4), row[0], row[0], *step)


def _wkv(dtype: torch.dtype) -> None:
    one, stamps = torch.ones(1, dtype=torch.int32), (torch.zeros(1, 2, 1, dtype=torch.int32) for _ in range(2))
    inputs, guesses = torch.zeros(1, 2, 1, 8, dtype=dtype), torch.zeros(1, 2, 1, 8, dtype=dtype)
    state = States(torch.zeros(1, 2, 1, 4, 4), inputs, guesses, torch.zeros(1, 2, 1, 20), *stamps)
    step = state, torch.tensor([0, 1], dtype=torch.int32), one, one, torch.zeros(1, dtype=torch.int32)
    x, row = torch.zeros(1, 4, dtype=dtype), torch.zeros(1, 4)
    wkv.token_shift(x, row, wkv.TIME, *step)
    wkv.wkv7(wkv.WkvInputs(x, x, x, wkv.squash(row, "tanh", dtype), row, row, row, x), torch.zeros(8, 4), 1e-6, *step)
    norms.add_rms_norm(x, None, x[0], 1e-6, 0.0, True, x[0])
    norms.norm_sum(None, x, x[0], x[0], 1e-6)
    gates.gated_activation(x, "relu2")


def _latent(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 16, dtype=dtype)
    latent.latent_rows(x, x, torch.zeros(12, dtype=dtype), 1e-6, 0.0, 1, 12)
    latent.CpuHeadMatrices(1, 4, 16, dtype).products(x, 0, 0)


def _compressed(dtype: torch.dtype) -> None:
    x, one = torch.zeros(1, 8, dtype=dtype), torch.ones(1)
    latent.CpuHeadMatrices(1, 2, 2, dtype).products(compressed.with_open_gates(x, 8), 0, 0)
    compressed.met_heads(x[:, :6].contiguous(), x[:, :4].contiguous(), x[0, :4].contiguous(), x, one, 2, 1, 1e-6)
    compressed.of_the_best(torch.zeros(1, 2), torch.zeros(2))
    for rows in (x, x.float()):
        compressed.rescale(rows, torch.zeros(8), torch.ones(8))


def _sparse(dtype: torch.dtype) -> None:
    """Of a token that sees half of what is there."""
    tiles, tables, one = torch.tensor([[0, 0, 1, 31, 32]]), torch.arange(2, dtype=torch.int32)[None], torch.zeros(1, 1)
    (shape, _) = cpu.cache_shapes(2, 1, 16, dtype)
    keys, q = torch.zeros(shape, dtype=dtype), torch.zeros(1, 1, 16, dtype=dtype)
    chosen = indexer.choose(q, one, keys, tiles, tables, 16)
    indexer.Gathered(16, 16, dtype, dtype).gather(0, chosen, keys, tiles, tables)


def _gated(dtype: torch.dtype) -> None:
    x, weights = torch.zeros(1, 4, dtype=dtype), torch.zeros(1, 2)
    normed = connections.norm_streams(streams := connections.spread(x, 2), torch.zeros(8, dtype=dtype), 1e-6, 1.0)
    connections.write_streams(streams, connections.mix_streams(normed, normed, 2, weights), weights)
    gates.sigmoid_gate(x, x)


def _ngrams(dtype: torch.dtype) -> None:
    """Of a table of either type."""
    one, stamps = torch.ones(1, dtype=torch.int32), (torch.zeros(1, 2, 1, dtype=torch.int32) for _ in range(2))
    states = States(*(torch.zeros(0) for _ in range(4)), *stamps)
    past = ngrams.NGramPast(torch.zeros(1, 2, 2, 8, dtype=dtype), torch.zeros(1, 2, 1, dtype=torch.int32))
    step = torch.tensor([0, 1], dtype=torch.int32), one, one, torch.zeros(1, dtype=torch.int32)
    ids, many = torch.zeros(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    for kept in ngrams.TABLE_DTYPES:
        table = ngrams.NGramTable([torch.zeros(2, 4, dtype=kept)])
        x = ngrams.gather(ids, table, ngrams.NGramHashes(many, many[:1], ids, 0), dtype, past, states, step)
    wide = torch.zeros(1, 8, dtype=dtype)
    streams, taps = torch.zeros(2, 1, 4, dtype=dtype), wide.repeat(2, 1)
    ngrams.join(wide, x, streams, wide.repeat(3, 1), 1e-6, 1.0, taps, 2, past, states, step)


def _blocks(dtype: torch.dtype) -> None:
    """Of a token that sees half of what is there."""
    tiles, tables = torch.tensor([[0, 0, 1, 31, 32]]), torch.arange(2, dtype=torch.int32)[None]
    where = block_index.Where(tiles, torch.tensor([0, 1], dtype=torch.int32), tables)
    x, angles = torch.zeros(1, 16, dtype=dtype), torch.zeros(1, 8)
    kept = torch.zeros(2, cpu.BLOCK, 16, dtype=dtype)
    index = block_index.IndexKeys(kept, kept.clone(), 4)
    block_index.keep_keys(x, angles, angles, x[0], 1e-6, 1.0, index, where)
    chosen = block_index.choose(x[None], index, 2, where)
    cache = tuple(torch.zeros(shape, dtype=dtype) for shape in cpu.cache_shapes(2, 1, 16, dtype))
    block_index.Gathered(2, 4, 1, 16, 16, dtype, (dtype, dtype)).gather(slice(0, 1), chosen, (cache[0], cache[1]), where)


def _digests(dtype: torch.dtype) -> None:
    """Of a token that sees half of them."""
    tiles, tables = torch.tensor([[0, 0, 1, 31, 32]]), torch.arange(2, dtype=torch.int32)[None]
    where, angles = digests.Where(tiles, tables, tables), (torch.zeros(1, 2), torch.zeros(1, 2))
    x, slots = torch.zeros(1, 8, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    keys, raw, made = (torch.zeros(2, rows, width, dtype=dtype) for rows, width in ((16, 8), (16, 16), (1, 8)))
    digests.keep_rows(digests.turn_last(x, 1, angles, gains=x[0], eps=1e-6), slots, keys)
    digests.make_digests(raw, made, digests.DigestMaker(0, 8, 1, torch.zeros(16, 8), x[0], 1e-6, 0.0), angles, 16, where)
    chosen = digests.choose(x, torch.zeros(1, 1), made, 16, 1, where)
    digests.gather_seen(slice(0, 1), keys, made, chosen, 16, 16, where, 1)
    streams, (matrix, base, scale) = connections.spread(x, 2), (torch.zeros(size) for size in ((8, 16), (8,), (3,)))
    connections.write_streams(streams, *connections.read_streams(streams, matrix, base, scale, 1e-6, 1e-6, 2.0, 2))
    scoring = Scoring(root_softplus=True, table=torch.zeros(1, 1, dtype=torch.int64))
    route_by_table(torch.zeros(1, 2), slots, 1, True, scoring)


PARTS: dict[str, tuple[Callable[..., None], ...]] = {
    "all": (_attention, _matmuls, _norms, _draws),
    "integer": (_integer,), "experts": (_experts,), "adapters": (_adapters,), "conv": (_conv,), "delta": (_delta,),
    "scan": (_scan,), "wkv": (_wkv,), "latent": (_latent,), "compressed": (_compressed,), "sparse": (_sparse,),
    "gated": (_gated,), "ngrams": (_ngrams,), "blocks": (_blocks,), "digests": (_digests,),
}  # fmt: skip
"""Of a kind: functions of the dtype of activations and, for all, those of keys and values."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    come_seldom()
    help_with(sys.argv[1])
