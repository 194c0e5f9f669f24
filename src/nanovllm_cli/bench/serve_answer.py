"""What is to be counted of a streamed answer: its pieces, and the tokens that the server says it has."""

from __future__ import annotations

from typing import Any

from nanovllm_cli.client.events import event_object, token_count

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


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
        chunk = event_object(data)
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
            self.input_tokens = token_count(usage.get("prompt_tokens"), self.input_tokens)
            self.output_tokens = token_count(usage.get("completion_tokens"), self.output_tokens)


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in (*_TEXTS, "tool_calls"))
