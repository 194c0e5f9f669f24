"""What the server tells to whoever watches it (metrics.py, tracing.py). The methods here do nothing: a server that nobody
watches has an Observer as it is.

Who calls what:

    Generator     accepted() for each request that goes to an engine; on the Watch, output() for each Output, embedded() for a
                  vector, cut() where its client's rules end it, end() exactly once, also for one that was left or failed
    ServerContext refused() for each that wanted a model, and that no engine took
    engine_client engine_restarted()
    middleware    http_started() and http_ended() for each HTTP request; refused() where too much was under way

Everything is called from the event loop, so nothing here needs a lock. output() runs once a step and request: it must be cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Output
from nanovllm_cli.server.ports import Caller

Operation = Literal["chat", "text_completion", "embeddings"]


class Watch:
    """One request on its way."""

    def output(self, output: Output) -> None:
        """It got something. Joined outputs come as one."""

    def embedded(self) -> None:
        """The text's vector is there."""

    def cut(self) -> None:
        """Its answers that have not finished end here, as their client wants them to."""

    def end(self, error: ApiError | None = None) -> None:
        """Nothing more comes. error: what its client was told. Answers that have not finished were aborted, or failed with it."""


class Observer:
    """What happens in the server. model: the id that it is served by, never a name that only a client knows."""

    def accepted(
        self, model: str, operation: Operation, prompt_len: int, params: SamplingParams | None, caller: Caller | None
    ) -> Watch:
        """A request is on its way to an engine; prompt_len is in tokens. params: None for embeddings."""
        return Watch()

    def refused(self, model: str | None, error: ApiError) -> None:
        """A request was not taken. model: None where it named none that is here."""

    def engine_restarted(self, model: str) -> None:
        """An engine process died, and another takes its place."""

    def http_started(self) -> None:
        """The head of an HTTP request was read."""

    def http_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Its answer was sent to the end, or its client left. route: the template that matched (`/v1/models/{model}`), None
        where none did; never the path as it came. seconds: since http_started."""


class Observers(Observer):
    """Several as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def accepted(
        self, model: str, operation: Operation, prompt_len: int, params: SamplingParams | None, caller: Caller | None
    ) -> Watch:
        return _Watches([each.accepted(model, operation, prompt_len, params, caller) for each in self._observers])

    def refused(self, model: str | None, error: ApiError) -> None:
        for each in self._observers:
            each.refused(model, error)

    def engine_restarted(self, model: str) -> None:
        for each in self._observers:
            each.engine_restarted(model)

    def http_started(self) -> None:
        for each in self._observers:
            each.http_started()

    def http_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        for each in self._observers:
            each.http_ended(method, route, status, seconds)


class _Watches(Watch):
    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = tuple(watches)

    def output(self, output: Output) -> None:
        for each in self._watches:
            each.output(output)

    def embedded(self) -> None:
        for each in self._watches:
            each.embedded()

    def cut(self) -> None:
        for each in self._watches:
            each.cut()

    def end(self, error: ApiError | None = None) -> None:
        for each in self._watches:
            each.end(error)
