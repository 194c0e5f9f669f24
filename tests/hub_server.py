"""A hub of a few repositories on 127.0.0.1, with the failures of a real one; and a client in a process of its own.

It speaks what `huggingface_hub` asks for: `/api/models/REPO/revision/REV` and `/REPO/resolve/REV/FILE` with ETag,
X-Repo-Commit and Range; and it lies, where a test says so. The client is a child, because `huggingface_hub` reads HF_ENDPOINT
when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forked import Forked

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 20  # files from here on have a SHA-256 for an ETag, as those in LFS


class Hub:
    """`repos`: name -> path -> content. `refuse`: name -> (status, X-Error-Code). `drops`: path -> after how many bytes
    each further answer breaks off. `moved`: path of an URL -> where that is now. `lies`: file -> headers in place of its own,
    "" for none. `listed`: what it gives for any listing. `log`: (method, path, Range) of every request. `served`: bytes of
    content sent."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.commit = COMMIT
        self.refuse: dict[str, tuple[int, str]] = {}
        self.drops: dict[str, list[int]] = {}
        self.reset = False  # break off with RST, not FIN
        self.ignore_range = False
        self.has_xet = False  # says of large files that they are to be had by Xet
        self.corrupt: set[str] = set()
        self.fail_status: int | None = None
        self.moved: dict[str, str] = {}
        self.lies: dict[str, dict[str, str]] = {}
        self.listed: bytes | None = None
        self.tokens: set[str] = set()
        self.log: list[tuple[str, str, str | None]] = []
        self.served = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def paths(self, method: str | None = None) -> list[str]:
        return [path for kind, path, _ in self.log if method in (None, kind)]

    def downloaded(self) -> set[str]:
        return {path.split(f"/resolve/{self.commit}/")[1] for path in self.paths("GET") if "/resolve/" in path}

    def forget(self) -> None:
        self.log.clear()
        self.served = 0

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = self.path.partition("?")[0]
                with hub.lock:
                    hub.log.append((self.command, path, self.headers.get("Range")))
                    hub.tokens.add(self.headers.get("Authorization") or "")
                if hub.fail_status is not None:
                    return self.send(hub.fail_status, b"{}")
                if path in hub.moved:
                    return self.send(307, b"", {"Location": hub.moved[path]})
                api = re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path)
                file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
                match = api or file
                repo = match[1] if match else ""
                if repo not in hub.repos:
                    return self.send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
                if repo in hub.refuse and not (api and hub.refuse[repo][1] == "GatedRepo"):
                    status, code = hub.refuse[repo]
                    return self.send(status, b'{"error": "no"}', {"X-Error-Code": code} if code else {})
                assert match is not None
                if (match[2] or "main") not in ("main", hub.commit):
                    return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                if api:
                    listed = hub.listed or json.dumps(self.listing(repo)).encode()
                    return self.send(200, listed, {"Content-Type": "application/json"})
                assert file is not None
                if file[3] not in hub.repos[repo]:
                    return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit})
                self.content(file[3], hub.repos[repo][file[3]], body)
                return None

            def listing(self, repo: str) -> dict[str, Any]:
                siblings = []
                for path, data in hub.repos[repo].items():
                    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": etag(data)[:40]}
                    if len(data) >= LARGE:
                        entry["lfs"] = {"sha256": etag(data), "size": len(data), "pointerSize": 134}
                    siblings.append(entry)
                return {
                    "id": repo,
                    "modelId": repo,
                    "sha": hub.commit,
                    "private": False,
                    "tags": [],
                    "siblings": siblings,
                }

            def content(self, path: str, data: bytes, body: bool) -> None:
                headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
                if hub.has_xet and len(data) >= LARGE:
                    headers |= {"X-Xet-Hash": etag(data), "X-Xet-Refresh-Route": f"{hub.url}/xet-token"}
                if path in hub.corrupt:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                first, status = 0, 200
                end = len(data)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                if wanted and not hub.ignore_range:
                    first, status = int(wanted[1]), 206
                    end = min(end, int(wanted[2]) + 1) if wanted[2] else end
                    if first >= len(data):
                        return self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
                rest = data[first:end]
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(rest)), **hub.lies.get(path, {})}.items():
                    if value:
                        self.send_header(key, value)
                self.end_headers()
                if body:
                    with hub.lock:
                        stop = hub.drops[path].pop(0) if hub.drops.get(path) else None
                    sent = rest if stop is None else rest[:stop]
                    self.wfile.write(sent)
                    self.wfile.flush()
                    with hub.lock:
                        hub.served += len(sent)
                    if stop is not None:
                        self.break_off()
                return None

            def break_off(self) -> None:
                if hub.reset:
                    time.sleep(0.3)  # a reset drops what the client has not read yet
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                else:
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

            def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def finish(self) -> None:
                with suppress(OSError):  # the connection was broken off on purpose
                    super().finish()

        return Handler


def etag(data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    return digest if len(data) >= LARGE else digest[:40]


@contextmanager
def serving(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repos)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join(10)


_CLIENT = """
import json, sys, time
arguments = json.loads(sys.argv[1])
setup = arguments.pop("setup", "")
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.weights import hub, source
hub.RETRY_WAITS = (0.05, 0.05, 0.05, 0.05)
exec(setup)
class Progress:
    events = []
    def stage(self, name, total, unit): self.events.append(["stage", name, total, unit])
    def advance(self, n): self.events.append(["advance", n])
    def done(self): self.events.append(["done"])
    def note(self, message): self.events.append(["note", message])
try:
    model = source.resolve(arguments.pop("name"), progress=Progress(), **arguments)
    result = {"path": str(model.path), "repo": model.repo, "revision": model.revision, "quant": model.quant,
              "num_bytes": model.num_bytes, "format": model.format, "text": str(model)}
except NanovllmError as error:
    result = {"error": type(error).__name__, "exit_code": error.exit_code, "message": error.message, "hint": error.hint}
result["events"] = Progress.events
result["imported"] = [name for name in ("torch", "huggingface_hub") if name in sys.modules]
print(json.dumps(result))
"""


def environment(home: Path, url: str, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "PROXY" not in key.upper()}
    ours = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **ours, "DO_NOT_TRACK": "1", **more}


def start_client(
    home: Path, url: str, name: str, env: dict[str, str] | None = None, **arguments: Any
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CLIENT, json.dumps({"name": name, **arguments})]
    return Forked(
        command, light=True, env=environment(home, url, **(env or {})), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish_client(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors, errors
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def client(home: Path, url: str, name: str, env: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """`source.resolve(name, **arguments)` in a child: the model's fields or the error's, and what was reported."""
    return finish_client(start_client(home, url, name, env, **arguments))
