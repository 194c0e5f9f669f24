"""What a request asks for is worked out once for all its answers, changes nothing of them, and is let go with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from nanovllm_cli.engine import sampler as sampler_module
from nanovllm_cli.engine.plan import NewSequence, Scheduled
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sampling_dry import DryBreakers, DryPrompt
from nanovllm_cli.sampling_params import SamplingParams

VOCAB = 257
PROMPT = list(b"the cat sat; the cat sat; the cat")


class Encoder:
    """A tokenizer of bytes that counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: str) -> list[int]:
        self.calls += 1
        return list(text.encode())


def make_sampler(encode: Encoder) -> Sampler:
    return Sampler(VOCAB, encode=encode, token_bytes=lambda: [bytes([i]) for i in range(256)])


def add(sampler: Sampler, params: SamplingParams, seq_ids: Sequence[int], prompt: Sequence[int] = PROMPT) -> None:
    for seq_id in seq_ids:
        sampler.add(NewSequence(seq_id, list(prompt), params, 7 + seq_id, ()))


def draws(sampler: Sampler, seq_ids: Sequence[int], count: int) -> list[list[int]]:
    """`count` tokens for each, of logits that favour the bytes of a word."""
    random = torch.Generator().manual_seed(3)
    tokens: list[list[int]] = [[] for _ in seq_ids]
    for _ in range(count):
        logits = torch.randn(1, VOCAB, generator=random).repeat(len(seq_ids), 1)
        logits[:, list(b"the cat;")] += 5.0
        for found, drawn in zip(tokens, sampler.sample(seq_ids, logits), strict=True):
            assert drawn.error is None
            found += drawn.token_ids
    return tokens


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long those prompts are that DRY looks at."""
    lengths = []

    class Counted(DryPrompt):
        def __init__(self, prompt_ids: Sequence[int], breakers: DryBreakers) -> None:
            lengths.append(len(prompt_ids))
            super().__init__(prompt_ids, breakers)

    monkeypatch.setattr(sampler_module, "DryPrompt", Counted)
    return lengths


def test_dry_looks_at_a_prompt_once_for_all_answers(prompts: list[int]) -> None:
    encode = Encoder()
    sampler = make_sampler(encode)
    params = SamplingParams(dry_multiplier=2.0, dry_sequence_breakers=["at", ";", "END"], n=6)
    add(sampler, params, [0])
    once = encode.calls
    add(sampler, params, range(1, 6))
    assert prompts == [len(PROMPT)]
    assert encode.calls == once > 0
    add(sampler, params, [6], PROMPT[:-1])
    add(sampler, SamplingParams(dry_multiplier=2.0, dry_sequence_breakers=["t"]), [7])
    assert prompts == [len(PROMPT), len(PROMPT) - 1, len(PROMPT)]


def test_a_step_that_was_broken_off_looks_at_no_prompt_again(prompts: list[int]) -> None:
    sampler, other = make_sampler(Encoder()), make_sampler(Encoder())
    params = SamplingParams(dry_multiplier=2.0, bad_words=["cat"])
    for each in (sampler, other):
        add(each, params, range(3))
    expected = draws(other, range(3), 5)
    before = len(prompts)
    assert draws(sampler, range(3), 2) == [tokens[:2] for tokens in expected]
    sampler.keep([Scheduled(0, PROMPT, 0, [0], (0, 1, 2), prompt_len=len(PROMPT))])
    assert len(prompts) == before
    assert draws(sampler, range(3), 5) == expected


def test_what_dry_knows_of_a_prompt_goes_with_its_last_answer(prompts: list[int]) -> None:
    sampler = make_sampler(Encoder())
    params = SamplingParams(dry_multiplier=2.0)
    add(sampler, params, [0, 1])
    sampler.remove(0)
    add(sampler, params, [2])
    assert len(prompts) == 1
    sampler.remove(1)
    sampler.remove(2)
    add(sampler, params, [3])
    assert len(prompts) == 2


def test_bad_words_are_encoded_once_for_all_answers() -> None:
    encode = Encoder()
    sampler = make_sampler(encode)
    params = SamplingParams(bad_words=["cat", "sat"])
    add(sampler, params, [0])
    once = encode.calls
    add(sampler, params, range(1, 8))
    assert encode.calls == once > 0
    add(sampler, SamplingParams(bad_words=["sat"]), [8])
    assert encode.calls > once


def test_requests_beside_each_other_draw_what_each_draws_alone() -> None:
    """Same prompt, other words; same words, other prompt; several answers of each."""
    requests = [
        (SamplingParams(dry_multiplier=3.0), PROMPT),
        (SamplingParams(dry_multiplier=3.0, dry_sequence_breakers=[]), PROMPT),
        (SamplingParams(dry_multiplier=3.0, dry_sequence_breakers=["at", " t"]), PROMPT),
        (SamplingParams(dry_multiplier=3.0, dry_sequence_breakers=["at", " t"]), PROMPT[3:]),
        (SamplingParams(dry_multiplier=3.0, dry_allowed_length=1, bad_words=["c", "te"]), PROMPT),
        (SamplingParams(bad_words=["te", "t "]), PROMPT),
    ]
    together = make_sampler(Encoder())
    alone = []
    for i in range(12):
        params, prompt = requests[i % 6]
        add(together, params, [i], prompt)
        own = make_sampler(Encoder())
        add(own, params, [i], prompt)
        alone += draws(own, [i], 40)
    assert draws(together, range(12), 40) == alone
    assert len({tuple(tokens) for tokens in alone}) == 12


def test_other_tokenizers_do_not_see_what_one_made_of_the_words() -> None:
    one, other = make_sampler(Encoder()), Sampler(VOCAB, encode=lambda text: [3], token_bytes=lambda: [b"x"] * 256)
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, ord("c")] = 2.0, 1.0
    for sampler, expected in ((one, 3), (other, ord("c"))):
        add(sampler, SamplingParams(temperature=0, bad_words=["c"]), [0])
        assert sampler.sample([0], logits)[0].token_ids == [expected]


def test_a_sampler_that_is_gone_holds_its_tokenizer_no_longer() -> None:
    encode = Encoder()
    sampler = make_sampler(encode)
    add(sampler, SamplingParams(dry_multiplier=2.0, bad_words=["cat"]), [0, 1])
    draws(sampler, [0, 1], 2)
    gone = weakref.ref(encode)
    gc.disable()  # not even until the next collection
    try:
        del sampler, encode
        assert gone() is None
    finally:
        gc.enable()


def test_an_encoder_that_failed_is_asked_again() -> None:
    class Failing(Encoder):
        def __call__(self, text: str) -> list[int]:
            if not self.calls:
                self.calls += 1
                raise ValueError("not now")
            return super().__call__(text)

    sampler = make_sampler(Failing())
    add(sampler, SamplingParams(bad_words=["cat"]), [0])
    assert sampler.sample([0], torch.zeros(1, VOCAB))[0].error == "sampling failed: ValueError: not now"
    add(sampler, SamplingParams(bad_words=["cat"]), [0])
    assert draws(sampler, [0], 1)


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_xtc_of_threshold_zero_takes_the_least_likely_as_often_as_it_is_asked_to(probability: float) -> None:
    sampler = make_sampler(Encoder())
    params = SamplingParams(xtc_probability=probability, xtc_threshold=0.0, allowed_token_ids=[1, 2, 3])
    count = 2000
    add(sampler, params, range(count))
    logits = torch.full((count, VOCAB), 0.0)
    logits[:, 1], logits[:, 2] = 4.0, 3.0  # 0.72, 0.26 and 0.013
    ids = np.array([drawn.token_ids[0] for drawn in sampler.sample(range(count), logits)])
    assert abs((ids == 3).mean() - (probability + (1 - probability) * 0.0132)) < 0.04
    assert probability < 1 or set(ids.tolist()) == {3}
