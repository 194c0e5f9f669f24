"""What chooses the tokens that sparse attention sees, as plain values: what `mixer_spec.py` has of them.

Frozen values without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Sparse attention (DeepSeek-V3.2, Liu et al. 2025): a query attends to those `most` tokens, of those up to its own, that
    small heads score highest: `heads` queries of `dim` numbers, whose first ones rotate, and one key of a token for all of
    them. See `reference.index_scores`. interleaved: as of `RopeSpec`. chooses: a layer that does not attends to what the last
    one in front of it that does has chosen (GLM-5.2), and has no such heads. last_rotate: so many last numbers of a head do,
    not its first ones (Hy4); 0: its first. eps: of the norm of its keys."""

    heads: int
    dim: int
    most: int
    interleaved: bool = False
    chooses: bool = True
    last_rotate: int = 0
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """Sparse attention by blocks (Qwen4-Exp): a query attends to those `most` blocks of `ratio` tokens, of the whole ones up to
    its own token, that small heads score highest, and to the tokens behind the last whole one: `heads` queries of `dim` numbers,
    whose first ones rotate, and one key of a block for all of them, made of the mean of its tokens'. See `block_rules`."""

    heads: int
    dim: int
    most: int
    ratio: int

    @property
    def most_seen(self) -> int:
        """Tokens that one sees at the most."""
        return self.most * self.ratio + self.ratio - 1
