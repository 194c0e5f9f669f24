"""PLaMo's way to cut a text: into those pieces of a vocabulary whose scores add up to the most, as llama.cpp computes it for
files whose tokenizer is `plamo2`. What becomes of a character that is in no piece is not decided here."""

from __future__ import annotations

from collections.abc import Mapping

from nanovllm_cli.text.pieces import Pieces

UNKNOWN = 10_000_000
"""What a character alone costs that no piece has; scores are counted in ten thousandths."""


class BestPieces(Pieces):
    """scores: of each piece. Among sums that are equal the one whose first piece is the longest wins, and of its rest again."""

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._costs = {piece: _cost(score) for piece, score in scores.items()}
        self._beginnings = {piece[:end] for piece in scores for end in range(1, len(piece) + 1)}

    def ends(self, text: str) -> list[int]:
        """Where the pieces of a text end."""
        costs, lengths = [0] * (len(text) + 1), [1] * len(text)
        for first in reversed(range(len(text))):
            best = None
            for length in reversed(self._found(text, first)):
                cost = costs[first + length] + self._costs[text[first : first + length]]
                if best is None or cost < best:
                    best, lengths[first] = cost, length
            alone = costs[first + 1] + UNKNOWN
            if best is None or alone < best:
                best, lengths[first] = alone, 1
            costs[first] = best
        found, end = [], 0
        while end < len(text):
            end += lengths[end]
            found.append(end)
        return found

    def _found(self, text: str, first: int) -> list[int]:
        """Lengths of the pieces that a text has there."""
        found = []
        for end in range(first + 1, len(text) + 1):
            beginning = text[first:end]
            if beginning not in self._beginnings:
                break
            if beginning in self._costs:
                found.append(end - first)
        return found


def _cost(score: float) -> int:
    """Halves away from zero."""
    scaled = score * 1e4
    return -int(scaled + 0.5) if scaled >= 0 else int(0.5 - scaled)
