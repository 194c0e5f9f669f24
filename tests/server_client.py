"""The server's application behind a client, without sockets: what it answers, and the named events of its streams."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.testclient import TestClient

from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakePool

REQUEST_ID = "request-of-the-test"


class StreamedEvent(NamedTuple):
    name: str | None
    data: Any


class ServerClient:
    """`generates` as its engine. key: the API key that it sends. Clients with the same settings share one application (making one
    takes half a second), whose stand-ins are the last client's."""

    def __init__(self, generates: FakeGenerates, **settings: Any) -> None:
        self.generates, self.pool = generates, FakePool()
        self.key: str | None = None
        key = tuple(settings.items())
        _stand_ins(key).update(models=generates.models, generates=generates, pool=self.pool)
        self._http = _application(key)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """The answer's JSON."""
        return self._answer("POST", path, status, json=body)

    def get(self, path: str, status: int = 200) -> Any:
        return self._answer("GET", path, status)

    def delete(self, path: str, status: int = 200) -> Any:
        return self._answer("DELETE", path, status)

    def fits(self, name: str, body: Any) -> bool:
        """Whether /openapi.json says that such a body of that name may be sent."""
        jsonschema = pytest.importorskip("jsonschema")
        described = {"$ref": f"#/components/schemas/{name}", **self.get("/openapi.json")}
        return bool(jsonschema.Draft202012Validator(described).is_valid(body))

    def stream(self, path: str, body: Any) -> list[StreamedEvent]:
        answer = self._http.post(path, json={**body, "stream": True}, headers=self._headers())
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        blocks = [block.split("\n") for block in answer.text.split("\n\n") if block and not block.startswith(":")]
        events = []
        for lines in blocks:
            fields = dict(line.split(": ", 1) for line in lines)
            events.append(StreamedEvent(fields.get("event"), json.loads(fields["data"])))
        return events

    def lines(self, path: str, body: Any) -> list[Any]:
        """Of a stream of JSON by lines."""
        answer = self._http.post(path, json=body, headers=self._headers())
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.text.endswith("\n")
        return [json.loads(line) for line in answer.text.splitlines()]

    def send(self, path: str, body: str, headers: dict[str, str]) -> httpx.Response:
        """With these headers and no others of its own."""
        return self._http.post(path, content=body, headers=headers)

    def _answer(self, method: str, path: str, status: int, **more: Any) -> Any:
        answer = self._http.request(method, path, headers=self._headers(), **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    def _headers(self) -> dict[str, str]:
        key = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return {"x-request-id": REQUEST_ID, **key}


Settings = tuple[tuple[str, Any], ...]


@cache
def _stand_ins(settings: Settings) -> dict[str, Any]:
    return {}


@cache
def _application(settings: Settings) -> TestClient:
    models, generates, pool = (_StandIn(_stand_ins(settings), name) for name in ("models", "generates", "pool"))
    app = create_app(ServerContext(ServeSettings(**dict(settings)), models, generates, pool))  # type: ignore[arg-type]
    return TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)


class _StandIn:
    """Whatever has this name at the moment."""

    def __init__(self, stand_ins: dict[str, Any], name: str) -> None:
        self._stand_ins, self._name = stand_ins, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stand_ins[self._name], name)
