"""Text in which some pieces are this program's own: control tokens count there, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self


class Piece(NamedTuple):
    """is_own: of this program; otherwise of a caller."""

    text: str
    is_own: bool


class OwnText(str):
    """A text made of pieces. What is done to it as to a text gives one that is nobody's own."""

    pieces: tuple[Piece, ...]

    def __new__(cls, pieces: Iterable[Piece]) -> Self:
        kept = tuple(pieces)
        self = super().__new__(cls, "".join(text for text, _ in kept))
        self.pieces = kept
        return self


def own(text: str) -> Piece:
    return Piece(text, True)


def callers(text: str) -> Piece:
    return Piece(text, False)


def joined(between: str, texts: Iterable[str]) -> str:
    """Texts with the same between them; what is this program's own stays so."""
    whole = list(texts)
    if not any(isinstance(each, OwnText) for each in whole):
        return between.join(whole)
    pieces: list[Piece] = []
    for place, each in enumerate(whole):
        pieces += [callers(between)] if place else []
        pieces += each.pieces if isinstance(each, OwnText) else [callers(each)]
    return OwnText(pieces)
