"""What one request may cost the others: texts that can't fit are not read, what is over is not kept, and nobody waits unseen."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import time
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from http_server import Answer, Running, running
from nanovllm_cli.server import logprobs, sse
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.exchange import Exchange
from nanovllm_cli.server.ports import Caller, ChatAsked, ServedModel
from nanovllm_cli.server.routing import api_router
from nanovllm_cli.server.schemas_common import Tolerated
from nanovllm_cli.server.schemas_openai import ChatRequest
from nanovllm_cli.server.schemas_responses import ResponsesRequest
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.scoring import Scoring, in_a_row
from server_fakes import CONTEXT_LEN, MODEL, FakeGenerates, FakeGeneration, FakeModels, FakePool, Script
from test_server_openai_texts import with_tokens

HI = [{"role": "user", "content": "hi"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": HI, "stream": True},
    "/v1/responses": {"model": MODEL, "input": "hi", "stream": True},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 5, "stream": True},
    "/api/chat": {"model": MODEL, "messages": HI},
}


class SlowModels(FakeModels):
    """Which nobody gets before `ready` is set, in the server's loop; waiting: how many do."""

    waiting = 0

    def __init__(self, *names: str, **how: Any) -> None:
        super().__init__(*names, **how)
        self.is_ready = False

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        self.waiting += 1
        try:
            while not self.is_ready:
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        async with super().use(name) as model:
            yield model

    peek = use


def context_of(models: FakeModels, script: Script | None = None, **settings: Any) -> ServerContext:
    return ServerContext(ServeSettings(port=0, **settings), models, FakeGenerates(script, models=models), FakePool())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- waiting for a model ----


@pytest.mark.parametrize("path", DOORS)
def test_a_stream_shows_life_while_its_model_loads_and_ends_with_its_client(path: str) -> None:
    models = SlowModels()
    context = context_of(models, ping_seconds=0.05)
    with running(context.settings, context) as server:
        content = json.dumps(DOORS[path]).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        with server.connect() as sock:
            sock.sendall(head.encode() + b"\r\n\r\n" + content)
            assert b" 200 " in sock.recv(4096)
            assert models.waiting == 1
        until(lambda: models.waiting == 0)
        assert context.generates.generations == []  # type: ignore[attr-defined]
        models.is_ready = True
        answer = server.ask("POST", path, DOORS[path])
        assert b"there" in answer.body


@pytest.mark.parametrize("behind", [b"", b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["alone", "pipelined"])
@pytest.mark.parametrize("path", DOORS)
def test_a_whole_answer_is_waited_for_no_longer_than_its_client_does(path: str, behind: bytes) -> None:
    """behind: what the client has sent besides, and waits for its turn."""
    models = SlowModels()
    context = context_of(models)
    with running(context.settings, context) as server:
        content = json.dumps(DOORS[path] | {"stream": False}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        with server.connect() as sock:
            sock.sendall(head.encode() + b"\r\n\r\n" + content + behind)
            until(lambda: models.waiting == 1)
        until(lambda: models.waiting == 0)


# ---- a limit in the middle of a stream ----


@pytest.mark.parametrize(("path", "last"), [
    ("/v1/chat/completions", b"data: [DONE]\n\n"), ("/v1/responses", b"\n\n"), ("/v1/messages", b"\n\n"), ("/api/chat", b"}\n"),
])  # fmt: skip
def test_a_stream_past_its_time_ends_with_an_error(path: str, last: bytes) -> None:
    script = Script.of("Hello", " there", waits=asyncio.Event(), waits_at=1)
    context = context_of(FakeModels(), script, request_seconds=1.0)
    with running(context.settings, context) as server:
        answer = server.ask("POST", path, DOORS[path])
        assert answer.status == 200
        assert b"Hello" in answer.body
        assert b"not answered within 1 seconds" in answer.body
        assert answer.body.endswith(last)
        if path == "/v1/responses":
            told = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: ")]
            assert [each["sequence_number"] for each in told] == list(range(len(told)))
            assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.failed", "failed")
        (generation,) = context.generates.generations  # type: ignore[attr-defined]
        assert generation.closed


@pytest.mark.parametrize("path", DOORS)
def test_the_log_tells_of_a_stream_that_failed_in_the_middle(path: str, caplog: pytest.LogCaptureFixture) -> None:
    script = Script.of("Hello", finish=None, error=ApiError(503, "it died", code="engine_died"))
    context = context_of(FakeModels(), script)
    with running(context.settings, context) as server, caplog.at_level(logging.INFO, "nanovllm_cli.server.logs"):
        assert b"it died" in server.ask("POST", path, DOORS[path]).body
        until(lambda: bool(caplog.records))
    assert [record.fields["error"] for record in caplog.records] == ["engine_died"]  # type: ignore[attr-defined]


def test_the_log_has_more_of_a_streams_unforeseen_failure_under_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    path, failure = "/v1/chat/completions", ValueError("of a library")
    context = context_of(FakeModels(), Script.of("Hello", finish=None, error=failure))  # type: ignore[arg-type]
    with running(context.settings, context) as server, caplog.at_level(logging.ERROR, "nanovllm_cli"):
        told = server.ask("POST", path, DOORS[path], x_request_id="mine-1").body
    assert b"the server's log has more" in told
    assert b"of a library" not in told
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]  # no access log
    assert errors == ["request mine-1 failed: ValueError"]


def test_a_stream_that_has_said_nothing_by_then_is_an_error() -> None:
    routes = api_router()

    async def frames() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    context = context_of(FakeModels(), request_seconds=0.1)

    @routes.get("/silent")
    async def silent() -> Response:
        return context.stream(frames())

    with running(context.settings, context, routes) as server:
        answer = server.ask("GET", "/silent")
        assert (answer.status, answer.error["code"]) == (503, "timeout")


@pytest.mark.parametrize("write_seconds", [0.3, 30.0])
def test_a_client_that_takes_nothing_holds_no_connection_past_the_limit(
    write_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "LAST_WORDS_SECONDS", 0.3)
    script = Script.of(*["x" * 20_000] * 3000)
    context = context_of(FakeModels(), script, request_seconds=0.5, write_seconds=write_seconds)
    content = json.dumps(DOORS["/v1/chat/completions"]).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running(context.settings, context) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: bool(server.server.server_state.connections))
        until(lambda: not server.server.server_state.connections)
        assert all(each.closed for each in context.generates.generations)  # type: ignore[attr-defined]


