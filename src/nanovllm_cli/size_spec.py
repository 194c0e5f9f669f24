"""Which size an image is made before a tower reads it, as plain values. What follows from them: `images/sizes.py`."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nanovllm_cli.mosaic import Laid, most_rows

MAX_ASPECT = 200
"""How much longer one side of an image may be than the other: Qwen2-VL's bound."""


class Dense(NamedTuple):
    """Images that a canvas of its most tiles makes narrower than `scale`, if width by height is more than `least` and at most
    `most`, may have so many tiles."""

    tiles: int
    scale: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Which size an image is made, by kind; sides are multiples of `multiple`. Into which pieces it is cut, squares of `tile`
    pixels, if it is; what shows all of it then is behind them.

    area     as near to its own shape as may be, with min_pixels to max_pixels in all (Qwen2-VL); where a side is shorter than
             `multiple` and `small` says how the other is rounded, made that long first (GLM-4V, PaddleOCR-VL)
    longest  its own shape, no side longer than longest_side, sides rounded up (Pixtral)
    square   longest_side on either side, whatever its shape (SigLIP); what is no whole multiple of that is cut off
    middle   a tile of its middle, with the shorter side made a tile long (CLIP)
    mosaic   one of `grids` of tiles, in lines and columns: that which shows the most of its pixels, and of those that with the
             least around it, which is black; all of it, in front of these, in one tile. Of tiles as of "square" (LLaVA-NeXT).
             Where `nearest` is "covering" the image is made as large as the grid, which is the smallest that shows nine tenths
             of its pixels, or else that which shows the most, and tiles lie apart (Ovis2). Where there is a `margin`, of so many
             multiples at each edge of a tile, tiles overlap by these, and the image is made as large as the grid that, without
             a margin, it fits into if it grows, by the least, or else shrinks to by the least (Molmo 2)
    largest  its own shape, as large as max_pixels allow, sides rounded down, and none longer than longest_side (Gemma 4)
    tiles    its own shape with the longer side longest_side, sides rounded up to tiles; all of it: one tile, and nothing but that
             where most_tiles is 1 (Idefics3)
    pages    least_tiles to most_tiles of them, of an image with a side that is longer than one, chosen as those of "canvas"; all
             of it: its own shape, with the longer side longest_side, in the middle of a grey square (DeepSeek-OCR 2).
             in_lines: those of a line are one image, or all of them where a line has one; `smaller` are sides of what shows all
             of it where less is asked for, and no side of a tile or less keeps its shape (DeepSeek-OCR)
    grid     as `area`, where that is at most max_pixels * tolerance; beyond, least_tiles to most_tiles of them, in lines and
             columns that are as near to its own shape as may be; all of it: as `area` (LFM2-VL)
    canvas   least_tiles to most_tiles of them, alike, in at most most_lines lines or columns, if that is not 0; all of it: one
             tile, and nothing but that where it is one (InternVL); more tiles for what is `dense` (Granite Docling); those by
             which the image grows the least, or else shrinks the least, where `nearest` is "size" (Command A Vision); those in
             which it is the largest in its own shape, or else of the next shape, where that is "growth": one is a piece, too,
             and what shows all of it is in front (Perception LM). kept: its shape is, at the upper left of the tiles, and it
             grows to one tile's side at the most; the rest is black (Llama 4); together: tiles are one image, with a row more
             each, and nothing shows all of it beside them (Llama 3.2)
    padded   its own shape, in at most most_tiles squares of `tile` pixels and no side longer than longest_side, never larger
             than it is, at the upper left of what is black else (Kimi-VL)
    framed   its own shape with the longer side longest_side, the other of `least_side` at least, in the middle of a square of
             the colour `around` (DeepSeek-VL)
    bounded  its own shape, no side longer than longest_side or, whatever its shape, shorter than least_side; what is no whole
             multiple is cut off. Where most_tiles is 4 each of its quarters in that way, and all of it behind them (Idefics 2)
    slices   up to most_tiles of them, of about as many pixels as a tile, but of the image's own shape; all of it, which is in
             front of them: as one of them, and nothing but that where it has no more pixels, of so many then if it grows
             (MiniCPM-V); with "letters", it and pieces as what is written in them asks (MiniCPM-OCR)

    resample: "nearest four" is linear between pixels' middles, also where an image becomes smaller. ends: see `Mosaic`.
    most_with_ends: of an `area` whose lines have one more behind them, so many multiples with these at the most; 0: any number.
    """

    kind: Literal[
        "area", "longest", "square", "middle", "mosaic", "pages", "largest", "tiles", "grid", "canvas", "slices",
        "padded", "framed", "bounded",
    ]  # fmt: skip
    multiple: int
    min_pixels: int = 0
    max_pixels: int = 0
    longest_side: int = 0
    resample: Literal["bicubic", "bilinear", "lanczos", "nearest four"] = "bicubic"
    tile: int = 0
    least_tiles: int = 0
    most_tiles: int = 0
    tolerance: float = 1.0
    small: Literal["", "floor", "round"] = ""
    nearest: Literal["shape", "size", "growth", "covering"] = "shape"
    grids: tuple[tuple[int, int], ...] = ()
    grows: Literal["always", "never", "letters"] = "always"
    most_lines: int = 0
    most_with_ends: int = 0
    dense: Dense | None = None
    in_lines: bool = False
    smaller: tuple[int, ...] = ()
    kept: bool = False
    together: bool = False
    least_side: int = 0
    around: tuple[int, int, int] = (0, 0, 0)
    margin: int = 0
    ends: bool = False

    @property
    def apart(self) -> bool:
        """See `Mosaic`."""
        return self.nearest == "covering"

    @property
    def laid(self) -> Laid:
        return Laid(self.apart, self.margin, self.ends)

    @property
    def always_cut(self) -> bool:
        """Whether there is a piece, however small an image is."""
        return self.nearest == "growth"

    @property
    def whole_first(self) -> bool:
        """Whether what shows all of an image is in front of its pieces."""
        return self.kind == "slices" or self.always_cut

    def page_tokens(self, cell: int, tiles: int) -> int:
        """Of "pages", the most that so many tiles and what shows all of it have."""
        side, tile = self.longest_side // cell, self.tile // cell
        return side * (side + self.in_lines) + 1 + tiles * tile * (tile + self.in_lines)

    def is_page(self, height: int, width: int) -> bool:
        """Of "pages", whether an image is made so large."""
        if height == width == self.longest_side:
            return True
        if not self.in_lines:
            return height == width == self.tile
        short, long = sorted((height, width))
        return short == self.tile and long in range(2 * short, self.most_tiles * short + 1, short)

    def padded_cells(self, tiles: int, aspect: int = MAX_ASPECT) -> int:
        """Of "padded", no image has more multiples than this, where it has so many tiles at the most: for each number of tiles on
        its shorter side as many on the longer one as there may be, which is rounded up twice, to tiles and to multiples."""
        each, most = self.multiple // self.tile, 0
        for short in range(1, math.isqrt(tiles) + 2):
            longest, fewest = aspect * (short + 1), tiles // short + 1
            most = max(most, (min(fewest - 1, longest) // each + 1) * (short // each + 1))
            if fewest <= longest:  # it shrinks
                (tall, wide), (taller, _) = ([(side + 1) * math.sqrt(tiles / (short * long)) for side in (long, short)]
                                             for long in (fewest, longest))  # fmt: skip
                most = max(most, math.floor((tall * wide / each + taller + wide) / each) + 1)
        return most

    @property
    def all_tiles(self) -> int:
        """Most that any image is cut into."""
        return self.most_tiles if self.dense is None else max(self.most_tiles, self.dense.tiles)

    @property
    def num_shown(self) -> int:
        """Of "bounded", images that what somebody sent becomes."""
        return 1 if self.most_tiles == 1 else self.most_tiles + 1

    def limited(
        self, most: int, cell: int, *, ends: int = 0, framed: bool = False, squares: int = 0, each: int = 0
    ) -> SizeRule:
        """The same for images of at most so many tokens of `cell` pixels on a side, with `ends` more behind each line, and two
        around those that are `framed`. squares: of a mosaic, as `TowerSpec` has them. each: tokens that any image has, or any of
        its quarters."""
        area = most * cell**2
        size = replace(self, min_pixels=min(self.min_pixels, area), max_pixels=min(self.max_pixels, area))
        if self.kind == "longest":
            side = max(1, (math.isqrt(4 * most + ends) - ends) // 2)  # of a square, which with its ends has the most
            size = replace(size, longest_side=min(self.longest_side, side * cell))
        elif self.kind == "area" and ends:
            size = replace(size, most_with_ends=max(1, most - 2 * framed))
        elif self.kind == "tiles":  # one of those that there is room for shows all of the image
            tiles = max(0, most // (self.tile // cell) ** 2 - 1)
            size = replace(size, longest_side=min(self.longest_side, max(1, math.isqrt(tiles)) * self.tile))
        elif self.kind == "pages":
            counts = [count for count in range(self.most_tiles + 1) if self.page_tokens(cell, count) <= most]
            pages = [self, *(replace(self, longest_side=side) for side in self.smaller)]
            page = next((page for page in pages if page.page_tokens(cell, 0) <= most), pages[-1])
            size = replace(page, most_tiles=max(counts, default=0))
        elif self.together:
            tiles = max(1, most // ((self.tile // cell) ** 2 + 1))
            size = replace(size, most_tiles=min(self.most_tiles, tiles))
        elif self.kind == "canvas":
            tiles = max(1, most // (self.tile // cell) ** 2 - 1)
            dense = None if self.dense is None else self.dense._replace(tiles=min(self.dense.tiles, tiles))
            least, more = min(self.least_tiles, tiles), min(self.most_tiles, tiles)
            size = replace(size, least_tiles=least, most_tiles=more, dense=dense)
        elif self.kind == "grid":
            tiles = max(0, area - size.max_pixels) // self.tile**2
            size = replace(size, most_tiles=min(self.most_tiles, tiles))
        elif self.kind == "slices":
            piece = (self.tile / cell) ** 2 + 1.25 * self.tile / cell + 0.25  # where one is four times as long as wide, rounded
            tiles = max(1, most // math.floor(piece) - 1)
            size = replace(size, most_tiles=min(self.most_tiles, tiles))
        elif self.kind == "bounded":
            size = replace(size, most_tiles=self.most_tiles if self.num_shown * each <= most else 1)
        elif self.kind == "padded":
            fewer = bisect_right(range(self.most_tiles + 1), most, key=lambda count: self.padded_cells(count)) - 1
            size = replace(size, most_tiles=max(1, fewer))
        elif self.kind == "mosaic":
            fits = [grid for grid in self.grids if most_rows(grid, self.tile // cell, squares, self.laid) <= most]
            size = replace(size, grids=tuple(fits or self.grids[: self.margin and 1]))
        return size
