"""ChatTurns: a conversation in OpenAI's form of chat messages, put together of smaller pieces than turns: of items
(/v1/responses) and of blocks (/v1/messages). Linear in what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

ChatMessage = dict[str, Any]

_BETWEEN = "\n\n"


class Picture(NamedTuple):
    """An image as its client sent it, and where that stands in the request. It may have megabytes: nothing copies it."""

    url: str
    path: str


Said = str | Sequence[str | Picture]
"""A text, or several with images between them; those that follow each other are a line each."""


class Conversation(NamedTuple):
    """image_paths: where the images of its messages stand in their client's request, in their order."""

    messages: list[ChatMessage]
    image_paths: list[str]


class ChatTurns:
    """say(), call() and result() in the order of the conversation, then conversation().

    What the assistant says, thinks and calls between two of the others' messages is one message. What is said to it as system or
    developer before anybody else speaks is one message of the system, since most templates take only one. joins: roles whose
    messages are one where they follow each other.
    """

    def __init__(self, joins: tuple[str, ...] = ("assistant",)) -> None:
        self._joins = joins
        self._turns: list[ChatMessage] = []
        self._image_paths: list[str] = []

    def say(self, role: str, said: Said, field: Literal["content", "reasoning_content"] = "content") -> None:
        if role in ("system", "developer") and (not self._turns or self._at_beginning()):
            turn = self._turn("system", joined=True)
        else:
            turn = self._turn(role, joined=role in self._joins)
        turn.setdefault(field, []).extend(self._pieces(said))

    def call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant", joined=True).setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, name: str, said: Said) -> None:
        self._turns.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": self._pieces(said)})

    def conversation(self) -> Conversation:
        messages = [
            {"content": None}
            | {key: _content(value) if key in ("content", "reasoning_content") else value for key, value in turn.items()}
            for turn in self._turns
        ]
        return Conversation(messages, self._image_paths)

    def _at_beginning(self) -> bool:
        return len(self._turns) == 1 and self._turns[0]["role"] == "system"

    def _turn(self, role: str, joined: bool) -> ChatMessage:
        """The last one, if it is to be joined, or a new one."""
        if not (joined and self._turns and self._turns[-1]["role"] == role):
            self._turns.append({"role": role})
        return self._turns[-1]

    def _pieces(self, said: Said) -> list[str | Picture]:
        """Texts and images, of which the latter are taken note of."""
        if isinstance(said, str):
            return [said]
        self._image_paths += [piece.path for piece in said if isinstance(piece, Picture)]
        return _joined(said, "\n") or [""]


def _joined(pieces: Iterable[str | Picture], between: str) -> list[str | Picture]:
    """With one text in the place of several that follow each other."""
    joined: list[str | Picture] = []
    for kind, group in groupby(pieces, type):
        run = list(group)
        joined += [between.join(map(str, run))] if kind is str else run
    return joined


def _content(pieces: Sequence[str | Picture]) -> str | list[dict[str, Any]]:
    """As a message has it: a text, or parts."""
    whole = _joined(pieces, _BETWEEN)
    if len(whole) == 1 and isinstance(whole[0], str):
        return whole[0]
    return [
        {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image_url", "image_url": {"url": piece.url}}
        for piece in whole
    ]
