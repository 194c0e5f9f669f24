"""Requests of this process to its own application, answered as they would be over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from fastapi import FastAPI

from nanovllm_cli.server.middleware import ADMITTED

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
    """An application's. tenant: whose key a request counts as having."""

    def __init__(self, app: FastAPI, tenant: str | None = None) -> None:
        self._app = app
        self._own = {ADMITTED: tenant}

    async def post(self, path: str, body: Any) -> Answered:
        """An answer as a whole, whatever its status. path: as clients have it, with its /v1. Where too much is under way it
        waits, and, as often as MOST_RETRIES says, for an engine that is started again."""
        content = json.dumps(body).encode()
        retries = 0
        while (answered := await self._post(path, content)).status in (429, 503):
            retries += answered.status == 503
            if retries > MOST_RETRIES or is_of_the_end(answered.status, answered.body):
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

        scope = _SCOPE | self._own | {"path": path, "raw_path": path.encode()}
        length = (b"content-length", str(len(content)).encode())
        await self._app(scope | {"headers": [*_HEADERS, length]}, receive, send)
        return Answered(status, request_id, bytes(answer))


def is_of_the_end(status: int, body: bytes) -> bool:
    """Whether this is what a server says that is about to end."""
    return status == 503 and b'"draining"' in body
