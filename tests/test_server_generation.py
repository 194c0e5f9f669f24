"""From what routes ask to events, over an engine that a test writes down."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from nanovllm_cli.config import Lora
from nanovllm_cli.constrain.gbnf import lark_of_gbnf
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import UsageError
from nanovllm_cli.model_spec import Pooling
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import generation, logprobs
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.engine_stream import EngineStream
from nanovllm_cli.server.exchange import Exchange
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.messages import Facts, Output, Piece
from nanovllm_cli.server.observer import Observer, Operation, Watch
from nanovllm_cli.server.ports import (
    Caller,
    ChatAsked,
    ChatDefaults,
    EngineState,
    Event,
    Generation,
    Reading,
    ServedModel,
    TextAsked,
    Timings,
    Usage,
)
from nanovllm_cli.server.reasoning_tokens import ReasoningTokens
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.text import tokenizer
from nanovllm_cli.text.answer_format import answer_format, model_format
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.detokenizer import Detokenizer
from nanovllm_cli.text.tool_calls import ToolCallDelta
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.source import resolve
from nanovllm_cli.weights.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}"
    "</tool_call>{% endif %}{% if enable_thinking is false %}<think></think>{% elif enable_thinking %}<think>{% endif %}"
    "{% if refuse %}{{ raise_exception('no') }}{% endif %}"
)
FACTS = Facts(512, 300, 3, 16, 1, 1, 1, "float32", "cpu", 8)
CALLER = Caller("request")
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Engine:
    """Gives every request the same outputs, and remembers what it was asked."""

    state = EngineState.READY
    facts = FACTS

    def __init__(self, *outputs: Sequence[Piece], error: ApiError | None = None, ends: bool = True) -> None:
        self.outputs = outputs
        self.ends = ends
        self.error = error
        self.asked: list[tuple[Sequence[int], SamplingParams, int, str | None]] = []
        self.priorities: list[int] = []
        self.aborted = 0
        self.streams: list[EngineStream] = []
        self.told_reading = False

    @property
    def stats(self) -> EngineStats | None:
        return None

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tells_reading: bool = False,
    ) -> EngineStream:
        self.asked.append((prompt_ids, params, priority, cache_salt))
        stream = EngineStream(self._abort)
        self.streams.append(stream)
        for i, pieces in enumerate(self.outputs):
            finished = self.ends and self.error is None and i == len(self.outputs) - 1
            times = (1.0, 1.5, 4.0 if finished else None)
            stream.feed(Output(1, list(pieces), finished, 5, 0, 7, 3, times))
        self.told_reading = tells_reading
        if self.error is not None:
            stream.fail(self.error)
        return stream

    def _abort(self) -> None:
        self.aborted += 1

    async def embed(
        self, prompt_ids: Sequence[int], pooling: Pooling, *, priority: int = 0, lora: Sequence[Lora] = ()
    ) -> Sequence[float]:
        self.priorities.append(priority)
        if self.error is not None:
            raise self.error
        return [3.0, 0.0, 4.0 * len(prompt_ids)]


class Models:
    def __init__(self, engine: Engine, template: str | None = TEMPLATE) -> None:
        tokenizer = byte_tokenizer()
        self.users = 0
        self.model = ServedModel(
            "m", 0, engine, FACTS, tokenizer, ChatTemplate(template) if template is not None else None, SamplingParams(),
            "enable_thinking", answer_format(template) if template is not None else None,
        )  # fmt: skip

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        if name not in (None, "m"):
            raise ApiError(404, "no such model", code="model_not_found")
        self.users += 1
        try:
            yield self.model
        finally:
            self.users -= 1

    peek = use

    def cards(self) -> list[Any]:
        return []

    def engines(self) -> dict[str, Any]:
        return {}


class Checks:
    def __init__(self) -> None:
        self.seen: list[Constraint] = []

    async def check(self, constraint: Constraint) -> None:
        self.seen.append(constraint)
        if constraint.text == "bad":
            raise UsageError("no such grammar")


class Log(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.callers: list[Caller | None] = []

    def accepted(
        self, model: str, operation: Operation, prompt_len: int, params: SamplingParams | None, caller: Caller | None
    ) -> Watch:
        self.callers.append(caller)
        log = self.lines
        log.append(f"accepted {operation}")

        class Told(Watch):
            def output(self, output: Output) -> None:
                log.append("output")

            def cut(self) -> None:
                log.append("cut")

            def end(self, error: ApiError | None = None) -> None:
                log.append(f"end {error.status if error else None}")

        return Told()

    def refused(self, model: str | None, error: ApiError) -> None:
        self.lines.append(f"refused {model} {error.status}")


class House:
    def __init__(
        self,
        *outputs: Sequence[Piece],
        error: ApiError | None = None,
        template: str | None = TEMPLATE,
        ends: bool = True,
    ) -> None:
        self.engine = Engine(*outputs, error=error, ends=ends)
        self.models = Models(self.engine, template)
        self.checks = Checks()
        self.log = Log()
        self.generator = Generator(self.checks, self.log)

    @property
    def model(self) -> ServedModel:
        return self.models.model

    @asynccontextmanager
    async def begun(
        self, asked: ChatAsked | TextAsked, caller: Caller = CALLER, model: str | None = "m"
    ) -> AsyncIterator[Generation]:
        """As routes have it."""
        context = ServerContext(ServeSettings(), cast(Any, self.models), self.generator, self.checks, self.log)
        exchange = Exchange(caller.request_id, "POST", "/", tenant=caller.tenant)
        async with context.use(model) as served, context.generation(served, asked, exchange) as generation:
            yield generation

    async def chat(self, asked: ChatAsked, caller: Caller = CALLER, model: str | None = "m") -> list[Event]:
        async with self.begun(asked, caller, model) as generation:
            events = [event async for step in generation for event in step]
            self.usage, self.timings = generation.usage, generation.timings
        return events


@pytest.fixture
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


def piece(text: str, ids: Sequence[int] = (1,), finish: Any = None, **more: Any) -> Piece:
    return Piece(more.pop("index", 0), text, list(ids), None, finish, **more)


def asked(**more: Any) -> ChatAsked:
    return ChatAsked(MESSAGES, more.pop("params", SamplingParams()), **more)


def test_log_probabilities_of_all_answers_have_a_bound(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MOST_LOGPROBS", 12)
    each = TokenLogprobs(1, -0.5, 1, ((1, -0.5), (2, -1.5)))

    def told(*texts: str) -> list[Piece]:
        return [msgspec.structs.replace(piece(text, index=i), logprobs=[each]) for i, text in enumerate(texts)]

    async def scenario(house: House) -> tuple[str, int | None]:
        text = ""
        async with house.begun(asked(params=SamplingParams(n=2, logprobs=2))) as generation:
            try:
                async for events in generation:
                    text += "".join(event.text for event in events)
            except ApiError as error:
                return text, error.status
        return text, None

    assert run(scenario(House(told("a", "b"), told("c", "d")))) == ("acbd", None)
    house = House(told("a", "b"), told("c", "d"), told("e", "f"), told("g", "h"), ends=False)
    assert run(scenario(house)) == ("acegbdfh", 400)
    assert house.engine.aborted == 1


def test_an_answer_is_taken_apart(run: Any) -> None:
    text = '<think>so</think>yes<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    house = House([piece(text, [1] * 9, "stop")])
    (event,) = run(house.chat(asked(tools=[TOOL])))
    assert (event.reasoning, event.content, event.text) == ("so", "yes", text)
    assert event.finish_reason == "tool_calls"
    (call,) = event.calls
    assert isinstance(call, ToolCallDelta)
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    assert house.usage.completion_tokens == 9
    assert house.usage.cached_tokens == 5


@pytest.mark.parametrize("joined", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize(
    ("text", "stop", "count"),
    [
        ("<think>so</think>yes", (), 2), ("<think>\nso 🎉\n</think>\n\nyes", (), len("so ") + 4), ("no", (), 0),
        ("<think>ababab</think>ab", ("abc", "ba!"), 6), ("<think>so it ends", ("nds",), len("so it e")),
    ],
)  # fmt: skip
def test_tokens_of_reasoning_are_counted_however_they_are_heard(
    run: Any, text: str, stop: tuple[str, ...], count: int, joined: int
) -> None:
    """One at a time, some together where the reader is slow, or all at once; ahead of their text, where that may become a
    character or a stop string. The tags are none of them. A token is a byte here."""
    house = House()
    ids = byte_tokenizer().encode(text)
    detokenizer = Detokenizer(byte_tokenizer(), stop=stop)

    async def usage() -> Usage:
        async with house.begun(asked()) as generation:
            events = aiter(generation)
            for first in range(0, len(ids), joined):
                heard, is_last = ids[first : first + joined], first + joined >= len(ids)
                written = detokenizer.push(heard) + (detokenizer.finish() if is_last else "")
                together = piece(written, heard, "stop" if is_last else None, stop_reason=detokenizer.stopped)
                house.engine.streams[0].feed(Output(1, [together], is_last, 0))
                await anext(events)
            return generation.usage

    assert run(usage()) == Usage(len("<user>hi\n"), 0, len(ids), count)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("text", "stop", "count"), [
    ("<think>\nI will greet them.\n</think>\n\nHello there, the end.", ("then", "end!"), 5),
    ("<think>\nI will greet them.\n</think>\n\nHello there, the end.", ("them",), 3),
    ("<think>the</think>the<think>the</think>the", (), 1), ("<think>I will greett</think>x", ("them",), 4),
])  # fmt: skip
def test_a_token_of_reasoning_counts_once_whatever_of_it_is_held_back(
    text: str, stop: tuple[str, ...], count: int, special: bool, tmp_path: Path
) -> None:
    """Of several letters: " greet" before "t" may be the beginning of a stop string, and ".\\n", of which a part is told."""
    folder = shutil.copytree(resolve("tiny").path, tmp_path / "tiny")
    tags = json.loads((folder / "tokenizer.json").read_text())
    for token in tags["added_tokens"]:
        token["special"] = token["special"] or (special and "think" in token["content"])
    (folder / "tokenizer.json").write_text(json.dumps(tags))
    with open_checkpoint(folder) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    known = model_format(tokenizer, ChatTemplate("<think>"))
    assert known is not None
    visible = known.visible_ids(calls=True)
    for seed in range(50):
        r, left, found = random.Random(seed), tokenizer.encode(text, add_special_tokens=False), 0
        detokenizer, parser = Detokenizer(tokenizer, visible_ids=visible, stop=stop), known.parser("")
        counter = ReasoningTokens(tokenizer, tokenizer.special_ids.difference(visible), comes_again=r.random() < 0.5)
        while left:
            heard, written = list[int](), ""
            for token_id in left[: r.choice((1, 1, 2, 5, 50))]:
                heard.append(token_id)
                written += detokenizer.push([token_id])
                if detokenizer.stopped is not None:
                    break
            left = [] if detokenizer.stopped is not None else left[len(heard) :]
            written += "" if left else detokenizer.finish()
            said = [parser.push(written), *([] if left else [parser.finish()])]
            reasoning, ends = "".join(delta.reasoning for delta in said), any(delta.content for delta in said)
            found += counter.take(heard, written, reasoning, ends=ends, num_held=parser.num_held if left else 0)
        assert found == count


def test_timings_are_the_engines_and_while_it_draws_those_heard_here(run: Any) -> None:
    house = House([piece("a")], [piece("b", finish="stop")])
    run(house.chat(asked()))
    assert house.timings == Timings(0.5, 2.5, 7, 3)

    async def under_way() -> tuple[Timings, Timings]:
        async with House([piece("a")], ends=False).begun(asked()) as generation:
            before = generation.timings
            await anext(aiter(generation))
            return before, generation.timings

    before, heard = run(under_way())
    assert (before, heard.prompt, heard.num_guessed) == (Timings(), 0.5, 7)
    assert 0 <= heard.answer < 60


def test_a_step_that_reads_the_prompt_is_told_without_events_and_counts_for_nothing(run: Any) -> None:
    house = House()

    async def found() -> list[Any]:
        async with house.begun(asked(tells_reading=True)) as generation:
            (stream,), steps = house.engine.streams, aiter(generation)
            stream.feed(Output(1, [], False, 4, reading=(6, 0.5)))
            told = [await anext(steps), generation.reading, generation.usage.cached_tokens, generation.timings]
            stream.feed(Output(1, [], False, 4, reading=(8, 0.75)))
            stream.feed(Output(1, [piece("yes", finish="stop")], True, 5))
            (event,) = await anext(steps)
            return [*told, event.content, [step async for step in steps]]

    assert run(found()) == [[], Reading(6, 0.5), 4, Timings(), "yes", []]
    assert house.engine.told_reading
    assert house.log.lines == ["accepted chat", "output", "end None"]
    other = House([piece("yes", finish="stop")])
    run(other.chat(asked()))
    assert not other.engine.told_reading


def test_a_conversation_so_far_stands_before_the_prompt(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House([piece("a", finish="stop")])
    tokenizer = house.models.model.tokenizer
    prompt = tokenizer.encode("<user>hi\n")
    run(house.chat(asked(before=[5, 6])))
    assert list(house.engine.asked[0][0]) == [5, 6, *prompt]
    monkeypatch.setattr(tokenizer, "bos_id", prompt[0])  # begins a text, and is in the middle of none
    run(house.chat(asked(before=[5, 6])))
    assert list(house.engine.asked[1][0]) == [5, 6, *prompt[1:]]
    for stranger in (-1, FACTS.vocab_size):
        with pytest.raises(ApiError) as caught:
            run(house.chat(asked(before=[stranger])))
        assert (caught.value.status, caught.value.param) == (400, "context")


@pytest.mark.parametrize(("most", "wanted", "room"), [(None, None, None), (12, None, 3), (12, 2, 2), (12, 9, 3), (10**9, 9, 9)])
def test_a_request_may_want_less_context_than_there_is(run: Any, most: int | None, wanted: int | None, room: int | None) -> None:
    house = House([piece("a", finish="stop")])
    run(house.chat(asked(most_tokens=most, params=SamplingParams(max_tokens=wanted))))  # the prompt has 9 tokens
    assert house.engine.asked[0][1].max_tokens == room


def test_a_prompt_that_leaves_no_room_in_what_the_request_wants_is_refused(run: Any) -> None:
    house = House([piece("a", finish="stop")])
    for most in (8, 9):
        with pytest.raises(ApiError, match=f"{most} tokens, and the prompt has 9") as caught:
            run(house.chat(asked(most_tokens=most)))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ApiError, match="7 tokens, and the prompt has 8"):
        run(house.generator.complete(house.model, TextAsked("12345678", SamplingParams(), most_tokens=7), CALLER))
    assert house.engine.asked == []


def test_without_tools_a_call_is_text(run: Any) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for extra in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        (event,) = run(House([piece(text, finish="stop")]).chat(asked(**extra)))
        assert event.calls == ()
        assert "f" in event.content
        assert event.finish_reason == "stop"


@pytest.mark.parametrize(("choice", "stop"), [("auto", ("x",)), ("none", ("x",)), ("required", ()), ("f", ())])
def test_stop_strings_are_for_answers_that_may_be_text(run: Any, choice: str, stop: tuple[str, ...]) -> None:
    """Within the arguments of a call that must be one they would leave half of its JSON."""
    house = House([piece("a", finish="stop")])
    run(house.chat(asked(params=SamplingParams(stop=["x"]), tools=[TOOL], tool_choice=choice)))
    assert house.engine.asked[0][1].stop == stop


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("text", "more", "finish"),
    [
        ('{"name": "f", "arguments": {"a": "Par', {"stop_reason": "is"}, "stop"),
        ('{"name": "f", "arguments": {"a": "Par', {"stop_reason": 7}, "stop"),
        ('{"name": "f", "arguments": {"a": "Paris"}}', {"stop_reason": "</tool_call>"}, "tool_calls"),
        ('{"name": "f", "arguments": {"a": "Paris"}}</tool_call>', {"stop_reason": "is"}, "tool_calls"),
        ('{"name": "f", "arguments": {"a": "Paris"}}', {}, "tool_calls"),
    ],
)
def test_a_call_that_a_stop_broke_off_is_not_to_be_followed(
    run: Any, whole: bool, text: str, more: dict[str, Any], finish: str
) -> None:
    house = House([piece("<tool_call>" + text, finish="stop", **more)])
    (event,) = run(house.chat(asked(tools=[TOOL], whole_calls=whole)))
    assert [call.name for call in event.calls] == ["f"]
    assert event.finish_reason == finish


@pytest.mark.parametrize("reason", ["length", "repetition"])
def test_what_is_cut_off_says_so(run: Any, reason: str) -> None:
    (event,) = run(House([piece('<tool_call>{"name": "f", "argu', finish=reason)]).chat(asked(tools=[TOOL])))
    assert event.finish_reason == reason


@pytest.mark.parametrize(("thinking", "end"), [(None, "hi\n"), (False, "<think></think>"), (True, "<think>")])
def test_thinking_is_the_templates_switch(run: Any, thinking: bool | None, end: str) -> None:
    house = House([piece("a", finish="stop")])
    (event,) = run(house.chat(asked(thinking=thinking)))
    prompt, params, _, _ = house.engine.asked[0]
    assert house.models.model.tokenizer.decode(prompt, skip_special_tokens=False).endswith(end)
    if thinking is False:
        assert params.reasoning is None
    else:
        assert params.reasoning is not None
        assert params.reasoning.starts_inside == (thinking is True)
    assert (event.reasoning, event.content) == (("a", "") if thinking else ("", "a"))


def housed(defaults: ChatDefaults) -> House:
    house = House([piece("a", finish="stop")])
    house.models.model = dataclasses.replace(house.models.model, chat_defaults=defaults)
    return house


@pytest.mark.parametrize(
    ("said", "end"),
    [({}, "<think></think>"), ({"thinking": True}, "<think>"), ({"template_kwargs": {"enable_thinking": True}}, "<think>"),
     ({"template_kwargs": {"other": 1}}, "<think></think>")],
)  # fmt: skip
def test_the_servers_variables_count_where_a_request_says_nothing(run: Any, said: dict[str, Any], end: str) -> None:
    house = housed(ChatDefaults({"enable_thinking": False}))
    run(house.chat(asked(**said)))
    assert house.models.model.tokenizer.decode(house.engine.asked[0][0], skip_special_tokens=False).endswith(end)


@pytest.mark.parametrize(("default", "said", "budget"), [(3, None, 3), (3, 7, 7), (3, 0, 0), (3, -1, None), (None, -1, None)])
def test_the_servers_budget_counts_where_a_request_says_nothing(
    run: Any, default: int | None, said: int | None, budget: int | None
) -> None:
    house = housed(ChatDefaults(reasoning_budget=default))
    run(house.chat(asked(thinking=True, reasoning_budget=said)))
    assert house.engine.asked[0][1].reasoning.budget == budget  # type: ignore[union-attr]


def test_salts_of_tenant_and_request_are_both_in(run: Any) -> None:
    house = House([piece("a", finish="stop")])
    for tenant, salt, expected in [(None, None, None), ("t", None, "t"), (None, "s", "s"), ("t", "s", "t:s")]:
        run(house.chat(asked(cache_salt=salt, priority=3), Caller("r", tenant)))
        assert house.engine.asked[-1][2:] == (3, expected)


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "context_length_exceeded"),
        ({"form": Constraint("lark", "bad")}, 400, None),
        ({"template_kwargs": {"refuse": True}}, 400, None),
        ({"template_kwargs": {"tokenizer": 1}}, 400, None),
        ({"tools": [{"type": "function"}]}, 400, None),
        ({"tools": [TOOL], "tool_choice": "g"}, 400, None),
        ({"tool_choice": "required"}, 400, None),
        ({"model": "other"}, 404, "model_not_found"),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine_sees_it(run: Any, more: dict[str, Any], status: int, code: Any) -> None:
    house = House([piece("a", finish="stop")])
    model = more.pop("model", "m")
    question = ChatAsked(more.pop("messages", MESSAGES), SamplingParams(), **more)
    with pytest.raises(ApiError) as caught:
        run(house.chat(question, model=model))
    assert (caught.value.status, caught.value.code) == (status, code)
    assert house.engine.asked == []
    assert house.models.users == 0
    assert [line.split()[0] for line in house.log.lines] == ["refused"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "now", "template", "tokenizer", "bos_token"])
def test_what_the_renderer_is_given_is_no_variable(run: Any, name: str) -> None:
    house = House([piece("a", finish="stop")])
    question = ChatAsked(MESSAGES, SamplingParams(), template_kwargs={name: []})
    for refused in (house.chat(question), house.generator.encode_chat(house.model, question, CALLER)):
        with pytest.raises(ApiError) as caught:
            run(refused)
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("param", ["messages", "input"])
@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": "x" * 600}]},  # its ids are too many
        {"messages": [{"role": "user", "content": "x" * 60_000}]},  # its characters are
        {"template_kwargs": {"refuse": True}},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
    ],
)
def test_a_conversation_is_called_what_its_client_calls_it(run: Any, more: dict[str, Any], param: str) -> None:
    house = House([piece("a", finish="stop")])
    question = ChatAsked(**{"messages": MESSAGES, "params": SamplingParams(), "param": param, **more})
    with pytest.raises(ApiError) as caught:
        run(house.chat(question))
    assert caught.value.param == param


def test_what_could_never_fit_is_refused_before_it_is_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing megabytes takes minutes."""
    house, text = House([piece("a", finish="stop")]), "x" * 1_000_000
    for name in ("encode", "encode_guarded"):
        monkeypatch.setattr(house.models.model.tokenizer, name, None)
    chat = ChatAsked([{"role": "user", "content": [{"type": "text", "text": text}]}], SamplingParams())
    tools = dataclasses.replace(asked(), tools=[{"type": "function", "function": {"name": "f", "description": text}}])
    for refused in (
        house.chat(chat),
        house.chat(tools),
        house.generator.encode_chat(house.model, chat, CALLER),
        house.generator.complete(house.model, TextAsked(text, SamplingParams()), CALLER),
        house.generator.embed(house.model, [text], "mean", CALLER),
    ):
        with pytest.raises(ApiError, match="at least") as caught:
            run(refused)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_of_what_is_far_too_long_only_the_beginning_is_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    encode = tokenizer._run
    monkeypatch.setattr(tokenizer, "_run", lambda backend, text: (read.append(len(text)), encode(backend, text))[1])
    house, text = House([piece("a", finish="stop")]), "x" * 10_000
    monkeypatch.setitem(house.models.model.tokenizer.__dict__, "longest_token", 100)
    for refused in (
        house.chat(ChatAsked([{"role": "user", "content": text}], SamplingParams())),
        house.generator.complete(house.model, TextAsked(text, SamplingParams()), CALLER),
    ):
        with pytest.raises(ApiError, match="at least") as caught:
            run(refused)
        assert caught.value.code == "context_length_exceeded"
    assert read == [16 * FACTS.context_len] * 2


