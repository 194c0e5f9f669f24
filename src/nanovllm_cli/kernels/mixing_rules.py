"""How residual streams are mixed (DeepSeek-V4), in plain torch: see `reference.py`."""

from __future__ import annotations

import torch


def mixing(logits: torch.Tensor, rounds: int, least: float) -> torch.Tensor:
    """[T, S, S] with rows and columns whose sums are near 1, of logits: a softmax of each row + least; then columns and rows in
    turn are divided by their sums + least, columns `rounds` times and at the end (Sinkhorn and Knopp 1967, as in mHC, Xie et al.
    2026)."""
    matrix = logits.softmax(-1) + least
    for turn in range(2 * rounds - 1):
        matrix = matrix / (matrix.sum(-2 if turn % 2 == 0 else -1, keepdim=True) + least)
    return matrix
