"""Constraints of sequences that draw on a device: the host computes their masks while the model runs there.

What a sequence may draw depends on what it drew before, so its mask is the one thing of a decode step that waits for the last
step's tokens. It is needed behind the model only: the step is under way by then, recorded or not, and has drawn for everybody
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.masks import MaskThreads
from nanovllm_cli.engine.uploads import Uploads
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.sampling_table import SamplingTable


class Guided:
    """A sequence's constraint. ends: it is fulfilled, and nothing can follow. error: why it can't go on."""

    __slots__ = ("ends", "error", "guide")

    def __init__(self, make: Callable[[], Guide | None]) -> None:
        self.ends = False
        self.error: Exception | None = None
        self.guide: Guide | None = None
        try:
            self.guide = make()
        except Exception as error:  # whatever it is, the other sequences go on
            self.error = error

    @property
    def is_open(self) -> bool:
        return not self.ends and self.error is None

    def accept(self, token_id: int) -> None:
        assert self.guide is not None
        try:
            self.guide.accept(token_id)
            self.ends = self.guide.is_complete
        except Exception as error:  # as above
            self.error = error

    def take_back(self, num_tokens: int) -> None:
        """The last ones were accepted in vain."""
        assert self.guide is not None
        self.ends = False
        try:
            self.guide.rollback(num_tokens)
        except Exception as error:  # as above
            self.error = error


class DeviceMasks:
    """Masks of up to max_rows sequences a step, computed, copied, and put into their slots of the table."""

    def __init__(self, device: Device, table: SamplingTable, max_rows: int) -> None:
        self._threads = MaskThreads()
        self._table = table
        self._num_words = table.masks.shape[1]
        numel = max_rows * (1 + self._num_words)
        self._uploads = Uploads(device, numel, torch.int32)
        self._there = torch.empty(numel, dtype=torch.int32, device=device.launcher.device)

    def put(self, answers: Sequence[Guided], slots: Sequence[int]) -> torch.Tensor:
        """Returns the slots [B] int32 on the device. Whoever draws nothing, being at its end or in error, says so then, and
        what its row draws is to be thrown away."""
        count, words = len(slots), self._num_words
        upload = self._uploads.take()[: count * (1 + words)]
        upload[:count] = torch.tensor(slots, dtype=torch.int32)
        masks = upload[count:].view(count, words).numpy().view(np.uint32)
        masks[:] = 0
        self._compute(answers, masks)
        for row, slot in enumerate(slots):
            allowed = self._table.allowed(slot)
            if allowed is not None:
                masks[row] &= allowed
        there = self._there[: len(upload)]
        self._uploads.copy(upload, there)
        self._table.put_masks(there[:count], there[count:].view(count, words))
        return there[:count]

    def _compute(self, answers: Sequence[Guided], masks: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> None:
        guides = {row: each.guide for row, each in enumerate(answers) if each.guide is not None and each.is_open}
        try:
            self._threads.finish(guides)
        except Exception as error:  # others have drawn already: the step must not be repeated
            for row in guides:
                answers[row].error = error
            return
        for row, guide in guides.items():
            answer = answers[row]
            try:
                found = self._threads.mask(row, guide)
                answer.ends = guide.is_complete
            except Exception as error:  # whatever it is, the other sequences go on
                answer.error = error
                continue
            if found is None:
                masks[row] = ~np.uint32(0)
            else:
                masks[row, : len(found)] = found[: masks.shape[1]]
