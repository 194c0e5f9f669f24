"""What an engine process has to tell of its requests, and when.

The first words of a request and its last leave behind the step that drew them. Those between may wait for the next ones, so that
a quick model with many streams does not spend its processors on writing: all streams together are written to WRITES_PER_SECOND
times a second, but none waits longer than LONGEST_HOLD_SECONDS. One stream alone never waits, nor does anybody for a model whose
steps take longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nanovllm_cli.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_cli.server.messages import Output, Piece

WRITES_PER_SECOND = 2000
LONGEST_HOLD_SECONDS = 0.03

_ENDED = (-1, -1)


class Outbox:
    """Requests are opened, put whenever a step has moved them on, and dropped where nobody wants to hear of them any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._unsent: dict[str, RequestOutput] = {}
        self._emptied = clock()

    def open(self, request_id: str) -> None:
        self._told[request_id] = _Told()

    def drop(self, request_id: str) -> None:
        self._told.pop(request_id, None)
        self._unsent.pop(request_id, None)

    def put(self, output: RequestOutput) -> None:
        self._unsent[output.request_id] = output

    def take(self, *, everything: bool = False) -> list[Output] | None:
        """What is to be sent now. None where nothing is, and what there is can wait."""
        now = self._clock()
        hold = min(len(self._told) / WRITES_PER_SECOND, LONGEST_HOLD_SECONDS)
        if everything or now - self._emptied >= hold:
            self._emptied = now
            outputs, self._unsent = list(self._unsent.values()), {}
        else:
            outputs = [each for each in self._unsent.values() if each.finished or not self._told[each.request_id].answers]
            if not outputs:
                return None
            for each in outputs:
                del self._unsent[each.request_id]
        return [told for each in outputs if (told := self._tell(each)) is not None]

    def _tell(self, output: RequestOutput) -> Output | None:
        told = self._told[output.request_id]
        if output.finished:
            del self._told[output.request_id]
        pieces = [piece for answer in output.outputs if (piece := told.news(answer)) is not None]
        if not pieces:
            return None
        prompt_logprobs = None
        if output.prompt_logprobs is not None and not told.prompt_logprobs:
            told.prompt_logprobs = True
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
        )


class _Told:
    """How much of a request has been told. answers: of those that have said something, the ids and the characters."""

    __slots__ = ("answers", "prompt_logprobs")

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, int]] = {}
        self.prompt_logprobs = False

    def news(self, answer: CompletionOutput) -> Piece | None:
        before = self.answers.get(answer.index, (0, 0))
        if before is _ENDED:
            return None
        num_ids, num_chars = before
        if answer.finish_reason is not None:
            self.answers[answer.index] = _ENDED
        elif (answer.num_tokens, len(answer.text)) == before:
            return None
        else:
            self.answers[answer.index] = answer.num_tokens, len(answer.text)
        return Piece(
            answer.index,
            answer.text[num_chars:],
            list(answer.ids[num_ids : answer.num_tokens]),
            None if answer.all_logprobs is None else list(answer.all_logprobs[num_ids : answer.num_tokens]),
            answer.finish_reason,
            answer.stop_reason,
            answer.error,
            answer.unmeetable,
        )


def _times(metrics: RequestMetrics) -> tuple[float | None, float | None, float | None]:
    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - metrics.arrival

    return since(metrics.first_scheduled), since(metrics.first_token), since(metrics.finished)
