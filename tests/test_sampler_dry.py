"""DRY against its definition read literally, and the search for the tokens that hold a sequence breaker."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli.engine.sampling_dry import BreakerVocabulary, DryBreakers, DryHistory, DryPrompt
from nanovllm_cli.kernels.cpu_sampling_edits import MINUS, SCALE, THEN_MINUS, TOKEN
from nanovllm_cli.sampling_params import SamplingParams

VOCAB = 6


def make_breakers(sequences: list[list[int]]) -> DryBreakers:
    single = np.zeros(VOCAB, dtype=np.bool_)
    longer: dict[int, dict[int, dict[tuple[int, ...], np.ndarray[tuple[int], np.dtype[np.int64]]]]] = {}
    for first, *tail in sorted(sequences, key=len):
        if not tail:
            single[first] = True
        else:
            by_tail = longer.setdefault(tail[-1], {}).setdefault(len(tail), {})
            by_tail[tuple(tail)] = np.union1d(by_tail.get(tuple(tail), []), [first]).astype(np.int64)
    return DryBreakers(single, longer)


def make_history(prompt: list[int], params: SamplingParams, breakers: list[list[int]]) -> DryHistory:
    return DryHistory(DryPrompt(prompt, make_breakers(breakers)), params)


def literal(tokens: list[int], params: SamplingParams, breakers: list[list[int]]) -> dict[int, float]:
    """Token -> penalty, by trying every earlier place and every length."""
    n = params.dry_penalty_last_n
    window = tokens if n < 0 else tokens[max(0, len(tokens) - n) :]
    since_break = len(window)
    for start in range(len(window) - 1, -1, -1):
        ends = [start + len(b) for b in breakers if window[start : start + len(b)] == b]
        if ends:
            since_break = len(window) - max(ends)
            break
    penalties: dict[int, float] = {}
    if len(window) <= params.dry_allowed_length or since_break < params.dry_allowed_length:
        return penalties
    for end in range(1, len(window)):  # the place ends before `end`, whose token would continue the repetition
        length = 0
        while length < min(end, since_break) and window[end - 1 - length] == window[len(window) - 1 - length]:
            length += 1
        token_id = window[end]
        if length >= params.dry_allowed_length and [token_id] not in breakers:
            penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            penalties[token_id] = max(penalties.get(token_id, 0.0), penalty)
    return penalties


def penalties_of(history: DryHistory) -> dict[int, float]:
    edits = history.edits()
    assert len(set(edits[:, TOKEN].tolist())) == len(edits)
    assert (edits[:, SCALE] == 1).all()
    assert (edits[:, THEN_MINUS] == 0).all()
    return {int(token_id): penalty for token_id, penalty in edits[:, [TOKEN, MINUS]].tolist() if penalty}


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=25),
    output=st.lists(st.integers(0, 3), max_size=25),
    breakers=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=3),
    allowed_length=st.integers(0, 5),
    last_n=st.integers(-1, 30),
    base=st.sampled_from([1.0, 1.1, 1.75, 3.0]),
)
def test_penalties_are_those_of_the_definition_after_every_token(
    prompt: list[int],
    output: list[int],
    breakers: list[list[int]],
    allowed_length: int,
    last_n: int,
    base: float,
) -> None:
    params = SamplingParams(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed_length, dry_penalty_last_n=last_n
    )
    shared = DryPrompt(prompt, make_breakers(breakers))
    for answer in (output, output[::-1], output):  # what an answer appends is its own
        history = DryHistory(shared, params)
        assert penalties_of(history) == pytest.approx(literal(prompt, params, breakers), rel=1e-5)
        for count in range(1, len(answer) + 1):
            history.append(answer[count - 1])
            assert penalties_of(history) == pytest.approx(literal(prompt + answer[:count], params, breakers), rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), max_size=30),
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=10, max_size=10), min_size=2, max_size=4),
)
def test_answers_that_grow_beside_each_other_do_not_see_each_other(prompt: list[int], outputs: list[list[int]]) -> None:
    params, breakers = SamplingParams(dry_multiplier=0.8), [[2], [0, 1]]
    shared = DryPrompt(prompt, make_breakers(breakers))
    histories = [DryHistory(shared, params) for _ in outputs]
    for count in range(1, 11):
        for history, output in zip(histories, outputs, strict=True):
            history.append(output[count - 1])
        for history, output in zip(histories, outputs, strict=True):
            assert penalties_of(history) == pytest.approx(literal(prompt + output[:count], params, breakers), rel=1e-5)


def test_many_answers_to_a_long_prompt_cost_little_more_than_one() -> None:
    """A list of places for each of a prompt's tokens, in each answer, took 4 seconds and 900 MB here."""
    shared = DryPrompt(list(range(32_000)), DryBreakers(np.zeros(32_000, dtype=np.bool_), {}))
    start = time.process_time()
    histories = [DryHistory(shared, SamplingParams(dry_multiplier=1.0, dry_allowed_length=1)) for _ in range(64)]
    assert time.process_time() - start < 1.0
    histories[0].append(7)
    assert penalties_of(histories[0]) == {8: 1.0}
    assert penalties_of(histories[1]) == {}


