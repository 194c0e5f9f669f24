"""ApiError: what a client is told when a request fails, whatever the route. How it is written (OpenAI's form, Anthropic's) is
the route's; texts are ours, never a library's or the system's."""

from __future__ import annotations

from nanovllm_cli.errors import (
    BusyError,
    NanovllmError,
    PromptTooLongError,
    TemplateError,
    UnsupportedError,
    UsageError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""Others are of the request (400 and up), or the server's (500 and up)."""


class ApiError(Exception):
    """status: of HTTP. code, param: as OpenAI's errors have them. retry_after: seconds, for 429 and 503.

    retries: whether trying the same again can help; False is said in `x-should-retry`. was_taken: whether an engine had the
    request when it failed. by_engine: it is why an engine did not take the request.
    """

    was_taken = by_engine = False

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def label(self) -> str:
        """As logs and spans name it."""
        return self.code or self.type

    @property
    def retries(self) -> bool:
        return self.status in (408, 429, 503)

    @classmethod
    def of(cls, error: NanovllmError, param: str | None = None) -> ApiError:
        """A typed error as what it means to a client: its own fault, or not."""
        if isinstance(error, PromptTooLongError):
            return too_long(error.prompt_len, error.limit, param or "messages")
        if isinstance(error, UsageError | UnsupportedError):
            code = "unsupported" if isinstance(error, UnsupportedError) else None
            message = error.message if error.hint is None else f"{error.message}; {error.hint}"
            return cls(400, message, code=code, param=param)
        if isinstance(error, TemplateError):
            return cls(400, error.message, param=param or "messages")
        if isinstance(error, BusyError):
            return cls(503, error.message, retry_after=1.0)
        return cls(500, error.message)


def invalid_value(message: str, param: str | None) -> ApiError:
    """A field whose value is none, by itself or beside the others."""
    return ApiError(400, message, code="invalid_value", param=param)


def late(seconds: float) -> ApiError:
    return ApiError(503, f"not answered within {seconds:g} seconds", code="timeout")


def draining() -> ApiError:
    return ApiError(503, "the server is about to end", code="draining", retry_after=5)


def too_long(num_tokens: int, limit: int, param: str, *, at_least: bool = False) -> ApiError:
    """Clients know an overflow by these words as much as by its code. at_least: nobody has counted all of its tokens."""
    has = "has at least" if at_least else "has"
    message = f"this model's maximum context length is {limit} tokens, and the prompt {has} {num_tokens}"
    return ApiError(400, message, code="context_length_exceeded", param=param)
