"""`chat --url` against a scripted server: from a pipe, on a terminal that only prints, and with the line editor."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from forked import Terminal
from openai_server import OpenAIServer, Reply, Request
from test_cli_driver import Result, environment, nanovllm
from test_url import pieces, refusing
from tmux import Tmux


async def echo(reply: Reply, request: Request) -> None:
    """What was said last, in brackets, after a thought; or what the first word of it asks for."""
    messages = request.body["messages"]
    said = messages[-1]["content"]
    if said == "fail":
        await reply.whole("400 Bad Request", {"error": {"message": "too much", "code": "context_length_exceeded"}})
    elif said == "break":
        await reply.begin()
        await reply.piece("half")
        await reply.event({"error": {"message": "out of memory"}})
    else:
        await pieces(f"[{said}", "]", reasoning="hm", finish="length" if said == "long" else "stop")(reply, request)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(echo, ("one", "two")) as running:
        yield running


def chat(home: Path, server: OpenAIServer, *lines: str, args: tuple[str, ...] = ("-q", "one"), **more: Any) -> Result:
    return nanovllm(home, "chat", "--url", server.url, *args, stdin="".join(line + "\n" for line in lines), **more)


async def calling(reply: Reply, request: Request) -> None:
    """A call in pieces, as servers stream it, then what was said last."""
    if (said := request.body["messages"][-1])["role"] == "tool":
        await pieces(f"it said {said['content']}")(reply, request)
        return
    await reply.begin()
    parts: list[Any] = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": 1, '}},
        [
            {"index": 0, "function": {"arguments": '"b": 2}'}},
            {"index": 1, "function": {"name": "add", "arguments": {"a": 3, "b": 4}}},
        ],
        5, {"function": 5},
    ]  # fmt: skip
    for part in parts:
        calls = part if isinstance(part, list) else [part]
        await reply.event({"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}]})
    await reply.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    await reply.done()


def test_a_servers_model_calls_tools_that_run_here(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    server_file = str(Path(__file__).parent / "mcp_server.py")
    entry = {"command": sys.executable, "args": [server_file, "add"]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"sums": entry}}))
    with OpenAIServer(calling, ("one",)) as running:
        tools = "-q", "one", "--mcp", "mcp.json", "--allow", "add"
        done = chat(tmp_path, running, "go", args=tools)
        ran = nanovllm(tmp_path, "run", "--url", running.url, *tools, "go")
    assert (done.code, done.out) == (ran.code, ran.out) == (0, "it said 7\n"), done.err + ran.err
    first, second, *of_run = (reply.request.body for reply in running.replies)
    assert [each["tools"] for each in of_run] == [first["tools"]] * 2
    for at in (1, 2, 3):
        theirs, ours = (body["messages"][at] for body in (second, of_run[1]))
        assert (theirs.keys(), theirs["content"]) == (ours.keys(), ours["content"])
    _, called, *given = of_run[1]["messages"]
    assert [each["id"] for each in called["tool_calls"]] == [each["tool_call_id"] for each in given]
    assert [each["function"]["name"] for each in first["tools"]] == ["add"]
    _, answer, *results = second["messages"]
    ids = [each["id"] for each in answer["tool_calls"]]
    assert [each["function"]["arguments"] for each in answer["tool_calls"]] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
    assert ids[0] == "c1"
    expected = zip(("3", "7"), ids, strict=True)
    assert results == [{"role": "tool", "content": value, "tool_call_id": call, "name": "add"} for value, call in expected]


async def calling_badly(reply: Reply, request: Request) -> None:
    """Calls without a name, without an object, of one id; one that is cut off by the limit; or nothing at all."""
    said = request.body["messages"][-1]
    if said["role"] == "tool":
        await pieces(f"it said {said['content']}")(reply, request)
        return
    await reply.begin()
    calls = [
        {"index": 0, "id": "c1", "function": {"arguments": "{}"}},
        {"index": 1, "id": "c1", "function": {"name": "add", "arguments": '{"a": 1'}},
    ]  # fmt: skip
    if said["content"] == "cut":
        await reply.piece("I call")
        calls[0]["function"]["name"] = "add"
    if said["content"] != "nothing":
        await reply.event({"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}]})
    reason = "length" if said["content"] == "cut" else "stop"
    await reply.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    await reply.done()


def test_calls_that_are_none_are_told_and_harm_no_session(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    server_file = str(Path(__file__).parent / "mcp_server.py")
    entry = {"command": sys.executable, "args": [server_file, "show"]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"sums": entry}}))
    tools = "one", "--mcp", "mcp.json", "--allow", "*"
    with OpenAIServer(calling_badly, ("one",)) as running:
        done = chat(tmp_path, running, "go", "cut", "more", args=tools)
        assert (done.code, done.out.count("it said Error")) == (0, 3), done.err
        again = chat(tmp_path, running, "go", args=("one", "--continue"))
        assert again.code == 0, again.err
        bodies = [reply.request.body for reply in running.replies]
    _, answer, *results = bodies[1]["messages"]
    assert [each["function"] for each in answer["tool_calls"]] == [
        {"name": "nameless", "arguments": "{}"}, {"name": "add", "arguments": "{}"}
    ]  # fmt: skip
    assert len({each["id"] for each in answer["tool_calls"]}) == 2
    assert [each["tool_call_id"] for each in results] == [each["id"] for each in answer["tool_calls"]]
    assert results[0]["content"] == "Error: there is no tool nameless"
    assert "no JSON object" in results[1]["content"]
    cut = next(each for each in bodies[3]["messages"] if each.get("content") == "I call")
    assert [each["function"]["arguments"] for each in cut["tool_calls"]] == ["{}"]


def test_an_answer_that_does_not_come_runs_no_earlier_calls(tmp_path: Path) -> None:
    """Calls that wait behind an answer that was resumed are /continue's business."""
    pytest.importorskip("mcp")
    server_file = str(Path(__file__).parent / "mcp_server.py")
    entry = {"command": sys.executable, "args": [server_file, "add"]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"sums": entry}}))
    with OpenAIServer(calling_badly, ("one",)) as running:
        assert chat(tmp_path, running, "go").code == 0  # without tools: nothing is run
        done = chat(tmp_path, running, "nothing", args=("one", "--continue", "--mcp", "mcp.json"))
        assert "failed" not in done.err, done.err
        assert [len(reply.request.body["messages"]) for reply in running.replies] == [1, 5]


