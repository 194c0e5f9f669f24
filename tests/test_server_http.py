"""What every request passes: keys, Host, errors, limits on bodies, ids, CORS; and the server's own endpoints. Over sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hmac
import itertools
import json
import logging
import math
import queue
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import jsonschema
from fastapi import APIRouter
from starlette.responses import Response

from http_server import Answer, Running, read_answer, running
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import UsageError
from nanovllm_cli.server import errors, keys
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.ports import ChatDefaults, EngineState
from nanovllm_cli.server.routing import MAX_VALUES, api_router, parse_json
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.text.tool_calls import ToolCallDelta
from server_client import ServerClient
from server_fakes import FakeGenerates, FakeModels, FakePool, Script, event
from server_requests import Door

KEY, OTHER = "first-secret-key", "second-secret-key"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Recorder(Observer):
    """What the server told of its HTTP requests: method, route and status."""

    def __init__(self) -> None:
        self.ended: queue.Queue[tuple[str, str | None, int]] = queue.Queue()

    def http_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        self.ended.put((method, route, status))


def context_of(settings: ServeSettings, models: FakeModels | None = None, **more: Any) -> ServerContext:
    models = models or FakeModels("fake", "org/name")
    return ServerContext(settings, models, more.pop("generates", None) or FakeGenerates(models=models), FakePool(), **more)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def server(recorder: Recorder) -> Iterator[Running]:
    """Open to this machine, with a route that fails in a way that nobody foresaw."""
    routes = api_router()

    @routes.get("/fails")
    async def fails() -> Response:
        raise ValueError("/etc/secret at 0x7f00")

    @routes.get("/caller")
    async def caller(exchange: CurrentExchange) -> Response:
        return JsonResponse(exchange.caller._asdict())

    settings = ServeSettings(port=0, max_body_bytes=4_000_000, cors_origins=("https://good.example",))
    with running(settings, context_of(settings, observer=recorder), routes) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """With keys."""
    routes = api_router()

    @routes.get("/caller")
    async def caller(exchange: CurrentExchange) -> Response:
        return JsonResponse(exchange.caller._asdict())

    settings = ServeSettings(port=0, api_keys=(KEY, OTHER))
    with running(settings, context_of(settings), routes) as server:
        yield server


def error_of(answer: Answer, status: int) -> dict[str, Any]:
    """The error, in OpenAI's form, with an id of the request."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert answer.json.keys() == {"error"}
    assert answer.error.keys() == {"message", "type", "param", "code"}
    return answer.error


# ---- keys ----


def paths_of(server: Running) -> list[tuple[str, str]]:
    described = server.ask("GET", "/openapi.json", authorization=f"Bearer {KEY}").json
    return [(method.upper(), path) for path, operations in described["paths"].items() for method in operations]


