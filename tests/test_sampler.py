"""The sampler as the worker uses it: batches, seeds, distributions, errors, masks, logprobs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli.engine.plan import Drawn, NewSequence
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.errors import UsageError
from nanovllm_cli.kernels import cpu_sampling
from nanovllm_cli.sampling_params import SamplingParams
from sampler_reference import distribution, softmax

VOCAB = 257


def encode(text: str) -> list[int]:
    return list(text.encode())


def token_bytes() -> list[bytes]:
    return [bytes([i]) for i in range(256)]


def make_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, encode=encode, token_bytes=token_bytes)


def new_sequence(
    seq_id: int, params: SamplingParams, seed: int = 0, prompt: list[int] | None = None, stop_ids: tuple[int, ...] = ()
) -> NewSequence:
    return NewSequence(seq_id, prompt or [1, 2], params, seed, stop_ids)


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def mixed_params(index: int) -> SamplingParams:
    """Thirty-two requests of which no two ask for the same."""
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.3},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs": 5},
        {"temperature": 1.4},
        {"top_p": 0.95, "logprobs": 0},
        {"min_p": 0.05, "xtc_probability": 0.5},
        {"typical_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "penalty_last_n": 5},
        {
            "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.1,
            "dry_multiplier": 0.8, "xtc_probability": 0.5, "logit_bias": {5: 2.0}, "bad_words": ["ab"], "min_tokens": 3,
            "logprobs": 20,
        },
    ]  # fmt: skip
    return SamplingParams(**choices[index % 8], stop_token_ids=[index // 8])


def run(
    sampler: Sampler, steps: int, order: list[int], logits: list[torch.Tensor], group: int
) -> dict[int, list[Drawn]]:
    """Each of `steps` draws all sequences in `order`, `group` of them in one call."""
    found: dict[int, list[Drawn]] = {seq_id: [] for seq_id in order}
    for step in range(steps):
        for i in range(0, len(order), group):
            ids = order[i : i + group]
            for drawn in sampler.sample(ids, logits[step][ids]):
                found[drawn.seq_id].append(drawn)
    return found


@pytest.mark.parametrize(("vocab_size", "steps", "scale"), [(VOCAB, 12, 3.0), (40_001, 3, 2.0), (40_001, 2, 12.0)])
def test_a_row_gives_the_same_to_the_bit_alone_and_in_any_batch(vocab_size: int, steps: int, scale: float) -> None:
    logits = [random_logits(32, vocab_size, step, scale) for step in range(steps)]
    results = []
    for order, group in ((range(32), 1), (range(32), 32), (np.random.default_rng(0).permutation(32).tolist(), 13)):
        sampler = make_sampler(vocab_size)
        for seq_id in order:
            prompt = np.random.default_rng(seq_id).integers(0, 257, 50).tolist()
            sampler.add(new_sequence(seq_id, mixed_params(seq_id), seq_id * 7919, prompt, (9,)))
        results.append(run(sampler, steps, list(order), logits, group))
    assert results[0] == results[1]
    assert results[0] == results[2]
    assert not any(drawn.error for entries in results[0].values() for drawn in entries)


@settings(max_examples=20, deadline=None)
@given(which=st.lists(st.integers(0, 31), min_size=1, max_size=8, unique=True), seed=st.integers(0, 99))
def test_any_mix_of_requests_in_a_batch_changes_none_of_them(which: list[int], seed: int) -> None:
    logits = [random_logits(32, seed=seed)]
    together, alone = make_sampler(), make_sampler()
    for seq_id in which:
        together.add(new_sequence(seq_id, mixed_params(seq_id), seed))
        alone.add(new_sequence(seq_id, mixed_params(seq_id), seed))
    assert run(together, 1, which, logits, len(which)) == run(alone, 1, which, logits, 1)


def test_seeds_decide_the_tokens_and_positions_differ() -> None:
    logits = torch.zeros(1, VOCAB)
    tokens = {}
    for seed in (5, 6, 2**64 - 1):
        for repeat in range(2):
            sampler = make_sampler()
            sampler.add(new_sequence(repeat, SamplingParams(), seed))
            tokens[seed, repeat] = [sampler.sample([repeat], logits)[0].token_ids[0] for _ in range(8)]
    assert tokens[5, 0] == tokens[5, 1]
    assert tokens[2**64 - 1, 0] == tokens[2**64 - 1, 1]
    assert len({tuple(tokens[seed, 0]) for seed in (5, 6, 2**64 - 1)}) == 3
    assert len(set(tokens[5, 0])) > 4


def test_several_sequences_draw_from_one_row() -> None:
    sampler, separate = make_sampler(), make_sampler()
    for seq_id in range(6):
        for either in (sampler, separate):
            either.add(new_sequence(seq_id, SamplingParams(temperature=1.5), 100 + seq_id))
    logits = random_logits(2)
    rows = [1, 1, 0, 1, 0, 1]
    drawn = sampler.sample(range(6), logits, rows)
    assert drawn == separate.sample(range(6), logits[rows])
    assert len({entry.token_ids[0] for entry, row in zip(drawn, rows, strict=True) if row == 1}) > 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=12),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(min_p=0.1, typical_p=0.9),
    ],
)
def test_draws_are_distributed_as_the_definitions_say(params: SamplingParams) -> None:
    logits = random_logits(1, 30, seed=8, scale=1.5)
    expected = distribution(logits[0].numpy(), params, False) * 4000
    sampler = make_sampler(30)
    for seq_id in range(40):
        sampler.add(new_sequence(seq_id, params, seq_id))
    counts = np.zeros(30)
    for _ in range(100):
        for drawn in sampler.sample(range(40), logits, [0] * 40):
            counts[drawn.token_ids[0]] += 1
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    statistic = ((counts - expected)[alive] ** 2 / expected[alive]).sum()
    degrees = alive.sum() - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_xtc_comes_up_as_often_as_its_probability_says() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    sampler = make_sampler(3)
    for seq_id in range(50):
        sampler.add(new_sequence(seq_id, SamplingParams(xtc_probability=0.25, xtc_threshold=0.15), seq_id))
    counts = Counter(drawn.token_ids[0] for _ in range(80) for drawn in sampler.sample(range(50), logits, [0] * 50))
    # Three quarters of the time as it is, else only the last.
    expected = {0: 4000 * 0.375, 1: 4000 * 0.225, 2: 4000 * (0.15 + 0.25)}
    assert sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(3)) < 13.8  # 2 degrees of freedom, 0.1 %


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=5), SamplingParams(logprobs=2)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_ends_its_own_sequence_only(params: SamplingParams, poison: float) -> None:
    logits = random_logits(4)
    healthy, sampler = make_sampler(), make_sampler()
    for seq_id in range(4):
        healthy.add(new_sequence(seq_id, params, seq_id))
        sampler.add(new_sequence(seq_id, params, seq_id))
    expected = healthy.sample(range(4), logits)
    broken = logits.clone()
    broken[2, 100] = poison
    drawn = sampler.sample(range(4), broken)
    assert drawn[2] == Drawn(2, [], error="the model's logits are not finite: NaN or infinity")
    assert [drawn[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


def test_nan_under_a_ban_is_still_an_error() -> None:
    sampler = make_sampler()
    sampler.add(new_sequence(0, SamplingParams(temperature=0, allowed_token_ids=[5])))
    logits = random_logits(1)
    logits[0, 100] = math.nan
    assert sampler.sample([0], logits)[0].error is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_is_an_error(temperature: float) -> None:
    sampler = make_sampler()
    everything = SamplingParams(temperature=temperature)
    sampler.add(new_sequence(0, everything))
    sampler.add(
        new_sequence(1, SamplingParams(temperature=temperature, allowed_token_ids=[9], min_tokens=1), 0, [1], (9,))
    )
    sampler.add(new_sequence(2, everything))
    logits = random_logits(3)
    logits[0] = -math.inf
    drawn = sampler.sample(range(3), logits)
    assert [entry.error for entry in drawn[:2]] == ["no token is left to draw: every one is banned"] * 2
    assert drawn[2].error is None


def test_logits_are_not_written_to() -> None:
    sampler, logits = make_sampler(), random_logits(32)
    before = logits.clone()
    for seq_id in range(32):
        sampler.add(new_sequence(seq_id, mixed_params(seq_id)))
    sampler.sample(range(32), logits, masks=[torch.arange(VOCAB) % 3 > 0] * 32)
    assert torch.equal(logits, before)


def test_what_was_drawn_counts_for_the_next_draw_and_is_forgotten_with_the_sequence() -> None:
    sampler = make_sampler()
    params = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    for _ in range(2):
        sampler.add(new_sequence(0, params))
        assert [sampler.sample([0], logits)[0].token_ids for _ in range(5)] == [[0], [1], [2], [3], [4]]
        sampler.remove(0)
    sampler.remove(0)
    sampler.remove(77)
    with pytest.raises(KeyError):
        sampler.sample([0], logits)


def test_a_sequence_registered_again_begins_anew() -> None:
    sampler = make_sampler()
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    for _ in range(2):
        sampler.add(new_sequence(0, params))
        assert [sampler.sample([0], logits)[0].token_ids for _ in range(3)] == [[0], [1], [2]]


def test_greedy_takes_the_lowest_of_equal_ids_on_the_fast_path_and_off_it() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [50, 70, 200]] = 4.0
    sampler = make_sampler()
    sampler.add(new_sequence(0, SamplingParams(temperature=0)))
    sampler.add(new_sequence(1, SamplingParams(temperature=0, logprobs=2)))
    fast, slow = sampler.sample([0], logits[:1]), sampler.sample([1], logits[1:])
    assert fast[0].token_ids == slow[0].token_ids == [50]
    assert slow[0].logprobs is not None
    assert slow[0].logprobs[0].rank == 1
    assert [token_id for token_id, _ in slow[0].logprobs[0].top] == [50, 70]


def test_the_largest_of_other_devices_and_dtypes_is_that_of_float32_on_the_cpu() -> None:
    logits = torch.round(random_logits(5))
    assert cpu_sampling.largest(logits.double()) == cpu_sampling.largest(logits)
    assert cpu_sampling.largest(logits.bfloat16()) == cpu_sampling.largest(logits)


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 31, 32, 33, 64, 257]), seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 2.0])
)
def test_a_mask_as_bools_and_as_packed_bits_allows_the_same(size: int, seed: int, temperature: float) -> None:
    random = np.random.default_rng(seed)
    allowed = random.random(size) < 0.2
    allowed[random.integers(size)] = True
    words = np.zeros((size + 31) // 32, dtype=np.uint32)
    for i in np.flatnonzero(allowed).tolist():
        words[i // 32] |= np.uint32(1 << (i % 32))
    sampler = make_sampler(size)
    for seq_id in range(3):
        sampler.add(new_sequence(seq_id, SamplingParams(temperature=temperature), 1, [0]))
    logits = random_logits(1, size, seed)
    masks = [torch.from_numpy(allowed), torch.from_numpy(words.view(np.int32)), None]
    drawn = [entry.token_ids for entry in sampler.sample(range(3), logits, [0, 0, 0], masks)]
    assert drawn[0] == drawn[1]
    assert allowed[drawn[0][0]]
    if temperature == 0.0:
        assert drawn[0] == [int(np.where(allowed, logits[0].numpy(), -np.inf).argmax())]
        assert drawn[2] == [int(logits[0].argmax())]


def test_a_mask_shorter_than_the_logits_bans_the_padding() -> None:
    sampler = make_sampler()
    sampler.add(new_sequence(0, SamplingParams(temperature=0)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 40:] = 1.0
    assert sampler.sample([0], logits, masks=[torch.ones(40, dtype=torch.bool)])[0].token_ids == [0]
    assert sampler.sample([0], logits, masks=[torch.tensor([-1], dtype=torch.int32)])[0].token_ids == [0]


def test_a_mask_that_allows_nothing_or_has_another_type_ends_its_sequence_only() -> None:
    sampler = make_sampler()
    for seq_id in range(3):
        sampler.add(new_sequence(seq_id, SamplingParams()))
    masks = [torch.zeros(VOCAB, dtype=torch.bool), torch.zeros(VOCAB), None]
    drawn = sampler.sample(range(3), random_logits(3), masks=masks)
    assert drawn[0].error == "no token is left to draw: every one is banned"
    assert drawn[1].error is not None
    assert drawn[1].error.startswith("sampling failed: ")
    assert drawn[2].error is None


def test_logprobs_are_the_models_own_whatever_the_request_changes() -> None:
    logits = random_logits(1, seed=3)
    expected = torch.log_softmax(logits[0].double(), dim=0)
    sampler = make_sampler()
    params = SamplingParams(
        temperature=0, logprobs=4, logit_bias={7: 100.0}, repetition_penalty=3.0, allowed_token_ids=[7, 8]
    )
    sampler.add(new_sequence(0, params))
    drawn = sampler.sample([0], logits)[0]
    assert drawn.token_ids == [7]
    assert drawn.logprobs is not None
    (found,) = drawn.logprobs
    assert found.token_id == 7
    assert found.logprob == pytest.approx(expected[7].item(), abs=1e-6)
    assert found.rank == int((expected >= expected[7]).sum())
    values, ids = expected.topk(4)
    assert [token_id for token_id, _ in found.top] == ids.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_prompt_logprobs_are_those_of_each_target() -> None:
    logits = random_logits(6, seed=4)
    logits[3, 9] = math.nan
    targets = [5, 0, 256, 7, 9]
    found = make_sampler().prompt_logprobs(logits, targets, 2)
    assert len(found) == 5
    for i, target in enumerate(targets):
        assert found[i].token_id == target
        if i == 3:
            assert math.isnan(found[i].logprob)
            assert found[i][2:] == (0, ())
            continue
        expected = np.log(softmax(logits[i].double().numpy()))
        assert found[i].logprob == pytest.approx(expected[target], abs=1e-6)
        assert found[i].rank == int((expected >= expected[target]).sum())
        assert [token_id for token_id, _ in found[i].top] == np.argsort(-expected)[:2].tolist()
    assert make_sampler().prompt_logprobs(logits, [], 2) == []


def test_bad_words_and_dry_act_through_their_hooks() -> None:
    sampler = make_sampler()
    sampler.add(new_sequence(0, SamplingParams(temperature=0, bad_words=["ab"])))
    sampler.add(new_sequence(1, SamplingParams(temperature=0, dry_multiplier=5.0), 0, list(b"xyz, xy")))
    sampler.add(new_sequence(2, SamplingParams(temperature=0, dry_multiplier=5.0), 0, list(b"xyz, :xy")))
    sampler.add(new_sequence(3, SamplingParams(temperature=0, dry_multiplier=5.0), 0, list(b"xyz, x:y")))
    logits = torch.zeros(4, VOCAB)
    logits[0, ord("a")] = 2.0
    logits[1:, ord("z")] = 2.0
    assert [entry.token_ids[0] for entry in sampler.sample(range(4), logits)] == [97, 0, 0, ord("z")]
    logits[0, ord("b")] = 5.0
    assert sampler.sample([0], logits)[0].token_ids == [97]


@pytest.mark.parametrize(
    ("params", "prompt", "reason"),
    [
        (SamplingParams(bad_words=["x"]), [1], "bad_words needs a tokenizer"),
        (SamplingParams(dry_multiplier=1.0), [1], "dry_multiplier needs a tokenizer"),
        (SamplingParams(allowed_token_ids=[VOCAB]), [1], "token id 257 is outside the vocabulary"),
        (SamplingParams(), [VOCAB], "the prompt holds token id 257, outside the vocabulary"),
    ],
)
def test_a_sequence_that_cannot_be_drawn_from_says_why_and_the_others_go_on(
    params: SamplingParams, prompt: list[int], reason: str
) -> None:
    sampler = Sampler(VOCAB)
    sampler.add(new_sequence(0, SamplingParams(temperature=0)))
    sampler.add(new_sequence(1, params, prompt=prompt))
    sampler.add(new_sequence(2, SamplingParams(top_k=3)))
    drawn = sampler.sample([0, 1, 2], random_logits(3))
    assert [entry.seq_id for entry in drawn] == [0, 1, 2]
    assert [bool(entry.error) for entry in drawn] == [False, True, False]
    assert drawn[1].error is not None
    assert reason in drawn[1].error
    sampler.remove(1)
    sampler.add(new_sequence(1, SamplingParams()))
    assert sampler.sample([1], random_logits(1))[0].error is None


def test_an_encoder_that_fails_ends_its_request_only() -> None:
    def broken(text: str) -> list[int]:
        raise ValueError(f"cannot encode {text}")

    sampler = Sampler(VOCAB, encode=broken, token_bytes=token_bytes)
    sampler.add(new_sequence(0, SamplingParams(bad_words=["x"])))
    assert sampler.sample([0], random_logits(1))[0].error == "sampling failed: ValueError: cannot encode x"


def test_a_vocabulary_too_large_for_exact_sums_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        Sampler(2**22 + 1)


def test_dry_without_breakers_needs_no_vocabulary_text() -> None:
    sampler = Sampler(VOCAB)
    params = SamplingParams(temperature=0, dry_multiplier=5.0, dry_sequence_breakers=())
    sampler.add(new_sequence(0, params, prompt=[1, 2, 3, 1, 2]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    assert sampler.sample([0], logits)[0].token_ids == [0]
