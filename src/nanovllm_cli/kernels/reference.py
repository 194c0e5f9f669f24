"""Every op in plain torch, as its formula reads: the oracle of the kernel tests. fp32 inside, rounded to the input's type.

Legend: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, P blocks in a table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, k] @ weight [n, k].T + bias [n]."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(out_dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """residual += x in place, then residual / rms(residual) * (offset + weight). Without a residual, x itself is normalised.
    Zhang and Sennrich 2019."""
    if residual is not None:
        residual.copy_((residual.float() + x.float()).to(x.dtype))
        x = residual
    rows = x.float()
    return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.float())).to(x.dtype)


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(first half of the columns) * second half. Shazeer 2020. activation: silu, gelu_tanh, gelu."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])
    return (gate * up).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, H, D] with the first 2 * cos.shape[1] dims rotated. Pairs are (i, half + i), or (2i, 2i + 1) if interleaved.
    Su et al. 2021."""
    half = cos.shape[-1]
    rotated, rest = x.float()[..., : 2 * half], x.float()[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_position: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence: q [T, H, D] at positions first_position, …; k, v [L, K, D] from position 0. Causal. Returns [T, H, D].

    window: keys seen, the query's own included; 0 for all. softcap * tanh(score / softcap) where softcap > 0. sinks [H]: a
    logit that takes part in the sum and has no value.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = first_position + torch.arange(tokens)[:, None]
    key = torch.arange(k.shape[0])[None]
    hidden = key > position
    if window > 0:
        hidden = hidden | (key <= position - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(heads, tokens, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("htl,lhd->thd", weights, values).to(q.dtype)