def test_a_model_without_a_template_does_not_chat(run: Any) -> None:
    with pytest.raises(ApiError) as caught:
        run(House(template=None).chat(asked()))
    assert caught.value.status == 400


@pytest.mark.parametrize("choice", ["required", "f"])
def test_a_call_that_must_be_made_is_a_grammar(run: Any, choice: str) -> None:
    house = House([piece("a", finish="stop")])
    run(house.chat(asked(tools=[TOOL], tool_choice=choice)))
    constraint = house.engine.asked[0][1].constraint
    assert constraint is not None
    assert constraint.kind == "lark"
    assert house.checks.seen == [constraint]


def test_a_tool_whose_parameters_cannot_be_held_to_is_named(run: Any) -> None:
    class Refusing(Checks):
        async def check(self, constraint: Constraint) -> None:
            if "planet" in constraint.text:
                raise UsageError("no such format")

    house = House([piece("a", finish="stop")])
    house.generator = Generator(Refusing(), house.log)
    parameters = {"type": "object", "properties": {"x": {"type": "string", "format": "planet"}}}
    bad = {"type": "function", "function": {"name": "g", "parameters": parameters}}
    with pytest.raises(ApiError, match="the parameters of 'g': no such format") as caught:
        run(house.chat(asked(tools=[TOOL, bad], tool_choice="required")))
    assert (caught.value.status, caught.value.param) == (400, "tools")
    run(house.chat(asked(tools=[TOOL, bad], tool_choice="f")))


