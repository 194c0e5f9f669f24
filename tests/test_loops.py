"""Answers that say the same over and over, by vLLM's definition of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.client.wire import text_body
from nanovllm_cli.engine.answer import Answer
from nanovllm_cli.engine.loops import Loop
from nanovllm_cli.engine.plan import Drawn
from nanovllm_cli.engine.sequence import Request
from nanovllm_cli.engine.sequence import Sequence as Drawing
from nanovllm_cli.errors import UsageError


def repeats(ids: Sequence[int], params: SamplingParams) -> bool:
    """Whether the last ones are a piece of some size so many times over, by looking."""
    for size in range(params.min_repeat_size, params.max_repeat_size + 1):
        whole = size * params.max_repeats
        if whole <= len(ids) and list(ids[-whole:]) == list(ids[-size:]) * params.max_repeats:
            return True
    return False


@pytest.mark.parametrize("seed", range(200))
def test_a_loop_is_seen_where_its_last_token_closes_it(seed: int) -> None:
    r = random.Random(seed)
    least = r.randint(1, 4)
    params = SamplingParams(max_repeats=r.randint(2, 5), min_repeat_size=least, max_repeat_size=r.randint(least, 9))
    loop, ids = Loop(params), list[int]()
    piece = [r.randint(0, 3) for _ in range(r.randint(1, 10))]
    for i in range(150):
        ids.append(piece[i % len(piece)] if 30 < i < 100 else r.randint(0, r.choice((0, 1, 3))))
        assert loop.closes(ids[-1]) == repeats(ids, params), ids


def answer_of(ids: list[int], **settings: int) -> Answer:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    request = Request("r", (1,), params, 1000, (9,), 0.0)
    answer = Answer(Drawing(0, request, 0, 0, [1]), (9,), None)
    answer.take(Drawn(0, ids))
    return answer


@pytest.mark.parametrize(("ids", "settings", "reason", "count"), [
    ([5, 6, 5, 6, 5, 6, 5], {"max_repeats": 3}, "repetition", 6),
    ([5, 6, 5, 6, 5, 6, 5], {"max_repeats": 4}, None, 7),
    ([5, 6, 5, 6, 5, 6, 5], {"max_repeats": 0}, None, 7),
    ([5, 6, 5, 6, 5, 6, 5], {"max_repeats": 3, "max_repeat_size": 1}, None, 7),
    ([5, 5, 5, 5, 5, 5, 5], {"max_repeats": 3, "min_repeat_size": 2}, "repetition", 6),
    ([5, 5, 5, 5, 5, 5, 5], {"max_repeats": 3, "min_tokens": 5}, "repetition", 6),
    ([9, 9, 9], {"max_repeats": 2}, "stop", 1),
])  # fmt: skip
def test_an_answer_ends_there(ids: list[int], settings: dict[str, int], reason: str | None, count: int) -> None:
    answer = answer_of(ids, **settings)
    assert (answer.finish_reason, answer.output().num_tokens) == (reason, count)


def test_a_limit_that_is_reached_with_it_is_the_limit() -> None:
    params = SamplingParams(max_repeats=3)
    answer = Answer(Drawing(0, Request("r", (1,), params, 4, (), 0.0), 0, 0, [1]), (), None)
    answer.take(Drawn(0, [5, 5, 5]))
    assert answer.finish_reason == "length"


def test_a_constraint_that_is_fulfilled_behind_it_is_none_of_its_reasons() -> None:
    """Guesses that hold may draw past the place where an answer ends."""
    for ids, reason in (([5, 5, 5, 6], "repetition"), ([5, 5, 5], "stop"), ([5, 5], "stop")):
        answer = Answer(Drawing(0, Request("r", (1,), SamplingParams(max_repeats=3), 9, (), 0.0), 0, 0, [1]), (), None)
        answer.take(Drawn(0, ids, ends=True))
        assert (answer.finish_reason, answer.output().num_tokens) == (reason, min(3, len(ids)))


@pytest.mark.parametrize("config", [{}, {"num_speculative_tokens": 8}])
def test_the_model_stops_where_it_begins_to_repeat_itself(config: dict[str, int]) -> None:
    bias = {300: 100.0, 301: 100.0}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logit_bias=bias, max_repeats=6)
    with LLM("tiny", config=EngineConfig(max_model_len=256, threads=1, **config)) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate("Once upon a time", params)
        (whole,) = llm.generate("Once upon a time", replace(params, max_repeats=0))
        stats = llm.stats()
    (answer,) = output.outputs
    assert answer.finish_reason == "repetition"
    assert answer.token_ids == whole.outputs[0].token_ids[: answer.num_tokens]
    assert repeats(answer.token_ids, params)
    assert not any(repeats(answer.token_ids[:i], params) for i in range(answer.num_tokens))
    assert answer.text
    assert stats.used_blocks == 0


def test_a_server_is_asked_in_vllms_words() -> None:
    def asked(**given: int) -> object:
        return text_body("m", "p", given).get("repetition_detection")

    assert asked() is None
    assert asked(max_repeats=5) == {"max_pattern_size": 64, "min_pattern_size": 1, "min_count": 5}
    assert asked(max_repeats=5, max_repeat_size=8, min_repeat_size=2) == {
        "max_pattern_size": 8, "min_pattern_size": 2, "min_count": 5,
    }  # fmt: skip
    assert asked(max_repeats=0) == {"max_pattern_size": 0}
    with pytest.raises(UsageError, match="have no meaning with a server"):
        asked(max_repeat_size=5)


def test_once_is_no_repetition() -> None:
    for settings in ({"max_repeats": 1}, {"max_repeats": 2, "min_repeat_size": 65}, {"max_repeats": -1}, {"max_repeat_size": 0}):
        with pytest.raises(UsageError):
            SamplingParams(**settings)  # type: ignore[arg-type]
    assert SamplingParams().max_repeats == 0
