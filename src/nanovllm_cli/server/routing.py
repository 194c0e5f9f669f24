"""Routes whose bodies are read in one place: bounded in size, depth and time, parsed by msgspec and made the route's model,
before FastAPI sees them.

A body must say that it is JSON: a page of another site can send text and forms to this machine without asking, but not JSON.
Ollama's clients are used to saying nothing. What they send is told from a page's by what a browser adds to each POST.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.errors import ErrorAnswer
from nanovllm_cli.server.gate import Gate

MAX_VALUES = 1 << 18
"""Most values of a body: enough for the ids of any prompt. What is wrong with each of millions would take minutes to tell."""
MAX_ARRIVING = 16
"""Bodies of the largest size whose bytes may be on their way at once: hundreds who send slowly would fill the memory together."""

_decode = msgspec.json.Decoder().decode
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_HALF_A_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def api_router(error: type[BaseModel] = ErrorAnswer, *, route: type[ApiRoute] | None = None) -> APIRouter:
    """A router for `routes_x.py`. error: the form of its errors, for /openapi.json. route: how its bodies are read."""
    return APIRouter(route_class=route or ApiRoute, default_response_class=Response, responses=_errors(error))


def answers(
    model: type[BaseModel] | None = None,
    *,
    streams: type[BaseModel] | None = None,
    lines: type[BaseModel] | None = None,
    error: type[BaseModel] = ErrorAnswer,
) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: what a success looks like. Errors are known from the router. streams: what the events of its
    stream bring, lines: what its lines are where it is JSON by lines; error: what one is that ends it in the middle."""
    content = {} if streams is None else {"text/event-stream": {"schema": _event(streams, error)}}
    if lines is not None:
        content["application/x-ndjson"] = {"schema": _any_of(lines, error)}
    described: dict[str, Any] = {"description": "Success", "content": content}
    if model is not None:
        described["model"] = model
    return {200: described}


class ApiRequest(Request):
    """A request whose body has become the route's model, which FastAPI takes as it is. What the model doesn't know is gone:
    answers may take minutes, and two megabytes of JSON forty as Python's values. body_len: its bytes."""

    def __init__(self, scope: Scope, receive: Receive, body_len: int, model: Any) -> None:
        super().__init__(scope, receive)
        self._body, self._json = b"{}", model
        self.body_len = body_len


class ApiRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def read_and_handle(request: Request) -> Response:
            return await handle(await self._read(request))

        return read_and_handle

    async def _read(self, request: Request) -> ApiRequest:
        assert self.body_field is not None
        state = request.app.state
        self._check_sender(request)
        body = await read_body(request, state.gate, state.max_body_bytes(), state.settings.body_seconds)
        value = await self._value(body, request)
        model, problems = self.body_field.validate(value, loc=("body",))
        if problems:
            raise RequestValidationError(problems, body=value)
        scope = request.scope if _is_json(request) else _called_json(request.scope)
        return ApiRequest(scope, request.receive, len(body), model)

    def _check_sender(self, request: Request) -> None:
        """Raises ApiError where a page of another site could send such a body."""
        if not _is_json(request):
            raise ApiError(415, "the body must be JSON, and the request must say so: Content-Type: application/json")

    async def _value(self, body: bytes, request: Request) -> Any:
        """For the route's model. Raises ApiError 400."""
        return parse_json(body, request.app.state.settings.max_json_depth)


class UntypedRoute(ApiRoute):
    """Takes bodies by any name, where no page sent them."""

    def _check_sender(self, request: Request) -> None:
        if _is_of_page(request):
            super()._check_sender(request)


def _called_json(scope: Scope) -> Scope:
    """For FastAPI, which looks at it once more."""
    headers = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _is_of_page(request: Request) -> bool:
    """Browsers say where a POST is from, and no page can keep them from that. Programs have no reason to."""
    return "origin" in request.headers or "sec-fetch-site" in request.headers


