"""Where the keys of a step of decodes lie, on a GPU: tables of blocks, or of near parts, and slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nanovllm_cli.engine.uploads import Uploads
from nanovllm_cli.kernels.device import Device


class Tables:
    """there [max_rows, width] int32, on the device: of a step's sequences, as numbers of blocks or of parts."""

    def __init__(self, device: Device, max_rows: int, width: int) -> None:
        self.there = torch.zeros(max_rows, width, dtype=torch.int32, device=device.launcher.device)
        self._uploads = Uploads(device, max_rows * width, torch.int32)
        self._host = np.zeros((max_rows, width), np.int32)
        self._last: list[Sequence[int]] = []

    def upload(self, tables: Sequence[Sequence[int]]) -> None:
        last, self._last = self._last, []
        changed = False
        for row, table in enumerate(tables):  # numpy takes its time for lists: of most, only what is behind the last step's
            known = last[row] if row < len(last) else []
            if table == known:
                continue
            changed = True
            same = len(known) if table[: len(known)] == known else 0
            self._host[row, same : len(table)] = table[same:]
        if changed:
            width = max(map(len, tables))
            upload = self._uploads.take()[: len(tables) * width].view(len(tables), width)
            upload.numpy()[:] = self._host[: len(tables), :width]
            self._uploads.copy(upload, self.there[: len(tables), :width])
        self._last = [*tables, *last[len(tables) :]]


def slots_of(tables: Sequence[Sequence[int]], lens: np.ndarray, position: np.ndarray, size: int) -> np.ndarray:
    """Of each token, by its sequence's table and its place there. lens: how many tokens each sequence has."""
    if len(position) == len(tables):
        block = np.array([table[-1] for table in tables], np.int64)
    else:
        of_tokens = zip(np.repeat(np.arange(len(tables)), lens).tolist(), (position // size).tolist(), strict=True)
        block = np.array([tables[row][at] for row, at in of_tokens], np.int64)
    slots: np.ndarray = block * size + position % size
    return slots
