"""Calls that are messages of their own, the tool in the header: gpt-oss' (to=functions.NAME, JSON in the body), Muse's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.text.reasoning_harmony import HarmonyPiece
from nanovllm_cli.text.tool_calls import ToolCallDelta, joined_calls, placed
from nanovllm_cli.text.tool_json import read_named_call
from nanovllm_cli.text.tool_sections import Tools
from nanovllm_cli.text.tool_stream import CallStream, Found, Reader, Reading

ReadBody = Callable[[CallStream, str, Tools], Reading[None]]
"""Reads the body of a message to the tool of a name."""


class HarmonyCalls:
    """Finds the calls among the pieces of an answer's messages. What is sent to a tool and is no call is content."""

    def __init__(self, read: ReadBody, tools: Tools, *, whole: bool, single: bool) -> None:
        self._read, self._tools = read, tools
        self._whole, self._single = whole, single
        self._message: CallStream | None = None
        self._num_calls = 0
        self.broke_off = False

    @property
    def saw_calls(self) -> bool:
        return self._num_calls > 0 or (self._message is not None and self._message.saw_calls)

    def read(self, pieces: list[HarmonyPiece]) -> Found:
        """What the pieces decided; only those of messages to tools are looked at, the rest is content."""
        found: list[Found] = []
        for kind, text in pieces:
            if kind == "call header":
                self._message = CallStream(self._reader(_recipient(text)), whole=self._whole, single=self._single)
            elif kind == "call" and self._message is not None:
                found.append(self._numbered(self._message.push(text)))
            elif kind == "call end":
                found.append(self.finish())
            elif kind == "content":
                found.append(Found(text, ()))
        content, calls = "", list[ToolCallDelta]()
        for part in found:
            calls += placed(part.calls, len(content))
            content += part.content
        return Found(content, joined_calls(calls))

    def finish(self) -> Found:
        """The message to a tool is complete, or was cut off."""
        if self._message is None:
            return Found("", ())
        found = self._numbered(self._message.finish())
        self._num_calls += self._message.num_calls
        self.broke_off = self._message.broke_off
        self._message = None
        return found

    def _reader(self, name: str) -> Reader:
        """Reads the body of a message to a tool."""

        def read(stream: CallStream) -> Reading[None]:
            yield from stream.attempt(self._read(stream, name, self._tools))
            yield from stream.content_to()

        return read

    def _numbered(self, found: Found) -> Found:
        if self._single and self._num_calls:
            return Found(found.content, ())
        return Found(found.content, tuple(replace(call, index=call.index + self._num_calls) for call in found.calls))


def _recipient(header: str) -> str:
    """The tool of `… to=functions.NAME …`."""
    name = header.partition(" to=")[2].partition("<|")[0].split()
    return name[0].removeprefix("functions.") if name else ""


def read_harmony(stream: CallStream, name: str, tools: Tools) -> Reading[None]:
    """An object."""
    yield from read_named_call(stream, name)
