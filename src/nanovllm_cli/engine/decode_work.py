"""What each block attends to in a step of decodes whose attention is divided on the host: a deterministic GPU's, and one with
guesses.

A recorded step's grid cannot grow. So a step is recorded with room for so many items, a power of two; those that a step lacks are
empty, and their blocks end at once. They lie in one buffer that never moves.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.attention.cuda_views import Shape
from nanovllm_cli.engine.uploads import Uploads
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.prefill_attention import ITEM_FIELDS, PrefillWork, most_pieces, piece_bytes

LEAST_ITEMS = 32
"""Less than one round of blocks on any large GPU: finer steps would bring more graphs, and no time."""
SCRATCH_BYTES = 128 << 20
"""Of sums in recorded steps' memory, for each shape of layers. What needs more, as a few sequences of hundreds of thousands of
tokens do, takes the GPU long enough to be launched one by one."""


class DecodeWork:
    """max_tokens: most tokens of a step."""

    def __init__(self, device: Device, backend: CudaAttention, max_tokens: int) -> None:
        self._device = device
        self._backend = backend
        self._always = 2 * max_tokens  # items, for which there is room whatever their sums take
        self._most = max(LEAST_ITEMS, self._always, *(SCRATCH_BYTES // _scratch_bytes(shape, 1) for shape in backend.shapes))
        numel = len(backend.shapes) * self._most * ITEM_FIELDS
        self._items = torch.zeros(numel, dtype=torch.int32, device=device.launcher.device)
        self._uploads = Uploads(device, numel, torch.int32)
        self.by_shape: dict[Shape, PrefillWork] = {}

    def upload(self, query_starts: np.ndarray, kv_lens: np.ndarray, seen: np.ndarray | None = None) -> int:
        """Divides a step, query_starts [B + 1] and kv_lens [B], into `by_shape`. seen [B]: see `CudaAttention.divide`. How many
        items a step of as many tokens has room for when it is recorded now; 0 where these are too many."""
        work = self._backend.divide(query_starts, kv_lens, seen=seen)
        most = max((each.items.shape[0] for each in work.values()), default=0)
        room = max(LEAST_ITEMS, 1 << max(0, most - 1).bit_length())
        num_tokens = int(query_starts[-1])
        # The most that one sequence has in a step of this graph: with guesses another one's may be shared out otherwise.
        together = 1 if num_tokens == len(kv_lens) else num_tokens
        bytes_taken = max((room * _scratch_bytes(shape, together) for shape in work), default=0)
        if room > self._most or (room > self._always and bytes_taken > SCRATCH_BYTES):
            where = self._device.launcher.device
            self.by_shape = {shape: each._replace(items=each.items.to(where)) for shape, each in work.items()}
            return 0
        numel = len(work) * room * ITEM_FIELDS
        upload = self._uploads.take()[:numel]
        upload.zero_()
        on_host, there = (items.view(len(work), room, ITEM_FIELDS) for items in (upload, self._items[:numel]))
        for index, (shape, each) in enumerate(work.items()):
            on_host[index, : each.items.shape[0]] = each.items
            self.by_shape[shape] = each._replace(items=there[index], pieces=room * _pieces(shape, together))
        self._uploads.copy(upload, self._items[:numel])
        return room


def _pieces(shape: Shape, num_tokens: int) -> int:
    """Of an item with so many tokens."""
    return most_pieces(num_tokens * shape.heads // shape.kv_heads, shape.head_dim)


def _scratch_bytes(shape: Shape, num_tokens: int) -> int:
    return _pieces(shape, num_tokens) * shape.kv_heads * piece_bytes(shape.head_dim)
