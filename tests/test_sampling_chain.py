"""Steps in an order that a request names: by llama.cpp's own numbers, by their formulas, and as the sampler runs them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nanovllm_cli.engine.plan import Drawn, NewSequence, Scheduled
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sampling_chain import Chain
from nanovllm_cli.engine.sampling_state import SequenceState
from nanovllm_cli.kernels.cpu_sampling import Edits, no_change, packed_bits
from nanovllm_cli.kernels.cpu_sampling_edits import MINUS, SCALE, THEN_MINUS
from nanovllm_cli.kernels.cpu_sampling_rows import NOT_FINITE, NOTHING_LEFT
from nanovllm_cli.kernels.sampling_table import on_device
from nanovllm_cli.samplers import LLAMA_ORDER, ORDER, chain_of, sampler_names, settled
from nanovllm_cli.sampling_params import SamplingParams
from sampler_reference import distribution, drawn_from, softmax

THEIRS = json.loads((Path(__file__).parent / "llama_cpp_draws.json").read_text())
Row = NDArray[np.float32]


def chain(params: SamplingParams, vocab_size: int = 300) -> Chain:
    steps = chain_of(params)
    assert steps is not None
    return Chain(steps, params, vocab_size)


def their_rows(case: dict[str, Any], count: int) -> Row:
    rows = np.random.default_rng(case["seed"]).normal(0, case["scale"], (count, 300))
    return rows.astype(np.float32)


def no_edits(step: str) -> Edits:
    return no_change([])


def draw(chain: Chain, row: Row, uniform: float, chance: float = 1.0) -> int:
    return chain.draw(row, [], None, no_edits, uniform, chance)


def probabilities(params: SamplingParams, row: Row, edits_of: Any = no_edits, chance: float = 0.0) -> NDArray[np.float64]:
    """[V] behind the steps."""
    left = chain(params, len(row)).left(np.flatnonzero(row > -np.inf), row, edits_of, chance)
    found = np.zeros(len(row))
    found[left.ids] = left.probabilities()
    return found


def first_beyond(chain: Chain, row: Row, token_id: int) -> float:
    """The least random number that draws a token of at least this id."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if draw(chain, row, middle) >= token_id:
            high = middle
        else:
            low = middle
    return high


def named(case: dict[str, Any]) -> str:
    return "-".join(map(str, (*case.get("steps", ()), *case["params"].values(), case["scale"])))


@pytest.mark.parametrize("case", THEIRS["chains"], ids=named)
def test_steps_leave_what_llama_cpps_leave(case: dict[str, Any]) -> None:
    (row,) = their_rows(case, 1)
    params = SamplingParams(**THEIRS["base"] | case["params"], samplers=case["steps"])
    found = probabilities(params, row)
    assert np.count_nonzero(found) == case["kept"]
    for token_id, probability in case["likely"]:
        assert found[token_id] == pytest.approx(probability, rel=2e-4, abs=1e-7)


@pytest.mark.parametrize("walk", THEIRS["walks"], ids=named)
def test_mirostat_and_adaptive_p_learn_as_llama_cpps_do(walk: dict[str, Any]) -> None:
    """Each draw's share of the random numbers is the probability that llama.cpp has, given the same draws before."""
    steps = ["temperature"] if "mirostat" in walk["params"] else ["min_p", "adaptive_p"]
    params = SamplingParams(**walk["params"], samplers=steps)
    mine, memories = chain(params), set()
    for row, theirs in zip(their_rows(walk, len(walk["draws"])), walk["draws"], strict=True):
        token_id = theirs["id"]
        start, end = first_beyond(mine, row, token_id), first_beyond(mine, row, token_id + 1)
        expected = dict(map(tuple, theirs["likely"])).get(token_id)
        if expected is not None:
            assert end - start == pytest.approx(expected, rel=1e-3, abs=1e-7)
        assert end > start
        assert draw(mine, row, (start + end) / 2) == token_id
        mine.accept()
        memories.add(mine.memory)
    assert len(memories) == len(walk["draws"]) or params.mirostat_eta == 0 or params.adaptive_decay == 0


