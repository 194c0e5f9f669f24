"""Requests to the server's application without a socket between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient

from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakePool


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    def events(self, errors: bool = False) -> list[dict[str, Any]]:
        """The data of a stream's events, which must end as OpenAI's streams do. errors: they may be among them."""
        frames = self.text.removesuffix("\n\n").split("\n\n")
        assert frames[-1] == "data: [DONE]"
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
        assert errors or not any("error" in event for event in events)
        return events


class Door:
    """An application over stand-ins."""

    def __init__(self, generates: FakeGenerates, pool: FakePool | None = None, **settings: Any) -> None:
        context = ServerContext(ServeSettings(**settings), generates.models, generates, pool or FakePool())
        self._client = TestClient(create_app(context), base_url="http://127.0.0.1:8080", raise_server_exceptions=False)

    def post(self, path: str, body: Any) -> Answer:
        """body: JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = self._client.post(path, content=content, headers={"content-type": "application/json"})
        return Answer(answer.status_code, answer.headers, answer.text)
