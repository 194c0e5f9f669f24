"""`nanovllm bench`: llama-bench's table. The work is in `bench/table.py`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import typer

from nanovllm_cli.cli.bench_options import (
    BenchEngineOptions,
    BenchModelOptions,
    BenchOutputOptions,
    Format,
    TestOptions,
    sweep_of,
    swept_fields,
)
from nanovllm_cli.cli.bench_output import check_files, draw_results
from nanovllm_cli.cli.command import expand
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import load, named_models
from nanovllm_cli.cli.options import MessageOptions, ModelWords, SourceOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.config import EngineConfig, KVCacheDType
from nanovllm_cli.errors import DoesNotFitError, UsageError
from nanovllm_cli.weights.shapes import RANDOM

if TYPE_CHECKING:
    from nanovllm_cli.bench.formats import Printer
    from nanovllm_cli.bench.record import Record
    from nanovllm_cli.bench.roofline import Roofline
    from nanovllm_cli.bench.sweep import Setup, Trial
    from nanovllm_cli.bench.table import Loaded

EXAMPLE = "for example: nanovllm bench tiny -p 64 -n 16"


@expand
def bench(
    *,
    ctx: typer.Context,
    model_word: ModelWords = None,
    model: BenchModelOptions,
    tests: TestOptions,
    engine: BenchEngineOptions,
    output: BenchOutputOptions,
    messages: MessageOptions,
) -> None:
    """Measure how fast models read prompts and generate, in llama-bench's table.

    Without further options: pp512 reads a prompt of 512 tokens, tg128 generates 128 tokens; five repetitions each, after one that
    does not count. Every combination of what is given is measured. Times include the whole engine with greedy sampling.
    On standard error: the machine, and how near each test came to the limit that the machine sets.
    """
    screen = screen_for(messages)
    random = [RANDOM + shape for shape in model.random_weights or []]
    names = named_models(ctx.obj, [*(model_word or []), *model.names(), *random], EXAMPLE)
    sweep = sweep_of(names, model, tests, engine)
    if output.plot and output.output != "md":
        raise UsageError("--plot goes with -o md")
    check_files(output.report)
    from nanovllm_cli.bench.formats import explained
    from nanovllm_cli.bench.machine import this_machine
    from nanovllm_cli.bench.roofline import roofline
    from nanovllm_cli.bench.settings import distinguishing, said, settings_of
    from nanovllm_cli.bench.table import Procedure, run_sweep

    procedure = Procedure(tests.repetitions, not tests.no_warmup, tests.delay)
    records: list[Record] = []

    @functools.cache
    def limits(device: str, threads: int | None) -> Roofline:
        return roofline(device, threads, fresh=output.roofline == "measure", progress=ProgressLine(screen))

    with _printing(output, swept_fields(engine), screen) as show:
        for record in run_sweep(
            sweep,
            lambda setup, trials: _open(setup, trials, model, engine, None if output.roofline == "off" else limits, screen),
            this_machine,
            procedure,
            deterministic=engine.deterministic,
            activations=model.activations,
            progress=ProgressLine(screen),
            announce=screen.line if output.progress else lambda line: None,
        ):
            show(record)
            records.append(record)
    draw_results(records, output.report, plot=output.plot, screen=screen)
    for line in records[0].machine.lines():
        screen.say(line, "dim")
    apart = distinguishing([records])
    for record in records:
        screen.say(", ".join([*said(settings_of(record), apart), explained(record)]), "dim")


@contextlib.contextmanager
def _printing(output: BenchOutputOptions, swept: Sequence[str], screen: Console) -> Iterator[Callable[[Record], None]]:
    """What shows results on stdout, and perhaps in another form on stderr, as they come. What was begun is ended, also where a
    test fails."""

    def aside(text: str) -> None:
        screen.status("")
        screen.err.write(text)

    printers: list[tuple[Printer, Callable[[str], None]]] = []

    def put(part: Callable[[Printer], str]) -> None:
        for printer, write in printers:
            if text := part(printer):
                write(text)

    def show(record: Record) -> None:
        if not printers:
            printers.append((_printer(output.output, swept, record), screen.answer))
            if output.output_err is not None:
                printers.append((_printer(output.output_err, swept, record), aside))
            put(lambda printer: printer.header())
        put(lambda printer: printer.row(record))

    try:
        yield show
    finally:
        put(lambda printer: printer.footer())


def _printer(form: Format, swept: Sequence[str], record: Record) -> Printer:
    from nanovllm_cli.bench.formats import FORMATS, Markdown

    return Markdown(swept, on_cpu=record.backends == "CPU") if form == "md" else FORMATS[form]()


def _open(
    setup: Setup,
    trials: Sequence[Trial],
    model: BenchModelOptions,
    engine: BenchEngineOptions,
    limits: Callable[[str, int | None], Roofline] | None,
    screen: Console,
) -> Loaded:
    from nanovllm_cli.bench.table import Loaded, check_room

    longest, widest = max(trials, key=lambda trial: trial.context_len), max(trials, key=lambda trial: trial.num_blocks)
    config = EngineConfig(
        dtype=model.dtype,
        device=model.device,
        quant=setup.quant,
        max_model_len=longest.context_len,
        max_num_seqs=max(trial.num_parallel for trial in trials),
        max_num_batched_tokens=setup.step_size,
        cache_type_k=cast(KVCacheDType, setup.cache_type_k),
        cache_type_v=cast(KVCacheDType, setup.cache_type_v),
        n_gpu_layers=setup.n_gpu_layers,
        n_cpu_moe=setup.n_cpu_moe,
        threads=setup.threads,
        tensor_parallel_size=setup.tensor_parallel_size,
        deterministic=engine.deterministic,
        activations=model.activations,
    )
    before, several = None, config.tensor_parallel_size
    if limits is not None and several > 1 and not model.device.startswith("cuda"):
        before = limits("cpu", setup.threads)  # afterwards this process keeps to some of the processors
    with _hinting(longest):
        llm = load(setup.model, SourceOptions(revision=model.revision, offline=model.offline), config, screen).llm
    with _hinting(widest):
        check_room(llm, trials)
    if limits is None:
        return Loaded(llm)
    if llm.threads is not None:
        return Loaded(llm, limits("cpu", llm.threads) if before is None else before)
    return Loaded(llm, limits("cuda" if model.device == "auto" else model.device, None).times(several))


@contextlib.contextmanager
def _hinting(trial: Trial) -> Iterator[None]:
    """An engine that is too small for this one: its own hint is about options that are none here."""
    from nanovllm_cli.bench.table import name_of

    try:
        yield
    except DoesNotFitError as failure:
        given = {"-p": trial.num_prompt, "-n": trial.num_gen, "-d": trial.depth, "-npl": trial.num_parallel > 1}
        if trial.num_prompt and trial.num_gen:
            given = {"-pg": 1, "-d": trial.depth, "-npl": trial.num_parallel > 1}
        less = " or ".join(flag for flag, value in given.items() if value)
        each = " a sequence" if trial.num_parallel > 1 else ""
        needs = f"{name_of(trial)} takes {trial.context_len:,} tokens of context{each}, the last one drawn included"
        hint = f"{needs}: choose a smaller {less}, or another model"
        raise DoesNotFitError(failure.message, hint) from failure
