"""Columns as wide as what is in them: the same text on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GAP = "  "


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], width: int | None = None) -> list[str]:
    """Lines of rows that are equally long. left: columns that begin at the left, the others end at the right. width: what a
    terminal shows of a line; what is longer ends in an ellipsis."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        GAP.join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return [line.rstrip() if width is None else shortened(line.rstrip(), width) for line in lines]


def shortened(text: str, most: int) -> str:
    """At most so many characters of it, the last of which stands for the rest."""
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"
