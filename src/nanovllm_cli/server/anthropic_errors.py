"""Errors under /v1/messages, in Anthropic's form: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from nanovllm_cli.server.api_error import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """What every failed request under /v1/messages is answered with."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def anthropic_form(error: ApiError, request_id: str) -> Mapping[str, Any]:
    """The body of an error. Clients know by `prompt is too long` that a conversation has to be shortened."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    elif error.param is not None and not message.startswith(error.param):  # this form has no other place for it
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
