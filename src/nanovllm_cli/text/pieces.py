"""Pre-tokenizers that cut a text into all of its tokens, by the ends that they find."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from itertools import pairwise
from typing import Any

_TOGETHER = (1000, 30, 1)
"""Pieces that are cut off at once, step by step: to cut anything off takes time by its place."""


class Pieces(ABC):
    """A pre-tokenizer for `PreTokenizer.custom`."""

    @abstractmethod
    def ends(self, text: str) -> list[int]:
        """Where the pieces of a text end."""

    def pre_tokenize(self, text: Any) -> None:
        """What the library calls, with a PreTokenizedString: it has its parts cut one after the other, in order, and goes on with
        those of them that are not empty."""
        known: deque[list[int]] = deque()

        def first(_: int, part: Any) -> list[Any]:
            return cut(part, self.ends(str(part)), _TOGETHER[0])

        def cut(part: Any, ends: list[int], count: int) -> list[Any]:
            cuts = [0]
            for i in range(0, len(ends), count):
                known.append([end - cuts[-1] for end in ends[i : i + count]])
                cuts.append(ends[min(i + count, len(ends)) - 1])
            return [part[begin:end] for begin, end in pairwise(cuts)]

        text.split(first)
        for count in _TOGETHER[1:]:
            text.split(lambda _, part, count=count: cut(part, known.popleft(), count))
