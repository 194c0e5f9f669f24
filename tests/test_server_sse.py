"""Event streams below HTTP: what is sent when, and that a client that leaves or stalls ends the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from starlette.requests import ClientDisconnect

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.sse import (
    ABORT,
    DONE,
    EVENTS,
    LINES,
    EventStream,
    data_frame,
    line_frame,
    named_frame,
    while_connected,
)


class Client:
    """The other end of an ASGI application. leave(): it closes the connection; reads: False takes nothing more."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._left = asyncio.Event()
        self.receive_calls = 0
        self.was_reset = False

    def leave(self) -> None:
        self._left.set()

    def reset(self) -> None:
        self.was_reset = True

    async def receive(self) -> dict[str, Any]:
        self.receive_calls += 1
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    async def until(self, text: bytes) -> None:
        while text not in self.body:
            await asyncio.sleep(0)

    async def run(self, stream: EventStream) -> None:
        async with asyncio.timeout(10):
            await stream({"type": "http", ABORT: self.reset}, self.receive, self.send)


class Source:
    """Frames that a test writes down: bytes, an exception, or an event to wait for. closed: its cleaning up ran."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.closed = False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.closed = True


def test_frames_are_json_behind_their_field() -> None:
    assert data_frame({"a": "\n"}) == b'data: {"a":"\\n"}\n\n'
    assert named_frame("x.y", [1]) == b"event: x.y\ndata: [1]\n\n"


def test_a_stream_is_sent_frame_by_frame_with_the_headers_of_an_event_stream() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(b"data: 1\n\n", b"data: 2\n\n")
        await client.run(EventStream(source.frames()))
        start, *bodies = client.sent
        assert start["status"] == 200
        assert dict(start["headers"]) == {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
        }
        assert [body["body"] for body in bodies] == [b"data: 1\n\n", b"data: 2\n\n", b""]
        assert [body["more_body"] for body in bodies] == [True, True, False]
        assert source.closed

    asyncio.run(scenario())


def test_a_failure_before_the_first_frame_is_raised_and_nothing_was_sent() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(ApiError(404, "no such model"))
        with pytest.raises(ApiError, match="no such model"):
            await client.run(EventStream(source.frames()))
        assert client.sent == []
        assert source.closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ApiError(503, "the engine died"), b'"the engine died","type":"service_unavailable_error"'),
        (ValueError("/secret/path"), b'"type":"server_error"'),
    ],
)
def test_a_failure_in_mid_stream_is_an_event_and_the_end(error: Exception, told: bytes) -> None:
    async def scenario() -> None:
        client, source = Client(), Source(b"data: 1\n\n", error)
        await client.run(EventStream(source.frames()))
        assert client.body.startswith(b'data: 1\n\ndata: {"error":{')
        assert told in client.body
        assert b"secret" not in client.body
        assert client.body.endswith(DONE)
        assert client.is_complete

    asyncio.run(scenario())


def test_the_form_of_an_error_can_be_another() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(b"data: 1\n\n", ApiError(503, "gone"))
        await client.run(EventStream(source.frames(), error_frames=lambda error: named_frame("error", error.message)))
        assert client.body == b'data: 1\n\nevent: error\ndata: "gone"\n\n'

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_the_work() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(b"data: 1\n\n", asyncio.Event(), b"data: 2\n\n")
        running = asyncio.create_task(client.run(EventStream(source.frames())))
        await client.until(b"1")
        client.leave()
        await running
        assert source.closed
        assert not client.is_complete
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_first_frame_ends_the_work() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(asyncio.Event())
        client.leave()
        await client.run(EventStream(source.frames()))
        assert client.sent == []

    asyncio.run(scenario())


def test_a_silent_stream_pings_and_then_an_error_is_an_event() -> None:
    async def scenario() -> None:
        client, more = Client(), asyncio.Event()
        source = Source(more, ApiError(503, "late"))
        running = asyncio.create_task(client.run(EventStream(source.frames(), ping_seconds=0.001)))
        await client.until(EVENTS.ping + EVENTS.ping)
        more.set()
        await running
        assert client.sent[0]["status"] == 200
        assert client.body.replace(EVENTS.ping, b"").startswith(b'data: {"error"')

    asyncio.run(scenario())


def test_a_silent_stream_of_lines_pings_within_its_next_line() -> None:
    """An empty line is no JSON to clients that parse each."""

    async def scenario() -> None:
        client, more = Client(), asyncio.Event()
        source = Source(line_frame({"a": 1}), more, line_frame({"b": "ü"}))
        running = asyncio.create_task(client.run(EventStream(source.frames(), ping_seconds=0.001, framing=LINES)))
        await client.until(b"\n  ")
        more.set()
        await running
        assert (b"content-type", b"application/x-ndjson") in client.sent[0]["headers"]
        assert [json.loads(line) for line in client.body.decode().splitlines()] == [{"a": 1}, {"b": "ü"}]

    asyncio.run(scenario())


def test_a_sign_of_life_that_comes_due_behind_the_end_is_not_sent() -> None:
    """It would be no HTTP, and cost the client its connection. On a busy machine one in ten did."""

    async def main() -> None:
        client, stream = Client(), EventStream(Source().frames(), ping_seconds=0.001)
        await stream._send(client.send, b"all")
        await stream._send(client.send, b"", more=False)
        await stream._send(client.send, EVENTS.ping)
        watch = asyncio.create_task(stream._watch_clock(client.send))
        await asyncio.sleep(0.02)
        assert not watch.done(), "it waits to be ended"
        watch.cancel()
        assert client.is_complete
        assert client.body == b"all"

    asyncio.run(main())


def test_a_client_that_takes_nothing_is_dropped() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(b"data: 1\n\n", b"data: 2\n\n")
        client.reads.clear()
        await client.run(EventStream(source.frames(), write_seconds=0.001))
        assert client.sent == []
        assert client.was_reset
        assert source.closed

    asyncio.run(scenario())


def test_a_slow_client_holds_its_source_back() -> None:
    async def scenario() -> None:
        client = Client()
        source = Source(*[b"data: %d\n\n" % i for i in range(100)])
        taken = []

        async def counted() -> AsyncGenerator[bytes, None]:
            async for frame in source.frames():
                taken.append(frame)
                yield frame

        client.reads.clear()
        running = asyncio.create_task(client.run(EventStream(counted())))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(taken) == 1
        client.reads.set()
        await running
        assert len(taken) == 100

    asyncio.run(scenario())


def test_work_ends_with_its_client_where_nothing_streams() -> None:
    class Request:
        def __init__(self, client: Client) -> None:
            self.receive = client.receive

    async def scenario() -> None:
        client, ended = Client(), []

        async def work() -> str:
            try:
                await asyncio.Event().wait()
                return ""
            finally:
                ended.append(True)

        running = asyncio.create_task(while_connected(Request(client), work()))  # type: ignore[arg-type]
        while not client.receive_calls:
            await asyncio.sleep(0)
        client.leave()
        with pytest.raises(ClientDisconnect):
            await running
        assert ended == [True]

        async def quick() -> str:
            return "done"

        assert await while_connected(Request(Client()), quick()) == "done"  # type: ignore[arg-type]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