def test_beside_calls_gbnf_becomes_a_part_of_their_grammar(run: Any) -> None:
    house, gbnf = House([piece("a", finish="stop")]), Constraint("gbnf", 'root ::= "yes" | "no"')
    with pytest.raises(ApiError, match="ordinary text"):
        run(house.chat(asked(tools=[TOOL], form=gbnf)))
    known = answer_format(TEMPLATE, special_tokens={"<tool_call>": 300})
    house.models.model = dataclasses.replace(house.models.model, format=known)
    run(house.chat(asked(tools=[TOOL], form=gbnf)))
    run(house.chat(asked(form=gbnf)))
    beside, alone = (params.constraint for _, params, *_ in house.engine.asked)
    assert beside is not None
    assert beside.kind == "lark"
    assert lark_of_gbnf(gbnf.text) in beside.text
    assert alone == gbnf


def test_in_harmony_a_form_is_for_the_message_to_the_user_and_a_call_is_not(run: Any) -> None:
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    house = House([piece("a", finish="stop")], template=template + "{# <|channel|>analysis #}")
    run(house.chat(asked(form=Constraint("json_schema", "{}"))))
    run(house.chat(asked(tools=[TOOL], tool_choice="required")))
    formed, called = (params.reasoning for _, params, *_ in house.engine.asked)
    assert formed is not None
    assert called is not None
    assert (formed.close, called.close) == ("<|channel|>final<|message|>", "<|end|>")


