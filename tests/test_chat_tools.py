"""Tools in a conversation: files that name servers, who may be called, what a session keeps, and real servers in a pipe and on a
terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from forked import Terminal
from nanovllm_cli.chat.conversation import Call, Conversation
from nanovllm_cli.chat.export import as_json, as_markdown
from nanovllm_cli.chat.local_model import LocalModel
from nanovllm_cli.chat.mcp_servers import McpServer, read_servers
from nanovllm_cli.chat.model import Settings
from nanovllm_cli.chat.prompt import NOT_RUN, for_template
from nanovllm_cli.chat.toolbox import MAX_IMAGES, MAX_RESULT_CHARS, MAX_ROUNDS, REFUSED, Outcome, Tool, Toolbox
from nanovllm_cli.cli import local
from nanovllm_cli.cli.answer import JsonPrinter, TextPrinter
from nanovllm_cli.cli.answering import Answer, Piece, Result, Usage
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.records import Statistics
from nanovllm_cli.cli.tool_options import ToolOptions
from nanovllm_cli.errors import DoesNotFitError, RequestError, SessionError, UnsupportedError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.builtin_templates import builtin_template
from test_chat_loop import DRIVER, finish, said, say, spawn  # noqa: F401
from test_cli_driver import environment, nanovllm

CHATML = builtin_template("chatml")
PNG = "data:image/png;base64,AAAA"
SERVER = str(Path(__file__).parent / "mcp_server.py")


def written(path: Path, servers: Any) -> str:
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


def ours(*tools: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": [SERVER, *tools]}


# ---- files ----


def test_servers_are_read_as_other_clients_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.delenv("PORT", raising=False)
    monkeypatch.delenv("NOBODY", raising=False)
    entries = {
        "files": {
            "command": "npx", "args": ["-y", "${TOKEN}"], "env": {"KEY": "a${TOKEN}b"}, "cwd": "/tmp", "type": "stdio",
        },
        "search": {"url": "http://localhost:${PORT:-8000}/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}, "timeout": 5},
        "old": {"command": "x", "disabled": True, "env": {"A": "${NOBODY}"}},
    }
    files, search = read_servers(written(tmp_path / "a.json", entries))
    assert files == McpServer("files", "npx", ("-y", "secret"), {"KEY": "asecretb"}, "/tmp")
    assert search == McpServer(
        "search", url="http://localhost:8000/mcp", headers={"Authorization": "Bearer secret"}, timeout=5.0
    )
    (tmp_path / "vscode.json").write_text('{"servers": {"a": {"type": "http", "url": "https://x/mcp"}}}')
    assert read_servers(str(tmp_path / "vscode.json")) == [McpServer("a", url="https://x/mcp")]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "is no object"), ({}, "either a command or a url"), ({"command": "a", "url": "http://b"}, "either a command"),
        ({"command": 5}, "'command' of the server 's'"), ({"command": "a\0b"}, "is no text"),
        ({"command": "a", "args": "b"}, "no list of texts"), ({"command": "a", "args": [1]}, "no list of texts"),
        ({"command": "a", "env": {"B": 1}}, "no object of texts"), ({"command": "a", "env": []}, "no object of texts"),
        ({"command": "a", "headers": {}}, "has 'headers', which a command has not"),
        ({"url": "http://a", "args": []}, "has 'args', which a url has not"), ({"url": "file:///etc"}, "no address"),
        ({"url": "http://a", "type": "sse"}, "of the type 'sse'"), ({"url": "http://a", "type": "stdio"}, "either a command"),
        ({"url": "http://a", "type": []}, "of the type"), ({"command": "a", "timeout": 0}, "no number of seconds"),
        ({"command": "a", "timeout": True}, "no number of seconds"), ({"command": "a", "timeout": "5"}, "no number of seconds"),
        ({"command": "a", "autoApprove": ["b"]}, "'autoApprove', which means nothing here"),
        ({"command": "a", "env": {"B": "${NOBODY_SETS_THIS}"}}, "needs NOBODY_SETS_THIS, which is not set"),
    ],
)  # fmt: skip
def test_what_can_be_no_server_is_refused(entry: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_servers(written(tmp_path / "a.json", {"s": entry}))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is no JSON"), ("[]", "names no servers"), ('{"mcpServers": []}', "names no servers"),
        ("[" * 10**5, "is no JSON"),
    ],
)  # fmt: skip
def test_what_can_be_no_file_of_servers_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_servers(str(tmp_path / "a.json"))
    assert message in caught.value.message


# ---- who may be called ----


class Echo:
    tools: Sequence[Tool] = [Tool(name, "echo", "", {}) for name in ("read_file", "read_all", "write")]

    def __init__(self) -> None:
        self.called: list[tuple[str, dict[str, Any]]] = []

    def check(self) -> None:
        pass

    def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        self.called.append((name, arguments))
        if arguments.get("fail"):
            raise RequestError("no luck")
        return Outcome("x" * arguments.get("size", 2), tuple(arguments.get("images", ())))


def box(answers: Sequence[str | type[BaseException] | None], *allowed: str) -> tuple[Toolbox, Echo, list[str]]:
    source, told, left = Echo(), list[str](), iter(answers)

    def ask() -> str | None:
        said = next(left)
        if isinstance(said, type):
            raise said
        return said

    return Toolbox(source, allowed, ask, told.append, told.append), source, told


def test_a_person_is_asked_before_each_call() -> None:
    tools, source, told = box(["yes", "", "what?", "N", "y"])
    assert [tools.run(Call("1", "write", f'{{"n": {n}}}')).text for n in range(4)] == ["xx", REFUSED, REFUSED, "xx"]
    assert source.called == [("write", {"n": 0}), ("write", {"n": 3})]
    assert told[:3] == ["write, of echo: {", '  "n": 0', "}"]
    assert told.count("write was not run") == 2


def test_always_is_for_one_tool_and_this_conversation() -> None:
    tools, _, _ = box(["Always", "no"])
    found = [tools.run(Call("1", name, "{}")).text for name in ("write", "write", "read_all", "write")]
    assert found == ["xx", "xx", REFUSED, "xx"]
    assert box([None])[0].run(Call("1", "write", "{}")).text == REFUSED


def test_what_is_allowed_is_not_asked_for() -> None:
    tools, _, told = box([], "read_*")
    assert tools.run(Call("1", "read_file", '{"a": "ä"}')).text == "xx"
    assert told == ['calling read_file {"a": "ä"}']
    tools, source, told = box([None], "read", "write_*", "WRITE")
    assert tools.run(Call("1", "write", "{}")).text == REFUSED
    assert "--allow write lets it run" in told[-1]
    assert source.called == []


def test_nothing_of_a_call_is_hidden_from_who_decides() -> None:
    tools, _, told = box(["no"])
    tools.run(Call("1", "write", json.dumps({"a": "rm\u202e \u200b\n\x1b[2Kls\u2028x", "z": "ä日"})))
    assert told[:-1] == ["write, of echo: {", '  "a": "rm\\u202e \\u200b\\n\\u001b[2Kls\\u2028x",', '  "z": "ä日"', "}"]


def test_a_projects_file_starts_no_server_and_allows_nothing(tmp_path: Path) -> None:
    for key, value in (("allow", '"*"'), ("mcp", '"a.json"')):
        (tmp_path / "nanovllm.toml").write_text(f"[chat]\n{key} = {value}\n")
        result = nanovllm(tmp_path, "chat", "caller", stdin="say hi\n")
        assert (result.code, result.out) == (2, "")
        assert key in result.err


def test_the_end_of_input_is_a_no_and_ctrl_c_is_none() -> None:
    tools, source, _ = box([EOFError])
    assert tools.run(Call("1", "write", "{}")).text == REFUSED
    tools, source, _ = box([KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        tools.run(Call("1", "write", "{}"))
    assert source.called == []


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (Call("1", "unknown", "{}"), "Error: there is no tool unknown"), (Call("1", "write", "[]"), "Error: the arguments"),
        (Call("1", "write", '{"a": '), "Error: the arguments are no"), (Call("1", "write", "[" * 10**5), "Error: the arguments"),
        (Call("1", "write", '{"fail": 1}'), "Error: no luck"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_to_the_model(call: Call, result: str) -> None:
    assert box([], "*")[0].run(call).text.startswith(result)


def test_a_failure_has_a_bound_and_is_one_line_to_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, source, told = box([], "*")

    def fail(name: str, arguments: dict[str, Any]) -> str:
        raise RequestError("no\nluck" * MAX_RESULT_CHARS)

    monkeypatch.setattr(source, "call", fail)
    assert len(tools.run(Call("1", "write", "{}")).text) < MAX_RESULT_CHARS + 100
    assert told[-1].startswith("write failed: no luckno luck")
    assert len(told[-1]) < 400
    assert "\n" not in told[-1]


def test_a_result_has_a_bound() -> None:
    result = box([], "*")[0].run(Call("1", "write", f'{{"size": {MAX_RESULT_CHARS + 1}}}')).text
    assert len(result) < MAX_RESULT_CHARS + 100
    assert "cut: the result has 200,001 characters" in result
    assert box([], "*")[0].run(Call("1", "write", f'{{"size": {MAX_RESULT_CHARS}}}')).text == "x" * MAX_RESULT_CHARS


# ---- what is kept ----

CALLS = (Call("c1", "add", '{"a": 1}'), Call("c2", "show", "{}"))


def talked() -> tuple[Conversation, list[Any]]:
    events: list[Any] = []
    conversation = Conversation(events.append)
    conversation.ask("how much?")
    conversation.answer("let me see", reasoning="hm", calls=CALLS)
    return conversation, events


def test_calls_and_results_are_kept_and_told_as_openai_has_them() -> None:
    conversation, events = talked()
    assert conversation.open_calls == list(CALLS)
    conversation.take_result(CALLS[0], "3")
    assert conversation.open_calls == [CALLS[1]]
    again = Conversation.replay(json.loads(json.dumps(events)))
    assert again.messages == conversation.messages
    told = [
        {"role": "user", "content": "how much?"},
        {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "show", "arguments": "{}"}},
        ]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ]  # fmt: skip
    missing = {"role": "tool", "content": NOT_RUN, "tool_call_id": "c2", "name": "show"}
    assert for_template(None, again.messages) == [*told, missing]
    again.ask("never mind")
    assert for_template(None, again.messages) == [*told, missing, {"role": "user", "content": "never mind"}]
    assert again.open_calls == []
    assert again.undo().content == "never mind"
    assert again.back_to_question().content == "how much?"
    assert [each.role for each in again.messages] == ["user"]


def test_calls_and_results_are_exported() -> None:
    conversation, _ = talked()
    conversation.take_result(CALLS[0], "```\n3")
    markdown = as_markdown(conversation, "tiny")
    assert '*(calls add)*\n\n```\n{"a": 1}\n```' in markdown
    assert "## Tool: add\n\n````\n```\n3\n````" in markdown
    messages = json.loads(as_json(conversation, "tiny"))["messages"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "add"
    assert messages[2] == {"role": "tool", "content": "```\n3", "tool_call_id": "c1", "name": "add"}


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "calls": [{"id": "1", "name": "a", "arguments": "{}"}]}, {"role": "assistant", "calls": ["a"]},
        {"role": "assistant", "calls": [{"id": "1", "name": "a"}]}, {"role": "assistant", "calls": "abc"},
        {"role": "assistant", "calls": [{"id": 1, "name": "a", "arguments": "{}"}]}, {"role": "assistant", "call_id": "1"},
        {"role": "assistant", "calls": [{"id": "", "name": "a", "arguments": "{}"}]},
        {"role": "assistant", "calls": [{"id": "1", "name": "a", "arguments": "{}", "more": "b"}]},
        {"role": "tool"}, {"role": "tool", "call_id": "1"}, {"role": "tool", "name": "a"}, {"role": "user", "name": "a"},
        {"role": "tool", "call_id": 1, "name": "a"},
    ],
)  # fmt: skip
def test_a_damaged_session_is_told(fields: dict[str, Any]) -> None:
    with pytest.raises(SessionError):
        Conversation.replay([{"event": "message", "id": 1, "content": "a", **fields}])


# ---- servers ----


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two servers, one of which has a tool's name that the other has as well."""
    pytest.importorskip("mcp")
    from nanovllm_cli.chat.mcp_client import McpTools

    servers = [
        McpServer("one", sys.executable, (SERVER, "add", "fail", "show", "sleep", "die"), timeout=2.0),
        McpServer("two", sys.executable, (SERVER, "add", "od.d name", "long")),
    ]
    with contextlib.closing(McpTools(servers)) as tools:
        yield tools


