"""Plans on a GPU. A step of decodes is a `DecodeStep`, recorded and replayed; any other step runs launch by launch. In both some
sequences may draw on the device behind the others, when their masks are there, and some on the host, from their logits.

`submit` returns before the device is done, so that the next step can be planned and started meanwhile. Not so with guesses: the
next step begins behind those that held. Sequences without constraint and penalties draw behind all of theirs at once, others
behind one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.engine.aligning import Aligner
from nanovllm_cli.engine.decode_step import DecodeStep
from nanovllm_cli.engine.decodes import are_decodes
from nanovllm_cli.engine.device_sampler import DeviceSampler
from nanovllm_cli.engine.plan import DRAWN_BEFORE, Drawn, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.platform import KeptRows, See, sees_nothing
from nanovllm_cli.engine.runner import (
    Draw,
    beside_draws,
    draw_behind_guesses,
    draws_of,
    kept_rows,
    rows_of,
)
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels.ops import Hidden, take_rows
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.sampling_params import SamplingParams

Read = Callable[[], list[Drawn]]


@dataclass(eq=False)
class CudaRunner:
    """sampler draws on the host, on_device there. together: with other processes, which know nothing of who draws where."""

    model: Decoder
    cache: KVCache
    sampler: Sampler
    on_device: DeviceSampler
    decode: DecodeStep
    block_size: int
    together: bool = False

    def __post_init__(self) -> None:
        self._rows_before: dict[int, int] = {}
        self._last_read: Read = list
        self.see: See = sees_nothing
        self.hidden: list[KeptRows] = []
        self._aligner = Aligner(self.model, self.cache, self.block_size)

    def arranged(self, plan: Plan) -> Plan:
        """See PlanRunner: those that draw on the device first, as in a decode step."""
        if not are_decodes(plan.scheduled):
            return plan
        new = {each.seq_id: each for each in plan.new}

        def place(share: Scheduled) -> int:
            if (each := new.get(share.seq_id)) is not None:
                return int(each.params.is_guided) if self.on_device.takes(each.params, each.stop_ids) else 2
            return 2 if share.seq_id not in self.on_device else self.on_device.is_guided(share.seq_id)

        return plan._replace(scheduled=sorted(plan.scheduled, key=place))

    def run(self, plan: Plan, hidden: torch.Tensor | None = None) -> StepOutput:
        """See PlanRunner.run."""
        return self.submit(plan, hidden)()

    def draws_unseen(self, params: SamplingParams) -> bool:
        """See RunsAhead. Stop ids only matter to the sampler with min_tokens, and then may be too many for it. Where layers are
        passed by by whoever looks at nothing, sequences that draw may be no step of decodes together."""
        sees_prompt = params.prompt_logprobs is not None or self.model.spec.looks is not None
        return not self.decode.guesses and not sees_prompt and not params.min_tokens and self.on_device.takes(params, ())

    def submit(self, plan: Plan, hidden: torch.Tensor | None = None) -> Callable[[], StepOutput]:
        """See RunsAhead, and PlanRunner of hidden."""
        self.hidden = []
        for seq_id in plan.finished:
            self.sampler.remove(seq_id)
            self.on_device.remove(seq_id)
            self._aligner.forget(seq_id)
        for new in plan.new:
            where = self.on_device if self.on_device.takes(new.params, new.stop_ids) else self.sampler
            where.add(new)
        self.sampler.keep(plan.scheduled)
        self.cache.copy_blocks(plan.copies)
        self.cache.copy_states(plan.state_copies)
        if not plan.scheduled:
            return lambda: StepOutput([], {})
        if not are_decodes(plan.scheduled):
            return self._step(plan.scheduled, hidden)
        num_tokens = sum(len(share.token_ids) for share in plan.scheduled)
        if num_tokens == len(plan.scheduled):
            return self._decode(plan.scheduled, hidden)
        few = num_tokens <= self.decode.max_tokens
        return self._decode_guesses(plan.scheduled, hidden) if few else self._step(plan.scheduled, hidden)

    def _decode(self, scheduled: list[Scheduled], hidden: torch.Tensor | None) -> Callable[[], StepOutput]:
        by_id = {share.seq_id: share for share in scheduled}
        free, guided, others = self._by_place(list(by_id))
        there = free + guided
        self.sampler.start_masks(others)
        slots = self.on_device.seat({seq_id: by_id[seq_id].num_drawn for seq_id in there})[: len(free)]
        order = [by_id[seq_id] for seq_id in there + others]
        if hidden is not None and order != scheduled:
            place = {share.seq_id: row for row, share in enumerate(scheduled)}
            hidden = _rows(hidden, [place[share.seq_id] for share in order])
        logits = self.decode.run(order, self._rows_before, slots, self.on_device, hidden)
        self._keep(self.decode.hidden, [(share, row) for row, share in enumerate(order)])
        self._rows_before = {}
        if guided:
            if by_id[guided[0]].token_ids == [DRAWN_BEFORE]:
                self._last_read()
            self.on_device.draw_guided(guided, logits[len(free) : len(there)], len(free))
        read = self._read(there)
        drawn = self.sampler.sample(others, logits[len(there) : len(order)]) if others else []
        return lambda: StepOutput(drawn + read(), {})

    def _decode_guesses(self, scheduled: list[Scheduled], hidden: torch.Tensor | None) -> Callable[[], StepOutput]:
        ends = itertools.accumulate(len(share.token_ids) for share in scheduled)
        rows = [end - 1 - share.num_guesses for share, end in zip(scheduled, ends, strict=True)]
        draws = [Draw(share.seq_id, row, share.guesses) for share, row in zip(scheduled, rows, strict=True)]
        num_drawn = _num_drawn(scheduled)
        at_once = self._prepare_draws(draws, num_drawn)
        logits = self.decode.run_guesses(scheduled, self.on_device, hidden)
        firsts = itertools.accumulate((len(share.token_ids) for share in scheduled), initial=0)
        self._keep(self.decode.hidden, list(zip(scheduled, firsts, strict=False)))
        drawn = self._draw_behind_guesses(draws, at_once, logits, num_drawn)
        return lambda: StepOutput(drawn, {})

    def _keep(self, rows: torch.Tensor | None, owners: list[tuple[Scheduled, int]]) -> None:
        """rows: of the buffer that the next step writes to."""
        self.hidden = [(share, own.clone()) for share, own in kept_rows(rows, owners)]

    def _step(self, scheduled: list[Scheduled], rows: torch.Tensor | None) -> Callable[[], StepOutput]:
        batch, owners = build_batch(scheduled, self.block_size)
        batch = replace(batch, hidden=rows, images=self.see(scheduled))
        if any(share.num_guesses for share in scheduled):
            return self._step_with_guesses(scheduled, batch, owners)
        row_of = {seq_id: first + len(share.wanted_rows) - 1 for share, first in owners for seq_id in share.draws}
        num_drawn = _num_drawn(scheduled)
        free, guided, here = self._by_place(list(row_of))
        # One part, but where a prompt has more answers than there are seats.
        there, most = free + guided, self.on_device.max_rows
        parts = [there[first : first + most] for first in range(0, len(there), most)]
        if parts:
            self._seat(parts[0], num_drawn)  # its copies wait for the device, which has nothing to do yet
        self.sampler.start_masks(here)
        hidden, output = self._run(scheduled, batch, owners)
        logits_of = self._logits_of(hidden, row_of)
        logits = logits_of(here) if here else None  # if there is no room for them, nothing has been drawn
        self._rows_before = {}
        drawn: list[Drawn] = []
        read: Read = list
        for part in parts:
            if part is not parts[0]:
                drawn += read()
                self._seat(part, num_drawn)
            self._draw_part(part, logits_of(part))
            read = self._read(part)
        if logits is not None:
            drawn += self.sampler.sample(here, logits)
        return lambda: output._replace(drawn=drawn + read())

    def _step_with_guesses(
        self, scheduled: list[Scheduled], batch: Batch, owners: list[tuple[Scheduled, int]]
    ) -> Callable[[], StepOutput]:
        rows, draws = rows_of(draws_of(owners))
        num_drawn = _num_drawn(scheduled)
        at_once = self._prepare_draws(draws, num_drawn)
        hidden, output = self._run(scheduled, batch, owners)
        drawn = self._draw_behind_guesses(draws, at_once, self.model.logits(take_rows(hidden, rows)), num_drawn)
        return lambda: output._replace(drawn=drawn)

    def _run(self, scheduled: list[Scheduled], batch: Batch, owners: list[tuple[Scheduled, int]]) -> tuple[Hidden, StepOutput]:
        """Rows behind the last norm, and what comes of them beside draws."""
        inputs = self._aligner.watched(scheduled, self.model.prepare(batch))
        hidden = self.model.run(inputs, self.cache)
        if any(share.keeps_rows for share, _ in owners):
            self.hidden = kept_rows(self.model.kept(hidden), owners)
        output = beside_draws(self.model, self.sampler, hidden, owners)
        return hidden, output._replace(pooled={**output.pooled, **self._aligner.times(scheduled, inputs)})

    def _prepare_draws(self, draws: list[Draw], num_drawn: dict[int, int]) -> list[int]:
        """Before the model runs. Those that draw from all their rows at once."""
        self.sampler.start_masks(self._by_place([draw.seq_id for draw in draws])[2])
        num_rows = {draw.seq_id: 1 + len(draw.guesses) for draw in draws if draw.guesses}
        return self.on_device.seat_at_once(num_rows, num_drawn)

    def _draw_behind_guesses(
        self, draws: list[Draw], at_once: list[int], logits: torch.Tensor, num_drawn: dict[int, int]
    ) -> list[Drawn]:
        rows = [draw.row + i for draw in draws if draw.seq_id in at_once for i in range(1 + len(draw.guesses))]
        drawn_at_once = self.on_device.draw_at_once(_rows(logits, rows)) if rows else {}

        def sample(going: list[Draw], depth: int) -> list[Drawn]:
            drawn = [drawn_at_once[draw.seq_id][depth] for draw in going if draw.seq_id in at_once]
            for found in drawn:
                self.on_device.accept(found)
            row_of = {draw.seq_id: draw.row + depth for draw in going if draw.seq_id not in at_once}
            free, guided, here = self._by_place(list(row_of))
            there, most = free + guided, self.on_device.max_rows
            for first in range(0, len(there), most):  # one part, as in `_step`
                part = there[first : first + most]
                self._seat(part, {seq_id: num_drawn[seq_id] + depth for seq_id in part})
                self._draw_part(part, _rows(logits, [row_of[seq_id] for seq_id in part]))
                drawn += self._read(part)()
            if here:
                drawn += self.sampler.sample(here, _rows(logits, [row_of[seq_id] for seq_id in here]))
            by_id = {found.seq_id: found for found in drawn}
            return [by_id[draw.seq_id] for draw in going]

        drawn = draw_behind_guesses(draws, sample)
        self._rows_before = {}  # of the last draws alone, which the next step does not go on from
        return drawn

    def _draw_part(self, seq_ids: list[int], logits: torch.Tensor) -> None:
        """On the device, for these, which are seated: those with a constraint last."""
        free, guided, _ = self._by_place(seq_ids)
        if free:
            self.on_device.draw(logits[: len(free)], *self.on_device.needs(free))
        if guided:
            self.on_device.draw_guided(guided, logits[len(free) :], len(free))

    def _by_place(self, seq_ids: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Those that draw on the device, on the device under a mask, and on the host."""
        places: tuple[list[int], list[int], list[int]] = ([], [], [])
        for seq_id in seq_ids:
            places[2 if seq_id not in self.on_device else self.on_device.is_guided(seq_id)].append(seq_id)
        return places

    def _logits_of(self, hidden: Hidden, row_of: dict[int, int]) -> Callable[[list[int]], torch.Tensor]:
        """The rows of sequences. Together with others the head has to compute the same rows everywhere: all at once."""
        if not self.together or not row_of:
            return lambda seq_ids: self.model.logits(take_rows(hidden, [row_of[seq_id] for seq_id in seq_ids]))
        whole = self.model.logits(take_rows(hidden, list(row_of.values())))
        place = {seq_id: row for row, seq_id in enumerate(row_of)}
        return lambda seq_ids: _rows(whole, [place[seq_id] for seq_id in seq_ids])

    def _seat(self, seq_ids: list[int], num_drawn: dict[int, int]) -> None:
        slots = torch.tensor(self.on_device.seat({seq_id: num_drawn[seq_id] for seq_id in seq_ids}), dtype=torch.int32)
        self.on_device.buffers.rows[: len(slots)].copy_(slots)

    def _read(self, seq_ids: list[int]) -> Read:
        if not seq_ids:
            return list
        self._rows_before = {seq_id: row for row, seq_id in enumerate(seq_ids)}
        self._last_read = cache(self.on_device.read(seq_ids, self.on_device.needs(seq_ids)[1]))
        return self._last_read


def _num_drawn(scheduled: list[Scheduled]) -> dict[int, int]:
    return {seq_id: share.num_drawn for share in scheduled for seq_id in share.draws}


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Without a copy where they follow one another, as a single sequence's does."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, torch.tensor(rows).to(logits.device))
