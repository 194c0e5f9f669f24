"""Requests of a program: many at once, one as a stream, or as room appears. Each runs with whatever other threads ask for.

Prompts are token ids, and parameters are ready to run; what a caller may write instead is `llm.py`'s business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence

from nanovllm_cli.config import Lora
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.readers import Readers
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.progress import Counted
from nanovllm_cli.sampling_params import SamplingParams, params_for

# How many requests `iterate` keeps in the engine for each one that can run: enough that no step waits for more.
QUEUE_FACTOR = 4


class Requests:
    """salt: what a prompt of so many tokens is given to the engine with (`LLM.cache_salt`). readers: whose turns these take."""

    def __init__(self, engine: Engine, salt: Callable[[int], str | None], max_num_seqs: int) -> None:
        self.readers = Readers(engine)
        self._salt, self._most = salt, QUEUE_FACTOR * max_num_seqs
        self._ids = itertools.count()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], progress: Counted | None
    ) -> list[RequestOutput]:
        """The last output of each, in their order."""
        ids = [self._new_id() for _ in prompts]
        done: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, wanted in zip(ids, prompts, params, strict=True):
                self._add(request_id, prompt, wanted)
            for output in self.readers.finished(ids):
                done[output.request_id] = output
                if progress is not None:
                    progress(len(done), len(ids))
        finally:
            self.readers.drop([request_id for request_id in ids if request_id not in done])
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        """The output after every step that changed it. Closing the iterator aborts the request."""
        request_id = self._new_id()
        try:
            self._add(request_id, prompt, params)
            finished = False
            while not finished:
                for output in self.readers.step((request_id,)):
                    yield output
                    finished = output.finished
        finally:
            self.readers.drop([request_id])

    def iterate(
        self, requests: Iterable[tuple[str, Sequence[int], SamplingParams]]
    ) -> Generator[RequestOutput, None, None]:
        """Finished outputs as they finish, of (request id, token ids, params) taken from an iterable as room appears."""
        waiting = iter(requests)
        running: set[str] = set()
        try:
            while True:
                for request_id, ids, params in itertools.islice(waiting, self._most - len(running)):
                    self._add(request_id, ids, params_for(params, 1)[0], running)
                if not running:
                    return
                for output in self.readers.step(running, only_last=True):
                    running.remove(output.request_id)
                    yield output
        finally:
            self.readers.drop(running)

    def embed(
        self, prompts: Sequence[Sequence[int]], wanted: Pooled | Alignment, progress: Counted | None, lora: Sequence[Lora]
    ) -> list[list[float]]:
        """What `Engine.embed` makes of each, in their order."""
        return self.readers.embed({f"embedding-{next(self._ids)}": each for each in prompts}, wanted, progress, lora)

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _add(self, request_id: str, ids: Sequence[int], params: SamplingParams, running: set[str] | None = None) -> None:
        salt = self._salt(len(ids))
        self.readers.add(request_id, lambda engine: engine.add(request_id, ids, params, cache_salt=salt), running)
