"""Embeddings of n-grams (Qwen4-Exp) in plain torch: see `reference.py`.

Legend: T tokens, S streams, G tokens of the longest n-gram, H rows for n-grams of each length, K taps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanovllm_cli.kernels.reference import wide


def ngram_rows(
    ids: torch.Tensor, multipliers: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor, end: int
) -> torch.Tensor:
    """Rows [T, (G - 1) * H] int64 of a table, for one sequence's ids [T] int64: of each n-gram of 2 to G tokens that ends with a
    token the exclusive or of its ids, each times its own of multipliers [G], the token's own first, modulo each of H of sizes
    [(G - 1) * H], behind its own of offsets. A token before the last `end` in front of the one that an n-gram ends with, or
    before the first token, is taken to be an end."""
    longest = len(multipliers)
    heads, rows = len(sizes) // (longest - 1), []
    for at in range(len(ids)):
        mixed, is_cut = int(ids[at]) * int(multipliers[0]), False
        for back in range(1, longest):
            is_cut = is_cut or at < back or int(ids[at - back]) == end
            mixed ^= (end if is_cut else int(ids[at - back])) * int(multipliers[back])
            rows += [mixed % int(sizes[h]) + int(offsets[h]) for h in range((back - 1) * heads, back * heads)]
    return torch.tensor(rows).view(len(ids), -1)


def gated(
    keys: torch.Tensor, value: torch.Tensor, streams: torch.Tensor, gains: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """value [T, n] times a gate of each of streams [S, T, n], and the norm of that: [T, S * n] each. A gate is sigmoid(root(d)),
    d the product of a stream's norm and that of its key, of keys [T, S * n], over sqrt(n); root(d) = sign(d) * sqrt(max(|d|,
    1e-6)). gains [3, S, n]: of the norms of keys, of streams and of the last, offset apart."""

    def normed(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (offset + own)

    count, tokens, width = streams.shape
    factors = wide(gains).view(3, count, width)
    key = normed(wide(keys).view(tokens, count, width), factors[0])
    dot = (key * normed(wide(streams).transpose(0, 1), factors[1])).sum(-1, keepdim=True) / math.sqrt(width)
    weights = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt() * dot.sign())
    found = (weights * wide(value)[:, None]).to(value.dtype)
    return found.flatten(1), normed(wide(found), factors[2]).flatten(1).to(value.dtype)


def convolved(inputs: torch.Tensor, taps: torch.Tensor, apart: int) -> torch.Tensor:
    """silu of the causal convolution of one sequence's inputs [T, C], each channel's own: taps [K, C] times inputs of as many
    tokens that lie `apart` tokens behind each other, the token's own last; zeros in front of the first."""
    before = (len(taps) - 1) * apart
    known = torch.cat([wide(inputs).new_zeros(before, inputs.shape[1]), wide(inputs)])
    shifted = torch.stack([wide(tap) * known[k * apart : k * apart + len(inputs)] for k, tap in enumerate(taps)])
    return F.silu(shifted.sum(0))
