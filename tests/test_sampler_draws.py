"""Which tokens the filters keep, and which of them a random number hits: by definition, by transformers, and to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from nanovllm_cli.kernels import cpu, cpu_sampling
from nanovllm_cli.kernels.cpu_sampling import RowLogprobs
from nanovllm_cli.kernels.cpu_sampling_rows import LISTED, NOT_FINITE, NOTHING_LEFT, UNIFORM, XTC_THRESHOLD
from nanovllm_cli.sampling_params import SamplingParams
from sampler_reference import NearTie, distribution, exact_draw, exact_edits, exact_weights, masked, softmax

Row = NDArray[np.float32]


def row(size: int, seed: int, scale: float = 3.0) -> Row:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def setting(params: SamplingParams, uniform: float, exclude_top: bool) -> list[float]:
    values = cpu_sampling.draw_settings(params)
    values[UNIFORM], values[XTC_THRESHOLD] = uniform, params.xtc_threshold if exclude_top else 0.0
    return values


def draw_token(logits: Row, params: SamplingParams, uniform: float, exclude_top: bool) -> int:
    rows = cpu_sampling.row_addresses(logits[None], [0])
    table = np.array([setting(params, uniform, exclude_top)])
    drawn: int = cpu_sampling.draw_tokens(rows, len(logits), table, [None], rows)[0][0]
    return drawn


def row_logprobs(logits: Row, token_id: int, num_top: int) -> RowLogprobs:
    rows = cpu_sampling.row_addresses(logits[None], [0])
    (found,) = cpu_sampling.logprobs(rows, len(logits), [token_id], [num_top])
    assert found is not None
    return found


def most_likely(logits: Row, count: int) -> list[int]:
    return row_logprobs(logits, 0, count).top_ids


def check_draws(logits: Row, params: SamplingParams, exclude_top: bool, expected: NDArray[np.float64]) -> None:
    """Aim at both ends and the middle of each token's share of [0, 1), in order of ids."""
    ends = expected.cumsum()
    for token_id in np.flatnonzero(expected > 1e-5).tolist():
        start, width = ends[token_id] - expected[token_id], expected[token_id]
        for part in (0.03, 0.5, 0.97):
            drawn = draw_token(logits, params, start + part * width, exclude_top)
            assert drawn == token_id, (drawn, token_id, expected[drawn], width)


@st.composite
def filters(draw: st.DrawFn) -> SamplingParams:
    def sometimes(value: st.SearchStrategy[float], off: float) -> float:
        return draw(st.one_of(st.just(off), value))

    return SamplingParams(
        temperature=draw(st.sampled_from([1.0, 0.3, 0.8, 1.7, 5.0])),
        top_k=int(sometimes(st.integers(1, 60), 0)),
        top_p=sometimes(st.floats(0.01, 0.999), 1.0),
        min_p=sometimes(st.floats(0.001, 0.9), 0.0),
        top_n_sigma=sometimes(st.floats(0.1, 4), 0.0),
        typical_p=sometimes(st.floats(0.05, 0.99), 1.0),
        xtc_threshold=draw(st.floats(0.01, 0.5)),
    )


@settings(max_examples=150, deadline=None)
@given(params=filters(), exclude_top=st.booleans(), size=st.integers(1, 70), seed=st.integers(0, 999))
def test_any_mix_of_filters_keeps_what_their_definitions_keep(
    params: SamplingParams, exclude_top: bool, size: int, seed: int
) -> None:
    logits = row(size, seed)
    try:
        expected = distribution(logits, params, exclude_top)
    except NearTie:
        assume(False)
    check_draws(logits, params, exclude_top, expected)


@settings(max_examples=60, deadline=None)
@given(params=filters(), exclude_top=st.booleans(), seed=st.integers(0, 999), banned=st.floats(0, 0.95))
def test_equal_and_banned_logits_follow_the_same_definitions(
    params: SamplingParams, exclude_top: bool, seed: int, banned: float
) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(-3, 4, 60).astype(np.float32)
    logits[1:][random.random(59) < banned] = -np.inf
    params = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        top_n_sigma=params.top_n_sigma, xtc_threshold=params.xtc_threshold,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        try:
            expected = distribution(logits, params, exclude_top)
        except NearTie:
            assume(False)
        check_draws(logits, params, exclude_top, expected)


