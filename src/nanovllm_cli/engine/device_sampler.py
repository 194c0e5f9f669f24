"""Drawing on the device: which slot of the sampling table a sequence has, and reading what was drawn.

The kernels keep a slot's position and counts up to date by themselves. What the host remembers of a sequence is enough to
write its slot anew, where more sequences are alive than there are slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.engine.device_guides import DeviceMasks, Guided
from nanovllm_cli.engine.plan import Drawn, NewSequence, TokenLogprobs
from nanovllm_cli.engine.sampler import failed_draw
from nanovllm_cli.engine.uploads import STEPS_IN_FLIGHT
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.sampling import sample
from nanovllm_cli.kernels.sampling_table import (
    FINE,
    MAX_LOGPROBS,
    MAX_VOCABULARY,
    NOT_FINITE,
    NOTHING_LEFT,
    SamplingBuffers,
    SamplingTable,
    on_device,
)
from nanovllm_cli.sampling_params import SamplingParams

GuideOf = Callable[[NewSequence], Guide | None]
_MESSAGES = {NOT_FINITE: "the model's logits are not finite: NaN or infinity"}
_NOTHING_LEFT = "no token is left to draw: every one is banned"


class _State:
    """A sequence that draws here. slot: None until it draws, and again when somebody else needed it. num_there: how many tokens
    it has drawn as its slot has it, those that nobody has read included."""

    __slots__ = ("drawn", "guided", "new", "num_there", "slot")

    def __init__(self, new: NewSequence, guided: Guided | None) -> None:
        self.new = new
        self.guided = guided
        self.drawn: list[int] = []
        self.slot: int | None = None
        self.num_there = 0

    def keep(self, num_drawn: int) -> None:
        """Forgets what steps that were broken off drew."""
        num_more = len(self.drawn) - num_drawn
        if num_more > 0:
            del self.drawn[num_drawn:]
            if self.guided is not None:
                self.guided.take_back(num_more)
        assert len(self.drawn) == num_drawn, (self.new.seq_id, len(self.drawn), num_drawn)


class _Readout(NamedTuple):
    """Host memory that one step's draws are copied to."""

    ids: torch.Tensor
    status: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


