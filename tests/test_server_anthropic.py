"""/v1/messages over scripted answers. Messages and events are held against the types of the anthropic package, where it is
installed."""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.errors import error_body
from nanovllm_cli.server.ports import ChatAsked
from nanovllm_cli.text.tool_calls import ToolCallDelta as Call
from server_client import REQUEST_ID, ServerClient, StreamedEvent
from server_fakes import FakeGenerates, FakeModels, Script, event

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = [Call(0, "call_1", "get_weather", ""), Call(0, None, None, '{"place":'), Call(0, None, None, '"Rome"}')]


def client(script: Any = None, **models: Any) -> ServerClient:
    return ServerClient(FakeGenerates(script, FakeModels(**models)))


def request(messages: Any = HI, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 64, "messages": messages, **more}


def asked_for(messages: Any = HI, **more: Any) -> ChatAsked:
    served = client()
    served.post(PATH, request(messages, **more))
    asked = served.generates.asked[-1]
    assert isinstance(asked, ChatAsked)
    return asked


def check_message(message: Any) -> None:
    types = pytest.importorskip("anthropic.types", reason="the anthropic package is not installed")
    types.Message.model_validate(message, strict=True)


def check_event(event: StreamedEvent) -> None:
    types = pytest.importorskip("anthropic.types", reason="the anthropic package is not installed")
    pydantic = pytest.importorskip("pydantic")
    if event.name != "ping":
        pydantic.TypeAdapter(types.RawMessageStreamEvent).validate_python(event.data, strict=True)


# ---- what is answered ----


def test_an_answer_is_a_message() -> None:
    message = client(Script.of("Hello", " there", cached_tokens=4)).post(PATH, request())
    check_message(message)
    assert message["content"] == [{"type": "text", "text": "Hello there"}]
    assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("end_turn", None, "assistant")
    assert message["usage"] == {  # what was cached is not counted twice
        "input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 11
    }  # fmt: skip


def test_a_message_is_one_answer_whatever_the_default() -> None:
    served = client(default_params=SamplingParams(n=3, min_tokens=100))
    served.post(PATH, request())
    params = served.generates.asked[-1].params
    assert (params.n, params.max_tokens, params.min_tokens) == (1, 64, 64)


def test_thinking_text_and_calls_are_blocks() -> None:
    script = Script([[event(reasoning="Hm.")], [event("Let me look.")], [event(calls=CALL)], [event(finish="tool_calls")]])
    message = client(script).post(PATH, request(tools=[WEATHER]))
    check_message(message)
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "Hm.", "Let me look.")
    assert thinking["signature"]
    assert call == {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"place": "Rome"}}
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("last", "drawn", "expected"),
    [
        ({"finish": "stop"}, 3, ("end_turn", None)),
        ({"finish": "stop", "stop_reason": 7}, 3, ("end_turn", None)),
        ({"finish": "stop", "stop_reason": "END"}, 3, ("stop_sequence", "END")),
        ({"finish": "length"}, 64, ("max_tokens", None)),
        ({"finish": "repetition"}, 64, ("max_tokens", None)),
        ({"finish": "repetition"}, 63, ("max_tokens", None)),
        ({"finish": "length"}, 63, ("model_context_window_exceeded", None)),
    ],
)
def test_why_it_stopped(last: dict[str, Any], drawn: int, expected: tuple[str, str | None]) -> None:
    served = client(Script([[event("x", token_ids=[1] * drawn, **last)]]))
    message = served.post(PATH, request(stop_sequences=["END"]))
    check_message(message)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    delta = next(e.data for e in served.stream(PATH, request(stop_sequences=["END"])) if e.name == "message_delta")
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == expected


def test_what_came_together_keeps_its_order() -> None:
    calls = [Call(0, "c0", "f", "{}", place=1), Call(1, "c1", "f", "{}", place=2)]
    message = client(Script([[event("abc", calls=calls, finish="tool_calls")]])).post(PATH, request(tools=[WEATHER]))
    assert [block.get("text") or block["id"] for block in message["content"]] == ["a", "c0", "b", "c1", "c"]


