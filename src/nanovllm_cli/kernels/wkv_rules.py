"""RWKV-7's rule in plain torch, as its formulas read (Peng et al. 2025): the oracle of its kernels."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.reference import wide

LEAST_LOG_DECAY = -0.606531
"""-exp(-1/2), with the digits that llama.cpp has: a token keeps at least so much of a state, as a logarithm."""
TABLES = ("decay", "rate", "value", "key_gains", "rate_gains", "bonus", "norm", "norm_bias")
"""Rows of what `wkv7` calls tables."""


def token_shift(x: torch.Tensor, before: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """[P, T, C]: x [T, C] of one sequence, each row with shares [P, C] of the row before it instead; before [C]: of the first."""
    kind = wide(x)
    behind = torch.cat([wide(before)[None].to(kind.dtype), kind[:-1]])
    return (kind + (behind - kind) * shares.to(kind.dtype)[:, None]).to(x.dtype)


def wkv7(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: torch.Tensor,
    rates: torch.Tensor,
    gates: torch.Tensor,
    first: torch.Tensor | None,
    mixes: torch.Tensor | None,
    tables: torch.Tensor,
    eps: float,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, V * D] of one sequence, and the state behind it. r, k, v, gates [T, V * D]: as projected; decays, rates, mixes
    [T, V * D]: what the narrow matrices gave; first: values of the first layer, or None there, with mixes. state S [V, D, D]:
    rows of keys, columns of values. tables [8, V * D]: see TABLES; eps: of the norm of heads. With s the sigmoid

        w = exp(-0.606531 s(decays + decay));   a = s(rates + rate);   v = v + (first - v) s(mixes + value)
        n = k * key_gains, of each head divided by its length;   k = k (1 + (a - 1) rate_gains)
        S = w S - (n * a) (S^T n)^T + k v^T
        out = (norm(S^T r) + (r . k * bonus) v) * gates
    """
    heads, dim, _ = state.shape
    r, k, v, decays, rates, gates = (wide(each) for each in (r, k, v, decays, rates, gates))
    table = dict(zip(TABLES, tables.to(r.dtype), strict=True))
    kept = torch.exp(LEAST_LOG_DECAY * torch.sigmoid(decays.to(r.dtype) + table["decay"]))
    rate = torch.sigmoid(rates.to(r.dtype) + table["rate"])
    if first is not None and mixes is not None:
        v = v + (wide(first) - v) * torch.sigmoid(wide(mixes).to(r.dtype) + table["value"])
    aside = (k * table["key_gains"]).view(-1, heads, dim)
    aside = aside / aside.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    k = k * (1 + (rate - 1) * table["rate_gains"])
    r, k, v, kept, rate = (each.view(-1, heads, dim) for each in (r, k, v, kept, rate))
    state, found = state.to(r.dtype), torch.empty_like(v)
    for t in range(len(v)):
        taken = torch.einsum("hed,he->hd", state, aside[t])
        put = (aside[t] * rate[t])[:, :, None] * taken[:, None]
        state = kept[t, :, :, None] * state - put + k[t, :, :, None] * v[t, :, None]
        found[t] = torch.einsum("hed,he->hd", state, r[t])
    centered = found - found.mean(-1, keepdim=True)
    normed = (centered / (centered.pow(2).mean(-1, keepdim=True) + eps).sqrt()).flatten(1) * table["norm"] + table["norm_bias"]
    bonus = (r * k * table["bonus"].view(heads, dim)).sum(-1, keepdim=True) * v
    return ((normed + bonus.flatten(1)) * gates).to(first.dtype if first is not None else normed.dtype), state
