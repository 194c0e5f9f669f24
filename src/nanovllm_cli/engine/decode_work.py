"""What each block of a deterministic GPU's step of decodes attends to.

Its attention's work is divided on the host, and a recorded step's grid cannot grow. So a step is recorded for room for so many
items, a power of two; those that a step lacks are empty, and their blocks end at once. They lie in one buffer that never moves.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.attention.cuda import CudaAttention, Shape
from nanovllm_cli.engine.uploads import Uploads
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.prefill_attention import ITEM_FIELDS, PrefillWork, piece_bytes

LEAST_ITEMS = 32
"""Less than one round of blocks on any large GPU: finer steps would bring more graphs, and no time."""
SCRATCH_BYTES = 128 << 20
"""Of sums in recorded steps' memory. What needs more, as a few sequences of hundreds of thousands of tokens do, takes the GPU
long enough to be launched one by one."""


class DecodeWork:
    """max_rows: most sequences of a step."""

    def __init__(self, device: Device, backend: CudaAttention, max_rows: int) -> None:
        self._device = device
        self._backend = backend
        self._starts = np.arange(max_rows + 1, dtype=np.int32)
        self._most = max(2 * max_rows, SCRATCH_BYTES // max(map(_scratch_bytes, backend.shapes)))
        numel = len(backend.shapes) * self._most * ITEM_FIELDS
        self._items = torch.zeros(numel, dtype=torch.int32, device=device.launcher.device)
        self._uploads = Uploads(device, numel, torch.int32)
        self.by_shape: dict[Shape, PrefillWork] = {}

    def upload(self, kv_lens: np.ndarray) -> int:
        """Divides a step, kv_lens [B] of its sequences, into `by_shape`. How many items a recorded step has room for that may
        do it; 0 where it has too many to be recorded."""
        work = self._backend.divide(self._starts[: len(kv_lens) + 1], kv_lens)
        most = max(each.items.shape[0] for each in work.values())
        room = max(LEAST_ITEMS, 1 << max(0, most - 1).bit_length())
        if room > self._most:
            where = self._device.launcher.device
            self.by_shape = {shape: each._replace(items=each.items.to(where)) for shape, each in work.items()}
            return 0
        numel = len(work) * room * ITEM_FIELDS
        upload = self._uploads.take()[:numel]
        upload.zero_()
        on_host, there = (items.view(len(work), room, ITEM_FIELDS) for items in (upload, self._items[:numel]))
        for index, (shape, each) in enumerate(work.items()):
            on_host[index, : each.items.shape[0]] = each.items
            self.by_shape[shape] = each._replace(items=there[index], pieces=room * _pieces(shape))
        self._uploads.copy(upload, self._items[:numel])
        return room


def _pieces(shape: Shape) -> int:
    """Of one token's query heads of a kv head, in units of 16 rows."""
    heads, kv_heads, _, _ = shape
    return -(-heads // kv_heads // 16)


def _scratch_bytes(shape: Shape) -> int:
    _, kv_heads, dim, _ = shape
    return _pieces(shape) * kv_heads * piece_bytes(dim)
