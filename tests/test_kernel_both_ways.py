"""prefill_attention.cu where a query sees the keys behind its own, too, emulated, against the formula from the same numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.kernels import prefill_attention as kernel
from test_kernel_prefill_attention import BF16, FP8, FP16, Case, assert_close, case, run

pytestmark = needs_emulation
TEXTS = (1, 2, 7, 16, 17, 33, 64, 65, 100)
SINKS = torch.tensor([0.5, -3.0, 4.0, 0.0])


def whole(*lens: int, **options: Any) -> Case:
    """Texts that are computed in one go: nothing of theirs is cached before."""
    sizes = {"heads": 4, "kv_heads": 2, "dim": 64, "dtype": BF16} | options
    return case(lens, (0,) * len(lens), **sizes)


# texts, heads, kv_heads, head_dim, dtype, kv_dtype, block_size, capability
SHAPES = [
    (TEXTS, 4, 2, 64, BF16, None, 16, 90),
    ((1, 35, 70), 3, 1, 64, BF16, None, 16, 90),
    ((1, 35, 70), 2, 2, 32, FP16, None, 16, 75),
    ((17, 66), 8, 1, 80, FP16, None, 32, 80),
    ((5, 50), 2, 1, 128, FP16, None, 16, 89),
    ((1, 40), 2, 1, 256, BF16, None, 16, 80),
    ((1, 35, 70), 4, 2, 64, BF16, FP8, 16, 90),
    ((3, 41), 4, 2, 320, BF16, None, 16, 80),
    ((1, 41), 2, 1, 512, BF16, FP8, 16, 90),
    ((1, 41), 2, 2, 512, FP16, None, 16, 75),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=[f"{s[3]}-{s[4]}-{s[5]}-{s[1]}x{s[2]}".replace("torch.", "") for s in SHAPES])
def test_a_text_sees_all_of_itself(shape: tuple, order: int) -> None:
    texts, *sizes, capability = shape
    sequences = case(texts, (0,) * len(texts), *sizes)
    assert_close(sequences, run(sequences, Emulator(order, capability), both_ways=True), both_ways=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 2}, {"window": 20}, {"window": 64}, {"window": 30, "softcap": 5.0, "sinks": SINKS}],
    ids=["1", "2", "20", "64", "all"],
)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_a_window_lies_on_either_side(options: dict, kv_dtype: torch.dtype | None, order: int) -> None:
    sequences = whole(1, 17, 35, 150, kv_dtype=kv_dtype)
    assert_close(sequences, run(sequences, Emulator(order), both_ways=True, **options), both_ways=True, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("window", "kv_dtype"), [(9, None), (20, FP8)])
def test_a_window_of_heads_that_warps_share(window: int, kv_dtype: torch.dtype | None, order: int) -> None:
    sequences, options = whole(1, 45, dim=512, kv_dtype=kv_dtype), {"window": window, "sinks": SINKS, "both_ways": True}
    assert_close(sequences, run(sequences, Emulator(order), **options), **options)


def test_tokens_behind_a_cached_part_see_it_and_each_other() -> None:
    sequences = case((3, 20), (40, 7), 4, 2, 64, BF16)
    for window in (0, 15):
        assert_close(sequences, run(sequences, Emulator(), window, both_ways=True), window, both_ways=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_texts_are_divided(deterministic: bool, window: int, order: int) -> None:
    """Over 16 multiprocessors; on one, a deterministic item walks through all splits."""
    sequences = whole(330, 20, heads=2, kv_heads=1)
    emulator, options = Emulator(order, num_multiprocessors=16), {"window": window, "both_ways": True}
    got = run(sequences, emulator, deterministic=deterministic, split_keys=64, **options)
    assert_close(sequences, got, **options)
    if deterministic:
        alone = Emulator(order, num_multiprocessors=1)
        assert torch.equal(got, run(sequences, alone, deterministic=True, split_keys=64, **options))


def only(sequences: Case, seq: int) -> Case:
    first, last = sequences.starts[seq : seq + 2]
    return sequences._replace(
        q=sequences.q[first:last].contiguous(),
        starts=np.array([0, last - first], np.int32),
        lens=sequences.lens[seq : seq + 1],
        tables=sequences.tables[seq : seq + 1].contiguous(),
    )


@pytest.mark.parametrize(("dim", "window"), [(64, 0), (64, 100), (512, 0)])
def test_deterministic_bits_do_not_depend_on_the_texts_beside(dim: int, window: int) -> None:
    sequences = whole(1, 190, 33, heads=3, kv_heads=1, dim=dim)
    sequences.q[..., 0], sequences.k_cache[..., 0] = 64, 100  # large scores, whose products with the scale are rounded
    options = {"deterministic": True, "split_keys": 64, "both_ways": True, "window": window}
    together = run(sequences, Emulator(num_multiprocessors=4), **options)
    for seq, (first, last) in enumerate(itertools.pairwise(sequences.starts)):
        assert torch.equal(run(only(sequences, seq), Emulator(num_multiprocessors=64), **options), together[first:last])


def test_items_end_where_their_rows_see_no_further() -> None:
    starts, lens = np.array([0, 300, 301, 365]), np.array([300, 9000, 64])
    for window, deterministic in itertools.product((0, 1, 50, 4000), (False, True)):
        work = kernel.prefill_tiles(
            Emulator(num_multiprocessors=8), starts, lens, 8, 2, 128, BF16, BF16,
            window=window, both_ways=True, deterministic=deterministic,
        )  # fmt: skip
        seen: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for seq, _, position, row, rows, begin, end, *_, last_key in work.items.tolist():
            assert last_key == lens[seq] - 1
            assert position == lens[seq] - (starts[seq + 1] - starts[seq])
            seen.setdefault((seq, row, rows), []).append((begin, end))
        for (seq, row, rows), ranges in seen.items():
            first = lens[seq] - (starts[seq + 1] - starts[seq]) + row // 4
            last = first + (row % 4 + rows - 1) // 4
            ranges.sort()
            assert ranges[0][0] == (max(0, first + 1 - window) if window else 0)
            assert ranges[-1][1] == (min(lens[seq], last + window) if window else lens[seq])
            assert all(a[1] == b[0] and a[1] % 64 == 0 for a, b in itertools.pairwise(ranges))


def differs(sequences: Case, bug: str, **options: Any) -> bool:
    try:
        assert_close(sequences, run(sequences, Emulator(bugs=(bug,)), both_ways=True, **options), both_ways=True, **options)
    except (KernelFailed, AssertionError):
        return True
    return False


@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize(
    ("bug", "window"), [("CAUSAL", 0), ("CAUSAL", 9), ("PAST_THE_END", 0), ("PAST_THE_END", 9), ("NO_MASK", 9)]
)
def test_a_planted_bug_is_found(bug: str, window: int, dim: int) -> None:
    assert differs(whole(35, 20, dim=dim), bug, window=window)


@pytest.mark.parametrize("dim", [64, 512])
def test_tiles_of_keys_that_end_at_the_causal_limit_are_found(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, divided = whole(90, dim=dim), kernel.prefill_tiles

    def too_short(*args: Any, both_ways: bool, **options: Any) -> kernel.PrefillWork:
        return divided(*args, **options)._replace(ahead=kernel.EVERY_KEY)

    assert_close(sequences, run(sequences, Emulator(), both_ways=True), both_ways=True)
    monkeypatch.setattr(kernel, "prefill_tiles", too_short)
    with pytest.raises(AssertionError):
        assert_close(sequences, run(sequences, Emulator(), both_ways=True), both_ways=True)
