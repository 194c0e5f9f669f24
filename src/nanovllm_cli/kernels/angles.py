"""cos and sin of positions on a CPU, kept: to compute them anew takes a hundredth of a small model's step."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.reference import rope_tables

MOST_KEPT = 1 << 15
"""Positions: of 64 frequencies, 16 MiB, if sequences are that long."""
_AT_ONCE = 256


class KeptAngles:
    """Of some frequencies [half], fp32. Positions are computed so many at once, always the same together, so that the bits of one
    are the same whoever asked first."""

    def __init__(self, frequencies: torch.Tensor, attention_factor: float) -> None:
        self._of = frequencies, attention_factor
        self._sides = np.empty((2, 0, len(frequencies)), np.float32)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [T, half] of positions [T] int64."""
        places = positions.numpy()
        try:
            cos, sin = self._sides.take(places, axis=1)
        except IndexError:
            if (most := int(places.max())) >= MOST_KEPT:
                return rope_tables(positions, *self._of)
            self._grow(most + 1)
            cos, sin = self._sides.take(places, axis=1)
        return torch.from_numpy(cos), torch.from_numpy(sin)

    def _grow(self, count: int) -> None:
        """To twice as many, or more."""
        known = self._sides.shape[1]
        end = min(MOST_KEPT, max(2 * known, -(-count // _AT_ONCE) * _AT_ONCE))
        new = [torch.stack(rope_tables(torch.arange(i, i + _AT_ONCE), *self._of)) for i in range(known, end, _AT_ONCE)]
        self._sides = np.concatenate([self._sides, torch.cat(new, 1).numpy()], 1)
