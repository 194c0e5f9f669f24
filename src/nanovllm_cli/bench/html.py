"""The report: one HTML file with everything in it. It asks the network for nothing and says so (Content-Security-Policy), runs
one small script whose hash it names, and shows all it shows without that script, too.

What results say (names of models, settings) is untrusted: it is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from nanovllm_cli.bench.axes import number
from nanovllm_cli.bench.charts import Bars, Chart, Sources, charts_of, named
from nanovllm_cli.bench.compare import Comparison
from nanovllm_cli.bench.html_charts import legend, svg, text
from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.record import Record, Result, Summary
from nanovllm_cli.bench.settings import short_model
from nanovllm_cli.cli.files import write_whole

MACHINE_NAMES = {
    "cpu": "processor", "gpu": "GPU", "driver": "driver", "processors": "processors used", "memory_bytes": "memory",
    "system": "system", "python": "Python", "torch": "torch", "version": "nanovllm", "commit": "commit",
    "commit_number": "commit number", "command": "command",
}  # fmt: skip

IN_BYTES = ("peak_memory", "model_size", "kv_cache")
BAD_ROW = '<tr class="bad">'

Cells = Sequence[object]


def write_report(path: str | Path, results: Sequence[Result], machine: Machine) -> None:
    """Writes the report of a run on `machine`. Raises OutputError."""
    write_whole(Path(path), page("nanovllm bench", {"": results}, [machine]))


def write_comparison(path: str | Path, sources: Sources, comparison: Comparison) -> None:
    """Writes the report of results from several files, by the files' names. Raises OutputError."""
    machines = [result.machine for results in sources.values() for result in results]
    write_whole(Path(path), page("nanovllm bench compare", sources, machines, comparison))


def page(title: str, sources: Sources, machines: Iterable[Machine], comparison: Comparison | None = None) -> str:
    """The whole document."""
    assets = files("nanovllm_cli") / "assets" / "report"
    style, script = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    results = [result for found in sources.values() for result in found]
    models = dict.fromkeys(short_model(each) if isinstance(each, Record) else each.model for each in results)
    heading = ", ".join(model for model in models if model)
    charts = [_figure(chart, f"chart{i}") for i, chart in enumerate(charts_of(sources))]
    parts = [
        f"<header><h1>{text(heading or title)}</h1>"
        f'<p class="when">{text(title)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p></header>',
        "" if comparison is None else _compared(comparison),
        f'<section class="charts" aria-label="charts">{"".join(charts)}</section>' if charts else "",
        _records(sources),
        _summaries(sources),
        _machines(machines),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}: {text(heading)}</title>\n<style>{style}</style>\n</head>\n"
        f'<body>\n<main>\n{"".join(parts)}\n</main>\n<div id="tip" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _figure(chart: Chart | Bars, name: str) -> str:
    several = len(chart.series) > 1 or isinstance(chart, Chart)
    return (
        f"<figure><figcaption><h2>{text(chart.title)}</h2><p>{text(chart.about)}</p></figcaption>"
        f'{legend(chart) if several else ""}<div class="wide">{svg(chart, name)}</div>'
        f"<details><summary>The numbers</summary>{_points(chart)}</details></figure>"
    )


def _points(chart: Chart | Bars) -> str:
    """A chart's values, for who can't see it; of a distribution those that are marked."""
    y = chart.x if isinstance(chart, Bars) else chart.y
    rows: list[Cells] = []
    for series in chart.series:
        for point in series.points:
            if series.style == "steps" and not point.note:
                continue
            x = chart.labels[int(point.x)] if isinstance(chart, Bars) else number(point.x)
            rows.append((series.name, point.note, x, number(point.y), number(point.error) if point.error else ""))
    first = "test" if isinstance(chart, Bars) else chart.x.label
    return _table(("series", "", first, y.label, "±"), rows, num_words=2)


