"""`nanovllm bench latency`: how long a batch takes in an engine in this process. The work is in `bench/offline.py`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm_cli.bench import sweep
from nanovllm_cli.cli import log
from nanovllm_cli.cli.bench_output import SummaryOutputOptions, percentiles, write_results
from nanovllm_cli.cli.bench_throughput import LOAD, Shape, chosen_model
from nanovllm_cli.cli.command import expand, option
from nanovllm_cli.cli.model import load
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, WeightsOptions
from nanovllm_cli.cli.output import console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.bench.record import Summary

EXAMPLE = "for example: nanovllm bench latency tiny"
BATCH, INPUT, OUTPUT, REPETITIONS, WARMUP = 8, 32, 128, 10, 2


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What a batch is."""

    random_weights: Shape = None
    parallel: Annotated[
        int, option("-npl", "--parallel", help=f"Requests of a batch. [{BATCH}]", panel=LOAD, metavar="N")
    ] = BATCH
    input_len: Annotated[
        int, option("--input-len", help=f"Tokens of each prompt. [{INPUT}]", panel=LOAD, metavar="N")
    ] = INPUT
    output_len: Annotated[
        int, option("--output-len", help=f"Tokens of each answer. [{OUTPUT}]", panel=LOAD, metavar="N")
    ] = OUTPUT
    repetitions: Annotated[
        int, option("-r", "--repetitions", help=f"How many batches. [{REPETITIONS}]", panel=LOAD, metavar="N")
    ] = REPETITIONS
    warmup: Annotated[
        int,
        option("--warmup", help=f"Batches beforehand that do not count. [{WARMUP}]", panel=LOAD, metavar="N"),
    ] = WARMUP
    seed: Annotated[int, option("-s", "--seed", help="Of the made-up prompts. [0]", panel=LOAD, metavar="N")] = 0


@expand
def bench_latency(
    *,
    ctx: typer.Context,
    model_word: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A path, org/repo[:quant][@revision], or a short name; or -m.")
    ] = None,
    model: WeightsOptions,
    options: LatencyOptions,
    engine: EngineOptions,
    output: SummaryOutputOptions,
    messages: MessageOptions,
) -> None:
    """Measure how long an engine in this process takes for a batch of equal requests.

    All prompts of a batch are made up and handed over together; its time ends with the last token of its last answer. Answers are
    greedy and have the length that was asked for.
    """
    screen = console()
    log.configure(messages, screen)
    if min(options.parallel, options.input_len, options.output_len, options.repetitions) < 1 or options.warmup < 0:
        raise UsageError("-npl, --input-len, --output-len and -r take numbers from 1 on, --warmup one from 0 on")
    if options.parallel > sweep.MAX_VALUES:
        raise UsageError(f"-npl takes numbers up to {sweep.MAX_VALUES}")
    output.check()
    wanted = percentiles(output.percentiles)
    name = chosen_model(ctx.obj, model_word, model, options.random_weights, EXAMPLE)
    loaded = load(name, model, engine.config(model, max_num_seqs=options.parallel), screen)
    with contextlib.closing(loaded.llm) as llm:
        from nanovllm_cli.bench.machine import this_machine
        from nanovllm_cli.bench.offline import Batches, measure_latency
        from nanovllm_cli.bench.serve_report import run_table

        batches = Batches(
            options.parallel, options.input_len, options.output_len, options.repetitions, options.warmup, options.seed
        )
        summary: Summary = measure_latency(llm, batches, this_machine(), wanted, ProgressLine(screen))
    if output.output == "md":
        title = f"{name}, {options.parallel} x ({options.input_len} + {options.output_len} tokens)"
        screen.answer(run_table(summary, title))
    write_results([summary], output, screen)
