"""`nanovllm bench compare`: results side by side. The work is in `bench/compare.py`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from nanovllm_cli.cli.command import OUTPUT, expand, option
from nanovllm_cli.cli.inputs import say_if_typed
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.options import MessageOptions
from nanovllm_cli.errors import DifferenceError


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What counts, and what is told."""

    fail_under: float | None = option(
        "--fail-under", help="Exit with 7 where a ratio is below this, such as 0.95. [never]",
        panel=OUTPUT, metavar="RATIO", envvar=None,
    )
    metric: list[str] | None = option(
        "--metric", help="Only this one: t/s, output_throughput, p99_ttft_ms, … Repeatable. [all]",
        panel=OUTPUT, metavar="NAME", envvar=None,
    )
    output: Literal["md", "json"] = option(
        "-o", "--output", help="What is printed. [md]", default="md", panel=OUTPUT, envvar=None
    )
    report: str | None = option("--report", help="Writes an HTML report.", panel=OUTPUT, metavar="FILE", envvar=None)


@expand
def bench_compare(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Results as bench, llama-bench or vLLM write them (JSON, JSON lines); the first is the baseline. - is standard "
            "input.",
        ),
    ],
    options: CompareOptions,
    messages: MessageOptions,
) -> None:
    """Hold files of results against the first of them.

    A ratio above 1 is always better: for speeds it is after / before, for latencies before / after. Its ± is one standard error,
    from the repetitions of both sides. Tests match by what they measure and by what is swept within a file; what only one file
    has, and what else differs between them, is listed.
    """
    screen = screen_for(messages)
    from nanovllm_cli.bench.compare import compare, read_sources
    from nanovllm_cli.bench.record import STANDARD_INPUT

    if STANDARD_INPUT in files:
        say_if_typed(screen)
    sources = read_sources(files)
    made = compare(sources, fail_under=options.fail_under, metrics=options.metric or ())
    if options.output == "json":
        screen.answer(json.dumps(dataclasses.asdict(made), indent=2, ensure_ascii=False) + "\n")
    else:
        from nanovllm_cli.bench.serve_report import comparison_table

        screen.answer(comparison_table(made))
    if options.report is not None:
        from nanovllm_cli.bench.html import write_comparison

        write_comparison(options.report, sources, made)
    if made.failed:
        worst = min(made.failed, key=lambda row: row.ratio)
        raise DifferenceError(
            f"{len(made.failed)} of {len(made.rows)} ratios are under {options.fail_under:g}; the lowest is {worst.ratio:.3f}: "
            f"{worst.metric} of {worst.test} in {worst.file}"
        )
