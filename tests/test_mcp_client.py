"""Servers of tools that are broken, or mean harm: they start, say and answer what they like."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import mcp_server

pytest.importorskip("mcp")

from nanovllm_cli.chat import mcp_client
from nanovllm_cli.chat.mcp_client import McpTools
from nanovllm_cli.chat.mcp_servers import McpServer
from nanovllm_cli.cli.signals import Terminated
from nanovllm_cli.errors import RequestError, UsageError

TESTS = Path(__file__).parent
SERVER = str(TESTS / "mcp_server.py")


def odd(script: str, *tools: str, name: str = "odd", timeout: float = 5.0) -> McpServer:
    """The one in `mcp_server.py`, changed by a script that then calls `main`."""
    before = f"import sys, time, threading, os\nsys.path.insert(0, {str(TESTS)!r})\nimport mcp_server as m\nanswer = m.answer\n"
    return McpServer(name, sys.executable, ("-c", before + script, *tools), timeout=timeout)


@contextlib.contextmanager
def running(*servers: McpServer) -> Iterator[McpTools]:
    with contextlib.closing(McpTools(servers)) as tools:
        tools.wait()
        yield tools


def is_alive(pid: int) -> bool:
    """And no zombie, which waits for whoever reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def within(seconds: float, happens: Any) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(happens())


NEVER_ANSWERS = "m.answer = lambda message: time.sleep(600)\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nm.main()"


@pytest.mark.parametrize("gives_up", ["by itself", "by a person"])
def test_a_server_that_never_comes_does_not_stay(gives_up: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(mcp_client, "START_SECONDS", 2.0 if gives_up == "by itself" else 60.0)
    if gives_up == "by a person":
        threading.Timer(2.0, os.kill, (os.getpid(), 2)).start()
    began = time.monotonic()
    with pytest.raises(UsageError if gives_up == "by itself" else KeyboardInterrupt):
        McpTools([odd(NEVER_ANSWERS, str(pid_file))]).wait()
    assert time.monotonic() - began < 20
    assert within(1.0, lambda: not is_alive(int(pid_file.read_text())))
    assert not [each for each in threading.enumerate() if each.name == "mcp"]


def test_a_list_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_client, "START_SECONDS", 3.0)
    script = "m.answer = lambda message: time.sleep(600) if message['method'] == 'tools/list' else answer(message)\nm.main()"
    with pytest.raises(UsageError, match="odd does not tell its tools: timed out"):
        McpTools([odd(script)]).wait()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("{'tools': [], 'nextCursor': 'more'}", "goes on behind 100 pages"),
        ("{'tools': [{'name': 'a%d' % n, 'inputSchema': m.SCHEMA} for n in range(600)]}", "600 tools are more than 512"),
        ("{'tools': [{'name': '', 'inputSchema': m.SCHEMA}]}", "no name of 1 to 256"),
        ("{'tools': [{'name': 'a' * 257, 'inputSchema': m.SCHEMA}]}", "no name of 1 to 256"),
        ("{'tools': [{'name': 'a', 'inputSchema': []}]}", "does not tell its tools"),
        ("{'tools': 5}", "does not tell its tools"),
    ],
)
def test_lists_that_are_none_are_told(result: str, message: str) -> None:
    lists = f"{{'result': {result}}} if message['method'] == 'tools/list' else answer(message)"
    script = f"m.answer = lambda message: {lists}\nm.main()"
    with pytest.raises(UsageError, match=message):
        McpTools([odd(script)]).wait()


def test_each_server_gets_its_own_calls_though_two_have_one_name() -> None:
    """Of two files, say."""
    servers = [odd(f"m.result_of = lambda name, given: {{'content': [{{'type': 'text', 'text': '{n}'}}]}}\nm.main()", tool)
               for n, tool in ((1, "one"), (2, "two"))]  # fmt: skip
    with running(*servers) as tools:
        assert [tools.call("one", {}).text, tools.call("two", {}).text] == ["1", "2"]


