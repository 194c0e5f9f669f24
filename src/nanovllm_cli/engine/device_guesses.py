"""Drawing behind guesses on a device, from all rows at once: for sequences whose draws do not depend on what they drew before.

A slot of the sampling table draws one token a step, so these have a table of their own, where a sequence takes one slot for each
row; its own slot, if it has one, is written anew when it draws alone again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.engine.device_readout import Readout
from nanovllm_cli.engine.plan import Drawn, NewSequence
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.sampling import sample
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable
from nanovllm_cli.sampling_params import SamplingParams


class Asked(NamedTuple):
    """A sequence, what it has drawn, and how many rows it draws from next."""

    new: NewSequence
    drawn: list[int]
    num_rows: int


class DrawsAtOnce:
    """max_rows: most rows of a step."""

    def __init__(self, device: Device, vocab_size: int, max_rows: int) -> None:
        where = device.launcher.device
        self._launcher = device.launcher
        self._table = SamplingTable(where, max_rows, vocab_size)
        self._buffers = SamplingBuffers(where, max_rows, vocab_size)
        self._buffers.rows = torch.arange(max_rows, dtype=torch.int32, device=where)
        self._readout = Readout(device, max_rows)
        self._seated: list[Asked] = []

    @staticmethod
    def takes(params: SamplingParams) -> bool:
        """Of those that draw on the device."""
        return not params.has_penalties and not params.is_guided

    def seat(self, asked: list[Asked]) -> None:
        """Those that are about to draw. Before the model runs: what is copied to the table waits for the device."""
        self._seated, slot = asked, 0
        assert sum(each.num_rows for each in asked) <= len(self._buffers.rows)
        for new, drawn, num_rows in asked:
            self._table.write(slot, new.params, new.seed, new.stop_ids, new.prompt_ids, drawn, num_rows)
            slot += num_rows

    def draw(self, logits: torch.Tensor) -> dict[int, list[Drawn]]:
        """From logits [B, V], the rows of those that are seated one after another. Waits for the device."""
        asked, count = self._seated, len(logits)
        assert count == sum(each.num_rows for each in asked)
        only_greedy = all(each.new.params.is_greedy for each in asked)
        has_logprobs = any(each.new.params.logprobs is not None for each in asked)
        sample(self._launcher, logits, self._table, self._buffers, only_greedy=only_greedy, has_logprobs=has_logprobs)
        self._readout.copy(self._buffers, count, has_logprobs).synchronize()
        found = iter(enumerate(self._readout.ids_and_statuses(count)))
        return {
            new.seq_id: [
                self._readout.drawn(row, new.seq_id, token_id, status, new.params.logprobs)
                for _, (row, (token_id, status)) in zip(range(num_rows), found, strict=False)
            ]
            for new, _, num_rows in asked
        }
