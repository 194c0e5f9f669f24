"""Compile CPU kernels, or load them from the cache, before somebody waits for a token: those that every model needs, for one
dtype and kind of KV cache, and apart from them those of integer weights, of adapters, of experts, of convolutions, of the delta
rule, of Mamba's first rule and of latent attention.

The first run on a machine takes about a quarter of a minute of compiling; a marker in numba's cache folder tells later ones that
it is done, so that only the first says so.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numba
import numpy as np
import torch

from nanovllm_cli.kernels import (
    adapters,
    conv,
    cpu,
    cpu_sampling,
    cpu_sampling_random,
    delta,
    dense,
    entry,
    gates,
    integer,
    latent,
    norms,
    scan,
)
from nanovllm_cli.kernels.cpu_mixture import CpuMixture, add_onto
from nanovllm_cli.kernels.mixture import Scoring
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.record_kinds import F16, RecordLayout
from nanovllm_cli.kernels.states import States
from nanovllm_cli.sampling_params import SamplingParams


def is_compiled(dtype: torch.dtype, kept: cpu.CacheDTypes) -> bool:
    """True if `warm_up` has been through for these, with these sources and versions, on this machine."""
    return os.path.exists(_marker(dtype, *kept))


def warm_up(dtype: torch.dtype, kept: cpu.CacheDTypes) -> None:
    """Run each kernel once on next to nothing, as `Decoder` runs them, and once from a recording, in tables wide enough for
    attention in parts. kept: see cpu.cache_shapes."""
    ids = torch.zeros(1, dtype=torch.int64)
    zeros, weight = torch.zeros(1, 64, dtype=dtype), dense.empty(64, 64, dtype)
    weight.load_rows(0, zeros)
    shapes = zip(cpu.cache_shapes(1, 1, 16, dtype, kept), kept, strict=True)
    k_cache, v_cache = (torch.zeros(shape, dtype=side) for shape, side in shapes)
    angles = torch.zeros(1, 8)
    run, tables = torch.ones(1, dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    tiles = torch.tensor([[0, 0, 1, 0, 1]])

    def step() -> torch.Tensor:
        x = norms.add_rms_norm(weight.rows(ids), None, zeros[0], 1e-6, 0.0)
        x = norms.join_and_norm(Normed(x, zeros[0], 1e-6, 0.0), weight.rows(ids), 1.0, zeros[0], 1e-6, 0.0)
        qkv = weight.matmul(x, None, dtype)[:, :48].contiguous()
        q = cpu.rope_and_cache(qkv, 1, 1, 16, None, None, None, 1e-6, 0.0, angles, angles, False, ids, run, k_cache, v_cache)
        cpu.paged_attention(q, k_cache, v_cache, tiles, tables, 1.0, 0, 0.0, None)
        cpu.scale(gates.gated_activation(add_onto(x, x), "silu"), 1.0)
        return cpu.scale(weight.matmul(x, None, torch.float32), 1.0)

    step()
    with cpu.Program(cpu.MemoryPool()) as program:
        logits = step()
    program.replay()
    assert logits.isfinite().all()
    _draw(cpu_sampling.as_rows(logits))
    _mark(_marker(dtype, *kept))


def integer_is_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_integer`."""
    return os.path.exists(_marker("integer", dtype))


def warm_up_integer(dtype: torch.dtype) -> None:
    """Run the kernels of integer weights once on next to nothing, with results of dtype and in float32, as logits are."""
    layout = RecordLayout(64, 32, 4, 32, F16)
    weight = integer.Packed(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8), None)
    x = integer.quantize(torch.zeros(1, 32, dtype=dtype), integer.Rounding(32, False, None))
    for out_dtype in (dtype, torch.float32):
        integer.matmul(x, weight, None, torch.zeros(1, 64, dtype=out_dtype))
    integer.rows(weight, torch.zeros(1, dtype=torch.int64), None, dtype)
    _mark(_marker("integer", dtype))


class _NormExpert:
    """Norms what it gets. recordable: whether it says that it can be recorded."""

    activation = "silu"

    def __init__(self, recordable: bool) -> None:
        self.recordable = recordable
        self.bias = None

    @property
    def weight(self) -> _NormExpert:
        return self

    gate_up = down = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return norms.add_rms_norm(x, None, x[0], 1e-6, 0.0)


