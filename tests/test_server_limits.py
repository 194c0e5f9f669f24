"""What goes on below requests: heads that are too large or do not come, bodies that do not come, clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from http_server import Answer, Running, read_answer, running
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.gate import Gate
from nanovllm_cli.server.routing import MAX_ARRIVING, api_router, read_body
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakeModels, FakePool

SOON = 0.3
HEAD = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"content": "hello"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Impatient, with an answer that is larger than what sockets hold."""
    settings = ServeSettings(
        port=0, max_header_bytes=4096, header_seconds=SOON, body_seconds=SOON, idle_seconds=SOON, max_body_bytes=1 << 20
    )
    models = FakeModels()
    routes = api_router()

    @routes.get("/large")
    async def large() -> Response:
        return Response(b"x" * (64 << 20))

    @routes.post("/kept")
    async def kept(body: Thing, request: Request) -> Response:
        found = [each for each in gc.get_objects() if type(each) is list and each[:1] == ["a field that nobody knows"]]
        return Response(json.dumps([body.name, len(found), len(await request.body())]))

    with running(settings, ServerContext(settings, models, FakeGenerates(models=models), FakePool()), routes) as server:
        yield server
        wait_until_nobody(server)


class Thing(BaseModel):
    name: str


def wait_until_nobody(server: Running) -> None:
    """No connection stays behind, whatever its client did or left undone."""
    deadline = time.monotonic() + 20
    while server.server.server_state.connections and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.server.server_state.connections
    assert not server.server.server_state.tasks


def end_of(sock: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)


def drip(sock: socket.socket, pieces: Iterator[bytes]) -> None:
    """Sends piece after piece, slowly, until the server has enough."""
    sock.settimeout(0.02)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for piece in pieces:
            sock.sendall(piece)
            try:
                if sock.recv(1, socket.MSG_PEEK) is not None:
                    break
            except TimeoutError:
                continue
    sock.settimeout(20)


def check(answer: Answer, status: int) -> None:
    assert answer.status == status, answer
    assert answer.error["type"]
    assert answer.headers["x-request-id"]


# ---- heads ----


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"x: " + b"a" * 5000 + b"\r\n\r\n",
        HEAD + b"".join(b"x%d: y\r\n" % i for i in range(500)) + b"\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /version?" + b"a" * 5000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=["one header", "many headers", "path", "query"],
)
def test_a_head_that_is_too_large_is_431(server: Running, data: bytes) -> None:
    check(server.say(data), 431)


def test_a_head_just_below_the_limit_is_fine(server: Running) -> None:
    room = server.context.settings.max_header_bytes - len("/version") - len(b"hostlocalhost") - len(b"x") - 8
    assert server.say(HEAD + b"x: " + b"a" * room + b"\r\n\r\n").status == 200
    check(server.say(HEAD + b"x: " + b"a" * (room + 1) + b"\r\n\r\n"), 431)


@pytest.mark.parametrize("begin", [HEAD + b"x: ", HEAD, b"GET /", HEAD.replace(b"/version", b"/health")])
def test_a_head_that_never_ends_takes_no_more_memory_than_the_limit(server: Running, begin: bytes) -> None:
    with server.connect() as sock:
        sent = len(begin)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(begin)
            while sent < 64 << 20:
                sock.sendall(b"a" * 65536)
                sent += 65536
        assert sent < 64 << 20  # the server did not listen to the end


