"""Attention whose heads share one key, which is their value as well, and which sees digests of tokens that lie further back
(DeepSeek-V4), as plain values: what `mixer_spec.py` has of it.

Frozen values without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DigestIndexerSpec:
    """What chooses the `most` digests that a token sees, those that small heads score highest: `heads` queries of `dim` numbers,
    and digests of as many of their own. See `digest_rules.scores`."""

    heads: int
    dim: int
    most: int


@dataclass(frozen=True, slots=True)
class DigestSpec:
    """Of each `rate` tokens one row takes the place, as soon as the last of them is there: a sum of what they have for it, each
    number weighed by a softmax over them; see `digest_rules.digests`. overlaps: over the `rate` tokens before these, too, which
    have other numbers for it. indexer None: a token sees all digests of tokens up to its own."""

    rate: int
    overlaps: bool = False
    indexer: DigestIndexerSpec | None = None

    @property
    def reach(self) -> int:
        """Tokens that one is made of."""
        return self.rate * (2 if self.overlaps else 1)

    def width(self, dim: int) -> int:
        """Numbers of a token that digests of `dim` numbers are made of: what is summed, and as many that weigh it."""
        own = dim + (0 if self.indexer is None else self.indexer.dim)
        return 2 * own * (2 if self.overlaps else 1)

    def num_weights(self, hidden_size: int, query_rank: int, dim: int) -> int:
        """Numbers in what makes them, in a model of this width; norms left out."""
        width = self.width(dim)
        queries = 0 if self.indexer is None else self.indexer.heads * (query_rank * self.indexer.dim + hidden_size)
        return width * hidden_size + self.rate * width // 2 + queries


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """Of attention with one key for all heads, which is a head's value, too: queries are made of `query_rank` normed numbers, and
    each head's is divided by its root mean square; the last numbers of queries and keys rotate, interleaved, and those of what a
    head finds are turned back by its own position. Heads are dealt out to `groups`, of each of which a matrix of `out_rank` rows
    makes what the last projection reads. digests: what a token sees beside the tokens in its window; None: nothing."""

    query_rank: int
    groups: int
    out_rank: int
    digests: DigestSpec | None = None
