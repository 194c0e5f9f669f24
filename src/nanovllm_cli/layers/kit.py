"""Kit: what layers are made of on one device. They get it in their constructor and know nothing else of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import AttentionBackend
from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.quant.storage import WeightStorage

MakeStorage = Callable[[int, int], WeightStorage]
"""(num_rows, width) -> an empty weight in the format that was chosen."""


class Kit(NamedTuple):
    """dtype: of activations, norms and biases."""

    dtype: torch.dtype
    make: MakeStorage
    ops: Ops
    backend: AttentionBackend

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A table on the device, of the kit's dtype."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.ops.device)
