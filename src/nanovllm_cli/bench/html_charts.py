"""Charts as SVG: axes with round numbers, lines, marks with tooltips, bars. Text in, text out; every name is escaped.

Colours come from the page's style by class (s0, s1, …), shapes of marks tell series apart without colour. A mark is a
`<g class="mark">` that can be focused and has its values as a title.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nanovllm_cli.bench.axes import Scale, number, printable, scale
from nanovllm_cli.bench.charts import Axis, Bars, Chart, Point, Series

WIDTH, HEIGHT = 640, 350
LEFT, RIGHT, TOP, BOTTOM = 66, 28, 14, 50
NUM_COLORS = 8
BAR_HEIGHT, BAR_GAP, GROUP_GAP = 16, 3, 14


def svg(chart: Chart | Bars, name: str) -> str:
    """`chart` as an <svg> element whose ids begin with `name`."""
    return _bars(chart, name) if isinstance(chart, Bars) else _plot(chart, name)


def legend(chart: Chart | Bars) -> str:
    """What its colours and marks mean, as a list."""
    items = []
    for i, series in enumerate(chart.series):
        if isinstance(chart, Bars):
            swatch = f'<rect class="bar {_color(i)}" x="1" y="2" width="20" height="10" rx="2"/>'
        else:
            line = "" if series.style == "marks" else f'<path class="{_line_class(series, i)}" d="M0 7H22"/>'
            swatch = line + ("" if series.style == "limit" else _shape(i, 11.0, 7.0))
        items.append(f'<li><svg width="22" height="14" aria-hidden="true">{swatch}</svg> {text(series.name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def text(words: object) -> str:
    """`words` as text or in an attribute: escaped, and without control characters."""
    return escape(printable(str(words)))


def _plot(chart: Chart, name: str) -> str:
    points = [point for series in chart.series for point in series.points]
    x = scale([point.x for point in points], chart.x, LEFT, WIDTH - RIGHT, to_a_tick=False)
    y = scale([point.y + point.error for point in points], chart.y, HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y, chart.x, chart.y)]
    lines, marks = [], []
    for i, series in enumerate(chart.series):
        if series.style != "marks":
            lines.append(f'<path class="{_line_class(series, i)}" d="{_path(series, x, y)}"/>')
        marks += [_mark(chart, series, i, point, x, y) for point in _marked(series)]
    return _svg(chart, name, HEIGHT, [*parts, *lines, *marks])


def _bars(chart: Bars, name: str) -> str:
    per_label = [
        [(i, point) for i, series in enumerate(chart.series) for point in series.points if point.x == row]
        for row in range(len(chart.labels))
    ]
    height = TOP + BOTTOM + sum(GROUP_GAP + 16 + len(bars) * (BAR_HEIGHT + BAR_GAP) for bars in per_label)
    x = scale([bar.y + bar.error for bars in per_label for _, bar in bars], chart.x, 8, WIDTH - 70)
    parts = [_vertical(x, chart.x, TOP, height - BOTTOM)]
    top = float(TOP)
    for label, bars in zip(chart.labels, per_label, strict=True):
        top += GROUP_GAP / 2
        parts.append(f'<text class="label" x="8" y="{top + 11:g}">{text(label)}</text>')
        top += 16
        for i, bar in bars:
            parts.append(_bar(chart, label, i, bar, x, top))
            top += BAR_HEIGHT + BAR_GAP
        top += GROUP_GAP / 2
    return _svg(chart, name, height, parts)


def _bar(chart: Bars, label: str, i: int, bar: Point, x: Scale, top: float) -> str:
    left, right, middle = x.place(0.0), x.place(bar.y), top + BAR_HEIGHT / 2
    title = f"{chart.series[i].name}, {label}: {_value(bar, chart.x)}"
    error = ""
    if bar.error:
        low, high = x.place(max(bar.y - bar.error, 0.0)), x.place(bar.y + bar.error)
        error = f'<path class="error" d="M{low:.1f} {middle:g}H{high:.1f}"/>'
    end = max(right, x.place(bar.y + bar.error)) + 5
    box = f'x="{left:.1f}" y="{top:g}" width="{max(right - left, 1):.1f}" height="{BAR_HEIGHT}" rx="2"'
    value = f'<text class="value" x="{end:.1f}" y="{middle + 4:g}">{number(bar.y)}</text>'
    return _with_title(title, f'<rect class="bar {_color(i)}" {box}/>{error}{value}')


def _grid(x: Scale, y: Scale, x_axis: Axis, y_axis: Axis) -> str:
    lines = [_vertical(x, x_axis, TOP, HEIGHT - BOTTOM)]
    for tick in y.ticks:
        place = f"{y.place(tick):.1f}"
        lines.append(f'<path class="grid" d="M{LEFT} {place}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text class="tick y" x="{LEFT - 8}" y="{place}" dy="4">{number(tick)}</text>')
    lines.append(f'<text class="axis" transform="translate(14 {y.middle:g}) rotate(-90)">{text(y_axis.label)}</text>')
    return "".join(lines)


def _vertical(x: Scale, axis: Axis, top: float, bottom: float) -> str:
    lines = []
    for tick in x.ticks:
        place = f"{x.place(tick):.1f}"
        lines.append(f'<path class="grid" d="M{place} {top:g}V{bottom:g}"/>')
        lines.append(f'<text class="tick" x="{place}" y="{bottom + 17:g}">{number(tick)}</text>')
    lines.append(f'<text class="axis" x="{x.middle:.1f}" y="{bottom + 38:g}">{text(axis.label)}</text>')
    return "".join(lines)


def _path(series: Series, x: Scale, y: Scale) -> str:
    """A polyline; of a distribution, stairs that go up at each sample."""
    places = [(x.place(point.x), y.place(point.y)) for point in series.points]
    if series.style == "steps":
        begin = y.place(0.0)
        return f"M{places[0][0]:.1f} {begin:.1f}" + "".join(f"H{px:.1f}V{py:.1f}" for px, py in places)
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)


def _marked(series: Series) -> list[Point]:
    if series.style == "limit":
        return []
    return [point for point in series.points if point.note] if series.style == "steps" else list(series.points)


def _mark(chart: Chart, series: Series, i: int, point: Point, x: Scale, y: Scale) -> str:
    px, py = x.place(point.x), y.place(point.y)
    told = [series.name, point.note, f"{number(point.x)} {chart.x.unit}".strip(), _value(point, chart.y)]
    title = ", ".join(word for word in told if word)
    error = ""
    if point.error:
        low, high = y.place(max(point.y - point.error, 0.0)), y.place(point.y + point.error)
        error = f'<path class="error" d="M{px:.1f} {low:.1f}V{high:.1f}M{px - 4:.1f} {low:.1f}h8M{px - 4:.1f} {high:.1f}h8"/>'
    return _with_title(title, f'{error}<circle class="hit" cx="{px:.1f}" cy="{py:.1f}" r="11"/>{_shape(i, px, py)}')


def _with_title(title: str, inside: str) -> str:
    words = text(title)
    return f'<g class="mark" tabindex="0" role="img" aria-label="{words}"><title>{words}</title>{inside}</g>'


def _shape(i: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond; the colour by class."""
    color = _color(i)
    if i % 4 == 0:
        return f'<circle class="shape {color}" cx="{x:.1f}" cy="{y:.1f}" r="4.2"/>'
    corners = ("h7.4v7.4h-7.4z", "l4.8 8.4h-9.6z", "l5.2 5.2l-5.2 5.2l-5.2 -5.2z")[i % 4 - 1]
    begin = ((x - 3.7, y - 3.7), (x, y - 5.2), (x, y - 5.2))[i % 4 - 1]
    return f'<path class="shape {color}" d="M{begin[0]:.1f} {begin[1]:.1f}{corners}"/>'


def _value(point: Point, axis: Axis) -> str:
    error = f" ± {number(point.error)}" if point.error else ""
    return f"{number(point.y)}{error} {axis.unit}".strip()


def _line_class(series: Series, i: int) -> str:
    return "limit" if series.style == "limit" else f"line {_color(i)}"


def _color(i: int) -> str:
    return f"s{i % NUM_COLORS}"


def _svg(chart: Chart | Bars, name: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="group" aria-labelledby="{name}-title {name}-about">'
        f'<title id="{name}-title">{text(chart.title)}</title><desc id="{name}-about">{text(chart.about)}</desc>'
        f"{''.join(parts)}</svg>"
    )
