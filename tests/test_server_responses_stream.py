"""Streams of /v1/responses: every event is what OpenAI's specification says, and together they are the response they end with."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.text.tool_calls import ToolCallDelta as Call
from responses_spec import check_event
from server_client import ServerClient, StreamedEvent
from server_fakes import FakeGenerates, FakePool, Script, event

PATH = "/v1/responses"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Runs a command", "strict": False,
     "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}},
    {"type": "local_shell"},
    {"type": "web_search"},
]  # fmt: skip
SCRIPTS = {
    "text": Script.of("Hello", " there"),
    "empty": Script.of(""),
    "cut off": Script.of("Hello", finish="length"),
    "cut off in reasoning": Script([[event(reasoning="a")], [event(reasoning="b", finish="length")]]),
    "all at once": Script([[event("b", reasoning="a", calls=[Call(0, "c", "shell", "{}")], finish="tool_calls")]]),
    "several": Script(
        [
            [event(reasoning="a"), event(reasoning="b")],
            [event("")],
            [event("c"), event("d", calls=[Call(0, "c0", "shell", "")])],
            [event(calls=[Call(0, None, None, '{"x"'), Call(0, None, None, ":1}"), Call(1, "c1", "shell", "{")])],
            [event(calls=[Call(1, None, None, "}")])],
            [event("e")],
            [event("", finish="tool_calls")],
        ]
    ),
}


def streamed(script: Script, **more: Any) -> list[StreamedEvent]:
    return ServerClient(FakeGenerates(script)).stream(PATH, {"input": "hi", "tools": TOOLS, **more})


def rebuilt(events: list[StreamedEvent]) -> list[dict[str, Any]]:
    """The output, put together of deltas and of nothing else, as a client does that shows them."""
    items: list[dict[str, Any]] = []
    for name, data in events:
        if name == "response.output_item.added":
            assert data["output_index"] == len(items)
            items.append({"id": data["item"]["id"], "type": data["item"]["type"], "text": ""})
        elif str(name).endswith(".delta"):
            assert data["item_id"] == items[data["output_index"]]["id"]
            items[data["output_index"]]["text"] += data["delta"]
    return items


def text_of(item: dict[str, Any]) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_event_is_as_specified(name: str) -> None:
    for event_name, data in streamed(SCRIPTS[name]):
        assert event_name == data["type"]
        check_event(data)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_ends_with_the_response_that_it_told(name: str) -> None:
    events = streamed(SCRIPTS[name])
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [events[0].name, events[1].name] == ["response.created", "response.in_progress"]
    last = events[-1].data["response"]
    assert events[-1].name == f"response.{last['status']}"
    assert events[0].data["response"]["id"] == last["id"]
    assert events[0].data["response"]["output"] == []
    told = [(item["id"], item["type"], item["text"]) for item in rebuilt(events)]
    assert told == [(item["id"], item["type"], text_of(item)) for item in last["output"]]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == last["output"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_tells_what_is_answered_without_one(name: str) -> None:
    whole = ServerClient(FakeGenerates(SCRIPTS[name])).post(PATH, {"input": "hi", "tools": TOOLS})
    last = streamed(SCRIPTS[name])[-1].data["response"]
    assert [(item["type"], text_of(item), item["status"]) for item in last["output"]] == [
        (item["type"], text_of(item), item["status"]) for item in whole["output"]
    ]
    for field in ("status", "usage", "incomplete_details", "tools", "text"):
        assert last[field] == whole[field]


def test_texts_are_done_before_their_item_is() -> None:
    names = [name for name, _ in streamed(Script.of("a", "b"))]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


@pytest.mark.parametrize(("status", "code"), [(500, "server_error"), (503, "server_error"), (400, "invalid_prompt")])
def test_a_failure_in_mid_stream_is_an_event(status: int, code: str) -> None:
    events = streamed(Script([[event(reasoning="Hm")], [event("Hel")]], error=ApiError(status, "the engine died")))
    for _, data in events:
        check_event(data)
    last = events[-1].data["response"]
    assert (events[-1].name, last["status"]) == ("response.failed", "failed")
    assert last["error"] == {"code": code, "message": "the engine died"}
    assert [(item["type"], item["status"]) for item in last["output"]] == [("reasoning", "completed"), ("message", "incomplete")]


def test_a_failed_response_is_not_kept() -> None:
    served = ServerClient(FakeGenerates(Script([[event("Hel")]], error=ApiError(500, "the engine died"))))
    response = served.stream(PATH, {"input": "hi"})[-1].data["response"]
    served.get(f"{PATH}/{response['id']}", status=404)


def test_a_streamed_response_is_kept() -> None:
    served = ServerClient(FakeGenerates(Script.of("Hello")))
    response = served.stream(PATH, {"input": "hi"})[-1].data["response"]
    assert served.get(f"{PATH}/{response['id']}") == response


def test_a_session_of_codex() -> None:
    """As Codex CLI asks: its own tools among the functions, nothing stored, reasoning sealed, the whole history each time."""
    served = ServerClient(FakeGenerates())
    history: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
    ]

    def turn(script: Script) -> dict[str, Any]:
        served.generates.script = script
        events = served.stream(
            PATH,
            {
                "model": "fake", "instructions": "You are Codex.", "input": history, "tools": TOOLS, "tool_choice": "auto",
                "parallel_tool_calls": False, "reasoning": {"summary": "auto"}, "store": False,
                "include": ["reasoning.encrypted_content"], "prompt_cache_key": "5c9d", "text": {"verbosity": "medium"},
            },
        )  # fmt: skip
        for _, data in events:
            check_event(data)
        assert events[-1].name == "response.completed"
        for item in (data["item"] for name, data in events if name == "response.output_item.done"):
            kept = {key: value for key, value in item.items() if key != "id"}  # ids stay behind where nothing is stored
            if kept["type"] == "reasoning":
                kept["content"] = None
            history.append(kept)
        response: dict[str, Any] = events[-1].data["response"]
        return response

    call = [Call(0, "call_7", "shell", '{"command":["ls"]}')]
    response = turn(Script([[event(reasoning="I list them.")], [event(calls=call, finish="tool_calls")]]))
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    history.append({"type": "function_call_output", "call_id": "call_7", "output": "README.md\n"})
    turn(Script.of("One file."))
    history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thanks"}]})
    turn(Script.of("Welcome."))
    asked = served.generates.asked[-1]
    assert [tool["function"]["name"] for tool in asked.tools] == ["shell"]
    messages = list(asked.messages)
    assert messages[0] == {"role": "system", "content": "You are Codex.\n\n<permissions>"}
    assert [message["role"] for message in messages] == ["system", "user", "user", "assistant", "tool", "assistant", "user"]
    assert messages[3]["reasoning_content"] == "I list them."
    # What was asked before is a prefix of what is asked now, so that the cache has it.
    assert list(served.generates.asked[0].messages) == messages[:3]
    assert list(served.generates.asked[1].messages) == messages[:5]


@pytest.mark.parametrize("body", [{"input": "hi"}, {"input": "hi", "stream": True}])
@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
def test_when_the_client_leaves_the_generation_is_closed(path: str, body: dict[str, Any]) -> None:
    """While it waits for the engine, and in mid-stream."""
    generates = FakeGenerates(Script([[event("Hel")], [event("lo", finish="stop")]], waits=asyncio.Event(), waits_at=1))
    if path != PATH:
        body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **body}
        body.pop("input")

    async def leave() -> None:
        app = create_app(ServerContext(ServeSettings(), generates.models, generates, FakePool()))
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080), "state": {},
        }  # fmt: skip

        async def send(message: Any) -> None:
            pass

        task = asyncio.create_task(app(scope, incoming.get, send))
        while not generates.generations or not generates.generations[0].usage.completion_tokens:
            await asyncio.sleep(0)
        incoming.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(task, 10)

    asyncio.run(leave())
    assert generates.generations[0].closed
    assert generates.models.in_use == 0