def test_what_no_model_is_needed_for_is_refused_at_once() -> None:
    models = SlowModels()
    context = context_of(models, ping_seconds=0.05)
    tool = {"name": "a", "input_schema": {"type": "object"}}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {"tools": [tool, tool]}), ("/v1/messages", {"thinking": {"type": "enabled"}}),
        ("/v1/responses", {"top_logprobs": 1, "tools": [{"type": "function", "name": "a", "parameters": {}}]}),
    ]  # fmt: skip
    with running(context.settings, context) as server:
        for path, fields in wrong:
            assert server.ask("POST", path, DOORS[path] | fields).status == 400


def test_a_stream_in_time_is_as_ever() -> None:
    context = context_of(FakeModels(), request_seconds=20)
    with running(context.settings, context) as server:
        assert server.ask("POST", "/v1/chat/completions", DOORS["/v1/chat/completions"]).body.endswith(b"[DONE]\n\n")


# ---- what is over ----


def test_a_connection_that_stays_keeps_nothing_of_its_last_answer() -> None:
    context = context_of(FakeModels())
    with running(context.settings, context) as server, server.connect() as sock:
        content = json.dumps(DOORS["/v1/chat/completions"] | {"stream": False}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        assert b"there" in sock.recv(65536)

        def kept() -> int:
            return sum(len(each._generations) for each in gc.get_objects() if type(each) is Exchange)

        until(lambda: kept() == 0)


class Forgetful(FakeGenerates):
    async def encode_chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> list[int]:
        return [65]

    async def _begin(self, *args: Any) -> FakeGeneration:
        generation = await super()._begin(*args)
        self.asked.clear()
        return generation


URL = {"url": "data:image/png;base64," + "A" * (2 << 20)}
SEEN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": URL}]}]},
    "/v1/responses": {"store": False, "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": URL["url"]}]}]},
    "/v1/messages": {"max_tokens": 5, "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", **URL}}]}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi", "images": [URL["url"]]}]},
    "/api/generate": {"prompt": "hi", "images": [URL["url"]]},
}  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", SEEN)
def test_images_do_not_wait_for_the_end_of_the_answer(path: str, stream: bool) -> None:
    models = FakeModels()
    script = Script.of("Hello", " there", waits=asyncio.Event(), waits_at=1)
    generates = Forgetful(script, models)
    context = ServerContext(ServeSettings(port=0), models, generates, FakePool())
    with running(context.settings, context) as server, server.connect() as sock:
        server.ask("GET", "/-")  # routes are made with the first request
        content = json.dumps({"model": MODEL, "stream": stream} | SEEN[path]).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        tracemalloc.start()
        try:
            sock.sendall(head.encode() + b"\r\n\r\n" + content)
            until(lambda: bool(generates.generations) and generates.generations[0]._drawn > 0)
            until(lambda: tracemalloc.get_traced_memory()[0] < 1 << 20)
        finally:
            tracemalloc.stop()


def test_what_has_no_effect_is_not_kept() -> None:
    given = {"user": "x" * 1000, "prediction": {"content": "y"}, "metadata": {"a": "b"}}
    body = ChatRequest.model_validate({"messages": HI, **given})
    assert (body.user, body.prediction, body.metadata) == (None, None, None)
    assert TypeAdapter(Tolerated).validate_python([1, 2]) is None


# ---- texts that can't fit ----


