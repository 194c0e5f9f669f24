"""Calls in streams of every API: what begins ends, in order, and all of it is what the same answer is without a stream, however
its text comes in pieces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nanovllm_cli.server.function_tools import arguments_of
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.messages import Output
from nanovllm_cli.text.answer_format import answer_format
from server_client import ServerClient, StreamedEvent
from server_fakes import FakeEngine, FakeModels
from test_server_generation import Checks, piece
from tool_answers import ONE, TOOL_LIST

FUNCTIONS = [tool["function"] for tool in TOOL_LIST]
FOR_MESSAGES = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
FOR_RESPONSES = [{"type": "function", "strict": False, **each} for each in FUNCTIONS]
USER = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "tools": TOOL_LIST},
    "/v1/messages": {"messages": USER, "max_tokens": 4000, "tools": FOR_MESSAGES},
    "/v1/responses": {"input": "hi", "store": False, "tools": FOR_RESPONSES},
    "/api/chat": {"messages": USER, "tools": TOOL_LIST},
}
Said = tuple[str, str, list[tuple[str, Any]], Any]
"""Reasoning, content, calls, and what the answer ends with."""


def answers(name: str) -> dict[str, tuple[str, str]]:
    """By what is special about them: a text, and why it ends."""
    one = ONE[name]
    return {
        "a call": (one, "stop"),
        "behind reasoning": (f"<think>Hm.</think>{one}\n{one}", "stop"),
        "reasoning that nothing closes": (f"<think>Hm.\n\n{one}\n{one} bye", "stop"),
        "reasoning that is cut off": (f"<think>Hm. {one[: len(one) * 2 // 3]}", "length"),
        "reasoning that is closed after all": (f"<think>Hm. {one} or not\n</think>\n\n{one}", "stop"),
        "half a tag": (f"<think>Hm. {one[:14]}", "stop"),
        "text around calls": (f"A {one} B {one} C", "stop"),
        "a call that is cut off": (one[: len(one) * 2 // 3], "length"),
    }


class Apart:
    """An answer's pieces, one after the other, however slow their reader is."""

    def __init__(self, texts: list[str], finish: str) -> None:
        finishes = [*[None] * (len(texts) - 1), finish]
        self._pieces = [piece(text, list(text.encode()), end) for text, end in zip(texts, finishes, strict=True)]

    async def __aiter__(self) -> AsyncIterator[Output]:
        for each in self._pieces:
            yield Output(1, [each], each.finish_reason is not None, 0)

    def abort(self) -> None:
        pass


class House(Generator):
    def __init__(self, models: FakeModels) -> None:
        self.models = models
        super().__init__(Checks())


def client(name: str, texts: list[str], finish: str) -> ServerClient:
    """Of a server whose model says this."""
    models, engine = FakeModels("m", format=answer_format("", tools=name, reasoning="think")), FakeEngine()
    engine.generate = lambda *_, **__: Apart(texts, finish)  # type: ignore[method-assign,assignment]
    models.served["m"] = dataclasses.replace(models.served["m"], engine=engine)
    return ServerClient(House(models))  # type: ignore[arg-type]


def streamed(served: ServerClient, path: str) -> Any:
    body = {"model": "m", **ASKED[path]}
    if path == "/api/chat":
        return served.lines(path, body)
    if path != "/v1/chat/completions":
        return served.stream(path, body)
    text = served.send(path, json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}),
                       {"content-type": "application/json"}).text  # fmt: skip
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# ---- what streams say ----


def of_chat(frames: list[Any]) -> Said:
    reasoning, content, calls = "", "", list[list[str]]()
    finishes = [frame["choices"][0]["finish_reason"] for frame in frames[:-1]]
    assert [bool(finish) for finish in finishes] == [False] * (len(finishes) - 1) + [True]
    assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for frame in frames[:-1]:
        delta = frame["choices"][0]["delta"]
        reasoning, content = reasoning + delta.get("reasoning_content", ""), content + delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1
            calls[-1][1] += call["function"]["arguments"]
    return reasoning, content, [(name, arguments) for name, arguments in calls], (finishes[-1], frames[-1]["usage"])


