"""Sparse attention by blocks of tokens (Qwen4-Exp) in plain torch: see `reference.py`.

Legend: T tokens, H index heads.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.reference import rope, wide


def block_keys(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, gains: torch.Tensor, eps: float, offset: float, ratio: int
) -> torch.Tensor:
    """Of one whole sequence the keys of its whole blocks of `ratio` tokens: the mean of keys [T, dim], over its root mean square
    and times offset + gains [dim], its first numbers rotated by cos and sin [T, half] of the block's first token. Each step is
    rounded to the type of keys."""
    count = len(keys) // ratio
    means = wide(keys)[: count * ratio].view(count, ratio, keys.shape[1]).mean(1).to(keys.dtype)
    rows = wide(means)
    normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (offset + wide(gains))).to(keys.dtype)
    firsts = slice(0, count * ratio, ratio)
    turned_by, turned_to = (wide(each[firsts].to(keys.dtype)) for each in (cos, sin))
    return rope(normed[:, None], turned_by, turned_to, False)[:, 0].to(keys.dtype)


def block_scores(q: torch.Tensor, keys: torch.Tensor, ratio: int) -> torch.Tensor:
    """How each token of one whole sequence ranks the whole blocks up to it, minus infinity for the others: q [T, H, dim] as they
    are rotated, keys of `block_keys` -> [T, blocks]: the sum over heads of max(0, query . key)."""
    scores = torch.einsum("thd,bd->thb", wide(q), wide(keys)).relu().sum(1)
    ends = (torch.arange(len(keys)) + 1) * ratio
    return scores.masked_fill(ends[None] > torch.arange(1, len(q) + 1)[:, None], float("-inf"))


def seen_tokens(scores: torch.Tensor, token: int, most: int, ratio: int) -> list[int]:
    """Positions of what a token sees, of scores [T, blocks]: those of `most` blocks that score highest, of equal ones the first,
    and those behind the last whole block."""
    whole = (token + 1) // ratio
    best = torch.sort(scores[token, :whole], descending=True, stable=True).indices[:most].sort().values.tolist()
    return [block * ratio + i for block in best for i in range(ratio)] + list(range(whole * ratio, token + 1))
