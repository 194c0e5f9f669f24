"""OpenAI's published description of its API, to hold answers against.

The file lies beside the repository; without it answers are held against nothing, and one test says so by skipping. It says
OpenAPI 3.1 and still writes `nullable`, which was 3.0's; here that means what it meant there.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SPEC = Path(__file__).resolve().parents[2] / "shared" / "data" / "openai" / "openapi.json"


def check(name: str, value: Any) -> None:
    """Fails where `value` is no valid `name` of the description's components. Holds nothing without the description."""
    if not SPEC.exists():
        return
    error = next(iter(_validator(name).iter_errors(value)), None)
    assert error is None, f"{name}: {error.json_path}: {error.message[:500]}"


def check_text(answer: Any, *, chunk: bool = False, echo: bool = False) -> None:
    """Holds an answer of /v1/completions, or a chunk of its stream.

    The description has one schema for both, and leaves out three nulls that OpenAI sends: the finish_reason of a chunk behind
    which more comes, the usage of all chunks but the last (as `stream_options` says there), and the log-probability that a
    prompt's first token doesn't have. They are let by at just these places.
    """
    answer = copy.deepcopy(answer)
    if chunk and answer["choices"] and answer.get("usage", 0) is None:
        del answer["usage"]
    for choice in answer["choices"]:
        if chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"]
        if echo and logprobs is not None and logprobs["token_logprobs"][:1] == [None]:
            assert logprobs["top_logprobs"][0] is None
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    check("CreateCompletionResponse", answer)


@cache
def _validator(name: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components()})


@cache
def components() -> Any:
    return _with_nulls(json.loads(SPEC.read_text())["components"])


def _with_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _with_nulls(item) for key, item in value.items()}
    if inner.get("nullable") is True:
        return {"anyOf": [{key: item for key, item in inner.items() if key != "nullable"}, {"type": "null"}]}
    return inner