def said(reply: Reply) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in reply.request.body["messages"]]


def test_each_line_is_a_message_and_the_history_goes_with_it(tmp_path: Path, server: OpenAIServer) -> None:
    done = chat(tmp_path, server, "a", "b", args=("-q", "-sys", "brief", "--temp", "0.5", "two", "first"))
    assert (done.code, done.out, done.err) == (0, "[first]\n[a]\n[b]\n", "")
    history = [("user", "first"), ("assistant", "[first]"), ("user", "a"), ("assistant", "[a]"), ("user", "b")]
    assert said(server.replies[2]) == [("system", "brief"), *history]
    body = server.replies[2].request.body
    assert (body["model"], body["temperature"], body["stream"]) == ("two", 0.5, True)
    shown = chat(tmp_path, server, "a", args=("-q", "--reasoning", "show", "--no-save", "one"))
    assert (shown.out, shown.err) == ("[a]\n", "hm\n")


def test_commands_that_change_the_conversation(tmp_path: Path, server: OpenAIServer) -> None:
    done = chat(
        tmp_path, server, "long", "/continue", "/regen", "/edit b", "/undo", "c", "/think on", "/set temp 0.2", "/set top-k 3",
        "/set temp default", "d", "/model two", "e", "/model",
    )  # fmt: skip
    assert done.code == 0, done.err
    asked = [said(reply) for reply in server.replies]
    assert asked[0] == [("user", "long")]
    assert asked[1] == [("user", "long"), ("assistant", "[long]")]  # to be gone on with
    assert server.replies[1].request.body["continue_final_message"] is True
    assert asked[2] == [("user", "long")]
    assert asked[3] == [("user", "b")]
    assert asked[4] == [("user", "c")]
    body = server.replies[5].request.body
    assert (body["chat_template_kwargs"]["enable_thinking"], body["top_k"], "temperature" in body) == (True, 3, False)
    assert [reply.request.body["model"] for reply in server.replies[-2:]] == ["one", "two"]
    assert done.out.endswith("model: two\n[e]\nmodel: two\n")


def test_what_a_server_does_not_tell_is_not_made_up(tmp_path: Path, server: OpenAIServer) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = chat(tmp_path, server, "/ctx", "/set temp", "/file a.txt", "a", "/ctx", "/show model", "/stats")
    lines = done.out.splitlines()
    assert lines[:4] == ["0 tokens used", "temp = the server's own", "a.txt (4 characters) goes with the next message", "[a.txt:"]
    assert "9 tokens used" in lines  # 7 of the prompt and 2 of the answer, as usage says
    assert f"model: one: at {server.url}/v1" in lines
    assert any(line.startswith("prompt 7 tokens | answer 2 tokens") for line in lines)
    template = chat(tmp_path, server, "/show template", "/model three")
    assert (template.code, template.err.splitlines()) == (
        2,
        [
            "error: the chat template is the server's, and is not told",
            "error: the server has no model three",
            "hint: it has one, two",
        ],
    )


def test_a_message_that_fails_is_told_and_the_next_one_follows(tmp_path: Path, server: OpenAIServer) -> None:
    done = chat(tmp_path, server, "fail", "break", "a", "/history", args=("-q", "--session", "s", "one"))
    assert done.code == 5  # of the first failure
    assert done.err.splitlines()[0] == "error: too much"
    assert "the server failed: out of memory" in done.err
    assert done.out.startswith("\nhalf\n[a]\n")
    assert said(server.replies[2]) == [("user", "break"), ("assistant", "half"), ("user", "a")]  # the refused one was not sent
    events = [json.loads(line) for line in (tmp_path / ".local/state/nanovllm/sessions/s.jsonl").read_text().splitlines()]
    assert [event.get("cut") for event in events if event.get("role") == "assistant"] == ["error", None]