def of_messages(events: list[StreamedEvent]) -> Said:
    blocks, is_open = list[dict[str, Any]](), False
    assert [event.name for event in (*events[:2], *events[-2:])] == ["message_start", "ping", "message_delta", "message_stop"]
    for name, data in events[2:-2]:
        assert is_open == (name != "content_block_start")
        if name == "content_block_start":
            blocks.append(data["content_block"] | {"partial_json": ""})
            assert blocks[-1]["type"] != "tool_use" or (blocks[-1]["id"] and blocks[-1]["name"])
        elif name == "content_block_delta":
            kinds = {"text_delta": "text", "input_json_delta": "tool_use"}
            assert kinds.get(data["delta"].pop("type"), "thinking") == blocks[-1]["type"]
            for key, value in data["delta"].items():
                blocks[-1][key] += value
        assert data["index"] == len(blocks) - 1
        is_open = name != "content_block_stop"
    assert not is_open
    for block in blocks:
        block["input"] = arguments_of(block["partial_json"])
    return _of_blocks(blocks, events[-2].data["delta"], events[-2].data["usage"])


def _of_blocks(blocks: list[dict[str, Any]], ends: dict[str, Any], usage: Any) -> Said:
    texts = ["".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return texts[0], texts[1], calls, (ends["stop_reason"], ends["stop_sequence"], usage)


def of_responses(events: list[StreamedEvent]) -> Said:
    items, text, num_done = list[dict[str, Any]](), "", 0
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    for name, data in events[2:-1]:
        assert name is not None
        if name == "response.output_item.added":
            assert num_done == len(items)
            items, text = [*items, data["item"]], ""
            assert data["item"].get("name", "a message") != ""
        elif name.endswith(".delta"):
            text += data["delta"]
        elif name == "response.output_item.done":
            num_done, item = num_done + 1, data["item"]
            assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            assert (item["id"], item["type"]) == (items[-1]["id"], items[-1]["type"])
            items[-1] = item
        assert data["output_index"] == len(items) - 1
    ended = events[-1].data["response"]
    assert (num_done, items) == (len(items), ended["output"])
    assert events[-1].name == f"response.{ended['status']}"
    return of_response(ended)


def of_response(response: Any) -> Said:
    texts = ["".join(item["content"][0]["text"] for item in response["output"] if item["type"] == kind)
             for kind in ("reasoning", "message")]  # fmt: skip
    calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
    return texts[0], texts[1], calls, (response["status"], response["usage"])


def of_ollama(lines: list[Any]) -> Said:
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    texts = ["".join(line["message"].get(kind, "") for line in lines) for kind in ("thinking", "content")]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    told = [(call["name"], call["arguments"]) for call in calls]
    return texts[0], texts[1], told, tuple(lines[-1][key] for key in ("done_reason", "eval_count", "prompt_eval_count"))


def of_whole_chat(answer: Any) -> Said:
    message = answer["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    end = answer["choices"][0]["finish_reason"], answer["usage"]
    return message.get("reasoning_content", ""), message["content"] or "", calls, end


READ = {
    "/v1/chat/completions": (of_chat, of_whole_chat),
    "/v1/messages": (of_messages, lambda answer: _of_blocks(answer["content"], answer, answer["usage"])),
    "/v1/responses": (of_responses, of_response),
    "/api/chat": (of_ollama, lambda answer: of_ollama([answer])),
}


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("name", ["qwen3_coder", "kimi", "hermes"])
def test_a_stream_says_what_the_whole_answer_says(name: str, path: str) -> None:
    """Of the first two the models may leave their reasoning open."""
    read, read_whole = READ[path]
    for text, finish in answers(name).values():
        at_once = client(name, [text], finish).post(path, {"model": "m", "stream": False, **ASKED[path]})
        for size in (1, 7, len(text) // 3 + 1):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert read(streamed(client(name, pieces, finish), path)) == read_whole(at_once)
