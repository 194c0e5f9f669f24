"""Two or more files of results side by side: which tests are the same, and how much faster each one became.

A ratio above 1 is always better: after / before for speeds, before / after for latencies. Tests match by what they are
(prompt, generated and parallel tokens, depth) and by those settings that take several values within one file; settings that
only differ between the files (another backend, another number of threads) are what is compared, and are listed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nanovllm_cli.bench.charts import Sources
from nanovllm_cli.bench.record import STANDARD_INPUT, Record, Result, Summary, read_results
from nanovllm_cli.bench.settings import distinguishing, said, settings_of
from nanovllm_cli.errors import UsageError

SPEED = "t/s"
RATES = (
    "request_throughput", "request_goodput", "input_throughput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s",
)  # fmt: skip
LATENCIES = ("ttft", "tpot", "itl", "e2el", "latency")

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of one test. file: which of the later files it is. error: one standard error of the ratio, from the repetitions
    of both sides; None where one has a single one."""

    test: str
    metric: str
    file: str
    before: float
    after: float
    ratio: float
    error: float | None
    fails: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """baseline: the file that the others are held against. alone: tests that only one side has, by that side's file.
    differing: a setting, then its values in each file."""

    baseline: str
    files: tuple[str, ...]
    rows: tuple[Row, ...]
    alone: Mapping[str, tuple[str, ...]]
    differing: Mapping[str, tuple[str, ...]]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.fails]


class _Value(NamedTuple):
    """A metric's mean, and the standard error of that, relative to it; None where there is only one repetition."""

    mean: float
    error: float | None


def read_sources(paths: Sequence[str]) -> dict[str, list[Result]]:
    """The results of each file by the shortest name that tells it from the others; one may be -, standard input. Raises
    UsageError."""
    if len(paths) < 2:
        raise UsageError("a comparison needs two files", "nanovllm bench compare before.json after.json")
    stems = ["stdin" if path == STANDARD_INPUT else Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(paths) else list(paths)
    if len(set(names)) < len(paths):
        raise UsageError("the same file twice", "a file is not compared with itself")
    return {name: read_results(path) for name, path in zip(names, paths, strict=True)}


def compare(sources: Sources, *, fail_under: float | None = None, metrics: Iterable[str] = ()) -> Comparison:
    """The first source against each of the others. metrics: only those of these names. A row fails where its ratio is below
    `fail_under`. Raises UsageError where there is nothing to compare."""
    if fail_under is not None and not 0 < fail_under < math.inf:
        raise UsageError(f"--fail-under must be a number above 0, not {fail_under:g}", "it is a ratio such as 0.95")
    wanted = set(metrics)
    baseline, *files = sources
    names = _key_names(sources)
    keyed = {source: _by_key(found, names) for source, found in sources.items()}
    rows: list[Row] = []
    alone: dict[str, dict[str, None]] = {}
    for file in files:
        for one, other in ((baseline, file), (file, baseline)):
            missing = [key for key in keyed[one] if key not in keyed[other]]
            alone.setdefault(one, {}).update(dict.fromkeys(_said(key) for key in missing))
        for key, before in keyed[baseline].items():
            rows += _rows(key, file, before, keyed[file].get(key, {}), fail_under, wanted)
    if not rows:
        known = sorted({metric for found in keyed.values() for values in found.values() for metric in values})
        what = f" of {', '.join(sorted(wanted))}" if wanted else ""
        raise UsageError(f"the files have no test{what} in common", f"metrics there are: {', '.join(known) or 'none'}")
    return Comparison(
        baseline,
        tuple(files),
        tuple(rows),
        {name: tuple(tests) for name, tests in alone.items() if tests},
        _differing(sources),
    )


def _rows(
    key: Key,
    file: str,
    before: Mapping[str, _Value],
    after: Mapping[str, _Value],
    least: float | None,
    wanted: set[str],
) -> Iterable[Row]:
    for metric, old in before.items():
        new = after.get(metric)
        if new is None or (wanted and metric not in wanted) or old.mean <= 0 or new.mean < 0:
            continue
        is_latency = metric.endswith("_ms")
        if is_latency and new.mean == 0:  # nothing was measured; a rate of 0 is all that was lost
            continue
        ratio = old.mean / new.mean if is_latency else new.mean / old.mean
        error = None if old.error is None or new.error is None else ratio * math.hypot(old.error, new.error)
        fails = least is not None and ratio < least
        yield Row(_said(key), metric, file, old.mean, new.mean, ratio, error, fails)


def _by_key(results: Sequence[Result], names: Sequence[str]) -> dict[Key, dict[str, _Value]]:
    """What was measured, by test. A test that is there twice is one with the repetitions of both."""
    groups: dict[Key, list[Result]] = {}
    for result in results:
        base = result.test if isinstance(result, Record) else result.kind
        settings = settings_of(result)
        key = (base, *said(settings, [name for name in names if name in settings and name != "kind"]))
        groups.setdefault(key, []).append(result)
    return {key: _values(group) for key, group in groups.items()}


def _values(results: Sequence[Result]) -> dict[str, _Value]:
    """What of a test can be better or worse. A mean of a single run has an error where the run tells its samples."""
    speeds = [speed for each in results if isinstance(each, Record) for speed in each.samples_ts]
    runs = [each for each in results if isinstance(each, Summary)]
    values = {SPEED: _mean(speeds)} if speeds else {}
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        kind, _, rest = name.partition("_")
        is_latency = rest.endswith("_ms") and rest.removesuffix("_ms") in LATENCIES and kind != "std"
        if name in RATES or is_latency:
            values[name] = _mean([run.metrics[name] for run in runs if name in run.metrics])
        if is_latency and kind == "mean" and len(runs) == 1:
            values[name] = values[name]._replace(error=_mean(runs[0].series.get(rest, ())).error)
    return values


def _mean(samples: Sequence[float]) -> _Value:
    if not samples:
        return _Value(0.0, None)
    mean = statistics.fmean(samples)
    error = statistics.stdev(samples) / math.sqrt(len(samples)) / mean if len(samples) > 1 and mean > 0 else None
    return _Value(mean, error)


def _key_names(sources: Sources) -> list[str]:
    """The settings that tell the tests of one file apart."""
    kinds = (Record, Summary)
    return [
        name
        for kind in kinds
        for name in distinguishing([each for each in found if isinstance(each, kind)] for found in sources.values())
    ]


def _differing(sources: Sources) -> dict[str, tuple[str, ...]]:
    """What was not the same everywhere, as a reader must know."""
    values = {source: _settings_of(results) for source, results in sources.items()}
    names = dict.fromkeys(name for found in values.values() for name in found)
    told = {
        name: tuple(", ".join(value or "-" for value in found.get(name, {"-": None})) for found in values.values())
        for name in names
    }
    return {name: each for name, each in told.items() if len(set(each)) > 1}


def _settings_of(results: Sequence[Result]) -> dict[str, dict[str, None]]:
    """Each setting with its values, in the order in which they come."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for name, value in settings_of(result).items():
            found.setdefault(name, {})[str(value)] = None
    return found


def _said(key: Key) -> str:
    return ", ".join(key)
