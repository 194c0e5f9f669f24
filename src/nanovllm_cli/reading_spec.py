"""How an encoder reads a text for a decoder to attend to (T5), as plain values: a prompt is what the encoder reads.

It begins with the text's own tokens, filled up to whole blocks, which stand for the rows that the encoder makes of them and which
no layer of the decoder computes (`CrossSpec`); behind them are the tokens that the decoder begins with, and then what it writes.
So it stands where an image stands that is looked at (`leading.py`), with the same means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm_cli.cross_spec import lead_of
from nanovllm_cli.vision_spec import Image, PlacedImage, Sound, TokenIds

PADDING = 0
"""A token for what fills up a block: nothing reads it."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """An encoder as far as its steps go: layers, and multiplications of one for a token."""

    num_layers: int
    token_work: int

    def layer_work(self, text: Image | Sound) -> int:
        """Of all of a text's tokens."""
        assert isinstance(text, Sound)
        return self.token_work * text.frames


@dataclass(frozen=True, slots=True)
class ReadingSpec:
    """begins: tokens that the decoder begins with."""

    tower: TextTower
    begins: tuple[int, ...]

    def num_tokens(self, num_read: int) -> int:
        """Of a prompt for a text of so many."""
        return lead_of(num_read) + len(self.begins)

    def prompt(self, ids: Sequence[int]) -> TokenIds:
        """For a text of these tokens."""
        lead = lead_of(len(ids))
        placed = PlacedImage(Sound.of_text(ids), 0, 1, len(ids), behind=lead - len(ids), leads=True, shown=lead)
        return TokenIds([*ids, *[PADDING] * placed.behind, *self.begins], (placed,))
