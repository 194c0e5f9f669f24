"""Server-sent events, and what an OpenAI-compatible server says in them.

`EventReader` turns bytes, cut anywhere, into the data of events (the HTML standard's section on server-sent events, "parsing
an event stream"). `AnswerReader` makes pieces of an answer out of those. Both trust nothing: sizes are bounded, and what is
no event of an answer raises StreamError.
"""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT_BYTES = 16 << 20

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class StreamError(Exception):
    """The server said that it failed, or said something that has no meaning here. The message is one line."""


class EventReader:
    """Bytes in, the data of whole events out. Comments and fields other than `data` are passed over."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
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
            data, self._data, self._data_bytes = self._data, [], 0
            return b"\n".join(data).decode("utf-8", "replace") if data else None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
        return None


class AnswerReader:
    """The pieces of one streamed answer, from the data of its events.

    done: [DONE] came. finished: a choice gave the reason for its end. num_pieces: those with text.
    input_tokens, output_tokens: what the server's `usage` says, None while it says nothing.
    """

    def __init__(self) -> None:
        self.done = False
        self.finished = False
        self.num_pieces = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None

    def read(self, data: str) -> bool:
        """Whether this event brings a piece of the answer's text. Raises StreamError."""
        if data.strip() == "[DONE]":
            self.done = True
            return False
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as failure:
            raise StreamError(f"an event that is not JSON: {data[:80]!r}") from failure
        if not isinstance(chunk, dict):
            raise StreamError(f"an event that is no object: {data[:80]!r}")
        if chunk.get("error") or chunk.get("object") == "error":
            raise StreamError(f"the server failed: {error_text(chunk)}")
        self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        has_text = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                has_text = has_text or _has_text(choice)
                self.finished = self.finished or bool(choice.get("finish_reason"))
        self.num_pieces += has_text
        return has_text

    def _read_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.input_tokens = _count(usage.get("prompt_tokens"), self.input_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)


def error_text(body: Any) -> str:
    """What a server's error object says, whichever of the usual shapes it has; at most 200 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in (*_TEXTS, "tool_calls"))


def _count(value: Any, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else before