def test_a_request_to_end_is_no_failure_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal raises while a call is waited for goes on its way."""
    import signal

    def end(signum: int, frame: object) -> None:
        raise Terminated(signum)

    with running(McpServer("one", sys.executable, (SERVER, "sleep"))) as tools:
        before = signal.signal(signal.SIGTERM, end)
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(Terminated):
                tools.call("sleep", {})
        finally:
            signal.signal(signal.SIGTERM, before)


def test_what_a_server_writes_where_it_should_not_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """A flood would push what a person decides on off the screen, or fill the disk."""
    script = "sys.stderr.write('noise\\n' * 300_000)\nos.write(1, b'not JSON\\n' * 100 + b'\\xff\\n{}\\n')\nm.main()"
    with running(odd(script, "add")) as tools:
        assert tools.call("add", {"a": 1, "b": 2}).text == "3"
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


REQUESTS = """
def work(name, given):
    for n, method in enumerate(('sampling/createMessage', 'roots/list', 'elicitation/create', 'no/such')):
        params = {'messages': [], 'maxTokens': 5, 'message': 'a', 'requestedSchema': {'type': 'object', 'properties': {}}}
        print(m.json.dumps({'jsonrpc': '2.0', 'id': 900 + n, 'method': method, 'params': params}), flush=True)
        said = m.json.loads(sys.stdin.readline())
        assert said['id'] == 900 + n and 'error' in said, said
    for method in ('progress', 'message', 'tools/list_changed'):
        print(m.json.dumps({'jsonrpc': '2.0', 'method': 'notifications/' + method, 'params': {'progressToken': 1, 'progress': 1,
                            'level': 'error', 'data': 'look here'}}), flush=True)
    return {'content': [{'type': 'text', 'text': 'all refused'}]}
m.result_of = work
m.main()
"""


def test_what_a_server_asks_for_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with running(odd(REQUESTS, "work")) as tools:
        assert tools.call("work", {}).text == "all refused"
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_server_that_does_not_end_is_ended() -> None:
    script = "import signal\nsignal.signal(15, signal.SIG_IGN)\nm.result_of = lambda name, given: {'content': [{'type': 'text'," \
             "'text': str(os.getpid())}]}\nm.main()\ntime.sleep(600)"  # fmt: skip
    with running(odd(script, "pid")) as tools:
        pid = int(tools.call("pid", {}).text)
        assert is_alive(pid)
    assert within(1.0, lambda: not is_alive(pid))


def test_a_result_may_be_values_alone() -> None:
    script = "m.result_of = lambda name, given: {'content': [], 'structuredContent': {'sum': 3}}\nm.main()"
    with running(odd(script, "add")) as tools:
        assert tools.call("add", {}).text == '{"sum": 3}'


@pytest.mark.parametrize("result", ["{}", "{'content': 5}", "{'content': [{'type': 'text'}]}"])
def test_a_result_that_is_none_is_told(result: str) -> None:
    with running(odd(f"m.result_of = lambda name, given: {result}\nm.main()", "add")) as tools, pytest.raises(RequestError):
        tools.call("add", {})


class Handler(BaseHTTPRequestHandler):
    """The same server over HTTP, without streams: an answer is JSON, and what is no question is accepted."""

    def do_POST(self) -> None:
        if self.path != "/mcp":
            self.send_response(307)
            self.send_header("Location", self.server.elsewhere)  # type: ignore[attr-defined]
            self.end_headers()
            return
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tokens.append(self.headers["X-Token"])  # type: ignore[attr-defined]
        asked = "id" in message
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **mcp_server.answer(message)}).encode() if asked else b""
        self.send_response(200 if asked else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_error(405)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "argv", ["mcp_server.py", "add", "fail", "show"])
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.tokens = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("headers", [{}, {"X-Token": "secret"}], ids=["bare", "with headers"])
def test_a_server_elsewhere_is_called(served: Any, headers: dict[str, str]) -> None:
    with running(McpServer("far", url=f"http://127.0.0.1:{served.server_port}/mcp", headers=headers)) as tools:
        assert [each.name for each in tools.tools] == ["add", "fail", "show"]
        assert tools.call("add", {"a": 1, "b": 2}).text == "3"
        with pytest.raises(RequestError, match="luck"):
            tools.call("fail", {})
    assert set(served.tokens) == {headers.get("X-Token")}


def test_headers_go_to_no_other_server(served: Any) -> None:
    """One that redirects gets no token to a third."""
    served.elsewhere = f"http://localhost:{served.server_port}/mcp"
    with pytest.raises(UsageError, match="far did not start"):
        McpTools([McpServer("far", url=f"http://127.0.0.1:{served.server_port}/away", headers={"X-Token": "secret"})]).wait()
    assert served.tokens == []
