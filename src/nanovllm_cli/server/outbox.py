"""What an engine process has to tell of its requests, and when.

The first words of a request and its last leave behind the step that drew them. Those between may wait for the next ones, so that
a quick model with many streams does not spend its processors on writing: all streams together are written to WRITES_PER_SECOND
times a second, but none waits longer than LONGEST_HOLD_SECONDS. One stream alone never waits, nor does anybody for a model whose
steps take longer than that.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from typing import Protocol

from nanovllm_cli.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_cli.server.messages import Embedded, Output, Piece

WRITES_PER_SECOND = 2000
LONGEST_HOLD_SECONDS = 0.03


class Source(Protocol):
    """What an outbox needs of an engine."""

    @property
    def moved(self) -> Mapping[str, bool]: ...

    def take(self, request_id: str, /) -> RequestOutput: ...


class Outbox:
    """Requests are opened when the engine has them, and dropped where nobody wants to hear of them any more."""

    def __init__(self, engine: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._emptied = clock()

    def open(self, request_id: str, *, tells_reading: bool = False) -> None:
        """tells_reading: whether somebody wants to hear how far its prompt is read."""
        self._told[request_id] = _Told(tells_reading)

    def drop(self, request_id: str) -> None:
        self._told.pop(request_id, None)

    def take(self, *, everything: bool = False) -> list[Output | Embedded] | None:
        """What is to be sent now. None where nothing is, and what there is can wait."""
        now = self._clock()
        hold = min(len(self._told) / WRITES_PER_SECOND, LONGEST_HOLD_SECONDS)
        moved = self._engine.moved
        if everything or now - self._emptied >= hold:
            self._emptied = now
            due = list(moved)
        else:
            due = [each for each, is_last in moved.items() if is_last or not self._told[each].has_words]
            if not due:
                return None
        return [news for each in due if (news := self._tell(self._engine.take(each))) is not None]

    def _tell(self, output: RequestOutput) -> Output | Embedded | None:
        told = self._told[output.request_id]
        if output.finished:
            del self._told[output.request_id]
        if output.pooled is not None:
            return Embedded(int(output.request_id), array("f", output.pooled).tobytes())
        pieces = [piece for answer in output.outputs if (piece := told.news(answer)) is not None]
        reading = None if pieces or not told.tells_reading else self._reading(output.metrics)
        if not pieces and reading is None:
            return None
        prompt_logprobs = None
        if output.prompt_logprobs is not None and not told.has_prompt_logprobs:
            told.has_prompt_logprobs = True
            prompt_logprobs = list(output.prompt_logprobs)
        return Output(
            int(output.request_id),
            pieces,
            output.finished,
            output.metrics.num_cached_tokens,
            output.metrics.num_preemptions,
            output.metrics.num_guessed_tokens,
            output.metrics.num_held_tokens,
            _times(output.metrics),
            prompt_logprobs,
            reading,
        )

    def _reading(self, metrics: RequestMetrics) -> tuple[int, float] | None:
        if metrics.first_scheduled is None:
            return None
        return metrics.num_computed_prompt_tokens, self._clock() - metrics.first_scheduled


class _Told:
    """What has been told of a request. ended: answers whose end has."""

    __slots__ = ("ended", "has_prompt_logprobs", "has_words", "tells_reading")

    def __init__(self, tells_reading: bool) -> None:
        self.tells_reading = tells_reading
        self.ended: set[int] = set()
        self.has_words = False
        self.has_prompt_logprobs = False

    def news(self, answer: CompletionOutput) -> Piece | None:
        if answer.index in self.ended or not (answer.delta_ids or answer.delta_text or answer.finish_reason):
            return None
        self.has_words, self.tells_reading = True, False
        if answer.finish_reason is not None:
            self.ended.add(answer.index)
        logprobs = answer.delta_logprobs
        return Piece(
            answer.index,
            answer.delta_text,
            list(answer.delta_ids),
            None if logprobs is None else list(logprobs),
            answer.finish_reason,
            answer.stop_reason,
            answer.error,
            answer.unmeetable,
        )


def _times(metrics: RequestMetrics) -> tuple[float | None, float | None, float | None]:
    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - metrics.arrival

    return since(metrics.first_scheduled), since(metrics.first_token), since(metrics.finished)
