"""prefill_attention.cu, emulated, against the formula in fp32 from the same numbers, a sequence at a time."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from emulation.compare import random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, reference
from nanovllm_cli.kernels import prefill_attention as kernel
from nanovllm_cli.kernels.kernel import SHARED_KIB, largest_shared_bytes

pytestmark = needs_emulation
BF16, FP16, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
QUERIES = (1, 2, 7, 16, 17, 33, 64, 65, 100)
PREFIXES = (130, 0, 37, 5, 16, 0, 130, 16, 5)


class Case(NamedTuple):
    """Sequences over a paged cache; what no sequence may read is NaN, or has a scale of NaN."""

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
    filled = 99 if kv_dtype == INT8 else float("nan")
    k_cache, v_cache = (torch.full(shape, filled, dtype=kv_dtype or dtype) for _ in range(2))
    scales = (torch.rand(kv_heads) + 0.5, torch.rand(kv_heads) + 0.5) if kv_dtype == FP8 else None
    if kv_dtype == INT8:
        scales = torch.full(shape[:3], torch.nan), torch.full(shape[:3], torch.nan)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
    tables = torch.zeros(len(lens), int(counts.max()) + 2, dtype=torch.int32)
    keys, values = [], []
    for seq, (length, count) in enumerate(zip(lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[seq, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache, kept in ((k_cache, keys), (v_cache, values)):
            numbers, side = random(int(length), kv_heads, dim), 0 if cache is k_cache else 1
            of_rows = None
            if kv_dtype == INT8:
                numbers, of_rows = reference.int8_rows(numbers * 10 ** ((0.2, 0.7)[side] * random(int(length), kv_heads, 1)))
            numbers = numbers.to(cache.dtype)
            for i, block in enumerate(blocks):
                part = slice(i * block_size, (i + 1) * block_size)
                cache[block, :, : len(numbers[part])] = numbers[part].transpose(0, 1)
                if of_rows is not None and scales is not None:
                    scales[side][block, :, : len(numbers[part])] = of_rows[part].T
            scale = 1.0 if scales is None else scales[side][:, None] if of_rows is None else of_rows[..., None]
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
    both_ways: bool = False,
    chunk: int = 0,
    counters: torch.Tensor | None = None,
    **options,
) -> torch.Tensor:
    heads, dim = case.q.shape[1:]
    work = kernel.prefill_tiles(
        emulator, case.starts, case.lens, heads, case.k_cache.shape[1], dim, case.q.dtype, case.k_cache.dtype,
        window=window, chunk=chunk, both_ways=both_ways, deterministic=deterministic, split_keys=split_keys,
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
    """One rounding of the output; before it each weight is rounded to that type, and what int8 becomes, which moves scores."""
    wanted, size = expected(case, window, **options)
    size = 3 * size if case.k_cache.dtype == INT8 else size
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
    (*SMALL, 4, 2, 16, BF16, FP8, 16, 90),
    (*SMALL, 2, 1, 40, FP16, FP8, 16, 80),
    (*SMALL, 2, 1, 40, FP16, INT8, 32, 80),
    ((1, 20), (40, 5), 3, 1, 128, BF16, INT8, 64, 86),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "shape", SHAPES, ids=[f"{s[4]}-{s[5]}-{s[6]}-{s[2]}x{s[3]}".replace("torch.", "") for s in SHAPES]
)
def test_attention_is_close_to_the_formula(shape: tuple, order: int) -> None:
    *sizes, capability = shape
    sequences = case(*sizes)
    assert_close(sequences, run(sequences, Emulator(order, capability)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kv_dtype", "options"),
    [*((kv_dtype, options) for options in (
        {"window": 20},
        {"window": 1},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -3.0, 4.0, 0.0])},
        {"window": 70, "softcap": 5.0, "sinks": torch.tensor([2.0, 0.0, -1.0, 1.0])},
        {"distances": random(4, 2 * 140 + 64)},
        {"distances": random(4, 2 * 167 + 64), "both_ways": True},
    ) for kv_dtype in (None, FP8)), (INT8, {"window": 70, "softcap": 5.0}), (INT8, {"distances": random(4, 2 * 140 + 64)})],
    ids=lambda what: " ".join(str(value) if key != "distances" else key for key, value in what.items())
    if isinstance(what, dict) else str(what),
)  # fmt: skip
def test_window_softcap_and_sinks(options: dict, kv_dtype: torch.dtype | None, order: int) -> None:
    sequences = case(*SMALL, 4, 2, 64, BF16, kv_dtype)
    assert_close(sequences, run(sequences, Emulator(order), **options), **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"window": 300, "sinks": torch.tensor([1.0, -2.0])}], ids=["plain", "window"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_caches_are_divided_and_counters_are_ready_for_the_next_launch(
    deterministic: bool, options: dict, order: int
) -> None:
    """Divided over 16 multiprocessors; on one, a deterministic item walks through all splits."""
    sequences = case((1, 3, 18), (640, 400, 300), 2, 1, 64, BF16)
    emulator = Emulator(order, num_multiprocessors=16)
    counters = kernel.new_counters(emulator)
    for _ in range(2):
        got = run(sequences, emulator, deterministic=deterministic, split_keys=256, counters=counters, **options)
        assert_close(sequences, got, **options)
    if deterministic:
        assert torch.equal(
            got, run(sequences, Emulator(order, num_multiprocessors=1), deterministic=True, split_keys=256, **options)
        )


def chunk(whole: Case, seq: int, begin: int, end: int) -> Case:
    """One sequence's tokens from begin to end, alone, as a chunk over the same cache; its table is narrower."""
    first = int(whole.starts[seq])
    length = int(whole.lens[seq]) - (int(whole.starts[seq + 1]) - first) + end
    return whole._replace(
        q=whole.q[first + begin : first + end].contiguous(),
        starts=np.array([0, end - begin], np.int32),
        lens=np.array([length], np.int32),
        tables=whole.tables[seq : seq + 1, : -(-length // 16)].contiguous(),
    )


def bits_depend_on_the_sequence_alone(bugs: tuple[str, ...] = (), **options) -> bool:
    sequences = case((70, 30), (330, 30), 3, 1, 64, BF16)
    sequences.q[..., 0], sequences.k_cache[..., 0] = (
        64,
        100,
    )  # large scores: their products with the scale have rounding errors
    options |= {"deterministic": True, "split_keys": 192}
    whole = run(sequences, Emulator(num_multiprocessors=1, bugs=bugs), **options)
    for multiprocessors, cuts in ((1, (0, 1, 2, 19, 69, 70)), (64, (0, 33, 70)), (64, (0, 5, 69, 70))):
        emulator = Emulator(num_multiprocessors=multiprocessors, bugs=bugs)
        chunks = [run(chunk(sequences, 0, *cut), emulator, **options) for cut in itertools.pairwise(cuts)]
        if not torch.equal(torch.cat(chunks), whole[:70]):
            return False
    return True


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 300, "softcap": 8.0, "sinks": torch.tensor([1.0, 0.0, -1.0])}, {"distances": random(3, 2 * 400 + 64)}],
    ids=["plain", "all", "by distance"],
)
def test_bits_depend_on_neither_batch_nor_chunks_nor_the_number_of_multiprocessors(options: dict) -> None:
    assert bits_depend_on_the_sequence_alone(**options)


