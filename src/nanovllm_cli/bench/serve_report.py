"""Runs and comparisons as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.bench.axes import number, printable
from nanovllm_cli.bench.compare import Comparison
from nanovllm_cli.bench.record import Summary

# What a run is summed up by, in the order in which vLLM prints it.
_FIGURES = {
    "completed": "successful requests",
    "failed": "failed requests",
    "duration": "duration (s)",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
    "request_throughput": "requests/s",
    "request_goodput": "good requests/s",
    "input_throughput": "input tokens/s",
    "output_throughput": "output tokens/s",
    "max_output_tokens_per_s": "peak output tokens/s",
    "total_token_throughput": "total tokens/s",
    "max_concurrent_requests": "peak concurrency",
    "prefix_hit_tokens": "input tokens from the prefix cache",
    "preemptions": "preemptions",
    "peak_memory": "peak memory (bytes)",
}
_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "between tokens",
    "e2el": "to the whole answer",
    "lateness": "client's lateness",
    "queueing": "waiting for a slot",
    "latency": "to the last token of a batch",
}


def run_table(summary: Summary, title: str) -> str:
    """The figures of a run, and its latencies in milliseconds."""
    metrics = summary.metrics
    figures = [(name, number(metrics[key])) for key, name in _FIGURES.items() if key in metrics]
    first = next((name for name in _LATENCIES if f"mean_{name}_ms" in metrics), "")
    kinds = [key.removesuffix(f"_{first}_ms") for key in metrics if first and key.endswith(f"_{first}_ms")]
    rows = [
        (title, *(number(metrics[f"{kind}_{name}_ms"]) for kind in kinds))
        for name, title in _LATENCIES.items()
        if f"mean_{name}_ms" in metrics
    ]
    latencies = "\n" + table(("latency (ms)", *kinds), rows) if rows and kinds else ""
    return table((title, ""), figures) + latencies


def serve_table(summary: Summary) -> str:
    """Of a run against a server."""
    settings = summary.settings
    rate, limit = settings["request_rate"], settings["max_concurrency"]
    title = f"{summary.model}, " + ("all at once" if rate == "inf" else f"{rate:g} requests/s")
    title += f", at most {limit} under way" if limit else ""
    return run_table(summary, title)


def comparison_table(comparison: Comparison) -> str:
    """A row for each metric of each test, then what only one side has, and what differs."""
    several = len(comparison.files) > 1
    rows = [
        (row.test, row.metric, *([row.file] if several else []), number(row.before), number(row.after),
         f"{row.ratio:.3f}" + ("" if row.error is None else f" ± {row.error:.3f}"))
        for row in comparison.rows
    ]  # fmt: skip
    head = (
        "test",
        "metric",
        *(["file"] if several else []),
        comparison.baseline,
        "there" if several else comparison.files[0],
    )
    parts = [table((*head, "ratio"), rows, num_words=3 if several else 2)]
    if comparison.alone:
        alone = [(file, ", ".join(tests)) for file, tests in comparison.alone.items()]
        parts.append("".join(f"- only in {printable(file)}: {printable(tests)}\n" for file, tests in alone))
    if comparison.differing:
        names = ("what differs", comparison.baseline, *comparison.files)
        parts.append(table(names, [(name, *each) for name, each in comparison.differing.items()], num_words=len(names)))
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int = 1) -> str:
    """A Markdown table whose first `num_words` columns stand on the left, the others on the right."""
    cells = [[_cell(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    sides = [str.ljust if i < num_words else str.rjust for i in range(len(head))]
    lines = [
        f"| {' | '.join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True))} |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i < num_words else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:], ""])


def _cell(text: str) -> str:
    """One line without control characters, and no end of the cell before its end."""
    return printable(text).replace("|", "\\|")
