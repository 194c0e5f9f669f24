"""The line that a person writes their messages in, by prompt_toolkit: history, paste, completion, a toolbar.

A long paste stands in the line as a short mark, and is sent whole. This module is imported late: prompt_toolkit costs 150 ms.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app, run_in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import clear_typeahead, store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from nanovllm_cli.chat.keys import AnswerKeys
from nanovllm_cli.chat.plain import is_open, unquoted
from nanovllm_cli.chat.surface import DECIDE, Complete, Status
from nanovllm_cli.chat.toolbar import toolbar
from nanovllm_cli.cli.files import write_whole
from nanovllm_cli.cli.output import one_line

log = logging.getLogger(__name__)

PROMPT = "› "
_LONG_PASTE_LINES, _LONG_PASTE_CHARACTERS = 20, 4000
_MAX_KEPT = 20_000  # characters of a message that history keeps, and of a draft that is shown whole
_MAX_HISTORY_BYTES = 1 << 20

_STYLE = Style.from_dict(
    {
        "prompt": "bold ansimagenta",
        "bottom-toolbar": "noreverse dim",
        "bottom-toolbar.full": "nodim bold ansiyellow",
        "auto-suggestion": "noinherit dim",
    }
)


class LineEditor:
    """A Reader on a terminal.

    complete: what could stand in place of the last word. status: what the toolbar shows. toggle_thinking: Ctrl-T. keys: the
    keyboard between two lines. history_file: None keeps none.
    """

    def __init__(
        self,
        complete: Complete,
        status: Callable[[], Status],
        toggle_thinking: Callable[[], None],
        *,
        keys: AnswerKeys | None = None,
        history_file: Path | None = None,
        color: bool = True,
    ) -> None:
        self._status = status
        self._toggle_thinking = toggle_thinking
        self._keys = keys
        self._pastes = Pastes()
        self._input = create_input(sys.stdin)
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", PROMPT)],
            input=self._input,
            output=_Output.from_pty(sys.stdout, term=os.environ.get("TERM")),
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            style=_STYLE,
            multiline=True,
            prompt_continuation=lambda width, line_number, is_soft_wrap: " " * width,
            history=open_history(history_file, self._pastes.expand),
            auto_suggest=AutoSuggestFromHistory(),
            completer=_Words(complete),
            complete_while_typing=Condition(_is_command),
            reserve_space_for_menu=6,
            bottom_toolbar=self._toolbar,
            key_bindings=self._bindings(),
            enable_suspend=True,
        )

    def read(self, draft: str = "") -> str:
        if self._keys is not None:
            self._type_ahead(self._keys.take())
        app = self._session.app
        folded = self._pastes.fold(draft)
        try:
            with _Ending(app) as ending:
                text = self._session.prompt(
                    default=folded if len(folded) <= _MAX_KEPT else self._pastes.shorten(draft),
                    pre_run=ending.begin,
                    set_exception_handler=False,
                )
        except OSError as failure:  # the terminal is gone
            raise EOFError from failure
        finally:
            if self._keys is not None:
                self._keys.watch()
        return self._pastes.expand(unquoted(text)).encode("utf-8", "replace").decode()

    def decide(self) -> str | None:
        """What was typed before the question is no answer to it."""
        if self._keys is not None:
            self._keys.take()
        clear_typeahead(self._input)
        session: PromptSession[str] = PromptSession(
            [("class:prompt", DECIDE)], input=self._input, output=self._session.output, style=_STYLE,
            color_depth=self._session.color_depth, enable_suspend=True,
        )  # fmt: skip
        try:
            with _Ending(session.app) as ending:
                return session.prompt(pre_run=ending.begin, set_exception_handler=False)
        except OSError as failure:
            raise EOFError from failure
        finally:
            if self._keys is not None:
                self._keys.watch()

    def close(self) -> None:
        if self._keys is not None:
            self._keys.release()
        self._input.close()

    def _type_ahead(self, typed: bytes) -> None:
        """What was typed since the last line is the beginning of this one."""
        presses: list[KeyPress] = []
        parser = Vt100Parser(presses.append)
        parser.feed_and_flush(typed.decode("utf-8", "replace"))
        store_typeahead(self._input, presses)

    def _toolbar(self) -> StyleAndTextTuples:
        columns = get_app().output.get_size().columns
        return [
            (f"class:bottom-toolbar.{name}" if name else "", text) for name, text in toolbar(self._status(), columns)
        ]

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()
        in_line = has_focus(DEFAULT_BUFFER)  # and not in the field of a search

        @bindings.add("enter", filter=in_line)
        def send(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
                buffer.complete_state = None  # a chosen completion is taken first
            elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):  # llama-cli's way to begin a line
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            elif is_open(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @bindings.add("escape", "enter", filter=in_line)
        @bindings.add("c-j", filter=in_line)
        def newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c", filter=in_line)
        @bindings.add("<sigint>", filter=in_line)
        def interrupt(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt())

        @bindings.add("c-g", filter=in_line)
        def edit(event: KeyPressEvent) -> None:
            self._edit(event.current_buffer)

        @bindings.add("c-t")
        def fold(event: KeyPressEvent) -> None:
            run_in_terminal(self._toggle_thinking)

        @bindings.add(Keys.BracketedPaste)
        def paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(self._pastes.shorten(text))

        return bindings

    def _edit(self, buffer: Buffer) -> None:
        """Opens what is written in the person's own editor, pastes in full."""
        buffer.document = Document(self._pastes.expand(buffer.text))

        def done(task: asyncio.Task[None]) -> None:
            buffer.document = Document(self._pastes.shorten(buffer.text))

        buffer.open_in_editor().add_done_callback(done)


