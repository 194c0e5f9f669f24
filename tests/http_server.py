"""Not tests: the server's HTTP side with stand-ins behind it, on a port of this machine, and a client that may say anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.listen import Listener, listen
from nanovllm_cli.server.run import HttpServer, http_config
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakeModels, FakePool


class Answer(NamedTuple):
    """closed: the server ended the connection behind it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error


class Running(NamedTuple):
    listener: Listener
    server: HttpServer
    context: ServerContext

    @property
    def port(self) -> int:
        port: int = self.listener.sockets[0].getsockname()[1]
        return port

    def connect(self, tls: ssl.SSLContext | None = None) -> socket.socket:
        if self.listener.unix_path is not None:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(20)
            sock.connect(str(self.listener.unix_path))
            return sock
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname="localhost")

    def say(self, data: bytes, tls: ssl.SSLContext | None = None) -> Answer:
        """One answer to these bytes, on a connection of its own."""
        with self.connect(tls) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
            return read_answer(sock, has_body=not data.startswith(b"HEAD "))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """body: bytes as they are, else JSON. Headers by their names with _ for -."""
        fields = {"host": "localhost"} | {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        if body is not None:
            fields = {"content-type": "application/json", "content-length": str(len(content))} | fields
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return self.say(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)


@contextlib.contextmanager
def running(settings: ServeSettings | None = None, context: ServerContext | None = None, routes: Any = None) -> Iterator[Running]:
    """A server in a thread. routes: another router, for tests that need a route of their own."""
    settings = settings or ServeSettings(port=0)
    models = FakeModels()
    context = context or ServerContext(settings, models, FakeGenerates(models=models), FakePool())
    app = create_app(context)
    if routes is not None:
        app.include_router(routes)
    listener = listen(settings)
    server = HttpServer(http_config(app, settings), settings.header_seconds)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def serve() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(listener.sockets))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Running(listener, server, context)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listener.close()


def read_answer(sock: socket.socket, *, has_body: bool = True) -> Answer:
    """Reads one answer with a content-length, or chunks; status 0 where the connection ended without one."""
    file = sock.makefile("rb")
    try:
        line = file.readline()
        if not line:
            return Answer(0, {}, b"", True)
        headers = {}
        while (field := file.readline().strip()):
            name, _, value = field.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = b""
        if not has_body:
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(file.readline() or b"0", 16):
                body += file.read(size)
                file.readline()
        else:
            body = file.read(int(headers.get("content-length", 0)))
        return Answer(int(line.split()[1]), headers, body, headers.get("connection") == "close")
    except ConnectionResetError:
        return Answer(0, {}, b"", True)
