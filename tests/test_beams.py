"""A search by beams against transformers' (`generate(num_beams=…)`), and against all answers that there are."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engines import SMALL, engine_for, random_model, run, save, worker_for
from nanovllm_cli.engine.beams import BeamSearch
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import MAX_BEAMS, NOT_WITH_BEAMS, SamplingParams

SIZES = {**SMALL, "vocab_size": 24, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
"""So few tokens that beams meet the end now and then."""
END = 2
PROMPTS = [[3, 9, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [22]]
LENGTH = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return engine_for(worker_for(folder), eos_ids=(END,))


def beams(num_beams: int, n: int = 1, **options: Any) -> SamplingParams:
    return SamplingParams(num_beams=num_beams, n=n, **{"max_tokens": LENGTH, "logprobs": 0} | options)


def told(output: RequestOutput) -> list[tuple[tuple[int, ...], float]]:
    """Of each answer its tokens, and the sum of their log-probabilities."""
    return [(each.token_ids, sum(one.logprob for one in each.logprobs or ())) for each in output.outputs]


def theirs(model: Any, prompt: list[int], num_beams: int, **options: Any) -> list[tuple[tuple[int, ...], float]]:
    """Transformers' answers, with their scores."""
    ids = torch.tensor([prompt])
    ends = options.pop("ends", [END])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=num_beams, num_return_sequences=num_beams, do_sample=False,
        max_new_tokens=LENGTH, eos_token_id=ends, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        drawn = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(drawn) if token in ends), len(drawn))
        answers.append((tuple(drawn[:end]), score))
    return answers


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("num_beams", [2, 3, 5, 8])
def test_answers_are_those_of_transformers(model: Any, engine: Engine, num_beams: int, length_penalty: float) -> None:
    params = beams(num_beams, num_beams, length_penalty=length_penalty)
    ended = 0
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, params) for prompt in PROMPTS]), strict=True):
        expected = theirs(model, prompt, num_beams, length_penalty=length_penalty)
        found = told(output)
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        for each, (ids, total), (_, score) in zip(output.outputs, found, expected, strict=True):
            assert total / len(ids) ** length_penalty == pytest.approx(score, abs=1e-4)
            ends = ids[-1] == END
            assert each.finish_reason == ("stop" if ends else "length")
            assert each.index == output.outputs.index(each)
            ended += ends
    assert ended, "a search that meets no end shows little"


def test_several_tokens_may_end_an_answer(model: Any, folder: Path) -> None:
    engine = engine_for(worker_for(folder), eos_ids=(END, 7))
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, beams(4, 4)) for prompt in PROMPTS]), strict=True):
        assert [ids for ids, _ in told(output)] == [ids for ids, _ in theirs(model, prompt, 4, ends=[END, 7])]


def test_what_ends_an_answer_can_be_left_out_and_added(model: Any, engine: Engine) -> None:
    prompt = PROMPTS[0]
    (without,) = run(engine, [(prompt, beams(3, 3, ignore_eos=True))])
    assert {len(ids) for ids, _ in told(without)} == {LENGTH}
    (added,) = run(engine, [(prompt, beams(3, 3, ignore_eos=True, stop_token_ids=[22]))])
    assert [ids for ids, _ in told(added)] == [ids for ids, _ in theirs(model, prompt, 3, ends=[22])]
    ended = [each for each in added.outputs if each.token_ids[-1] == 22]
    assert ended
    assert {(each.finish_reason, each.stop_reason) for each in ended} == {("stop", 22)}


def test_with_as_many_beams_as_there_are_beginnings_the_likeliest_answer_of_all_is_found() -> None:
    """Of a chain whose next token depends on the last: all answers of four tokens are told apart in float64."""
    vocab, length = 4, 4
    chain = torch.log_softmax(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2, -1)
    search = BeamSearch(SamplingParams(num_beams=vocab ** (length - 1)), (), length)
    goes_on = True
    while goes_on:
        rows = []
        for beam in search.beams:
            row = chain[beam.token_ids[-1] if beam.token_ids else 0]
            top = sorted(((i, float(row[i])) for i in range(vocab)), key=lambda each: -each[1])
            rows.append(TokenLogprobs(*top[0], 1, tuple(top)))
        goes_on = search.go_on(rows)

    def total(ids: tuple[int, ...]) -> float:
        return sum(float(chain[before, token]) for before, token in itertools.pairwise((0, *ids)))

    best = max(itertools.product(range(vocab), repeat=length), key=total)
    score, beam = search.found[0]
    assert beam.token_ids == best
    assert beam.total == pytest.approx(total(best), abs=1e-12)
    assert score == beam.total / length
    assert [each.rank for each in beam.logprobs] == [
        1 + int((chain[before] > chain[before, token]).sum()) for before, token in itertools.pairwise((0, *best))
    ]


