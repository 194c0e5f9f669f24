"""Positions of attention, as plain values: how heads rotate by them, and how queries grow.

Frozen values without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "divisors"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions over the first `dim` dims of a head. Lengths in tokens. Meanings by scaling:

    none; linear: positions / factor; dynamic: NTK base grown with the sequence past original_len; llama3: low frequencies /
    factor, smoothed between low_freq and high_freq; yarn: interpolation by frequency between beta_fast and beta_slow;
    longrope: one divisor a frequency, short_divisors up to original_len and long_divisors past it; divisors: short_divisors
    always (GGUF's rope_freqs). attention_factor multiplies cos and sin; None takes the method's own rule.
    interleaved: pairs are (2i, 2i + 1) rather than (i, dim / 2 + i). sections: how many frequencies turn by each of the three
    or four positions that an image's tokens have, one behind the other, or with `woven` in turns as long as each has some
    left (M-RoPE); empty: all by one. dealt (ERNIE 4.5 VL): sections are of rows, of columns, of which there are as many and
    which lie in turns, and of time, behind them. backwards: by angles below 0 (NanoChat). every: a token turns by the last
    position up to its own that is a multiple of it, as what stands for so many tokens does (`DigestSpec`).
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_len: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    woven: bool = False
    dealt: bool = False
    backwards: bool = False
    every: int = 1

    @property
    def axes(self) -> tuple[int, ...]:
        """By which of a token's positions each frequency turns: see `Batch`. They are not dim / 2
        where a config says nothing of it, or nonsense, which texts don't mind."""
        if self.dealt and len(self.sections) == 3:
            return (1, 2) * self.sections[0] + (0,) * self.sections[2]
        if not self.woven or not self.sections:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(self.dim // 2))

    @property
    def depends_on_length(self) -> bool:
        """True where a token's angle depends on how long its sequence is, not on its position alone."""
        return self.scaling in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries grow with their position, from `length` tokens on (Llama 4, Meta 2025): see `kernels.reference.temper`."""

    length: int
    scale: float
    offset: int = 0
