"""MessageBuilder: what a generation says, as Anthropic's message and as the events that tell of it.

    message_start, ping, for each block content_block_start, deltas, content_block_stop, then message_delta, message_stop

`signature` of thinking is a digest of its text. Clients send it back with the text, and nobody checks it: reasoning of
another origin is read like this server's own.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any

from nanovllm_cli.server.function_tools import arguments_of
from nanovllm_cli.server.ports import Event, Usage
from nanovllm_cli.text.tool_calls import ToolCallDelta, in_order

StreamEvent = dict[str, Any]


class MessageBuilder:
    """Call begin() once the first events are there, take() for each, and complete(). Each returns the events it caused.

    shows_thinking: False leaves the text of thinking out, and keeps the block.
    """

    def __init__(self, model: str, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._block: dict[str, Any] | None = None
        self._text: list[str] = []
        self._call_index: int | None = None
        self._finish: Event | None = None
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(0, 0, 0, 0)),
        }

    def begin(self, usage: Usage) -> list[StreamEvent]:
        message = {**self.message, "content": [], "usage": usage_of(usage)}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def take(self, event: Event) -> list[StreamEvent]:
        """What belongs to the call that is open comes first: the rest of the event is behind it."""
        is_in_call = self._block is not None and self._block["type"] == "tool_use"
        going_on = [call for call in event.calls if is_in_call and call.index == self._call_index]
        events = [told for call in going_on for told in self._call(call)]
        if event.reasoning:
            events += self._into("thinking")
            self._text.append(event.reasoning)
            if self._shows_thinking:
                events.append(self._delta({"type": "thinking_delta", "thinking": event.reasoning}))
        for said in in_order(event.content, event.calls[len(going_on) :]):
            events += self._text_of(said) if isinstance(said, str) else self._call(said)
        if event.finish_reason is not None:
            self._finish = event
        return events

    def complete(self, usage: Usage, max_tokens: int) -> list[StreamEvent]:
        events = self._close()
        reason, sequence = _stop(self._finish, usage, max_tokens)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage_of(usage)}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    # ---- blocks ----

    def _into(self, kind: str) -> list[StreamEvent]:
        if self._block is not None and self._block["type"] == kind:
            return []
        block = {"type": kind, "thinking": "", "signature": ""} if kind == "thinking" else {"type": kind, "text": ""}
        return self._open(block)

    def _text_of(self, said: str) -> list[StreamEvent]:
        events = self._into("text")
        self._text.append(said)
        return [*events, self._delta({"type": "text_delta", "text": said})]

    def _call(self, call: ToolCallDelta) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if self._block is None or self._block["type"] != "tool_use" or call.index != self._call_index:
            self._call_index = call.index
            events += self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            self._text.append(call.arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[StreamEvent]:
        events = self._close()
        self._block = block
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[StreamEvent]:
        block = self._block
        if block is None:
            return []
        text = "".join(self._text)
        events = []
        if block["type"] == "thinking":
            block["thinking"] = text if self._shows_thinking else ""
            block["signature"] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = arguments_of(text)
        events.append({"type": "content_block_stop", "index": self._index})
        self.message["content"].append(block)
        self._block, self._text = None, []
        return events

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"])


def usage_of(usage: Usage) -> dict[str, int]:
    """Anthropic counts what was found in the cache apart from the rest of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(last: Event | None, usage: Usage, max_tokens: int) -> tuple[str, str | None]:
    """stop_reason and stop_sequence."""
    if last is None or last.finish_reason == "stop":
        sequence = last.stop_reason if last is not None and isinstance(last.stop_reason, str) else None
        return ("end_turn", None) if sequence is None else ("stop_sequence", sequence)
    if last.finish_reason == "tool_calls":
        return "tool_use", None
    if last.finish_reason == "repetition":
        return "max_tokens", None  # none of its words says so
    return ("max_tokens" if usage.completion_tokens >= max_tokens else "model_context_window_exceeded"), None