def test_an_answer_that_fails_is_an_error_and_everything_is_let_go(run: Any) -> None:
    house = House([piece("a"), piece("b", finish="error", index=1, error="NaN")])
    with pytest.raises(ApiError) as caught:
        run(house.chat(asked(params=SamplingParams(n=2))))
    assert caught.value.status == 500
    assert house.models.users == 0
    assert house.log.lines[-1] == "end 500"


@pytest.mark.parametrize("together", [False, True], ids=["apart", "heard together"])
@pytest.mark.parametrize("unmeetable", [False, True])
def test_what_was_drawn_before_a_failure_is_told_before_it(run: Any, together: bool, unmeetable: bool) -> None:
    """Whether the server heard of the failure with the words or behind them; "<th" may have become a tag."""
    said = [piece("Once ")]
    failed = [piece("<th", finish="error", error="NaN", unmeetable=unmeetable)]
    house = House(said, failed) if together else House(said, ends=False)

    events: list[Event] = []

    async def scenario() -> None:
        async with house.begun(asked()) as generation:
            async for step in generation:
                events.extend(step)
                if not together and len(events) == 1:
                    house.engine.streams[0].feed(Output(1, failed, True, 5))

    with pytest.raises(ApiError) as caught:
        run(scenario())
    assert caught.value.status == (400 if unmeetable else 500)
    assert len(events) == (1 if together else 2)
    assert "".join(event.content for event in events) == "Once <th"
    assert [event.finish_reason for event in events] == [None] * len(events)


