"""Where text leaves: stdout for the answer, stderr for everything else, each judged as a terminal by itself.

Rules that hold here and nowhere else need to be thought of again: stdout never carries an escape sequence of ours; a
stderr that is no terminal carries colour only when FORCE_COLOR asks for it, and never cursor movement; what a model
wrote loses its control sequences on a terminal and keeps every byte elsewhere. Nothing here needs `rich`: its import
alone takes longer than a first sign of life on the screen may.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from typing import Literal, TextIO

from nanovllm_cli.errors import OutputError
from nanovllm_cli.text.control_filter import ControlFilter

Style = Literal["dim", "error", "hint"]

_SGR = {"dim": "\x1b[2m", "error": "\x1b[1;31m", "hint": "\x1b[36m"}
_RESET = "\x1b[0m"
_ERASE_LINE = "\r\x1b[K"


class ReaderGone(BaseException):
    """The reader of stdout closed its end (`| head`): the work is done, quietly. Not an Exception, as Ctrl-C is not."""


class Stream:
    """stdout or stderr: what it may carry, and writes that end in a typed error or not at all.

    required: its text is the point of the program, so that a failed write is an error. A stderr that nobody reads is
    not.
    """

    def __init__(
        self, file: TextIO | None, name: str, *, required: bool, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        self.required = required
        self.at_line_start = True
        self._file = file
        self._gone = False
        self.is_terminal = file is not None and file.isatty()
        self.is_pipe = _is_pipe(file)
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                os.set_blocking(file.fileno(), True)  # another program may have left it so that what finds no room is lost
        dumb = environ.get("TERM", "") in ("", "dumb")
        self.moves_cursor = self.is_terminal and not dumb
        self.color = _wants_color(environ, self.moves_cursor)
        reconfigure = getattr(file, "reconfigure", None)
        if reconfigure is not None and self.is_terminal:
            reconfigure(errors="replace")
        elif reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace", newline="\n")

    def write(self, text: str) -> None:
        """Writes and flushes. Raises ReaderGone, or OutputError, once, where the stream is required; else gives up on
        it."""
        if text:
            self._put(text, text.endswith("\n"))

    def write_bytes(self, data: bytes) -> None:
        """The same of bytes, which need not be text: nothing is to be added to them."""
        if data:
            self._put(data, True)

    def _put(self, what: str | bytes, at_line_start: bool) -> None:
        if self._gone:
            return
        if self._file is None:
            if self.required:
                raise OutputError(f"{self.name} is closed")
            return
        self.at_line_start = at_line_start  # before writing: a signal may come right behind it
        try:
            if isinstance(what, bytes):
                self._file.flush()
                self._file.buffer.write(what)
            else:
                self._file.write(what)
            self._file.flush()
        except BrokenPipeError:
            self._give_up()
            if self.required:
                raise ReaderGone from None
        except (OSError, ValueError) as failure:
            self._give_up()
            if self.required:
                reason = failure.strerror if isinstance(failure, OSError) else str(failure)
                raise OutputError(f"cannot write to {self.name}: {reason}") from failure

    def width(self) -> int:
        """Columns of the terminal; 80 where there is none."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                return os.get_terminal_size(self._file.fileno()).columns or 80
        return shutil.get_terminal_size().columns

    def can_show(self, text: str) -> bool:
        try:
            text.encode(getattr(self._file, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def _give_up(self) -> None:
        """Points the descriptor at the null device, so that what Python still holds in its buffer does not fail again
        at exit."""
        file, self._file, self._gone = self._file, None, True
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file.fileno())  # type: ignore[union-attr]
            os.close(null)


class Console:
    """Both streams, and the one line of status that comes and goes on stderr.

    quiet: no notes and no status; errors still show.
    """

    def __init__(self, out: Stream | None = None, err: Stream | None = None) -> None:
        self.out = out or Stream(sys.stdout, "standard output", required=True)
        self.err = err or Stream(sys.stderr, "standard error", required=False)
        self.quiet = False
        self._one_screen = self.out.is_terminal and self.err.is_terminal
        self._may_be_one_screen = self._one_screen or (self.out.is_pipe and self.err.is_terminal)  # `| cat`
        self._may_be_written_on = False  # by who reads our answers, who may be at it at any moment from the first of them on
        self._last = self.err
        self._status = ""
        self._styled = False
        self._filters = {stream: ControlFilter() for stream in (self.out, self.err)}

    def status(self, text: str) -> None:
        """Shows `text` as the status line in place of the last one; "" takes it away. Only on a terminal that has a
        cursor, and that `| jq` does not write on."""
        if not self.err.moves_cursor or self.quiet or (text and self._may_be_written_on):
            return
        text = one_line(text)[: max(self.err.width() - len("^C") - 1, 1)]  # the terminal writes that behind it, on the same line
        if text == self._status:
            return
        if self._status:
            self._write(self.err, _ERASE_LINE)
        else:
            self._begin_line()
        self._write(self.err, text)
        self._status = text
        if not text:
            self._note_line_start(True)

    def announce(self, text: str) -> None:
        """The status line; on a terminal without a cursor a line of its own, so that there too something is seen."""
        if self.err.is_terminal and not self.err.moves_cursor:
            self.say(text)
        self.status(text)

    def say(self, text: str, style: Style | None = None) -> None:
        """A line on stderr, unless quiet."""
        if not self.quiet:
            self.line(text, style)

    def line(self, text: str, style: Style | None = None) -> None:
        """A line on stderr, come what may."""
        self.status("")
        self._begin_line()
        self._write(self.err, self._paint(one_line(text), style) + "\n")

    def ask(self, prompt: str) -> None:
        """The beginning of a line that a person at the terminal goes on with."""
        if self.err.is_terminal:
            self.status("")
            self._begin_line()
            self._write(self.err, prompt)
            self._note_line_start(True)  # it ends with what the person types

    def left_open(self) -> None:
        """That line was ended by Ctrl-C or Ctrl-D, which move no cursor: what comes next begins one."""
        if self.err.is_terminal:
            self._note_line_start(False)

    def error(self, message: str, hint: str | None = None) -> None:
        """What went wrong and, on the next line, what to do about it."""
        self.status("")
        self._begin_line()
        self._write(self.err, f"{self._paint('error:', 'error')} {one_line(message)}\n")
        if hint:
            self._write(self.err, f"{self._paint('hint:', 'hint')} {one_line(hint)}\n")

    def answer(self, text: str) -> None:
        """A piece of the model's answer, on stdout."""
        if self._may_be_one_screen:
            self.status("")
            self._end_style()
            if self._last is self.err:
                self._begin_line()
        self._may_be_written_on = self._may_be_one_screen and not self._one_screen
        self._write(self.out, self._filters[self.out].feed(text) if self.out.is_terminal else text)

    def verbatim(self, text: str) -> None:
        """A piece of an answer behind which nothing is written that is not of it, but for a terminal, where a line ends."""
        self.answer(text)
        if not self.out.is_terminal:
            self.out.at_line_start = True

    def lines(self, lines: Iterable[str]) -> None:
        """Whole lines of an answer."""
        self.answer("".join(f"{line}\n" for line in lines))

    def record(self, value: object) -> None:
        """A line of JSON, as an answer."""
        self.lines([json.dumps(value, ensure_ascii=False)])

    def styled(self, text: str) -> None:
        """Text on stdout that its writer has filtered and styled for the terminal there."""
        if self._one_screen:
            self.status("")
        self._write(self.out, text)

    def dimmed(self, text: str) -> str:
        """`text` as `styled` may show it: dimmed where stdout is a terminal with colours."""
        return f"{_SGR['dim']}{text}{_RESET}" if self.out.is_terminal and self.out.color else text

    def exactly(self, data: bytes) -> None:
        """Bytes on stdout as they are; on a terminal the text that they are, as an answer."""
        if self.out.is_terminal:
            self.answer(data.decode("utf-8", "replace"))
        else:
            self.status("")
            self.out.write_bytes(data)

    def aside(self, text: str) -> None:
        """A piece of the model's reasoning, dimmed, on stderr."""
        self.status("")
        if self._one_screen and self._last is self.out:
            self._begin_line()
        if self.err.is_terminal:
            text = self._filters[self.err].feed(text)
        if self.err.color and not self._styled and text:
            text = _SGR["dim"] + text
            self._styled = True
        self._write(self.err, text)

    def end_answer(self) -> None:
        """Ends what is on the screen, whole or cut off, at the beginning of a line and in the terminal's own colour."""
        self.status("")
        self._end_style()
        for stream in (self.out, self.err):
            if not stream.at_line_start:
                self._write(stream, "\n")

    def _write(self, stream: Stream, text: str) -> None:
        if text:
            self._last = stream
            self._note_line_start(text.endswith("\n"))
        stream.write(text)

    def _note_line_start(self, at_line_start: bool) -> None:
        for stream in (self.out, self.err) if self._one_screen else (self._last,):
            stream.at_line_start = at_line_start

    def _begin_line(self) -> None:
        if not self.err.at_line_start:
            self._write(self.err, "\n")

    def _paint(self, text: str, style: Style | None) -> str:
        return f"{_SGR[style]}{text}{_RESET}" if style is not None and self.err.color else text

    def _end_style(self) -> None:
        if self._styled:
            at_line_start = self.err.at_line_start
            self._write(self.err, _RESET)
            self._note_line_start(at_line_start)
            self._styled = False


@functools.cache
def console() -> Console:
    """The process's own: one status line, one idea of where the cursor is."""
    return Console()


def one_line(text: str) -> str:
    """`text` on one line without control characters: what a message may safely show of names and of others' words."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text).strip()


def _is_pipe(file: TextIO | None) -> bool:
    try:
        return file is not None and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _wants_color(environ: Mapping[str, str], moves_cursor: bool) -> bool:
    """NO_COLOR (no-color.org) over FORCE_COLOR (force-color.org) over what the stream is."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return moves_cursor
