"""Who carries out a plan: a `Worker` in this process, with others beside it where a model is divided among several. The engine
knows only the protocol."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from nanovllm_cli.engine.near import NearRoom
from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.sampling_params import SamplingParams


class Executor(Protocol):
    """What the engine needs.

    `execute` either returns a draw for every id in the plan's `draws`, or raises before anything is drawn. After it
    raised, the engine sends the same sequences again in smaller plans; writing K and V, copying blocks, registering
    `new` and forgetting `finished` (also ids that were never seen) must therefore be repeatable.
    """

    def execute(self, plan: Plan) -> StepOutput: ...

    @property
    def block_bytes(self) -> int:
        """Of one block of the KV cache over all layers."""

    @property
    def num_states(self) -> int:
        """Of a model that keeps some; else 0."""

    @property
    def near(self) -> NearRoom:
        """For what layers with a window keep, where that is of fewer blocks than there are."""

    @property
    def state_bytes(self) -> int:
        """Of one of them, over all layers."""

    @property
    def most_drafted(self) -> int:
        """Rows of a step, guesses of a draft model included, up to which these pay."""

    def read_blocks(self, blocks: list[int], parts: list[int]) -> memoryview:
        """What these blocks of the KV cache hold, block_bytes each, one after another. parts: see `NearParts.parts_of`; what is
        gone reads as zeros."""

    def write_blocks(self, blocks: list[int], parts: list[int], data: memoryview) -> None:
        """Puts into these blocks what `read_blocks` gave of others, perhaps in another process; parts that are gone stay so."""

    def read_state(self, state: int) -> memoryview:
        """The same of a state."""

    def write_state(self, state: int, data: memoryview) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class RunsAhead(Protocol):
    """What an executor, or its runner, offers that takes the next step before anybody has read this one's tokens."""

    def draws_unseen(self, params: SamplingParams) -> bool:
        """True if a token of such a request can be fed to the next step without being read."""

    def submit(self, plan: Plan) -> Callable[[], StepOutput]:
        """Starts a step; the result, called once and in order, waits for it. Steps run in the order in which they come.

        What can be refused is refused here, before anything is drawn; an exception of the result means that the device is lost.
        """


Prepare = Callable[[SamplingParams], "Future[Any] | None"]
"""What must be there before a request's first draw and takes its time (a constraint that is compiled); None for nothing. An
exception of the future is the request's own; whoever waits for the draw holds on to the future."""
