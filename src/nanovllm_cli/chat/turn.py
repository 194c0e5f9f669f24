"""One answer on its way from the model to the screen, and what is left of it when it is broken off."""

from __future__ import annotations

import time
from collections.abc import Callable

from nanovllm_cli.chat.conversation import Cut
from nanovllm_cli.chat.surface import Display
from nanovllm_cli.cli import signals
from nanovllm_cli.cli.answering import Answer, Answering, Piece
from nanovllm_cli.errors import NanovllmError


class Turn:
    """Streams an answer into a display. Whatever ends `run`, `flush` comes next; then all of it is known, and `end` shows it.

    on_begin: called once, when the first token is there.
    """

    def __init__(
        self,
        answering: Answering,
        display: Display,
        *,
        shows_reasoning: bool,
        limit: int | None,
        on_begin: Callable[[], object],
    ) -> None:
        self.answering = answering
        self.began = False
        self.ended = 0.0
        self._display = display
        self._shows_reasoning = shows_reasoning
        self._limit = limit
        self._on_begin = on_begin
        self._failed = False
        self._held_back = ""

    @property
    def answer(self) -> Answer:
        return self.answering.answers.first

    @property
    def used(self) -> int | None:
        """Tokens that prompt and answer have, where that is known."""
        usage = self.answering.result.usage
        return None if usage.prompt_tokens is None else usage.prompt_tokens + (usage.answer_tokens or 0)

    @property
    def cut(self) -> Cut | None:
        """Why it is not whole."""
        if not self.answering.finished:
            return "error" if self._failed else "interrupted"
        reason = self.answer.finish_reason
        if reason == "length":
            return "context" if self._limit is not None and (self.used or 0) >= self._limit else "length"
        if reason == "repetition":
            return "repetition"
        return "error" if reason == "error" else None

    def run(self) -> None:
        """The whole answer. Ctrl-C and requests to end take effect between two steps; the second time they do not wait, which
        costs what the step has computed."""
        self._display.begin()
        try:
            while True:
                with signals.held(firmly=False):
                    pieces = self._next()
                    if pieces is None:
                        return
                    with signals.held():  # a display that is broken off would not know what it has shown
                        self._show(pieces)
        finally:
            self.ended = time.monotonic()
            with signals.held():
                self.answering.close()

    def flush(self) -> None:
        """No more comes: what may have been the beginning of a tag is text."""
        self._held_back = self.answering.flush()

    def end(self, remark: str | None) -> None:
        if self._held_back:
            self._display.content(self._held_back)
        self._display.end(remark, goes_on=bool(self.answer.calls))

    def _next(self) -> list[Piece] | None:
        try:
            return next(self.answering, None)
        except NanovllmError:
            self._failed = True
            raise

    def _show(self, pieces: list[Piece]) -> None:
        if not self.began and self.answering.began:
            self._on_begin()
            self.began = True
        if not self.began and self.answering.prompt_len is not None:
            self._display.progress(self.answering.num_read, self.answering.prompt_len)
        for piece in pieces:
            if piece.reasoning and self._shows_reasoning:
                self._display.reasoning(piece.reasoning)
            if piece.content:
                self._display.content(piece.content)
