"""`nanovllm bench latency`: how long a batch takes in an engine in this process. The work is in `bench/offline.py`."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from nanovllm_cli.bench import sweep
from nanovllm_cli.cli.bench_output import SummaryOutputOptions, percentiles, write_results
from nanovllm_cli.cli.bench_throughput import LOAD, Shape, chosen_model
from nanovllm_cli.cli.command import expand, is_typed, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import load
from nanovllm_cli.cli.options import AdaptedOptions, EngineOptions, MessageOptions, ModelWord
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.errors import UsageError

EXAMPLE = "for example: nanovllm bench latency tiny"
BATCH, INPUT, OUTPUT, REPETITIONS, WARMUP = 8, 32, 128, 10, 2


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What a batch is."""

    random_weights: Shape = None
    parallel: int = option(
        "-npl", "--parallel", help=f"Requests of a batch. [{BATCH}]", default=BATCH, panel=LOAD, metavar="N"
    )
    input_len: int = option(
        "--input-len", help=f"Tokens of each prompt. [{INPUT}]", default=INPUT, panel=LOAD, metavar="N"
    )
    output_len: int = option(
        "--output-len", help=f"Tokens of each answer. [{OUTPUT}]", default=OUTPUT, panel=LOAD, metavar="N"
    )
    repetitions: int = option(
        "-r", "--repetitions", help=f"How many batches. [{REPETITIONS}]", default=REPETITIONS, panel=LOAD, metavar="N"
    )
    warmup: int = option(
        "--warmup", help=f"Batches beforehand that do not count. [{WARMUP}]", default=WARMUP, panel=LOAD, metavar="N"
    )
    seed: int = option("-s", "--seed", help="Of the made-up prompts. [0]", default=0, panel=LOAD, metavar="N")


@expand
def bench_latency(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    model: AdaptedOptions,
    options: LatencyOptions,
    engine: EngineOptions,
    output: SummaryOutputOptions,
    messages: MessageOptions,
) -> None:
    """Measure how long an engine in this process takes for a batch of equal requests.

    All prompts of a batch are made up and handed over together; its time ends with the last token of its last answer. Answers are
    greedy and have the length that was asked for.
    """
    screen = screen_for(messages)
    if min(options.parallel, options.input_len, options.output_len, options.repetitions) < 1 or options.warmup < 0:
        raise UsageError("-npl, --input-len, --output-len and -r take numbers from 1 on, --warmup one from 0 on")
    if options.parallel > sweep.MAX_VALUES:
        raise UsageError(f"-npl takes numbers up to {sweep.MAX_VALUES}")
    if is_typed(ctx, "batch_size") and not is_typed(ctx, "parallel"):  # vLLM's --batch-size is the number of requests
        screen.say(f"--batch-size is the most tokens in one step; a batch has {options.parallel} requests, as -npl says")
    output.check()
    wanted = percentiles(output.percentiles)
    name = chosen_model(ctx.obj, model_word, model, options.random_weights, EXAMPLE)
    config = engine.config(model, max_num_seqs=options.parallel, settings=ctx.obj)
    with load(name, model, config, screen).llm as llm:
        from nanovllm_cli.bench.machine import this_machine
        from nanovllm_cli.bench.offline import Batches, measure_latency
        from nanovllm_cli.bench.serve_report import run_table

        batches = Batches(
            options.parallel, options.input_len, options.output_len, options.repetitions, options.warmup, options.seed
        )
        summary = measure_latency(llm, batches, this_machine(), wanted, ProgressLine(screen))
    if output.output == "md":
        title = f"{name}, {options.parallel} x ({options.input_len} + {options.output_len} tokens)"
        screen.answer(run_table(summary, title))
    write_results([summary], output, screen)
