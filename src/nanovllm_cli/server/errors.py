"""How a failure is written: one place for every route, limit and door.

    OpenAI's form    {"error": {"message", "type", "param", "code"}}
    Anthropic's      {"type": "error", "error": {"type", "message"}, "request_id"}, under /v1/messages
    Ollama's         {"error": "…"}, under /api; the same for a line that ends a stream

Texts of libraries, paths and addresses never get in: what is no typed error is "internal error" and the request's id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.wording import either, of_pydantic

_LONGEST_MESSAGE = 200
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What every failed request is answered with."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """What every failed request under /v1/messages is answered with."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorAnswer(BaseModel):
    """What every failed request under /api is answered with."""

    error: str


class JsonResponse(Response):
    """An answer of plain values, written by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def openai_form(error: ApiError) -> Mapping[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_form(error: ApiError, request_id: str) -> Mapping[str, Any]:
    """The body of an error. Clients know by `prompt is too long` that a conversation has to be shortened."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    elif error.param is not None and not message.startswith(error.param):  # this form has no other place for it
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_form(error: ApiError) -> Mapping[str, Any]:
    """The body of an error. A prompt is never cut here to make it fit, as Ollama's server does: what to do is said."""
    message = error.message
    if error.code == "context_length_exceeded":
        message += "; nothing is left out of it (options.num_ctx is the request's own limit, nanovllm serve -c the server's)"
    elif error.param is not None and error.param not in message:  # this form has no other place for it
        message = f"{error.param}: {message}"
    return {"error": message}


def error_body(error: ApiError, path: str, request_id: str) -> Mapping[str, Any]:
    """The error as this path's clients expect it."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic_form(error, request_id)
    if path == "/api" or path.startswith("/api/"):
        return ollama_form(error)
    return openai_form(error)


def error_response(error: ApiError, path: str, request_id: str) -> JsonResponse:
    headers = {"x-should-retry": "true" if error.retries else "false"}
    if error.retry_after is not None or error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error_body(error, path, request_id), error.status, headers)


def as_api_error(error: BaseException) -> ApiError:
    """Any failure, as what its client is told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NanovllmError):
        return ApiError.of(error)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return _http(error)
    return ApiError(500, "internal error; the server's log has more under this request's id")


def _http(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "no such path", code="unknown_path")
    if error.status_code == 405:
        return ApiError(405, "this path takes other methods", code="method_not_allowed")
    return ApiError(error.status_code, "the request could not be answered")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first field that is wrong: where, and in a few words what. Of a field that may be several things, what is wrong inside
    of the one that it nearly is; else what it may be."""
    problems = [(_param(problem, error.body), problem) for problem in error.errors()]
    first = problems[0][0]
    inside = [place for place, _ in problems if place.startswith(first) and place[len(first) :][:1] in ("", ".", "[")]
    param = max(inside, key=len) if first else ""
    text = either(of_pydantic(problem) for place, problem in problems if place == param)
    if not param and not isinstance(error.body, dict):
        text = "the body must be a JSON object"
    message = f"{param}: {text}" if param else text
    return invalid_value(message[:_LONGEST_MESSAGE], param[:_LONGEST_MESSAGE] or None)


def _param(problem: Mapping[str, Any], body: Any) -> str:
    """Where: messages[0].content. Names of a union's branches, which pydantic puts in between, are left out."""
    path = ""
    source, *location = problem["loc"]
    for part in location:
        if source != "body":
            path += f".{part}"
        elif isinstance(body, dict) and (part in body or (problem["type"] == "missing" and part == location[-1])):
            path, body = f"{path}.{part}", body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path, body = f"{path}[{part}]", body[part]
    return path.lstrip(".")