def test_tools_of_servers_are_called(running: Any) -> None:
    names = ["one_add", "fail", "show", "sleep", "die", "two_add", "od_d_name", "long"]
    assert [each.name for each in running.tools] == names
    assert running.tools[0].for_template() == {
        "type": "function", "function": {"name": "one_add", "description": "Does add.", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}},
    }  # fmt: skip
    assert running.call("one_add", {"a": 3, "b": 4}).text == "7"
    assert running.call("od_d_name", {"x": ["ä"]}).text == '{"x": ["\\u00e4"]}'
    text = "see\n[resource_link, which is not shown here]\ninside\n[resource, which is not shown here]"
    assert running.call("show", {}) == (text, (PNG, "data:audio/wav;base64,AAAA", PNG.replace("AAAA", "BBBB")))
    assert len(running.call("long", {}).text) == 300_000


def test_what_fails_in_a_server_is_told(running: Any) -> None:
    with pytest.raises(RequestError, match=r"out of\nluck"):
        running.call("fail", {})
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"(?i)tim"):
        running.call("sleep", {})
    assert time.monotonic() - began < 15
    with pytest.raises(RequestError) as caught:
        running.call("die", {})
    assert "die" not in caught.value.message, "who tells a failure names the tool"
    with pytest.raises(RequestError):
        running.call("one_add", {"a": 3, "b": 4})
    assert running.call("two_add", {"a": 3, "b": 4}).text == "7"