@pytest.mark.parametrize("unmeetable", [False, True])
def test_a_failure_before_the_first_token_has_no_events(run: Any, unmeetable: bool) -> None:
    """So that it is an HTTP error of a stream, too."""
    house = House([piece("", (), finish="error", error="NaN", unmeetable=unmeetable)])

    async def scenario() -> None:
        async with house.begun(asked()) as generation:
            with pytest.raises(ApiError):
                await anext(aiter(generation))

    run(scenario())


def test_what_cannot_be_met_is_its_own_clients_fault(run: Any) -> None:
    house = House([piece("a"), piece("", finish="error", error="no token is left to draw", unmeetable=True)])
    with pytest.raises(ApiError, match="no token is left to draw") as caught:
        run(house.chat(asked()))
    assert (caught.value.status, caught.value.code, caught.value.retries) == (400, "unmeetable", False)
    assert house.log.lines[-1] == "end 400"


def test_an_engine_that_dies_fails_the_answer(run: Any) -> None:
    house = House([piece("a")], error=ApiError(503, "gone"))
    with pytest.raises(ApiError):
        run(house.chat(asked()))
    assert house.log.lines == ["accepted chat", "output", "end 503"]
    assert house.models.users == 0


def test_what_the_engine_does_not_take_was_refused(run: Any) -> None:
    error = ApiError(400, "priorities mean nothing")
    error.by_engine = True
    house = House(error=error)
    with pytest.raises(ApiError):
        run(house.chat(asked()))
    assert house.log.lines == ["accepted chat", "end 400", "refused m 400"]
    with pytest.raises(ApiError) as caught:
        run(house.generator.embed(house.model, ["a", "b"], "mean", CALLER))
    assert not caught.value.was_taken


