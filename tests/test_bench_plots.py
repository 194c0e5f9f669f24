"""Charts in a terminal: where the letters of the points stand, and that nothing but text comes out."""

from __future__ import annotations

import itertools

import pytest

from bench_results import record, run, sweep
from nanovllm_cli.bench.plots import draw


def places(drawing: str, letter: str) -> list[tuple[int, int]]:
    """Column and row of each mark of a series; rows count from the top of the drawing. The legend is left out."""
    lines = [line for line in drawing.split("\n") if "│" in line or "┤" in line]
    return [(x, y) for y, line in enumerate(lines) for x, mark in enumerate(line) if mark == letter]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_points_stand_where_their_numbers_are(width: int) -> None:
    drawing = draw(
        [
            record(speed, n_depth=depth, peak_memory=0, model_size=0)
            for depth, speed in ((0, 40.0), (500, 20.0), (1000, 0.4))
        ],
        width,
    )
    found = sorted(places(drawing, "A"))
    assert len(found) == 3
    (x0, y0), (x1, y1), (x2, y2) = found
    assert abs((x1 - x0) - (x2 - x1)) <= 1
    assert abs((y1 - y0) - (y2 - y1)) <= 1
    assert y0 < y1 < y2
    lines = drawing.split("\n")
    assert {len(line) for line in lines if "┤" in line or "┌" in line} == {width}
    assert lines[0] == "Generation speed against depth: tokens a second"
    assert "  A  tg128" in lines


def test_doubling_is_the_same_way_on_a_logarithmic_axis() -> None:
    drawing = draw([record(10.0 * count, n_parallel=count, peak_memory=0, model_size=0) for count in (1, 2, 4, 8)], 80)
    concurrency = drawing[drawing.index("Throughput against") :]
    columns = sorted(x for x, _ in places(concurrency, "A"))
    steps = [after - before for before, after in itertools.pairwise(columns)]
    assert len(steps) == 3
    assert max(steps) - min(steps) <= 1


def test_bars_are_as_long_as_their_numbers() -> None:
    drawing = draw(
        [record(40.0, 44.0, model_size=0, peak_memory=0), record(10.5, gen=64, model_size=0, peak_memory=0)], 80
    )
    longest, shorter = (line for line in drawing.split("\n") if "█" in line)
    assert longest.startswith("  tg128 █")
    assert longest.endswith(" 42 ± 2.83")
    assert shorter.count("█") == longest.count("█") // 4
    assert len(longest) <= 80


def test_nothing_but_text_comes_out() -> None:
    results = [*sweep(), run(), record(5.0, model_type="evil\x1b[31m\x07\n name", formats="\x9b5m")]
    drawing = draw(results, 80)
    assert all(character.isprintable() or character == "\n" for character in drawing)
    assert "Roofline" in drawing
    assert draw(results, 80) == drawing  # one drawing leaves nothing for the next


def test_nothing_to_draw_is_nothing() -> None:
    assert draw([], 80) == ""
