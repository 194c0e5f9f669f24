"""Rotary position embedding: frequencies by scaling method, and the cos and sin of one step.

Not covered: applying them, which is part of the attention kernels. Sources: RoPE, Su et al. 2021; linear scaling, Chen et al.
2023; YaRN and dynamic NTK, Peng et al. 2023; LongRoPE, Ding et al. 2024; llama3, Meta's reference model.
"""

from __future__ import annotations

import math

import torch

from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.rope_spec import RopeSpec


class Rope:
    """Angles of one RopeSpec.

    For `dynamic` and `longrope` the angle of a token depends on the length of its sequence when the token was computed:
    max(prompt length, position + 1), as transformers has it for one sequence at a time. It comes in as `lengths`, so that it
    is the same in any batch and any chunking.
    """

    def __init__(self, spec: RopeSpec, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        device = ops.device
        self.attention_factor = _attention_factor(spec)
        self._sign = -1.0 if spec.backwards else 1.0
        self._short, self._long = ((self._sign * _frequencies(spec, long)).to(device) for long in (False, True))
        self._axes = torch.tensor(spec.axes, dtype=torch.int64, device=device)
        self._angles = ops.angles(self._short, self.attention_factor)

    def tables(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [T, dim / 2] fp32 for positions [T], [3, T] or [4, T] (see `Batch`) and lengths [T] (see the class), int64."""
        if positions.dim() == 2 and len(self._axes) != len(self._short):
            positions = positions[0].contiguous()
        if (every := self.spec.every) > 1:
            positions = positions // every * every
        if positions.dim() == 2:
            by_axis = [self.tables(each.contiguous(), lengths) for each in positions]
            index = self._axes.expand(1, len(lengths), -1)
            cos, sin = (torch.stack(each).gather(0, index)[0] for each in zip(*by_axis, strict=True))
            return cos, sin
        if self.spec.scaling == "dynamic":
            angles = positions.float()[:, None] * self._sign * self._dynamic(lengths)
            return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        if self.spec.scaling == "longrope":
            long = self._long
            return self.ops.rope_tables(positions, self._short, self.attention_factor, lengths, long, self.spec.original_len)
        return self._angles(positions)

    def _dynamic(self, lengths: torch.Tensor) -> torch.Tensor:
        """Frequencies [T, dim / 2] with a base that grows with each token's length past the original one.

        One length at a time: torch's pow over several gives other last bits than over one.
        """
        spec = self.spec
        unique, index = torch.unique(lengths.clamp_min(spec.original_len), return_inverse=True)
        rows = []
        for length in unique.tolist():
            grown = spec.factor * length / spec.original_len - (spec.factor - 1)
            rows.append(1.0 / (spec.theta * grown ** (spec.dim / (spec.dim - 2))) ** _exponents(spec))
        return torch.stack(rows).to(self.ops.device)[index]


def _exponents(spec: RopeSpec) -> torch.Tensor:
    return torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim


def _frequencies(spec: RopeSpec, long: bool) -> torch.Tensor:
    """Radians a token, [dim / 2] fp32."""
    plain = 1.0 / spec.theta ** _exponents(spec)
    match spec.scaling:
        case "linear":
            return plain / spec.factor
        case "llama3":
            return _llama3(spec, plain)
        case "yarn":
            return _yarn(spec)
        case "longrope" | "divisors":
            divisors = torch.tensor(spec.long_divisors if long and spec.long_divisors else spec.short_divisors)
            return 1.0 / (divisors * spec.theta ** _exponents(spec))
        case _:
            return plain


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Wavelengths past original_len / low_freq are stretched by factor, those under original_len / high_freq are kept."""
    turns = spec.original_len / (2 * math.pi / plain)
    kept = (turns - spec.low_freq) / (spec.high_freq - spec.low_freq)
    between = (1 - kept) * plain / spec.factor + kept * plain
    return torch.where(turns < spec.low_freq, plain / spec.factor, torch.where(turns > spec.high_freq, plain, between))


def _yarn(spec: RopeSpec) -> torch.Tensor:
    """Dims that turn more than beta_fast times in original_len are kept, those under beta_slow are interpolated."""

    def dim_of(turns: float) -> float:
        return spec.dim * math.log(spec.original_len / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(spec.beta_fast), dim_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(spec.dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - interpolated
    wavelength = spec.theta ** _exponents(spec)
    return 1.0 / (spec.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.scaling == "yarn":

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

        if spec.mscale and spec.mscale_all_dim:
            return magnitude(spec.mscale) / magnitude(spec.mscale_all_dim)
        return magnitude(1.0)
    if spec.scaling == "longrope" and spec.factor > 1:
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_len))
    return 1.0
