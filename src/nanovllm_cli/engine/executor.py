"""Who carries out a plan: this process, or others. The engine knows only the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.sampling_params import SamplingParams


class Executor(Protocol):
    """What the engine needs.

    `execute` either returns a draw for every id in the plan's `draws`, or raises before anything is drawn. After it
    raised, the engine sends the same sequences again in smaller plans; writing K and V, copying blocks, registering
    `new` and forgetting `finished` (also ids that were never seen) must therefore be repeatable.
    """

    def execute(self, plan: Plan) -> StepOutput: ...

    def close(self) -> None: ...


class RunsAhead(Protocol):
    """What an executor offers that takes the next step before anybody has read this one's tokens."""

    def draws_unseen(self, params: SamplingParams) -> bool:
        """True if a token of such a request can be fed to the next step without being read."""

    def submit(self, plan: Plan) -> Callable[[], StepOutput]:
        """Starts a step; the result, called once and in order, waits for it. Steps run in the order in which they come.

        What can be refused is refused here, before anything is drawn; an exception of the result means that the device is lost.
        """


class InProcessExecutor:
    """One worker in this process. A worker has the executor's two methods."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker

    def execute(self, plan: Plan) -> StepOutput:
        return self._worker.execute(plan)

    def close(self) -> None:
        self._worker.close()