def test_a_repetition_by_hand() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    history = make_history([0, 1, 2, 3, 0, 1, 2], params, [])
    assert penalties_of(history) == {3: 2.0}  # three tokens agree: 1 * 2 ** (3 - 2)
    assert penalties_of(make_history([0, 1, 2, 3, 0, 1, 2], params, [[1]])) == {}
    assert penalties_of(make_history([0, 1, 2, 3, 0, 1, 2], params, [[0]])) == {3: 1.0}
    assert penalties_of(make_history([0, 1, 2, 3, 0, 1, 2], params, [[3]])) == {}


def test_of_overlapping_breakers_the_one_that_starts_last_counts() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1)
    breakers, tokens = [[0, 1, 2], [1]], [2, 3, 0, 1, 2]
    assert literal(tokens, params, breakers) == {3: 1.0}
    assert penalties_of(make_history(tokens, params, breakers)) == {3: 1.0}


def test_of_breakers_that_start_at_the_same_place_the_longest_counts() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1)
    breakers, tokens = [[0, 1], [0, 1, 2]], [2, 3, 0, 1, 2]
    assert literal(tokens, params, breakers) == {}
    for count in range(6):
        history = make_history(tokens[:count], params, breakers)
        for token_id in tokens[count:]:
            history.append(token_id)
        assert penalties_of(history) == {}


def test_a_breaker_that_begins_before_the_window_is_none() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1, dry_penalty_last_n=4)
    breakers, tokens = [[0, 1, 1]], [0, 1, 1, 1, 1]
    assert literal(tokens, params, breakers) == {1: 4.0}
    assert penalties_of(make_history(tokens, params, breakers)) == {1: 4.0}


def test_a_very_long_repetition_stays_finite_and_cheap() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=1.75)
    history = make_history([1] * 20_000, params, [])
    history.append(1)
    assert 1e30 < penalties_of(history)[1] < math.inf


TOKENS = [
    b"\n",
    b"a\n",
    b"b",
    b"x:\n y",
    b":",
    b"xE",
    b"ND",
    b"E",
    b"N",
    b"D",
    b"END",
    b"EN",
    b"",
    b"\xc3",
    b"\xa9",
    b"e",
]


def encode(text: str) -> list[int]:
    """Longest token first."""
    rest, ids = text.encode(), []
    while rest:
        best = max((t for t in TOKENS if t and rest.startswith(t)), key=len)
        ids.append(TOKENS.index(best))
        rest = rest[len(best) :]
    return ids


def sequences_of(breakers: DryBreakers) -> list[tuple[int, ...]]:
    """Those of several ids."""
    return [
        (first, *tail)
        for by_size in breakers.longer.values()
        for by_tail in by_size.values()
        for tail, firsts in by_tail.items()
        for first in firsts.tolist()
    ]


def found_breakers(texts: list[str], vocab_size: int = len(TOKENS)) -> tuple[list[bytes], list[tuple[bytes, ...]]]:
    found = BreakerVocabulary(vocab_size, encode, lambda: TOKENS).breakers(texts)
    longer = [tuple(TOKENS[i] for i in sequence) for sequence in sequences_of(found)]
    return [TOKENS[i] for i in np.flatnonzero(found.single).tolist()], sorted(longer)


def test_tokens_that_hold_the_breaker_break_by_themselves() -> None:
    assert found_breakers(["\n"]) == ([b"\n", b"a\n", b"x:\n y"], [])
    assert found_breakers(["\n", ":"]) == ([b"\n", b"a\n", b"x:\n y", b":"], [])
    assert found_breakers([]) == ([], [])