def test_a_decay_above_llama_cpps_most_learns_as_that_does() -> None:
    """Its `llama_sampler_init_adaptive_p` clamps to 0.99; with 1 nothing would ever be learned."""
    rows = np.random.default_rng(3).normal(0, 2, (20, 300)).astype(np.float32)
    memories: list[list[float]] = []
    for decay in (0.99, 0.995, 1.0):
        mine = chain(SamplingParams(adaptive_target=0.5, adaptive_decay=decay))
        memories.append([])
        for row in rows:
            draw(mine, row, 0.4)
            mine.accept()
            memories[-1].append(mine.memory)
    assert memories[0] == memories[1] == memories[2]
    assert len(set(memories[0])) == len(rows)


def test_any_order_draws_by_the_formulas_of_its_steps() -> None:
    """In the fixed order where that is the same; the rest goes step by step. Both are met, and either is right."""
    chosen, numbers = random.Random(5), np.random.default_rng(5)
    values: dict[str, tuple[float, float]] = {
        "repetition_penalty": (1.0, 1.5), "presence_penalty": (0.0, 1.0), "dry_multiplier": (0.0, 2.0), "min_p": (0.0, 0.2),
        "top_n_sigma": (0.0, 1.2), "typical_p": (1.0, 0.3), "top_p": (1.0, 0.8), "xtc_probability": (0.0, 1.0),
    }  # fmt: skip
    fixed = reordered = by_steps = 0
    for _ in range(800):
        given: dict[str, Any] = {name: chosen.choice([*[pair[0]] * 2, pair[1]]) for name, pair in values.items()}
        given |= {"temperature": chosen.choice([0, 0.6, 1, 1.7]), "top_k": chosen.choice([0, 4]), "xtc_threshold": 0.15}
        steps = chosen.sample(ORDER, chosen.randint(0, len(ORDER)))
        asked = SamplingParams(**given, samplers=steps)
        logits = numbers.normal(0, 2, 12).astype(np.float32).astype(np.float64)
        expected = drawn_from(replace(asked, samplers=None), steps, logits)
        ours = settled(asked)
        if ours.samplers is None:
            fixed += 1
            reordered += [step for step in ORDER if step in steps] != steps
            assert chain_of(ours) is None
            greedy = ours.temperature == 0
            plain = replace(ours, top_n_sigma=0, top_k=0, top_p=1, min_p=0, typical_p=1, xtc_probability=0) if greedy else ours
            np.testing.assert_allclose(drawn_from(plain, ORDER, logits), expected, atol=1e-9)
        else:
            by_steps += 1
        edits = edits_by_definition(asked)
        np.testing.assert_allclose(probabilities(asked, logits.astype(np.float32), edits.__getitem__), expected, atol=1e-6)
    assert min(fixed, reordered, by_steps) > 100


def edits_by_definition(params: SamplingParams) -> dict[str, Edits]:
    """What `drawn_from` takes for granted: tokens 0 and 1 were seen before, 2 would repeat something."""
    penalties, dry = no_change([0, 1]), no_change([2])
    penalties[:, SCALE], penalties[:, THEN_MINUS] = params.repetition_penalty, params.presence_penalty
    dry[:, MINUS] = params.dry_multiplier
    return {"penalties": penalties, "dry": dry}


def test_the_fixed_order_by_steps_draws_the_same_tokens() -> None:
    """The kernels count in integers, the steps in float64: on the same random number they agree but at a border."""
    numbers, chosen = np.random.default_rng(8), random.Random(8)
    same = 0
    for _ in range(300):
        params = SamplingParams(
            temperature=chosen.choice([0.7, 1.0, 1.6]), top_k=chosen.choice([0, 30]), top_p=chosen.choice([1.0, 0.9]),
            min_p=chosen.choice([0.0, 0.03]), typical_p=chosen.choice([1.0, 0.9]),
        )  # fmt: skip
        logits = torch.from_numpy(numbers.normal(0, 2, (1, 257)).astype(np.float32))
        drawn = [
            tokens_of(sampled(each, logits))
            for each in (params, replace(params, samplers=("temperature", "min_p", "top_k", "typ_p", "top_p")))
        ]
        same += drawn[0] == drawn[1]
    assert same > 295


def make_sampler(vocab_size: int = 257) -> Sampler:
    return Sampler(vocab_size, encode=lambda text: list(text.encode()), token_bytes=lambda: [bytes([i]) for i in range(256)])