@pytest.mark.parametrize("size", [17, 2048, 2049, 33_000])
@pytest.mark.parametrize(
    ("warper", "params"),
    [
        (TopKLogitsWarper(7), SamplingParams(top_k=7)),
        (TopKLogitsWarper(200), SamplingParams(top_k=200)),
        (TopPLogitsWarper(0.3), SamplingParams(top_p=0.3)),
        (TopPLogitsWarper(0.9), SamplingParams(top_p=0.9)),
        (MinPLogitsWarper(0.05), SamplingParams(min_p=0.05)),
        (TypicalLogitsWarper(0.4), SamplingParams(typical_p=0.4)),
        (TypicalLogitsWarper(0.9), SamplingParams(typical_p=0.9)),
    ],
)
def test_each_filter_keeps_what_transformers_keeps(size: int, warper: object, params: SamplingParams) -> None:
    logits = row(size, size)
    warped = warper(torch.empty(1, 0, dtype=torch.int64), torch.from_numpy(logits)[None].double())  # type: ignore[operator]
    expected = softmax(warped[0].numpy())
    likely = np.where(expected > 1e-3, expected, 0)
    ends = expected.cumsum()
    for token_id in np.flatnonzero(likely).tolist():
        assert draw_token(logits, params, ends[token_id] - expected[token_id] / 2, False) == token_id
    drawn = {draw_token(logits, params, u, False) for u in np.random.default_rng(0).random(40)}
    assert all(expected[token_id] > 0 for token_id in drawn)


@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 8.0])
def test_the_nucleus_of_a_large_row_is_that_of_a_full_sort(scale: float, top_p: float) -> None:
    logits, params = row(40_000, 5, scale), SamplingParams(temperature=0.9, top_p=top_p)
    for uniform in (0.0, 0.3, 0.77, 1 - 2**-53):
        assert draw_token(logits, params, uniform, False) == exact_draw(logits, params, uniform, False)


@settings(max_examples=150, deadline=None)
@given(
    params=filters(), exclude_top=st.booleans(), size=st.sampled_from([1, 2, 63, 64, 65, 129, 700, 4095, 4097]),
    kind=st.sampled_from(["normal", "ties", "banned", "flat"]), seed=st.integers(0, 999), uniform=st.floats(0, 1 - 2**-53),
)  # fmt: skip
def test_a_draw_is_that_of_a_full_sort_in_integers(
    params: SamplingParams, exclude_top: bool, size: int, kind: str, seed: int, uniform: float
) -> None:
    logits = row(size, seed, 0.01 if kind == "flat" else 3.0)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "banned":
        logits[1:][np.random.default_rng(seed).random(size - 1) < 0.9] = -np.inf
    assert draw_token(logits, params, uniform, exclude_top) == exact_draw(logits, params, uniform, exclude_top)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_batch_are_drawn_each_by_its_own_settings(threads: int) -> None:
    random, logits = np.random.default_rng(0), np.stack([row(3001, seed) for seed in range(9)])
    logits[3, 70], logits[6] = np.nan, -np.inf
    which = [0, 8, 3, 3, 5, 6, 0, 1, 2, 4, 7]
    kinds = [
        {},
        {"top_k": 9},
        {"top_p": 0.7},
        {"typical_p": 0.6, "min_p": 0.01},
        {"temperature": 0, "top_n_sigma": 1.0},
        {"top_n_sigma": 1.5, "xtc_threshold": 0.05},
    ]
    asked = [(SamplingParams(**kinds[i % 6]), float(random.random()), i % 6 == 5) for i in range(len(which))]  # type: ignore[arg-type]
    cpu.set_num_threads(threads)
    rows, table = cpu_sampling.row_addresses(logits, which), np.array([setting(*each) for each in asked])
    drawn = cpu_sampling.draw_tokens(rows, 3001, table, [None] * len(which), rows)[0].tolist()
    for i, (found, (params, uniform, exclude_top)) in enumerate(zip(drawn, asked, strict=True)):
        if which[i] in (3, 6):
            assert found == (NOT_FINITE if which[i] == 3 else NOTHING_LEFT)
        elif params.is_greedy:
            assert found == logits[which[i]].argmax()
        else:
            assert found == exact_draw(logits[which[i]], params, uniform, exclude_top)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 95, 1000])