def test_without_a_key_no_route_answers_but_health_and_the_pages(guarded: Running) -> None:
    known = paths_of(guarded)
    assert ("POST", "/tokenize") in known
    assert ("GET", "/metrics") in known
    hidden = ("/docs", "/redoc", "/openapi.json", "/pause", "/v1", "/v1/nope", "/health/", "//health")
    unknown = [("GET", path) for path in hidden]
    unknown += [("POST", "/health"), ("POST", "/"), ("OPTIONS", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/he%61lth/../v1")]
    for method, path in known + unknown:
        answer = guarded.ask(method, path)
        if (method, path) in {("GET", "/health"), ("GET", "/"), ("GET", "/status")}:
            assert answer.status == 200, path
        else:
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-should-retry"] == "false"


def test_each_key_opens_in_either_header(guarded: Running) -> None:
    for key in (KEY, OTHER):
        assert guarded.ask("GET", "/v1/models", authorization=f"Bearer {key}").status == 200
        assert guarded.ask("GET", "/v1/models", authorization=f"bearer  {key}").status == 200
        assert guarded.ask("GET", "/v1/models", x_api_key=key).status == 200
        assert guarded.ask("GET", "/v1/models", authorization="Bearer another-key", x_api_key=key).status == 200
        assert guarded.ask("GET", "/v1/models", x_api_key="another-key", authorization=f"Bearer {key}").status == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer {KEY.upper()}"]
)
def test_what_is_not_the_key_does_not_open(guarded: Running, value: str) -> None:
    error = error_of(guarded.ask("GET", "/v1/models", authorization=value), 401)
    assert error["type"] == "authentication_error"
    assert KEY not in error["message"]


def test_bytes_that_are_no_text_are_no_key(guarded: Running) -> None:
    answer = guarded.say(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer \xff\xfe\r\n\r\n")
    assert error_of(answer, 401)["code"] == "invalid_api_key"


def test_keys_are_compared_in_constant_time_with_every_key(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, in_constant_time = [], hmac.compare_digest

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return in_constant_time(given, key)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    assert guarded.ask("GET", "/version", x_api_key=KEY).status == 200
    assert compared == [KEY.encode(), OTHER.encode()]


def test_a_refused_request_s_body_is_not_read(guarded: Running) -> None:
    answer = guarded.say(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
    error_of(answer, 401)


def test_keys_have_tenants_of_their_own_that_do_not_tell_the_key(guarded: Running) -> None:
    tenants = [guarded.ask("GET", "/caller", x_api_key=key).json["tenant"] for key in (KEY, OTHER, KEY)]
    assert tenants[0] == tenants[2] != tenants[1]
    assert KEY not in tenants[0]


def test_without_keys_there_is_no_tenant(server: Running) -> None:
    assert server.ask("GET", "/caller").json["tenant"] is None


# ---- Host and CORS ----


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80", "192.168.1.7", "a.localhost"]
)
def test_names_of_this_machine_are_served(server: Running, host: str) -> None:
    assert server.ask("GET", "/version", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "localhost@evil", "[::1", "a b"],
)
@pytest.mark.parametrize("path", ["/version", "/health", "/v1/chat/completions"])
def test_a_name_that_somebody_lets_point_here_is_refused(server: Running, host: str, path: str) -> None:
    error_of(server.ask("GET", path, host=host), 403)


def test_a_request_has_one_host(server: Running) -> None:
    error_of(server.say(b"GET /version HTTP/1.1\r\n\r\n"), 400)
    error_of(server.say(b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n"), 400)
    assert server.say(b"GET /version HTTP/1.0\r\n\r\n").status == 200


def test_hosts_can_be_allowed_by_name() -> None:
    for allowed, host, status in [("gpu.lan", "gpu.lan:80", 200), ("gpu.lan", "evil.lan", 403), ("*", "evil.lan", 200)]:
        with running(ServeSettings(port=0, allowed_hosts=(allowed,))) as server:
            assert server.ask("GET", "/version", host=host).status == status


def test_with_keys_any_name_is_served_unless_some_are_allowed(guarded: Running) -> None:
    assert guarded.ask("GET", "/version", host="gpu.lan", x_api_key=KEY).status == 200
    with running(ServeSettings(port=0, api_keys=(KEY,), allowed_hosts=("gpu.lan",))) as server:
        assert server.ask("GET", "/version", host="evil.lan", x_api_key=KEY).status == 403


def test_only_pages_that_were_named_may_read_answers(server: Running) -> None:
    good = server.ask("GET", "/version", origin="https://good.example")
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-credentials" not in good.headers
    for origin in ("https://evil.example", "null", "https://good.example.evil.example"):
        assert "access-control-allow-origin" not in server.ask("GET", "/version", origin=origin).headers
    asks = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    assert server.ask("OPTIONS", "/v1/models", **asks).status == 400


def test_nobody_s_pages_may_unless_asked_for(guarded: Running) -> None:
    answer = guarded.ask("GET", "/version", origin="https://good.example", x_api_key=KEY)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_preflight_needs_no_key_and_errors_can_be_read() -> None:
    with running(ServeSettings(port=0, api_keys=(KEY,), cors_origins=("https://good.example",))) as server:
        asks = {"origin": "https://good.example", "access_control_request_method": "POST"}
        answer = server.ask("OPTIONS", "/v1/models", access_control_request_headers="authorization", **asks)
        assert (answer.status, answer.headers["access-control-allow-headers"]) == (200, "authorization")
        refused = server.ask("GET", "/v1/models", origin="https://good.example")
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://good.example")


def test_pages_that_were_named_may_reach_this_machine_from_the_network(server: Running) -> None:
    asks = {"access_control_request_method": "POST", "access_control_request_private_network": "true"}
    allowed = server.ask("OPTIONS", "/v1/models", origin="https://good.example", **asks)
    assert (allowed.status, allowed.headers["access-control-allow-private-network"]) == (200, "true")
    assert server.ask("OPTIONS", "/v1/models", origin="https://evil.example", **asks).status == 400


# ---- methods and versions ----


def test_head_says_what_get_would(server: Running, guarded: Running) -> None:
    for path in ("/v1/models", "/v1/models/org/name", "/metrics", "/health", "/", "/openapi.json", "/nope"):
        head, get = server.ask("HEAD", path), server.ask("GET", path)
        assert (head.status, head.body, head.headers["content-type"]) == (get.status, b"", get.headers["content-type"]), path
    refused = server.ask("HEAD", "/tokenize")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")
    assert guarded.ask("HEAD", "/health").status == guarded.ask("HEAD", "/").status == 200
    assert guarded.ask("HEAD", "/v1/models").status == 401


def test_to_http_1_0_an_answer_ends_with_its_connection(server: Running) -> None:
    """RFC 9112, 6.1: no transfer coding where the request was not HTTP/1.1."""
    body = json.dumps(CHAT | {"stream": True}).encode()
    with server.connect() as sock:
        head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        said = sock.makefile("rb").read()
    head, _, content = said.partition(b"\r\n\r\n")  # type: ignore[assignment]
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    events = content.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events[-2:] == [b"data: [DONE]", b""]
    whole = server.say(b"GET /version HTTP/1.0\r\n\r\n")
    assert (whole.json.keys(), whole.closed) == ({"version"}, True)


# ---- errors ----


def test_an_unknown_path_and_a_wrong_method_are_told_as_errors(server: Running) -> None:
    assert error_of(server.ask("GET", "/nope"), 404)["code"] == "unknown_path"
    answer = server.ask("DELETE", "/tokenize")
    assert error_of(answer, 405)["type"] == "invalid_request_error"
    assert answer.headers["allow"] == "POST"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "path", ["/%00", "/%ff", "/..%2f..%2fetc/passwd", "/v1/models/..%2f..%2fx", "/v1//models", "/" + "a" * 5000]
)
def test_odd_paths_are_no_paths(server: Running, path: str) -> None:
    error_of(server.ask("GET", path), 404)


def test_an_unforeseen_failure_tells_nothing_of_itself(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "nanovllm_cli"):
        answer = server.ask("GET", "/fails", x_request_id="mine-1")
    error = error_of(answer, 500)
    assert error["type"] == "server_error"
    assert "secret" not in answer.body.decode()
    assert "ValueError" not in answer.body.decode()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]  # no access log
    assert errors == ["request mine-1 failed: ValueError"]
    assert server.ask("GET", "/version").status == 200


def test_a_wrong_field_is_named(server: Running) -> None:
    assert error_of(server.ask("POST", "/tokenize", {"content": 5}), 400)["param"] == "content"
    error = error_of(server.ask("POST", "/detokenize", {"tokens": [1, "x"]}), 400)
    assert error["param"] == "tokens[1]"
    assert "url" not in error["message"]
    error = error_of(server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}), 400)
    assert error["param"] == "messages[0].content"  # may be text or a list of parts: both are told, neither is part of the path
    assert "string" in error["message"]
    assert "list" in error["message"]
    assert error_of(server.ask("POST", "/v1/chat/completions", {}), 400)["param"] == "messages"
    for nonsense in ([], 7, "text", None):
        error_of(server.ask("POST", "/tokenize", json.dumps(nonsense).encode()), 400)