def test_a_call_that_was_cut_off_has_what_was_complete() -> None:
    calls = [Call(0, "c", "get_weather", '{"place":"Rome","days":[1,2')]
    message = client(Script([[event(calls=calls, finish="length")]])).post(PATH, request(tools=[WEATHER]))
    check_message(message)
    assert message["content"][0]["input"]["place"] == "Rome"


def test_thinking_can_be_left_out() -> None:
    served = client(Script([[event(reasoning="secret")], [event("x", finish="stop")]]))
    body = request(thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    block = served.post(PATH, body)["content"][0]
    assert (block["thinking"], bool(block["signature"])) == ("", True)
    assert "secret" not in str(served.stream(PATH, body))


SCRIPTS = {
    "text": Script.of("Hello", " there"),
    "empty": Script.of(""),
    "cut off": Script.of("Hello", finish="length"),
    "thinking only": Script([[event(reasoning="a")], [event(reasoning="b", finish="length")]]),
    "several": Script(
        [
            [event(reasoning="a"), event(reasoning="b")],
            [event("c"), event("d", calls=[Call(0, "c0", "get_weather", "", place=1)])],
            [event(calls=[Call(0, None, None, '{"x"'), Call(0, None, None, ":1}"), Call(1, "c1", "f", "{}")])],
            [event("e")],
            [event("", finish="tool_calls")],
        ]
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_tells_the_message(name: str) -> None:
    """Put together as clients do it, it is what is answered without a stream."""
    import json

    whole = client(SCRIPTS[name]).post(PATH, request(tools=[WEATHER]))
    events = client(SCRIPTS[name]).stream(PATH, request(tools=[WEATHER]))
    for one in events:
        assert one.name == one.data["type"]
        check_event(one)
    assert [e.name for e in events[:2]] == ["message_start", "ping"]
    assert [e.name for e in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for kind, data in events[2:-2]:
        if kind == "content_block_start":
            assert (is_open, data["index"]) == (False, len(blocks))
            blocks.append({**data["content_block"], "json": ""})
        elif kind == "content_block_delta":
            delta = data["delta"]
            into, text = next((key, value) for key, value in delta.items() if key != "type")
            key = {"partial_json": "json"}.get(into, into)
            blocks[data["index"]][key] += text
        is_open = kind != "content_block_stop"
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    assert blocks == whole["content"]
    assert events[0].data["message"]["content"] == []
    assert events[-2].data["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2].data["usage"] == whole["usage"]


def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    events = client(Script([[event("Hel")]], error=ApiError(500, "the engine died"))).stream(PATH, request())
    assert events[-1].name == "error"
    assert events[-1].data == {
        "type": "error", "error": {"type": "api_error", "message": "the engine died"}, "request_id": REQUEST_ID
    }  # fmt: skip


# ---- what is asked for ----


def test_messages_become_a_conversation() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Rome?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"place": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {"type": "text", "text": "And tomorrow?"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [{"type": "text", "text": "no place"}]},
            ],
        },
    ]

    def call(call_id: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}

    asked = asked_for(messages, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert list(asked.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather\nin Rome?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Look.",
            "tool_calls": [call("t1", '{"place":"Rome"}'), call("t2", "{}")],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "name": "get_weather", "content": "Error: no place"},
        {"role": "user", "content": "And tomorrow?"},
    ]


def test_turns_of_one_role_are_one() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert list(asked_for(messages).messages) == [{"role": "user", "content": "a\n\nb"}]


@pytest.mark.parametrize("content", ["", None, []])
def test_a_result_may_be_empty(content: Any) -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    messages = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert asked_for(messages).messages[-1] == {"role": "tool", "tool_call_id": "t", "name": "f", "content": ""}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert asked_for().continues is False
    asked = asked_for([*HI, {"role": "assistant", "content": "The answer is ("}])
    assert (asked.continues, asked.messages[-1]) == (True, {"role": "assistant", "content": "The answer is ("})


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


def test_a_billing_header_that_changes_does_not_change_the_prompt() -> None:
    """Claude Code's first block of `system` differs in each request; the prompt's prefix must not."""
    rest = [{"type": "text", "text": "You are Claude Code."}, {"type": "text", "text": "Help."}]
    prompts = [
        list(asked_for(system=[{"type": "text", "text": BILLING.format(nonce)}, *rest]).messages) for nonce in ("fa690", "0aaa9")
    ]
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == {"role": "system", "content": "You are Claude Code.\nHelp."}
    assert asked_for(system=BILLING.format("1") + "\nBe brief.").messages[0]["content"] == "Be brief."
    assert asked_for(system=BILLING.format("1")).messages[0]["role"] == "user"


def test_what_only_speaks_of_a_billing_header_is_left_alone() -> None:
    text = "Explain this line:\n" + BILLING.format("1")
    assert asked_for(system=text).messages[0]["content"] == text
    assert asked_for([{"role": "user", "content": BILLING.format("1")}]).messages[0]["content"] == BILLING.format("1")


def test_tools_have_the_form_of_functions() -> None:
    asked = asked_for(tools=[{**WEATHER, "strict": True, "input_examples": [{"place": "Rome"}]}, {**WEATHER, "name": "other"}])
    function = {"name": "get_weather", "description": WEATHER["description"], "strict": True}
    schema = {**WEATHER["input_schema"], "examples": [{"place": "Rome"}]}
    assert asked.tools[0] == {"type": "function", "function": {**function, "parameters": schema}}
    assert list(asked.tools[1]["function"]) == ["name", "description", "parameters"]  # as templates show it to a model


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "get_weather"}, "get_weather", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_tool_choice(choice: Any, expected: str, parallel: bool) -> None:
    asked = asked_for(tools=[WEATHER], tool_choice=choice)
    assert (asked.tool_choice, asked.parallel) == (expected, parallel)


@pytest.mark.parametrize(
    ("thinking", "with_switch", "without"),
    [
        (None, (False, None), (False, 0)),
        ({"type": "disabled"}, (False, None), (False, 0)),
        ({"type": "enabled", "budget_tokens": 2048}, (True, 2048), (True, 2048)),
        ({"type": "adaptive"}, (True, None), (None, None)),
        ({"type": "adaptive", "budget_tokens": 0}, (True, None), (None, None)),
    ],
)
def test_thinking(thinking: Any, with_switch: Any, without: Any) -> None:
    for switch, expected in (("enable_thinking", with_switch), (None, without)):
        served = client(thinking_switch=switch)
        served.post(PATH, request(thinking=thinking))
        asked = served.generates.asked[-1]
        assert (asked.thinking, asked.reasoning_budget) == expected


def test_how_to_draw_reaches_the_engine() -> None:
    params = asked_for(temperature=0.25, top_p=0.5, top_k=3, stop_sequences=["a", "b"]).params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.25, 0.5, 3, ("a", "b"))
    assert params.max_tokens == 64


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_is_a_constraint_and_is_tried_out(field: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    served = client()
    served.post(PATH, request(**{field: {"format": wanted} if field == "output_config" else wanted}))
    form = Constraint("json_schema", '{"type":"object"}')
    assert (served.generates.asked[-1].form, served.pool.checked) == (form, [form])


def test_a_request_of_claude_code() -> None:
    """Its beta fields, a hint of effort, thinking that is adaptive, and edits of thinking."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    asked = asked_for(
        system=[{"type": "text", "text": BILLING.format("1")}, {"type": "text", "text": "You are Claude Code."}],
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        thinking={"type": "adaptive"}, output_config={"effort": "high"}, context_management=edits,
        metadata={"user_id": "x" * 2000}, temperature=1, service_tier="auto", stream=False,
    )  # fmt: skip
    assert (asked.template_kwargs, asked.thinking) == ({"reasoning_effort": "high"}, None)


def test_counting_is_of_the_same_prompt() -> None:
    served = client()
    body = {"model": "fake", "messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    usage = served.post(PATH, {**body, "max_tokens": 5})["usage"]
    assert served.post(COUNT, body) == {"input_tokens": usage["input_tokens"]}


# ---- bad input ----


def user(*blocks: Any) -> Any:
    return [{"role": "user", "content": list(blocks)}]


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "file", "file_id": "f"}}
TEXT = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}
CALLED = [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}]}]
ANSWERED = {"role": "user", "content": [RESULT]}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    ({"messages": user()}, "messages"),
    ({"messages": user({"text": "x"})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0]"),
    ({"messages": user({"type": "text", "text": "a"}, IMAGE)}, "messages[0].content[1].source.type"),
    ({"messages": user({"type": "image", "source": {"type": "ftp", "url": ""}})}, "messages[0].content[0].source.type"),
    ({"messages": user({"type": "image", "source": {"type": "base64", "data": ""}})}, "messages[0].content[0].source.media_type"),
    ({"messages": [*HI, {"role": "assistant", "content": [IMAGE]}]}, "messages[1].content[0].type"),
    ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "tool_result", "tool_use_id": "x"})}, "messages[0].content[0].tool_use_id"),
    ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages[1].content[0].input"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[1].content[0].type"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages[1].content[0]"),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]},
            ]
        },
        "messages[2].content[0].content[0].source.type",
    ),
    ({"messages": user(*[{"type": "text", "text": ""}] * 65537)}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": "64"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"compaction": {"type": "enabled"}}, "compaction"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits"),
    ({"context_management": 5}, "context_management"),
    ({"thinking": "on"}, "thinking"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"x": "refuse"}}}}, "output_config.format"),
    ({"output_format": {"type": "json_schema"}}, "output_format"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER] * 513}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_bad_input_is_named(body: dict[str, Any], param: str) -> None:
    served = client()
    answer = served.post(PATH, request() | body, status=400)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(param)
    assert not served.generates.asked


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"messages": HI}),
        ({"messages": [*HI, {"role": "assistant", "content": [RESULT]}]}, {"messages": [*HI, *CALLED, ANSWERED]}),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {"messages": [{"role": "user", "content": [TEXT]}]}),
        ({"system": [{"type": "image"}]}, {"system": [TEXT]}),
        ({"tools": [{"name": "f"}]}, {"tools": [WEATHER]}),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, {"tools": [{**WEATHER, "type": "custom"}]}),
        ({"thinking": {"type": "enabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
        ({"output_format": {"type": "json_schema"}}, {"output_format": {"type": "json_schema", "schema": {}}}),
    ],
)
def test_what_is_read_is_what_is_described(wrong: dict[str, Any], right: dict[str, Any]) -> None:
    served = client()
    served.post(PATH, request() | wrong, status=400)
    served.post(PATH, request() | right)
    assert [served.fits("MessagesRequest", request() | body) for body in (wrong, right)] == [False, True]


def test_long_conversations_take_time_in_proportion() -> None:
    """Pieces are joined once: a hundred thousand turns of one role took minutes when each was added to the text before it."""
    messages = [{"role": "user", "content": "x" * 200}] * 60_000
    assert len(asked_for(messages).messages[0]["content"]) == 60_000 * 202 - 2


def test_max_tokens_is_required() -> None:
    answer = client().post(PATH, {"model": "fake", "messages": HI}, status=400)
    assert answer["error"]["message"].startswith("max_tokens")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
        (405, "invalid_request_error"), (408, "timeout_error"), (413, "request_too_large"), (429, "rate_limit_error"),
        (431, "invalid_request_error"), (500, "api_error"), (503, "overloaded_error"), (504, "api_error"),
    ],
)  # fmt: skip
def test_errors_below_this_path_have_anthropics_form(status: int, kind: str) -> None:
    for path in (PATH, COUNT, f"{PATH}/unknown"):
        body = error_body(ApiError(status, "no"), path, "req-1")
        assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req-1"}
    assert "type" not in error_body(ApiError(status, "no"), "/v1/messagesque", "req-1")


def test_a_prompt_that_is_too_long_is_called_so() -> None:
    refuses = ApiError(400, "the prompt has 9000 tokens, and this model's context holds 4096", code="context_length_exceeded")
    for more in ({}, {"stream": True}):
        answer = client(Script([], refuses=refuses)).post(PATH, request(**more), status=400)
        assert answer["error"]["message"].startswith("prompt is too long: the prompt has 9000 tokens")


def test_an_unknown_model_is_not_found() -> None:
    answer = client().post(PATH, request(model="claude-opus"), status=404)
    assert answer["error"]["type"] == "not_found_error"
