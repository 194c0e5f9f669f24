"""ResponseBuilder: what a generation says, as a response and as the stream of events that tells of it.

The response that a stream ends with is put together from what its events said, and an answer without a stream is the same
response. Names and order of events: OpenAI's specification (ResponseStreamEvent).

    created, in_progress,
    for each item   output_item.added, (content_part.added,) deltas, done, (content_part.done,) output_item.done
    completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from msgspec import Raw

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.ports import Event, Usage
from nanovllm_cli.server.responses_items import Item, new_id, sealed
from nanovllm_cli.text.tool_calls import ToolCallDelta, in_order, is_object

StreamEvent = dict[str, Any]
"""With `type` and `sequence_number`."""


class ResponseBuilder:
    """Call begin(), take() for every event, and complete() or fail(); each returns the events that it caused.

    response: all that is known before, its `output` empty. seals_reasoning: reasoning items get `encrypted_content`.
    """

    def __init__(self, response: dict[str, Any], *, seals_reasoning: bool = False) -> None:
        self.response = response
        self._seals_reasoning = seals_reasoning
        self._sequence_number = 0
        self._item: Item | None = None
        self._text: list[str] = []
        self._logprobs: list[Raw] = []
        self._call_index: int | None = None

    @property
    def output(self) -> list[Item]:
        done: list[Item] = self.response["output"]
        return done

    def begin(self) -> list[StreamEvent]:
        return [self._about("response.created"), self._about("response.in_progress")]

    def take(self, event: Event, logprobs: Iterable[Raw] = ()) -> list[StreamEvent]:
        """logprobs: of the event's content; they go with its first text. What belongs to the call that is open comes first: the
        rest is behind it."""
        is_in_call = self._item is not None and self._item["type"] == "function_call"
        going_on = [call for call in event.calls if is_in_call and call.index == self._call_index]
        events = [told for call in going_on for told in self._call(call)]
        if event.reasoning:
            events += self._into("reasoning")
            self._text.append(event.reasoning)
            events.append(self._inside("response.reasoning_text.delta", content_index=0, delta=event.reasoning))
        found = list(logprobs)
        for said in in_order(event.content, event.calls[len(going_on) :]):
            if isinstance(said, str):
                events += self._message(said, found)
                found = []
            else:
                events += self._call(said)
        return events

    def complete(self, cut_off: bool, usage: Usage) -> list[StreamEvent]:
        """cut_off: it ended for want of tokens."""
        events: list[StreamEvent] = []
        if self._item is None and not self.output:
            events += self._into("message")
        status = "incomplete" if cut_off else "completed"
        events += self._close(status)
        if cut_off:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._end(status, usage)
        return [*events, self._about(f"response.{status}")]

    def fail(self, error: ApiError, usage: Usage) -> list[StreamEvent]:
        events = self._close("incomplete")
        self.response["error"] = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        self._end("failed", usage)
        return [*events, self._about("response.failed")]

    # ---- items ----

    def _into(self, kind: str) -> list[StreamEvent]:
        """Opens an item of this kind, unless one is open."""
        if self._item is not None and self._item["type"] == kind:
            return []
        own: Item = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return [*self._open("rs" if kind == "reasoning" else "msg", kind, **own, content=[]), self._part("added")]

    def _message(self, said: str, logprobs: list[Raw]) -> list[StreamEvent]:
        events = self._into("message")
        self._text.append(said)
        self._logprobs += logprobs
        return [*events, self._inside("response.output_text.delta", content_index=0, delta=said, logprobs=logprobs)]

    def _call(self, call: ToolCallDelta) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if self._item is None or self._item["type"] != "function_call" or call.index != self._call_index:
            self._call_index = call.index
            events += self._open(
                "fc", "function_call", call_id=call.id or new_id("call"), name=call.name or "", arguments=""
            )
        if call.arguments:
            self._text.append(call.arguments)
            events.append(self._inside("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _open(self, prefix: str, kind: str, **fields: Any) -> list[StreamEvent]:
        """Begins an item, behind the end of the one before it."""
        events = self._close("completed")
        self._item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        added = self._event("response.output_item.added", output_index=len(self.output), item=dict(self._item))
        return [*events, added]

    def _close(self, status: str) -> list[StreamEvent]:
        """Ends the open item."""
        item = self._item
        if item is None:
            return []
        text = "".join(self._text)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            if not is_object(text):  # or the conversation could not go on behind it
                item["status"] = "incomplete"
            events = [self._inside("response.function_call_arguments.done", name=item["name"], arguments=text)]
        elif item["type"] == "reasoning":
            events = [self._inside("response.reasoning_text.done", content_index=0, text=text), self._part("done")]
            item["content"] = [self._part_of(item)]
            if self._seals_reasoning:
                item["encrypted_content"] = sealed(text)
        else:
            done = self._inside("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            events = [done, self._part("done")]
            item["content"] = [self._part_of(item)]
        events.append(self._event("response.output_item.done", output_index=len(self.output), item=item))
        self.output.append(item)
        self._item, self._text, self._logprobs = None, [], []
        return events

    def _part_of(self, item: Item) -> dict[str, Any]:
        text = "".join(self._text)
        if item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    # ---- events ----

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}

    def _about(self, kind: str) -> StreamEvent:
        """Of the response as it is now."""
        return self._event(kind, response={**self.response, "output": list(self.output)})

    def _inside(self, kind: str, **fields: Any) -> StreamEvent:
        """Of the open item."""
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self.output), **fields)

    def _part(self, what: str) -> StreamEvent:
        assert self._item is not None
        return self._inside(f"response.content_part.{what}", content_index=0, part=self._part_of(self._item))

    def _end(self, status: str, usage: Usage) -> None:
        self.response["status"] = status
        self.response["completed_at"] = int(time.time()) if status == "completed" else None
        self.response["usage"] = usage_of(usage)


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,  # what is cached on the way costs nothing, and is not counted
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