@pytest.mark.parametrize("part", [b"", b"G", b"GET /version HTTP/1.1\r\n", HEAD, HEAD + b"x: y"])
def test_a_head_that_does_not_come_ends_the_connection(server: Running, part: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(part)
        answer = end_of(sock)
    assert answer.startswith(b"HTTP/1.1 408 ") if len(part) > 1 else b"408" in answer or not answer


def test_a_head_that_comes_byte_by_byte_is_late_all_the_same(server: Running) -> None:
    with server.connect() as sock:
        drip(sock, (bytes([byte]) for byte in HEAD + b"x: " + b"a" * 2000))
        check(read_answer(sock), 408)


def test_a_second_head_on_a_connection_is_late_too(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(HEAD + b"\r\n")
        assert read_answer(sock).status == 200
        sock.sendall(b"GET /ver")
        assert end_of(sock).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(HEAD + b"\r\n")
        assert read_answer(sock).status == 200
        assert end_of(sock) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n", POST + b"content-length: 1, 2\r\n\r\n", HEAD + b"a b: c\r\n\r\n",
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
        POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET version HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_http_is_400_and_nothing_else_happens(server: Running, data: bytes) -> None:
    answer = server.say(data)
    assert answer.status in (400, 404), answer
    assert answer.error["message"]
    assert server.say(HEAD + b"\r\n").status == 200


def test_upgrades_are_not_taken(server: Running) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: %s\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n\r\n"
    for protocol in (b"websocket", b"h2c"):
        assert server.say(HEAD + upgrade % protocol).status == 200


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_another_protocol_is_read_like_any_other(server: Running, chunked: bool, in_pieces: bool) -> None:
    """As Java's own client sends each of its requests, and keeps the connection for the next one."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    body = b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
    if chunked:
        body = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    data = POST + offer + body
    step = 7 if in_pieces else len(data)
    with server.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for begin in range(0, len(data), step):
                sock.sendall(data[begin : begin + step])
            answer = read_answer(sock)
            assert answer.status == 200, answer
            assert answer.json["tokens"]
    answer = server.say(POST + offer.replace(b"Upgrade,", b"Upgrade, close,") + body)
    assert (answer.status, answer.closed) == (200, True)


# ---- bodies ----


def test_a_body_that_does_not_come_is_408(server: Running) -> None:
    check(server.say(POST + b"content-length: 100\r\n\r\n" + BODY), 408)
    check(server.say(POST + b"transfer-encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\n"), 408)


def test_a_body_that_comes_byte_by_byte_is_late_all_the_same(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(POST + b"content-length: 10000\r\n\r\n")
        drip(sock, (b" " for _ in range(10_000)))
        check(read_answer(sock), 408)


def test_bodies_on_their_way_have_a_limit_together() -> None:
    """Whoever goes beyond it is refused; when the others are there, or gone, there is room again."""

    async def scenario() -> None:
        gate, parts = Gate(), [asyncio.Queue[Any]() for _ in range(MAX_ARRIVING + 2)]
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        bodies = [asyncio.create_task(read_body(Request(scope, each.get), gate, 1000, 60)) for each in parts]
        for each in parts[:MAX_ARRIVING]:
            each.put_nowait({"type": "http.request", "body": b"x" * 1000, "more_body": True})
        await asyncio.sleep(0.01)
        parts[-2].put_nowait({"type": "http.request", "body": b"x", "more_body": True})
        with pytest.raises(ApiError) as caught:
            await bodies[-2]
        assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
        assert gate.arriving == 1000 * MAX_ARRIVING
        parts[0].put_nowait({"type": "http.request", "body": b"", "more_body": False})
        parts[1].put_nowait({"type": "http.disconnect"})
        assert len(await bodies[0]) == 1000
        with pytest.raises(ClientDisconnect):
            await bodies[1]
        parts[-1].put_nowait({"type": "http.request", "body": b"x", "more_body": False})
        assert await bodies[-1] == b"x"
        for body in bodies:
            body.cancel()
        await asyncio.gather(*bodies, return_exceptions=True)
        assert gate.arriving == 0

    asyncio.run(scenario())


def test_while_an_answer_is_made_nothing_is_kept_of_what_its_body_had_besides(server: Running) -> None:
    body = {"name": "x", "junk": ("a field that nobody knows",) * 9, "more": "x" * 1000}
    assert server.ask("POST", "/kept", body).json == ["x", 0, 2]


def test_chunks_cost_no_more_than_they_carry(server: Running) -> None:
    """A chunk's extension and trailers are read and thrown away: endless ones are refused."""
    for piece in (b"1;" + b"x" * (1 << 20), (b"1;" + b"x" * 1000 + b"\r\n{\r\n") * 1000, b"0\r\n" + b"x: y\r\n" * 10):
        assert server.say(POST + b"transfer-encoding: chunked\r\n\r\n" + piece).status in (0, 400)
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 2000 + BODY)
    with server.connect() as sock:
        sock.sendall(POST + b"transfer-encoding: chunked\r\n\r\n" + small[:5000])
        sock.sendall(small[5000:] + b"0\r\n\r\n")
        assert read_answer(sock).status == 200


def test_an_endless_trailer_is_not_kept(server: Running) -> None:
    """Also where the answer is out already, and nobody reads the body."""
    for head in (POST, POST.replace(b"/tokenize", b"/nope")):
        with server.connect() as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(head + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ")
            for _ in range(1024):
                sock.sendall(b"a" * 65536)
            pytest.fail("the server listened to 64 MiB of a trailer")


def test_a_body_that_nobody_asked_for_ends_the_connection(server: Running) -> None:
    """The answer is out, and the client goes on sending: it is heard for a while, so that it reads the answer, not for ever."""
    with server.connect() as sock:
        sock.sendall(POST.replace(b"/tokenize", b"/nope") + b"content-length: 100000000\r\n\r\n")
        check(read_answer(sock), 404)
        drip(sock, (b" " for _ in range(100_000)))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                sock.sendall(b" ")
                time.sleep(0.01)


def test_a_connection_goes_on_behind_a_refused_request(server: Running) -> None:
    with server.connect() as sock:
        for _ in range(2):
            sock.sendall(POST + b"content-length: 5\r\n\r\nwrong")
            check(read_answer(sock), 400)
            sock.sendall(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            assert read_answer(sock).status == 200


def test_pipelined_requests_are_answered_in_their_order(server: Running) -> None:
    one = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    with server.connect() as sock:
        sock.sendall(3 * one + HEAD + b"\r\n")
        file = sock.makefile("rb")
        bodies = []
        for _ in range(4):
            assert b"200" in file.readline()
            length = 0
            while (line := file.readline().strip()):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            bodies.append(json.loads(file.read(length)))
    assert [set(body) for body in bodies] == 3 * [{"tokens", "count", "max_model_len"}] + [{"version"}]


def test_an_expected_continue_comes_only_where_the_body_is_wanted(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(BODY)
        assert read_answer(sock).status == 200
    refused = POST.replace(b"localhost", b"evil.example") + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    check(server.say(refused), 403)


# ---- clients that do not read ----


def test_a_client_that_does_not_read_its_answer_is_dropped(server: Running) -> None:
    with server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until_nobody(server)


def test_one_that_reads_slowly_gets_it_all(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert len(end_of(sock)) > 64 << 20


@pytest.mark.parametrize("limit", ["settings", "open files"])
def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Connections never take the last open files of the process: an engine that is started needs some."""
    if limit == "settings":
        monkeypatch.setattr(ServeSettings, "max_connections", 3)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (35, 35))
    with running(ServeSettings(port=0)) as server, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(3)]
        for sock in socks:
            sock.sendall(HEAD + b"\r\n")
            assert read_answer(sock).status == 200
        with server.connect() as sock:
            assert end_of(sock) == b""
        socks[0].sendall(HEAD + b"\r\n")
        assert read_answer(socks[0]).status == 200