def test_ids_come_back_and_insane_ones_are_replaced(server: Running) -> None:
    assert server.ask("GET", "/version", x_request_id="trace-1.2:3").headers["x-request-id"] == "trace-1.2:3"
    anthropic = server.ask("GET", "/v1/messages", x_request_id="one").headers  # their clients look for another name
    assert (anthropic["x-request-id"], anthropic["request-id"]) == ("one", "one")
    first, second = (server.ask("GET", "/version").headers["x-request-id"] for _ in range(2))
    assert first != second
    for insane in ("a b", "x" * 129, "", "<script>", "é"):
        assert server.ask("GET", "/version", x_request_id=insane).headers["x-request-id"].startswith("req_")


# ---- bodies ----


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx", "multipart/form-data"]
)
def test_what_is_not_called_json_is_not_read(server: Running, kind: str) -> None:
    """So a page of another site, which may send these without asking, gets nothing done."""
    error_of(server.ask("POST", "/tokenize", {"content": "a"}, content_type=kind), 415)


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"]
)
def test_json_by_its_names(server: Running, kind: str) -> None:
    assert server.ask("POST", "/tokenize", {"content": "a"}, content_type=kind).status == 200


def test_a_compressed_body_is_refused_by_name(server: Running) -> None:
    answer = server.ask("POST", "/tokenize", gzip.compress(b'{"content": "a"}'), content_encoding="gzip")
    assert "Content-Encoding" in error_of(answer, 415)["message"]
    assert server.ask("POST", "/tokenize", {"content": "a"}, content_encoding="identity").status == 200


