"""Draws whose constraint is asked afterwards: the same tokens, or the same distribution, as under a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nanovllm_cli.constrain.compiler import Compiler
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.vocabulary import byte_vocabulary
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.engine.plan import NewSequence
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sampling_state import SequenceState
from nanovllm_cli.sampling_params import SamplingParams
from sampler_reference import softmax

STOP, VOCAB = 256, 257
TEXT = "[a-m]{2,200}"


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, compiler=Compiler(lambda: byte_vocabulary(["<|stop|>"])))


def add(sampler: Sampler, seq_id: int, regex: str = TEXT, *, trusts: bool = True, **options: object) -> SequenceState:
    params = SamplingParams(constraint=Constraint("regex", regex), **({"temperature": 1.0} | options))  # type: ignore[arg-type]
    sampler.add(NewSequence(seq_id, [1], params, seq_id, (STOP,)))
    state = sampler._states[seq_id]
    state.expects_allowed = trusts
    return state


def logits_of(seed: int, likely: str = "abxyz") -> torch.Tensor:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    for letter in likely.encode():
        logits[0, letter] += 4.0
    return logits


def draws(sampler: Sampler, seq_ids: Sequence[int], logits: torch.Tensor) -> list[int]:
    """As the engine calls it."""
    sampler.start_masks(seq_ids)
    drawn = sampler.sample(seq_ids, logits, [0] * len(seq_ids))
    assert all(entry.error is None for entry in drawn), drawn
    return [entry.token_ids[0] for entry in drawn]


def masks_asked_for(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    asked: list[set[int]] = []
    add = sampler._mask_threads._add

    def adding(guides: dict[int, Guide]) -> None:
        asked.extend([set(guides)] if guides else [])
        add(guides)

    monkeypatch.setattr(sampler._mask_threads, "_add", adding)
    return asked


def test_tokens_are_distributed_as_under_a_mask(sampler: Sampler) -> None:
    """After two letters the stop id is allowed as well; two thirds of what is drawn first are not."""
    logits = logits_of(3)
    logits[0, STOP] = 4.0
    allowed = [*range(ord("a"), ord("m") + 1), STOP]
    expected = np.zeros(VOCAB)
    expected[allowed] = softmax(logits[0].double().numpy()[allowed]) * 4000
    counts = np.zeros(VOCAB)
    for seq_id in range(4000):
        state = add(sampler, seq_id, "ab[a-m]{0,200}")
        state.append(ord("a"))
        state.append(ord("b"))
        assert state.draws_first
    for token_id in draws(sampler, range(4000), logits):
        counts[token_id] += 1
    assert counts[expected == 0].sum() == 0
    statistic = ((counts - expected)[allowed] ** 2 / expected[allowed]).sum()
    degrees = len(allowed) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"logit_bias": {98: 1.0}}, {"repetition_penalty": 1.5}, {"logprobs": 1}]
)
def test_a_batch_changes_no_draw(sampler: Sampler, options: dict[str, object]) -> None:
    """Those that are asked afterwards, those whose masks come first, and those without a constraint, step by step."""

    def run(seq_ids: Sequence[int]) -> list[list[int]]:
        for seq_id in seq_ids:
            add(sampler, seq_id, trusts=seq_id % 2 == 0, **options)
            if seq_id % 3 == 2:
                sampler.add(NewSequence(seq_id, [1], SamplingParams(**options), seq_id, (STOP,)))  # type: ignore[arg-type]
        steps = []
        for step in range(8):
            logits = logits_of(step)
            logits[0, STOP] = -9.0
            steps.append(draws(sampler, seq_ids, logits))
        return [list(each) for each in zip(*steps, strict=True)]

    together = run(range(12))
    assert together == [run([seq_id])[0] for seq_id in range(12)]
    assert len({tuple(each) for each in together}) > 1 or options == {"temperature": 0.0}


@pytest.mark.parametrize("likely", ["abxyz", "xyz", "abc"])
def test_a_greedy_request_draws_what_it_draws_under_a_mask(sampler: Sampler, likely: str) -> None:
    for step in range(6):
        logits = logits_of(step, likely)
        add(sampler, 0, temperature=0.0)
        add(sampler, 1, temperature=0.0, trusts=False)
        letters = logits[0, ord("a") : ord("m") + 1]
        assert draws(sampler, [0, 1], logits) == [ord("a") + int(letters.argmax())] * 2


def test_masks_are_computed_only_where_the_answer_was_no(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = masks_asked_for(sampler, monkeypatch)
    for seq_id in range(4):
        add(sampler, seq_id, "[a-m]{2,200}" if seq_id < 2 else "[p-z]{2,200}", trusts=seq_id % 2 == 0, temperature=0.0)
    assert draws(sampler, range(4), logits_of(0, "aaa"))[0] == ord("a")
    assert asked == [{1, 3}, {2}]  # the masks beside the model; and that of a wrong guess
    asked.clear()
    assert draws(sampler, range(4), logits_of(0, "aaa"))[:2] == [ord("a")] * 2
    assert asked == [{2, 3}]  # 1 was right and 2 was wrong


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"min_p": 0.1}, {"typical_p": 0.9},
     {"top_n_sigma": 1.0}, {"top_p": 0.99, "xtc_probability": 0.5}],
)  # fmt: skip
@pytest.mark.parametrize("lead", [0.0, 2.0, 6.0, 12.0])
def test_filters_choose_among_what_is_allowed(sampler: Sampler, options: dict[str, object], lead: float) -> None:
    """Whether the mask comes first or is asked for afterwards, token by token the same."""
    for first in ("a", "x"):
        tokens = []
        for trusts in (False, True):
            sequence = [add(sampler, seq_id, **options) for seq_id in range(8)]
            drawn = []
            for step in range(6):
                for state in sequence:
                    state.expects_allowed = trusts
                logits = logits_of(step)
                logits[0, ord(first)] += lead
                drawn.append(draws(sampler, range(8), logits))
            tokens.append(drawn)
        assert tokens[0] == tokens[1]
        assert {token for step in tokens[0] for token in step} <= set(range(ord("a"), ord("m") + 1)) | {STOP}


def test_masks_of_filtered_draws_are_computed_only_where_questions_do_not_decide(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = masks_asked_for(sampler, monkeypatch)
    sharp, two, flat, other = logits_of(0, "aaaa"), logits_of(0, "aaabbb"), logits_of(0, "a"), logits_of(0, "aaxxxx")
    add(sampler, 0, top_p=0.9, trusts=False)
    for logits, expected in (
        (sharp, [{0}]), (sharp, []), (two, []), (flat, [{0}]), (flat, [{0}]), (two, [{0}]), (two, []),
        (other, [{0}]), (other, [{0}]),
    ):  # fmt: skip
        draws(sampler, [0], logits)
        assert asked == expected
        asked.clear()


def test_a_stop_id_ends_an_answer_where_its_grammar_may_end_and_only_there(sampler: Sampler) -> None:
    logits = logits_of(0)
    logits[0, STOP] = 20.0
    state = add(sampler, 0, "[a-m]{2,4}", temperature=0.0)
    drawn = []
    while not drawn or drawn[-1] != STOP:
        state.expects_allowed = True
        drawn += draws(sampler, [0], logits)
    assert len(drawn) == 3


def test_a_row_that_is_not_finite_and_a_matcher_that_gives_up_end_their_own_sequence(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(guide: Guide, token_id: int) -> bool:
        raise ZeroDivisionError

    for seq_id in range(3):
        add(sampler, seq_id)
    logits = logits_of(0).repeat(3, 1)
    logits[1, 7] = math.nan
    monkeypatch.setattr(type(sampler._states[0].guide), "allows", breaks)
    errors = [entry.error or "" for entry in sampler.sample(range(3), logits)]
    assert "ZeroDivisionError" in errors[0]
    assert "not finite" in errors[1]
    assert "ZeroDivisionError" in errors[2]
    monkeypatch.undo()
    assert [bool(entry.error) for entry in sampler.sample(range(3), logits)] == [False, True, False]


def test_inside_reasoning_everything_but_the_end_is_allowed() -> None:
    vocabulary = byte_vocabulary(["<|stop|>"])
    compiler = Compiler(lambda: vocabulary)
    params = SamplingParams(constraint=Constraint("regex", "yes"), reasoning=ReasoningPhase("<a>", "</a>", True))
    guide = compiler.guide(params, (STOP,))
    assert guide is not None
    for token_id in b"so </a>":
        assert [each for each in range(VOCAB + 9) if guide.allows(each)] == list(range(256))
        guide.accept(token_id)
    assert [each for each in range(VOCAB + 9) if guide.allows(each)] == [ord("y")]


def test_a_draw_that_is_broken_off_is_repeated_alike(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its masks; which way it goes then is what it was."""
    steps = [logits_of(seed, "abxyz"[seed % 3 :]) for seed in range(24)]
    for seq_id in range(8):
        add(sampler, seq_id, trusts=False)
        whole = [draws(sampler, [seq_id], step) for step in steps]
        add(sampler, seq_id, trusts=False)
        again = []
        for step in steps:
            with monkeypatch.context() as broken:
                broken.setattr(sampler, "_put_logprobs", Mock(side_effect=MemoryError))
                with pytest.raises(MemoryError):
                    draws(sampler, [seq_id], step)
            again.append(draws(sampler, [seq_id], step))
        assert again == whole
