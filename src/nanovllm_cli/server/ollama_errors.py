"""Errors under /api, in Ollama's form: {"error": "…"}, the same for a line that ends a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nanovllm_cli.server.api_error import ApiError


class OllamaErrorAnswer(BaseModel):
    """What every failed request under /api is answered with."""

    error: str


def ollama_form(error: ApiError) -> Mapping[str, Any]:
    """The body of an error. A prompt is never cut here to make it fit, as Ollama's server does: what to do is said."""
    message = error.message
    if error.code == "context_length_exceeded":
        message += "; nothing is left out of it (options.num_ctx is the request's own limit, nanovllm serve -c the server's)"
    elif error.param is not None and error.param not in message:  # this form has no other place for it
        message = f"{error.param}: {message}"
    return {"error": message}
