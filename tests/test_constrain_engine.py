"""Constraints in the engine: with everything else that a request may ask for, in batches, forked, preempted, failing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from nanovllm_cli import LLM, SamplingParams, system
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constrain import compiler as compilers
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.engine.outputs import CompletionOutput
from nanovllm_cli.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps(SCHEMA))
DATE = Constraint("regex", r"\d{4}-\d\d-\d\d")
YES = Constraint("choice", '["yes", "no", "yes, and no"]')


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", config=EngineConfig(num_blocks=48, block_size=16, threads=2, max_num_seqs=8)) as llm:
        yield llm


def answers(llm: LLM, constraint: Constraint | None, **options: Any) -> list[CompletionOutput]:
    params = SamplingParams(constraint=constraint, **{"max_tokens": 90, "seed": 7} | options)
    return list(llm.generate("Once upon a time", params)[0].outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"temperature": 0.0, "logprobs": 2},
        {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "dry_multiplier": 1.0, "xtc_probability": 0.5},
        {"typical_p": 0.5, "logit_bias": {5: 100.0, 6: -100.0}, "bad_words": ["name is"]},
    ],
)
def test_an_answer_is_what_its_schema_says_however_it_is_drawn(llm: LLM, options: dict[str, Any]) -> None:
    for answer in answers(llm, JSON, n=3, **options):
        assert (answer.finish_reason, answer.error) == ("stop", None)
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        if "logprobs" in options:
            assert answer.logprobs is not None
            assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)


def test_answers_of_different_kinds_run_together(llm: LLM) -> None:
    kinds = [JSON, None, DATE, YES, Constraint("json_object"), Constraint("gbnf", 'root ::= "a"+ "." '), JSON]
    params = [SamplingParams(constraint=kind, seed=i, max_tokens=60) for i, kind in enumerate(kinds)]
    together = llm.generate(["The end"] * len(kinds), params)
    for each, output in zip(params, together, strict=True):
        assert llm.generate("The end", each)[0].outputs == output.outputs
    texts = [output.outputs[0].text for output in together]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", texts[2])
    assert texts[3] in json.loads(YES.text)


def test_without_room_answers_are_preempted_and_stay_the_same(llm: LLM) -> None:
    long = Constraint("regex", r"([a-z]{3} ){120}end")
    params = [SamplingParams(constraint=long, seed=i, max_tokens=500) for i in range(8)]
    before = llm.stats().preemptions
    together = [output.outputs[0] for output in llm.generate(["Once upon a time"] * 8, params)]
    assert llm.stats().preemptions > before
    assert [answer.finish_reason for answer in together] == ["stop"] * 8
    assert all(re.fullmatch(r"([a-z]{3} ){120}end", answer.text) for answer in together)
    assert llm.generate("Once upon a time", params[3])[0].outputs[0] == together[3]


def test_a_fulfilled_constraint_ends_the_answer_whatever_else_is_asked(llm: LLM) -> None:
    for options in ({"min_tokens": 60}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 60, "temperature": 0.0}):
        (answer,) = answers(llm, DATE, **options)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", answer.text)
        assert answer.finish_reason == "stop"
    (answer,) = answers(llm, Constraint("choice", '[""]'))
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("", "stop", ())
    (answer,) = answers(llm, Constraint("regex", "a{5}"), max_tokens=len(llm.tokenizer.encode("aaaaa", add_special_tokens=False)))
    assert (answer.text, answer.finish_reason) == ("aaaaa", "stop")


def test_where_more_may_follow_the_answers_own_ends_count(llm: LLM) -> None:
    (answer,) = answers(llm, Constraint("regex", "[a-z ]*"), ignore_eos=True, max_tokens=40)
    assert answer.finish_reason == "length"
    (answer,) = answers(llm, Constraint("regex", "(ab)*"), min_tokens=6, logit_bias=dict.fromkeys(llm.tokenizer.eos_ids, 100.0))
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) in (7, 8)
    (stop_id,) = llm.tokenizer.encode("!", add_special_tokens=False)
    (answer,) = answers(llm, Constraint("regex", "a+"), stop_token_ids=(stop_id,), ignore_eos=True, logit_bias={stop_id: 100.0})
    assert (set(answer.text), answer.stop_reason) == ({"a"}, stop_id)
    (answer,) = answers(llm, Constraint("regex", "one, two, three"), stop=(", t",))
    assert (answer.text, answer.stop_reason) == ("one", ", t")


def test_what_cannot_be_drawn_ends_its_own_request(llm: LLM) -> None:
    (other,) = llm.tokenizer.encode("x", add_special_tokens=False)
    params = [SamplingParams(constraint=DATE, allowed_token_ids=(other,)), SamplingParams(constraint=YES, seed=1)]
    failed, fine = (output.outputs[0] for output in llm.generate(["a", "b"], params))
    assert (failed.finish_reason, failed.error) == ("error", "no token is left to draw: every one is banned")
    assert failed.unmeetable
    assert fine.finish_reason == "stop"


def test_a_matcher_that_gives_up_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(compilers.Matcher):
        num_tokens = 0

        def accept(self, token_id: int) -> None:
            self.num_tokens += 1
            breaks = self.num_tokens == 3 and token_id in eights
            super().accept(0 if breaks else token_id)

    eights = {i for i in range(llm.tokenizer.vocab_size) if llm.tokenizer.id_to_bytes(i) == b"8"}
    monkeypatch.setattr(compilers, "Matcher", Breaks)
    params = [SamplingParams(constraint=Constraint("regex", each * 7), temperature=0.0) for each in ("8", "9")]
    failed, fine = (output.outputs[0] for output in llm.generate(["a", "b"], params))
    assert failed.finish_reason == "error"
    assert "constraint" in str(failed.error)
    assert not failed.unmeetable  # what was drawn was not what it allows: that is nothing the request asked for
    assert fine.finish_reason == "stop"


def test_what_is_more_than_llguidance_follows_is_the_requests_own_doing(llm: LLM) -> None:
    with pytest.raises(UsageError, match="too involved"):  # already at its beginning
        answers(llm, Constraint("regex", "(a{1,900}){300,900}"))
    (answer,) = answers(llm, Constraint("regex", "(a{1,100}){50,100}"), max_tokens=300)
    assert (answer.finish_reason, answer.unmeetable) == ("error", True)
    assert answer.error == "the answer could not be held to its constraint: its expressions are too involved"
    doubling = "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(18))
    (answer,) = answers(llm, Constraint("gbnf", f'root ::= a0\n{doubling}a18 ::= "x"'))
    assert (answer.finish_reason, answer.unmeetable) == ("error", True)
    assert answer.error == "the answer could not be held to its constraint: the text so far can be read in too many ways"


def test_a_step_that_fails_is_repeated_from_the_same_place(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(constraint=kind, seed=3, max_tokens=60, n=2) for kind in (JSON, DATE)]
    expected = [output.outputs for output in llm.generate(["a", "b"], params)]
    runner = llm._worker.runner
    run, calls = runner.run, 0

    def failing(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1 and len(plan.scheduled) > 1:
            runner.sampler.start_masks([seq_id for share in plan.scheduled for seq_id in share.draws])
            for new in plan.new:
                runner.sampler.add(new)
            raise RuntimeError("somewhere in the model")
        return run(plan)

    monkeypatch.setattr(runner, "run", failing)
    assert [output.outputs for output in llm.generate(["a", "b"], params)] == expected
    assert calls > 20


def test_reasoning_goes_before_the_constraint(llm: LLM) -> None:
    for starts_inside in (True, False):
        phase = ReasoningPhase("<think>", "</think>", starts_inside=starts_inside, budget=6)
        params = {"logit_bias": dict.fromkeys(llm.tokenizer.eos_ids, 100.0), "reasoning": phase}
        (answer,) = answers(llm, YES, **params, skip_special_tokens=False)
        assert answer.finish_reason == "stop"
        thought, closed, said = answer.text.rpartition("</think>")
        assert bool(closed) or not starts_inside
        assert any(said.startswith(choice) for choice in json.loads(YES.text))
        assert thought or not starts_inside
    (free,) = answers(llm, None, reasoning=ReasoningPhase("<think>", "</think>", True, 4), max_tokens=30)
    assert free.text.index("</think>") < 60


# ---- compiling beside the steps ----


def test_bad_constraints_are_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().steps
    for constraint in (Constraint("regex", "("), Constraint("json_schema", '{"type": "strin"}'), Constraint("lark", "start: x")):
        with pytest.raises(UsageError):
            llm.generate(["a", "b"], [SamplingParams(), SamplingParams(constraint=constraint)])
        with pytest.raises(UsageError):
            next(llm.stream("a", SamplingParams(constraint=constraint)))
    assert llm.stats().steps == steps


def test_a_request_waits_for_its_constraint_and_nobody_else_does(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    compile_ = compilers.compiled

    def slowly(constraint: Constraint, vocabulary: Any) -> Any:
        go_on.wait(60)
        return compile_(constraint, vocabulary)

    monkeypatch.setattr(compilers, "compiled", slowly)
    engine, ids = llm.engine, llm.tokenizer.encode("a")
    waits = SamplingParams(constraint=Constraint("regex", "wait{3}"), max_tokens=20, n=2)
    engine.add("waits", ids, waits)
    engine.add("leaves", ids, waits)
    engine.add("is wrong", ids, SamplingParams(constraint=Constraint("regex", "wait(")))
    engine.add("runs", ids, SamplingParams(max_tokens=4, ignore_eos=True))
    finished: dict[str, Any] = {}
    while "runs" not in finished:
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert set(finished) == {"runs"}
    assert engine.stats().waiting == 5
    assert engine.step() == []  # nothing to do yet, and it comes back
    left = engine.abort("leaves", 0)
    assert left is not None
    assert not left.finished
    left = engine.abort("leaves")
    assert left is not None
    assert left.finished
    engine.abort("waits", 1)
    go_on.set()
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert [(answer.text, answer.finish_reason) for answer in finished["waits"].outputs] == [("waittt", "stop"), ("", "abort")]
    assert finished["is wrong"].outputs[0].finish_reason == "error"
    assert "unclosed" in finished["is wrong"].outputs[0].error
    assert finished["is wrong"].outputs[0].unmeetable
    assert engine.stats().waiting == 0


def test_equal_constraints_are_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, seen = compilers.compiled, []

    def counting(constraint: Constraint, vocabulary: Any) -> Any:
        seen.append(constraint)
        return compile_(constraint, vocabulary)

    monkeypatch.setattr(compilers, "compiled", counting)
    monkeypatch.setattr(system, "available_bytes", system.memory_bytes)
    same = [SamplingParams(constraint=Constraint("regex", "once[0-9]"), seed=i) for i in range(6)]
    texts = {output.outputs[0].text for output in llm.generate(["a"] * 6, same)}
    assert all(re.fullmatch("once[0-9]", text) for text in texts)
    assert len(seen) == 1
    for i in range(compilers.MAX_KEPT):
        prepared = llm._worker.prepare(SamplingParams(constraint=Constraint("regex", f"other{i}")))
        assert prepared is not None
        prepared.result()
    llm.generate("a", same[0])
    assert len(seen) == compilers.MAX_KEPT + 2
    monkeypatch.setattr(system, "available_bytes", lambda: system.memory_bytes() // 9)  # the others would take what there is
    for text in ("other9", "once[0-9]", "one more", "one more"):
        llm.generate("a", SamplingParams(constraint=Constraint("regex", text)))
    assert len(seen) == compilers.MAX_KEPT + 3
    llm.generate("a", same[0])
    assert len(seen) == compilers.MAX_KEPT + 4


def test_steps_without_constraints_start_no_masks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._worker.runner.sampler._mask_threads, "_compute", None)
    (answer,) = answers(llm, None, max_tokens=5)
    assert answer.error is None
