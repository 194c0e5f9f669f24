"""What a person sees of a conversation on a terminal: answers as Markdown, thinking dimmed or folded, remarks.

Everything is appended, on stdout; only the status line (the prompt's progress, folded thinking) comes and goes. Text of
models and files loses its control sequences on the way.
"""

from __future__ import annotations

import time
from typing import Literal

from nanovllm_cli.chat.flow import Flow
from nanovllm_cli.chat.keys import AnswerKeys
from nanovllm_cli.chat.markdown import MarkdownStream
from nanovllm_cli.chat.plain import AsItIs
from nanovllm_cli.cli.output import Console, one_line
from nanovllm_cli.cli.progress_line import PromptProgress, duration
from nanovllm_cli.text.control_filter import ControlFilter

_STATUS_SECONDS = 0.1
_DIM = "2"

Part = Literal["nothing", "thinking", "answer"]


class TerminalDisplay:
    """A Display on a terminal.

    markdown: answers are rendered, else shown as they are. folds_thinking: of thinking only how long it takes is shown, until
    `toggle_thinking`. keys: the keyboard, watched from now on, where Ctrl-T may be pressed while an answer comes.
    """

    def __init__(
        self, console: Console, *, markdown: bool = True, folds_thinking: bool = False, keys: AnswerKeys | None = None
    ) -> None:
        self.folds_thinking = folds_thinking
        self._console = console
        self._renders = markdown
        self._keys = keys
        if keys is not None:
            keys.watch()
        self._prompt = PromptProgress(console)
        self._part: Part = "nothing"
        self._thought: list[str] = []
        self._num_shown = 0  # of its pieces
        self._is_seen = False
        self._line_ends = ""  # that are shown when something follows
        self._filter = ControlFilter()
        self._flow = self._new_flow()
        self._began = self._drawn = 0.0

    def begin(self) -> None:
        self._part = "nothing"
        self._prompt = PromptProgress(self._console)
        self._thought, self._num_shown = [], 0

    def progress(self, done: int, total: int) -> None:
        self._look_at_keys()
        self._prompt.show(done, total)

    def reasoning(self, text: str) -> None:
        self._look_at_keys()
        if self._part != "thinking":
            self._end_part()
            self._part, self._thought, self._num_shown = "thinking", [], 0
            self._is_seen, self._line_ends = False, ""
            self._filter, self._flow = ControlFilter(), self._new_flow()
            self._began = time.monotonic()
        self._thought.append(self._filter.feed(text))
        if self.folds_thinking:
            self._show_thinking_time()
        else:
            self._show_thought()

    def content(self, text: str) -> None:
        self._look_at_keys()
        if self._part != "answer":
            self._end_part()
            self._part = "answer"
            self._stream = self._new_stream()
        self._stream.feed(text)

    def tool(self, line: str, *, is_asked: bool = False) -> None:
        self._console.status("")
        self._line(ControlFilter().feed(line), _DIM)

    def end(self, remark: str | None = None, *, goes_on: bool = False) -> None:
        is_shown = self._part != "nothing"
        self._console.status("")
        self._end_part()
        self._part = "nothing"
        if remark is not None:
            self._line(f"({remark})", _DIM)
        if is_shown or not goes_on:
            self._console.styled("\n")

    def toggle_thinking(self) -> None:
        """Folds thinking, or shows it: what is going on, or what the last answer thought. Behind it, in the middle of an
        answer, this takes effect with the next one."""
        self.folds_thinking = not self.folds_thinking
        if self._part == "answer":
            return
        self._is_seen = self._is_seen and not self.folds_thinking
        if not self.folds_thinking and self._num_shown < len(self._thought):
            self._console.status("")
            self._show_thought()
        elif self._part == "nothing":
            self._line("thinking is folded" if self.folds_thinking else "thinking is shown", _DIM)
        if self.folds_thinking or self._part == "nothing":
            self._flow.end()
            self._flow.flush()

    def say(self, text: str) -> None:
        text = ControlFilter().feed(text).rstrip("\n")
        self._console.styled(text + "\n")

    def warn(self, text: str) -> None:
        self._line(text, "33", "warning: ")

    def fail(self, what: str, hint: str | None = None) -> None:
        self._line(what, "1;31", "error: ")
        if hint is not None:
            self._line(hint, "36", "hint: ")

    # ---- inside ----

    def _new_flow(self) -> Flow:
        return Flow(self._console.styled, self._console.out.width)

    def _new_stream(self) -> MarkdownStream | AsItIs:
        if not self._renders:
            return AsItIs(self._console.styled)
        return MarkdownStream(self._console.styled, self._console.out.width, color=self._console.out.color)

    def _end_part(self) -> None:
        if self._part == "answer":
            self._stream.finish()
        elif self._part == "thinking":
            self._console.status("")
            self._flow.end()
            self._flow.flush()
            if self.folds_thinking and any(map(str.strip, self._thought)):
                self._line(f"thought for {duration(time.monotonic() - self._began)}", _DIM)
            if any(map(str.strip, self._thought)):
                self._console.styled("\n")

    def _show_thought(self) -> None:
        """What has not been shown of it, without empty lines around it."""
        text = self._line_ends + "".join(self._thought[self._num_shown :])
        self._num_shown = len(self._thought)
        shown = text.rstrip("\n")
        self._line_ends = text[len(shown) :]
        self._flow.put(shown if self._is_seen else shown.lstrip("\n"), _DIM)
        self._flow.flush()
        self._is_seen = self._is_seen or bool(shown)

    def _show_thinking_time(self) -> None:
        now = time.monotonic()
        if now - self._drawn >= _STATUS_SECONDS:
            self._drawn = now
            words = len("".join(self._thought).split())
            self._console.status(f"thinking  {duration(now - self._began)}  {words:,} words")

    def _look_at_keys(self) -> None:
        if self._keys is not None and self._keys.poll() % 2:
            self.toggle_thinking()

    def _line(self, text: str, style: str, label: str = "") -> None:
        """A line of ours, styled as a whole, or its label where it has one."""
        if not self._console.out.color and style != _DIM:
            style = "1" if label else ""
        styled = f"\x1b[0;{style}m{label or one_line(text)}\x1b[0m" if style else label
        self._console.styled(f"{styled}{one_line(text) if label else ''}\n")
