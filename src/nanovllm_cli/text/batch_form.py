"""Requests and answers in the form of OpenAI's batches, which vLLM's run-batch has as well.

in   {"custom_id", "method": "POST", "url": "/v1/…", "body": {…}}
out  {"id", "custom_id", "response": {"status_code", "request_id", "body": {…}}, "error": null}, where the body of another status
     than 200 has the error; or "response": null, "error": {"code", "message"}, where there was nothing that could be asked
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nanovllm_cli.errors import UsageError

EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
PATHS = {
    **{f"/v1/{name}": f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings", "messages")},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "/v1/rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "/v1/score"),
}
"""What a line may ask for, and where a server has it."""
ID = "batch_req_"
"""What an answer's id begins with."""
Answer = dict[str, Any]
_FIELDS = ("custom_id", "method", "url", "body")
_MOST_ID = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One line. path: where a server has what it asks for; `broken`: why nothing can be asked."""

    number: int
    custom_id: str | None
    path: str = ""
    body: dict[str, Any] | None = None
    broken: UsageError | None = None

    def asking(self, model: str | None) -> Request:
        """The same of another model."""
        return self if model is None or self.body is None else replace(self, body=self.body | {"model": model})


def request_of(number: int, data: bytes, parsed: Callable[[bytes], Any], lines: dict[str, int]) -> Request:
    """parsed: JSON's value, or a UsageError. lines: where each custom_id has been so far, which this one is added to."""
    custom_id = None
    try:
        value = parsed(data)
        if not isinstance(value, dict):
            raise UsageError("not a JSON object", f"write {EXAMPLE}")
        custom_id = _checked_id(value)
        first = lines.setdefault(custom_id, number)
        if first != number:
            raise UsageError(f"custom_id {custom_id[:60]!r} is that of line {first}, too")
        return Request(number, custom_id, *_checked(value))
    except UsageError as failure:
        return Request(number, custom_id, broken=placed(failure, number))


def placed(failure: UsageError, number: int) -> UsageError:
    """The same, which says in which line."""
    failure.message = f"line {number}: {failure.message}"
    failure.args = (failure.message,)
    return failure


def _checked_id(value: dict[str, Any]) -> str:
    custom_id = value.get("custom_id")
    if custom_id is None and ("prompt" in value or "messages" in value):
        hint = "nanovllm run MODEL --batch FILE runs lines that are prompts themselves"
        raise UsageError("it has no body and no custom_id", hint)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID:
        raise UsageError(f"custom_id must be there, and a text of at most {_MOST_ID} characters", f"a line is {EXAMPLE}")
    return custom_id


def _checked(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where it goes, and what is asked."""
    for key in value:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1)
            raise UsageError(f"unknown field {key!r}", f"did you mean {near[0]}?" if near else "what is asked stands in body")
    url, body, method = value.get("url"), value.get("body"), value.get("method", "POST")
    if method != "POST":
        raise UsageError(f"method is {json.dumps(method)[:60]}: requests of a batch are POST")
    if not isinstance(url, str) or url not in PATHS:
        near = difflib.get_close_matches(str(url), PATHS, n=1)
        told = f"did you mean {near[0]}?" if near else f"these are: {', '.join(dict.fromkeys(PATHS.values()))}"
        raise UsageError(f"url is {json.dumps(url)[:100]}, which a batch has not", told)
    if not isinstance(body, dict):
        raise UsageError("body must be there, and an object", f"a line is {EXAMPLE}")
    if body.get("stream"):
        raise UsageError("body.stream: answers of a batch come whole", "leave it out")
    return PATHS[url], body


def answer_of(key: str, request: Request, status: int, request_id: str | None, body: bytes) -> Answer:
    """What a server said. That is no answer where it is no JSON."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return _failure(key, request, "invalid_answer", f"HTTP {status}, and no JSON")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return {"id": key, "custom_id": request.custom_id, "response": response, "error": None}


def answer_of_broken(key: str, request: Request) -> Answer:
    return _failure(key, request, "invalid_request", told_of_broken(request))


def told_of_broken(request: Request) -> str:
    assert request.broken is not None
    hint = f": {request.broken.hint}" if request.broken.hint else ""
    return request.broken.message + hint


def _failure(key: str, request: Request, code: str, message: str) -> Answer:
    return {"id": key, "custom_id": request.custom_id, "response": None, "error": {"code": code, "message": message}}


def failed(answer: Answer) -> bool:
    response = answer.get("response")
    return answer.get("error") is not None or not isinstance(response, dict) or response.get("status_code") != 200


def usage_of(answer: Answer) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, as far as it says. OpenAI has called them by several names, Anthropic by others."""
    body = (answer["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0, 0

    def count(*names: str) -> int:
        return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)

    return count("prompt_tokens", "input_tokens", "total_tokens"), count("completion_tokens", "output_tokens")
