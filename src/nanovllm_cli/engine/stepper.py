"""Carries out the scheduler's plans: finds the one sequence to blame where a step fails, and runs a step ahead where it can.

Ahead means that the next step is planned and started before this one's tokens are read, so that the device does not wait
for Python. What a sequence drew stays on the device and is fed from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from nanovllm_cli.engine.executor import Executor, RunsAhead
from nanovllm_cli.engine.plan import Numbers, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.scheduler import Scheduler
from nanovllm_cli.engine.steps import Result
from nanovllm_cli.errors import LostError, NanovllmError

logger = logging.getLogger(__name__)

Outcome = tuple[StepOutput, dict[int, str]]
"""What a step gave, and what the rows of the sequences that failed raised."""


class _Flight(NamedTuple):
    """A step. is_started: before `outcome` is called, so that another one may be started behind it."""

    scheduled: list[Scheduled]
    outcome: Callable[[], Outcome]
    is_started: bool


class Stepper:
    """step() until it returns None. ahead: what the executor offers beyond `execute`, if anything."""

    def __init__(self, executor: Executor, scheduler: Scheduler, ahead: RunsAhead | None) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._ahead = ahead
        self._flight: _Flight | None = None
        self.num_tokens = 0

    def step(self) -> list[Result] | None:
        """The next step's results; None where nothing is left to do. num_tokens counts what was computed."""
        flight, self._flight = self._flight, None
        try:
            if flight is None:
                plan = self._scheduler.plan()
                if plan is None:
                    return None
                flight = self._start(plan)
            if self._ahead is not None and flight.is_started:
                self._flight = self._start_next(self._ahead)
            output, failures = flight.outcome()
        except BaseException:
            self._flight = None
            self._scheduler.rewind()
            raise
        self.num_tokens += sum([len(output.fed(share)) for share in flight.scheduled])
        return self._scheduler.apply(output, failures)

    def _start(self, plan: Plan) -> _Flight:
        if self._ahead is not None:
            try:
                result = self._ahead.submit(plan)
                return _Flight(plan.scheduled, lambda: (result(), {}), True)
            except Exception:
                logger.warning("a step could not be started", exc_info=True)
        return _Flight(plan.scheduled, lambda: self._execute(plan), False)

    def _start_next(self, ahead: RunsAhead) -> _Flight | None:
        plan = self._scheduler.plan_ahead()
        if plan is None:
            return None
        try:
            result = ahead.submit(plan)
        except Exception:  # it will be planned again when the tokens are there, and blamed on somebody if it fails again
            logger.warning("a step could not be started ahead", exc_info=True)
            self._scheduler.forget_ahead()
            return None
        return _Flight(plan.scheduled, lambda: (result(), {}), True)

    def _execute(self, plan: Plan) -> Outcome:
        """Runs the plan. Where that raises, runs its halves, and theirs, until only those fail that fail alone.

        At most two calls for each sequence of the plan. Halves copy only for themselves: what a half that succeeded
        has written must not be copied over. States that nobody runs with are copied by both.
        """
        try:
            return self._executor.execute(plan), {}
        except LostError:
            raise  # nobody's request is to blame, and none can go on
        except Exception as error:
            concerned = [share.seq_id for share in plan.scheduled] + ([] if plan.look is None else [plan.look.seq_id])
            if not concerned:
                raise
            has_more = plan.look is not None and (plan.finished or plan.state_copies)  # which others need, whoever fails
            if len(concerned) == 1 and not has_more:
                (seq_id,) = concerned
                logger.exception("sequence %d failed", seq_id)
                return StepOutput([], {}), {seq_id: _message(error)}
            logger.warning("a step of %d sequences failed; looking for the one to blame", len(concerned))
        if plan.look is not None:
            look, failures = self._execute(Plan([], [], [], [], look=plan.look))
            rest, failed = self._execute(plan._replace(look=None))
            return rest._replace(stages_left=look.stages_left), failed | failures
        drawn, prompt_logprobs, failures = [], {}, {}
        pooled: dict[int, Numbers] = {}
        guesses: dict[int, list[int]] = {}
        middle = len(plan.scheduled) // 2
        both = plan.scheduled[:middle], plan.scheduled[middle:]
        for scheduled, others in (both, both[::-1]):
            others_states = {each.state for each in others}
            ids = {seq_id for each in scheduled for seq_id in each.draws}
            blocks = {block for each in scheduled for block in each.block_table}
            half, failed = self._execute(
                Plan(
                    scheduled,
                    [new for new in plan.new if new.seq_id in ids],
                    plan.finished,
                    [copy for copy in plan.copies if copy[1] in blocks],
                    [copy for copy in plan.state_copies if copy[1] not in others_states],
                )
            )
            drawn.extend(half.drawn)
            prompt_logprobs.update(half.prompt_logprobs)
            pooled.update(half.pooled)
            guesses.update(half.guesses)
            failures.update(failed)
        return StepOutput(drawn, prompt_logprobs, pooled, guesses), failures


def _message(error: Exception) -> str:
    """What the request's owner may read: our own errors say something, others might say too much."""
    return error.message if isinstance(error, NanovllmError) else f"an internal error ({type(error).__name__})"
