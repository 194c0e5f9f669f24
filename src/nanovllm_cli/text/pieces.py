"""Pre-tokenizers that cut a text into all of its tokens, by the ends that they find."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

_CHUNK = 1000
"""Pieces that are cut off a text at once: to cut anything off takes time by its place."""


class Pieces(ABC):
    """A pre-tokenizer for `PreTokenizer.custom`."""

    @abstractmethod
    def ends(self, text: str) -> list[int]:
        """Where the pieces of a text end."""

    def pre_tokenize(self, text: Any) -> None:
        """What the library calls, with a PreTokenizedString."""
        text.split(lambda _, part: self._split(part, _CHUNK))
        text.split(lambda _, part: self._split(part, 1))

    def _split(self, part: Any, count: int) -> list[Any]:
        """count: of pieces that stay together. A chunk's own pieces must be those that it has in the whole."""
        ends = self.ends(str(part))
        cuts = [0, *ends[count - 1 : -1 : count], *ends[-1:]]
        return [part[first:end] for first, end in pairwise(cuts)]
