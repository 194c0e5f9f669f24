"""Who runs in the next step, with how many tokens, in which blocks.

Each step takes decodes first, then prefill chunks and waiting sequences in order of rank, under two limits: tokens a step and
sequences a step. What must hold, and why it does:

- Progress. Every plan schedules a token, or a layer of an image (see `looking.py`). Requests have one fixed order, their rank; a
  sequence that lacks blocks takes them from the running sequence with the highest rank above its own that is not in the step yet,
  or else sits the step out. The most urgent one can preempt all others, and alone it fits: the engine refuses what does not.
- No starvation. Waiting sequences enter in order of rank and nobody overtakes the first. With policy "priority" the rank is
  priority + arrival / aging_seconds: to wait `aging_seconds` is worth one level, and two requests age alike, so the order never
  changes; running ones of a less urgent priority make way. Where decodes alone would fill the step they leave a part of it to
  prefills, and take turns.
- No ping-pong. A sequence enters only with blocks for all of its tokens, beside one for every second sequence to grow into (more
  would mean fewer preemptions, but smaller steps); what it was preempted for has taken at least one of those that it gave.

A sequence that was preempted keeps its tokens, and computes prompt and answer again when it comes back.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.looking import Looking
from nanovllm_cli.engine.plan import DRAWN_BEFORE, Copy, Drawn, NewSequence, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.refusal import Refusal
from nanovllm_cli.engine.sequence import NO_RANK, Line, Request, Sequence, Status, by_rank
from nanovllm_cli.engine.steps import Result, Step, sound
from nanovllm_cli.engine.strategy import Strategy

_AHEAD = [DRAWN_BEFORE]


class Scheduler:
    """Holds every unfinished sequence. plan() and apply() (or rewind()) alternate; plan_ahead() may come between the two."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        strategy: Strategy,
        clock: Callable[[], float],
        looking: Looking,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._strategy = strategy
        self._clock = clock
        self._looking, self._arrivals = looking, itertools.count()
        self.running, self.waiting = list[Sequence](), Line()
        self.num_steps = self.num_preemptions = self.num_hit_tokens = 0
        self._finished: dict[int, None] = {}
        self._steps: deque[Step] = deque()
        self._refusal = Refusal(blocks)
        self._members: list[Sequence] = []
        self._scheduled: list[Scheduled] = []
        self._copies: list[Copy] = []
        self._state_copies: list[tuple[int, int]] = []
        self._budget = 0

    def add(self, request: Request) -> None:
        """Takes a request with its sequences. The first computes the prompt, the others draw from its last row. A rank stays."""
        if request.rank == NO_RANK:
            level = request.priority + request.arrival / self._config.aging_seconds
            request.rank = (level if self._config.policy == "priority" else 0.0, next(self._arrivals))
        for sequence in request.sequences:
            sequence.rank = (*request.rank, sequence.index)
        first, *others = request.sequences
        self._lead(first, others)

    def plan(self) -> Plan | None:
        """The next step, or None where nothing is left to do."""
        if not self.running and not self.waiting:
            return None
        self.num_steps += 1
        self._members, self._scheduled, self._copies, self._state_copies = [], [], [], []
        self._budget = self._config.max_num_batched_tokens
        self._blocks.slide(self.running)
        if self._config.policy == "priority":
            self._make_way_for_urgent()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            (decodes if len(sequence.token_ids) - sequence.num_computed == 1 else prefills).append(sequence)

        self._strategy.begin(len(decodes))
        self._serve(decodes, self._reserve(len(decodes), bool(prefills)))
        for prefill in sorted(prefills, key=by_rank):
            self._enter_waiting(before=prefill.rank)
            self._serve([prefill], 0)
        self._enter_waiting()
        if self._budget:
            self._serve(decodes, 0)
        self._let_others_go_first_next_time()
        assert self._scheduled or self._looking, "a step without progress"
        return self._begin(self._introduce())

    def plan_ahead(self) -> Plan | None:
        """The step behind the one that is under way, if it is sure to be one more token for each of its sequences.

        None where anybody could enter, lacks a block or a draw, or must be looked at first. A sequence that turns out to
        have ended takes part in vain.
        """
        (step,) = self._steps
        going: list[tuple[Sequence, int]] = []
        num_running = 0
        for sequence, share in zip(step.members, step.scheduled, strict=True):
            if sequence.status is not Status.RUNNING:
                continue
            end = share.start + len(share.token_ids)
            sure = share.draws and not sequence.pending and sequence.request.runs_ahead
            if not sure or self._blocks.states.is_copied_at(end, len(self.running)):
                return None
            num_running += 1
            if len(sequence.token_ids) + 1 < sequence.request.max_len:
                going.append((sequence, end + 1))
        if not going or num_running != len(self.running) or (self.waiting and self._could_enter()):
            return None
        growing = [(sequence, end) for sequence, end in going if end > self._blocks.num_writable(sequence)]
        if growing:
            self._blocks.slide(self.running)
        if len(growing) > self._blocks.num_spare:
            return None
        copies = [self._blocks.grow(sequence, end) for sequence, end in growing]
        assert not any(copies), "a block that is being written is shared"
        self.num_steps += 1
        self._members, self._scheduled, self._copies, self._state_copies = [], [], [], []
        for sequence, end in going:
            self._add_share(sequence, _AHEAD, end - 1, draws=True)
        return self._begin([])

    def forget_ahead(self) -> None:
        """The step that was planned ahead could not begin. Blocks that its sequences got stay theirs."""
        self._steps.pop()

    def _begin(self, new: list[NewSequence]) -> Plan:
        finished, sources = list(self._finished), self._blocks.states.take_sources(self.running)
        look = self._looking.take()
        self._steps.append(Step(self._members, self._scheduled, look, self._copies, sources, finished))
        copies = self._copies, self._state_copies + sources
        return Plan(self._scheduled, new, finished, *copies, None if look is None else look[1])

    def apply(self, output: StepOutput, failures: Mapping[int, str]) -> list[Result]:
        """Takes in what the oldest planned step gave. failures: sequence id -> what its rows raised.

        Sequences with an error are still to be ended by the caller, with `finish`, as are those that reached their end.
        """
        step = self._steps.popleft()
        self._unpin(step)
        for seq_id in step.finished:
            self._finished.pop(seq_id, None)
        by_id = {drawn.seq_id: drawn for drawn in output.drawn}
        results: list[Result] = []
        for sequence, share in zip(step.members, step.scheduled, strict=True):
            if sequence.status is not Status.RUNNING:
                continue
            if failures and sequence.seq_id in failures:
                results += self._failed(sequence, failures[sequence.seq_id])
                continue
            if sequence.num_computed < len(sequence.request.prompt_ids):
                self._collect_prompt(sequence, share, output)
            if not share.draws:
                sequence.num_computed += len(share.token_ids)
                results.append(Result(sequence, None))
                continue
            first = sound(by_id.get(sequence.seq_id), sequence)
            others = [sound(by_id.get(each.seq_id), each) for each in sequence.pending]
            sequence.advance(self._strategy.num_valid(sequence, output.fed(share), first.token_ids), len(share.known))
            sequence.token_ids.extend(first.token_ids)
            errors = [each for each in (first, *others) if each.error is not None]
            if not errors:
                self._blocks.register(sequence)
            elif not all(each.unmeetable for each in errors):  # which tells nothing of its numbers
                self._blocks.distrust(sequence)
            if others:
                results.extend(self._fork(sequence, others))
            sequence.registered = True
            results.append(Result(sequence, first))
        if step.look is not None and (looker := step.look[0]).status is Status.RUNNING:
            looker.request.stages_left[step.look[1].image.digest] = output.stages_left
            if looker not in step.members:
                failure = failures.get(looker.seq_id)
                results += [Result(looker, None)] if failure is None else self._failed(looker, failure)
        return results

    def rewind(self) -> None:
        """Forgets planned steps that were broken off: everybody starts again from the tokens that they have."""
        self._looking.take()
        unsure = {destination for step in self._steps for _, destination in step.states}
        while self._steps:
            self._unpin(self._steps.popleft())
        for sequence in list(self.running):
            self._preempt(sequence, has_sound_state=sequence.state not in unsure)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in whatever state it is, and frees what it held. Ended ones may be given again."""
        status, sequence.status = sequence.status, Status.FINISHED
        if status is Status.RUNNING:
            self.running.remove(sequence)
            self._blocks.release(sequence)
        elif status is Status.WAITING:
            self.waiting.take_out(sequence)
        elif status is Status.PENDING:
            for other in sequence.request.sequences:
                if sequence in other.pending:
                    other.pending.remove(sequence)
        if (sequence.announced or sequence.step) and status is not Status.FINISHED:  # who has drawn, or had a part of a prompt
            self._finished[sequence.seq_id] = None
        if sequence.pending:
            heirs, sequence.pending = sequence.pending, []
            self._lead(heirs[0], heirs[1:])

    def go_on_from(self, parents: Collection[Sequence], heirs: Collection[tuple[Sequence, Sequence]]) -> None:
        """Ends the parents. In their seats run their heirs, (parent, heir), each the only sequence of a request that has a rank,
        with the blocks and the state of what the parent has computed. Without a seat, or a state, an heir waits."""
        seats = self._free_seats() + sum(each.status is Status.RUNNING for each in parents)
        last = dict(heirs)
        for parent, heir in heirs:
            heir.rank = (*heir.request.rank, heir.index)
            if not seats or parent.status is not Status.RUNNING:
                self._wait(heir)
                continue
            if heir is last[parent]:
                heir.inherit(parent)
            elif not self._blocks.fork(parent, heir):
                self._wait(heir)
                continue
            heir.status, seats = Status.RUNNING, seats - 1
            self.running.append(heir)
        for parent in parents:
            self.finish(parent)

    # Planning

    def _make_way_for_urgent(self) -> None:
        """A waiting sequence takes seat and blocks from running ones of a less urgent priority, ageing considered."""
        while self.waiting and self.running:
            first, last = self.waiting[0], max(self.running, key=by_rank)
            if last.request.priority <= first.request.priority or last.rank < first.rank:
                return
            if self._free_seats() > 0 and self._admit(first):
                self._enter(first)
            else:
                self._preempt(last)

    def _reserve(self, num_decodes: int, prefilling: bool) -> int:
        """Tokens that decodes leave to prefills, in a step that they could fill alone."""
        budget = self._config.max_num_batched_tokens
        if not prefilling and not (self.waiting and self._free_seats() > 0):
            return 0
        if budget == 1:
            return self.num_steps % 2 if num_decodes else 0
        return max(1, budget // 4)

    def _serve(self, sequences: list[Sequence], reserve: int) -> None:
        """Schedules each that is not in the step yet, until the budget is down to `reserve`."""
        for sequence in sequences:
            if self._budget <= reserve:
                return
            if sequence.status is Status.RUNNING and sequence.step != self.num_steps:
                self._schedule(sequence, self._budget - reserve, len(sequence.token_ids) - sequence.num_computed == 1)

    def _schedule(self, sequence: Sequence, limit: int, decodes: bool) -> bool:
        """decodes: it did so before this step, and is one of those that the strategy has made room for guesses for."""
        if len(sequence.token_ids) - sequence.num_computed > 1 and not sequence.request.wants_every_row:
            self._count_hits(sequence, self._blocks.adopt(sequence))
        if sequence.request.whole:
            if self._scheduled and len(sequence.token_ids) > limit:
                return False  # what is longer than a step has one of its own
            limit = len(sequence.token_ids)
        if not decodes:
            budget, limit = limit, min(limit, len(sequence.token_ids) - sequence.num_computed)
            limit = self._blocks.chunk(sequence, limit)
            if sequence.request.images:
                limit, taken = self._looking.room(sequence, limit, budget)
                self._budget -= taken
            if not limit:
                return False
            limit = sequence.request.uncut(sequence.num_computed, limit)
        fed = self._strategy.feed(sequence, limit)
        start = sequence.num_computed
        num_known = len(sequence.token_ids) - start
        if len(fed) > num_known and self._blocks.lacks(sequence, start + len(fed)):
            fed = fed[:num_known]  # nobody makes way for guesses
        end = start + len(fed)
        if not self._make_room(sequence, end):
            return False
        copy = self._blocks.grow(sequence, end)
        if copy is not None:
            self._copies.append(copy)
        if (pair := self._blocks.states.copy_due(sequence, len(self.running))) is not None:
            self._state_copies.append(pair)
        num_guesses = max(0, len(fed) - num_known)
        self._add_share(sequence, fed, start, end >= len(sequence.token_ids) and sequence.request.pooling is None, num_guesses)
        self._budget -= len(fed)
        return True

    def _add_share(self, sequence: Sequence, fed: list[int], start: int, draws: bool, num_guesses: int = 0) -> None:
        end, request = start + len(fed), sequence.request
        collects = request.wants_prompt_logprobs
        self._scheduled.append(
            Scheduled(
                sequence.seq_id, fed, start,
                sequence.block_table[: self._blocks.blocks_for(end)],
                tuple([each.seq_id for each in sequence.group]) if draws else (),
                request.params.prompt_logprobs if collects else None,
                request.prompt_ids[start + 1 : end + 1] if collects else (),
                len(request.prompt_ids),
                request.pooling, num_guesses,
                state=max(0, sequence.state), second=request.second, lora=request.lora,
                images=request.images_within(start, end) if request.images else (),
                shift=request.shift(start) if request.images else 0, lead=request.lead,
                near_table=sequence.near_table[: self._blocks.blocks_for(end)],
            )
        )
        self._members.append(sequence)
        sequence.step = self.num_steps

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        while self._blocks.lacks(sequence, end):
            candidates = [each for each in self.running if each.rank > sequence.rank and each.step != self.num_steps]
            if not candidates:
                return False
            self._preempt(max(candidates, key=by_rank))
        return True

    def _preempt(self, sequence: Sequence, *, has_sound_state: bool = True) -> None:
        self.running.remove(sequence)
        self._blocks.release(sequence, has_sound_state=has_sound_state)
        self._wait(sequence)
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1

    def _enter_waiting(self, before: tuple[float, int, int] | None = None) -> None:
        """Waiting sequences, in order and up to rank `before`, while there are tokens, seats and blocks."""
        seats = self._free_seats() if self.waiting else 0
        while self.waiting and self._budget > 0 and seats > 0:
            sequence = self.waiting[0]
            if (before is not None and sequence.rank > before) or not self._admit(sequence):
                return
            self._enter(sequence)
            seats -= 1 + len(sequence.pending)
            if not self._schedule(sequence, self._budget, False):
                return

    def _enter(self, first: Sequence) -> None:
        assert self.waiting.pop(0) is first
        first.status = Status.RUNNING
        self.running.append(first)

    def _admit(self, sequence: Sequence) -> bool:
        if self._is_refused(sequence):
            return False
        request, headroom = sequence.request, self._headroom(sequence)
        if not self._blocks.admit(sequence, headroom, use_cache=not request.wants_every_row):
            self._refusal.note(sequence, headroom)
            return False
        self._refusal.forget()
        if request.first_scheduled is None:
            request.first_scheduled = self._clock()
        self._count_hits(sequence, sequence.num_computed)
        return True

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks that are to be left when this one has entered."""
        return (len(self.running) + len(sequence.pending) + 1) // 2 if self.running else 0

    def _is_refused(self, sequence: Sequence) -> bool:
        """Whether there was no room for it, and there is no more now."""
        return bool(self.running) and self._refusal.stands(sequence, self._headroom(sequence))

    def _count_hits(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_hit_tokens += num_tokens
        if sequence.request.num_preemptions == 0 and sequence.index == 0:
            sequence.request.num_cached_tokens += num_tokens

    def _free_seats(self) -> int:
        """Sequences that may still enter: those that will fork from a running one have their seats already."""
        return self._config.max_num_seqs - sum(1 + len(each.pending) for each in self.running)

    def _could_enter(self) -> bool:
        """Whether the first of those who wait might be let in by the next `plan`."""
        return self._config.policy == "priority" or (self._free_seats() > 0 and not self._is_refused(self.waiting[0]))

    def _let_others_go_first_next_time(self) -> None:
        if len(self._scheduled) < len(self.running):
            self.running.sort(key=lambda each: each.step == self.num_steps)

    def _introduce(self) -> list[NewSequence]:
        shares = zip(self._members, self._scheduled, strict=True)
        new = (sequence for sequence, share in shares if share.draws and not sequence.registered)
        return [each.announce() for sequence in new for each in sequence.group]

    # What came back

    def _failed(self, sequence: Sequence, message: str) -> list[Result]:
        self._blocks.distrust(sequence)
        return [Result(each, Drawn(each.seq_id, [], None, message)) for each in sequence.group]

    def _unpin(self, step: Step) -> None:
        for copy in step.copies:
            self._blocks.unpin(copy.source)
        self._blocks.states.drop(source for source, _ in step.states)

    def _collect_prompt(self, sequence: Sequence, share: Scheduled, output: StepOutput) -> None:
        request = sequence.request
        done = min(sequence.num_computed + len(share.token_ids), len(request.prompt_ids))
        request.num_computed_prompt_tokens = max(request.num_computed_prompt_tokens, done)
        if request.wants_prompt_logprobs and request.prompt_logprobs is not None:
            request.prompt_logprobs.extend(output.prompt_logprobs.get(sequence.seq_id, ()))
        if sequence.seq_id in output.pooled:
            request.pool(output.pooled[sequence.seq_id])

    def _fork(self, parent: Sequence, drawn: list[Drawn]) -> list[Result]:
        """Sequences that shared the prompt go their own ways, each with its first token. Without a seat they wait."""
        children, parent.pending = parent.pending, []
        results: list[Result] = []
        for child, first in zip(children, drawn, strict=True):
            child.registered = True
            child.token_ids.extend(first.token_ids)
            if len(self.running) < self._config.max_num_seqs and self._blocks.fork(parent, child):
                child.status = Status.RUNNING
                self.running.append(child)
            else:
                self._wait(child)
            results.append(Result(child, first))
        return results

    # The waiting line, in order of rank

    def _lead(self, first: Sequence, others: list[Sequence]) -> None:
        first.pending = others
        for other in others:
            other.status = Status.PENDING
        self._wait(first)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.request.begin_again()
        self.waiting.put(sequence)
