"""Routers that are more than one matrix, as plain values. See `layers/router.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router that is an MLP (ZAYA1): a matrix makes `width` numbers of a token; a norm and two layers of GELUs go over them,
    and then each expert has a logit, and so has taking none. reads_last: before the norm, what the router of the layer before had
    there is added, times a factor of each column."""

    width: int
    reads_last: bool = False

    def num_weights(self, hidden_size: int, num_experts: int) -> int:
        """Numbers in it, in a model of this width; the norm left out."""
        inner = 2 * self.width * (self.width + 1) + self.width * self.reads_last
        return self.width * (hidden_size + 1) + inner + (num_experts + 1) * (self.width + 1)