def test_a_body_is_bounded_announced_or_not(server: Running) -> None:
    most = server.context.settings.max_body_bytes
    fits = json.dumps({"content": "a"}).encode().ljust(most)
    assert server.ask("POST", "/tokenize", fits).status == 200
    assert error_of(server.ask("POST", "/tokenize", b"x" * (most + 1)), 413)["code"] == "request_too_large"
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    error_of(server.say(f"{head}content-length: {10**30}\r\n\r\n".encode()), 400)  # more than the parser counts
    error_of(server.say(f"{head}content-length: {10**15}\r\n\r\n".encode()), 413)
    chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    error_of(server.say(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + (most // 0x8000 + 1) * chunk), 413)


def test_texts_to_tokenize_are_bounded(server: Running) -> None:
    """Fifteen megabytes took seven gigabytes of memory. The limit follows the context: this one's is 4,096."""
    assert len(server.ask("POST", "/tokenize", {"content": "a" * (1 << 19)}).json["tokens"]) == 1 << 19
    for param in ("content", "prompt"):
        error = error_of(server.ask("POST", "/tokenize", {param: "a" * ((1 << 19) + 1)}), 400)
        assert (error["param"], error["code"]) == (param, "too_long")


def test_a_chunked_body_is_put_together(server: Running) -> None:
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'{"content": "hello"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert server.say(head.encode() + chunks).json["count"] == 5
    gzipped = head.replace("chunked", "gzip, chunked").encode()
    assert "transfer coding" in error_of(server.say(gzipped + chunks), 415)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"content": "a"', b'{"content": NaN}', b'{"content": 1e999}', b"\xff", b'{"content": "\\ud800"}',
        b"[" * 100_000, b'{"content":"a"}{"content":"b"}', b"\xef\xbb\xbf{}", b"{" * 50_000 + b"}" * 50_000, b'{"a":' * 10_000,
        b"[" * 65 + b"]" * 65, b'{"content": "\x00"}', b'"' + b"\\" * 99_999,
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_what_is_no_json_or_nests_too_deep_is_told_at_once(server: Running, body: bytes) -> None:
    error_of(server.ask("POST", "/tokenize", body), 400)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"content": "half a character: \\ud83d and on"}', r"ud83d \(byte 31\) is half of a surrogate pair"),
        (b'{"content": "\\ud83d\\ude00, and half a character: \\ude00"}', r"ude00 \(byte 49\) is half"),
        (b'{"content": "\\ud83d"}', r"ud83d \(byte 13\) is half"),
        (b'{"content": "a",}', r"trailing comma in object \(byte 16\)"),
        (b"", "truncated"),
        (b'{"content": "\xff"}', "(?i:utf-8)"),
        (b'{"content": 1e999}', "out of range"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=f"not valid JSON: .*{says}"):
        parse_json(body, 64)


def test_depth_counts_brackets_outside_of_strings() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64, 64)
    tricky = {"a": "[{" * 100, 'b"\\': ["\\", '"[[']}
    assert parse_json(json.dumps(tricky).encode(), 3) == tricky
    assert parse_json(json.dumps([[]] * 500).encode(), 3) == [[]] * 500
    for pairs in (33, 500):
        with pytest.raises(ApiError, match="64 deep"):
            parse_json(b'[{"a":' * pairs + b"1" + b"}]" * pairs, 64)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": ["x"] * 200_000}, "tokens[0]"),
        ("/apply-template", {"messages": [5] * 200_000}, "messages[0]"),
        ("/v1/completions", {"prompt": [1.5] * 200_000}, "prompt"),
        ("/v1/embeddings", {"input": [{}] * 200_000}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5] * 200_000}]}, "messages[0].content[0]"),
        ("/v1/chat/completions", CHAT | {"stop_token_ids": ["x"] * 200_000}, "stop_token_ids[0]"),
        ("/v1/chat/completions", CHAT | {"logit_bias": {str(i): "x" for i in range(100_000)}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_with_many_values_is_told_of_the_first(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    """To tell it of each took more than a minute, and held up everybody."""
    told: list[int] = []
    write = errors._invalid
    monkeypatch.setattr(errors, "_invalid", lambda error: told.append(len(error.errors())) or write(error))
    assert error_of(server.ask("POST", path, body), 400)["param"] == param
    assert told[0] <= 4


def test_more_values_than_any_prompt_has_are_not_read() -> None:
    with pytest.raises(ApiError, match="values"):
        parse_json(b"[" + b"0," * MAX_VALUES + b"0,0]", 64)
    assert len(parse_json(b"[" + b"0," * MAX_VALUES + b"0]", 64)) == MAX_VALUES + 1
    assert parse_json(b'["' + b"," * (2 * MAX_VALUES) + b'"]', 64)  # a text has as many commas as it likes
    assert parse_json(b'["' + rb'\",[\\' * (2 * MAX_VALUES) + b'"]', 64)  # and quotes and brackets
    assert len(parse_json(b"{" + b",".join(b'"%d":""' % i for i in range(MAX_VALUES)) + b"}", 64)) == MAX_VALUES


@pytest.mark.parametrize("piece", [b'","', b'"[",', b'"",', b'{"a":', b"[", b'\\"",', rb'"\\",'])
def test_too_many_are_told_before_they_are_looked_at(piece: bytes) -> None:
    """What was cut out string by string took 60 times the memory that a body has, and seconds of everybody's time."""
    body = b'["' + piece * (4 * MAX_VALUES)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="more than 262144 values"):
            parse_json(body, 64)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


# ---- how many ----


def test_more_than_may_be_under_way_are_told_to_come_back() -> None:
    settings = ServeSettings(port=0, max_requests=2)
    inside, go = threading.Semaphore(0), threading.Event()
    routes = APIRouter()

    @routes.get("/waits")
    async def waits() -> Response:
        inside.release()
        await asyncio.to_thread(go.wait, 20)
        return JsonResponse({})

    with running(settings, context_of(settings), routes) as server:
        socks = [server.connect() for _ in range(2)]
        for sock in socks:
            sock.sendall(b"GET /waits HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert inside.acquire(timeout=20)
        head = "host: localhost\r\ncontent-type: application/json\r\ncontent-length: 9999"
        refused = server.say(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
        error = error_of(refused, 429)  # without having waited for a body
        assert error["type"] == "rate_limit_error"
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
        assert server.ask("GET", "/health").status == 200
        assert server.ask("GET", "/metrics").status == 200
        go.set()
        for sock in socks:
            assert read_answer(sock).status == 200
            sock.close()
        assert server.ask("GET", "/version").status == 200


def test_an_answer_that_takes_too_long_is_broken_off() -> None:
    routes = APIRouter()
    cancelled = threading.Event()

    @routes.get("/waits")
    async def waits() -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return JsonResponse({})

    settings = ServeSettings(port=0, request_seconds=0.1)
    with running(settings, context_of(settings), routes) as server:
        answer = server.ask("GET", "/waits")
        assert error_of(answer, 503)["code"] == "timeout"
        assert answer.headers["retry-after"] == "1"
        assert cancelled.is_set()


# ---- what watchers and logs are told ----


def test_observers_hear_of_templates_and_never_of_paths(server: Running, recorder: Recorder) -> None:
    recorder.ended = queue.Queue()
    server.ask("GET", "/v1/models/fake")
    assert recorder.ended.get(timeout=20) == ("GET", "/v1/models/{model:path}", 200)
    server.ask("GET", "/some/secret/path")
    assert recorder.ended.get(timeout=20) == ("GET", None, 404)
    server.ask("POST", "/tokenize", {"content": 5})
    assert recorder.ended.get(timeout=20) == ("POST", "/tokenize", 400)
    server.ask("GET", "/version", host="evil.example")
    assert recorder.ended.get(timeout=20) == ("GET", None, 403)


def test_a_log_line_has_what_it_took_and_no_secret(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanovllm_cli.server.logs"):
        body = CHAT | {"messages": [{"role": "user", "content": "private words"}]}
        guarded.ask("POST", f"/v1/chat/completions?api_key={KEY}", body, x_api_key=KEY, x_request_id="r-1")
        guarded.ask("GET", "/a%0d%0ab", x_api_key=KEY)
        guarded.ask("GET", "/health")
        guarded.ask("GET", "/v1/health")
    behind = itertools.dropwhile(lambda record: "r-1" not in record.getMessage(), caplog.records)
    chat, odd = behind  # a line comes behind its answer: that of the request before may be among them
    fields = chat.fields  # type: ignore[attr-defined]
    assert {name: fields[name] for name in ("request_id", "method", "path", "status", "model")} == {
        "request_id": "r-1", "method": "POST", "path": "/v1/chat/completions", "status": 200, "model": "fake",
    }  # fmt: skip
    assert fields["prompt_tokens"] > 0
    assert fields["completion_tokens"] > 0
    text = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert KEY not in text
    assert "private" not in text
    assert "\n" not in odd.getMessage()
    assert "/a%0d%0ab" in odd.getMessage()


# ---- the server's own endpoints ----


@pytest.mark.parametrize(
    ("states", "status", "code"),
    [
        (["ready"], 200, "ok"), (["asleep"], 200, "ok"), (["loading"], 503, "loading"), (["restarting"], 503, "restarting"),
        (["stuck"], 503, "stuck"), (["failed"], 503, "failed"), (["ready", "stuck"], 503, "stuck"),
        (["ready", "failed"], 200, "ok"), (["loading", "failed"], 503, "loading"), (["stopped"], 503, "stopped"),
    ],
)  # fmt: skip
def test_health_says_which(server: Running, states: list[str], status: int, code: str) -> None:
    models = server.context.models
    assert isinstance(models, FakeModels)
    engines = [served.engine for served in models.served.values()]
    try:
        for engine, state in zip(engines, [*states, states[0]], strict=False):
            engine.state = EngineState(state)  # type: ignore[misc]
        answer = server.ask("GET", "/health")
        assert (answer.status, answer.json["status"]) == (status, code)
        if status == 503:
            assert answer.error["code"] == code
            assert answer.headers["retry-after"] == "1"
        assert server.ask("HEAD", "/health").status == status
    finally:
        for engine in engines:
            engine.state = EngineState.READY  # type: ignore[misc]


def test_models_are_listed_and_found_by_name(server: Running) -> None:
    listed = server.ask("GET", "/v1/models").json
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["fake", "org/name"]
    assert {"id", "object", "created", "owned_by"} <= listed["data"][0].keys()
    for name in ("org/name", "org%2Fname", "org/name:latest"):
        assert server.ask("GET", f"/v1/models/{name}").json["id"] == "org/name"
    assert error_of(server.ask("GET", "/v1/models/nope"), 404)["code"] == "model_not_found"


def test_anthropics_clients_list_models_in_their_form(server: Running) -> None:
    def listed(query: str = "") -> Any:
        return server.ask("GET", "/v1/models" + query, anthropic_version="2023-06-01").json

    page = listed()
    assert [(card["type"], card["id"]) for card in page["data"]] == [("model", "fake"), ("model", "org/name")]
    assert page["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "fake", "org/name")
    assert server.ask("GET", "/v1/models/org/name", anthropic_version="2023-06-01").json == page["data"][1]
    for query, names, more in (
        ("?limit=1", ["fake"], True), ("?after_id=fake", ["org/name"], False), ("?after_id=org/name", [], False),
        ("?before_id=org/name", ["fake"], False), ("?before_id=fake", [], False), ("?limit=2", ["fake", "org/name"], False),
    ):  # fmt: skip
        page = listed(query)
        assert ([card["id"] for card in page["data"]], page["has_more"]) == (names, more), query
    for query in ("?limit=0", "?limit=x", "?after_id=nope"):
        assert server.ask("GET", "/v1/models" + query).status == 400, query


def test_tokenize_there_and_back(server: Running) -> None:
    text = "Grüße 🙂"
    ids = server.ask("POST", "/tokenize", {"content": text}).json["tokens"]
    assert server.ask("POST", "/detokenize", {"tokens": ids}).json["content"] == text
    both = server.ask("POST", "/tokenize", {"content": "ü", "with_pieces": True, "return_token_strs": True}).json
    assert [piece["piece"] for piece in both["tokens"]] == [[byte] for byte in "ü".encode()]
    assert len(both["token_strs"]) == both["count"] == 2
    counted = server.ask("POST", "/tokenize", {"messages": CHAT["messages"]}).json
    assert counted["count"] == len(counted["tokens"]) > 0
    generates, begun = FakeGenerates(), {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Hm"}]}
    switches = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    assert Door(generates).post("/tokenize", begun | switches).status == 200
    assert (generates.encoded[0].continues, generates.encoded[0].template_kwargs) == (True, {"a": 1})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"), ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": "a", "add_special": "yes"}, "add_special"), ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", CHAT | {"add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", CHAT | {"continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [{"content": "a"}], "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", CHAT | {"chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"), ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"), ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/apply-template", {"messages": "x"}, "messages"),
        ("/apply-template", CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/apply-template", CHAT | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_nonsense_for_the_tokenizer_is_named(server: Running, path: str, body: Any, param: str) -> None:
    assert error_of(server.ask("POST", path, body), 400)["param"] == param


def test_a_model_that_is_not_here_is_404_everywhere(server: Running) -> None:
    for path, body in [("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": []}), ("/apply-template", CHAT)]:
        assert error_of(server.ask("POST", path, body | {"model": "nope"}), 404)["code"] == "model_not_found"
    error_of(server.ask("GET", "/props?model=nope"), 404)


def test_props_and_templates(server: Running) -> None:
    props = server.ask("GET", "/props").json
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"], props["total_slots"]) == ("fake", 4096, 8)
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert server.ask("POST", "/apply-template", CHAT).json == {"prompt": "<user>Hi\n<assistant>"}
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    said = {"messages": [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]}
    assert server.ask("POST", "/apply-template", said).json == {"prompt": "<system>H\ni\n<assistant>\n<assistant>"}
    assert server.ask("GET", "/version").json.keys() == {"version"}


def test_a_template_is_shown_with_the_servers_variables() -> None:
    models = FakeModels(template="{{ mood }}")
    models.served = {
        name: dataclasses.replace(each, chat_defaults=ChatDefaults({"mood": "calm"})) for name, each in models.served.items()
    }
    door = Door(FakeGenerates(models=models))
    assert door.post("/apply-template", CHAT).json == {"prompt": "calm"}
    assert door.post("/apply-template", CHAT | {"chat_template_kwargs": {"mood": "glad"}}).json == {"prompt": "glad"}


def test_messages_that_a_template_refuses_are_their_senders_mistake() -> None:
    picky = FakeModels(template="{{ raise_exception('no questions') }}")
    answer = Door(FakeGenerates(models=picky)).post("/apply-template", CHAT)
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")
    assert "no questions" in answer.json["error"]["message"]


def test_the_description_tells_what_is_sent(guarded: Running) -> None:
    described = guarded.ask("GET", "/openapi.json", x_api_key=KEY).json
    tokenize = described["paths"]["/tokenize"]["post"]
    assert {"200", "400", "401", "404", "405", "413", "415", "429", "503"} <= tokenize["responses"].keys()
    assert "422" not in tokenize["responses"]
    assert tokenize["responses"]["413"]["content"].keys() == {"application/json"}
    assert described["security"]
    assert described["paths"]["/health"]["get"]["security"] == []
    assert "ValidationError" not in described["components"]["schemas"]


def test_a_path_of_its_own_takes_its_own_methods(server: Running) -> None:
    own = {"/v1/responses/input_tokens": "POST", "/v1/responses/resp_1": "DELETE, GET, HEAD", "/health": "GET, HEAD"}
    for path, methods in own.items():
        answer = server.ask("OPTIONS", path)
        assert (answer.status, answer.headers["allow"]) == (405, methods), path
        assert answer.error["message"] == f"this path takes {methods}"


def test_a_path_that_is_nearly_one_is_told_from_others(server: Running) -> None:
    for path in ("/v1/chat/completions/", "//v1/chat/completions", "/v1/v1/chat/completions"):
        assert error_of(server.ask("POST", path, CHAT), 404)["message"] == "no such path; /v1/chat/completions is one"
    for path in ("/openai/v1/chat/completions", "/v1/chat/completions/v1/chat/completions", "/a" * 5000 + "/v1/chat/completions"):
        assert error_of(server.ask("POST", path, CHAT), 404)["message"] == "no such path; /v1/chat/completions is one"
    twice = error_of(server.ask("POST", "/v1/chat/completions/chat/completions", CHAT), 404)
    assert twice["message"] == "no such path; /chat/completions is one"
    for path in ("/v1/chat", "/v2/models/", "//", "/v1/responses/a/", "/a/props", "/v1/chat/completions/props"):
        assert error_of(server.ask("GET", path), 404)["message"] == "no such path"


def test_paths_of_llama_server_and_vllm_lead_to_the_same(server: Running, guarded: Running) -> None:
    for path, same in {"/models": "/v1/models", "/v1/health": "/health"}.items():
        assert server.ask("GET", path).json == server.ask("GET", same).json
    assert guarded.ask("GET", "/v1/health").status == 200
    assert guarded.ask("GET", "/models").status == 401
    assert server.ask("POST", "/chat/completions", CHAT).json["object"] == "chat.completion"
    assert server.ask("POST", "/responses", {"input": "a"}).json["object"] == "response"
    ranked = {"query": "a", "documents": ["b"]}
    for path in ("/rerank", "/reranking", "/v1/reranking", "/v2/rerank"):
        assert server.ask("POST", path, ranked).json["results"] == server.ask("POST", "/v1/rerank", ranked).json["results"]


def test_slots_are_room_for_answers() -> None:
    models = FakeModels()
    client = ServerClient(FakeGenerates(models=models))
    engine = models.served["fake"].engine
    engine.stats = EngineStats(3, *[0] * 9)
    rows = client.get("/slots")
    assert [row["is_processing"] for row in rows] == [True] * 3 + [False] * 5
    assert rows[7] == {"id": 7, "n_ctx": 4096, "is_processing": False}
    assert client.get("/slots?fail_on_no_slot=1") == rows
    engine.stats = EngineStats(8, *[0] * 9)
    assert client.get("/slots?fail_on_no_slot=1", 503)["error"]["code"] == "no_slot_available"
    assert all(row["is_processing"] for row in client.get("/slots"))
    engine.stats = None
    assert not any(row["is_processing"] for row in client.get("/slots"))
    client.get("/slots?model=nope", 404)
    client.get("/slots?fail_on_no_slot=x", 400)


STREAMS = {
    "/v1/chat/completions": CHAT | {"stream_options": {"include_usage": True}, "logprobs": True, "return_token_ids": True},
    "/v1/completions": {"prompt": "a", "logprobs": 0, "echo": True, "return_token_ids": True},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "fake", "max_tokens": 9} | CHAT,
    "/completion": {"prompt": "a"},
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", STREAMS)
def test_events_of_streams_are_as_they_are_described(path: str, fails: bool) -> None:
    call = (ToolCallDelta(0, "call_1", "f", "{}"),)
    ends = event(finish="tool_calls", calls=call) if "chat" in path else event(finish="stop")
    steps = [[event(reasoning="hm")], [event("He", logprobs=[TokenLogprobs(72, -0.5, 1, ((72, -0.5),))])], [ends]]
    script = Script(steps[:2], error=ApiError(503, "gone")) if fails else Script(steps)
    door = Door(FakeGenerates(script))
    operation = door.get("/openapi.json").json["paths"][path]["post"]
    described = jsonschema.Draft202012Validator(operation["responses"]["200"]["content"]["text/event-stream"]["schema"])
    answer = door.post(path, STREAMS[path] | {"stream": True})
    assert answer.status == 200, answer.text
    seen = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        seen.append(dict(line.split(": ", 1) for line in frame.split("\n")))
        described.validate(seen[-1])
        *_, brings = (each for each in described.schema["properties"]["data"]["anyOf"] if "contentSchema" in each)
        if seen[-1]["data"] != "[DONE]":
            told = {"additionalProperties": False}
            schemas = [each | told for each in brings["contentSchema"]["anyOf"]]
            jsonschema.validate(json.loads(seen[-1]["data"]), {"anyOf": schemas})
    assert len(seen) >= 3


def test_a_stop_string_that_a_forced_call_ignores_is_described_where_tools_are_taken(server: Running) -> None:
    described = server.ask("GET", "/openapi.json").json
    told = set()
    for path, operations in described["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        body = described["components"]["schemas"].get(name, {}).get("properties", {})
        for field in {"stop", "stop_sequences"} & body.keys():
            if "tools" in body:
                told.add(path)
            assert ("tool_choice" in body[field].get("description", "")) == ("tools" in body), path
    assert told >= {"/v1/chat/completions", "/v1/responses", "/v1/messages"}


def test_an_open_server_does_not_say_that_it_wants_a_key(server: Running) -> None:
    described = server.ask("GET", "/openapi.json").json
    assert "security" not in described
    assert "securitySchemes" not in described["components"]


# ---- settings ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"port": 65536}, {"host": "0.0.0.0"}, {"host": "::"}, {"host": ""}, {"host": "192.168.1.5"},
        {"host": "127.evil.example"}, {"tls_key": "k"}, {"tls_certificate": "c"}, {"api_keys": ("",)}, {"api_keys": ("short",)},
        {"api_keys": ("with space",)}, {"api_keys": ("schlüssel",)}, {"max_requests": 0}, {"max_body_bytes": 0},
        {"idle_seconds": 0.0}, {"drain_seconds": -1.0}, {"ping_seconds": math.nan}, {"request_seconds": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeSettings(**wrong)


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("max_body_bytes", "--max-body"), ("max_requests", "--max-requests"), ("idle_seconds", "--idle-timeout"),
        ("request_seconds", "--timeout"), ("drain_seconds", "--drain-timeout"), ("ping_seconds", "--ping-interval"),
    ],
)  # fmt: skip
def test_what_is_refused_is_called_as_it_was_written(field: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option} must be "):
        ServeSettings(**{field: 0})  # type: ignore[arg-type]


def test_without_a_key_only_this_machine_is_served() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert ServeSettings(host=host).is_private
    with pytest.raises(UsageError, match=r"0\.0\.0\.0") as refused:
        ServeSettings(host="0.0.0.0")
    assert "--api-key" in str(refused.value.hint)
    assert dataclasses.replace(ServeSettings(api_keys=(KEY,)), host="0.0.0.0").host == "0.0.0.0"