def experts_are_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_experts`."""
    return os.path.exists(_marker("experts", dtype))


def warm_up_experts(dtype: torch.dtype) -> None:
    """Run the kernels beside the matmuls of experts once on next to nothing: of experts that are alike, now and from a recording,
    and of others."""
    x, logits, scoring = torch.zeros(1, 16, dtype=dtype), torch.zeros(1, 2), Scoring(bias=torch.zeros(2))
    mixture, others = (
        CpuMixture(cpu.MemoryPool(), [_NormExpert(alike), _NormExpert(alike)], 1, True, scoring) for alike in (True, False)
    )
    others(x, logits)
    mixture(x, logits)
    with cpu.Program(cpu.MemoryPool()) as program:
        add_onto(mixture(x, logits), x)
    program.replay()
    _mark(_marker("experts", dtype))


def adapters_are_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_adapters`."""
    return os.path.exists(_marker("adapters", dtype))


def warm_up_adapters(dtype: torch.dtype) -> None:
    """Run the kernels of adapters beside a weight once on next to nothing, onto what is of dtype and, as a router's is, fp32."""
    down, up = torch.zeros(16, 64, dtype=dtype), torch.zeros(64, 16, dtype=dtype)
    sides, x = adapters.Sides([adapters.Side(down, up, 0)], 64, dtype), torch.zeros(1, 64, dtype=dtype)
    for y in (torch.zeros(1, 64, dtype=dtype), torch.zeros(1, 64)):
        sides.onto(y, sides.ranks(x, None), None)
    _mark(_marker("adapters", dtype))


def conv_is_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_conv`."""
    return os.path.exists(_marker("conv", dtype))


def warm_up_conv(dtype: torch.dtype) -> None:
    """Run the kernel of convolutions once on next to nothing."""
    x, one = torch.zeros(1, 48, dtype=dtype), torch.ones(1, dtype=torch.int32)
    taps, cache = torch.zeros(3, 16, dtype=dtype), torch.zeros(1, cpu.BLOCK, 16, dtype=dtype)
    conv.gated_conv(x, taps, None, cache, torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros(1, 1, dtype=torch.int32))
    _mark(_marker("conv", dtype))


def delta_is_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_delta`."""
    return os.path.exists(_marker("delta", dtype))


def warm_up_delta(dtype: torch.dtype) -> None:
    """Run the kernels of the delta rule and of gates once on next to nothing."""
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
    _mark(_marker("delta", dtype))


def scan_is_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_scan`."""
    return os.path.exists(_marker("scan", dtype))


def warm_up_scan(dtype: torch.dtype) -> None:
    """Run the kernels of Mamba's first rule once on next to nothing."""
    one, stamps = torch.ones(1, dtype=torch.int32), (torch.zeros(1, 2, 1, dtype=torch.int32) for _ in range(2))
    inputs, guesses = torch.zeros(1, 2, 1, 4, dtype=dtype), torch.zeros(1, 2, 1, 8, dtype=dtype)
    state = States(torch.zeros(1, 2, 1, 2, 4), inputs, guesses, torch.zeros(1, 2, 1, 6), *stamps)
    step = state, torch.tensor([0, 1], dtype=torch.int32), one, one, torch.zeros(1, dtype=torch.int32)
    projected, row = torch.zeros(1, 8, dtype=dtype), torch.zeros(1, 4)
    x = scan.causal_conv(projected, torch.zeros(2, 4, dtype=dtype), None, *step)
    scan.scan_parts(row, 2, None, 1e-6, dtype)
    scan.selective_scan(projected, x, row, row, torch.zeros(1, 2, 4), row[0], row[0], *step)
    _mark(_marker("scan", dtype))


def latent_is_compiled(dtype: torch.dtype) -> bool:
    """The same for `warm_up_latent`."""
    return os.path.exists(_marker("latent", dtype))


def warm_up_latent(dtype: torch.dtype) -> None:
    """Run the kernels of latent attention beside that of attention once on next to nothing."""
    x = torch.zeros(1, 16, dtype=dtype)
    latent.latent_rows(x, x, torch.zeros(12, dtype=dtype), 1e-6, 0.0, 1, 12)
    latent.CpuHeadMatrices(1, 4, 16, dtype).products(x, 0, 0)
    _mark(_marker("latent", dtype))


def _draw(logits: cpu_sampling.Logits) -> None:
    """Every kernel of a draw, of whatever is in them."""
    vocab_size, copies = logits.shape[1], np.empty_like(logits)
    counter, key = np.zeros((4, 1), dtype=np.uint64), np.zeros((2, 1), dtype=np.uint64)
    cpu_sampling_random.philox4x32(counter.ctypes.data, key.ctypes.data, 1)
    cpu_sampling.edit_rows(cpu_sampling.row_addresses(logits, [0]), [[]], copies)
    rows = cpu_sampling.row_addresses(copies, [0])
    cpu_sampling.draw_tokens(rows, vocab_size, np.array([cpu_sampling.draw_settings(SamplingParams())]), [None], rows)
    cpu_sampling.logprobs(rows, vocab_size, [0], [1])


def _marker(*kinds: torch.dtype | str) -> Path:
    return Path(numba.config.CACHE_DIR or ".") / "-".join(["compiled", *(str(kind).removeprefix("torch.") for kind in kinds)])


def _mark(marker: Path) -> None:
    if not entry.keeps():
        return
    with contextlib.suppress(OSError):  # a cache that can't be written: numba compiles again next time, and says nothing either
        marker.touch()
