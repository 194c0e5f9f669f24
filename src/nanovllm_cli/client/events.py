"""Server-sent events, and what all OpenAI-compatible servers have in common there.

`EventReader` turns bytes, cut anywhere, into the data of events (the HTML standard's section on server-sent events, "parsing
an event stream"). It trusts nothing: sizes are bounded, and what is no event of an answer raises StreamError.
"""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT_BYTES = 16 << 20


class StreamError(Exception):
    """The server said that it failed, or said something that has no meaning here. The message is one line."""


class StreamRefusal(StreamError):
    """What the server said in the middle of its answer is that the request cannot be met: asked again, it fails again."""


class EventReader:
    """Bytes in, the data of whole events out. Comments and fields other than `data` are passed over, but for the name of an event
    that is an error: some servers say so there alone, and its data comes out as an error object then."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_error = False
        self._after_return = False  # the last byte was \r: a \n right behind it belongs to it
        self._at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        """The events that `chunk` completes. Raises StreamError for one that is too long."""
        if not chunk:
            return []
        second_half = self._after_return and chunk[:1] == b"\n"
        self._after_return = chunk.endswith(b"\r")
        chunk = chunk[second_half:]
        *ended, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events = []
        for part in ended:
            self._line += part
            event = self._end_line(bytes(self._line))
            self._line.clear()
            if event is not None:
                events.append(event)
        self._line += rest
        if len(self._line) + self._data_bytes > self._max:
            raise StreamError(f"an event of more than {self._max} bytes")
        return events

    def _end_line(self, line: bytes) -> str | None:
        if self._at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if not line:
            data, is_error = b"\n".join(self._data).decode("utf-8", "replace") if self._data else None, self._is_error
            self._data, self._data_bytes, self._is_error = [], 0, False
            return _as_error(data) if is_error and data is not None else data
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(line) + 1  # lines without anything are kept, too
        elif field == b"event":
            self._is_error = value == b"error"
        return None


def _as_error(data: str) -> str:
    """The same in an object whose "error" it is, if it has none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = data
    return data if isinstance(found, dict) and found.get("error") else json.dumps({"error": found or "nothing more"})


def error_text(body: Any) -> str:
    """What a server's error object says, whichever of the usual shapes it has; at most 200 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    text = str(message).encode("utf-8", "replace").decode()  # without halves of surrogate pairs, which JSON can write
    return " ".join(text.split())[:200]


def event_object(data: str) -> dict[str, Any]:
    """The object that an event brings. Raises StreamError, also for one that says that the server failed or refuses."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as failure:
        raise StreamError(f"an event that is not JSON: {data[:80]!r}") from failure
    if not isinstance(chunk, dict):
        raise StreamError(f"an event that is no object: {data[:80]!r}")
    if chunk.get("error") or chunk.get("object") == "error":
        error = chunk.get("error", chunk)
        if isinstance(error, dict) and (error.get("type") == "invalid_request_error" or error.get("code") in (400, 422)):
            raise StreamRefusal(f"the server refuses the request: {error_text(chunk)}")
        raise StreamError(f"the server failed: {error_text(chunk)}")
    return chunk


def said(content: bytes) -> str:
    """What the body of a refusal says, in one line."""
    try:
        return error_text(json.loads(content))
    except (ValueError, RecursionError):
        return " ".join(content.decode("utf-8", "replace").split())[:200] or "nothing more"


def token_count(value: Any, before: int | None = None) -> int | None:
    """`value` where it is a number of tokens, else `before`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else before
