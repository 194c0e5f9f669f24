"""Requests to the server's application without a socket between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from starlette.testclient import TestClient

from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakeModels, FakePool


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


class Stage:
    """Whatever stands on it."""

    def __init__(self, standing: Any) -> None:
        self.standing = standing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.standing, name)


class Door:
    """An application over stand-ins. It is made once: which stand-ins are behind it changes with each request."""

    def __init__(self, generates: FakeGenerates, pool: FakePool | None = None) -> None:
        self._behind = (generates.models, generates, pool or FakePool())

    def get(self, path: str) -> Answer:
        answer = _application()[0].get(path)
        return Answer(answer.status_code, answer.headers, answer.text)

    def post(self, path: str, body: Any) -> Answer:
        """body: JSON, or bytes as they are."""
        client, stages = _application()
        for stage, standing in zip(stages, self._behind, strict=True):
            stage.standing = standing
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        return Answer(answer.status_code, answer.headers, answer.text)


@cache
def _application() -> tuple[TestClient, tuple[Any, Any, Any]]:
    models, generates, pool = Stage(FakeModels()), Stage(FakeGenerates()), Stage(FakePool())
    app = create_app(ServerContext(ServeSettings(), models, generates, pool))  # type: ignore[arg-type]
    return TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False), (models, generates, pool)
