"""Routes that take a form with a file (multipart/form-data, RFC 7578), as OpenAI's for sounds do.

A page of any site can send a form to this machine without asking. What browsers say of where it is from decides: see `FormRoute`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.routing import ApiRoute, api_router

MAX_PARTS = 64
MAX_NAME_CHARS = 1024
NAME = ".name"
"""Behind a field's, where its file's own is."""
_FORM = "multipart/form-data"


def form_router() -> APIRouter:
    return api_router(route=FormRoute)


class FormRoute(ApiRoute):
    """Its body is declared `Annotated[Model, Body(media_type="multipart/form-data")]`; a field of bytes is a file."""

    def _check_sender(self, request: Request) -> None:
        """Raises ApiError: 415 for other bodies; 403 for a page whose site was not let in by --cors-origin."""
        if _kind(request)[0] != _FORM:
            raise ApiError(415, f"the body must be a form with a file: Content-Type: {_FORM}")
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        allowed = request.app.state.settings.cors_origins
        is_of_another = site not in ("same-origin", "none") and (site, origin) != (None, None)
        if is_of_another and "*" not in allowed and origin not in allowed:
            raise ApiError(403, "a page of another site sent this form; --cors-origin lets one in", code="origin_not_allowed")

    async def _value(self, body: bytes, request: Request) -> Any:
        return await asyncio.to_thread(parse_form, body, _kind(request)[1])


def _kind(request: Request) -> tuple[str, bytes]:
    """The type of its body, and what parts are parted by."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    return kind.decode("latin-1").lower(), options.get(b"boundary", b"")


def parse_form(body: bytes, boundary: bytes) -> dict[str, Any]:
    """Its parts by their names: text, or the bytes of a file, whose own name stands beside it; a list where a name ends in [].

    Raises ApiError 400 for what is no form, ends in the middle, or has more than MAX_PARTS parts or one name twice.
    """
    parts: list[tuple[bytes, bytes, bytes | None]] = []
    ended: list[bool] = []

    def add(part: Field | File) -> None:
        if len(parts) == MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        if isinstance(part, File):
            part.file_object.seek(0)
            parts.append((part.field_name or b"", part.file_object.read(), part.file_name or b""))
            part.close()
        else:
            parts.append((part.field_name or b"", part.value or b"", None))

    size = len(body) + 1  # nothing is written to files
    parser = None
    try:
        parser = FormParser(
            _FORM, add, add, lambda: ended.append(True), boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": size}
        )  # fmt: skip
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise _broken("its parts are not as its Content-Type says") from None
    finally:
        if parser is not None and parser.parser is not None:  # a circle, which would keep the file until a collection
            parser.parser.callbacks = {}
    if not ended:
        raise _broken("it ends in the middle")
    form: dict[str, Any] = {}
    for name, data, file_name in parts:
        try:
            key, value = name.decode(), data.decode() if file_name is None else data
        except UnicodeDecodeError:
            raise _broken(f"{name.decode('utf-8', 'replace')[:40]!r} is not UTF-8") from None
        if key.endswith("[]"):
            listed = form.setdefault(key[:-2], [])
            if not isinstance(listed, list):
                raise _broken(f"it has {key[:-2][:40]!r} twice")
            listed.append(value)
        elif key in form:
            raise _broken(f"it has {key[:40]!r} twice")
        else:
            form[key] = value
            if file_name:
                form.setdefault(key + NAME, file_name.decode("utf-8", "replace")[:MAX_NAME_CHARS])
    return form


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the body is no valid form: {why}", code="invalid_form")
