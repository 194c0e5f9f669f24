"""prefill_attention.cu for heads whose sums several warps share (prefill_parts.cuh), emulated, against the formula in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from emulation.compare import random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.kernels import prefill_attention as kernel
from test_kernel_prefill_attention import BF16, FP8, FP16, INT8, Case, case, chunk, run

pytestmark = needs_emulation


def expected(
    sequences: Case,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    distances: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The formula's result in float64, and that for |v|, [T, H * D]."""
    results: list[list[torch.Tensor]] = [[], []]
    for (begin, end), *cached in zip(itertools.pairwise(sequences.starts), sequences.keys, sequences.values, strict=True):
        q = sequences.q[begin:end].double()
        keys, values = (each.double().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in cached)
        scores = torch.einsum("thd,lhd->htl", q, keys) * q.shape[2] ** -0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
        if distances is not None:
            scores += distances[:, (distances.shape[1] - 64) // 2 - distance]
        scores[:, (distance < 0) | (distance >= (window or len(keys)))] = -torch.inf
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
        weights = scores.softmax(2)[..., : len(keys)]
        for result, v in zip(results, (values, values.abs()), strict=True):
            result.append(torch.einsum("htl,lhd->thd", weights, v).flatten(1))
    return [torch.cat(result) for result in results]


def assert_close(sequences: Case, got: torch.Tensor, **options: Any) -> None:
    """One rounding of the output; before it each weight is rounded to that type, and what int8 becomes, which moves scores."""
    wanted, size = expected(sequences, **options)
    size = 3 * size if sequences.k_cache.dtype == INT8 else size
    step = 2.0**-8 if got.dtype == BF16 else 2.0**-11
    wrong = ~((got.double() - wanted).abs() <= step * (wanted.abs() + size) + 2e-5 * size)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"


SMALL = ((1, 17, 35, 2), (130, 5, 0, 37))
TINY = ((1, 20), (40, 0))
# queries, prefixes, heads, kv_heads, head_dim, dtype, kv_dtype, block_size; then capability
SHAPES = [
    (*SMALL, 8, 1, 512, BF16, None, 16, 90),
    (*SMALL, 3, 1, 512, BF16, FP8, 16, 90),
    (*SMALL, 3, 1, 512, FP16, None, 16, 75),
    (*TINY, 2, 2, 512, FP16, FP8, 16, 75),
    ((64, 5), (64, 3), 1, 1, 512, BF16, None, 64, 80),
    (*TINY, 4, 2, 512, BF16, FP8, 32, 86),
    ((16, 33, 7, 1), (16, 0, 70, 64), 2, 1, 512, BF16, None, 16, 89),
    ((3, 9), (300, 129), 16, 1, 512, BF16, None, 16, 120),
    (*SMALL, 4, 2, 320, BF16, None, 16, 80),
    (*TINY, 4, 1, 320, FP16, FP8, 16, 90),
    (*TINY, 3, 1, 300, FP16, None, 16, 86),
    (*TINY, 2, 1, 258, BF16, FP8, 16, 80),
    (*TINY, 3, 1, 512, BF16, INT8, 16, 90),
    (*TINY, 2, 1, 320, FP16, INT8, 32, 80),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "shape", SHAPES, ids=[f"{s[4]}-{s[5]}-{s[6]}-{s[2]}x{s[3]}-{s[8]}".replace("torch.", "") for s in SHAPES]
)
def test_attention_is_close_to_the_formula(shape: tuple, order: int) -> None:
    *sizes, capability = shape
    sequences = case(*sizes)
    assert_close(sequences, run(sequences, Emulator(order, capability)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"window": 1},
        {"window": 70, "softcap": 5.0, "sinks": torch.tensor([2.0, 0.0, -1.0, 1.0])},
        {"distances": random(4, 2 * 41 + 64)},
    ],
    ids=["20", "1", "all", "by distance"],
)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_window_softcap_and_sinks(options: dict, kv_dtype: torch.dtype | None, order: int) -> None:
    sequences = case(*TINY, 4, 2, 512, BF16, kv_dtype)
    assert_close(sequences, run(sequences, Emulator(order), **options), **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_caches_are_divided_and_counters_are_ready_for_the_next_launch(deterministic: bool, order: int) -> None:
    """Divided over 16 multiprocessors; on one, a deterministic item walks through all splits."""
    sequences, options = case((1, 3, 18), (400, 300, 260), 2, 1, 512, BF16), {"window": 290, "sinks": torch.tensor([1.0, -2.0])}
    emulator, settings = Emulator(order, 86, num_multiprocessors=16), {"deterministic": deterministic, "split_keys": 128}
    counters = kernel.new_counters(emulator)
    for _ in range(2):
        got = run(sequences, emulator, counters=counters, **settings, **options)
        assert_close(sequences, got, **options)
    if deterministic:
        assert torch.equal(got, run(sequences, Emulator(order, 86, num_multiprocessors=1), **settings, **options))


def bits_depend_on_the_sequence_alone(kv_dtype: torch.dtype | None, bugs: tuple[str, ...] = (), order: int = 0) -> bool:
    sequences = case((40, 30), (200, 30), 3, 1, 512, BF16, kv_dtype)
    sequences.q[..., 0] = 64  # large scores: their products with the scale have rounding errors
    sequences.k_cache[..., 0] = 100
    options = {"deterministic": True, "split_keys": 64, "softcap": 50.0, "sinks": torch.tensor([1.0, 0.0, -1.0])}
    whole = run(sequences, Emulator(order, 86, num_multiprocessors=1, bugs=bugs), **options)
    for multiprocessors, cuts in ((1, (0, 1, 2, 13, 39, 40)), (64, (0, 23, 40)), (64, (0, 5, 39, 40))):
        emulator = Emulator(order, 86, num_multiprocessors=multiprocessors, bugs=bugs)
        chunks = [run(chunk(sequences, 0, *cut), emulator, **options) for cut in itertools.pairwise(cuts)]
        if not torch.equal(torch.cat(chunks), whole[:40]):
            return False
    return True


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_bits_depend_on_neither_batch_nor_chunks_nor_the_number_of_multiprocessors(kv_dtype: torch.dtype | None) -> None:
    assert bits_depend_on_the_sequence_alone(kv_dtype)


def test_a_rescaling_by_nearly_one_is_found() -> None:
    assert not bits_depend_on_the_sequence_alone(None, ("INEXACT_RESCALING",))


BUGS = ["NO_BARRIER", "NO_SCORES", "NO_WEIGHTS", "NO_SUMS", "NO_WAIT", "NO_WAIT_FOR_VALUES"]
BUGS += ["NEXT_PAGE", "NO_MASK", "NO_TAIL", "NO_RESET"]


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, kv_dtype: torch.dtype | None) -> None:
    """In ranges that one item adds up, and in those of several."""
    if bug == "NO_TAIL" and kv_dtype:
        pytest.skip("no number of an 8-bit cache is a NaN on its way")
    sequences, found = case((1, 15), (330, 90), 3, 1, 512, BF16, kv_dtype), False
    for order in ORDERS:
        try:
            assert_close(sequences, run(sequences, Emulator(order, 86, 16, (bug,)), deterministic=True, split_keys=64))
        except (KernelFailed, AssertionError):
            found = True
    assert found
