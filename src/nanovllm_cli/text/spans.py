"""Parts of a text that labels of its tokens mark, such as the names in it.

    B-x I-x        a part begins, and goes on (IOB2); a label without a letter goes on, too. Each token has its likeliest label;
                   of a vocabulary that cuts words (WordPiece) a word has that of its first token, which is the one such models
                   are trained by: transformers calls this the strategy "first", and of other vocabularies "simple"
    B I E S        a part also ends, or is one token alone (BIOES; L and U in BILOU). The likeliest labels of all tokens together
                   are taken, of those that follow each other as they must (Viterbi 1967), as OpenAI's privacy filter has it
    x              tokens of one label behind each other are a part
    O              no part

A part's score is the mean of its tokens' probabilities. Space around a part is not of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.text.tokenizer import Placed, Tokenizer

WINDOW = 2048
"""Tokens that are read together, of models that see further, too."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]
OUTSIDE = "O"
_ROLE = re.compile(r"([BIESLU])[-_](.+)", re.DOTALL)
_ENDS = {"L": "E", "U": "S"}
_GOES_ON, _OPENS = ("B", "I"), ("O", "B", "S")


class Span(NamedTuple):
    """text[start:end], in characters. score: 0 to 1."""

    label: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class Marking:
    """roles: of each label, one of B, I, E, S and O. kinds: what it marks, which for O is nothing."""

    roles: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, labels: Sequence[str]) -> Marking:
        found = [_ROLE.fullmatch(label) for label in labels]
        pairs = [(match[1], match[2]) if match else ("I", label) for label, match in zip(labels, found, strict=True)]
        roles = [OUTSIDE if kind == OUTSIDE else _ENDS.get(role, role) for role, kind in pairs]
        return cls(tuple(roles), tuple(kind for _, kind in pairs))

    @property
    def names(self) -> tuple[str, ...]:
        """What may be marked, each once."""
        pairs = zip(self.roles, self.kinds, strict=True)
        return tuple(dict.fromkeys(kind for role, kind in pairs if role != OUTSIDE))

    @property
    def says_ends(self) -> bool:
        return not {"E", "S"}.isdisjoint(self.roles)

    def spans(self, text: str, placed: Placed, numbers: Numbers) -> list[Span]:
        """numbers: [tokens, labels], before they are probabilities."""
        if not len(numbers):
            return []
        logs = numbers - numbers.max(1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(1, keepdims=True))
        path = self._together(logs) if self.says_ends else _by_words(logs.argmax(1), placed.words)
        found: list[Span] = []
        for part in self._parts(path, [None] * len(path) if self.says_ends else placed.words):
            start, end = min(placed.places[token][0] for token in part), max(placed.places[token][1] for token in part)
            start = max(start, found[-1].end if found else 0)  # parts of a character may have tokens of their own
            words = text[start:end]
            start, end = start + len(words) - len(words.lstrip()), end - len(words) + len(words.rstrip())
            if start < end:
                score = float(np.exp([logs[token, path[token]] for token in part]).mean())
                found.append(Span(self.kinds[path[part.start]], start, end, score))
        return found

    def _together(self, logs: Numbers) -> list[int]:
        follows = np.array([[self._may_follow(i, j) for i in range(len(self.roles))] for j in range(len(self.roles))])
        barred = np.where(follows, 0.0, -np.inf)  # [label, the one before]
        best = np.where([role in _OPENS for role in self.roles], logs[0], -np.inf)
        before = np.zeros(logs.shape, np.int64)
        for token in range(1, len(logs)):
            paths = best[None] + barred
            before[token] = paths.argmax(1)
            best = paths.max(1) + logs[token]
        best = np.where([role in _GOES_ON for role in self.roles], -np.inf, best)
        path = [int(best.argmax())]
        for token in range(len(logs) - 1, 0, -1):
            path.append(int(before[token, path[-1]]))
        return path[::-1]

    def _may_follow(self, before: int, label: int) -> bool:
        if self.roles[before] in _GOES_ON:
            return self.roles[label] in ("I", "E") and self.kinds[label] == self.kinds[before]
        return self.roles[label] in _OPENS

    def _parts(self, path: Sequence[int], words: Sequence[int | None]) -> Iterator[range]:
        """Tokens that are one part."""
        first: int | None = None
        for token, label in enumerate(path):
            opens = self.roles[label] in ("B", "S") or first is None or self.kinds[label] != self.kinds[path[token - 1]]
            if first is not None and (opens or self.roles[label] == OUTSIDE) and not _goes_on(words, token):
                yield range(first, token)
                first = None
            if self.roles[label] != OUTSIDE and first is None:
                first = token
        if first is not None:
            yield range(first, len(path))


def _by_words(path: Any, words: Sequence[int | None]) -> list[int]:
    """Each token's label, or that of the first token of its word."""
    found: list[int] = []
    for token, label in enumerate(path.tolist()):
        found.append(found[-1] if _goes_on(words, token) else label)
    return found


def _goes_on(words: Sequence[int | None], token: int) -> bool:
    return token > 0 and words[token] is not None and words[token] == words[token - 1]


class Window(NamedTuple):
    """Tokens start to end of a text are read together, of which those from first to last are looked at."""

    start: int
    end: int
    first: int
    last: int

    @property
    def looked_at(self) -> slice:
        """Of its own tokens."""
        return slice(self.first - self.start, self.last - self.start)


class Piece(NamedTuple):
    """What is read of a text, the one at this place among several: ids, with what the vocabulary puts around them."""

    text: int
    window: Window
    ids: list[int]


def pieces(tokenizer: Tokenizer, texts: Sequence[Placed], limit: int) -> Iterator[Piece]:
    """Of all texts, each of at most `limit` tokens. Raises DoesNotFitError where that leaves no room for a text."""
    size = limit - len(tokenizer.around([]))
    if size < 1:
        raise DoesNotFitError(f"a context of {limit} tokens has no room for a text", "give it a larger one")
    for place, text in enumerate(texts):
        for window in windows(len(text.ids), size):
            yield Piece(place, window, tokenizer.around(text.ids[window.start : window.end]))


def joined(
    tokenizer: Tokenizer, num_texts: int, num_labels: int, found: Iterable[tuple[Piece, Sequence[float]]]
) -> list[Numbers]:
    """[tokens, labels] of each text. found: pieces in order, with the numbers of all their tokens."""
    before, parts = len(tokenizer.prefix_ids), [[np.zeros((0, num_labels))] for _ in range(num_texts)]
    for piece, numbers in found:
        rows = np.array(numbers, np.float64).reshape(-1, num_labels)[before:]
        parts[piece.text].append(rows[piece.window.looked_at])
    return list(map(np.concatenate, parts))


def windows(count: int, size: int) -> Iterator[Window]:
    """Of a text of so many tokens. Where it takes several, an eighth at each end of one is there for what lies beside it."""
    margin, start, first = size // 8, 0, 0
    while first < count:
        end = min(start + size, count)
        last = end if end == count else max(first + 1, end - margin)
        yield Window(start, end, first, last)
        start, first = max(0, last - margin), last
