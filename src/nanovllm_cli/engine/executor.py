"""Who carries out a plan: this process, or others. The engine knows only the protocol."""

from __future__ import annotations

from typing import Protocol

from nanovllm_cli.engine.plan import Plan, StepOutput


class Executor(Protocol):
    """What the engine needs.

    `execute` either returns a draw for every id in the plan's `draws`, or raises before anything is drawn. After it
    raised, the engine sends the same sequences again in smaller plans; writing K and V, copying blocks, registering
    `new` and forgetting `finished` (also ids that were never seen) must therefore be repeatable.
    """

    def execute(self, plan: Plan) -> StepOutput: ...

    def close(self) -> None: ...


class InProcessExecutor:
    """One worker in this process. A worker has the executor's two methods."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker

    def execute(self, plan: Plan) -> StepOutput:
        return self._worker.execute(plan)

    def close(self) -> None:
        self._worker.close()
