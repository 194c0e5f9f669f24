"""What the sampling kernels drew, on its way to the host."""

from __future__ import annotations

import torch

from nanovllm_cli.engine.plan import Drawn, TokenLogprobs
from nanovllm_cli.engine.sampler import failed_draw, nothing_drawn
from nanovllm_cli.kernels.device import Device, Event
from nanovllm_cli.kernels.sampling_table import FINE, MAX_LOGPROBS, NOT_FINITE, SamplingBuffers


class Readout:
    """Host memory that one step's draws are copied to."""

    def __init__(self, device: Device, rows: int) -> None:
        buffer = device.host_buffer
        self._device = device
        self._ids, self._status = buffer(rows, torch.int64), buffer(rows, torch.int32)
        self._values, self._ranks = buffer(rows, torch.float32), buffer(rows, torch.int32)
        self._top_ids = buffer(rows * MAX_LOGPROBS, torch.int32).view(rows, -1)
        self._top_values = buffer(rows * MAX_LOGPROBS, torch.float32).view(rows, -1)

    def copy(self, buffers: SamplingBuffers, count: int, has_logprobs: bool) -> Event:
        """Starts copying what the first rows drew, and says when that is done."""
        pairs = [(self._ids, buffers.token_ids), (self._status, buffers.status)]
        if has_logprobs:
            pairs += [(self._values, buffers.values), (self._ranks, buffers.ranks)]
            pairs += [(self._top_ids, buffers.top_ids), (self._top_values, buffers.top_values)]
        for host, there in pairs:
            host[:count].copy_(there[:count], non_blocking=True)
        done = self._device.event()
        done.record()
        return done

    def ids_and_statuses(self, count: int) -> list[tuple[int, int]]:
        """Of the first rows, copied by now."""
        return list(zip(self._ids[:count].tolist(), self._status[:count].tolist(), strict=True))

    def drawn(self, row: int, seq_id: int, token_id: int, status: int, num_logprobs: int | None) -> Drawn:
        """What a row gave this sequence, which asked for so many log-probabilities."""
        if status != FINE:
            return failed_draw(seq_id, nothing_drawn(is_finite=status != NOT_FINITE))
        return Drawn(seq_id, [token_id], None if num_logprobs is None else [self._logprobs(row, token_id, num_logprobs)])

    def _logprobs(self, row: int, token_id: int, num: int) -> TokenLogprobs:
        top = zip(self._top_ids[row, :num].tolist(), self._top_values[row, :num].tolist(), strict=True)
        return TokenLogprobs(
            token_id, float(self._values[row]), int(self._ranks[row]), tuple(pair for pair in top if pair[0] >= 0)
        )
