"""The engine's own part: what it admits, when answers end, what an abort, a bad row or a broken step does to whom."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from fake_model import GREEDY, VOCAB, FakeClock, drain, expected_tokens, make_engine
from nanovllm_cli.engine.answer import Answer, DetokenizerFactory, IncrementalDetokenizer, detokenizers_of
from nanovllm_cli.engine.outputs import CompletionOutput, RequestOutput
from nanovllm_cli.engine.plan import Drawn, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.errors import PromptTooLongError, RequestError, UsageError
from nanovllm_cli.sampling_params import SamplingParams

EOS = 96


class Letters:
    """A tokenizer of one letter a token; 90 and 91 are the two halves of é, EOS is special."""

    special_ids = frozenset({EOS})
    strips_leading_space = False

    def id_to_bytes(self, token_id: int) -> bytes:
        if token_id >= 90:
            return {90: b"\xc3", 91: b"\xa9", EOS: b"<end>"}[token_id]
        return bytes([ord("a") + token_id % 26])


LETTERS: DetokenizerFactory = detokenizers_of(Letters())  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [ord(char) - ord("a") for char in text]


def answer(script: list[int], *, eos_ids: tuple[int, ...] = (EOS,), **params: object) -> CompletionOutput:
    """What becomes of one request whose model draws `script`; its deltas are checked against the whole."""
    engine, model = make_engine(eos_ids=eos_ids, factory=LETTERS)
    model.script = script
    engine.add("a", [1, 2, 3], SamplingParams(temperature=0.0, **params))  # type: ignore[arg-type]
    text = ""
    tokens: tuple[int, ...] = ()
    while engine.has_unfinished():
        (output,) = engine.step()
        text += output.outputs[0].delta_text
        tokens += output.outputs[0].delta_ids
        assert (text, tokens) == (output.outputs[0].text, output.outputs[0].token_ids)
    assert engine.stats().used_blocks == 0
    assert engine.step() == []
    return output.outputs[0]


def ending(output: CompletionOutput) -> tuple[str, int, str | None, str | int | None]:
    return output.text, len(output.token_ids), output.finish_reason, output.stop_reason


# When an answer ends


def test_end_id_is_in_the_ids_and_not_in_the_text() -> None:
    assert ending(answer([*ids("abc"), EOS, 1])) == ("abc", 4, "stop", None)
    assert ending(answer([EOS])) == ("", 1, "stop", None)
    assert ending(answer([EOS], skip_special_tokens=False)) == ("", 1, "stop", None)


def test_ignored_end_ids_end_nothing() -> None:
    assert ending(answer([*ids("ab"), EOS, *ids("cd")], ignore_eos=True, max_tokens=5)) == ("abcd", 5, "length", None)
    assert ending(answer([1, EOS, 2], ignore_eos=True, stop_token_ids=(EOS,))) == ("b", 2, "stop", EOS)


def test_stop_ids_end_and_say_so() -> None:
    assert ending(answer(ids("abcd"), stop_token_ids=(2, 3))) == ("ab", 3, "stop", 2)
    assert ending(answer(ids("abcd"), stop_token_ids=(2,), include_stop_str_in_output=True)) == ("abc", 3, "stop", 2)


def test_max_tokens_ends_with_length() -> None:
    assert ending(answer(ids("abcd"), max_tokens=2)) == ("ab", 2, "length", None)
    assert ending(answer([1, EOS], max_tokens=2)) == ("b", 2, "stop", None)


def test_stop_strings_cut_the_text_and_keep_the_ids() -> None:
    assert ending(answer(ids("hello world".replace(" ", "")), stop=("ow",))) == ("hell", 6, "stop", "ow")
    assert ending(answer(ids("abcd"), stop=("bc",), include_stop_str_in_output=True)) == ("abc", 3, "stop", "bc")
    assert ending(answer(ids("abcd"), stop=("bcx", "d"))) == ("abc", 4, "stop", "d")


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    assert ending(answer(ids("abab"), stop=("abc",), max_tokens=4)) == ("abab", 4, "length", None)
    assert ending(answer([*ids("ab"), EOS], stop=("abc",))) == ("ab", 3, "stop", None)


def test_a_stop_string_wins_over_length_in_the_same_token() -> None:
    assert ending(answer(ids("abc"), stop=("bc",), max_tokens=3)) == ("a", 3, "stop", "bc")


def test_min_tokens_holds_for_every_kind_of_stop() -> None:
    assert ending(answer([*ids("a"), EOS, *ids("b"), EOS], min_tokens=3)) == ("ab", 4, "stop", None)
    assert ending(answer(ids("xaxbx"), stop_token_ids=(23,), min_tokens=3)) == ("xaxb", 5, "stop", 23)
    assert ending(answer(ids("ababab"), stop=("ab",), min_tokens=2)) == ("ab", 4, "stop", "ab")
    assert ending(answer(ids("abababab"), stop=("ab",), min_tokens=4)) == ("abab", 6, "stop", "ab")


def test_half_a_character_waits_for_its_other_half() -> None:
    assert ending(answer([0, 90, 91, 1], max_tokens=4)) == ("aéb", 4, "length", None)
    assert ending(answer([0, 90], max_tokens=2)) == ("a�", 2, "length", None)


def test_without_a_tokenizer_texts_are_empty() -> None:
    engine, _ = make_engine()
    engine.add("a", [1], SamplingParams(temperature=0.0, max_tokens=3, stop=("a",)))
    output = drain(engine)["a"].outputs[0]
    assert (output.text, len(output.token_ids), output.finish_reason) == ("", 3, "length")


def test_logprobs_are_those_of_the_ids() -> None:
    output = answer([*ids("abc"), EOS], logprobs=0)
    assert output.logprobs is not None
    assert tuple(each.token_id for each in output.logprobs) == output.token_ids
    assert answer([EOS]).logprobs is None


@pytest.mark.parametrize("where", ["push", "finish"])
@pytest.mark.parametrize("aborted", [False, True])
def test_an_exception_in_detokenizing_ends_that_request_alone(where: str, aborted: bool) -> None:
    class Broken:
        stopped: str | None = None

        def push(self, ids: object) -> str:
            if where == "push":
                raise ValueError("secret path")
            return "x"

        def finish(self) -> str:
            raise ValueError("secret path")

    def factory(params: SamplingParams, prompt_ids: tuple[int, ...]) -> IncrementalDetokenizer:
        return Broken() if prompt_ids[0] == 1 else LETTERS(params, prompt_ids)

    engine, model = make_engine(factory=factory)
    engine.add("bad", [1, 2], SamplingParams(temperature=0.0, max_tokens=2))
    engine.add("good", [2, 2], SamplingParams(temperature=0.0, max_tokens=9))
    model.script = ids("abcdefghi")
    engine.step()
    if aborted and where == "finish":
        output = engine.abort("bad")
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
    last = drain(engine)
    assert last["good"].outputs[0].text == "abcdefghi"
    if "bad" in last and not aborted and where == "finish":
        assert last["bad"].outputs[0].finish_reason == "error"
        assert "secret" not in str(last["bad"].outputs[0].error)
        assert len(last["bad"].outputs[0].token_ids) == 2
    assert engine.stats().used_blocks == 0


def test_a_text_that_cannot_be_decoded_ends_its_request_when_it_is_looked_at() -> None:
    class Broken:
        stopped: str | None = None

        def push(self, ids: object) -> str:
            raise ValueError("secret path")

        def finish(self) -> str:
            return ""

    engine, model = make_engine(factory=lambda params, prompt_ids: Broken())
    for name in ("looked at", "not"):
        engine.add(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=9))
    engine.advance()
    output = engine.take("looked at")
    assert (output.finished, output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == (True, "error", 1)
    assert engine.stats().running == 1
    while engine.has_unfinished():
        engine.advance()
    assert engine.moved == {"not": True}
    last = engine.take("not").outputs[0]
    assert (last.finish_reason, last.num_tokens, "secret" in str(last.error)) == ("error", 9, False)
    assert (engine.stats().used_blocks, model.violations) == (0, [])


# Outputs that are taken when they are wanted


def test_an_output_has_all_that_came_since_the_last_one() -> None:
    clock = FakeClock()
    engine, model = make_engine(factory=LETTERS, clock=clock)
    model.script = ids("abcdef")
    engine.add("a", [1], SamplingParams(temperature=0.0, max_tokens=6, n=2, logprobs=0))
    engine.advance()
    assert engine.moved == {"a": False}
    assert [answer.delta_text for answer in engine.take("a").outputs] == ["a", "a"]
    assert engine.moved == {}
    while engine.has_unfinished():
        clock.now += 1
        engine.advance()
    clock.now += 100
    assert engine.moved == {"a": True}
    with pytest.raises(UsageError, match="already in use"):
        engine.add("a", [1], GREEDY)
    last = engine.take("a")
    assert [(answer.text, answer.delta_text, len(answer.delta_logprobs or ())) for answer in last.outputs] == [
        ("abcdef", "bcdef", 5),
        ("abcdef", "bcdef", 5),
    ]
    assert (last.finished, last.metrics.finished) == (True, clock.now - 100)
    with pytest.raises(KeyError):
        engine.take("a")
    engine.add("a", [1], GREEDY)


def test_an_abort_shows_what_nobody_has_read_and_what_might_have_become_a_stop_string() -> None:
    engine, model = make_engine(factory=LETTERS)
    model.script = ids("abcdef")
    engine.add("a", [1], SamplingParams(temperature=0.0, max_tokens=6, stop=("cdf",)))
    for _ in range(4):
        engine.advance()
    output = engine.abort("a")
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abcd", "abort")


def test_what_others_collect_is_not_lost_with_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make_engine()
    execute = model.execute

    def pooling(plan: Plan) -> StepOutput:
        pooled = {each.seq_id: [float(len(each.token_ids))] for each in plan.scheduled if each.pooling is not None}
        return execute(plan)._replace(pooled=pooled)

    def fail(plan: Plan) -> None:
        if any(each.token_ids == [66] for each in plan.scheduled):
            raise RuntimeError("once and again")

    monkeypatch.setattr(model, "execute", pooling)
    model.before = fail
    engine.add("bad", [66], GREEDY)
    engine.add("told", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    engine.embed("embedded", [4, 5, 6, 7], "last")
    outputs = drain(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert [told and told.token_id for told in outputs["told"].prompt_logprobs or ()] == [None, 2, 3]
    assert outputs["embedded"].pooled == (4.0,)


@pytest.mark.parametrize(
    ("ids", "reason", "error", "kept"),
    [([5, EOS, 7], "stop", None, 2), ([5, 6, 7, 8], "length", None, 3), ([5, 6], "error", "no logits", 2)],
)
def test_an_error_behind_the_end_of_an_answer_is_none(ids: list[int], reason: str, error: str | None, kept: int) -> None:
    """As a row behind guesses may give it."""
    request = Request("r", (1,), SamplingParams(max_tokens=3), 4, (EOS,), 0.0)
    answer = Answer(Sequence(0, request, 0, 0, [1]), (EOS,), None)
    assert answer.take(Drawn(0, ids, None, "no logits", unmeetable=True)) == kept
    output = answer.output()
    assert (output.finish_reason, output.error, output.unmeetable) == (reason, error, error is not None)
    assert output.token_ids == tuple(ids[:kept])


def test_an_output_is_of_the_moment_at_which_it_was_taken() -> None:
    engine, _ = make_engine()
    engine.add("with", [1], SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    engine.add("without", [1], SamplingParams(temperature=0.0, max_tokens=3))
    engine.step()
    first = {output.request_id: output.outputs[0] for output in engine.step()}
    drain(engine)
    for answer in first.values():
        assert (len(answer.token_ids), len(answer.delta_ids)) == (2, 1)
    assert (len(first["with"].logprobs or ()), len(first["with"].delta_logprobs or ())) == (2, 1)
    assert (first["without"].logprobs, first["without"].delta_logprobs) == (None, None)


def test_a_finished_request_that_nobody_takes_can_be_dropped() -> None:
    engine, _ = make_engine()
    engine.add("a", [1], SamplingParams(temperature=0.0, max_tokens=1))
    engine.advance()
    output = engine.abort("a")
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason) == (True, "length")
    assert engine.moved == {}
    assert engine.abort("a") is None


# What is admitted


def test_bad_requests_are_refused_and_leave_nothing_behind() -> None:
    engine, model = make_engine(max_model_len=50)
    engine.add("here", [1], GREEDY)
    cases: list[tuple[str, object, SamplingParams, str]] = [
        ("", [1], GREEDY, "id"),
        ("here", [1], GREEDY, "already in use"),
        ("a", [], GREEDY, "empty"),
        ("a", [1, VOCAB], GREEDY, f"{VOCAB} is not in the vocabulary"),
        ("a", [1, -1], GREEDY, "-1 is not in the vocabulary"),
        ("a", [2**70], GREEDY, "vocabulary"),
        ("a", [1.5], GREEDY, "integers"),
        ("a", ["1"], GREEDY, "integers"),
        ("a", 7, GREEDY, "integers"),
        ("a", [1], SamplingParams(stop_token_ids=(VOCAB,)), "vocabulary"),
        ("a", [1] * 50, GREEDY, "context holds 50"),
    ]
    for name, prompt, params, message in cases:
        with pytest.raises((UsageError, PromptTooLongError), match=message):
            engine.add(name, prompt, params)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="in order"):
        engine.add("a", [1], GREEDY, priority=1)
    urgent, _ = make_engine(policy="priority")
    with pytest.raises(UsageError, match="priority"):
        urgent.add("a", [1], GREEDY, priority=10**400)
    for limit in (2**31, -(2**31)):
        with pytest.raises(UsageError, match="priority"):
            urgent.add("a", [1], GREEDY, priority=limit + (1 if limit > 0 else -1))
        urgent.add(f"at {limit}", [1], GREEDY, priority=limit)
    with pytest.raises(UsageError, match="already in use"):
        engine.embed("here", [1], "mean")
    assert engine.stats().waiting == 1
    engine.abort("here")
    assert not engine.has_unfinished()
    assert model.plans == []


def test_what_could_not_be_prepared_ends_its_own_request() -> None:
    def failed(error: Exception) -> Future[object]:
        future: Future[object] = Future()
        future.set_exception(error)
        return future

    cancelled: Future[object] = Future()
    cancelled.cancel()
    futures = {
        1: (failed(UsageError("no such schema")), "no such schema", True),
        2: (failed(RequestError("it took too long")), "it took too long", False),
        3: (failed(ValueError("a secret")), "an internal error (ValueError)", False),
        4: (cancelled, "the engine was closed", False),
    }
    engine, model = make_engine(prepare=lambda params: futures[params.top_k][0] if params.top_k in futures else None)
    for top_k in (1, 2, 3, 4, 5):
        engine.add(str(top_k), [1], SamplingParams(temperature=0.0, top_k=top_k, max_tokens=3, n=2))
    outputs = drain(engine)
    for top_k, (_, error, unmeetable) in futures.items():
        for each in outputs[str(top_k)].outputs:
            assert (each.finish_reason, each.error, each.unmeetable) == ("error", error, unmeetable)
    assert [each.token_ids for each in outputs["5"].outputs] == [expected_tokens([1], 3)] * 2
    assert sum(len(plan.new) for plan in model.plans) == 2  # nobody else was computed


def test_an_answer_may_be_aborted_while_its_request_is_prepared() -> None:
    future: Future[object] = Future()
    engine, model = make_engine(prepare=lambda params: future)
    for name in ("whole", "half"):
        engine.add(name, [1], SamplingParams(temperature=0.0, max_tokens=3, n=2))
    assert engine.stats().waiting == 4
    engine.abort("whole")
    aborted = engine.abort("half", 0)
    assert aborted is not None
    assert [each.finish_reason for each in aborted.outputs] == ["abort", None]
    assert engine.stats().waiting == 1
    assert engine.step() == []
    future.set_result(None)
    (output,) = drain(engine).values()
    assert output.request_id == "half"
    assert [(each.finish_reason, each.token_ids) for each in output.outputs] == [
        ("abort", ()), ("length", expected_tokens([1], 3)),
    ]  # fmt: skip
    assert model.violations == []


def test_a_failing_detokenizer_factory_queues_nothing() -> None:
    def factory(params: SamplingParams, prompt_ids: tuple[int, ...]) -> IncrementalDetokenizer:
        raise UsageError("no")

    engine, _ = make_engine(factory=factory)
    with pytest.raises(UsageError):
        engine.add("a", [1], GREEDY)
    assert not engine.has_unfinished()
    assert engine.step() == []


@pytest.mark.parametrize(("num_blocks", "max_model_len", "context"), [(5, 1000, 20), (100, 20, 20), (5, 20, 20)])
def test_answers_end_where_the_context_or_the_cache_ends(num_blocks: int, max_model_len: int, context: int) -> None:
    for length in (1, 4, 17, 19):
        for asked in (None, 10_000, 1):
            engine, model = make_engine(num_blocks=num_blocks, max_model_len=max_model_len)
            engine.add("a", [1] * length, SamplingParams(temperature=0.0, max_tokens=asked, n=2))
            for output in drain(engine)["a"].outputs:
                assert len(output.token_ids) == (1 if asked == 1 else context - length)
                assert output.finish_reason == "length"
            assert model.violations == []
    for length in (20, 21, 1000):
        with pytest.raises(PromptTooLongError) as caught:
            engine.add("a", [1] * length, GREEDY)
        assert (caught.value.prompt_len, caught.value.limit) == (length, context)
        assert ("KV cache" in str(caught.value.hint)) == (max_model_len == 1000)


def test_seeds_are_the_requests_own() -> None:
    def seeds(seed: int | None) -> list[int]:
        engine, model = make_engine()
        engine.add("a", [1], SamplingParams(seed=seed, n=3, max_tokens=1))
        engine.step()
        return [new.seed for new in model.plans[0].new]

    assert seeds(42) == seeds(42)
    assert seeds(42)[0] == 42
    assert seeds(7)[1] == 0x4D12622558F475EB >> 1  # printf 7:1 | b2sum -l 64
    assert len(set(seeds(42) + seeds(43))) == 6
    assert len(set(seeds(None) + seeds(None))) == 6
    assert all(0 <= seed < 2**64 for seed in seeds(None) + seeds(2**64 - 1) + seeds(0))


def test_sampler_hears_which_ids_end_the_answer() -> None:
    engine, model = make_engine(eos_ids=(7, 8))
    engine.add("a", [1], SamplingParams(stop_token_ids=(9, 7), max_tokens=1))
    engine.add("b", [1], SamplingParams(stop_token_ids=(9,), ignore_eos=True, max_tokens=1))
    engine.step()
    assert [new.stop_ids for new in model.plans[0].new] == [(7, 8, 9), (9,)]


def test_metrics_tell_the_story_of_a_request() -> None:
    clock = FakeClock()
    engine, _ = make_engine(max_num_seqs=1, max_num_batched_tokens=8, clock=clock)
    engine.add("first", [1], SamplingParams(temperature=0.0, max_tokens=1))
    engine.add("second", list(range(20)), SamplingParams(temperature=0.0, max_tokens=2))
    history = []
    while engine.has_unfinished():
        clock.now += 1
        history += [output.metrics for output in engine.step() if output.request_id == "second"]
    assert [each.num_computed_prompt_tokens for each in history] == [8, 16, 20, 20]
    assert [each.first_token for each in history] == [None, None, 1004.0, 1004.0]
    assert [each.finished for each in history] == [None, None, None, 1005.0]
    assert {(each.arrival, each.first_scheduled, each.num_preemptions) for each in history} == {(1000.0, 1002.0, 0)}


def test_outputs_are_snapshots() -> None:
    engine, _ = make_engine(factory=LETTERS)
    engine.add("a", [1], SamplingParams(temperature=0.0, max_tokens=5, logprobs=0))
    kept: list[RequestOutput] = []
    while engine.has_unfinished():
        kept += engine.step()
    answers = [output.outputs[0] for output in kept]
    whole = answers[-1]
    assert whole.logprobs is not None
    for count, answer in enumerate(answers, start=1):  # read only now
        assert (answer.num_tokens, answer.token_ids) == (count, whole.token_ids[:count])
        assert answer.logprobs == whole.logprobs[:count]
        assert answer.text == whole.text[: len(answer.text)]
    assert [len(answer.text) for answer in answers] == sorted({len(answer.text) for answer in answers})
    assert [output.finished for output in kept] == [False] * 4 + [True]


# Abort


def test_abort_returns_the_last_output_and_frees_everything() -> None:
    engine, model = make_engine(max_num_batched_tokens=8, max_num_seqs=2, enable_prefix_caching=False, factory=LETTERS)
    engine.add("running", [1], SamplingParams(temperature=0.0, max_tokens=50, stop=("zzzz",)))
    engine.step()
    engine.add("in mid prompt", list(range(30)), GREEDY)
    engine.add("waiting", [2], GREEDY)
    engine.step()
    for name, count in (("running", 2), ("in mid prompt", 0), ("waiting", 0)):
        output = engine.abort(name)
        assert output is not None
        assert output.finished
        assert [(each.finish_reason, len(each.token_ids)) for each in output.outputs] == [("abort", count)]
        assert engine.abort(name) is None
    assert not engine.has_unfinished()
    assert engine.step() == []
    assert engine.stats()[:5] == (0, 0, 64, 0, 0)
    assert engine.abort("never there") is None
    engine.add("next", [1], SamplingParams(temperature=0.0, max_tokens=1))
    drain(engine)
    assert model.plans[-1].finished == [0, 1]  # and not who never ran


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_one_answer_of_several_can_be_aborted_at_any_point(which: int, steps: int) -> None:
    engine, model = make_engine(max_num_batched_tokens=8)
    prompt = list(range(15))
    engine.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=6, n=3))
    for _ in range(steps):
        engine.step()
    output = engine.abort("a", which)
    assert output is not None
    assert not output.finished
    assert engine.abort("a", 7) is not None
    last = drain(engine)["a"]
    for index, each in enumerate(last.outputs):
        if index == which:
            assert each.finish_reason == "abort"
        else:
            assert each.token_ids == expected_tokens(prompt, 6)
    assert model.violations == []
    assert engine.stats().used_blocks == 0


def test_prompt_logprobs_begin_again_with_the_answer_that_takes_over() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    prompt = list(range(15))
    engine.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=2, n=2, prompt_logprobs=0))
    engine.step()
    engine.abort("a", 0)
    logprobs = drain(engine)["a"].prompt_logprobs
    assert logprobs is not None
    assert [each and each.token_id for each in logprobs] == [None, *prompt[1:]]


def test_random_aborts_leave_the_others_and_the_memory_alone() -> None:
    rng = random.Random(11)
    engine, model = make_engine(num_blocks=40, max_num_batched_tokens=24, max_num_seqs=10)
    asked: dict[str, tuple[list[int], int]] = {}
    last: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    for turn in range(1500):
        if turn < 1000 and rng.random() < 0.7:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            asked[str(turn)] = (prompt, rng.randint(1, 15))
            params = SamplingParams(temperature=0.0, max_tokens=asked[str(turn)][1], n=rng.choice((1, 2, 3)))
            engine.add(str(turn), prompt, params)
        if rng.random() < 0.4 and engine.has_unfinished():
            name = rng.choice([name for name in asked if name not in last or not last[name].finished])
            output = engine.abort(name, rng.choice((None, None, 0, 1)))
            assert output is not None
            last[name] = output
            aborted.add(name)
        for output in engine.step():
            last[output.request_id] = output
    last.update(drain(engine))
    assert model.violations == []
    assert set(last) == set(asked)
    for name, (prompt, count) in asked.items():
        for each in last[name].outputs:
            assert each.token_ids == expected_tokens(prompt, count)[: len(each.token_ids)]
            assert each.finish_reason == "abort" if len(each.token_ids) < count else "length"
            assert each.finish_reason == "length" or name in aborted
    stats = engine.stats()
    assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == 40


# Bad rows and broken steps


def test_an_error_in_sampling_ends_one_sequence() -> None:
    engine, model = make_engine()
    model.draw_error = lambda scheduled, seq_id: "not a number" if seq_id == 1 and scheduled.start > 3 else None
    for name in "abc":
        engine.add(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=6))
    last = drain(engine)
    assert (last["b"].outputs[0].finish_reason, last["b"].outputs[0].error) == ("error", "not a number")
    assert last["b"].outputs[0].token_ids == expected_tokens([1, 2], 3)
    assert last["a"].outputs[0].token_ids == last["c"].outputs[0].token_ids == expected_tokens([1, 2], 6)
    assert engine.stats().used_blocks == 0


def test_the_text_before_an_error_is_all_there_whether_or_not_it_was_looked_at() -> None:
    engine, model = make_engine(factory=LETTERS)
    model.script = ids("abcd")
    model.draw_error = lambda scheduled, seq_id: "bad" if scheduled.start > 3 else None
    for name in ("looked at", "not"):
        engine.add(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=9, stop=("cd",) if name == "not" else ()))
    looked = ""
    while engine.has_unfinished():
        engine.advance()
        looked += engine.take("looked at").outputs[0].delta_text
    last = engine.take("not").outputs[0]
    assert (last.finish_reason, last.num_tokens, last.text) == ("error", 3, "abc")
    assert looked == "abc"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_error_in_one_of_several_answers_leaves_the_others(which: int) -> None:
    engine, model = make_engine()
    model.draw_error = lambda scheduled, seq_id: "bad" if seq_id == which else None
    engine.add("a", [1] * 6, SamplingParams(temperature=0.0, max_tokens=5, n=3))
    outputs = drain(engine)["a"].outputs
    assert [each.finish_reason for each in outputs] == ["error" if index == which else "length" for index in range(3)]
    assert all(each.token_ids == expected_tokens([1] * 6, 5) for each in outputs if each.index != which)
    assert engine.stats().used_blocks == 0
    assert model.violations == []


def test_a_sequence_without_a_draw_is_an_error_and_no_endless_loop() -> None:
    engine, model = make_engine()
    model.drop, model.empty = {1}, {2}
    for name in "abcd":
        engine.add(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=3))
    last = drain(engine, most_steps=10)
    assert [last[name].outputs[0].finish_reason for name in "abcd"] == ["length", "error", "error", "length"]


def failing(ids: set[int], when: Callable[[Scheduled], bool] = lambda each: True) -> Callable[[Plan], None]:
    def hook(plan: Plan) -> None:
        if any(each.seq_id in ids and when(each) for each in plan.scheduled):
            raise RuntimeError("CUDA error at /home/somebody")

    return hook


@pytest.mark.parametrize("moment", ["before", "midway"])
@pytest.mark.parametrize("culprits", [{0}, {7}, {15}, {3, 4}, {0, 15}, set(range(16))])
def test_a_broken_step_costs_only_the_culprits(moment: str, culprits: set[int]) -> None:
    engine, model = make_engine(num_blocks=200, max_num_seqs=16)
    setattr(model, moment, failing(culprits, lambda each: each.start > 8))
    for index in range(16):
        engine.add(str(index), [index] * 6, SamplingParams(temperature=0.0, max_tokens=10))
    last = drain(engine)
    assert model.violations == []
    for index in range(16):
        output = last[str(index)].outputs[0]
        if index in culprits:
            assert (output.finish_reason, output.error) == ("error", "an internal error (RuntimeError)")
            assert output.token_ids == expected_tokens([index] * 6, len(output.token_ids))
            assert len(output.token_ids) == 4
        else:
            assert output.token_ids == expected_tokens([index] * 6, 10)
    assert engine.stats().used_blocks == 0
    assert len(model.plans) <= 10 + 2 * 16


@pytest.mark.parametrize("moment", ["before", "midway"])
@pytest.mark.parametrize("fails_at", [0, 6, 9])
def test_a_step_may_break_at_any_point_of_sharing_and_copying(moment: str, fails_at: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        engine, model = make_engine(num_blocks=18, max_num_batched_tokens=16, max_num_seqs=7)
        asked = {str(index): [index % 3] * rng.randint(1, 14) for index in range(12)}
        for name, prompt in asked.items():
            engine.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=8, n=rng.choice((1, 3, 4))))
        culprits = {rng.randrange(25) for _ in range(3)}
        setattr(model, moment, failing(culprits, lambda each: each.start >= fails_at))
        last = drain(engine)
        assert model.violations == []
        assert engine.stats().used_blocks == 0
        for name, prompt in asked.items():
            for output in last[name].outputs:
                if output.finish_reason == "error":
                    assert output.token_ids == expected_tokens(prompt, len(output.token_ids))
                else:
                    assert output.token_ids == expected_tokens(prompt, 8)


def test_a_failure_that_does_not_come_back_costs_nobody() -> None:
    engine, model = make_engine()
    failures = iter([RuntimeError("once")])

    def hook(plan: Plan) -> None:
        for failure in failures:
            raise failure

    model.before = hook
    for index in range(4):
        engine.add(str(index), [index], SamplingParams(temperature=0.0, max_tokens=4))
    assert all(each.outputs[0].finish_reason == "length" for each in drain(engine).values())


def test_our_own_errors_speak_and_foreign_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    for error, shown in (
        (RequestError("the constraint can't be met"), "the constraint can't be met"),
        (OSError("/secret"), "an internal error (OSError)"),
    ):
        engine, model = make_engine()

        def hook(plan: Plan, error: Exception = error) -> None:
            raise error

        model.before = hook
        engine.add("a", [1], GREEDY)
        with caplog.at_level(logging.CRITICAL):
            assert drain(engine)["a"].outputs[0].error == shown


def test_a_prompt_that_breaks_its_chunk_fails_with_all_its_answers() -> None:
    engine, model = make_engine(max_num_batched_tokens=8)
    model.midway = failing({0}, lambda each: each.start >= 8)
    engine.add("bad", list(range(30)), SamplingParams(temperature=0.0, n=3))
    engine.add("good", [1], SamplingParams(temperature=0.0, max_tokens=9))
    last = drain(engine)
    assert [each.finish_reason for each in last["bad"].outputs] == ["error"] * 3
    assert last["good"].outputs[0].token_ids == expected_tokens([1], 9)
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("moment", ["before", "midway"])
def test_an_interrupted_step_can_be_taken_up_again(moment: str) -> None:
    engine, model = make_engine(num_blocks=20)
    for index in range(3):
        engine.add(str(index), [index] * 6, SamplingParams(temperature=0.0, max_tokens=8, n=2))

    def interrupt(plan: Plan) -> None:
        raise KeyboardInterrupt

    for _ in range(4):
        engine.step()
        setattr(model, moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        setattr(model, moment, lambda plan: None)
    last = drain(engine)
    assert model.violations == []
    for index in range(3):
        assert [each.token_ids for each in last[str(index)].outputs] == [expected_tokens([index] * 6, 8)] * 2
    assert engine.stats().used_blocks == 0


def test_random_faults_leave_the_others_and_the_memory_alone() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        engine, model = make_engine(num_blocks=25, max_num_batched_tokens=20, max_num_seqs=8, factory=LETTERS)
        bad_rows = {rng.randrange(60): rng.randrange(20) for _ in range(6)}
        bad_draws = {rng.randrange(60): rng.randrange(20) for _ in range(6)}

        def midway(plan: Plan, bad: dict[int, int] = bad_rows) -> None:
            if any(each.start >= bad.get(each.seq_id, 10**6) for each in plan.scheduled):
                raise RuntimeError("bad row")

        model.midway = midway
        model.draw_error = lambda scheduled, seq_id, bad=bad_draws: (  # type: ignore[misc]
            "bad draw" if scheduled.start >= bad.get(seq_id, 10**6) else None
        )
        asked = {str(index): [rng.randrange(2) for _ in range(rng.randint(1, 25))] for index in range(30)}
        for name, prompt in asked.items():
            engine.add(
                name, prompt, SamplingParams(temperature=0.0, max_tokens=10, n=rng.choice((1, 2, 3)), stop=("q",))
            )
        last = drain(engine)
        assert model.violations == []
        assert engine.stats().used_blocks == 0
        for name, prompt in asked.items():
            for output in last[name].outputs:
                assert output.finish_reason is not None
                assert output.token_ids == expected_tokens(prompt, len(output.token_ids))
                if output.finish_reason == "length":
                    assert len(output.token_ids) == 10


def test_closing_the_engine_closes_its_executor() -> None:
    engine, model = make_engine()
    engine.close()
    assert model.closed
