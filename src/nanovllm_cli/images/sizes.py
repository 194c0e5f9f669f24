"""How large an image is made before a tower reads it. The rules are those that the models were trained with."""

from __future__ import annotations

import math

from nanovllm_cli.vision_spec import SizeRule, VisionSpec

MAX_ASPECT = 200  # Qwen2-VL's bound on how much longer one side is than the other


def fitted(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    """The height and width that an image of this height and width is made, in pixels."""
    if rule.kind == "square":
        return rule.longest_side, rule.longest_side
    unit = rule.multiple
    rows, columns = {"area": _by_area, "longest": _by_longest, "largest": _by_largest}[rule.kind](rule, height, width)
    return rows * unit, columns * unit


def most_rows(spec: VisionSpec) -> int:
    """No image of an aspect up to MAX_ASPECT becomes more rows of the tower's output than this."""
    rule = spec.size
    if rule.kind == "square":
        pixels = rule.longest_side**2
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
    return pixels // spec.tower.cell**2


def _by_area(rule: SizeRule, height: int, width: int) -> tuple[int, int]:
    unit = rule.multiple
    rows, columns = round(height / unit), round(width / unit)
    pixels = rows * columns * unit**2
    if pixels > rule.max_pixels:
        shrink = math.sqrt(height * width / rule.max_pixels)
        return max(1, math.floor(height / shrink / unit)), max(1, math.floor(width / shrink / unit))
    if pixels < max(1, rule.min_pixels):
        grow = math.sqrt(max(1, rule.min_pixels) / (height * width))
        return math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows, columns


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
