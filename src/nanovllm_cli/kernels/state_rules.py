"""Rules of layers that keep a state of a sequence, in plain torch: see `reference.py`.

Legend: T tokens, K key heads of E dims, V value heads of D dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm_cli.kernels.reference import wide


def gated_delta(
    projected: torch.Tensor,
    gates: torch.Tensor,
    taps: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    before: torch.Tensor,
    tiled: bool = False,
    most: float = 1.0,
    by_sigmoid: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, V * D] of one sequence, and the state behind it, by the gated delta rule (Yang et al. 2024), as Qwen3-Next has it.

    projected [T, 2 * K * E + 2 * V * D]: queries and keys of K heads of E dims, values of V heads of D, and z, as wide as values.
    q, k and v go through a causal convolution of taps [width, channels], the token's own last, and silu; before [width - 1,
    channels]: what went into it of the tokens before, zeros in front of the first. q and k are divided by their length, q by
    sqrt(E) too. gates [T, 2 * V]: b and a. A value head's state S [E, D] of state [V, E, D] is then, token by token,

        S *= exp(decay * softplus(a + decay_bias));  S += k (most * sigmoid(b) * (v - S^T k))^T;  out = norm(S^T q) * silu(z)

    where norm is x / rms(x) * norm [D]. most: 1, or 2 where a state may turn what it has over (Grazzi et al. 2024). Value heads
    that share a key head lie side by side, or with `tiled` K heads apart.
    """
    num_values, _, value_dim = state.shape
    channels, kind = before.shape[1], wide(projected)
    b, a = wide(gates).to(kind.dtype).chunk(2, dim=1)
    kept = torch.exp(decay.to(kind.dtype) * F.softplus(a + decay_bias.to(kind.dtype)))
    found, state = _delta_rule(kind[:, :channels], most * torch.sigmoid(b), kept[:, :, None], taps, state, before, tiled)
    z = kind[:, channels:].reshape(-1, num_values, value_dim)
    out = _normed(found, norm, eps) * (torch.sigmoid(z) if by_sigmoid else F.silu(z))
    return out.flatten(1).to(projected.dtype), state