def test_rows_are_edited_in_order(size: int) -> None:
    random, logits = np.random.default_rng(size), np.stack([row(size, seed) for seed in range(6)])
    before = logits.copy()
    logits[4, size // 2] = np.inf
    which = [5, 0, 0, 4, 2, 3]
    edits = []
    for i in range(6):
        edits.append([cpu_sampling.no_change(random.integers(0, size, count)) for count in (0, i, 40)])
        for part in edits[-1]:
            part[:, 1:] = np.abs(random.standard_normal((len(part), 3))) + 0.1
            part[:1, 2] = np.inf
    copies = np.empty_like(logits)
    cpu_sampling.edit_rows(cpu_sampling.row_addresses(logits, which), edits, copies)
    for i, source in enumerate(which):
        if source == 4:
            assert np.isnan(copies[i, 0])
        else:
            assert np.array_equal(copies[i], exact_edits(before[source], edits[i]))


@settings(max_examples=100, deadline=None)
@given(
    params=filters(), exclude_top=st.booleans(), size=st.sampled_from([1, 31, 33, 64, 65, 129, 700, 4097]),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0]), num_words=st.integers(0, 130), seed=st.integers(0, 999),
    uniform=st.floats(0, 1 - 2**-53),
)  # fmt: skip
def test_a_draw_under_a_mask_is_that_of_what_it_allows(
    params: SamplingParams, exclude_top: bool, size: int, share: float, num_words: int, seed: int, uniform: float
) -> None:
    """Also where the mask ends before the row, and where scratch is the row itself."""
    logits, random = row(size, seed), np.random.default_rng(seed)
    mask = cpu_sampling.packed_bits((random.random(size) < share) & np.repeat(random.random(size // 64 + 1) < 0.7, 64)[:size])
    mask = mask[:num_words]
    under = masked(logits, mask)
    for asked in (params, SamplingParams(temperature=0)):
        mine, others = logits[None].copy(), np.full((1, size), np.nan, np.float32)
        rows = cpu_sampling.row_addresses(mine, [0])
        for scratch in (cpu_sampling.row_addresses(others, [0]), rows):
            table = np.array([setting(asked, uniform, exclude_top)])
            (drawn,), (top,), _ = cpu_sampling.draw_tokens(rows, size, table, [mask], scratch)
            if (under == -np.inf).all():
                assert drawn == NOTHING_LEFT
            else:
                assert drawn == (under.argmax() if asked.is_greedy else exact_draw(under, asked, uniform, exclude_top))
            assert top == (under.max() == logits.max())


@settings(max_examples=300, deadline=None)
@given(
    params=filters(), exclude_top=st.booleans(), size=st.sampled_from([1, 2, 31, 65, 700, 4097]),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
    share=st.sampled_from([0.02, 0.5, 0.9, 1.0]), seed=st.integers(0, 9999), uniform=st.floats(0, 1 - 2**-53),
)  # fmt: skip
def test_a_draw_by_questions_is_that_under_the_mask(
    params: SamplingParams, exclude_top: bool, size: int, spread: float, share: float, seed: int, uniform: float
) -> None:
    """Equal logits too, where the spread is small: they are rounded."""
    random = np.random.default_rng(seed)
    logits = (np.round(random.standard_normal((1, size)) * 8) / 8 * spread).astype(np.float32)
    allowed, asked = random.random(size) < share, list[int]()
    allowed[logits.argmax()] |= share > 0.4

    def allows(token_id: int) -> bool:
        asked.append(token_id)
        return bool(allowed[token_id])

    rows, table = cpu_sampling.row_addresses(logits, [0]), np.array([setting(params, uniform, exclude_top)])
    free = cpu_sampling.draw_tokens(rows, size, table, [None], rows)
    drawn = cpu_sampling.draw_allowed(free.kept[0], table[0], allows)
    assert len(asked) <= LISTED
    if drawn is not None:
        mask = cpu_sampling.packed_bits(allowed)
        assert drawn == exact_draw(masked(logits[0], mask), params, uniform, exclude_top)


def test_what_questions_decide() -> None:
    """Shares of 0.6, 0.3, 0.06 and 0.04; what is refused, whether that is enough, and who was asked."""
    logits = np.log(np.array([[0.06, 0.6, 0.04, 0.3]], dtype=np.float32))
    rows = cpu_sampling.row_addresses(logits, [0])
    for options, refused, expected in (
        ({"top_p": 0.5}, [], ([1], 1)),
        ({"top_p": 0.95}, [], ([1, 3, 0], 3)),
        ({"top_p": 0.8}, [], ([1, 3], 3)),
        ({"top_p": 0.8}, [3], ([1, 3], 1)),  # 0.6 of what is 0.7 at most
        ({"top_p": 0.88}, [3], ([1, 3], None)),
        ({"top_p": 0.95}, [3], ([1, 3, 0], None)),
        ({"top_p": 0.95}, [0], ([1, 3, 0], 3)),  # 0.9 of 0.94
        ({"top_p": 0.62, "top_k": 2}, [], ([1], 1)),
        ({"top_p": 0.92}, [], ([1, 3, 0], None)),  # two are enough if the last is refused
        ({"top_k": 2}, [], ([1, 3], 3)),
        ({"top_k": 2}, [3], ([1, 3], None)),  # another takes its place
        ({"min_p": 0.4}, [3], ([1, 3], 1)),
        ({"min_p": 0.4}, [1], ([1], None)),
        ({"top_k": 4}, [0, 2], ([], None)),  # which filters nothing
        ({"top_k": 3}, [0], ([1, 3, 0], None)),
        ({"typical_p": 0.9}, [], ([], None)),
        ({"top_n_sigma": 1.5}, [], ([], None)),  # a ban changes the deviation
        ({"top_p": 0.95, "xtc_probability": 1.0, "xtc_threshold": 0.2}, [], ([], None)),
    ):  # fmt: skip
        asked: list[int] = []
        table = np.array([setting(SamplingParams(**options), 0.99, "xtc_threshold" in options)])  # type: ignore[arg-type]
        kept = cpu_sampling.draw_tokens(rows, 4, table, [None], rows).kept[0]
        drawn = cpu_sampling.draw_allowed(
            kept, table[0], lambda token_id, refused=refused, asked=asked: (asked.append(token_id), token_id not in refused)[1]
        )
        assert (asked, drawn) == expected, (options, refused)
        assert cpu_sampling.draw_allowed(kept, table[0], lambda token_id: None) is None


def test_a_row_that_is_not_finite_says_so_under_any_mask() -> None:
    for value in (np.nan, np.inf):
        logits = row(200, 1)[None]
        logits[0, 150] = value
        for allowed in (range(10), [150], []):
            mask = cpu_sampling.packed_bits(np.isin(np.arange(200), list(allowed)))
            rows, table = cpu_sampling.row_addresses(logits, [0]), np.array([setting(SamplingParams(), 0.5, False)])
            assert cpu_sampling.draw_tokens(rows, 200, table, [mask], rows)[0].tolist() == [NOT_FINITE]


def test_an_edit_outside_the_row_is_refused() -> None:
    logits = np.zeros((1, 40), np.float32)
    for token in (-1, 40):
        with pytest.raises(AssertionError):
            cpu_sampling.edit_rows(
                cpu_sampling.row_addresses(logits, [0]),
                [[cpu_sampling.no_change([token])]],
                np.empty_like(logits),
            )


@pytest.mark.parametrize("size", [1, 1000, 1024, 1025, 5000])
def test_as_many_tokens_are_kept_as_their_weights_need(size: int) -> None:
    """Of equal tokens top_p keeps as many as hold its share, the lowest ids: a draw at the end hits the last of them."""
    even = np.zeros(size, dtype=np.float32)
    for count in {1, 2, size // 4, size // 2, size // 2 + 1, size - 1, size} - {0}:
        params = SamplingParams(top_p=min(1.0, count / size * (1 - 2**-50)))
        assert draw_token(even, params, 1 - 2**-53, False) == min(count, size) - 1


def test_a_draw_at_the_border_of_two_tokens_takes_the_second() -> None:
    for size in (2, 128, 8192, 100_000):
        even = np.zeros(size, dtype=np.float32)
        for params in (SamplingParams(), SamplingParams(min_p=0.5), SamplingParams(top_p=1 - 2**-50)):
            assert draw_token(even, params, 0.5, False) == size // 2


@pytest.mark.parametrize("size", [1, 2, 63, 100, 4096, 4097, 150_000])
def test_no_number_aims_past_the_last_token(size: int) -> None:
    even = np.zeros(size, dtype=np.float32)
    for params in (SamplingParams(), SamplingParams(min_p=0.5), SamplingParams(top_p=1 - 2**-53)):
        assert draw_token(even, params, 0.0, False) == 0
        assert draw_token(even, params, 1 - 2**-53, False) == size - 1


def test_a_draw_at_the_border_of_two_blocks_skips_what_weighs_nothing() -> None:
    for block in (64, 4096):
        logits = np.zeros(3 * block, dtype=np.float32)
        logits[block : block + block // 2] = -np.inf
        logits[-block // 2 :] = -np.inf
        assert draw_token(logits, SamplingParams(), 0.5, False) == block + block // 2


@pytest.mark.parametrize("count", [1, 2, 20, 64, 1000, 4999, 5000, 9000])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "ascending", "mostly banned"])
def test_the_most_likely_are_those_of_a_full_sort(count: int, kind: str) -> None:
    logits = {
        "normal": row(5000, 1),
        "ties": np.round(row(5000, 2)),
        "equal": np.full(5000, 1.5, dtype=np.float32),
        "ascending": np.arange(5000, dtype=np.float32) / 100,
        "mostly banned": np.where(np.arange(5000) % 97 == 0, row(5000, 3), -np.inf).astype(np.float32),
    }[kind]
    ranked = np.lexsort((np.arange(5000), -logits))
    expected = [i for i in ranked.tolist() if logits[i] > -np.inf][:count]
    assert most_likely(logits, count) == expected
    drawn = {draw_token(logits, SamplingParams(temperature=100, top_k=count), u, False) for u in (0.0, 0.4, 1 - 2**-53)}
    assert drawn <= set(expected)
    assert {min(expected), max(expected)} <= drawn


def test_weights_are_float64s_exponentials_wherever_a_logit_lies() -> None:
    gaps = np.concatenate(
        [-np.random.default_rng(0).random(2000, dtype=np.float32) * 40, np.float32([0, -0.0, -1e-30, -3e38])]
    )
    weights = exact_weights(gaps)
    expected = np.exp(gaps.astype(np.float64)) * 2**40
    assert (np.abs(weights - expected) <= 1 + 2e-7 * expected).all()
    assert exact_weights(np.float32([0, -np.inf, -28])).tolist() == [2**40, 0, 0]

    many = np.tile(gaps, 7)  # a row's sums, by vectors; one by one above
    drawn = draw_token(many, SamplingParams(), 0.9, False)
    assert drawn == int(np.argmax(np.tile(weights, 7).cumsum() > int(0.9 * int(weights.sum() * 7))))


@pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, 151_936])
def test_an_unfiltered_row_is_drawn_from_as_a_whole(size: int) -> None:
    logits = row(size, size, 1.0)
    expected = softmax(logits.astype(np.float64) / 1.3)
    params = SamplingParams(temperature=1.3)
    ends = expected.cumsum()
    for token_id in {0, size // 2, size - 1, min(size, 4096) - 1, min(size - 1, 4096)}:
        uniform = ends[token_id] - expected[token_id] / 2
        near = draw_token(logits, params, uniform, False)
        assert abs(ends[near] - ends[token_id]) < 1e-6
        if size < 5 or expected[token_id] > 1e-4:
            assert near == token_id
    assert draw_token(logits, params, 0.0, False) == 0
    assert draw_token(logits, params, 1 - 2**-53, False) == size - 1


def test_order_min_p_comes_before_top_p() -> None:
    # 0.4, 0.3, 0.2, 0.1: min_p 0.4 drops the last; of what is left 0.7 / 0.9 > 0.75, so top_p then drops the third too.
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    params = SamplingParams(min_p=0.4, top_p=0.75)
    assert {draw_token(logits, params, u, False) for u in np.linspace(0, 0.999, 50)} == {0, 1}
    assert {draw_token(logits, SamplingParams(top_p=0.75), u, False) for u in np.linspace(0, 0.999, 50)} == {0, 1, 2}


def test_order_top_k_comes_before_top_p() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    params = SamplingParams(top_k=3, top_p=0.75)
    assert {draw_token(logits, params, u, False) for u in np.linspace(0, 0.999, 50)} == {0, 1}


def test_order_temperature_comes_before_min_p() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    flat = SamplingParams(temperature=10, min_p=0.8)
    assert {draw_token(logits, flat, u, False) for u in np.linspace(0, 0.999, 50)} == {0, 1, 2}
    assert draw_token(logits, SamplingParams(min_p=0.8), 0.99, False) == 0


def test_order_typical_comes_before_top_p_and_xtc_last() -> None:
    probabilities = np.array([0.55, 0.25, 0.15, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    # Entropy 1.11; surprises 0.60, 1.39, 1.90, 3.00: nearest are 1 (0.28), 0 (0.51), 2 (0.78).
    assert draw_token(logits, SamplingParams(typical_p=0.2), 0.5, False) == 1
    # typical_p 0.7 leaves {0, 1} = 0.69, 0.31: of these top_p 0.7 needs both, 0.68 one. Of all four, 0.68 needs two.
    assert {draw_token(logits, SamplingParams(typical_p=0.7, top_p=0.7), u, False) for u in (0.1, 0.9)} == {0, 1}
    assert {draw_token(logits, SamplingParams(typical_p=0.7, top_p=0.68), u, False) for u in (0.1, 0.9)} == {0}
    # XTC sees {0, 1} renormalized, both above 0.3: the first goes. Before top_p it would have left 1 to 3.
    xtc = SamplingParams(top_p=0.7, xtc_threshold=0.3, xtc_probability=1)
    assert {draw_token(logits, xtc, u, True) for u in (0.01, 0.99)} == {1}


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.01, "top_n_sigma": 9.0}])
def test_xtc_of_threshold_zero_leaves_the_least_likely_of_what_is_left(filters: dict[str, float]) -> None:
    logits = np.log(np.array([0.05, 0.5, 0.3, 0.15, 1e-30], dtype=np.float32))  # the last weighs nothing
    for threshold in (0.0, 1e-45):
        params = SamplingParams(xtc_threshold=threshold, xtc_probability=1, **filters)  # type: ignore[arg-type]
        table = np.array([cpu_sampling.draw_settings(params)] * 50)
        table[:, UNIFORM] = np.linspace(0, 0.999, 50)
        assert cpu_sampling.is_filtered(table[0].tolist())
        rows = cpu_sampling.row_addresses(logits[None], [0] * 50)
        expected = {0: 0, 1: 3}["top_p" in filters or "typical_p" in filters]
        assert set(cpu_sampling.draw_tokens(rows, 5, table, [None] * 50, rows).ids.tolist()) == {expected}


@pytest.mark.parametrize(
    ("probabilities", "threshold", "left"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.1, [2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.2, [1, 2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.4, [0, 1, 2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.01, [3]),
        ([0.24, 0.26, 0.24, 0.26], 0.1, [2]),
        ([1.0], 0.1, [0]),
        ([0.25, 0.25, 0.25, 0.25], 0.25, [3]),
    ],
)
def test_xtc_leaves_the_least_likely_of_the_top_choices(
    probabilities: list[float], threshold: float, left: list[int]
) -> None:
    logits = np.log(np.array(probabilities, dtype=np.float32))
    params = SamplingParams(xtc_threshold=threshold, xtc_probability=1)
    assert sorted({draw_token(logits, params, u, True) for u in np.linspace(0, 0.999, 100)}) == left


@pytest.mark.parametrize(
    ("sigmas", "left"), [(1.0, [0, 0, 0.428571, 0.571429]), (3.0, [0.1, 0.2, 0.3, 0.4]), (-1.0, [0.1, 0.2, 0.3, 0.4])]
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_top_n_sigma_keeps_what_llama_cpp_says(sigmas: float, left: list[float], temperature: float) -> None:
    """Its own test vectors (tests/test-sampling.cpp); a temperature changes how likely tokens are, not which are left."""
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
    expected = np.array(left) ** (1 / temperature)
    check_draws(logits, SamplingParams(temperature=temperature, top_n_sigma=sigmas), False, expected / expected.sum())


def test_far_and_extreme_logits_are_no_trouble() -> None:
    logits = np.array([3e38, -3e38, 0, -np.inf, 2.9e38], dtype=np.float32)
    with np.errstate(all="ignore"):
        for params in (
            SamplingParams(temperature=1e-5),
            SamplingParams(temperature=100),
            SamplingParams(min_p=1e-300),
            SamplingParams(top_k=3, top_p=0.5, typical_p=0.5),
            SamplingParams(top_p=0.0),
            SamplingParams(top_p=1 - 2**-53),
            SamplingParams(typical_p=0.0),
            SamplingParams(top_n_sigma=0.1),
        ):
            assert {draw_token(logits, params, u, True) for u in (0.0, 0.5, 1 - 2**-53)} == {0}


def test_a_temperature_decides_how_often() -> None:
    logits = np.log(np.array([0.1, 0.9], dtype=np.float32))
    for temperature in (0.5, 1.0, 2.0):
        first = 0.1 ** (1 / temperature) / (0.1 ** (1 / temperature) + 0.9 ** (1 / temperature))
        params = SamplingParams(temperature=temperature)
        assert draw_token(logits, params, first - 1e-5, False) == 0
        assert draw_token(logits, params, first + 1e-5, False) == 1


@pytest.mark.parametrize("size", [1, 2, 33, 1000, 151_936])
def test_logprobs_are_a_float64_log_softmax(size: int) -> None:
    logits = row(size, size)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=0).numpy()
    ranked = np.lexsort((np.arange(size), -logits)).tolist()
    for rank in {0, size // 3, size - 1}:
        found = row_logprobs(logits, ranked[rank], 5)
        assert found.rank == rank + 1
        assert found.logprob == pytest.approx(expected[ranked[rank]], abs=1e-6)
        assert found.top_ids == ranked[:5]
        assert found.top_logprobs == pytest.approx(expected[ranked[:5]], abs=1e-6)


def test_logprobs_rank_equal_logits_by_id_and_leave_banned_tokens_out() -> None:
    logits = np.array([1, 2, 2, -np.inf, 2], dtype=np.float32)
    assert [row_logprobs(logits, token_id, 0).rank for token_id in range(5)] == [4, 1, 2, 5, 3]
    found = row_logprobs(logits, 3, 20)
    assert found.top_ids == [1, 2, 4, 0]
    assert found.logprob == -np.inf
    assert row_logprobs(logits, 0, 0).top_ids == []