@pytest.mark.parametrize("way", ["aclose", "cut"])
def test_who_leaves_aborts(way: str, run: Any) -> None:
    house = House([piece("a")], ends=False)

    async def scenario() -> None:
        async with house.begun(asked(), model=None) as generation:
            assert house.models.users == 1
            async for _ in generation:
                break
            await getattr(generation, way)()

    run(scenario())
    assert house.engine.aborted == 1
    assert house.log.lines.count("cut") == (way == "cut")
    assert house.models.users == 0
    assert house.log.lines[-1] == "end None"
    assert house.log.lines.count("end None") == 1


def test_texts_and_ids_are_completed(run: Any) -> None:
    house = House([piece("<think>x", finish="stop")])

    async def scenario(prompt: str | Sequence[int]) -> list[Event]:
        async with house.begun(TextAsked(prompt, SamplingParams()), model=None) as generation:
            return [event async for step in generation for event in step]

    (event,) = run(scenario("ab"))
    assert event.content == "<think>x"
    run(scenario(house.models.model.tokenizer.encode("ab")))
    assert house.engine.asked[0][0] == house.engine.asked[1][0]
    for bad in ("", [], [300], [-1]):
        with pytest.raises(ApiError) as caught:
            run(scenario(bad))
        assert caught.value.status == 400