def channel_delta(
    projected: torch.Tensor,
    gates: torch.Tensor,
    rates: torch.Tensor,
    z: torch.Tensor,
    taps: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    before: torch.Tensor,
    floor: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by Kimi Delta Attention (Kimi Team 2025), where each channel of a key has a decay of its own.

    projected [T, 2 * K * E + V * D], gates [T, V]: b; rates [T, V * E]: a; z [T, V * D]; decay_bias [V * E]. With diag(g) for a
    matrix that has g on its diagonal,

        S = diag(exp(decay * softplus(a + decay_bias))) S;  S += k (sigmoid(b) * (v - S^T k))^T;  out = norm(S^T q) * sigmoid(z)

    With a floor below 0 (Ling 3.0) it is exp(floor * sigmoid(-decay * (a + decay_bias))) that is kept, so at least exp(floor).
    """
    num_values, key_dim, value_dim = state.shape
    kind = wide(projected)
    rates = (wide(rates).to(kind.dtype) + decay_bias.to(kind.dtype)).view(-1, num_values, key_dim)
    by_head = decay.to(kind.dtype)[:, None]
    kept = torch.exp(by_head * F.softplus(rates) if floor == 0.0 else floor * torch.sigmoid(-by_head * rates))
    found, state = _delta_rule(kind, torch.sigmoid(wide(gates).to(kind.dtype)), kept, taps, state, before, False)
    out = _normed(found, norm, eps) * torch.sigmoid(wide(z).view(-1, num_values, value_dim))
    return out.flatten(1).to(projected.dtype), state


def _delta_rule(
    inputs: torch.Tensor,
    beta: torch.Tensor,
    kept: torch.Tensor,
    taps: torch.Tensor,
    state: torch.Tensor,
    before: torch.Tensor,
    tiled: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S^T q of each token, and the last S. inputs [T, channels], beta [T, V], kept [T, V, 1 or E]."""
    num_values, key_dim, value_dim = state.shape
    num_keys = (inputs.shape[1] - num_values * value_dim) // (2 * key_dim)
    known = torch.cat([wide(before), inputs])
    mixed = F.silu(torch.stack([wide(row) * known[i : i + len(inputs)] for i, row in enumerate(taps)]).sum(0))
    q, k, v = torch.split(mixed, [num_keys * key_dim, num_keys * key_dim, num_values * value_dim], dim=1)
    q, k = (x.reshape(-1, num_keys, key_dim) for x in (q, k))
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    heads = torch.arange(num_values)
    heads = heads % num_keys if tiled else heads // (num_values // num_keys)
    q, k, v = q[:, heads] * key_dim**-0.5, k[:, heads], v.reshape(-1, num_values, value_dim)
    state, out = state.to(inputs.dtype), torch.empty_like(v)
    for t in range(len(v)):
        state = state * kept[t, :, :, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("ved,ve->vd", state, k[t]))
        state = state + k[t, :, :, None] * change[:, None]
        out[t] = torch.einsum("ved,ve->vd", state, q[t])
    return out, state


def _normed(found: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + eps) * norm.to(found.dtype)


def state_space(
    projected: torch.Tensor,
    gates: torch.Tensor,
    taps: torch.Tensor,
    taps_bias: torch.Tensor | None,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, V * D] of one sequence, and the state behind it, by Mamba-2's rule (Dao and Gu 2024), without its norm.

    projected, taps, state, before: as `gated_delta` has them; queries are what Mamba calls C, keys B, values x. The convolution
    has a bias [channels], or none. Queries and keys keep their lengths. gates [T, V]: how long a token's time step is. With

        step = softplus(gate + decay_bias);   S = exp(decay * step) * S + k (step * v)^T;   out = (S^T q + skip * v) * silu(z)
    """
    num_values, key_dim, value_dim = state.shape
    channels, kind = before.shape[1], wide(projected)
    num_keys = (channels - num_values * value_dim) // (2 * key_dim)
    inputs, z = kind[:, :channels], kind[:, channels:].reshape(-1, num_values, value_dim)
    known = torch.cat([wide(before), inputs])
    summed = torch.stack([wide(row) * known[i : i + len(inputs)] for i, row in enumerate(taps)]).sum(0)
    mixed = F.silu(summed if taps_bias is None else summed + wide(taps_bias))
    q, k, v = torch.split(mixed, [num_keys * key_dim, num_keys * key_dim, num_values * value_dim], dim=1)
    heads = torch.arange(num_values) // (num_values // num_keys)
    q, k = (x.reshape(-1, num_keys, key_dim)[:, heads] for x in (q, k))
    v = v.reshape(-1, num_values, value_dim)
    step = F.softplus(wide(gates).to(kind.dtype) + decay_bias.to(kind.dtype))
    state, out = state.to(kind.dtype), torch.empty_like(v)
    for t in range(len(v)):
        state = state * torch.exp(decay.to(kind.dtype) * step[t])[:, None, None]
        state = state + k[t, :, :, None] * (step[t, :, None] * v[t])[:, None]
        out[t] = torch.einsum("ved,ve->vd", state, q[t]) + skip.to(kind.dtype)[:, None] * v[t]
    return (out * F.silu(z)).flatten(1).to(projected.dtype), state


def causal_conv(
    inputs: torch.Tensor, taps: torch.Tensor, taps_bias: torch.Tensor | None, before: torch.Tensor
) -> torch.Tensor:
    """silu of a causal convolution of each channel, [T, channels], of one sequence. inputs [T, channels]; taps [width, channels],
    the token's own last; taps_bias [channels] or None; before [width - 1, channels]: the inputs of the tokens before."""
    known = torch.cat([wide(before), wide(inputs)])
    summed = torch.stack([wide(row) * known[i : i + len(inputs)] for i, row in enumerate(taps)]).sum(0)
    return F.silu(summed if taps_bias is None else summed + wide(taps_bias)).to(inputs.dtype)


def scan_parts(
    x: torch.Tensor, rank: int, gains: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What time steps are made of [T, rank], and B and C [T, 2 * N], of x [T, rank + 2 * N]; with gains [rank + 2 * N] each of
    the three divided by its root mean square, and times its own of these."""
    parts = torch.split(wide(x), [rank, *[(x.shape[1] - rank) // 2] * 2], dim=1)
    if gains is not None:
        own = torch.split(gains.to(parts[0].dtype), [part.shape[1] for part in parts])
        parts = tuple(_normed(part, gain, eps) for part, gain in zip(parts, own, strict=True))
    return parts[0], torch.cat(parts[1:], dim=1)


def selective_scan(
    x: torch.Tensor,
    rates: torch.Tensor,
    both: torch.Tensor,
    z: torch.Tensor,
    decay: torch.Tensor,
    rate_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, channels] of one sequence, and the state behind it, by Mamba's first rule (Gu and Dao 2023).

    x [T, channels]: what the convolution gave; rates [T, channels]: how long a token's time step is in each; both [T, 2 * N]: B
    and C; z [T, channels]. decay [channels, N], below 0; rate_bias, skip [channels]; state S [channels, N]. With

        step = softplus(rate + rate_bias);   S = exp(decay * step) * S + (step * x) B^T;   out = (S C + skip * x) * silu(z)
    """
    kind = wide(x)
    step = F.softplus(wide(rates).to(kind.dtype) + rate_bias.to(kind.dtype))
    b, c = wide(both).to(kind.dtype).chunk(2, dim=1)
    state, out = state.to(kind.dtype), torch.empty_like(kind)
    for t in range(len(x)):
        state = state * torch.exp(decay.to(kind.dtype) * step[t][:, None]) + (step[t] * kind[t])[:, None] * b[t]
        out[t] = state @ c[t] + skip.to(kind.dtype) * kind[t]
    return (out * F.silu(wide(z).to(kind.dtype))).to(x.dtype), state
