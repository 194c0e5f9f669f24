"""What compressed convolutional attention (Figliolia et al. 2025) and the routers of such models (ZAYA1, Zyphra 2025) do beside
matmuls, in plain torch: the oracle of the CPU's kernels, and what a GPU runs.

Legend: T tokens, H query heads, K key heads, D numbers of a head, E experts.
"""

from __future__ import annotations

from functools import reduce

import torch


def rescaled(x: torch.Tensor, shift: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """(x + shift) * gains, of each column its own; x [T, n], shift and gains [n] fp32. Rounded once."""
    return ((x.float() + shift) * gains).to(x.dtype)


def with_open_gates(x: torch.Tensor, channels: int) -> torch.Tensor:
    """[T, 3 * channels]: what a gated convolution reads (`reference.gated_conv`) that is to convolve the first columns of x and
    no more: both gates are 1."""
    ones = torch.ones(x.shape[0], 2 * channels, dtype=x.dtype, device=x.device)
    return torch.cat([ones, x[:, :channels]], dim=1)


def of_the_best(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """logits [T, E + 1] fp32, the last of which is for no expert, and bias [E + 1] fp32 -> [T, E] fp32.

    The one with the largest softmax + bias is taken, the lower among equals. Its softmax is the sigmoid of what comes out for it,
    its logit less the logarithm of all others' sum of exponentials; of those that are not taken -inf comes out, and so it does of
    all where none is.
    """
    best = (logits.softmax(-1) + bias).argmax(-1, keepdim=True)
    others = logits.scatter(-1, best, -torch.inf)
    # Their largest less its share's logarithm is that of the sum; a GPU's own sums go another way for another number of rows.
    second = others.argmax(-1, keepdim=True)
    others = others.gather(-1, second) - others.log_softmax(-1).gather(-1, second)
    found = torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best) - others)
    return found[:, :-1].contiguous()


def met_heads(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    bias: torch.Tensor,
    before: torch.Tensor,
    gains: torch.Tensor,
    head_dim: int,
    num_keys: int,
    least: float,
) -> torch.Tensor:
    """Queries, keys and values [T, (H + 2 K) * D] of compressed convolutional attention, which are yet to rotate.

    projected [T, (H + 2 K) * D]: queries q and keys k, the half of the values that attention is to find as a token's before it
    was the last, and the other half. convolved [T, (H + K) * D] and bias [(H + K) * D]: what the convolutions made of q and k.
    before [T, …]: its columns behind q and k are of the first half of values, of the token before. gains [K] fp32. With m of a
    head of q being (q + k) / 2, k that of its key head, and of a head of k the mean of its query heads' m,

        x = convolved + bias + m;   q, k = x * sqrt(D) / max(length of x, least);   k *= gains
    """
    tokens, keys = projected.shape[0], num_keys * head_dim
    width = convolved.shape[1]
    both = projected[:, :width].float().view(tokens, -1, head_dim)
    queries = both.shape[1] - num_keys
    group = queries // num_keys
    q, k = both[:, :queries].view(tokens, num_keys, group, head_dim), both[:, queries:, None]
    mean_q = (q + k) / 2
    mean_k = reduce(torch.add, mean_q.unbind(2)) / group
    mean = torch.cat([mean_q.flatten(1, 2), mean_k], dim=1)
    x = convolved.float().view_as(both) + bias.float().view(-1, head_dim) + mean
    x = x * (head_dim**0.5 / _sum_in_halves(x * x).sqrt().clamp_min(least))
    x[:, queries:] *= gains[:, None]
    half = keys // 2
    found = [x.flatten(1).to(projected.dtype), projected[:, width + half :], before[:, width : width + half]]
    return torch.cat(found, dim=1)


def _sum_in_halves(x: torch.Tensor) -> torch.Tensor:
    """Sums [..., 1] of the last axis, whose bits are a row's own."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        x = torch.cat([x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]], dim=-1)
    return x
