"""What becomes of the results of benchmarks that sum up many requests: printed, saved, drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from nanovllm_cli.cli.command import OUTPUT, option, typer_option
from nanovllm_cli.cli.files import WholeFile, write_whole
from nanovllm_cli.cli.output import Console
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.bench.record import Result

Report = Annotated[
    str | None, typer_option("--report", help="Writes an HTML report.", panel=OUTPUT, metavar="FILE", envvar=None)
]
Plot = Annotated[bool, typer_option("--plot", help="Charts, made of characters, below the table.", panel=OUTPUT)]


@dataclass(frozen=True, slots=True)
class SummaryOutputOptions:
    """What is told."""

    output: Literal["md", "json", "jsonl"] = option(
        "-o", "--output", help="What results are printed as. [md]", default="md", panel=OUTPUT, envvar=None
    )
    percentiles: str = option(
        "--percentiles", help="Of each latency. [90,95,99]", default="90,95,99", panel=OUTPUT, metavar="P,…"
    )
    save: str | None = option(
        "--save", help="Writes results with every latency, for bench compare.",
        panel=OUTPUT, metavar="FILE", envvar=None,
    )
    report: Report = None
    plot: Plot = False

    def check(self) -> None:
        """Before the work: raises UsageError, or OutputError for what could not be written after it."""
        if self.plot and self.output != "md":
            raise UsageError("--plot goes with -o md")
        check_files(self.save, self.report)


def check_files(*paths: str | None) -> None:
    """Raises OutputError."""
    for path in paths:
        if path is not None:
            with WholeFile(Path(path)):
                pass


def write_results(results: Sequence[Result], output: SummaryOutputOptions, screen: Console) -> None:
    """Everything but the table."""
    from nanovllm_cli.bench.record import write_json

    if output.output == "json":
        screen.answer(write_json(results))
    elif output.output == "jsonl":
        screen.answer("".join(json.dumps(each.as_json(), ensure_ascii=False) + "\n" for each in results))
    if output.save is not None:
        write_whole(Path(output.save), write_json(results))
    draw_results(results, output.report, plot=output.plot, screen=screen)
    for line in results[0].machine.lines():
        screen.say(line, "dim")


def draw_results(results: Sequence[Result], report: str | None, *, plot: bool, screen: Console) -> None:
    """Charts below what was printed, and a file of them."""
    if plot:
        from nanovllm_cli.bench.plots import draw

        screen.answer("\n" + draw(results, screen.out.width()))
    if report is not None:
        from nanovllm_cli.bench.html import write_report

        write_report(report, results, results[0].machine)


def numbers(flag: str, text: str) -> list[float]:
    """Several between commas. Raises UsageError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as failure:
        raise UsageError(f"{flag} {text!r} is not a number, or several between commas") from failure
    if any(math.isnan(number) for number in found):
        raise UsageError(f"{flag} {text!r} is not a number")
    return found


def percentiles(text: str) -> list[float]:
    """Raises UsageError."""
    found = numbers("--percentiles", text)
    if not all(0 <= each <= 100 for each in found):
        raise UsageError(f"--percentiles {text!r}: percentiles lie between 0 and 100")
    return found
