"""Queries that look at all of an image, as plain values: what is made of them is read, as many of any image (Idefics 2)."""

from __future__ import annotations

from typing import NamedTuple


class PoolSpec(NamedTuple):
    """Attention by which the mean of 2 x 2 patches looks at these (Molmo 2). head_dim: of `num_heads` of queries, and of
    `key_heads` of keys and values; width: of the rows that it makes."""

    num_heads: int
    key_heads: int
    head_dim: int
    width: int


class ResamplerSpec(NamedTuple):
    """A Perceiver (Jaegle et al. 2021): layers in which learned queries see rows and each other, by RMS norms, attention and an
    MLP that is gated by a SiLU, four times as wide as the queries. Rows have become as wide by another such MLP, of `between`
    inner rows. head_dim: of `num_heads` of queries, and of `key_heads` of keys and values."""

    queries: int
    num_layers: int
    num_heads: int
    key_heads: int
    head_dim: int
    between: int
    eps: float

    def most_bytes(self, patches: int, width: int, itemsize: int) -> int:
        """That are taken at once, about, of an image of so many patches, where queries have this width: by a norm of all rows,
        three times in float32, or by what is read behind it, and keys and values, once more for all heads of queries."""
        seen, heads = patches + self.queries, 2 * self.head_dim * (self.num_heads + self.key_heads)
        return max(patches * width * (2 * itemsize + 12), itemsize * (2 * patches * width + seen * (width + heads)))