def test_a_search_ends_where_no_beginning_can_better_what_is_found() -> None:
    def row(*pairs: tuple[int, float]) -> TokenLogprobs:
        return TokenLogprobs(*pairs[0], 1, pairs)

    search = BeamSearch(SamplingParams(num_beams=2), (1,), 9)
    assert search.go_on([row((1, -0.1), (2, -3.0), (3, -4.0))])  # one answer; there are to be two
    assert [beam.token_ids for beam in search.beams] == [(2,), (3,)]
    assert not search.go_on([row((1, -0.2), (4, -0.9), (5, -2.0)), row((4, -1.0), (1, -2.0), (5, -3.0))])
    # found: -0.1 and (-3.0 - 0.2) / 2 = -1.6; the likeliest beginning has (-3.0 - 0.9) / 2 = -1.95
    assert [(beam.token_ids, round(score, 6)) for score, beam in search.found] == [((1,), -0.1), ((2, 1), -1.6)]


def test_an_end_counts_only_among_the_first() -> None:
    pairs = ((2, -0.5), (3, -0.6), (1, -0.7), (4, -0.8))
    search = BeamSearch(SamplingParams(num_beams=2), (1,), 9)
    assert search.go_on([TokenLogprobs(*pairs[0], 1, pairs)])
    assert search.found == []
    assert [beam.token_ids for beam in search.beams] == [(2,), (3,)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5}, {"enable_prefix_caching": False}, {"max_num_seqs": 1}, {"max_num_seqs": 3},
        {"num_blocks": 6}, {"num_speculative_tokens": 3}, {"policy": "priority"},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_depends_on_how_it_is_computed(folder: Path, engine: Engine, settings: dict[str, Any]) -> None:
    """Beside answers that are drawn."""
    drawn = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)
    asked = [(PROMPTS[0], beams(4, 4)), (PROMPTS[1], drawn), (PROMPTS[1], beams(3, 2)), (PROMPTS[2], drawn), (PROMPTS[0], drawn)]
    alone = [run(engine, [each])[0] for each in asked]
    other = engine_for(worker_for(folder, **settings), eos_ids=(END,), **settings)
    for _ in range(2):
        assert list(map(told, run(other, asked))) == list(map(told, alone))
    stats = other.stats()
    assert (stats.preemptions > 0) == ("num_blocks" in settings)
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert (stats.prefix_hit_tokens > 0) == settings.get("enable_prefix_caching", True)


def test_who_came_later_does_not_come_between_two_rounds(folder: Path) -> None:
    engine = engine_for(worker_for(folder, max_num_seqs=1), max_num_seqs=1)
    engine.add("beams", PROMPTS[0], beams(3, max_tokens=4))
    engine.add("later", PROMPTS[1], SamplingParams(max_tokens=4, ignore_eos=True))
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step()]
    assert order == ["beams"] * (1 + 3 * 3) + ["later"] * 4


@pytest.mark.parametrize("finds_prefixes", [True, False])
def test_a_round_computes_a_token_of_each_beam(folder: Path, finds_prefixes: bool) -> None:
    settings = {"enable_prefix_caching": finds_prefixes}
    engine = engine_for(worker_for(folder, **settings), **settings)
    prompt = [3 + i % 20 for i in range(100)]
    run(engine, [(prompt, beams(3, max_tokens=9))])
    assert engine.stats().scheduled_tokens == 100 + 3 * 8


def test_an_output_says_how_far_it_is_and_then_all_at_once(engine: Engine) -> None:
    engine.add("one", PROMPTS[0], beams(3, 2, ignore_eos=True, logprobs=2))
    steps = []
    while engine.has_unfinished():
        steps += engine.step()
    *before, last = steps
    assert len(before) == LENGTH - 1
    assert not any(each.text or each.token_ids or each.finish_reason for step in before for each in step.outputs)
    assert [each.delta_ids for each in last.outputs] == [each.token_ids for each in last.outputs]
    for each in last.outputs:
        assert each.logprobs is not None
        assert [one.token_id for one in each.logprobs] == list(each.token_ids)
        assert all(len(one.top) == 2 and one.top[0][1] >= one.logprob for one in each.logprobs)
    metrics = last.metrics
    assert (metrics.num_computed_prompt_tokens, metrics.num_cached_tokens) == (3, 0)
    assert metrics.first_scheduled is not None
    assert metrics.first_token is not None
    assert metrics.finished is not None
    assert metrics.first_scheduled <= metrics.first_token < metrics.finished


def test_log_probabilities_are_told_to_who_asks(engine: Engine) -> None:
    (output,) = run(engine, [(PROMPTS[0], beams(2, logprobs=None))])
    assert output.outputs[0].logprobs is None