def test_tokens_that_end_in_the_breakers_begin_are_followed_by_its_rest() -> None:
    single, longer = found_breakers(["END"])
    assert single == [b"END"]
    assert longer == [(b"E", b"ND"), (b"EN", b"D"), (b"xE", b"ND")]


def test_a_breaker_whose_bytes_are_split_over_tokens_is_found() -> None:
    assert found_breakers(["é"]) == ([], [(b"\xc3", b"\xa9")])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.text("ab", max_size=4), min_size=1, max_size=12, unique=True),
    breaker=st.text("ab", min_size=1, max_size=4),
)
def test_the_tokens_found_are_those_that_a_look_at_each_finds(tokens: list[str], breaker: str) -> None:
    spelled = [token.encode() for token in tokens]
    found = BreakerVocabulary(len(tokens), lambda text: [], lambda: spelled).breakers([breaker])
    expected = {i for i, token in enumerate(tokens) if breaker in token}
    begins = [breaker[:size] for size in range(1, len(breaker))]  # with no tail to encode these break by themselves too
    expected |= {i for i, token in enumerate(tokens) if any(token.endswith(begin) for begin in begins)}
    assert set(np.flatnonzero(found.single).tolist()) == expected


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.text("abé", max_size=4), min_size=1, max_size=12, unique=True),
    breakers=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4),
    vocab_size=st.integers(8, 20),
)
def test_the_sequences_found_are_all_that_begin_within_a_token(tokens: list[str], breakers: list[str], vocab_size: int) -> None:
    spelled, letters = [token.encode() for token in tokens], {"a": [7], "b": [12, 3], "é": [5]}

    def by_letter(text: str) -> list[int]:
        return [token_id for letter in text for token_id in letters[letter]]

    expected = {(i,) for i, token in enumerate(tokens) for text in breakers if text in token}
    expected |= {tuple(by_letter(text)) for text in breakers}
    for text in breakers:
        for split in range(1, len(text)):
            firsts = [i for i, token in enumerate(tokens) if token.endswith(text[:split]) and text not in token]
            expected |= {(first, *by_letter(text[split:])) for first in firsts}
    expected = {sequence for sequence in expected if max(sequence) < vocab_size and sequence[0] < vocab_size}
    found = BreakerVocabulary(vocab_size, by_letter, lambda: spelled).breakers(breakers)
    sequences = sequences_of(found)
    assert len(sequences) == len(set(sequences))
    assert {*sequences, *((token_id,) for token_id in np.flatnonzero(found.single).tolist())} == expected
    for last, by_size in found.longer.items():
        assert list(by_size) == sorted(by_size)
        for size, by_tail in by_size.items():
            assert all(tail[-1] == last and len(tail) == size for tail in by_tail)
            assert all(firsts.tolist() == sorted(firsts.tolist()) for firsts in by_tail.values())


def test_a_breaker_that_nearly_every_token_may_begin_is_found_at_once() -> None:
    """Comparing each with what stands there took 40 ms a token: with sixteen such breakers, minutes."""
    words = [b"t", *(b"%d%c" % (i, b"aeinors"[i % 7]) for i in range(50_000)), b"z"]
    vocabulary = BreakerVocabulary(len(words), lambda text: [0] * len(text), lambda: words)
    start = time.process_time()
    breakers = vocabulary.breakers([letter + "t" for letter in "aeinors"])
    assert len(sequences_of(breakers)) == 50_000 + 1  # and twice "t", which is how the encoder above spells all of them
    z = len(words) - 1
    prompt = DryPrompt([9, 0, *[z, 0] * 2000], breakers)
    assert prompt.last_break == (0, 1)
    history = DryHistory(prompt, SamplingParams(dry_multiplier=1.0))
    for _ in range(200):
        history.append(z)
        history.append(0)
    assert time.process_time() - start < 3.0


def test_tokens_past_the_vocabulary_are_left_out() -> None:
    assert found_breakers(["END"], 10) == ([], [(b"E", b"ND"), (b"xE", b"ND")])


def test_the_vocabulary_is_read_once_and_only_when_asked() -> None:
    calls = []

    def token_bytes() -> list[bytes]:
        calls.append(1)
        return TOKENS

    vocabulary = BreakerVocabulary(len(TOKENS), encode, token_bytes)
    assert not calls
    vocabulary.breakers(["\n", ":"])
    vocabulary.breakers(["\n", "END"])
    assert len(calls) == 1