def sampled(params: SamplingParams, *steps: torch.Tensor, seed: int = 3) -> list[Drawn]:
    sampler = make_sampler(steps[0].shape[1])
    sampler.add(NewSequence(0, [1, 2], params, seed, ()))
    return [sampler.sample([0], logits)[0] for logits in steps]


def tokens_of(drawn: Sequence[Drawn]) -> list[int]:
    return [token_id for each in drawn for token_id in each.token_ids]


def test_the_default_order_is_llama_cpps() -> None:
    row = np.random.default_rng(1).normal(0, 2, 300).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_p=0.8, top_k=50, dynatemp_range=0.3)
    assert chain_of(params) == LLAMA_ORDER
    np.testing.assert_array_equal(probabilities(params, row), probabilities(replace(params, samplers=LLAMA_ORDER), row))
    assert chain_of(replace(params, temperature=0.0)) is None
    assert chain_of(replace(params, dynatemp_range=0.0)) is None
    assert chain_of(replace(params, dynatemp_range=0.0, samplers=("temperature",))) == ("temperature",)
    assert chain_of(SamplingParams(mirostat=2, repetition_penalty=1.1)) == ("penalties", "dry", "temperature", "mirostat")
    assert chain_of(SamplingParams(mirostat=1, samplers=["top_k", "temperature"])) == ("temperature", "mirostat")
    assert chain_of(SamplingParams(adaptive_target=0.5)) == (*LLAMA_ORDER, "adaptive_p")
    assert chain_of(SamplingParams(adaptive_target=0.5, samplers=["adaptive_p", "min_p"])) == ("min_p", "adaptive_p")
    assert chain_of(SamplingParams(adaptive_target=0.5, samplers=["min_p"])) == ("min_p",)


def test_a_dynamic_temperature_follows_the_entropy() -> None:
    """Two equal tokens are as uncertain as can be, one alone is not; between them it is the power of the share."""
    for size, rest, expected in ((2, 0.0, 1.5), (2, -40.0, 0.5), (1, 0.0, 1.0)):
        row = np.full(8, -np.inf, np.float32)
        row[:size] = [0.0, rest][:size]
        found = probabilities(SamplingParams(temperature=1.0, dynatemp_range=0.5), row)
        np.testing.assert_allclose(found[:size], softmax(np.array([0.0, rest][:size]) / expected), rtol=1e-6)
    row = np.array([0.0, -1.0, -2.0], np.float32)
    likely = softmax(row.astype(np.float64))
    share = -(likely * np.log(likely)).sum() / np.log(3)
    found = probabilities(SamplingParams(temperature=0.9, dynatemp_range=0.4, dynatemp_exponent=2.5), row)
    np.testing.assert_allclose(found, softmax(row / (0.5 + 0.8 * share**2.5)), rtol=1e-6)


def test_a_temperature_of_zero_takes_the_likeliest_of_what_is_left() -> None:
    row = np.array([3.0, 5.0, 4.9, 1.0], np.float32)
    params = SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.1, samplers=["xtc", "temperature"])
    assert settled(params).samplers is not None
    assert draw(chain(settled(params)), row, 0.99, chance=0.5) == 2
    assert tokens_of(sampled(params, torch.from_numpy(row)[None])) == [2]
    assert tokens_of(sampled(SamplingParams(temperature=0.0, mirostat=2), torch.from_numpy(row)[None])) == [1]


