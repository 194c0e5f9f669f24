"""Which pictures a set of results makes, as values: titles, axes, points. Drawn by `plots.py` (a terminal) and
`html_charts.py` (SVG); neither decides anything about results.

    speed against depth               where records were measured at several depths; bars of all tests otherwise
    throughput against concurrency    records of several sequences at once; runs with many requests
    time to first token under load    runs against one server at several rates
    distributions                     each latency of each run, as the share of samples at or below a time
    memory                            weights, and the peak
    roofline                          arithmetic reached against arithmetic a byte, below the machine's limits
    bandwidth                         memory read a second against bytes a token, below the machine's limit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from nanovllm_cli.bench.record import Record, Result, Summary
from nanovllm_cli.bench.settings import distinguishing, said, settings_of, short_model

MAX_SAMPLES = 200  # points of a distribution's line: more than a screen shows

Key = TypeVar("Key")
R = TypeVar("R", Record, Summary)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Axis:
    """unit: behind the values of a tooltip; the label names it too. log: the base of a logarithmic scale, 0 for none."""

    label: str
    unit: str = ""
    log: Literal[0, 2, 10] = 0


@dataclass(frozen=True, slots=True)
class Point:
    """error: one standard deviation of y, or 0. note: more about it, for a tooltip."""

    x: float
    y: float
    error: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """line: points joined. marks: points alone. steps: a distribution's line, of which only those with a note are marked.
    limit: a line that nothing crosses, without marks."""

    name: str
    points: tuple[Point, ...]
    style: Literal["line", "marks", "steps", "limit"] = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """Points over two axes. about: what it shows, in a sentence."""

    title: str
    about: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar for each label and series. Series are Points whose x is the index of the label."""

    title: str
    about: str
    x: Axis
    labels: tuple[str, ...]
    series: tuple[Series, ...]


Sources = Mapping[str, Sequence[Result]]
"""Results by the name of where they are from; the only source may have no name."""


def charts_of(sources: Sources) -> list[Chart | Bars]:
    """All that these results have points for, in the order of a report."""
    records = named(sources, Record)
    summaries = named(sources, Summary)
    made = [
        *_speed(records), *_concurrency(records, summaries), *_under_load(summaries), *_distributions(summaries),
        *_memory(records, summaries), *_roofline(records), *_bandwidth(records),
    ]  # fmt: skip
    return [chart for chart in made if any(series.points for series in chart.series)]


class Named(NamedTuple, Generic[R]):
    """A result, and the words that tell its settings from the others'. line: what runs that belong on one line of a chart have in
    common: where they are from, and the model."""

    name: str
    line: str
    result: R


def named(sources: Sources, kind: type[R]) -> list[Named[R]]:
    """Results of one kind with names of their own: the source, and their settings where those differ."""
    chosen = {source: [each for each in found if isinstance(each, kind)] for source, found in sources.items()}
    names = distinguishing(chosen.values())
    return [
        Named(_join(source, *said(settings_of(result), names)), _join(source, _model(result)), result)
        for source, found in chosen.items()
        for result in found
    ]


def _model(result: Result) -> str:
    return short_model(result) if isinstance(result, Record) else result.model or result.kind


def _speed(records: Sequence[Named[Record]]) -> list[Chart | Bars]:
    single = [each for each in records if each.result.n_parallel == 1]
    by_test = _split(single, lambda each: _test(each.result, "depth"))
    swept = {test for test, found in by_test.items() if len({each.result.n_depth for each in found}) > 1}
    against = _split(
        [each for each in single if _test(each.result, "depth") in swept],
        lambda each: (_test(each.result, "depth"), each.name),
    )
    made: list[Chart | Bars] = []
    for title, generates in (("Prompt speed against depth", False), ("Generation speed against depth", True)):
        series = [
            Series(_join(test, name), _points(found, lambda record: record.n_depth))
            for (test, name), found in against.items()
            if ("tg" in test) is generates
        ]
        made.append(
            Chart(
                title, "How fast tokens are processed after so many others are in the context.",
                Axis("depth (tokens in the context)", "tokens"), Axis("tokens a second", "t/s"), tuple(series),
            )
        )  # fmt: skip
    flat = [each for each in single if _test(each.result, "depth") not in swept]
    return [*made, *_speed_bars(flat)]


