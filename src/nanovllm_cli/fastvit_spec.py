"""A tower of convolutions as plain values (FastVLM)."""

from __future__ import annotations

from typing import NamedTuple


class FastVitSpec(NamedTuple):
    """FastViTHD (Vasu et al. 2024), as it is when its branches of training are one convolution each. Two convolutions that halve
    lines and columns, then stages of so many blocks, `depths`, with rows of so many dimensions, `widths`; in front of each stage
    but the first, one that halves them again. A block mixes by a convolution of each dimension, or in the last `attending`
    stages by attention, in heads of head_dim, with a convolution for positions in front of them; its MLP is `ratio` times as
    wide, and another convolution is in front of it. Behind all of them one makes two dimensions of each, which are weighed by
    what a small MLP, a sixteenth as wide, makes of their means.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    attending: int = 2
    head_dim: int = 32
    ratio: int = 4
    eps: float = 1e-5

    @property
    def num_blocks(self) -> int:
        return sum(self.depths)

    @property
    def halvings(self) -> int:
        """How often lines and columns are."""
        return 1 + len(self.widths)

    def attends(self, stage: int) -> bool:
        return stage >= len(self.widths) - self.attending

    def work(self, pixels: int) -> int:
        """Multiplications of all blocks, about."""
        total = 0
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            rows = pixels >> 2 * (stage + 2)
            mixing = 4 * width + 2 * rows if self.attends(stage) else 9
            total += depth * rows * width * (2 * self.ratio * width + 49 + mixing)
        return total

    def most_numbers(self, pixels: int) -> int:
        """That there are at once, about: pixels, what the first convolution makes of them, and what follows from that."""
        return pixels * (self.widths[0] + 12) // 2