class DeviceSampler:
    """max_rows: most rows a step draws. tokens [max_rows] int64: where what was drawn is left, by row, for the next step.
    guide_of: the constraint of a sequence that has one, at its beginning."""

    def __init__(self, device: Device, vocab_size: int, max_rows: int, tokens: torch.Tensor, guide_of: GuideOf) -> None:
        self._device = device
        self._launcher = device.launcher
        self._states: dict[int, _State] = {}
        self._free = list(range(max_rows))
        self.max_rows = max_rows
        self.knows_vocabulary = vocab_size <= MAX_VOCABULARY
        if not self.knows_vocabulary:
            return
        self.table = SamplingTable(self._launcher.device, max_rows, vocab_size)
        self.buffers = SamplingBuffers(self._launcher.device, max_rows, vocab_size)
        self.buffers.token_ids = tokens
        self._guide_of = guide_of
        self._masks = DeviceMasks(device, self.table, max_rows)
        self._readouts = [self._readout(max_rows) for _ in range(STEPS_IN_FLIGHT)]

    def takes(self, params: SamplingParams, stop_ids: Sequence[int]) -> bool:
        return self.knows_vocabulary and on_device(params, stop_ids)

    def add(self, new: NewSequence) -> None:
        """Register a sequence; again, from its start, where a step that failed is repeated."""
        self.remove(new.seq_id)
        guided = Guided(lambda: self._guide_of(new)) if new.params.is_guided else None
        self._states[new.seq_id] = _State(new, guided)

    def remove(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None and state.slot is not None:
            self._free.append(state.slot)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._states

    def is_guided(self, seq_id: int) -> bool:
        """Whether its draws wait for a mask: `draw_guided` makes them, not `draw`."""
        return self._states[seq_id].guided is not None

    def seat(self, num_drawn: Mapping[int, int]) -> list[int]:
        """The slot of each sequence that is about to draw, written where it is new, or has draws that the plan knows nothing of.
        num_drawn: how many tokens each drew before, as the plan has it. Whoever is not among them may lose theirs."""
        for seq_id, count in num_drawn.items():
            state = self._states[seq_id]
            if state.slot is None or state.num_there != count:
                state.keep(count)
                if state.slot is None:
                    state.slot = self._free.pop() if self._free else self._evict(num_drawn)
                new = state.new
                self.table.write(state.slot, new.params, new.seed, new.stop_ids, new.prompt_ids, state.drawn)
            state.num_there = count + 1
        return self._slots(num_drawn)

    def _slots(self, seq_ids: Iterable[int]) -> list[int]:
        return [slot for seq_id in seq_ids if (slot := self._states[seq_id].slot) is not None]

    def needs(self, seq_ids: Sequence[int]) -> tuple[bool, bool]:
        """Whether all of these are greedy, and whether any wants logprobs: what `draw` is to be told."""
        params = [self._states[seq_id].new.params for seq_id in seq_ids]
        return all(each.is_greedy for each in params), any(each.logprobs is not None for each in params)

    def draw(self, logits: torch.Tensor, only_greedy: bool, has_logprobs: bool) -> None:
        """From logits [B, V] for the slots in buffers.rows[:B]. May be recorded."""
        sample(
            self._launcher, logits, self.table, self.buffers, only_greedy=only_greedy, has_logprobs=has_logprobs
        )

    def draw_guided(self, seq_ids: Sequence[int], logits: torch.Tensor, first: int) -> None:
        """From logits [B, V] for these, which are seated, as rows first, first + 1, … What they drew before has been read. Their
        masks are computed here, while the device is busy with the logits."""
        answers = [guided for seq_id in seq_ids if (guided := self._states[seq_id].guided) is not None]
        rows = self._masks.put(answers, self._slots(seq_ids))
        only_greedy, has_logprobs = self.needs(seq_ids)
        buffers = self.buffers.part(first, rows)
        sample(self._launcher, logits, self.table, buffers, only_greedy=only_greedy, has_logprobs=has_logprobs)

    def read(self, seq_ids: Sequence[int], has_logprobs: bool) -> Callable[[], list[Drawn]]:
        """Starts copying what rows 0 … drew for these; the result waits for it. Call both in the order of the steps."""
        count, readout = len(seq_ids), self._readouts[0]
        self._readouts.append(self._readouts.pop(0))
        pairs = [(readout.ids, self.buffers.token_ids), (readout.status, self.buffers.status)]
        if has_logprobs:
            pairs += [(readout.values, self.buffers.values), (readout.ranks, self.buffers.ranks)]
            pairs += [(readout.top_ids, self.buffers.top_ids), (readout.top_values, self.buffers.top_values)]
        for host, there in pairs:
            host[:count].copy_(there[:count], non_blocking=True)
        done = self._device.event()
        done.record()

        def result() -> list[Drawn]:
            done.synchronize()
            return self._drawn(seq_ids, readout)

        return result

    def _drawn(self, seq_ids: Sequence[int], readout: _Readout) -> list[Drawn]:
        ids, status = readout.ids[: len(seq_ids)].tolist(), readout.status[: len(seq_ids)].tolist()
        rows = enumerate(zip(seq_ids, ids, status, strict=True))
        return [self._taken(seq_id, token_id, found, readout, row) for row, (seq_id, token_id, found) in rows]

    def _taken(self, seq_id: int, token_id: int, found: int, readout: _Readout, row: int) -> Drawn:
        """Moves a sequence on by what its row drew."""
        state = self._states.get(seq_id)
        guided = None if state is None else state.guided
        if guided is not None and not guided.is_open:
            return _closed(seq_id, guided)
        if found != FINE:
            return Drawn(seq_id, [], error=_MESSAGES.get(found, _NOTHING_LEFT), unmeetable=found == NOTHING_LEFT)
        if state is None:  # it ended meanwhile
            return Drawn(seq_id, [token_id])
        state.drawn.append(token_id)
        if guided is not None:
            guided.accept(token_id)
            if guided.error is not None:
                return _closed(seq_id, guided)
        num = state.new.params.logprobs
        logprobs = None if num is None else [_logprobs(readout, row, token_id, num)]
        return Drawn(seq_id, [token_id], logprobs, ends=guided is not None and guided.ends)

    def _evict(self, wanted: Collection[int]) -> int:
        for seq_id, state in self._states.items():
            if state.slot is not None and seq_id not in wanted:
                slot, state.slot = state.slot, None
                return slot
        raise NanovllmError("more sequences draw in one step than max_num_seqs")

    def _readout(self, rows: int) -> _Readout:
        buffer = self._device.host_buffer
        return _Readout(
            buffer(rows, torch.int64), buffer(rows, torch.int32), buffer(rows, torch.float32), buffer(rows, torch.int32),
            buffer(rows * MAX_LOGPROBS, torch.int32).view(rows, -1), buffer(rows * MAX_LOGPROBS, torch.float32).view(rows, -1),
        )  # fmt: skip


def _closed(seq_id: int, guided: Guided) -> Drawn:
    """Of a constraint that lets nothing be drawn any more."""
    return Drawn(seq_id, [], ends=True) if guided.error is None else failed_draw(seq_id, guided.error)


def _logprobs(readout: _Readout, row: int, token_id: int, num: int) -> TokenLogprobs:
    top = zip(readout.top_ids[row, :num].tolist(), readout.top_values[row, :num].tolist(), strict=True)
    return TokenLogprobs(
        token_id, float(readout.values[row]), int(readout.ranks[row]), tuple(pair for pair in top if pair[0] >= 0)
    )
