"""ChatTurns: a conversation in OpenAI's form of chat messages, put together of smaller pieces than turns: of items
(/v1/responses) and of blocks (/v1/messages). Linear in what it is given."""

from __future__ import annotations

from typing import Any, Literal

ChatMessage = dict[str, Any]

_BETWEEN = "\n\n"


class ChatTurns:
    """say(), call() and result() in the order of the conversation, then messages().

    What the assistant says, thinks and calls between two of the others' messages is one message. What is said to it as system or
    developer before anybody else speaks is one message of the system, since most templates take only one. joins: roles whose
    messages are one where they follow each other.
    """

    def __init__(self, joins: tuple[str, ...] = ("assistant",)) -> None:
        self._joins = joins
        self._turns: list[ChatMessage] = []

    def say(self, role: str, text: str, field: Literal["content", "reasoning_content"] = "content") -> None:
        if role in ("system", "developer") and (not self._turns or self._at_beginning()):
            turn = self._turn("system", joined=True)
        else:
            turn = self._turn(role, joined=role in self._joins)
        turn.setdefault(field, []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant", joined=True).setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, name: str, text: str) -> None:
        self._turns.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": [text]})

    def messages(self) -> list[ChatMessage]:
        return [
            {"content": None}
            | {key: _BETWEEN.join(value) if key in ("content", "reasoning_content") else value for key, value in turn.items()}
            for turn in self._turns
        ]

    def _at_beginning(self) -> bool:
        return len(self._turns) == 1 and self._turns[0]["role"] == "system"

    def _turn(self, role: str, joined: bool) -> ChatMessage:
        """The last one, if it is to be joined, or a new one."""
        if not (joined and self._turns and self._turns[-1]["role"] == role):
            self._turns.append({"role": role})
        return self._turns[-1]
