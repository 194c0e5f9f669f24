"""How large a small image, or a piece of one, is made by what is written in it: MiniCPM-OCR's rule, with its published numbers.

What is dark, or bright where most is dark, is told from the rest by Otsu's threshold (1979). What of it hangs together, also by
corners, is a glyph: many small ones are read larger, and what has few or large ones keeps its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from nanovllm_cli.images.sizes import Sides, in_units, of_square
from nanovllm_cli.size_spec import SizeRule

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

SMALL_HEIGHT = 12.0
"""Pixels of a glyph; of half of them, if this is not more, they are small."""
DENSE = 2.0
"""Glyphs in a thousand pixels, from which on they are many."""
TINY_PIXELS, TINY_SIDE = 6272, 84
"""An image of fewer is made about as large as a square of this side."""
_LEAST_AREA, _LEAST_HEIGHT, _MOST_OF_SIDE = 3, 2, 0.9  # of a glyph; what is as long as the image is a line or a frame
_NEARLY = float(np.finfo(np.float32).eps)

Grown = Literal["", "tiny", "whole"]


def size_of(picture: Pixels, rule: SizeRule) -> Sides:
    """That an image is made which is not cut."""
    height, width = picture.height, picture.width
    if height * width > rule.tile**2:
        return of_square(rule, rule.tile, height, width)
    return _size_of(rule, grown(picture), height, width)


def sized(picture: Pixels, piece: Pixels, rule: SizeRule, grid: Sides, place: Sides) -> Pixels:
    """A piece as it is at the most, or made of the same part of its picture, if that asks for less. grid: lines and columns of
    pieces; place: of this one."""
    from PIL.Image import Resampling

    ends = [[round(side * (at + more) / count) for more in (0, 1)]
            for side, at, count in zip((picture.height, picture.width), place, grid, strict=True)]  # fmt: skip
    (top, bottom), (left, right) = ends
    height, width = bottom - top, right - left
    if not 0 < height * width <= rule.tile**2:
        return piece
    part = picture.crop((left, top, right, bottom))
    if (asked := grown(part)) == "whole":
        return piece
    tall, wide = _size_of(rule, asked, height, width)
    if tall * wide >= piece.height * piece.width:
        return piece
    return part.resize((wide, tall), Resampling.BICUBIC)


def _size_of(rule: SizeRule, asked: Grown, height: int, width: int) -> Sides:
    if not asked:
        return in_units(rule, height, width)
    return of_square(rule, rule.tile if asked == "whole" else TINY_SIDE, height, width)


def grown(picture: Pixels) -> Grown:
    """What an image in RGB is made: as large as there is room for ("whole"), as TINY_SIDE has it ("tiny"), or what it is."""
    grey = np.asarray(picture.convert("L"))
    inked = grey <= threshold(grey)
    if inked.mean() > 0.5:
        inked = ~inked
    height, width = grey.shape
    areas, heights, widths = components(inked)
    is_glyph = (areas >= _LEAST_AREA) & (heights >= _LEAST_HEIGHT)
    is_glyph &= (widths < _MOST_OF_SIDE * width) & (heights < _MOST_OF_SIDE * height)
    glyphs = heights[is_glyph]
    if len(glyphs) and np.median(glyphs) <= SMALL_HEIGHT and len(glyphs) * 1000.0 / (width * height) >= DENSE:
        return "whole"
    return "tiny" if height * width < TINY_PIXELS else ""


def threshold(grey: np.ndarray) -> int:
    """Otsu's, of uint8: up to this and beyond it, means are as far apart as may be, weighted by how many there are of both. The
    first of several; 0 where all are the same."""
    shares = np.bincount(grey.reshape(-1), minlength=256) / grey.size
    mean = float((np.arange(256) * shares).sum())
    below, mean_below, best, most = 0.0, 0.0, 0, 0.0
    for value, share in enumerate(shares.tolist()):
        mean_below *= below
        below += share
        above = 1.0 - below
        if min(below, above) < _NEARLY or max(below, above) > 1.0 - _NEARLY:
            continue
        mean_below = (mean_below + value * share) / below
        mean_above = (mean - below * mean_below) / above
        apart = below * above * (mean_below - mean_above) ** 2
        if apart > most:
            best, most = value, apart
    return best


def components(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of what hangs together by sides or corners: how many pixels, lines and columns it has. Runs of a line are joined with those
    that they touch in the line above, all at once, in as many rounds as it takes."""
    height, width = mask.shape
    framed = np.zeros((height, width + 2), np.int8)
    framed[:, 1:-1] = mask
    steps = np.diff(framed, axis=1)
    (line, first), (_, behind) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    stride = width + 2
    begins, ends = line * stride + first, line * stride + behind
    above = (line - 1) * stride
    low = np.searchsorted(ends, above + first, "left")
    counts = np.maximum(np.searchsorted(begins, above + behind, "right") - low, 0)
    lower = np.repeat(np.arange(len(line)), counts)
    upper = np.arange(len(lower)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    roots = np.arange(len(line))
    while len(lower):
        one, other = roots[lower], roots[upper]
        apart = one != other
        lower, upper, one, other = lower[apart], upper[apart], one[apart], other[apart]
        np.minimum.at(roots, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(roots, further := roots[roots]):
            roots = further
    names, which = np.unique(roots, return_inverse=True)
    areas = np.bincount(which, behind - first, len(names)).astype(np.int64)
    spans = []
    for low_end, high_end in ((line, line + 1), (first, behind)):
        least, most = np.full(len(names), 1 << 40), np.zeros(len(names), np.int64)
        np.minimum.at(least, which, low_end)
        np.maximum.at(most, which, high_end)
        spans.append(most - least)
    return areas, spans[0], spans[1]