def test_extremes_draw_something() -> None:
    chosen, numbers = random.Random(3), np.random.default_rng(3)
    for _ in range(400):
        params = SamplingParams(
            temperature=chosen.choice([1e-4, 1.0, 100.0]), top_k=chosen.choice([0, 1, 10**9]),
            top_p=chosen.choice([0.0, 0.5, 1.0]), min_p=chosen.choice([0.0, 1.0]), typical_p=chosen.choice([0.0, 1.0]),
            top_n_sigma=chosen.choice([0.0, 1e-6, 100.0]),
            xtc_probability=chosen.choice([0.0, 1.0]), xtc_threshold=chosen.choice([0.0, 0.5]),
            dynatemp_range=chosen.choice([0.0, 100.0]), dynatemp_exponent=chosen.choice([0.0, 100.0]),
            mirostat=chosen.choice([0, 0, 1, 2]), mirostat_tau=chosen.choice([0.0, 5.0, 100.0]),
            mirostat_eta=chosen.choice([0, 10]), adaptive_target=chosen.choice([-1.0, 0.0, 1.0]),
            adaptive_decay=chosen.choice([0.0, 0.99]),
            samplers=chosen.sample((*LLAMA_ORDER, "adaptive_p"), chosen.randint(0, 10)),
        )  # fmt: skip
        size = chosen.choice([1, 2, 3, 300])
        row = chosen.choice([
            numbers.normal(0, 3, size), np.zeros(size), np.full(size, -3e38), numbers.choice([-3e38, 3e38], size),
            numbers.choice([-np.inf, 0.0], size) + np.eye(size)[0],
        ]).astype(np.float32)  # fmt: skip
        row[np.isnan(row)] = 0.0
        if chain_of(params) is None or row.max() == -np.inf:
            continue
        mine = chain(params, size)
        for uniform in (0.0, 0.3, 1 - 2**-53, 0.5):
            token_id = draw(mine, row, uniform, chosen.random())
            assert 0 <= token_id < size, params
            assert row[token_id] > -np.inf
            mine.accept()
            assert np.isfinite(mine.memory)


def test_what_cannot_be_drawn_from_says_so() -> None:
    params = SamplingParams(mirostat=2)
    row = np.zeros(64, np.float32)
    for bad in (np.nan, np.inf):
        spoilt = row.copy()
        spoilt[63] = bad
        assert draw(chain(params, 64), spoilt, 0.5) == NOT_FINITE
        (drawn,) = sampled(params, torch.from_numpy(spoilt)[None])
        assert "not finite" in str(drawn.error)
    assert draw(chain(params, 64), np.full(64, -np.inf, np.float32), 0.5) == NOTHING_LEFT
    nothing = packed_bits(np.zeros(64, np.bool_))
    assert chain(params, 64).draw(row, [], nothing, no_edits, 0.5, 0.5) == NOTHING_LEFT
    ban = no_change(range(64))
    ban[:, MINUS] = np.inf
    assert chain(params, 64).draw(row, [ban], None, no_edits, 0.5, 0.5) == NOTHING_LEFT
    assert chain(params, 64).draw(row, [], None, lambda step: ban, 0.5, 0.5) == NOTHING_LEFT


def test_bans_come_first_and_masks_hold() -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 1, (1, 257)).astype(np.float32))
    best = int(logits.argmax())
    params = SamplingParams(samplers=["top_k"], top_k=1, logit_bias={best: -100})
    assert tokens_of(sampled(params, logits)) == [int(logits.topk(2).indices[0, 1])]
    params = SamplingParams(mirostat=2, allowed_token_ids=[5, 9])
    assert {tokens_of(sampled(params, logits, seed=s))[0] for s in range(40)} == {5, 9}
    params = SamplingParams(top_k=1, samplers=["top_k", "penalties"], presence_penalty=2.0, temperature=1.0)
    assert tokens_of(sampled(params, logits, logits)) == [best, best]  # penalized, but alone
    params = replace(params, samplers=["penalties", "top_k"])
    assert tokens_of(sampled(params, logits, logits))[0] == best


REQUESTS = [
    SamplingParams(mirostat=2, mirostat_tau=3.0), SamplingParams(mirostat=1, mirostat_eta=0.5),
    SamplingParams(adaptive_target=0.2, min_p=0.01), SamplingParams(dynatemp_range=0.8),
    SamplingParams(samplers=["top_p", "temperature"], top_p=0.7, temperature=1.4),
    SamplingParams(xtc_probability=0.5, samplers=["xtc", "temperature", "penalties"], repetition_penalty=1.3, temperature=0.8),
    SamplingParams(temperature=0.8), SamplingParams(temperature=0.0),
]  # fmt: skip


def test_a_draw_depends_on_its_own_sequence_alone() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(len(REQUESTS), 257) * 3 for _ in range(12)]
    alone = [tokens_of(sampled(params, *(step[i : i + 1] for step in steps))) for i, params in enumerate(REQUESTS)]
    sampler = make_sampler()
    for i, params in enumerate(REQUESTS):
        sampler.add(NewSequence(i, [1, 2], params, 3, ()))
    together: list[list[int]] = [[] for _ in REQUESTS]
    for step in steps:
        order = random.sample(range(len(REQUESTS)), len(REQUESTS))
        for i, drawn in zip(order, sampler.sample(order, step, rows=order), strict=True):
            together[i] += drawn.token_ids
    assert together == alone


