"""gpt-oss' answers, which are messages with channels (Harmony), a piece at a time: whose channel a piece of text is of. Muse's
are messages to itself, to tools and to the user.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from nanovllm_cli.text.reasoning_parsers import ReasoningDelta, overlap

TO_USER = " to=user<|message|>"


class HarmonyPiece(NamedTuple):
    """A piece of a message. kind: analysis, content, or what is sent to a tool: "call header", "call", "call end"."""

    kind: str
    text: str


class HarmonyParser:
    """The channels of gpt-oss: `analysis` is reasoning, `final` and spoken `commentary` are content.

    Messages to a tool (`to=…` in the header) pass into the content unchanged, markers included; `pieces` tells them apart.
    """

    _MAX_HEADER = 4096
    _ENDS: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    _BEGINS: tuple[str, ...] = ("<|start|>", "<|channel|>")
    def __init__(self, starts_in: str = "") -> None:
        """starts_in: the channel whose message the prompt has already begun, or nothing."""
        self._channel = starts_in or "header"
        self._held = ""
        self._marks = self._ENDS + self._BEGINS
        self._mark = re.compile("|".join(map(re.escape, self._marks)))

    @classmethod
    def of(cls, prompt: str) -> Self:
        """For the answer to a rendered prompt."""
        return cls(cls.channel(prompt))

    @classmethod
    def channel(cls, prompt: str) -> str:
        """The channel that the end of a prompt has opened, or nothing."""
        start = prompt.rfind("<|start|>")
        tail = prompt[start:] if start >= 0 else ""
        return cls._channel_of(tail) if tail.endswith("<|message|>") else ""

    @staticmethod
    def _channel_of(header: str) -> str:
        """`analysis`, `final`, `tool` or another channel's name, from `<|start|>role to=…<|channel|>name …<|message|>`."""
        name = header.rpartition("<|channel|>")[2].partition("<|message|>")[0].split() if "<|channel|>" in header else []
        if " to=" in header.replace(" to=assistant", ""):  # a model's slip, and no tool
            return "tool"
        return name[0] if name else "final"

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> ReasoningDelta:
        return _split_pieces(self.pieces(text))

    def finish(self) -> ReasoningDelta:
        """A header without a message is nothing."""
        return _split_pieces(self.last_pieces())

    def pieces(self, text: str) -> list[HarmonyPiece]:
        """The same as `push`, message by message."""
        text, position = self._held + text, 0
        found: list[HarmonyPiece] = []
        while position < len(text):
            if self._channel == "header":
                end = text.find("<|message|>", position, position + self._MAX_HEADER)
                if end < 0:
                    if len(text) - position <= self._MAX_HEADER:
                        break
                    # No header, but a model out of its format: a mark that it begins with is text, too.
                    self._channel = "final"
                    found.append(HarmonyPiece(self._kind, text[position]))
                    position += 1
                    continue
                end += len("<|message|>")
                self._channel = self._channel_of(text[position:end])
                if self._channel == "tool":
                    found.append(HarmonyPiece("call header", text[position:end]))
                position = end
                continue
            match = self._mark.search(text, position)
            end = match.start() if match else len(text) - self._longest_overlap(text, position)
            found.append(HarmonyPiece(self._kind, text[position:end]))
            position = end
            if match is None:
                break
            if self._channel == "tool":
                found.append(HarmonyPiece("call end", match.group()))
            if match.group() not in self._BEGINS:
                position = match.end()
            self._channel = "header"
        self._held = text[position:]
        return found

    def last_pieces(self) -> list[HarmonyPiece]:
        """The same as `finish`."""
        held, self._held = self._held, ""
        if self._channel == "header":
            return [] if held.startswith("<|") else [HarmonyPiece("content", held)]
        return [HarmonyPiece(self._kind, held)]

    @property
    def _kind(self) -> str:
        return {"analysis": "analysis", "tool": "call"}.get(self._channel, "content")

    def _longest_overlap(self, text: str, position: int) -> int:
        tail = text[max(position, len(text) - max(map(len, self._marks))) :]
        return max(overlap(tail, mark) for mark in self._marks)


class MuseParser(HarmonyParser):
    """Muse's messages: to=self is reasoning, what is to the user is content. Those to tools pass as they do in Harmony. One to
    the user may begin in reasoning that has to end."""

    _ENDS = ("<|eom|>", "<|eot|>")
    _BEGINS = ("<|start|>", TO_USER)

    @staticmethod
    def _channel_of(header: str) -> str:
        """The same of `<|start|>assistant to=…<|message|>`."""
        recipient = re.search(r"(?:^| )to=([^\s<]*)", header)
        return {"self": "analysis", "user": "final", "": "final"}.get(recipient[1], "tool") if recipient else "final"


def _split_pieces(pieces: list[HarmonyPiece]) -> ReasoningDelta:
    return ReasoningDelta(
        "".join(text for kind, text in pieces if kind == "analysis"),
        "".join(text for kind, text in pieces if kind != "analysis"),
    )