def _speed_bars(records: Sequence[Named[Record]]) -> list[Bars]:
    made = []
    for title, generates in (("Prompt speed", False), ("Generation speed", True)):
        chosen = [each for each in records if bool(each.result.n_gen) is generates]
        labels = tuple(dict.fromkeys(each.result.test for each in chosen))

        def point(record: Record, labels: tuple[str, ...] = labels) -> Point:
            return Point(labels.index(record.test), record.avg_ts, record.stddev_ts)

        series = _by_name(chosen, point, "line", "speed")
        made.append(Bars(title, "Speed of each test.", Axis("tokens a second", "t/s"), labels, tuple(series)))
    return made


def _concurrency(records: Sequence[Named[Record]], runs: Sequence[Named[Summary]]) -> list[Chart]:
    by_test = _split(records, lambda each: _test(each.result, "parallel"))
    swept = {test for test, found in by_test.items() if len({each.result.n_parallel for each in found}) > 1}
    groups = _split(records, lambda each: (_test(each.result, "parallel"), each.name))
    series = [
        Series(_join(test, name), _points(found, lambda record: record.n_parallel))
        for (test, name), found in groups.items()
        if test in swept
    ]
    for line, found in _split(runs, lambda each: each.line).items():
        points = _of_runs(found, "max_concurrent_requests", "output_throughput")
        if len(runs) > 1 and points:
            series.append(Series(line, points))
    return [
        Chart(
            "Throughput against concurrency", "Tokens of all answers together, against how many are made at once.",
            Axis("sequences at once", "at once", log=2), Axis("output tokens a second", "t/s"), tuple(series),
        )
    ]  # fmt: skip


def _under_load(runs: Sequence[Named[Summary]]) -> list[Chart]:
    """Where one server was asked at several rates."""
    lines = _split([each for each in runs if each.result.kind == "serve"], lambda each: each.line)
    series = [
        Series(_join(line if len(lines) > 1 else "", title), points)
        for line, found in lines.items()
        for metric, title in (("median_ttft_ms", "median"), ("p99_ttft_ms", "p99"))
        if len(points := _of_runs(found, "request_throughput", metric)) > 1
    ]
    return [
        Chart(
            "Time to first token under load", "How long the first token takes, against how many requests are answered.",
            Axis("requests answered a second", "requests/s"), Axis("milliseconds", "ms"), tuple(series),
        )
    ]  # fmt: skip


def _distributions(runs: Sequence[Named[Summary]]) -> list[Chart]:
    made = []
    for key, title in (
        ("ttft_ms", "Time to first token"), ("tpot_ms", "Time per further token"), ("itl_ms", "Time between tokens"),
        ("e2el_ms", "Time to the whole answer"), ("latency_ms", "Time to a whole batch"),
    ):  # fmt: skip
        series = tuple(
            Series(name or "requests", _steps(run.series[key]), "steps") for name, _, run in runs if run.series.get(key)
        )
        made.append(
            Chart(
                title, "The share of samples that took no longer than so many milliseconds.",
                Axis("milliseconds", "ms"), Axis("share of samples (%)", "%"), series,
            )
        )  # fmt: skip
    return made


def _memory(records: Sequence[Named[Record]], runs: Sequence[Named[Summary]]) -> list[Bars]:
    bars: list[tuple[str, float, float]] = [
        (name or short_model(found[0].result), found[0].result.model_size, max(each.result.peak_memory for each in found))
        for name, found in _split(records, lambda each: each.name).items()
    ]
    bars += [
        (name or run.model, run.metrics.get("model_size", 0.0), run.metrics["peak_memory"])
        for name, _, run in runs
        if run.metrics.get("peak_memory")
    ]
    series = tuple(
        Series(kind, tuple(Point(i, value / 2**30) for i, value in enumerate(values) if value))
        for kind, values in (("weights", [weights for _, weights, _ in bars]), ("peak", [peak for _, _, peak in bars]))
    )
    about = "What the weights take, and the most that was in use: of the process on a CPU, of the device on a GPU."
    return [Bars("Memory", about, Axis("GiB", "GiB"), tuple(label for label, _, _ in bars), series)]