def counting(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of texts that were tokenized from now on."""
    lengths: list[int] = []
    encode = tokenizer.encode

    def counted(text: str, **how: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **how)

    monkeypatch.setattr(tokenizer, "encode", counted)
    return lengths


@pytest.mark.parametrize(("path", "body"), [
    ("/infill", {"input_prefix": "LONG", "input_suffix": "b"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "LONG"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": "LONG"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c", "text": "LONG"}]}),
    ("/v1/completions", {"prompt": "a", "suffix": "LONG"}),
    ("/v1/completions", {"prompt": "LONG", "suffix": "b"}),
    ("/v1/completions", {"prompt": [65, 66], "suffix": "LONG"}),
    ("/api/generate", {"prompt": "LONG", "suffix": "b"}),
])  # fmt: skip
def test_a_middle_whose_surroundings_can_not_fit_is_not_tokenized(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    context = context_of(FakeModels(tokenizer=tokenizer))
    long = "x" * (CONTEXT_LEN * 4 * tokenizer.longest_token + 1)
    said = json.loads(json.dumps({"model": MODEL, **body}).replace("LONG", long))
    lengths = counting(tokenizer, monkeypatch)
    with running(context.settings, context) as server:
        answer = server.ask("POST", path, said)
    assert answer.status == 400, answer
    assert b"maximum context length" in answer.body
    assert max(lengths, default=0) < 100


def ranking() -> FakeModels:
    models = FakeModels(tokenizer=byte_tokenizer())
    models.served[MODEL] = replace(models.served[MODEL], scoring=Scoring("identity", in_a_row))
    return models


def reranked(server: Running, query: str, documents: list[str], **more: Any) -> Answer:
    return server.ask("POST", "/v1/rerank", {"model": MODEL, "query": query, "documents": documents, **more})


def test_a_query_that_can_not_fit_is_read_for_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ranking()
    context = context_of(models)
    lengths = counting(models.served[MODEL].tokenizer, monkeypatch)
    with running(context.settings, context) as server:
        for query, documents, more in (
            ("q" * (1 << 20), ["a"] * 100, {}), ("q", ["a" * (1 << 20)], {}),
            ("q" * (1 << 20), ["a"] * 100, {"truncate_prompt_tokens": 100}),
        ):  # fmt: skip
            answer = reranked(server, query, documents, **more)
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert sum(lengths) == 0
        answer = reranked(server, "q" * (CONTEXT_LEN - 1), [*["a"] * 40, "ab", *["a"] * 400])
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert len(lengths) < 200  # none far behind the one that is too long


def test_many_pairs_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ranking()
    context = context_of(models)
    generates: Any = context.generates
    monkeypatch.setattr("nanovllm_cli.server.routes_embeddings._TOKENS_AT_ONCE", 200)
    with running(context.settings, context) as server:
        documents = [f"{'x' if i % 3 else 'y'}{i}" for i in range(70)]
        answer = reranked(server, "q", documents)
        assert answer.status == 200
        assert sorted(each["index"] for each in answer.json["results"]) == list(range(70))
        assert 1 < len(generates.mosts) <= 5
        assert answer.json["usage"]["prompt_tokens"] == sum(1 + len(each) for each in documents)


# ---- log-probabilities of prompts ----


def test_log_probabilities_of_all_prompts_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MOST_PROMPT_LOGPROBS", 60)
    context = context_of(FakeModels(), Script.of("x", prompt_logprobs=[None] * 10))
    with running(context.settings, context) as server:
        for prompts, status in ([["a" * 10, "b" * 10], 200], [["a" * 10, "b" * 10, "c"], 400]):
            answer = server.ask("POST", "/v1/completions", {"model": MODEL, "prompt": prompts, "prompt_logprobs": 2})
            assert answer.status == status, answer
        assert answer.error["param"] == "prompt_logprobs"
        assert all(each.closed for each in context.generates.generations)  # type: ignore[attr-defined]


def test_log_probabilities_of_one_prompt_have_the_same_bound() -> None:
    from nanovllm_cli.sampling_params import SamplingParams

    most = logprobs.MOST_PROMPT_LOGPROBS
    logprobs.check_prompt_logprobs(most, SamplingParams())
    logprobs.check_prompt_logprobs(most // 2, SamplingParams(prompt_logprobs=1))
    with pytest.raises(ApiError, match="more than one request may ask for") as caught:
        logprobs.check_prompt_logprobs(most // 2 + 1, SamplingParams(prompt_logprobs=1))
    assert (caught.value.status, caught.value.param) == (400, "prompt_logprobs")


# ---- errors, one by one ----


@pytest.mark.parametrize(("model", "body"), [
    (ChatRequest, {"messages": HI, "modalities": [1] * 10_000}),
    (ResponsesRequest, {"input": "hi", "metadata": {str(i): 0 for i in range(10_000)}}),
])  # fmt: skip
def test_many_wrong_entries_are_one_error(model: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1
