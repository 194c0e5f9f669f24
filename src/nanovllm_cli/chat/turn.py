"""One answer on its way from the model to the screen, and what is left of it when it is broken off."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, cast

from nanovllm_cli.chat.conversation import Cut
from nanovllm_cli.chat.prompt import Prompt
from nanovllm_cli.chat.surface import Display
from nanovllm_cli.cli import signals
from nanovllm_cli.cli.answer import Piece, Transcript

if TYPE_CHECKING:
    from nanovllm_cli.engine.outputs import RequestOutput
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.sampling_params import SamplingParams


class Turn:
    """Streams an answer into a display. Whatever ends `run`, `flush` comes next; then all of it is known, and `end` shows it.

    on_begin: called once, when the first token is there.
    """

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt,
        params: SamplingParams,
        display: Display,
        *,
        shows_reasoning: bool,
        on_begin: Callable[[], object],
    ) -> None:
        self.prompt = prompt
        self.output: RequestOutput | None = None
        self.began = False
        self.ended = 0.0
        self._llm = llm
        self._params = params
        self._display = display
        self._shows_reasoning = shows_reasoning
        self._on_begin = on_begin
        self._transcript = Transcript(prompt.splitter)
        self._held_back = ""

    @property
    def content(self) -> str:
        return self._transcript.contents.get(0, "")

    @property
    def reasoning(self) -> str:
        return self._transcript.reasonings.get(0, "")

    @property
    def ids(self) -> tuple[int, ...]:
        """What the engine has read and drawn."""
        drawn = self.output.outputs[0].token_ids if self.output is not None else ()
        return (*self.prompt.ids, *drawn)

    @property
    def error(self) -> str | None:
        return self.output.outputs[0].error if self.output is not None else None

    @property
    def cut(self) -> Cut | None:
        """Why it is not whole."""
        if self.output is None or not self.output.finished:
            return "interrupted"
        reason = self.output.outputs[0].finish_reason
        if reason == "length":
            return "context" if len(self.ids) >= self._llm.max_model_len else "length"
        return "error" if reason == "error" else None

    def run(self) -> None:
        """The whole answer. Ctrl-C and requests to end take effect between two steps of the engine; the second time they do not
        wait, which costs what the step has computed."""
        self._display.begin()
        steps = cast("Generator[RequestOutput, None, None]", self._llm.stream(self.prompt.ids, self._params))
        try:
            while True:
                with signals.held(firmly=False):
                    output = next(steps, None)
                    if output is None:
                        return
                    with signals.held():  # a display that is broken off would not know what it has shown
                        self._show(output, self._take(output))
        finally:
            self.ended = time.monotonic()
            with signals.held():
                steps.close()

    def _show(self, output: RequestOutput, pieces: list[Piece]) -> None:
        if not self.began:
            self._display.progress(output.metrics.num_computed_prompt_tokens, len(self.prompt.ids))
        for piece in pieces:
            if piece.reasoning and self._shows_reasoning:
                self._display.reasoning(piece.reasoning)
            if piece.content:
                self._display.content(piece.content)

    def flush(self) -> None:
        """No more comes: what may have been the beginning of a tag is text."""
        self._held_back = self._transcript.flush()

    def end(self, remark: str | None) -> None:
        if self._held_back:
            self._display.content(self._held_back)
        self._display.end(remark)

    def _take(self, output: RequestOutput) -> list[Piece]:
        self.output = output
        if not self.began and output.outputs[0].token_ids:
            self._on_begin()
            self.began = True
        return self._transcript.add(output)
