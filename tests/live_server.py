"""A real server: a process of its own, a port of its own, an engine behind it.

    @pytest.fixture(scope="module")
    def server() -> Iterator[LiveServer]:
        with live_server("tiny", "--max-num-seqs", "8") as server:
            yield server
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forked import Forked

START_SECONDS = 240.0
END_SECONDS = 30.0
_ADDRESS = re.compile(r"https?://[0-9a-z.:\[\]]+:\d+")


@dataclass
class LiveServer:
    """url: its address, without a slash at the end. log: what it has written so far."""

    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's API are given."""
        return self.url + "/v1"

    def line(self, start: str) -> str:
        """A line of the log that begins so; it may still be on its way."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for line in list(self.log):
                if line.startswith(start):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no line began with {start!r}:\n" + "".join(self.log))

    def get(self, path: str) -> tuple[int, Any]:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"content-type": "application/json"}))

    def _ask(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


@contextlib.contextmanager
def live_server(model: str, *options: str, env: dict[str, str] | None = None) -> Iterator[LiveServer]:
    """`nanovllm serve MODEL`, ready; ended by SIGTERM. env: with one, it is a Python of its own, whose imports see that."""
    command = [sys.executable, "-m", "nanovllm_cli", "serve", model, "--port", "0", *options]
    start = Forked if env is None else subprocess.Popen
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})})
    lines: queue.Queue[str | None] = queue.Queue()
    log: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        server = LiveServer(_address(lines, log), process, log)
        _wait_until_healthy(server)
        yield server
    except BaseException:
        print("".join(log))  # which pytest shows where a test failed
        raise
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(END_SECONDS)


def _address(lines: queue.Queue[str | None], log: list[str]) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            line = None
        if line is None:
            raise AssertionError("the server did not start:\n" + "".join(log))
        if found := _ADDRESS.search(line):
            return found.group()


def _wait_until_healthy(server: LiveServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(OSError):
            if server.get("/health")[0] == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the server did not get ready:\n" + "".join(server.log))