def test_the_context_ends_answers(folder: Path, model: Any) -> None:
    engine = engine_for(worker_for(folder, max_model_len=20), eos_ids=(END,))
    (output,) = run(engine, [(PROMPTS[1], beams(3, 3, max_tokens=None, ignore_eos=True))])
    assert {(len(each.token_ids), each.finish_reason) for each in output.outputs} == {(3, "length")}
    (only,) = run(engine, [(PROMPTS[0], beams(3, 3, max_tokens=1))])
    assert [ids for ids, _ in told(only)] == [(token,) for token in likeliest(model, PROMPTS[0], 3)]


def likeliest(model: Any, prompt: list[int], count: int) -> list[int]:
    return model(torch.tensor([prompt])).logits[0, -1].topk(count).indices.tolist()  # type: ignore[no-any-return]


def test_a_search_ends_when_nobody_waits_for_it(engine: Engine) -> None:
    engine.add("one", PROMPTS[0], beams(3, 2))
    engine.add("two", PROMPTS[1], beams(2))
    for _ in range(3):
        engine.step()
    half = engine.abort("one", 0)
    assert half is not None
    assert not half.finished
    assert engine.stats().running + engine.stats().waiting == 5
    whole = engine.abort("one", 1)
    assert whole is not None
    assert whole.finished
    assert {each.finish_reason for each in whole.outputs} == {"abort"}
    assert engine.stats().running + engine.stats().waiting == 2
    while engine.has_unfinished():
        engine.step()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().used_blocks) == (0, 0, 0)


def test_one_of_its_answers_can_be_given_up(engine: Engine) -> None:
    engine.add("one", PROMPTS[0], beams(3, 2))
    engine.step()
    engine.abort("one", 0)
    steps = []
    while engine.has_unfinished():
        steps += engine.step()
    last = steps[-1]
    assert [each.finish_reason == "abort" for each in last.outputs] == [True, False]
    (both,) = run(engine, [(PROMPTS[0], beams(3, 2))])
    assert last.outputs[1].token_ids == both.outputs[1].token_ids


def test_a_row_that_is_not_finite_ends_the_whole_search_and_no_other(folder: Path) -> None:
    worker = worker_for(folder)
    engine = engine_for(worker, eos_ids=(END,))
    expected = run(engine, [(PROMPTS[1], beams(3))])[0]
    logits, calls = worker.model.logits, itertools.count()

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        rows = logits(hidden)
        if len(rows) == 6 and next(calls) == 1:  # both searches' beams
            rows[1] = math.nan
        return rows

    worker.model.logits = spoilt  # type: ignore[method-assign]
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    failed, other = run(engine, [(PROMPTS[0], beams(3, 2)), (PROMPTS[1], beams(3))])
    assert [each.finish_reason for each in failed.outputs] == ["error", "error"]
    assert "not finite" in str(failed.outputs[0].error)
    assert told(other) == told(expected)
    assert (engine.stats().running, engine.stats().used_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"num_beams": 2, "n": 3}, "n (3) must not be above num_beams (2)"),
        ({"num_beams": 0}, "num_beams must be a whole number from 1 to 64"),
        ({"num_beams": MAX_BEAMS + 1}, "num_beams must be a whole number from 1 to 64"),
        ({"num_beams": True}, "num_beams must be a whole number"),
        ({"num_beams": 2, "length_penalty": math.nan}, "length_penalty must be a number from -4 to 8"),
        ({"num_beams": 2, "length_penalty": "1"}, "length_penalty must be a number"),
    ],
)
def test_what_has_no_meaning_is_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**params)
    assert said in caught.value.message


OTHERS = {
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "dry_multiplier": 0.8, "xtc_probability": 0.5,
    "mirostat": 2, "adaptive_target": 0.5, "samplers": ("top_k",), "logit_bias": {3: 1.0}, "bad_words": ("a",),
    "allowed_token_ids": (3,), "stop": ("a",), "max_repeats": 3, "prompt_logprobs": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_logits_has_no_part_in_it(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no part in a search by beams"):
        beams(2, **{name: OTHERS[name]})
    model_own = SamplingParams(**{name: OTHERS[name]})
    assert model_own.under({"num_beams": 2}) == SamplingParams(num_beams=2)
    assert getattr(model_own.under({"num_beams": 1}), name) == getattr(model_own, name)
    with pytest.raises(UsageError, match=name):
        SamplingParams().under({"num_beams": 2, name: OTHERS[name]})


def test_all_that_has_no_part_in_it_is_tried() -> None:
    assert set(OTHERS) == set(NOT_WITH_BEAMS) - {"constraint"}


def test_more_than_can_be_looked_at_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="num_beams: 24 of them, and 1 tokens") as caught:
        engine.add("one", PROMPTS[0], beams(24))
    assert caught.value.hint == "24 are looked at behind each"
    assert not engine.has_unfinished()
    (output,) = run(engine, [(PROMPTS[0], beams(23))])
    assert output.finished