def _is_json(request: Request) -> bool:
    """Whether its body is called that."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def read_body(request: Request, gate: Gate, max_bytes: int, seconds: float) -> bytes:
    """The body. Raises ApiError: 415 where it is compressed; 413, 408; 429 where too much comes at once."""
    if request.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise ApiError(415, "compressed bodies are not read: chunked is the only transfer coding here")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "compressed bodies are not read: send it as it is, without Content-Encoding")
    too_large = ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                gate.arriving += len(chunk)
                if len(body) > max_bytes:
                    raise too_large
                if gate.arriving > MAX_ARRIVING * max_bytes:
                    raise ApiError(429, "too much is being sent at once", code="too_many_bytes", retry_after=1)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
    finally:
        gate.arriving -= len(body)
    return bytes(body)


def parse_json(body: bytes, max_depth: int) -> Any:
    """The value. Raises ApiError 400 for what is no JSON, or nested deeper than that."""
    has_many, is_deep = body.count(b",") > MAX_VALUES, body.count(b"[") + body.count(b"{") > max_depth
    if has_many or is_deep:
        too_many = ApiError(400, f"the JSON has more than {MAX_VALUES} values", code="too_many_values")
        if _num_quotes(body) > 4 * MAX_VALUES:  # a value has two strings at most, its name and itself
            raise too_many
        bare = _STRING.sub(b"", body)
        if bare.count(b",") > MAX_VALUES or bare.count(b"[") + bare.count(b"{") > MAX_VALUES:
            raise too_many
        if is_deep and not _closes_within(bare, max_depth):
            raise ApiError(400, f"the JSON is not closed, or nested more than {max_depth} deep", code="invalid_json")
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        why = str(failure).removeprefix("JSON is malformed: ")
        if half := _HALF_A_PAIR.search(body):
            why = f"{half[0].decode()} (byte {half.start()}) is half of a surrogate pair, as where a text was cut within an emoji"
        raise ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json") from None


def _num_quotes(body: bytes) -> int:
    """That begin or end strings. Each string which is cut out takes time and memory of its own, and so they are counted first."""
    if body.count(b'"') <= 4 * MAX_VALUES:
        return body.count(b'"')
    single = body.replace(rb"\\", b"")
    return single.count(b'"') - single.count(rb'\"')


def _closes_within(bare: bytes, max_depth: int) -> bool:
    """Whether brackets pair, and nest no deeper. Innermost pairs go, level by level, in C. bare: without strings."""
    brackets = bare.translate(_BRACKETS, _OTHERS)
    for _ in range(max_depth):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _event(*brings: type[BaseModel]) -> dict[str, Any]:
    """One event, as OpenAPI 3.1 has no words for a stream of them."""
    json = {"type": "string", "contentMediaType": "application/json"}
    data = [{**json, "contentSchema": _any_of(*brings)}]
    return {
        "description": "An event of a stream; comments between them are signs of life",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [*data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _any_of(*models: type[BaseModel]) -> dict[str, Any]:
    schemas = [model.model_json_schema() for model in models]
    return {"anyOf": [inlined(schema, schema.get("$defs", {})) for schema in schemas]}


def inlined(value: Any, parts: Mapping[str, Any], without: Collection[str] = ("$defs", "title")) -> Any:
    """A JSON schema that refers to no other place: FastAPI makes no components of what it does not know. Branches that are none
    of the parts are left out, and so are keywords in `without`. No part may contain itself."""
    if isinstance(value, list):
        known = [item for item in value if not isinstance(item, dict) or "$ref" not in item or _part(item) in parts]
        return [inlined(item, parts, without) for item in known]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return inlined(parts[_part(value)], parts, without)
    return {key: inlined(item, parts, without) for key, item in value.items() if key not in without}


def _part(reference: Mapping[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    told = {
        400: "The request cannot be answered as it is",
        401: "No valid API key",
        403: "Not for this Host",
        404: "No such model or path",
        405: "Other methods",
        408: "The body did not come",
        413: "The body is too large",
        415: "The body is not called what it must be, or compressed",
        429: "Too many requests under way",
        431: "The headers are too large",
        500: "A failure of the server",
        503: "Loading, draining, or no model can take it now",
    }
    # By the name of its schema, which `app` adds: FastAPI would make a model of its own for each status of each route.
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {status: {"description": text, "content": content} for status, text in told.items()}