def test_many_vectors_hold_up_nobody(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unit, on_loop = generation.unit, []

    def watched(vector: Sequence[float]) -> list[float]:
        on_loop.append(asyncio._get_running_loop() is not None)
        return unit(vector)

    monkeypatch.setattr(generation, "unit", watched)
    house = House()
    run(house.generator.embed(house.model, ["a", "bb"], "mean", CALLER))
    assert on_loop == [False, False]


def test_who_asked_for_vectors_is_told_of_each(run: Any) -> None:
    house = House()
    run(house.generator.embed(house.model, ["a", "bb"], "mean", CALLER))
    assert house.log.callers == [CALLER, CALLER]


def test_texts_are_cut_where_that_is_asked_for(run: Any) -> None:
    """To so many tokens, or to what the context holds; a text of megabytes is not read whole."""
    house = House()
    limit = FACTS.context_len
    _, count = run(house.generator.embed(house.model, ["a" * 600, "bb", [1] * 7], "mean", CALLER, most=5))
    assert count == 5 + 2 + 5
    _, count = run(house.generator.embed(house.model, ["a" * 5_000_000], "mean", CALLER, most=-1))
    assert count == limit
    for bad in (0, limit + 1):
        with pytest.raises(ApiError, match=f"between 1 and {limit} tokens") as refused:
            run(house.generator.embed(house.model, ["a"], "mean", CALLER, most=bad))
        assert refused.value.param == "truncate_prompt_tokens"


def test_embeddings_have_length_one(run: Any) -> None:
    house = House()
    (first, second), count = run(house.generator.embed(house.model, ["a", [1, 2]], "mean", CALLER, priority=-2))
    assert count == 3
    assert house.engine.priorities == [-2, -2]
    assert list(first) == pytest.approx([0.6, 0.0, 0.8])
    assert math.hypot(*second) == pytest.approx(1)
    with pytest.raises(ApiError):
        run(house.generator.embed(House(error=ApiError(503, "gone")).model, ["a", "b"], "mean", CALLER))
    with pytest.raises(ApiError) as caught:
        run(house.generator.embed(house.model, ["a" * 600], "mean", CALLER))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    for bad in ([300], "x" * 1_000_000):
        with pytest.raises(ApiError) as caught:
            run(house.generator.embed(house.model, [bad], "mean", CALLER))
        assert caught.value.param == "input"
