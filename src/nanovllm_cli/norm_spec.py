"""NormSpec: a norm as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm: x / rms(x) * (offset + weight). offset is 1 for Gemma, else 0. stored_offset: what the checkpoint's numbers have
    of it already, as in Gemma's GGUF files; it is taken off them, because what is left has few bits. centered: of x without its
    mean, which is layer norm without a bias; those of heads are not. shifted: with one, and centered. after_eps: of norms of what
    attention and MLP add, where that is another. gains: without, a checkpoint has no weight for it. unit: rows come to have a
    length of 1 instead of numbers that do on average, x / |x|, and eps is added to |x|**2; such have no gains (nGPT). groups: so
    many parts of a row, of one width, each by its own rms (K2 Horizon); those of heads are of whole heads."""

    eps: float
    offset: float = 0.0
    stored_offset: float = 0.0
    centered: bool = False
    shifted: bool = False
    after_eps: float | None = None
    gains: bool = True
    unit: bool = False
    groups: int = 1

    def at(self, width: int) -> NormSpec:
        """The same of rows that are so wide, as a norm of their mean square."""
        return replace(self, eps=self.eps / width, offset=width**-0.5) if self.unit else self

    @property
    def first_gain(self) -> float:
        """What a gain is until a checkpoint says it, the offset apart."""
        return 0.0 if self.unit else 1 - self.offset

    def named(self, name: str) -> NormSpec:
        """That of a block's norm of this name."""
        return self if self.after_eps is None or not name.startswith("after_") else replace(self, eps=self.after_eps)

    def num_weights(self, width: int) -> int:
        """Numbers of one that is so wide."""
        return width * (self.gains + self.shifted)
