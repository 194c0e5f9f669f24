"""Attention to what an encoder has made, beside a layer's own or instead of it, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_cli.mixer_spec import AttentionSpec

LEAD = 16
"""See `lead_of`: tokens of a block, unless somebody asks for others."""


@dataclass(frozen=True, slots=True)
class CrossSpec:
    """Attention to `rows` that an encoder has made of what was sent, behind a layer's own (Vaswani et al. 2017; Whisper): each
    token sees all of them. What is kept of them lies in the layer's own cache, where a sequence begins: tokens in front of all
    others stand for them, which the layer's own attention does not see. attention: its heads; it has no positions. rows 0: as
    many as what was sent has, a text (T5): see `leading.py` for which a token sees then."""

    attention: AttentionSpec
    rows: int = 0

    @property
    def lead(self) -> int:
        """Tokens in front of a sequence."""
        return lead_of(self.rows)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        return self.attention.num_weights(hidden_size)


@dataclass(frozen=True, slots=True)
class LookSpec:
    """Attention to images, of a layer that has no other (Llama 3.2): x += tanh(a) * cross(norm(x)), and its MLP, too, times the
    tanh of a number. A token sees the last images in front of it (`leading.py`); those that see none pass the layer by. queries
    and keys have a norm a head. attention: its heads; it has no positions. keeper: the layer with attention of its own in whose
    cache its keys and values lie, where tokens in front of all others stand for an image's rows."""

    attention: AttentionSpec
    keeper: int

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        return self.attention.num_weights(hidden_size)


class Alignment(NamedTuple):
    """That it is asked which of an encoder's rows each token of a text attends to, of a prompt that is a sound, what a text
    begins with, the text, and its end. heads: (layer, head) of those that go along with what is said. before: tokens between
    the sound and the one whose row draws the text's first. rows: of the encoder, in which something is heard.

    What is found is a number for each token of the text, and one for its end: the row where it begins (`attention/warping`)."""

    heads: tuple[tuple[int, int], ...]
    before: int
    rows: int


def lead_of(rows: int) -> int:
    """Tokens that stand for an encoder's rows: as many, and what fills up the last block, behind which others begin."""
    return -(-rows // LEAD) * LEAD
