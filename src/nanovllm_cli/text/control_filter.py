"""Text that cannot drive a terminal: what a model or a file says, without control sequences."""

from __future__ import annotations

from typing import Literal

State = Literal["text", "escape", "csi", "string", "string escape"]


class ControlFilter:
    """Takes control sequences out of text that comes in pieces: CSI, OSC and their kin, every control character but
    newline and tab, and what turns the order of characters round (a line that reads otherwise than it is). An
    unfinished OSC ends with its line, so that a model can hide no more than that."""

    def __init__(self) -> None:
        self._state: State = "text"

    def feed(self, text: str) -> str:
        if self._state == "text" and text.isprintable():
            return text
        return "".join(filter(self._keeps, text))

    def _keeps(self, character: str) -> bool:
        code = ord(character)
        if code == 0x1B:
            self._state = "string escape" if self._state in ("string", "string escape") else "escape"
            return False
        if self._state == "text":
            self._state = _C1.get(code, "text")
            return character in "\n\t" or not (code < 0x20 or 0x7F <= code < 0xA0 or code in _REORDERS)
        if self._state == "escape":
            if not 0x20 <= code <= 0x2F:  # what comes before the last character of a short sequence
                self._state = _AFTER_ESCAPE.get(character, "text")
        elif self._state == "csi":
            if not 0x20 <= code <= 0x3F:
                self._state = "text"
        elif self._state == "string escape" or character in "\n\x07\x9c":
            self._state = "text"
        return character == "\n"


_AFTER_ESCAPE: dict[str, State] = {"[": "csi", **dict.fromkeys("]PX^_", "string")}
_C1: dict[int, State] = {0x9B: "csi", **dict.fromkeys((0x90, 0x98, 0x9D, 0x9E, 0x9F), "string")}
_REORDERS = frozenset((*range(0x202A, 0x202F), *range(0x2066, 0x206A)))  # overrides, embeddings, isolates
