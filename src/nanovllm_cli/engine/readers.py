"""Several readers of one engine, in any threads: every step serves all requests, and each reader gets what is its own.

Threads take turns, one step each, so their requests run together. A stream that nobody holds any more is closed by the
garbage collector, at any point of the program, even in the middle of a step: what it asked for then ends behind that step.
Ctrl-C ends what it interrupts, and takes nothing from the others (`interrupts`).
A process that was forked from the one that loaded the model has neither its threads nor its device, and is told so.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from nanovllm_cli.config import Lora
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.interrupts import held
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.errors import RequestError, UsageError
from nanovllm_cli.model_spec import Pooled

T = TypeVar("T")


class Readers:
    """add() requests, or use() the engine for that, step() until they are finished, and drop() them in the end.

    Each but drop raises UsageError in a forked process, and when the engine is closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._process = os.getpid()
        self._is_closed = False
        self._turn = threading.Lock()
        self._dropped: deque[str] = deque()

    def use(self, action: Callable[[Engine], T]) -> T:
        """Does something with the engine, in this thread's turn."""
        self._check_process()
        with self._turn:
            if self._is_closed:
                raise UsageError("this model is closed", "load it again")
            with held():
                self._end_dropped()
                result = action(self._engine)
                self._end_dropped()
                return result

    def add(self, request_id: str, action: Callable[[Engine], None], running: set[str] | None = None) -> None:
        """Does it, in this thread's turn, and puts the id into `running`: Ctrl-C comes behind both."""

        def added(engine: Engine) -> None:
            action(engine)
            if running is not None:
                running.add(request_id)

        self.use(added)

    def step(self, wanted: Collection[str], *, only_last: bool = False) -> list[RequestOutput]:
        """What is new of the wanted requests, after a step if nothing is. What the step does for others, such as a stream that
        is open meanwhile, is theirs when they ask, as one output. only_last: the outputs of those that are finished."""
        return self.use(lambda engine: _new(engine, wanted, only_last) or _step(engine, wanted, only_last))

    def finished(self, request_ids: Collection[str]) -> Iterator[RequestOutput]:
        """The last outputs of requests, as they finish."""
        left = set(request_ids)
        while left:
            for output in self.step(left, only_last=True):
                left.remove(output.request_id)
                yield output

    def embed(
        self,
        prompts: Mapping[str, Sequence[int]],
        pooling: Pooled | Alignment,
        progress: Callable[[int, int], None] | None = None,
        lora: Sequence[Lora] = (),
    ) -> list[list[float]]:
        """What each text's pooled vector becomes, by request ids -> token ids, in their order. progress: told (done, all).
        Raises as `Engine.embed`, and RequestError for a text whose numbers are not finite."""
        done: dict[str, list[float]] = {}
        try:
            for request_id, prompt in prompts.items():
                self.use(partial(Engine.embed, request_id=request_id, prompt_ids=prompt, pooling=pooling, lora=lora))
            for output in self.finished(prompts):
                if output.pooled is None:
                    raise RequestError(f"the text could not be embedded: {output.outputs[0].error}")
                done[output.request_id] = list(output.pooled)
                if progress is not None:
                    progress(len(done), len(prompts))
        finally:
            self.drop(prompts)
        return [done[request_id] for request_id in prompts]

    def drop(self, request_ids: Collection[str]) -> None:
        """Ends requests, also those that are finished, whose last outputs nobody will read: now, or behind the step that is
        under way."""
        self._dropped.extend(request_ids)
        if os.getpid() == self._process and self._turn.acquire(blocking=False):
            try:
                with held():
                    self._end_dropped()
            finally:
                self._turn.release()

    def close(self) -> None:
        """Closes the engine; a second time does nothing."""
        self._check_process()
        with self._turn:
            if not self._is_closed:
                self._is_closed = True
                self._engine.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            hint = 'load it in the process that uses it; the start method of multiprocessing has to be "spawn"'
            raise UsageError("this model was loaded before the process was forked", hint)

    def _end_dropped(self) -> None:
        while self._dropped and not self._is_closed:
            request_id = self._dropped.popleft()
            self._engine.abort(request_id)


def _step(engine: Engine, wanted: Collection[str], only_last: bool) -> list[RequestOutput]:
    engine.advance()
    return _new(engine, wanted, only_last)


def _new(engine: Engine, wanted: Collection[str], only_last: bool) -> list[RequestOutput]:
    moved = engine.moved.items()
    return [engine.take(each) for each, is_last in moved if each in wanted and (is_last or not only_last)]