def _roofline(records: Sequence[Named[Record]]) -> list[Chart]:
    known = [each for each in records if each.result.bytes_per_token and each.result.flops_per_token]
    known = [each for each in known if each.result.roofline_gb_s and each.result.roofline_gflops]
    if not known:
        return []

    def intensity(record: Record) -> float:
        return record.flops_per_token / record.bytes_per_token

    def point(record: Record) -> Point:
        note = f"{record.test}: {record.limit_share:.0%} of the limit ({record.limit})"
        return Point(intensity(record), record.gflops, note=note)

    intensities = [intensity(each.result) for each in known]
    series = _by_name(known, point, "marks", "tests")
    for bandwidth, compute in sorted({(each.result.roofline_gb_s, each.result.roofline_gflops) for each in known}):
        ridge = compute / bandwidth
        low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
        corners = (Point(low, low * bandwidth), Point(ridge, compute), Point(high, compute))
        series.append(Series(f"limit: {bandwidth:,.0f} GB/s, {compute:,.0f} GFLOP/s", corners, "limit"))
    return [
        Chart(
            "Roofline", "Arithmetic reached, against the arithmetic that each byte of memory is used for.",
            Axis("FLOP a byte", "FLOP/B", log=10), Axis("GFLOP a second", "GFLOP/s", log=10), tuple(series),
        )
    ]  # fmt: skip


def _bandwidth(records: Sequence[Named[Record]]) -> list[Chart]:
    """Of generation by one sequence, where the weights are read for each token."""
    single = [each for each in records if each.result.n_parallel == 1 and not each.result.n_prompt]
    known = [each for each in single if each.result.bytes_per_token]
    if not known:
        return []

    def point(record: Record) -> Point:
        return Point(record.bytes_per_token / 2**20, record.gb_s, note=record.test)

    series = _by_name(known, point, "marks", "tests")
    most = max(point.x for each in series for point in each.points) * 1.1
    series += [
        Series(f"limit: {limit:,.1f} GB/s", (Point(0.0, limit), Point(most, limit)), "limit")
        for limit in sorted({each.result.roofline_gb_s for each in known if each.result.roofline_gb_s})
    ]
    return [
        Chart(
            "Memory read for each token", "Bandwidth reached, against what must be read for one token.",
            Axis("MiB a token", "MiB"), Axis("GB a second", "GB/s"), tuple(series),
        )
    ]  # fmt: skip


def _by_name(
    records: Iterable[Named[Record]], point: Callable[[Record], Point], style: Literal["line", "marks"], unnamed: str
) -> list[Series]:
    """A series for each name."""
    return [
        Series(name or unnamed, tuple(point(each.result) for each in found), style)
        for name, found in _split(records, lambda each: each.name).items()
    ]


def _of_runs(found: Iterable[Named[Summary]], x: str, y: str) -> tuple[Point, ...]:
    """One metric against another, of the runs that have both."""
    points = [
        Point(each.result.metrics[x], each.result.metrics[y], note=each.name)
        for each in found
        if each.result.metrics.get(x) and y in each.result.metrics
    ]
    return tuple(sorted(points, key=lambda point: point.x))


def _points(found: Iterable[Named[Record]], x: Callable[[Record], int]) -> tuple[Point, ...]:
    points = [Point(x(each.result), each.result.avg_ts, each.result.stddev_ts) for each in found]
    return tuple(sorted(points, key=lambda point: point.x))


def _steps(samples: Sequence[float]) -> tuple[Point, ...]:
    """The empirical distribution: all samples, or so many quantiles of it; the median, p90 and p99 are noted."""
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) > MAX_SAMPLES:
        keep = np.unique(np.linspace(0, len(ordered) - 1, MAX_SAMPLES).astype(int))
        ordered, shares = ordered[keep], shares[keep]
    marked = {
        int(np.searchsorted(shares, p / 100 - 1e-9)): name for p, name in ((99, "p99"), (90, "p90"), (50, "median"))
    }
    return tuple(
        Point(float(x), float(100 * share), note=marked.get(i, ""))
        for i, (x, share) in enumerate(zip(ordered, shares, strict=True))
    )


def _test(record: Record, without: Literal["depth", "parallel"]) -> str:
    """A record's test but for its depth, or for how many ran at once."""
    if without == "depth":
        return record.test.partition(" @ ")[0]
    return record.test.replace(f" x{record.n_parallel}", "")


def _split(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    groups: dict[Key, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def _join(*words: str) -> str:
    return ", ".join(word for word in words if word)
