"""Values out of a request's JSON by msgspec's types: for what is told apart by its `type`, where pydantic would describe one
mistake once for every kind that it is not. Raises ApiError 400, which names the place."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from starlette.requests import Request

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.routing import ApiRequest, inlined
from nanovllm_cli.server.wording import of_msgspec
from nanovllm_cli.text.chat_template import check_variables

T = TypeVar("T")

LARGE_BODY_BYTES = 1 << 18

_AT = " - at `$"
_LONGEST = 200


def read(kind: type[T], value: Any, path: str) -> T:
    """The value as that type; unknown fields are let by."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, rest = str(error).partition(_AT)
        place = rest.rstrip("`")
        more, what = of_msgspec(text, _choices(kind, place.removeprefix(".")))
        raise invalid(path + place + more, what[:_LONGEST]) from None


def _choices(kind: type, field: str) -> list[str]:
    """The words that a field may be, where there are some."""
    found = get_args(get_type_hints(kind).get(field))
    return [word for each in found for word in (get_args(each) or [each]) if isinstance(word, str)]


def kind_of(value: Any, path: str, default: str | None = None) -> str:
    """The `type` of an object."""
    if not isinstance(value, Mapping):
        raise invalid(path, "must be an object")
    kind = value.get("type", default)
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", "must be there, and a string")
    return kind


def described(kinds: Mapping[str, type], default: str | None = None, without: Collection[type] = ()) -> dict[str, Any]:
    """For /openapi.json: what `kind_of` and `read` take, as one JSON schema. default: the kind that needs no `type`. without:
    kinds within that are read only to be refused by name."""
    _, parts = msgspec.json.schema_components(kinds.values(), ref_template="{name}")
    for struct in without:
        del parts[struct.__name__]
    branches = []
    for kind, struct in kinds.items():
        schema = inlined(parts[struct.__name__], parts, ("title", "discriminator", "default"))
        required = [*([] if kind == default else ["type"]), *schema["required"]]
        branches.append({**schema, "properties": {"type": {"const": kind}, **schema["properties"]}, "required": required})
    return {"anyOf": branches}


def object_schema(required: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """For /openapi.json: an object that has these members, with their schemas, and may have those."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def listed(value: Any, path: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(path, "must be a list")
    if len(value) > most:
        raise invalid(path, f"has {len(value)} entries, at most {most} are taken")
    return value


def json_text(value: Any) -> str:
    """JSON of a value that came as JSON."""
    return msgspec.json.encode(value).decode()


def schema_form(schema: Any, path: str) -> Constraint:
    """An answer of this JSON schema. Raises ApiError 400."""
    try:
        return Constraint("json_schema", json_text(schema))
    except UsageError as error:
        raise ApiError.of(error, path) from None


async def off_loop(request: Request, work: Callable[[], T]) -> T:
    """What `work` returns; in a thread where the body is so large that others would wait for it."""
    assert isinstance(request, ApiRequest)
    if request.body_len < LARGE_BODY_BYTES:
        return work()
    return await asyncio.to_thread(work)


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs, as what may stand beside the renderer's own arguments."""
    try:
        check_variables(given or ())
    except UsageError as error:
        raise ApiError.of(error, "chat_template_kwargs") from None
    return dict(given or {})


def invalid(path: str, what: str) -> ApiError:
    return invalid_value(f"{path}: {what}", path)


def unsupported(path: str, what: str) -> ApiError:
    return ApiError(400, f"{path}: {what}", code="unsupported", param=path)


def shown(value: Any) -> str:
    """A client's value in an error: short, on one line."""
    return reprlib.repr(value).replace("\n", " ")
