"""Mixtures of experts beside their matmuls: each expert that somebody takes computes over the rows of those who do.

Not covered: which experts a token takes (`Ops.route`).

Legend: T tokens, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

Expert = Callable[[torch.Tensor], torch.Tensor]
"""Rows [n, width] -> [n, width], each by itself."""
AddWeightedRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""See `reference.add_weighted_rows`."""


class Mixture:
    """sum over a token's experts of weight * expert(x), in ascending order and in fp32: a token's bits are its own."""

    def __init__(self, experts: Sequence[Expert], add_weighted_rows: AddWeightedRows) -> None:
        self.experts = experts
        self._add_weighted_rows = add_weighted_rows

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, width]; chosen [T, k] int64 in ascending order, weights [T, k] fp32. The host reads who takes what."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e, tokens, own in _by_expert(chosen, weights, len(self.experts)):
            self._add_weighted_rows(out, self.experts[e](x[tokens]), tokens, own)
        return out.to(x.dtype)


def _by_expert(
    chosen: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that is in use, in ascending order: its tokens, and what it weighs for each of them."""
    experts = chosen.flatten()
    order = torch.argsort(experts, stable=True)
    tokens, own = order // chosen.shape[1], weights.flatten()[order]
    end = 0
    for e, count in enumerate(torch.bincount(experts, minlength=num_experts).tolist()):
        first, end = end, end + count
        if count:
            yield e, tokens[first:end], own[first:end]
