"""What a conversation needs of the place where it happens: a terminal, a dumb one, or a pipe.

`loop.py` talks to these protocols and knows no terminal; `plain.py` and `terminal.py` implement them and know no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

NEARLY_FULL = 0.8  # of the context
DECIDE = "run it? yes, no or always: "
"""Asked before a tool is called."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the toolbar shows. Tokens, tokens a second of the last answer (None before one), bytes; None where it is not known."""

    model: str
    context_used: int | None
    context_size: int | None
    tokens_per_second: float | None
    memory_bytes: int | None
    session: str | None


Complete = Callable[[str], Iterable[tuple[str, str]]]
"""Given the text before the cursor: what could stand in place of its last word, each with a short description."""


class Reader(Protocol):
    """Where the person's messages come from."""

    def read(self, draft: str = "") -> str:
        """One message, without its line end; `draft` is text to be changed (for /edit), where that is possible.

        Raises EOFError at the end of input or on Ctrl-D, KeyboardInterrupt on Ctrl-C.
        """

    def decide(self) -> str | None:
        """What a person answers to DECIDE, or None where nobody can be asked. Raises as `read` does."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class Display(Protocol):
    """Where an answer and remarks go. Everything a model wrote is untrusted text."""

    def begin(self) -> None:
        """An answer is about to come: the prompt is being read."""

    def progress(self, done: int, total: int) -> None:
        """So many of the prompt's tokens are read."""

    def reasoning(self, text: str) -> None:
        """More of the model's reasoning."""

    def content(self, text: str) -> None:
        """More of the answer."""

    def end(self, remark: str | None = None, *, goes_on: bool = False) -> None:
        """The answer is over: whatever was held back is shown. remark: why, where it is worth saying ("interrupted"). goes_on:
        another one follows, so that one without a text is nothing to show."""

    def tool(self, line: str, *, is_asked: bool = False) -> None:
        """A tool is called, or was not: something to know while the answer is on its way. is_asked: a person decides on it, and
        has to see it."""

    def say(self, text: str) -> None:
        """The outcome of a command: what was asked for, lines of our own."""

    def warn(self, text: str) -> None:
        """Something to know, in one line."""

    def fail(self, what: str, hint: str | None = None) -> None:
        """A mistake or a failure that does not end the conversation."""
