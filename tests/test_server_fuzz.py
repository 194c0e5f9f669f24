"""Requests made up from the server's own OpenAPI description, which it must be true to: those that fit it and those that don't.

A few of each for every operation, over stand-ins. `benchmarks/fuzz_server.py` makes hundreds, against a real server.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.schemas_common import SHORT
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakePool, Script, event

schemathesis = pytest.importorskip("schemathesis")

KEY = "a-key-for-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def _script(asked: Any) -> Script:
    """As many answers as were asked for."""
    return Script([[event("x", index=index, finish="stop") for index in range(asked.params.n)]])


def _name_the_model(context: Any, body: Any) -> Any:
    """Most would end as 404 otherwise. One that is too long is wrong on purpose, and stays."""
    model = body.get("model") if isinstance(body, dict) else None
    if isinstance(model, str) and 1 <= len(model) <= SHORT:
        body["model"] = "fake"
    return body


generates = FakeGenerates(_script)
context = ServerContext(ServeSettings(api_keys=(KEY,), allowed_hosts=("*",)), generates.models, generates, FakePool())
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(context), headers=HEADERS)
schema.hook("map_body")(_name_the_model)
schema.config.generation.update(modes=list(schemathesis.GenerationMode))
# What fields mean together can't be said in a schema: a request that fits may still be refused.
UNCHECKED = [schemathesis.checks.positive_data_acceptance]


@schema.parametrize()
@settings(
    max_examples=10,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_an_operation_keeps_to_its_description(case: Any) -> None:
    case.call_and_validate(headers=HEADERS, excluded_checks=UNCHECKED)
