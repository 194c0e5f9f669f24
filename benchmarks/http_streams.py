"""What the server's benchmarks share: a server that is started and ended here, and a client that costs little.

The client runs on the cores that it measures, so it reads no more than it must: a protocol on uvloop that looks for the status,
the first text, and the usage at the end. It is the same for every server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "old", "roofs", "and",
    "nobody", "says", "a", "word",
]  # fmt: skip
_TEXT = re.compile(rb'"content":"[^"]')
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_TAIL = 1 << 11

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@dataclass
class Answer:
    """Seconds count from when the request was written. tokens: what the server says that it drew."""

    status: int = 0
    tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    ended: bool = False


class Server:
    """`nanovllm serve`, started and ended here."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "nanovllm_cli", "serve", model, "--port", "0", *options]
        environment = {"PYTHONPATH": str(REPOSITORY / "src")}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | environment, text=True)
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            sys.stderr.write(line)
            if "http://" in line and not self.port:
                self.port = int(line.split("http://", 1)[1].split("/")[0].split()[0].rsplit(":", 1)[1])
            if self.port:
                break
        stream = self.process.stderr
        threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()
        self.root = psutil.Process(self.process.pid)

    @property
    def engine(self) -> psutil.Process:
        return next(child for child in self.root.children() if "engine_process" in " ".join(child.cmdline()))

    def processor_seconds(self) -> dict[str, float]:
        """Used so far by HTTP and by the engine."""
        return {name: sum(each.cpu_times()[:2]) for name, each in (("http", self.root), ("engine", self.engine))}

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def wait_ready(port: int, seconds: float = 120.0) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if (await get(port, "/health"))[0] == 200:
                return time.monotonic() - began
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server did not get ready")


async def get(port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    return int(data.split(b" ", 2)[1]), data.partition(b"\r\n\r\n")[2]


def body(seed: int, tokens: int, **more: Any) -> bytes:
    """A chat of a few words, whose answer has so many tokens."""
    chosen = random.Random(seed)
    text = " ".join(chosen.choice(WORDS) for _ in range(chosen.randint(4, 24)))
    request = {
        "model": more.pop("model", "tiny"), "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "seed": seed, **more,
    }  # fmt: skip
    return json.dumps(request).encode()


async def stream(port: int, data: bytes, leave_after: float | None = None, leave_at: int | None = None) -> Answer:
    """One chat completion. leave_after: seconds after which the connection is dropped; leave_at: or the read with which it is."""
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(lambda: _Client(data, loop, leave_at), "127.0.0.1", port)
    leaving = None if leave_after is None else loop.call_later(leave_after, transport.abort)
    await client.over
    if leaving is not None:
        leaving.cancel()
    return client.answer


class _Client(asyncio.Protocol):
    def __init__(self, data: bytes, loop: asyncio.AbstractEventLoop, leave_at: int | None) -> None:
        self.answer = Answer()
        self._reads_left = leave_at
        self.over: asyncio.Future[None] = loop.create_future()
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(data), data)
        )
        self._tail = b""
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._began = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer.first is None:
            if not answer.status:
                answer.status = int(data[9:12])
            if _TEXT.search(self._tail + data):
                answer.first = time.monotonic() - self._began
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        if self._reads_left is not None:
            self._reads_left -= 1
            if not self._reads_left:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self.answer
        answer.seconds = time.monotonic() - self._began
        answer.ended = b"[DONE]" in self._tail or answer.status not in (0, 200)
        if usage := _USAGE.findall(self._tail):
            answer.tokens = int(usage[-1])
        if not self.over.done():
            self.over.set_result(None)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class HealthWatch:
    """Asks for /health twenty times a second in a process of its own, so that a busy client does not count."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-S", "-c", _WATCH, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> list[float]:
        """Seconds that each took."""
        return list(map(float, self._process.communicate(b"\n")[0].split()))


_WATCH = """
import select, socket, sys, time
while not select.select([sys.stdin], [], [], 0.05)[0]:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
        sock.sendall(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
        data = b""
        while piece := sock.recv(65536):
            data += piece
    assert data.startswith(b"HTTP/1.1 200"), data
    print(time.monotonic() - began)
"""