def test_a_session_goes_on_with_its_model(tmp_path: Path, server: OpenAIServer) -> None:
    chat(tmp_path, server, "a", args=("-q", "two"))
    assert chat(tmp_path, server, "/model", "b", args=("-q", "--continue")).out == "model: two\n[b]\n"
    assert said(server.replies[1]) == [("user", "a"), ("assistant", "[a]"), ("user", "b")]
    nowhere = chat(tmp_path, server, "b", args=("-q",))
    assert (nowhere.code, "several models: one, two" in nowhere.err) == (2, True)


@pytest.mark.parametrize("flags", [["--save-kv"], ["--context-overflow", "shift"], ["--ctx-size", "100"]])
def test_what_needs_the_model_here_is_refused_by_name(tmp_path: Path, server: OpenAIServer, flags: list[str]) -> None:
    refused = chat(tmp_path, server, args=("one", *flags))
    assert (refused.code, refused.err.startswith(f"error: {flags[0]} has no meaning with --url")) == (2, True)


def test_a_server_that_is_not_there_ends_it_and_one_that_goes_does_not(tmp_path: Path) -> None:
    with OpenAIServer(refusing("503 Service Unavailable", "busy", "x-should-retry: false"), socket=tmp_path / "s") as server:
        busy = chat(tmp_path, server, "a", "b", args=("-q", "--no-save"))
    assert (busy.code, busy.out, busy.err.count("HTTP 503: busy")) == (1, "\n\n", 2)
    gone = chat(tmp_path, server, "a")
    assert (gone.code, "cannot reach" in gone.err) == (1, True)


# ---- on a terminal ----


class Endless:
    """Answers `slowly` without an end; tells whether the client has left it."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    async def __call__(self, reply: Reply, request: Request) -> None:
        if request.body["messages"][-1]["content"] != "slowly":
            await echo(reply, request)
            return
        await reply.begin()
        await reply.piece("slow but ")
        await reply.gone()
        self.gone.set()


@pytest.mark.parametrize("phase", ["in the answer", "before it"])
def test_ctrl_c_stops_an_answer_and_the_server(tmp_path: Path, phase: str) -> None:
    came, gone = threading.Event(), threading.Event()

    async def slow(reply: Reply, request: Request) -> None:
        if request.index:
            await echo(reply, request)
            return
        if phase == "in the answer":
            await reply.begin()
            await reply.piece("slow but ")
        came.set()
        await reply.gone()
        gone.set()

    with OpenAIServer(slow) as server:
        child = Terminal(
            sys.executable, ["-m", "nanovllm_cli", "chat", "--url", server.url], light=True, cwd=str(tmp_path),
            env=environment(tmp_path, TERM="dumb"), timeout=30, encoding="utf-8", dimensions=(24, 80),
        )  # fmt: skip
        child.expect(">>> ")
        child.sendline("slowly")
        assert came.wait(20)
        if phase == "in the answer":
            child.expect("slow but ")
        began = time.monotonic()
        child.sendintr()
        child.expect(r"\(stopped; /continue goes on\)" if phase == "in the answer" else r"\(stopped: the message was not sent\)")
        assert gone.wait(8)
        assert time.monotonic() - began < 8
        child.expect(">>> ")
        child.sendline("again")
        child.expect(r"\[again\]")
        child.expect(">>> ")
        child.sendeof()
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0
    last = [("user", "slowly"), ("assistant", "slow but "), ("user", "again")]
    assert said(server.replies[1]) == (last if phase == "in the answer" else last[2:])


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Tmux]]:
    begun: list[Tmux] = []

    def begin() -> Tmux:
        begun.append(Tmux(tmp_path, environment(tmp_path, PATH="/usr/bin:/bin", LANG="C.UTF-8")))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def test_the_line_editor_and_rendered_answers(terminal: Callable[..., Tmux]) -> None:
    endless = Endless()
    with OpenAIServer(endless, ("a-model",)) as server:
        tmux = terminal()
        tmux.type(f"{sys.executable} -m nanovllm_cli chat --url {server.url} --no-save; echo code=$?\n")
        tmux.expect(lambda screen: "a-model" in screen and "context 0" in screen)  # the toolbar
        tmux.type("**bold**\n")
        tmux.expect(lambda screen: "[bold]" in screen and "context 9 tokens" in screen)
        tmux.type("slowly\n")
        tmux.expect(lambda screen: "slow but" in screen)
        tmux.press("C-c")
        tmux.expect(lambda screen: "stopped; /continue goes on" in screen)
        assert endless.gone.wait(5)
        tmux.type("/mod")
        tmux.press("Tab")
        tmux.expect(lambda screen: "/model" in screen)
        tmux.press("C-u")
        tmux.press("C-d")
        tmux.expect(lambda screen: "code=0" in screen)