def test_ctrl_c_stops_a_call_and_not_its_server() -> None:
    pytest.importorskip("mcp")
    from nanovllm_cli.chat.mcp_client import McpTools

    with contextlib.closing(McpTools([McpServer("one", sys.executable, (SERVER, "sleep"))])) as tools:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            tools.call("sleep", {})
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("server", "message", "hint"),
    [
        (McpServer("bad", "/no/such/command"), "bad did not start: [Errno 2]", None),
        (McpServer("bad", sys.executable, ("-c", "import sys; sys.exit('sad story')")), "bad did not start", "sad story"),
        (McpServer("bad", url="http://127.0.0.1:9/mcp"), "bad did not start", None),
        (McpServer("bad", sys.executable, (SERVER, "same.name", "same_name")), "two tools are called same_name", "other names"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_come_is_told(server: McpServer, message: str, hint: str | None) -> None:
    pytest.importorskip("mcp")
    from nanovllm_cli.chat.mcp_client import McpTools

    with pytest.raises(UsageError) as caught:
        McpTools([server]).wait()
    assert message in caught.value.message
    assert (hint or "") in (caught.value.hint or "")
    assert not [each for each in threading.enumerate() if each.name == "mcp"]


# ---- a real model ----


def test_a_model_in_this_process_is_told_the_tools_and_its_calls_are_read() -> None:
    """The bundled one, held to a call, as it would hardly make one."""
    from nanovllm_cli.cli.local import LocalAnswering
    from nanovllm_cli.cli.model import Prompting
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.text.tool_calls import tools_of

    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    tools = [Tool("add", "sums", "Adds it.", schema).for_template()]
    with LLM("tiny", chat_template=CHATML, shows_calls=True, max_model_len=512) as llm:
        prompting = Prompting(llm, tools=tools)
        ids = prompting.encode([{"role": "user", "content": "hi"}])
        assert "Adds it." in llm.tokenizer.decode(ids)
        assert llm.answer_format is not None
        held = llm.answer_format.constraint(tools_of(tools), "required", parallel=False)
        params = SamplingParams(temperature=0.0, max_tokens=200, constraint=held)
        answering = LocalAnswering(llm, ids, params, prompting.parser_for(ids))
        for _ in answering:
            pass
        (call,) = answering.answers.first.calls
    assert (call.name, json.loads(call.arguments), answering.answers.first.content) == ("add", {"a": 7}, "")


def test_an_answer_of_a_form_may_still_be_a_call() -> None:
    from nanovllm_cli.cli.model import Prompting
    from nanovllm_cli.constraint import Constraint
    from nanovllm_cli.llm import LLM
    from test_constrain import accepts, guide

    form = Constraint("json_schema", '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}')
    tools = [Tool("add", "sums", "Adds it.", {"type": "object"}).for_template()]
    texts = '{"x": 1}', '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>', "hello", '{"y": 1}'
    with LLM("tiny", chat_template=CHATML, tool_format="hermes", shows_calls=True, max_model_len=512) as llm:
        for told, expected in ((tools, [True, True, False, False]), ([], [True, False, False, False])):
            prompting = Prompting(llm, tools=told)
            held = prompting.params_for(prompting.encode([{"role": "user", "content": "hi"}]), {"constraint": form}).constraint
            assert held is not None
            assert [accepts(guide(held.kind, held.text), text) for text in texts] == expected


# ---- in a pipe and on a terminal ----


@pytest.fixture
def tools_file(tmp_path: Path) -> str:
    pytest.importorskip("mcp")
    return written(tmp_path / "mcp.json", {"sums": ours("add", "fail", "sleep")})


def test_a_model_calls_what_is_allowed_from_a_pipe(tools_file: str, tmp_path: Path) -> None:
    args = "--mcp", tools_file, "--allow", "add"
    result = nanovllm(tmp_path, "chat", "caller", *args, stdin='call add {"a": 1, "b": 2}\nsay bye\n')
    assert (result.code, result.out) == (0, "let me see\nit said 3\nbye\n")
    assert 'calling add {"a": 1, "b": 2}' in result.err
    assert "3 tools: add, fail, sleep" in result.err
    assert [each.role for each in said(tmp_path)] == ["user", "assistant", "tool", "assistant", "user", "assistant"]


def test_from_a_pipe_nobody_can_be_asked(tools_file: str, tmp_path: Path) -> None:
    told = 'call add {"a": 1, "b": 2}; fail {}; nothing {}\nyes\n'
    result = nanovllm(tmp_path, "chat", "caller", "--mcp", tools_file, "--allow", "f*", stdin=told)
    assert result.code == 0
    assert "add was not run: nobody can be asked here; --allow add lets it run" in result.err
    assert "it said Error: there is no tool nothing\n" in result.out
    results = [each.content for each in said(tmp_path) if each.role == "tool"]
    assert results == [REFUSED, "Error: out of\nluck \x1b[31m", "Error: there is no tool nothing"]


def test_without_tools_a_call_is_text(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "chat", "tiny", stdin='call add {"a": 1}\n')
    assert result.out == 'let me see<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_a_person_at_a_terminal_decides(term: str, tools_file: str, tmp_path: Path, spawn: Any) -> None:  # noqa: F811
    child = spawn("caller", "--mcp", "mcp.json", "--no-save", TERM=term)
    prompt = ">>> " if term == "dumb" else "› "
    for reply, result in (("n", "did not allow"), ("y", "it said 3"), ("a", "it said 3"), (None, "it said 3")):
        child.expect(prompt)
        child.send('call add {"a": 1, "b": 2}' + ("\n" if term == "dumb" else "\r"))
        if reply is not None:
            child.expect('"b": 2')
            child.expect("run it\\? yes, no or always: ")
            child.send(reply + ("\n" if term == "dumb" else "\r"))
        child.expect(result)
    child.expect(prompt)
    child.send("/clear" + ("\n" if term == "dumb" else "\r"))
    child.expect("a new conversation")
    child.expect(prompt)
    child.send('call add {"a": 1, "b": 2}' + ("\n" if term == "dumb" else "\r"))
    child.expect("run it\\? yes, no or always: ")
    child.send("a" + ("\n" if term == "dumb" else "\r"))
    child.expect("it said 3")
    child.expect(prompt)
    child.send("/tools" + ("\n" if term == "dumb" else "\r"))
    child.expect("add +sums +unasked +Does add.")
    child.expect("fail +sums +if allowed")
    child.expect(prompt)
    child.sendeof()
    assert finish(child)[0] == 0


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_what_was_typed_before_the_question_is_no_answer_to_it(
    term: str, tools_file: str, tmp_path: Path, spawn: Any  # noqa: F811
) -> None:
    child = spawn("caller", "--mcp", "mcp.json", "--no-save", TERM=term)
    child.expect(">>> " if term == "dumb" else "› ")
    enter = "\n" if term == "dumb" else "\r"
    child.send(f'call add {{"a": 1, "b": 2}}{enter}y{enter}')
    child.expect("run it\\? yes, no or always: ")
    time.sleep(0.5)
    child.send(f"no{enter}")
    child.expect("it said The user did not allow")
    child.sendeof()
    finish(child)


def test_who_wants_quiet_is_shown_what_to_decide_on(tools_file: str, spawn: Any) -> None:  # noqa: F811
    child = spawn("caller", "-q", "--mcp", "mcp.json", "--no-save")
    say(child, 'call add {"a": 1, "b": 2}; add {}')
    child.expect('"b": 2')
    child.expect("run it")
    child.sendline("y")
    child.expect("run it")
    child.sendintr()
    child.expect(">>> ")
    child.sendline("/history")
    child.expect("3 tool +3")
    child.sendeof()
    finish(child)


def test_ctrl_c_stops_a_tool_and_continue_goes_on(tools_file: str, tmp_path: Path, spawn: Any) -> None:  # noqa: F811
    child = spawn("caller", "--mcp", "mcp.json", "--allow", "*")
    say(child, 'call add {"a": 1, "b": 2}; sleep {}')
    child.expect("calling sleep")
    time.sleep(0.3)
    child.sendintr()
    child.expect("sleep was stopped; /continue goes on with it")
    say(child, "/history")
    child.expect("3 tool +3")
    say(child, "say on")
    child.expect("\non\r\n")
    say(child, "/exit")
    assert finish(child)[0] == 0
    messages = said(tmp_path)
    assert [each.role for each in messages] == ["user", "assistant", "tool", "user", "assistant"]
    child = spawn("caller", "--continue", "--mcp", "mcp.json", "--allow", "*")
    say(child, "/undo")
    say(child, "/continue")
    child.expect("calling sleep")
    child.sendintr()
    child.expect("was stopped")
    say(child, "/exit")
    assert finish(child)[0] == 0
    result = nanovllm(tmp_path, "chat", "caller", "--continue", stdin="/continue\n")
    assert result.out == "it said This was not run.\n"
    assert "has called tools, and waits: /continue goes on" in result.err


def test_two_signals_while_a_tool_runs_leave_no_server(tmp_path: Path, spawn: Any) -> None:  # noqa: F811
    pytest.importorskip("mcp")
    tag = f"tag{os.getpid()}"
    written(tmp_path / "mcp.json", {"one": ours("sleep", tag)})

    def is_there() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if tag in path.read_text().split("\0"):
                    return True
        return False

    child = spawn("caller", "--mcp", "mcp.json", "--allow", "*")
    say(child, "call sleep {}")
    child.expect("calling sleep")
    assert is_there()
    child.kill(signal.SIGHUP)
    time.sleep(0.3)
    child.kill(signal.SIGINT)
    end = time.monotonic() + 10
    while is_there() and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_there()
    assert finish(child)[0] == 128 + signal.SIGHUP
    assert [each.role for each in said(tmp_path)] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--allow", "add"), 2, "--allow has no meaning: there are no tools"), (("--mcp", "nothing.json"), 2, "nothing.json"),
        (("--mcp", "bad.json"), 2, "the MCP server bad did not start"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_told_first(args: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    written(tmp_path / "bad.json", {"bad": {"command": "/no/such/command"}})
    result = nanovllm(tmp_path, "chat", "caller", *args, stdin="say hi\n")
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "loading" not in result.err


# ---- run ----

TWO = 'call add {"a": 1, "b": 2}; fail {}'


def test_run_calls_what_is_allowed_and_writes_the_last_answer_alone(tools_file: str, tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "caller", "--mcp", tools_file, "--allow", "a*", TWO)
    assert (result.code, result.out) == (0, f"it said {REFUSED}\n")
    lines = result.err.splitlines()
    assert lines[2:5] == [
        "let me see",
        'calling add {"a": 1, "b": 2}',
        "fail was not run: nobody can be asked here; --allow fail lets it run",
    ]
    last = json.loads((tmp_path / ".local/state/nanovllm/last-run.json").read_text())["messages"]
    assert [each["role"] for each in last] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [each["function"]["name"] for each in last[1]["tool_calls"]] == ["add", "fail"]
    assert [each["content"] for each in last[2:]] == ["3", REFUSED, f"it said {REFUSED}"]
    assert [each["tool_call_id"] for each in last[2:4]] == [each["id"] for each in last[1]["tool_calls"]]
    again = nanovllm(tmp_path, "run", "caller", "-q", "--continue", "-p", "say bye")
    assert (again.code, again.out) == (0, "bye\n")


def test_records_of_a_run_have_its_calls(tools_file: str, tmp_path: Path) -> None:
    calls = [
        {"name": "add", "arguments": '{"a": 1, "b": 2}', "result": "3"},
        {"name": "fail", "arguments": "{}", "result": "Error: out of\nluck \x1b[31m"},
    ]
    result = nanovllm(tmp_path, "run", "caller", "-q", "--mcp", tools_file, "--allow", "*", "--jsonl", TWO)
    assert (result.code, result.err) == (0, "")
    events = [json.loads(line) for line in result.out.splitlines()]
    at = [number for number, each in enumerate(events) if each["event"] == "call"]
    assert [events[number] for number in at] == [{"event": "call", "index": 0, **each} for each in calls]
    texts = ["".join(each["text"] for each in part if each["event"] == "token") for part in (events[: at[0]], events[at[1] :])]
    assert texts == ["let me see", "it said Error: out of\nluck \x1b[31m"]
    out = list[str]()
    printer = JsonPrinter(out.append, "m", reasoning="auto")
    printer.goes_on("let me see")
    for each in calls:
        printer.called(each)
    printer.finish(Result([Answer(0, "bye")], Usage(1, 0, 1), False), Statistics(*[None] * 7))
    (answer,) = json.loads("".join(out))["answers"]
    assert (answer["text"], answer["calls"]) == ("bye", [calls[0] | {"said": "let me see"}, calls[1]])


def test_a_run_on_a_terminal_shows_each_answer_as_it_comes(tools_file: str, tmp_path: Path) -> None:
    args = "run", "caller", "--mcp", "mcp.json", "--allow", "*", 'call add {"a": 1, "b": 2}; sleep {}'
    child = Terminal(
        DRIVER[0], [*DRIVER[1:], *args], light=True, cwd=str(tmp_path), env=environment(tmp_path, TERM="xterm"), timeout=30,
        encoding="utf-8", dimensions=(24, 80),
    )  # fmt: skip
    child.expect("let me see\r\n")
    assert not str(child.before).endswith("\x1b[2m"), "dimmed as what goes to stderr"
    child.expect('calling add {"a": 1, "b": 2}.*calling sleep')
    time.sleep(0.3)
    child.sendintr()
    child.expect("sleep was stopped\x1b")
    assert finish(child)[0] == 130
    last = json.loads((tmp_path / ".local/state/nanovllm/last-run.json").read_text())["messages"]
    assert [each["content"] for each in last[1:]] == ["let me see", "3", NOT_RUN]


@pytest.mark.parametrize("quiet", [False, True])
def test_what_is_held_is_written_once(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    console, out, aside = Console(), list[str](), list[str]()
    console.quiet = quiet
    monkeypatch.setattr(console, "aside", aside.append)

    def printer(*, extract: bool = False) -> TextPrinter:
        made = TextPrinter(console, out.append, reasoning="hide", extract=extract, holds=True)
        for text in ("```\na\n```", ""):
            made.step([Piece(Answer(0), "", text, None, None)])
            made.goes_on(text)
        made.step([Piece(Answer(0), "", "by", None, None)])
        return made

    begun = printer()
    assert out == []
    begun.cut("e")
    assert "".join(out) == "bye\n"
    out.clear()
    result = Result([Answer(0, "```\nb\n```")], Usage(1, 0, 1), False)
    printer(extract=True).finish(result, Statistics(*[None] * 7))
    assert "".join(out) == "b\n"
    assert aside == ([] if quiet else ["```\na\n```\n"] * 2)


def test_a_model_is_shown_what_it_can_be_shown() -> None:
    seen, bad, sound = list[str](), "data:image/png;base64,BAD", "data:audio/wav;base64,AAAA"

    def look(url: str) -> None:
        seen.append(url)
        if url != PNG:
            raise UnsupportedError("it is damaged")

    tools, _, told = box([], "*")
    call = Call("1", "write", json.dumps({"images": [PNG, bad, PNG, sound]}))
    assert tools.run(call) == ("xx\n" + "[image: not shown here]\n" * 3 + "[sound: not shown here]", ())
    tools.look = look
    assert tools.run(call) == ("xx\n[image: it is damaged]\n[sound: it is damaged]", (PNG, PNG))
    assert seen == [PNG, bad, PNG, sound]
    assert [each for each in told if "showed" in each] == ["write showed 2 images"]
    many = tools.run(Call("1", "write", json.dumps({"size": 0, "images": [PNG] * (MAX_IMAGES + 1)})))
    assert many == (f"[image: of one result {MAX_IMAGES} are shown]", (PNG,) * MAX_IMAGES)
    assert len(seen) == 4 + MAX_IMAGES


def test_images_of_results_are_kept_with_them() -> None:
    conversation = Conversation()
    conversation.ask("look")
    call = Call("c", "look", "{}")
    conversation.answer("", calls=[call])
    conversation.take_result(call, "a cat", (PNG,))
    again = Conversation.replay(json.loads(json.dumps(conversation.events())))
    shown = {"type": "image_url", "image_url": {"url": PNG}}
    told = {"role": "tool", "content": [shown, {"type": "text", "text": "a cat"}], "tool_call_id": "c", "name": "look"}
    assert for_template(None, again.messages)[-1] == told
    assert json.loads(as_json(again, "m"))["messages"][-1] == told
    assert "*(image)*" in as_markdown(again, "m")
    wrong = [{**each, "images": [PNG]} if each.get("role") == "assistant" else each for each in conversation.events()]
    with pytest.raises(SessionError, match="another role's"):
        Conversation.replay(wrong)


def test_a_model_that_calls_for_ever_is_stopped() -> None:
    tools, source, _ = box([], "*")
    call, taken = Call("1", "write", "{}"), list[str]()
    with pytest.raises(RequestError) as caught:
        tools.follow([call], lambda call, result: taken.append(result.text), lambda: [call, call], "enough")
    assert (caught.value.message, caught.value.hint) == (f"the model has called tools {MAX_ROUNDS} times", "enough")
    assert len(taken) == len(source.called) == 2 * MAX_ROUNDS - 1
    rest = iter([[call]] * (MAX_ROUNDS - 1) + [[]])
    tools.follow([call], lambda call, result: None, lambda: next(rest), "enough")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--allow", "add"), "--allow has no meaning: there are no tools"), (("--mcp", "a", "--raw"), "--mcp and --raw cannot"),
        (("--mcp", "a", "--batch", "b"), "--mcp and --batch cannot"), (("--mcp", "a", "-N", "2"), "--mcp and -N cannot"),
        (("--mcp", "a", "--beams", "2"), "--mcp and --beams cannot"), (("--mcp", "a", "--language", "de"), "and --language"),
        (("--mcp", "a", "--translate"), "--mcp and --translate cannot"), (("--mcp", "nothing.json"), "nothing.json"),
    ],
)  # fmt: skip
def test_what_goes_with_no_tools_is_told_first(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "caller", *args, "say hi")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "loading" not in result.err


def test_a_model_without_a_template_calls_nothing(tools_file: str, tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "base", "--mcp", tools_file, "say hi")
    assert (result.code, result.out) == (2, "")
    assert "base calls no tools: it has no chat template" in result.err


def test_the_environment_gives_tools_where_they_have_a_meaning(tmp_path: Path) -> None:
    result = nanovllm(tmp_path, "run", "caller", "--raw", "say hi", NANOVLLM_MCP="nothing.json", NANOVLLM_ALLOW="add")
    assert (result.code, result.out) == (0, "hi\n")


# ---- beside the model ----


def silent(folder: Path) -> dict[str, Any]:
    """A server that is there and says nothing, until nobody listens."""
    return {"command": "sh", "args": ["-c", f"echo $$ >{folder}/pid; exec cat 3>&1 >/dev/null"]}


def within(seconds: float, happens: Callable[[], object]) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(happens())


def runs(folder: Path) -> bool:
    return (folder / "pid").exists() and os.path.exists(f"/proc/{(folder / 'pid').read_text().strip()}/fd/0")


def test_servers_start_while_others_do(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    from nanovllm_cli.chat.mcp_client import McpTools

    servers = read_servers(written(tmp_path / "mcp.json", {"silent": silent(tmp_path), "bad": {"command": "/no/such/command"}}))
    began = time.monotonic()
    with contextlib.closing(McpTools(servers)) as tools:

        def wrong() -> str:
            try:
                tools.check()
            except UsageError as error:
                return error.message
            return ""

        assert within(10, wrong)
        assert "bad did not start" in wrong()
        with pytest.raises(UsageError, match="bad did not start"):
            tools.wait()  # which waits for no other one
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("command", ["run", "chat"])
def test_no_model_is_loaded_beside_a_server_that_is_known_to_fail(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading may take minutes."""
    tools, source, _ = box([])
    monkeypatch.setattr(source, "check", Mock(side_effect=UsageError("bad did not start")))
    load = Mock()
    monkeypatch.setattr(local, "find", lambda *args, **kwargs: load)
    settings: dict[str, Any] = {"raw": False, "system": None, "think": None, "kwargs": {}}
    opens = {
        "run": lambda: local.open_local("m", Mock(), Mock(), Mock(), tools=tools, **settings),
        "chat": lambda: LocalModel(lambda name: load, Settings(tools=tools)).open("m"),
    }
    with pytest.raises(UsageError, match="bad did not start"):
        opens[command]()
    load.assert_not_called()


@pytest.mark.parametrize("failure", [DoesNotFitError, KeyboardInterrupt])
def test_a_model_that_does_not_come_leaves_no_server(failure: type[BaseException], tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    tools = ToolOptions([written(tmp_path / "mcp.json", {"silent": silent(tmp_path)})])

    def load() -> None:
        with tools.opened(Console()) as box:
            box.source.check()
            assert within(10, lambda: runs(tmp_path))
            raise failure("while the model was loaded")

    with pytest.raises(failure):
        load()
    assert within(5, lambda: not runs(tmp_path))