def _compared(comparison: Comparison) -> str:
    rows = [
        (row.test, row.metric, row.file if len(comparison.files) > 1 else "", number(row.before), number(row.after),
         f"{row.ratio:.3f}", "" if row.error is None else f"{row.error:.3f}")
        for row in comparison.rows
    ]  # fmt: skip
    marked = {i for i, row in enumerate(comparison.rows) if row.fails}
    after = comparison.files[0] if len(comparison.files) == 1 else "there"
    head = ("test", "metric", "file", comparison.baseline, after, "ratio", "±")
    alone = [(file, ", ".join(tests)) for file, tests in comparison.alone.items()]
    differing = [(name, *values) for name, values in comparison.differing.items()]
    names = ("setting", comparison.baseline, *comparison.files)
    return (
        f"<section><h2>Comparison</h2><p>A ratio above 1 is better than {text(comparison.baseline)}.</p>"
        f"{_table(head, rows, num_words=3, marked=marked)}</section>"
        + (
            f"<section><h2>Only in one file</h2>{_table(('file', 'tests'), alone, num_words=2)}</section>"
            if alone
            else ""
        )
        + (f"<section><h2>What differs</h2>{_table(names, differing, num_words=9)}</section>" if differing else "")
    )


def _records(sources: Sources) -> str:
    rows: list[Cells] = [
        (
            source, short_model(each), each.quant or each.formats, each.backends, each.n_threads, each.test,
            f"{each.model_size / 2**30:.2f}", number(each.avg_ts), number(each.stddev_ts),
            *(number(value) if value else "" for value in (each.gb_s, 100 * each.limit_share, each.peak_memory / 2**30)),
        )
        for source, results in sources.items() for each in results if isinstance(each, Record)
    ]  # fmt: skip
    head = (
        "source", "model", "format", "backend", "threads", "test", "size GiB", "t/s", "±", "GB/s", "% of limit", "peak GiB",
    )  # fmt: skip
    return f"<section><h2>Tests</h2>{_table(head, rows, num_words=6)}</section>" if rows else ""


def _summaries(sources: Sources) -> str:
    """A row a metric, a column a run: runs have many metrics, and are few."""
    runs = named(sources, Summary)
    if not runs:
        return ""
    names = dict.fromkeys(name for _, _, run in runs for name in run.metrics)
    rows = [(name, *(_figure_of(name, run.metrics.get(name)) for _, _, run in runs)) for name in names]
    settings = dict.fromkeys(name for _, _, run in runs for name in run.settings)
    asked = [
        (name, *("" if run.settings.get(name) is None else run.settings[name] for _, _, run in runs))
        for name in settings
    ]
    titles = [name or f"{run.kind}, {run.model}" for name, _, run in runs]
    return (
        f"<section><h2>Runs</h2>{_table(('metric', *titles), rows, num_words=1)}</section>"
        f"<section><h2>What was asked for</h2>{_table(('setting', *titles), asked, num_words=1)}</section>"
    )


def _figure_of(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**30:.3f} GiB" if name in IN_BYTES else number(value)


def _machines(machines: Iterable[Machine]) -> str:
    """Each machine and command once; what is not known is left out."""
    sections = []
    for machine in dict.fromkeys(machines):
        values: Mapping[str, object] = {each.name: getattr(machine, each.name) for each in fields(machine)}
        shown = {name: value for name, value in values.items() if value}
        if "memory_bytes" in shown:
            shown["memory_bytes"] = f"{machine.memory_bytes / 2**30:.1f} GiB"
        terms = [f"<dt>{text(MACHINE_NAMES[name])}</dt><dd>{text(value)}</dd>" for name, value in shown.items()]
        if terms:
            sections.append(f'<dl class="machine">{"".join(terms)}</dl>')
    return f"<section><h2>Measured on</h2>{''.join(sections)}</section>" if sections else ""


def _table(head: Sequence[str], rows: Iterable[Cells], *, num_words: int, marked: Iterable[int] = ()) -> str:
    """The first `num_words` columns are words, the others numbers. Columns without any value are left out."""
    rows, marks = list(rows), set(marked)
    kept = [i for i in range(len(head)) if any(str(row[i]) for row in rows)]
    kinds = ["" if i < num_words else ' class="n"' for i in range(len(head))]
    titles = "".join(f'<th scope="col"{kinds[i]}>{text(head[i])}</th>' for i in kept)
    lines = [
        (BAD_ROW if i in marks else "<tr>") + "".join(f"<td{kinds[j]}>{text(row[j])}</td>" for j in kept) + "</tr>"
        for i, row in enumerate(rows)
    ]
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
