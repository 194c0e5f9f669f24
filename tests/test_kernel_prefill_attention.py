"""prefill_attention.cu, emulated, against the formula in fp32 from the same numbers, a sequence at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from emulation.compare import random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, reference
from nanovllm_cli.kernels import prefill_attention as kernel

pytestmark = needs_emulation
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
QUERIES = (1, 2, 7, 16, 17, 33, 64, 65, 100)
PREFIXES = (130, 0, 37, 5, 16, 0, 130, 16, 5)


class Case(NamedTuple):
    """Sequences over a paged cache; what no sequence may read is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    starts: np.ndarray
    lens: np.ndarray
    tables: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor] | None


def case(
    queries: tuple[int, ...],
    prefixes: tuple[int, ...],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
) -> Case:
    """The blocks of all sequences are shuffled, tables are wider than needed."""
    lens = np.array(queries) + np.array(prefixes)
    counts = -(-lens // block_size)
    total = int(counts.sum()) + 3
    shape = (total, kv_heads, block_size, dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=kv_dtype or dtype) for _ in range(2))
    scales = (torch.rand(kv_heads) + 0.5, torch.rand(kv_heads) + 0.5) if kv_dtype == FP8 else None
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
    tables = torch.zeros(len(lens), int(counts.max()) + 2, dtype=torch.int32)
    keys, values = [], []
    for seq, (length, count) in enumerate(zip(lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[seq, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache, kept in ((k_cache, keys), (v_cache, values)):
            numbers = random(int(length), kv_heads, dim).to(cache.dtype)
            for i, block in enumerate(blocks):
                rows = numbers[i * block_size : (i + 1) * block_size]
                cache[block, :, : len(rows)] = rows.transpose(0, 1)
            scale = 1.0 if scales is None else scales[0 if cache is k_cache else 1][:, None]
            kept.append(numbers.float() * scale)
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    q = random(int(starts[-1]), heads, dim, dtype=dtype)
    return Case(q, k_cache, v_cache, starts, lens.astype(np.int32), tables, keys, values, scales)


def run(
    case: Case,
    emulator: Emulator,
    window: int = 0,
    deterministic: bool = False,
    split_keys: int = kernel.SPLIT_KEYS,
    counters: torch.Tensor | None = None,
    **options,
) -> torch.Tensor:
    heads, dim = case.q.shape[1:]
    work = kernel.prefill_tiles(
        emulator, case.starts, case.lens, heads, case.k_cache.shape[1], dim, case.q.dtype, case.k_cache.dtype,
        window=window, deterministic=deterministic, split_keys=split_keys,
    )  # fmt: skip
    counters = kernel.new_counters(emulator) if counters is None else counters
    k_scale, v_scale = case.scales or (None, None)
    out = kernel.prefill_attention(
        emulator, case.q, case.k_cache, case.v_cache, work, case.tables, counters,
        scale=dim**-0.5, k_scale=k_scale, v_scale=v_scale, **options,
    )  # fmt: skip
    assert not counters.any()
    return out


def expected(case: Case, window: int = 0, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula's result, and that for |v|."""
    results: list[list[torch.Tensor]] = [[], []]
    for seq, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[case.starts[seq] : case.starts[seq + 1]].float()
        first = len(keys) - len(q)
        for result, v in zip(results, (values, values.abs()), strict=True):
            result.append(reference.attention(q, keys, v, first, q.shape[-1] ** -0.5, window, **options).flatten(1))
    return torch.cat(results[0]), torch.cat(results[1])


def assert_close(case: Case, got: torch.Tensor, window: int = 0, **options) -> None:
    """One rounding of the output; before it each weight is rounded to the same type once."""
    wanted, size = expected(case, window, **options)
    step = 2.0**-8 if got.dtype == BF16 else 2.0**-11
    error = (got.float() - wanted).abs()
    allowed = step * (wanted.abs() + size) + 2e-5 * size
    wrong = ~(error <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"


SMALL = ((1, 17, 35, 2), (130, 5, 0, 37))
# queries, prefixes, heads, kv_heads, head_dim, dtype, kv_dtype, block_size; then capability
SHAPES = [
    (QUERIES, PREFIXES, 4, 2, 64, BF16, None, 16, 90),
    (*SMALL, 3, 1, 64, BF16, None, 16, 90),
    (*SMALL, 2, 2, 64, BF16, None, 16, 90),
    (*SMALL, 8, 1, 80, FP16, None, 32, 80),
    (*SMALL, 4, 1, 96, BF16, None, 16, 86),
    (*SMALL, 2, 1, 128, FP16, None, 16, 89),
    ((1, 20), (40, 0), 4, 2, 256, BF16, None, 16, 80),
    (*SMALL, 3, 1, 100, FP16, None, 16, 75),
    (*SMALL, 4, 2, 64, BF16, FP8, 16, 90),
    (*SMALL, 2, 1, 40, FP16, FP8, 16, 80),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=[f"{s[4]}-{s[5]}-{s[6]}-{s[2]}x{s[3]}".replace("torch.", "") for s in SHAPES])
def test_attention_is_close_to_the_formula(shape: tuple, order: int) -> None:
    *sizes, capability = shape
    sequences = case(*sizes)
    assert_close(sequences, run(sequences, Emulator(order, capability)))