def test_steps_that_are_broken_off_are_repeated_from_what_was_remembered() -> None:
    torch.manual_seed(1)
    steps = [torch.randn(1, 257) * 3 for _ in range(8)]
    for params in REQUESTS[:4]:
        whole = tokens_of(sampled(params, *steps))
        sampler = Sampler(257)
        sampler.add(NewSequence(0, [1, 2], params, 3, ()))
        for step in steps[:6]:
            sampler.sample([0], step)
        sampler.keep([Scheduled(0, [7], 4, [0], (0,), prompt_len=2)])
        assert [sampler.sample([0], step)[0].token_ids[0] for step in steps[3:]] == whole[3:]


def test_so_they_are_where_that_is_broken_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    steps, params = [torch.randn(1, 257) * 3 for _ in range(8)], SamplingParams(repetition_penalty=3.0, seed=3)
    whole = tokens_of(sampled(params, *steps))
    sampler = Sampler(257)
    sampler.add(NewSequence(0, [1, 2], params, 3, ()))
    for step in steps[:6]:
        sampler.sample([0], step)
    told = [Scheduled(0, [7], 4, [0], (0,), prompt_len=2)]
    with monkeypatch.context() as broken:
        broken.setattr(SequenceState, "append", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sampler.keep(told)
    sampler.keep(told)
    assert [sampler.sample([0], step)[0].token_ids[0] for step in steps[3:]] == whole[3:]


def test_a_gpu_leaves_them_to_the_cpus_sampler() -> None:
    assert not any(on_device(params, ()) for params in REQUESTS[:6])
    assert all(on_device(params, ()) for params in REQUESTS[6:])
    assert on_device(settled(SamplingParams(samplers=["temperature", "top_k", "top_p"], top_p=0.5, temperature=0.5)), ())


def test_names() -> None:
    assert sampler_names("edtsmkypxa") == (*ORDER, "adaptive_p")
    assert sampler_names(["typical-p", "temp", "top-n-sigma", "nucleus"]) == ("typ_p", "temperature", "top_n_sigma", "top_p")
    assert sampler_names(["infill", "top_k"], without=("infill",)) == ("top_k",)
    assert SamplingParams(samplers="kt").samplers == ("top_k", "temperature")
    assert SamplingParams(samplers=[]).samplers == ()
    assert sampler_names(["top_k", "tfs_z", "typ_p", "typical_p"]) == ("top_k", "typ_p", "typ_p")


def test_a_step_that_comes_twice_is_done_twice() -> None:
    row = np.random.default_rng(6).normal(0, 2, 60).astype(np.float32)
    params = settled(SamplingParams(samplers=["temperature", "top_k", "temperature"], temperature=0.5, top_k=7))
    assert params.samplers is not None
    once = SamplingParams(temperature=0.25, top_k=7, samplers=["top_k", "temperature"])
    np.testing.assert_allclose(probabilities(params, row), probabilities(once, row), rtol=1e-6)


@pytest.mark.parametrize(
    ("samplers", "says"),
    [
        (["infill"], "'infill' is not supported"),
        ("kz", "'z' is none of edtsmkypxa"), (["frobnicate"], "'frobnicate' is none of 'penalties', 'dry'"),
        (5, "must be a list"), ([5], "strings"), (["x" * 300], "strings"),
        (["top_k"] * 65, "at most 64"), ("x" * 10**6, "at most 64"), ({"top_k": 1}, "must be a list"),
    ],
)  # fmt: skip
def test_bad_names_are_refused(samplers: Any, says: str) -> None:
    with pytest.raises(Exception, match="samplers") as caught:
        SamplingParams(samplers=samplers)
    assert says in str(caught.value)


def test_distribution_of_draws_by_the_fixed_order_is_that_of_its_steps() -> None:
    """Where `settled` moves min_p before the temperature."""
    row = np.random.default_rng(2).normal(0, 2, 60).astype(np.float32)
    asked = SamplingParams(samplers=["min_p", "temperature"], min_p=0.1, temperature=0.5)
    ours = settled(asked)
    assert ours.samplers is None
    np.testing.assert_allclose(distribution(row, ours, False), probabilities(asked, row), atol=1e-9)
