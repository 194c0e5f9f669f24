"""One answer as its reader sees it: which tokens count, when it ends and why, and its text.

Rules, in the order in which they are looked at for every token:

- An end id of the model, or one of `stop_token_ids`, ends the answer with "stop". It is part of the ids and not of
  the text; with include_stop_str_in_output a stop_token_id (not the model's end) is part of the text too.
- A stop string ends it with "stop"; the ids that were drawn stay, the text is cut.
- `max_tokens`, the context or the KV cache end it with "length".
- `max_repeats` ends it with "repetition".
- A constraint that is fulfilled, where nothing can follow, ends it with "stop", whatever `min_tokens` says.

The first two, and the last but one, wait until more than `min_tokens` tokens are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from nanovllm_cli.engine.loops import Loop
from nanovllm_cli.engine.outputs import CompletionOutput, FinishReason
from nanovllm_cli.engine.plan import Drawn, TokenLogprobs
from nanovllm_cli.engine.sequence import Sequence
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.detokenizer import Detokenizer
from nanovllm_cli.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class IncrementalDetokenizer(Protocol):
    """What an answer needs of `text.detokenizer.Detokenizer`. push and finish return text that is new and final.

    It looks for stop strings only behind the first `min_tokens` tokens.
    """

    stopped: str | None

    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


DetokenizerFactory = Callable[[SamplingParams, tuple[int, ...]], IncrementalDetokenizer]


def detokenizers_of(tokenizer: Tokenizer, visible_ids: Collection[int] = ()) -> DetokenizerFactory:
    """Given a request's settings and prompt ids: a detokenizer for one of its answers, which continues the prompt.

    visible_ids: special tokens that stay in the text, because a reader behind it looks for them (reasoning tags).
    """

    def make(params: SamplingParams, prompt_ids: tuple[int, ...]) -> IncrementalDetokenizer:
        return Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            visible_ids=visible_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prompt_ids=prompt_ids,
        )

    return make


class Answer:
    """Grows with what its sequence draws. `finish_reason` is None until it ends. Its text is made when somebody looks at it, or
    for stop strings."""

    def __init__(
        self, sequence: Sequence, eos_ids: Collection[int], detokenizer: IncrementalDetokenizer | None
    ) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self._index = sequence.index
        self._max_tokens = sequence.request.max_len - len(sequence.request.prompt_ids)
        self._min_tokens = params.min_tokens
        self._stop_ids = frozenset(sequence.request.stop_ids)
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._shows_stop_ids = params.include_stop_str_in_output
        self._has_stops = bool(params.stop)
        self._loop = Loop.of(params)
        self._detokenizer = detokenizer
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._text = ""
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._unmeetable = False
        self._num_read = 0
        self._num_shown = 0
        self._num_chars_shown = 0

    def take(self, drawn: Drawn) -> int:
        """Adds what one step drew, up to where the answer ends; returns how many tokens that is. An exception in detokenizing
        ends it with "error"."""
        before = len(self._ids)
        try:
            for token_id in drawn.token_ids:
                self._add(token_id)
                if self.finish_reason is not None:
                    break
            took_all = len(self._ids) - before == len(drawn.token_ids)
            if drawn.error is not None and self.finish_reason is None:
                self.fail(drawn.error, unmeetable=drawn.unmeetable)
                self._flush()
            if drawn.ends and took_all and self.finish_reason in (None, "length", "repetition"):
                if self.finish_reason is None:
                    self._flush()
                self.finish_reason = "stop"
        except Exception:
            self._fail_to_decode()
        if self._logprobs is not None and drawn.logprobs is not None:
            self._logprobs.extend(drawn.logprobs[: len(self._ids) - len(self._logprobs)])
        return len(self._ids) - before

    def fail(self, error: str, *, unmeetable: bool = False) -> None:
        """Ends it with "error"; what is there so far stays. unmeetable: see CompletionOutput."""
        self.finish_reason, self._error, self._unmeetable = "error", error, unmeetable

    def complete(self) -> None:
        """Ends it with "stop": there was nothing to draw."""
        self.finish_reason = "stop"

    def abort(self) -> None:
        """Ends it with "abort"; text that was held back is shown."""
        self.finish_reason = "abort"
        try:
            self._flush()
        except Exception:
            logger.exception("detokenizing failed in request %r", self.sequence.request.request_id)

    def output(self) -> CompletionOutput:
        """A snapshot. The deltas are what came since the last one. An exception in detokenizing ends the answer with "error"."""
        if self.finish_reason is None:
            try:
                self._read()
            except Exception:
                self._fail_to_decode()
        delta_ids = tuple(self._ids[self._num_shown :])
        delta_text = self._text[self._num_chars_shown :]
        self._num_shown, self._num_chars_shown = len(self._ids), len(self._text)
        return CompletionOutput(
            self._index,
            self._text,
            self._ids,
            delta_text,
            delta_ids,
            self._logprobs,
            self.finish_reason,
            self._stop_reason,
            self._error,
            self._unmeetable,
        )

    def _add(self, token_id: int) -> None:
        self._ids.append(token_id)
        if token_id in self._stop_ids and len(self._ids) > self._min_tokens:
            self._end_at(token_id)
            return
        if self._has_stops and self._detokenizer is not None:
            self._read()
            if self._detokenizer.stopped is not None:
                self.finish_reason, self._stop_reason = "stop", self._detokenizer.stopped
                return
        closes = self._loop is not None and self._loop.closes(token_id)
        if len(self._ids) >= self._max_tokens:
            self.finish_reason = "length"
            self._flush()
        elif closes and len(self._ids) > self._min_tokens:
            self.finish_reason = "repetition"
            self._flush()

    def _end_at(self, stop_id: int) -> None:
        self.finish_reason = "stop"
        is_own = stop_id not in self._eos_ids
        if is_own:
            self._stop_reason = stop_id
        self._read(len(self._ids) - (not (is_own and self._shows_stop_ids)))
        self._num_read = len(self._ids)
        self._flush()

    def _read(self, end: int | None = None) -> None:
        """Makes text of the ids up to `end`."""
        if self._detokenizer is not None:
            ids = self._ids[self._num_read : end]
            self._num_read += len(ids)
            self._text += self._detokenizer.push(ids)

    def _flush(self) -> None:
        self._read()
        if self._detokenizer is not None:
            self._text += self._detokenizer.finish()

    def _fail_to_decode(self) -> None:
        logger.exception("detokenizing failed in request %r", self.sequence.request.request_id)
        self.fail("the text of the answer could not be decoded")