def test_a_rescaling_by_nearly_one_is_found() -> None:
    assert not bits_depend_on_the_sequence_alone(("INEXACT_RESCALING",))


def test_padding_rows_of_a_static_batch_are_zeros() -> None:
    sequences = case((1, 5), (20, 0), 2, 1, 64, BF16)
    padded = sequences._replace(
        q=torch.cat((sequences.q, torch.full_like(sequences.q[:2], float("nan")))),
        starts=np.append(sequences.starts, (7, 8)).astype(np.int32),
        lens=np.append(sequences.lens, (0, 0)).astype(np.int32),
        tables=torch.nn.functional.pad(sequences.tables, (0, 0, 0, 2)),
    )
    for sinks in (None, torch.ones(2)):
        got = run(padded, Emulator(), sinks=sinks)
        assert not got[6:].any()
        assert_close(sequences, got[:6], sinks=sinks)


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    nothing = case((1,), (3,), 2, 1, 64, BF16)._replace(
        q=torch.empty(0, 2, 64, dtype=BF16), starts=np.zeros(2, np.int32), lens=np.array([4], np.int32)
    )
    assert run(nothing, emulator).shape == (0, 128)
    assert not emulator.launches


def test_each_row_and_key_has_one_item_and_the_longest_come_first() -> None:
    for deterministic, multiprocessors in itertools.product((False, True), (1, 8, 132)):
        emulator = Emulator(num_multiprocessors=multiprocessors)
        starts, lens = np.array([0, 300, 301, 365]), np.array([5000, 9000, 64])
        work = kernel.prefill_tiles(
            emulator, starts, lens, 8, 2, 128, BF16, BF16, window=4000, deterministic=deterministic
        )
        items = work.items.numpy()
        seen = {}
        for seq, token, position, row, rows, begin, end, *_ in items.tolist():
            assert token == starts[seq]
            assert position == lens[seq] - (starts[seq + 1] - starts[seq])
            seen.setdefault((seq, row, rows), []).append((begin, end))
        for seq in range(3):
            rows = sorted((row, count) for number, row, count in seen if number == seq)
            assert [row for row, _ in rows] == [sum(count for _, count in rows[:i]) for i in range(len(rows))]
            assert sum(count for _, count in rows) == 4 * (starts[seq + 1] - starts[seq])
        for (seq, row, rows), ranges in seen.items():
            first = lens[seq] - (starts[seq + 1] - starts[seq]) + row // 4
            ranges.sort()
            assert ranges[0][0] == max(0, first + 1 - 4000)
            assert ranges[-1][1] == first + (row % 4 + rows - 1) // 4 + 1
            assert all(a[1] == b[0] and a[1] % 64 == 0 for a, b in itertools.pairwise(ranges))
        lengths = items[:, 6] - items[:, 5]
        assert (np.diff(lengths) <= 0).all()
        assert (items[items[:, 9] > 1, 10].max(initial=-1) + 1) * 2 <= kernel.new_counters(emulator).numel()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_query_sees_its_chunk_alone(deterministic: bool) -> None:
    """The same as of the formula with what is before the chunk cut off, a query at a time."""
    sequences = case((1, 1, 65, 150), (63, 64, 100, 0), 4, 2, 64, BF16)
    got = run(sequences, Emulator(num_multiprocessors=8), chunk=64, deterministic=deterministic)
    for seq, (keys, values) in enumerate(zip(sequences.keys, sequences.values, strict=True)):
        first, end = sequences.starts[seq : seq + 2]
        for row in range(first, end):
            position = len(keys) - (end - row)
            seen = slice(position // 64 * 64, position + 1)
            wanted = reference.attention(sequences.q[row][None].float(), keys[seen], values[seen], position % 64, 0.125)
            torch.testing.assert_close(got[row], wanted.flatten().to(BF16), rtol=2.0**-7, atol=2e-2)


def test_windows_that_begin_anywhere_leave_room_in_the_counters() -> None:
    emulator = Emulator(num_multiprocessors=46)
    room = kernel.new_counters(emulator).numel()
    for tokens, window, first in itertools.product((1, 3), range(129, 1100, 97), range(1, 64, 7)):
        heads = room // tokens + 1  # tiles for a little more than one round
        starts, lens = np.array([0, 128 * tokens]), np.array([2048 + first + 128 * tokens])
        work = kernel.prefill_tiles(emulator, starts, lens, heads, heads, 64, BF16, BF16, window=window)
        items = work.items.numpy()
        assert (items[items[:, 9] > 1, 10].max(initial=-1) + 1) * heads <= room


@pytest.mark.parametrize("bug", ["NO_BARRIER", "NO_WAIT", "NEXT_PAGE", "NO_MASK", "NO_TAIL", "NO_RESET", "DISTANCE"])
def test_a_planted_bug_is_found(bug: str) -> None:
    sequences = case((1, 35), (400, 90), 2, 1, 64, BF16)
    found, options = False, {"distances": random(2, 2 * 490 + 64)} if bug == "DISTANCE" else {}
    for order in ORDERS:
        try:
            assert_close(sequences, run(sequences, Emulator(order, num_multiprocessors=16, bugs=(bug,)), **options), **options)
        except (KernelFailed, AssertionError):
            found = True
    assert found


@pytest.mark.parametrize("bugs", [(), ("INT_OVERFLOW",)])
def test_a_cache_of_more_than_2_to_the_32_elements(bugs: tuple[str, ...]) -> None:
    """In 32 bits its last blocks are its first ones, which are zeros. Memory is resident where it is written."""
    sequences = case((3,), (20,), 1, 1, 64, BF16, FP8)
    blocks = 2**32 // (16 * 64) + 8
    caches = [cpu.zeros(blocks * 16 * 64, FP8).view(blocks, 1, 16, 64) for _ in range(2)]
    for large, small in zip(caches, (sequences.k_cache, sequences.v_cache), strict=True):
        for i in range(2):
            large[blocks - 2 + i] = small[sequences.tables[0, i]]
    far = sequences._replace(
        k_cache=caches[0], v_cache=caches[1], tables=torch.tensor([[blocks - 2, blocks - 1]]).int()
    )
    got = run(far, Emulator(bugs=bugs))
    if bugs:
        with pytest.raises(AssertionError):
            assert_close(sequences, got)
    else:
        assert_close(sequences, got)


@pytest.mark.parametrize(
    "bad",
    [
        lambda c: {"q": c.q.float()},
        lambda c: {"q": c.q.half()},
        lambda c: {"q": c.q.transpose(0, 1).contiguous().transpose(0, 1)},
        lambda c: {"q": c.q[:, :, :62].contiguous()},
        lambda c: {"v_cache": c.v_cache[1:].clone()},
        lambda c: {"v_cache": c.v_cache.half()},
        lambda c: {"k_cache": c.k_cache.transpose(1, 2)},
        lambda c: {"k_cache": c.k_cache[:, :, :8].contiguous(), "v_cache": c.v_cache[:, :, :8].contiguous()},
        lambda c: {"tables": c.tables.long()},
        lambda c: {"scales": (torch.ones(2), torch.ones(2))},
    ],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    sequences = case((3,), (20,), 4, 2, 64, BF16)
    with pytest.raises((AssertionError, KeyError)):
        run(sequences._replace(**bad(sequences)), Emulator())


def test_fp8_needs_its_scales() -> None:
    sequences = case((3,), (20,), 4, 2, 64, BF16, FP8)
    with pytest.raises(AssertionError):
        run(sequences._replace(scales=None), Emulator())


@pytest.mark.parametrize(
    ("dim", "dtype", "capability", "word"), [(64, BF16, 75, "float16"), (514, BF16, 90, "512"), (65, FP16, 90, "65")]
)
def test_what_no_tiling_takes_is_refused(dim: int, dtype: torch.dtype, capability: int, word: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        run(case((1,), (3,), 1, 1, dim, dtype), Emulator(capability=capability))
    assert word in refused.value.message + str(refused.value.hint)


@pytest.mark.parametrize("capability", [*SHARED_KIB, 122])
def test_tiles_fit_the_shared_memory_of_a_block(capability: int) -> None:
    most = (SHARED_KIB.get(capability, 100) - (capability >= 80)) << 10  # 122: a GPU newer than the table
    assert largest_shared_bytes(capability) == most
    for dim in range(2, 514, 2):
        for kv_dtype in (FP16, FP8):
            tile = kernel.tiling(capability, dim, FP16, kv_dtype)
            assert tile.shared_bytes <= most
            assert kernel.KEY_ALIGNMENT % tile.keys == 0
