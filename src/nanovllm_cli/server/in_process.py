"""The server's routes without a server: requests of this process, answered as they would be over HTTP, by one model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI

from nanovllm_cli.constrain.pool import CheckPool
from nanovllm_cli.server.app import build_routes, create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.messages import Facts, Loading
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.served_models import ModelSettings, ServedModels
from nanovllm_cli.server.settings import ServeSettings

MOST_RETRIES, RETRY_SECONDS = 10, 1.0
_SCOPE = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "query_string": b"",
    "root_path": "", "client": None, "server": None,
}  # fmt: skip
_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


class Answered(NamedTuple):
    """request_id: as logs call the request."""

    status: int
    request_id: str
    body: bytes


class Routes:
    """What answers. facts: of the model."""

    def __init__(self, app: FastAPI, facts: Facts) -> None:
        self._app = app
        self.facts = facts

    async def post(self, path: str, body: Any) -> Answered:
        """An answer as a whole, whatever its status. path: as clients have it, with its /v1. Where too much is under way it
        waits, and, as often as MOST_RETRIES says, for an engine that is started again."""
        content = json.dumps(body).encode()
        retries = 0
        while (answered := await self._post(path, content)).status in (429, 503):
            retries += answered.status == 503
            if retries > MOST_RETRIES:
                break
            await asyncio.sleep(RETRY_SECONDS)
        return answered

    async def _post(self, path: str, content: bytes) -> Answered:
        status, request_id, answer = 0, "", bytearray()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # this client does not leave
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                headers: dict[bytes, bytes] = dict(message["headers"])
                status, request_id = message["status"], headers[b"x-request-id"].decode()
            else:
                answer.extend(message.get("body", b""))

        scope = _SCOPE | {"path": path, "raw_path": path.encode()}
        length = (b"content-length", str(len(content)).encode())
        await self._app(scope | {"headers": [*_HEADERS, length]}, receive, send)
        return Answered(status, request_id, bytes(answer))


@asynccontextmanager
async def routes_of(
    model: ModelSettings, *, max_requests: int, max_body_bytes: int, on_loading: Callable[[str, Loading], None]
) -> AsyncIterator[Routes]:
    """Within, the model is loaded. max_requests: most that are under way at once. Raises what loading raises."""
    observer, pool = Observer(), CheckPool(max_waiting=max_requests)
    models = ServedModels([model], observer=observer, on_loading=on_loading)
    settings = ServeSettings(max_requests=max_requests, max_body_bytes=max_body_bytes)
    app = create_app(ServerContext(settings, models, Generator(pool, observer), pool, observer))
    try:
        await asyncio.gather(models.start(), build_routes(app))
        facts = models.engines()[model.names[0]].facts
        assert facts is not None, "it is loaded"
        yield Routes(app, facts)
    finally:
        await models.close()
        await pool.close()