class Pastes:
    """Long texts by the marks that stand for them in the line."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def shorten(self, text: str) -> str:
        """A mark in place of a long text; a short one as it is."""
        lines = text.count("\n") + 1
        if lines <= _LONG_PASTE_LINES and len(text) <= _LONG_PASTE_CHARACTERS:
            return text
        mark = f"[text {len(self._texts) + 1}: {lines:,} lines, {len(text):,} characters]"
        self._texts[mark] = text
        return mark

    def fold(self, text: str) -> str:
        """The text with the marks of what was pasted into it: shown whole, it would push what was said before off the screen."""
        for mark, pasted in sorted(self._texts.items(), key=lambda item: len(item[1]), reverse=True):
            text = text.replace(pasted, mark)
        return text

    def expand(self, text: str) -> str:
        """The text with what its marks stand for; marks that a pasted text has itself are left alone."""
        marks = [mark for mark in self._texts if mark in text]
        if not marks:
            return text
        pattern = re.compile("|".join(map(re.escape, marks)))
        return pattern.sub(lambda found: self._texts[found[0]], text)


def open_history(path: Path | None, expand: Callable[[str], str]) -> History:
    """What was sent before, in a file that only its owner can read; in memory where there can be none."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        _shorten_file(path)
    except OSError as failure:
        log.info("what is typed here is not kept: %s", failure)
        return InMemoryHistory()
    return _PrivateHistory(path, expand)


class _PrivateHistory(FileHistory):
    """Messages in full, but not those that are too long to be looked for. Failing to keep one is no failure of the chat."""

    def __init__(self, path: Path, expand: Callable[[str], str]) -> None:
        super().__init__(path)
        self._expand = expand

    def store_string(self, string: str) -> None:
        text = self._expand(string)
        if len(text) > _MAX_KEPT:
            return
        try:
            super().store_string(text)
        except OSError as failure:
            log.info("a line was not kept in the history: %s", failure)


def _shorten_file(path: Path) -> None:
    """Drops the older half of a history that has grown too long."""
    if path.stat().st_size <= _MAX_HISTORY_BYTES:
        return
    kept = path.read_bytes()[-_MAX_HISTORY_BYTES // 2 :]
    write_whole(path, "\n# " + kept.decode("utf-8", "replace").partition("\n# ")[2], mode=0o600)


class _Words(Completer):
    """Completion of the last word, and only of commands."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        begin = -len(text.rsplit(" ", 1)[-1])
        for word, description in self._complete(text):
            yield Completion(word, begin, display=one_line(word), display_meta=one_line(description))


class _Output(Vt100_Output):
    """A terminal that is not asked where its cursor is: the toolbar stands right below the line, and no late reply can get
    into an answer."""

    def get_rows_below_cursor_position(self) -> int:
        return 1


class _Ending:
    """While a line is read: what ends the program leaves the line first, so that the terminal is whole again."""

    def __init__(self, app: Application[str]) -> None:
        self._app = app
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Called when the line is there."""
        asyncio.get_running_loop().set_exception_handler(self._fail)
        if self._received is not None:
            self._leave(EOFError())

    def __enter__(self) -> _Ending:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(signum)):
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._received is not None:
            signal.raise_signal(self._received)  # to whom it was meant for

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        if self._app.loop is not None:
            self._app.loop.call_soon_threadsafe(self._leave, EOFError())

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._leave(context.get("exception") or RuntimeError(context["message"]))

    def _leave(self, exception: BaseException) -> None:
        if self._app.is_running and not self._app.is_done:
            self._app.exit(exception=exception)


def _is_command() -> bool:
    return get_app().current_buffer.text.startswith("/")
