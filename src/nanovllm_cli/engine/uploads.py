"""Host memory that steps are written into and copied to the device from, while earlier copies are under way."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.device import Device

STEPS_IN_FLIGHT = 2


class Uploads:
    """Host memory by turns, for one step after another. Steps whose tokens nobody reads, as those that were interrupted, are not
    waited for elsewhere: here it is made sure that what is written anew has been copied."""

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self._turns = [(device.host_buffer(numel, dtype), device.event()) for _ in range(STEPS_IN_FLIGHT)]

    def take(self) -> torch.Tensor:
        self._turns.append(self._turns.pop(0))
        buffer, copied = self._turns[-1]
        copied.synchronize()
        return buffer

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """From what was taken last."""
        target.copy_(source, non_blocking=True)
        self._turns[-1][1].record()
