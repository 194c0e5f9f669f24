"""Digests of tokens and experts by a table (DeepSeek-V4) in plain torch: see `reference.py`.

Legend: T tokens, H index heads.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.mixture import Scoring
from nanovllm_cli.kernels.reference import rope, scores_of, wide


def turned_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], whose last 2 * cos.shape[1] numbers turn, pairs lying side by side."""
    first = x.shape[-1] - 2 * cos.shape[1]
    return torch.cat([wide(x)[..., :first], rope(wide(x)[..., first:], cos, sin, True)], -1).to(x.dtype)


def digests(
    summed: torch.Tensor, weighing: torch.Tensor, bias: torch.Tensor, gains: torch.Tensor, eps: float, offset: float, rate: int,
    cos: torch.Tensor, sin: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Those of one whole sequence [T // rate, dim]: sums of summed [T, parts * dim], each number weighed by a softmax of weighing
    alike + bias [rate, parts * dim] over the tokens; over their root mean square, times offset + gains [dim], the last numbers
    turned by cos and sin [T // rate, half]. parts 1: over `rate` tokens, parts 2: over twice as many, of which the first half
    counts by their first dim numbers and the second by the others; the first digest lacks the first half."""
    count, dim = len(summed) // rate, len(gains)
    values = wide(summed)[: count * rate].reshape(count, rate, summed.shape[1])
    logits = wide(weighing)[: count * rate].reshape(count, rate, summed.shape[1]) + bias
    if summed.shape[1] == 2 * dim:
        before = torch.cat([torch.full_like(logits[:1], float("-inf")), logits[:-1]])[..., :dim]
        values = torch.cat([torch.cat([torch.zeros_like(values[:1]), values[:-1]])[..., :dim], values[..., dim:]], 1)
        logits = torch.cat([before, logits[..., dim:]], 1)
    rows = (values * logits.softmax(1)).sum(1)
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (offset + wide(gains))
    return turned_last(rows[:, None], cos, sin)[:, 0].to(summed.dtype)


def scores(q: torch.Tensor, weights: torch.Tensor, made: torch.Tensor, rate: int) -> torch.Tensor:
    """How each token of one whole sequence ranks the whole digests up to it, minus infinity for the others: q [T, H, dim] as they
    are turned, weights [T, H], made [digests, dim] -> [T, digests]: the sum over heads of weight * max(0, query . digest)."""
    found = torch.einsum("thd,bd->thb", wide(q), wide(made)).relu()
    ends = (torch.arange(len(made)) + 1) * rate
    ranked = torch.einsum("thb,th->tb", found, wide(weights))
    return ranked.masked_fill(ends[None] > torch.arange(1, len(q) + 1)[:, None], float("-inf"))


def route_by_table(
    logits: torch.Tensor, ids: torch.Tensor, norm_topk: bool, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, k] of each token's row of scoring.table, ids [T] being the rows, and their weights as `reference.route` has
    them."""
    assert scoring.table is not None
    chosen = scoring.table[ids]
    taken = scores_of(logits, scoring).gather(-1, chosen)
    return chosen, (taken / taken.sum(dim=-1, keepdim=True) if norm_topk else taken) * scoring.scale
