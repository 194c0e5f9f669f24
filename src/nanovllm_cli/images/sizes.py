"""How large an image is made before a tower reads it, and into which pieces it is cut. The rules are those that the models were
trained with."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import NamedTuple

from nanovllm_cli import mosaic
from nanovllm_cli.size_spec import MAX_ASPECT as MAX_ASPECT
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import VisionSpec

Sides = tuple[int, int]
"""Height and width, in pixels."""


class Sizes(NamedTuple):
    """Which an image is made. whole: what shows all of it. pieces: what is cut, if anything is. first: what it is made before
    either, of which the pieces are made, and of these the whole; None: both are made of the image itself. grid: lines and columns
    of pieces; None: they are tiles."""

    whole: Sides
    pieces: Sides | None = None
    first: Sides | None = None
    grid: Sides | None = None


def fitted(rule: SizeRule, height: int, width: int) -> Sizes:
    """Of an image of this height and width."""
    match rule.kind:
        case "square":
            return Sizes((rule.longest_side, rule.longest_side))
        case "middle":
            return _around_middle(rule, height, width)
        case "mosaic":
            return _in_mosaic(rule, height, width)
        case "pages":
            return _as_pages(rule, height, width)
        case "tiles":
            return _in_tiles(rule, height, width)
        case "grid":
            return _in_grid(rule, height, width)
        case "slices":
            return _in_slices(rule, height, width)
        case "canvas":
            tile = rule.tile
            rows, columns = {"size": _by_size, "growth": _by_growth}.get(rule.nearest, _on_canvas)(rule, height, width)
            first = _kept(rule, height, width, rows, columns) if rule.kept else None
            if rule.together:
                return Sizes((rows * tile, columns * tile), None, first)
            is_cut = rows * columns > 1 or rule.always_cut
            return Sizes((tile, tile), (rows * tile, columns * tile) if is_cut else None, first)
        case "padded":
            return _padded(rule, height, width)
        case "framed":
            return _framed(rule, height, width)
        case "bounded":
            return Sizes(_bounded(rule, height, width))
    unit = rule.multiple
    rows, columns = {"area": _by_lined_area, "longest": _by_longest, "largest": _by_largest}[rule.kind](rule, height, width)
    return Sizes((rows * unit, columns * unit))


def most_rows(spec: VisionSpec) -> int:
    """No image of an aspect up to MAX_ASPECT, or piece of one, becomes more rows of the tower's output than this."""
    rule = spec.size
    if rule.together:
        return rule.most_tiles * ((rule.tile // spec.tower.cell) ** 2 + 1)
    if rule.kind in ("tiles", "canvas", "middle"):
        pixels = rule.tile**2
    elif rule.apart:
        return most_tokens(spec)
    elif rule.kind == "mosaic":  # of which all squares are computed, also where not all of their rows are shown
        area, line = rule.tile**2, rule.tile * rule.multiple
        pixels = max((1 + rows * columns) * area + rows * line for rows, columns in (*rule.grids, (1, 0)))
    elif rule.kind == "pages" and rule.in_lines:  # pieces that are all one image have the most lines, each with its end
        of_one = rule.page_tokens(spec.tower.cell, 1) - rule.page_tokens(spec.tower.cell, 0)
        return max(rule.page_tokens(spec.tower.cell, 0), rule.most_tiles * of_one)
    elif rule.kind == "pages":
        pixels = rule.longest_side**2 + rule.multiple**2
    elif rule.kind == "padded":
        pixels = rule.padded_cells(rule.most_tiles) * rule.multiple**2
    elif rule.kind in ("square", "framed", "bounded"):
        pixels = rule.longest_side**2
    elif rule.kind == "slices":  # its sides are rounded
        side, thin = rule.tile / rule.multiple, math.sqrt(MAX_ASPECT)
        pixels = math.floor((side * thin + 0.5) * max(1.0, side / thin + 0.5)) * rule.multiple**2
    elif rule.kind == "longest":
        pixels = (math.ceil(rule.longest_side / rule.multiple) * rule.multiple) ** 2
    elif rule.kind == "largest":
        pixels = min(rule.max_pixels, rule.longest_side**2)
    else:
        area = rule.multiple**2
        most, least = rule.max_pixels / area, rule.min_pixels / area
        # the line of a thin image is not made thinner than a unit; and both sides of what is made larger are rounded up
        thin = math.sqrt(MAX_ASPECT * most)
        raised = least + math.sqrt(least * MAX_ASPECT) + math.sqrt(least / MAX_ASPECT) + 1
        pixels = math.floor(max(most, thin, raised)) * area
        if rule.kind == "grid" and rule.most_tiles:
            pixels = max(pixels, rule.tile**2)
    return pixels // spec.tower.cell**2


def most_tokens(spec: VisionSpec) -> int:
    """The same of tokens that stand for an image: for all its pieces and what is made beside them, and at ends of lines."""
    rule, pieces = spec.size, 0
    if spec.tower.resampler is not None:
        return spec.least_tokens
    if spec.tower.projector == "lined":  # one more for each line; rounding may make it twice as thin
        most = most_rows(spec)
        with_ends = most + min(most, math.isqrt(2 * MAX_ASPECT * most) + 1)
        return 2 + (min(with_ends, max(2, rule.most_with_ends)) if rule.most_with_ends else with_ends)
    if rule.kind == "mosaic":
        side = rule.tile // spec.tower.cell
        grids = rule.grids if rule.margin else (*rule.grids, (0, 0) if rule.apart else (1, 0))
        return max(mosaic.most_rows(grid, side, spec.tower.squares, rule.laid) for grid in grids)
    if rule.kind == "pages":
        return rule.page_tokens(spec.tower.cell, rule.most_tiles if rule.most_tiles >= rule.least_tiles else 0)
    if rule.kind == "longest" and spec.tokens.line_end:
        return most_rows(spec) + math.isqrt(most_rows(spec))
    if rule.kind == "tiles":
        side = -(-rule.longest_side // rule.tile)
        pieces = side**2 if side > 1 != rule.most_tiles else 0
    elif rule.kind in ("grid", "canvas") and not rule.together and (
        rule.always_cut or rule.all_tiles >= max(2, rule.least_tiles)
    ):
        pieces = rule.all_tiles
    elif rule.kind == "slices":
        return most_rows(spec) * (1 + (rule.most_tiles if rule.most_tiles > 1 else 0))
    return most_rows(spec) + pieces * (rule.tile // spec.tower.cell) ** 2


def _by_area(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    unit = rule.multiple
    if rule.small == "floor" and min(height, width) < unit:
        grow = max(unit / height, unit / width)
        height, width = (max(unit, math.floor(side * grow)) for side in (height, width))
    if rule.small == "round" and height < unit:
        height, width = unit, round(width * unit / height)
    if rule.small == "round" and width < unit:
        height, width = round(height * unit / width), unit
    rows, columns = round(height / unit), round(width / unit)
    pixels = rows * columns * unit**2
    if pixels > rule.max_pixels:
        shrink = math.sqrt(height * width / rule.max_pixels)
        return max(1, math.floor(height / shrink / unit)), max(1, math.floor(width / shrink / unit))
    if pixels < max(1, rule.min_pixels):
        grow = math.sqrt(max(1, rule.min_pixels) / (height * width))
        return math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows, columns


def _by_lined_area(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    rows, columns = _by_area(rule, height, width)
    most = rule.most_with_ends
    if not most or rows * (columns + 1) <= most:
        return rows, columns
    shrink = (math.sqrt(height**2 + 4 * height * width * most) - height) / (2 * height * width)  # h s (w s + 1) = most
    rows, columns = (max(1, math.floor(side * shrink)) for side in (height, width))
    columns = max(1, min(columns, most // rows - 1))  # where it was thinner than a unit
    return max(1, min(rows, most // (columns + 1))), columns


def _by_longest(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    shrink = max(1.0, max(height, width) / rule.longest_side)
    rows, columns = (math.ceil(math.floor(side / shrink) / rule.multiple) for side in (height, width))
    return max(1, rows), max(1, columns)


def _by_largest(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    most = min(rule.max_pixels // rule.multiple**2, rule.longest_side // rule.multiple)
    grow = min(math.sqrt(rule.max_pixels / (height * width)), rule.longest_side / max(height, width))
    rows, columns = (math.floor(grow * side / rule.multiple) for side in (height, width))
    if not rows:
        return 1, most
    return (rows, columns) if columns else (most, 1)


def _around_middle(rule: SizeRule, height: int, width: int) -> Sizes:
    tile = rule.tile
    first = (tile, int(tile * width / height)) if height <= width else (int(tile * height / width), tile)
    return Sizes((tile, tile), None, first)


def _as_pages(rule: SizeRule, height: int, width: int) -> Sizes:
    """whole: of what lies in a square of the longest side."""
    scale = rule.longest_side / max(height, width)
    whole = max(1, round(height * scale)), max(1, round(width * scale))
    if rule.in_lines and rule.longest_side <= rule.tile:
        whole = rule.longest_side, rule.longest_side
    if max(height, width) <= rule.tile or rule.most_tiles < rule.least_tiles:
        return Sizes(whole)
    rows, columns = _grid(rule, rule.least_tiles, height, width)
    grid = (rows if columns > 1 else 1, 1) if rule.in_lines else None
    return Sizes(whole, (rows * rule.tile, columns * rule.tile), grid=grid)


def _in_mosaic(rule: SizeRule, height: int, width: int) -> Sizes:
    """first: of what lies in the middle of the pieces."""
    tile = rule.tile
    if not rule.grids:
        return Sizes((tile, tile))
    if rule.margin:
        both = 2 * rule.margin * rule.multiple
        grid = _overlapping(rule, height - both, width - both)
        whole = grid[0] * (tile - both) + both, grid[1] * (tile - both) + both
        return Sizes((tile, tile), whole, whole, grid)
    if rule.apart:
        rows, columns = _covering(rule, height, width)
        whole = rows * tile, columns * tile
        return Sizes((tile, tile)) if (rows, columns) == (1, 1) else Sizes((tile, tile), whole, whole, (rows, columns))
    best, most, least = rule.grids[0], 0, math.inf
    for rows, columns in rule.grids:
        scale = min(columns * tile / width, rows * tile / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        unused = rows * columns * tile**2 - shown
        if shown > most or (shown == most and unused < least):
            best, most, least = (rows, columns), shown, unused
    rows, columns = best
    by_width, by_height = columns * tile / width, rows * tile / height
    if by_width < by_height:
        first = min(math.ceil(height * by_width), rows * tile), columns * tile
    else:
        first = rows * tile, min(math.ceil(width * by_height), columns * tile)
    return Sizes((tile, tile), (rows * tile, columns * tile), first, best)


def _overlapping(rule: SizeRule, height: int, width: int) -> Sides:
    """Lines and columns, by an image's sides without margins, which may be none or less. transformers computes in float32."""
    window = rule.tile - 2 * rule.margin * rule.multiple
    scales = [min(_ratio(rows * window, height), _ratio(columns * window, width)) for rows, columns in rule.grids]
    if all(scale < 1 for scale in scales):
        return rule.grids[scales.index(max(scales))]
    grown = [scale if scale >= 1 else 1e10 for scale in scales]
    return rule.grids[grown.index(min(grown))]


def _ratio(side: int, of: int) -> float:
    return struct.unpack("f", struct.pack("f", side / of))[0] if of else math.inf


def _covering(rule: SizeRule, height: int, width: int) -> Sides:
    """Lines and columns. As in transformers, it is lines that an image is divided into as if they were columns, and columns as if
    they were lines."""
    shares = []
    for columns, rows in sorted([(1, 1), *(grid[::-1] for grid in rule.grids)], key=math.prod):
        tall, wide = height // columns, width // rows
        parts = [(tall + (i == columns - 1) * (height % columns), wide + (j == rows - 1) * (width % rows))
                 for i in range(columns) for j in range(rows)]  # fmt: skip
        shares.append((sum(_shown(max(part), min(part), rule.tile) for part in parts) / (width * height), (rows, columns)))
    enough = [each for each in shares if each[0] > 0.9]
    if enough:
        return min(enough, key=lambda each: (math.prod(each[1]), -each[0]))[1]
    return min(shares, key=lambda each: (-each[0], math.prod(each[1])))[1]


def _shown(long: float, short: float, side: int) -> float:
    """Pixels of so many that are left where the longer side is made no longer than this."""
    return long * short if long <= side else side * (short / long * side)


def _in_tiles(rule: SizeRule, height: int, width: int) -> Sizes:
    first = _with_longest(height, width, rule.longest_side)
    if rule.most_tiles == 1:
        return Sizes((rule.tile, rule.tile), None, first)
    tile, is_wide, aspect = rule.tile, first[1] >= first[0], first[1] / first[0]
    long = -(-max(first) // tile) * tile
    short = -(-int(long / aspect if is_wide else long * aspect) // tile) * tile
    pieces = (short, long) if is_wide else (long, short)
    return Sizes((tile, tile), None if pieces == (tile, tile) else pieces, first)


def _with_longest(height: int, width: int, side: int) -> Sides:
    """The shorter one is even."""
    aspect = width / height
    if width >= height:
        other = int(side / aspect)
        return max(1, other + other % 2), side
    other = int(side * aspect)
    return side, max(1, other + other % 2)


def _in_grid(rule: SizeRule, height: int, width: int) -> Sizes:
    unit = rule.multiple
    rows, columns = _by_area(rule, height, width)
    whole = rows * unit, columns * unit
    pixels = math.prod(max(unit // 2, round(side / unit) * unit) for side in (height, width))
    if pixels <= rule.max_pixels * rule.tolerance or rule.most_tiles < max(2, rule.least_tiles):
        return Sizes(whole)
    rows, columns = _grid(rule, max(2, rule.least_tiles), height, width)
    return Sizes(whole, (rows * rule.tile, columns * rule.tile))


def _on_canvas(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    grid, dense = _grid(rule, rule.least_tiles, height, width), rule.dense
    if dense is None or not dense.least < width / height <= dense.most or not grid[1] * rule.tile / width < dense.scale:
        return grid
    return _grid(replace(rule, most_tiles=dense.tiles), rule.least_tiles, height, width)


def _grid(rule: SizeRule, fewest: int, height: int, width: int) -> tuple[int, int]:
    """Among those of equal shape, the largest that is not twice as large as the image."""
    best, least = (1, 1), math.inf
    for count in range(fewest, rule.most_tiles + 1):
        for columns in (each for each in range(1, count + 1) if count % each == 0):
            if rule.most_lines and max(columns, count // columns) > rule.most_lines:
                continue
            off = abs(width / height - columns / (count // columns))
            if off < least or (off == least and height * width > 0.5 * rule.tile**2 * count):
                best, least = (count // columns, columns), off
    return best


def _by_size(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    """Those that an image fits into if it grows, by the least; where it is larger than any, those for which it shrinks the least.
    Among equals those of fewer tiles, then of fewer columns."""
    most = rule.most_tiles
    grids = sorted(
        ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)), key=math.prod
    )
    scales = [min(columns * rule.tile / width, rows * rule.tile / height) for columns, rows in grids]
    if rule.kept and not rule.together:  # which are told apart in float32 there
        scales = list(struct.unpack(f"{len(scales)}f", struct.pack(f"{len(scales)}f", *scales)))
    if max(scales) >= 1:
        scales = [-scale if scale >= 1 else -math.inf for scale in scales]
    columns, rows = grids[scales.index(max(scales))]
    return rows, columns


def _by_growth(rule: SizeRule, height: int, width: int) -> Sides:
    """Those that an image fits into in which its shorter side becomes the longest; where it is larger than any, the most of
    the next shape that is less long than it. Among equals the last, of shapes in the order in which ever fewer tiles have it."""
    tile, aspect = rule.tile, width / height
    shapes: dict[float, list[Sides]] = {}
    for count in range(rule.most_tiles, 0, -1):
        for columns in (each for each in range(1, count + 1) if count % each == 0):
            shapes.setdefault(columns / (count // columns), []).append((count // columns, columns))

    def shorter(grid: Sides) -> float:
        grow = min(grid[1] * tile / width, grid[0] * tile / height)
        if aspect == 1:
            return grow * height
        return math.floor(grow * width / aspect if aspect > 1 else grow * height * aspect)

    every = [grid for grids in shapes.values() for grid in grids]
    fitting = [grid for grid in every if grid[0] * tile >= height and grid[1] * tile >= width]
    if fitting:
        return max(reversed(fitting), key=shorter)
    if aspect >= 1:
        return shapes[max(shape for shape in shapes if shape <= aspect)][0]
    return shapes[min(shape for shape in shapes if shape > aspect)][0]


def _kept(rule: SizeRule, height: int, width: int, rows: int, columns: int) -> Sides:
    """Of what is shown of an image, in its own shape, in so many tiles."""
    tall, wide = (min(max(side, rule.tile), count * rule.tile) for side, count in ((height, rows), (width, columns)))
    by_width, by_height = wide / width, tall / height
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), tall)), wide
    return tall, max(1, min(math.floor(width * by_height), wide))


def _padded(rule: SizeRule, height: int, width: int) -> Sizes:
    """first: of what is shown of an image."""
    tile, unit = rule.tile, rule.multiple
    count = max(1, height // tile) * max(1, width // tile)
    scale = min(1.0, math.sqrt(rule.most_tiles / count), rule.longest_side / height, rule.longest_side / width)
    first = tall, wide = max(1, int(height * scale)), max(1, int(width * scale))
    return Sizes((-(-tall // unit) * unit, -(-wide // unit) * unit), None, first)


def _framed(rule: SizeRule, height: int, width: int) -> Sizes:
    """first: of what is in the middle."""
    side, scale = rule.longest_side, rule.longest_side / max(height, width)
    return Sizes((side, side), None, (max(round(height * scale), rule.least_side), max(round(width * scale), rule.least_side)))


def _bounded(rule: SizeRule, height: int, width: int) -> Sides:
    longest, aspect = rule.longest_side, width / height
    if width >= height and width > longest:
        height, width = int(longest / aspect), longest
    elif height > width and height > longest:
        height, width = longest, int(longest * aspect)
    return max(height, rule.least_side), max(width, rule.least_side)


def _in_slices(rule: SizeRule, height: int, width: int) -> Sizes:
    grid = _slices(rule, height, width)
    if grid is None:
        grows = rule.grows != "never" or height * width > rule.tile**2
        return Sizes(of_square(rule, rule.tile, height, width) if grows else in_units(rule, height, width))
    rows, columns = grid
    tall, wide = (max(count, round(side / count) * count) / count for side, count in ((height, rows), (width, columns)))
    piece = of_square(rule, rule.tile, tall, wide)
    return Sizes(of_square(rule, rule.tile, height, width), (piece[0] * rows, piece[1] * columns), grid=grid)


def of_square(rule: SizeRule, side: int, height: float, width: float) -> Sides:
    """Of about as many pixels as a square of this side, and this shape."""
    aspect = width / height
    tall = int(side / math.sqrt(aspect))
    return in_units(rule, tall, int(tall * aspect))


def in_units(rule: SizeRule, height: int, width: int) -> Sides:
    rows, columns = (max(1, round(side / rule.multiple)) for side in (height, width))
    return rows * rule.multiple, columns * rule.multiple


def _slices(rule: SizeRule, height: int, width: int) -> tuple[int, int] | None:
    """Lines and columns, as near to its own shape as may be, the more lines the better; None where it is not cut."""
    count = min(math.ceil(width * height / rule.tile**2), rule.most_tiles)
    if count <= 1:
        return None
    best, least, aspect = (1, 1), math.inf, math.log(width / height)
    for number in range(max(2, count - 1), min(count + 1, rule.most_tiles) + 1):
        for rows in (each for each in range(1, number + 1) if number % each == 0):
            off = abs(aspect - math.log(number // rows / rows))
            if off < least or (off == least and rows > best[0]):
                best, least = (rows, number // rows), off
    return best
