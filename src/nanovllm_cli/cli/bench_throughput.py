"""`nanovllm bench throughput`: how much an engine in this process gets done. The work is in `bench/offline.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from nanovllm_cli.cli.bench_dataset import DatasetOptions
from nanovllm_cli.cli.bench_output import SummaryOutputOptions, percentiles, write_results
from nanovllm_cli.cli.command import ENGINE, MODEL, expand, option, typer_option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import load, named_model
from nanovllm_cli.cli.options import AdaptedOptions, EngineOptions, MessageOptions, ModelWord
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.errors import UsageError
from nanovllm_cli.weights.shapes import RANDOM

EXAMPLE = "for example: nanovllm bench throughput tiny --num-prompts 32"
LOAD = "Load"
NUM_PROMPTS, MAX_NUM_SEQS = 100, 64
Shape = Annotated[
    str | None,
    typer_option(
        "--random-weights",
        help="Made-up weights of a known shape (qwen3-0.6b, llama-3.1-8b, mistral-7b, …) or of a config.json.",
        panel=MODEL, metavar="SHAPE",
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """How much is asked."""

    random_weights: Shape = None
    num_prompts: int = option(
        "--num-prompts", help=f"How many requests. [{NUM_PROMPTS}]", default=NUM_PROMPTS, panel=LOAD, metavar="N"
    )
    warmup: int = option(
        "--warmup", help="Requests beforehand that do not count. [1]", default=1, panel=LOAD, metavar="N"
    )
    seed: int = option("-s", "--seed", help="Of the made-up prompts. [0]", default=0, panel=LOAD, metavar="N")
    max_num_seqs: int = option(
        "--max-num-seqs", help=f"Most sequences in one step. [{MAX_NUM_SEQS}]",
        default=MAX_NUM_SEQS, panel=ENGINE, metavar="N",
    )


@expand
def bench_throughput(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    model: AdaptedOptions,
    options: ThroughputOptions,
    dataset: DatasetOptions,
    engine: EngineOptions,
    output: SummaryOutputOptions,
    messages: MessageOptions,
) -> None:
    """Measure how many requests and tokens a second an engine in this process gets done.

    All requests are there from the beginning. Figures are those of vLLM's own benchmark. Prompts are tokens before the clock
    starts; answers are greedy and have the length that was asked for.
    """
    screen = screen_for(messages)
    if options.num_prompts < 1 or options.warmup < 0:
        raise UsageError("--num-prompts takes a number from 1 on, --warmup one from 0 on")
    dataset.refuse_seed(ctx)
    output.check()
    wanted = percentiles(output.percentiles)
    name = chosen_model(ctx.obj, model_word, model, options.random_weights, EXAMPLE)
    config = engine.config(model, max_num_seqs=options.max_num_seqs, settings=ctx.obj)
    with load(name, model, config, screen).llm as llm:
        from nanovllm_cli.bench.machine import this_machine
        from nanovllm_cli.bench.offline import measure_throughput
        from nanovllm_cli.bench.serve_report import run_table
        from nanovllm_cli.bench.table import reserved_tokens

        workload = dataset.workload(
            options.num_prompts + options.warmup,
            seed=options.seed,
            vocab_size=llm.spec.vocab_size,
            reserved=reserved_tokens(llm),
            tokens=lambda text: len(llm.tokenizer.encode(text)),
        )
        progress = ProgressLine(screen)
        summary = measure_throughput(llm, workload, this_machine(), wanted, progress, warm_up=options.warmup)
    if output.output == "md":
        screen.answer(run_table(summary, f"{name}, all at once"))
    write_results([summary], output, screen)


def chosen_model(settings: object, word: str | None, model: AdaptedOptions, shape: str | None, example: str) -> str:
    """What is measured. Raises UsageError."""
    if shape is None:
        return named_model(settings, word or model.model, example)
    if word:
        raise UsageError(f"{word} and --random-weights {shape} are two models", "name one of them")
    return RANDOM + shape
