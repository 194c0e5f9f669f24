"""The charts of a report in a terminal: plotext draws the axes and the lines, letters tell series apart, so that no colour is
needed. Text out, without one escape sequence."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from nanovllm_cli.bench.axes import Scale, number, printable, scale
from nanovllm_cli.bench.charts import Bars, Chart, Series, charts_of
from nanovllm_cli.bench.record import Result

HEIGHT = 18
MIN_WIDTH, MAX_WIDTH = 40, 120
_EIGHTHS = " ▏▎▍▌▋▊▉"
_DOT = "·"


def draw(results: Sequence[Result], width: int) -> str:
    """All charts of `results`, below one another, at most `width` columns wide (at least 40); only a name may be longer."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    charts = charts_of({"": results})
    return "\n".join(_bars(chart, width) if isinstance(chart, Bars) else _plot(chart, width) for chart in charts)


def _plot(chart: Chart, width: int) -> str:
    import plotext

    points = [point for series in chart.series for point in series.points]
    x = scale([point.x for point in points], chart.x, 0.0, 1.0, to_a_tick=False)
    y = scale([point.y for point in points], chart.y, 0.0, 1.0)
    plotext.terminal.limit(False, False)  # the width is given; which terminal plotext finds is not its business
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, HEIGHT)
    for axis, each in (("x", x), ("y", y)):
        ruler = figure.ruler(axis)
        ruler.lim(0.0, 1.0)
        ruler.ticks([each.place(tick) for tick in each.ticks], [number(tick) for tick in each.ticks])
    figure.label(printable(chart.x.label), "x")
    lines = [series for series in chart.series if series.style != "marks"]
    for series in lines:
        figure.draw(_signal(figure, series, x, y, "-" if series.style == "limit" else _DOT).lines(True))
    for i, series in enumerate(chart.series):
        marked = [point for point in series.points if series.style != "steps" or point.note]
        if series.style != "limit":
            figure.draw(_signal(figure, Series(series.name, tuple(marked)), x, y, _letter(i)))
    drawing = figure.build().string(True)
    legend = [
        f"  {'-' if series.style == 'limit' else _letter(i)}  {printable(series.name)}"
        for i, series in enumerate(chart.series)
    ]
    return "\n".join([f"{chart.title}: {chart.y.label}", *drawing.rstrip("\n").split("\n"), *legend, ""])


def _signal(figure: Any, series: Series, x: Scale, y: Scale, marker: str) -> Any:
    places = [(x.place(point.x), y.place(point.y)) for point in series.points]
    return figure.signal([place[0] for place in places], [place[1] for place in places], marker=marker)


def _bars(chart: Bars, width: int) -> str:
    rows = [
        (label, series.name, point)
        for i, label in enumerate(chart.labels)
        for series in chart.series
        for point in series.points
        if point.x == i
    ]
    several = len(chart.series) > 1
    names = [printable(f"{label}, {name}" if several else label)[: width // 2] for label, name, _ in rows]
    values = [number(point.y) + (f" ± {number(point.error)}" if point.error else "") for _, _, point in rows]
    room = width - max(map(len, names)) - max(map(len, values)) - 4
    most = max(point.y for _, _, point in rows)
    lines = [
        f"  {name.ljust(max(map(len, names)))} {_bar(room * point.y / most if most > 0 else 0.0)} {value}"
        for name, value, (_, _, point) in zip(names, values, rows, strict=True)
    ]
    return "\n".join([f"{chart.title}: {chart.x.label}", *lines, ""])


def _bar(length: float) -> str:
    """So many columns, to an eighth."""
    whole, eighths = divmod(round(max(length, 0.0) * 8), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")


def _letter(i: int) -> str:
    return ascii_uppercase[i % len(ascii_uppercase)]
