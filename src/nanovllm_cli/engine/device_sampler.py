"""Drawing on the device: which slot of the sampling table a sequence has, and reading what was drawn.

The kernels keep a slot's position and counts up to date by themselves. What the host remembers of a sequence is enough to
write its slot anew, where more sequences are alive than there are slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.engine.device_guesses import Asked, DrawsAtOnce
from nanovllm_cli.engine.device_guides import DeviceMasks, Guided
from nanovllm_cli.engine.device_readout import Readout
from nanovllm_cli.engine.plan import Drawn, NewSequence
from nanovllm_cli.engine.sampler import failed_draw
from nanovllm_cli.engine.uploads import STEPS_IN_FLIGHT
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.sampling import sample
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable, on_device
from nanovllm_cli.sampling_params import SamplingParams

GuideOf = Callable[[NewSequence], Guide | None]


@dataclass(slots=True, eq=False)
class _State:
    """A sequence that draws here. slot: None until it draws, and again when somebody else needed it. num_there: how many tokens
    it has drawn as its slot has it, those that nobody has read included."""

    new: NewSequence
    guided: Guided | None
    drawn: list[int] = field(default_factory=list)
    slot: int | None = None
    num_there: int = 0

    def keep(self, num_drawn: int) -> None:
        """Forgets what steps that were broken off drew."""
        num_more = len(self.drawn) - num_drawn
        if num_more > 0:
            del self.drawn[num_drawn:]
            if self.guided is not None:
                self.guided.take_back(num_more)
        assert len(self.drawn) == num_drawn, (self.new.seq_id, len(self.drawn), num_drawn)


class DeviceSampler:
    """max_rows: most rows a step draws. tokens [max_rows] int64: where what was drawn is left, by row, for the next step.
    guide_of: the constraint of a sequence that has one, at its beginning. max_guesses: most rows that are drawn from behind
    guesses in a step; 0 where none are."""

    def __init__(
        self, device: Device, vocab_size: int, max_rows: int, tokens: torch.Tensor, guide_of: GuideOf, max_guesses: int
    ) -> None:
        self._launcher = device.launcher
        self._states: dict[int, _State] = {}
        self._free = list(range(max_rows))
        self.max_rows = max_rows
        self._at_once: DrawsAtOnce | None = None
        self.table = SamplingTable(self._launcher.device, max_rows, vocab_size)
        self.buffers = SamplingBuffers(self._launcher.device, max_rows, vocab_size)
        self.buffers.token_ids = tokens
        self._guide_of = guide_of
        self._masks = DeviceMasks(device, self.table, max_rows)
        self._readouts = [Readout(device, max_rows) for _ in range(STEPS_IN_FLIGHT)]
        if max_guesses:
            self._at_once = DrawsAtOnce(device, vocab_size, max_guesses)

    def takes(self, params: SamplingParams, stop_ids: Sequence[int]) -> bool:
        return on_device(params, stop_ids)

    def add(self, new: NewSequence) -> None:
        """Register a sequence; again, from its start, where a step that failed is repeated."""
        self.remove(new.seq_id)
        guided = Guided(lambda: self._guide_of(new)) if new.params.is_guided else None
        self._states[new.seq_id] = _State(new, guided, list(new.drawn))

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
        readout = self._readouts[0]
        self._readouts.append(self._readouts.pop(0))
        done = readout.copy(self.buffers, len(seq_ids), has_logprobs)

        def result() -> list[Drawn]:
            done.synchronize()
            rows = zip(seq_ids, readout.ids_and_statuses(len(seq_ids)), strict=True)
            return [self._taken(seq_id, readout, row, *found) for row, (seq_id, found) in enumerate(rows)]

        return result

    def _taken(self, seq_id: int, readout: Readout, row: int, token_id: int, status: int) -> Drawn:
        """Moves a sequence on by what its row drew."""
        state = self._states.get(seq_id)
        guided = None if state is None else state.guided
        if guided is not None and not guided.is_open:
            return _closed(seq_id, guided)
        drawn = readout.drawn(row, seq_id, token_id, status, None if state is None else state.new.params.logprobs)
        if drawn.error is not None or state is None:  # None: it ended meanwhile
            return drawn
        state.drawn.append(token_id)
        if guided is None:
            return drawn
        guided.accept(token_id)
        return drawn._replace(ends=guided.ends) if guided.error is None else _closed(seq_id, guided)

    def seat_at_once(self, num_rows: Mapping[int, int], num_drawn: Mapping[int, int]) -> list[int]:
        """Of sequences that are to draw from several rows, behind guesses, those that can do so before these are known to hold.
        num_drawn: see `seat`."""
        seated = [seq_id for seq_id in num_rows if self._draws_at_once(seq_id)]
        if self._at_once is not None and seated:
            for seq_id in seated:
                self._states[seq_id].keep(num_drawn[seq_id])
            states = ((self._states[seq_id], num_rows[seq_id]) for seq_id in seated)
            self._at_once.seat([Asked(state.new, state.drawn, count) for state, count in states])
        return seated

    def _draws_at_once(self, seq_id: int) -> bool:
        state = self._states.get(seq_id)
        return state is not None and self._at_once is not None and self._at_once.takes(state.new.params)

    def draw_at_once(self, logits: torch.Tensor) -> dict[int, list[Drawn]]:
        """From logits [B, V], the rows of those one after another; `accept` those draws that count. Waits for the device."""
        assert self._at_once is not None
        return self._at_once.draw(logits)

    def accept(self, drawn: Drawn) -> None:
        """Moves a sequence on by what it drew at once with others."""
        self._states[drawn.seq_id].drawn += drawn.token_ids

    def _evict(self, wanted: Collection[int]) -> int:
        for seq_id, state in self._states.items():
            if state.slot is not None and seq_id not in wanted:
                slot, state.slot = state.slot, None
                return slot
        raise NanovllmError("more sequences draw in one step than max_num_seqs")


def _closed(seq_id: int, guided: Guided) -> Drawn:
    """Of a constraint that lets nothing be drawn any more."""
    return Drawn(seq_id, [], ends=True) if guided.error is None else failed_draw(seq_id, guided.error)
