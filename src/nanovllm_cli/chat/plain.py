"""A conversation without a terminal's help: in a pipe, where each line is a message, and on terminals that only print.

stdout has the answers and what commands say, each ended by a newline, and never an escape sequence; all else goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Callable

from nanovllm_cli.chat.surface import DECIDE
from nanovllm_cli.cli.inputs import MAX_INPUT_BYTES, decode, standard_input
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import PROMPT_WORTH_SHOWING
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.control_filter import ControlFilter

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'


def is_open(text: str) -> bool:
    """Whether a message begins with three quotation marks whose like has not come yet: more lines follow."""
    return text.startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """A message without the marks that are only around it."""
    if text.startswith(QUOTES) and text.endswith(QUOTES) and text.count(QUOTES) == 2:
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


class PlainReader:
    """A message a line; between two lines with three quotation marks, all in between is one message."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._source = standard_input()
        self._asks = sys.stdin is not None and sys.stdin.isatty()

    def read(self, draft: str = "") -> str:
        """A draft cannot be offered here."""
        line = self._line(PROMPT)
        if not line.startswith(QUOTES):
            return line
        lines, marks, size = [line], line.count(QUOTES), len(line)
        while marks % 2 == 1:
            if size > MAX_INPUT_BYTES:
                raise UsageError(f"the message is longer than {MAX_INPUT_BYTES >> 20} MiB")
            try:
                line = self._line(MORE)
            except EOFError:
                if self._asks:
                    raise  # Ctrl-D, seen by whoever pressed it
                hint = f"a line that ends in {QUOTES} ends it"
                raise UsageError(f"the message that began with {QUOTES} has no end", hint) from None
            lines.append(line)
            marks += line.count(QUOTES)
            size += len(line)
        return unquoted("\n".join(lines))

    def decide(self) -> str | None:
        """What was typed before the question is no answer to it."""
        if not self._asks:
            return None
        with contextlib.suppress(termios.error):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        return self._line(DECIDE)

    def close(self) -> None:
        pass

    def _line(self, prompt: str) -> str:
        if self._source is None:
            raise EOFError
        if self._asks:
            self._console.ask(prompt)
        data = b""
        try:
            data = self._source.readline(MAX_INPUT_BYTES + 1)
        finally:
            if self._asks and not data.endswith(b"\n"):
                self._console.left_open()
        if len(data) > MAX_INPUT_BYTES:
            raise UsageError(f"a line is longer than {MAX_INPUT_BYTES >> 20} MiB")
        if not data:
            raise EOFError
        return decode(data, "standard input").removesuffix("\n").removesuffix("\r")


class AsItIs:
    """An answer without its control sequences, and ended by a newline."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._filter = ControlFilter()
        self._ends_line = self.has_text = False

    def feed(self, text: str) -> None:
        text = self._filter.feed(text)
        if text:
            self.has_text = True
            self._ends_line = text.endswith("\n")
            self._write(text)

    def finish(self) -> None:
        if not self._ends_line:
            self._write("\n")


class PlainDisplay:
    """A Display on a Console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._answer = AsItIs(console.answer)

    def begin(self) -> None:
        self._answer = AsItIs(self._console.answer)

    def progress(self, done: int, total: int) -> None:
        if total >= PROMPT_WORTH_SHOWING:
            self._console.status(f"reading the prompt  {done:,} of {total:,} tokens")

    def reasoning(self, text: str) -> None:
        self._console.aside(text)

    def content(self, text: str) -> None:
        self._answer.feed(text)

    def end(self, remark: str | None = None, *, goes_on: bool = False) -> None:
        if not goes_on or self._answer.has_text:
            self._answer.finish()
        if remark is not None:
            self._console.say(f"({remark})", "dim")

    def tool(self, line: str, *, is_asked: bool = False) -> None:
        (self._console.line if is_asked else self._console.say)(ControlFilter().feed(line), "dim")

    def say(self, text: str) -> None:
        self._console.answer(ControlFilter().feed(text).rstrip("\n") + "\n")

    def warn(self, text: str) -> None:
        self._console.say(text, "hint")

    def fail(self, what: str, hint: str | None = None) -> None:
        self._console.error(what, hint)
