"""`nanovllm plan`: what a model would take and give, before it is downloaded. The arithmetic is in `planning/`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.command import ENGINE, MODEL, OUTPUT, expand, is_typed, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_model
from nanovllm_cli.cli.models_show import count
from nanovllm_cli.cli.options import MemoryOptions, MessageOptions, ModelWord, WeightsOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, size
from nanovllm_cli.cli.shared_options import RooflineChoice
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import DoesNotFitError, NanovllmError, UsageError
from nanovllm_cli.system import peak_memory_bytes

if TYPE_CHECKING:
    from nanovllm_cli.planning.check import Comparison
    from nanovllm_cli.planning.estimate import Speed
    from nanovllm_cli.planning.plan import Plan
    from nanovllm_cli.weights.source import RemoteModel, ResolvedModel

EXAMPLE = "for example: nanovllm plan qwen3:8b"


@dataclass(frozen=True, slots=True)
class PlannedWeights(WeightsOptions):
    """Which model, in which numbers."""

    quant: str | None = option(
        "--quant", help="Weights rounded to this while loading: int8, fp8, int4[:group=N], … [as stored, and the usual ones]",
        panel=MODEL, metavar="FORMAT",
    )


@dataclass(frozen=True, slots=True)
class PlannedMemory(MemoryOptions):
    """How it would be run."""

    ctx_size: int | None = option(
        "-c", "--ctx-size", help="A context to plan for, in tokens, such as 16K. [4,096, 8,192, 32,768, the model's own]",
        panel=ENGINE, metavar="SIZE", parser=parsers.count,
    )
    parallel: int | None = option(
        "-np", "--parallel", "--max-num-seqs", help="Answers at once to plan for, each with that context. [1]",
        panel=ENGINE, envvar="NANOVLLM_PARALLEL",
    )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is said of it."""

    check: bool = option(
        "--check", help="Load the model (download it first), measure the machine anew, compare.",
        default=False, panel=OUTPUT, envvar=None,
    )
    roofline: RooflineChoice = "cached"
    json: bool = option("--json", help="One JSON object.", default=False, panel=OUTPUT)


class _Planned(NamedTuple):
    """where: what the name turned out to be, in words. download_bytes: 0 where nothing is missing here."""

    plan: Plan
    where: str
    download_bytes: int


@expand
def plan(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    source: PlannedWeights,
    memory: PlannedMemory,
    options: PlanOptions,
    messages: MessageOptions,
) -> None:
    """Plan what a model needs and how fast it can be here, before it is downloaded.

    Of a model on the hub only its settings and the headers of its files are read. Memory: weights as they are stored and rounded,
    the KV cache by context and batch, what fits into the memory that is free now. Speed: the most that this machine's memory and
    processor allow, which are measured once; real models of some size come close, tiny ones do not.
    """
    screen = screen_for(messages)
    name = named_model(ctx.obj, model_word or source.model, EXAMPLE)
    if options.check and options.roofline == "cached" and is_typed(ctx, "roofline"):
        raise UsageError("--roofline cached has no meaning with --check", "the machine is measured anew, to compare with")
    config = memory.config(source, max_num_seqs=memory.parallel)
    screen.announce(f"looking for {name}")
    with signals.insisting():
        from nanovllm_cli.quant.format_names import parse_format
    if source.quant is not None:
        parse_format(source.quant)
    planned = _planned(name, source, options, config, memory.parallel or 1, screen)
    compared = _checked(name, source, planned.plan, config, screen) if options.check else None
    if options.json:
        record = {"model": name, "where": planned.where, "download_bytes": planned.download_bytes}
        checks = None if compared is None else [asdict(each) | {"share": each.share} for each in compared]
        record |= planned.plan.as_json() | {"check": checks}
        screen.record(record)
    else:
        screen.lines(_lines(planned, compared))


def _planned(
    name: str, source: PlannedWeights, options: PlanOptions, config: EngineConfig, answers: int, screen: Console
) -> _Planned:
    from nanovllm_cli.overrides import check_asked
    from nanovllm_cli.planning.plan import make_plan
    from nanovllm_cli.weights.checkpoint import open_checkpoint
    from nanovllm_cli.weights.source import ResolvedModel, cached_copy, locate

    progress = ProgressLine(screen)
    signals.check()
    found = locate(name, offline=source.offline, revision=source.revision, progress=progress)
    if not isinstance(found, ResolvedModel):
        found = cached_copy(found.hub_name, name) or found
    with _files(found, progress) as path, open_checkpoint(path, overrides=config.overrides) as checkpoint:
        remote = not isinstance(found, ResolvedModel)
        speed = _speed(config, options, screen)
        formats = None if source.quant is None else [source.quant]
        made = make_plan(checkpoint, config, formats, speed, answers=answers, headers_only=remote, progress=progress)
        for note in check_asked(checkpoint.config):
            progress.note(note)
    if isinstance(found, ResolvedModel):
        return _Planned(made, f"{found}, here", 0)
    return _Planned(made, f"{found.repo}@{found.listing.commit[:7]}, not in the cache", made.facts.num_bytes)


@contextmanager
def _files(found: ResolvedModel | RemoteModel, progress: ProgressLine) -> Iterator[Path]:
    """What can be opened: the model's files, or only their headers for as long as the plan takes."""
    from nanovllm_cli.weights.hub_headers import fetch_headers
    from nanovllm_cli.weights.source import ResolvedModel

    if isinstance(found, ResolvedModel):
        yield found.path
        return
    with tempfile.TemporaryDirectory(prefix="nanovllm-plan-") as folder:
        yield fetch_headers(found, Path(folder), progress)


def _speed(config: EngineConfig, options: PlanOptions, screen: Console) -> Speed | None:
    """Of this machine, measured once, and anew to be compared with what happens now. None where it can't or shall not be."""
    if options.roofline == "off":
        return None
    from nanovllm_cli.bench.roofline import roofline
    from nanovllm_cli.planning.estimate import Speed
    from nanovllm_cli.planning.plan import device_of

    fresh = options.check or options.roofline == "measure"
    try:
        device = device_of(config)
        of_one = roofline(device, config.threads, fresh=fresh, progress=ProgressLine(screen))
        return Speed(*of_one.times(1 if device == "cpu" else config.tensor_parallel_size))
    except NanovllmError as error:
        screen.say(f"nothing is said of speed: {error.message}")
        return None


def _checked(name: str, source: PlannedWeights, made: Plan, config: EngineConfig, screen: Console) -> list[Comparison]:
    if not made.fits:
        row = made.formats[0]
        raise DoesNotFitError(
            f"{name} is not loaded: it needs {size(row.total_bytes)}, of which {size(made.cache_bytes)} are for the KV cache; "
            f"{size(made.free_bytes)} are free, and the KV cache gets {size(made.cache_room)} of them",
            "leave --check out, or take fewer bits with --quant, or a shorter context with -c",
        )
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.planning.check import compare

    progress = ProgressLine(screen)
    with LLM(name, config=config, offline=source.offline, revision=source.revision, progress=progress) as llm:
        screen.announce("comparing")
        found = compare(made, llm, config, peak_memory_bytes)
    screen.status("")
    return found


def _lines(planned: _Planned, compared: list[Comparison] | None) -> Iterator[str]:
    made = planned.plan
    spec, facts = made.facts.spec, made.facts
    active = f" ({count(facts.num_active)} for each token)" if spec.num_idle else ""
    behind = "" if spec.encoder is None else f" behind an encoder of {spec.encoder.num_layers}"
    download = f", {size(planned.download_bytes)} to download" if planned.download_bytes else ""
    yield f"{planned.where}{download}"
    yield (
        f"{spec.architecture}, {count(facts.num_parameters)} parameters{active} in {facts.stored}, "
        f"{spec.num_layers} layers{behind}, context {spec.max_position:,}"
    )
    if facts.vision is not None or facts.hearing is not None:
        video = None if facts.vision is None else facts.vision.video
        senses = {"images": facts.vision, "sounds": facts.hearing, "videos": video}
        what = " and ".join(name for name, sense in senses.items() if sense is not None)
        yield f"{what} are read by a part that takes more, once there is one; nanovllm models show says how much"
    machine = f"computed on {made.processor} in {made.dtype}, {size(made.free_bytes)} of memory free"
    if made.speed is not None:
        machine += f", which is read at {made.speed.read_gb_s:.1f} GB/s"
    yield machine
    yield ""
    planned_for = f"with {'' if made.answers == 1 else f'{made.answers} x '}{made.context:,} tokens"
    rows = [("weights", "size", planned_for, "fits", "longest context", "prompt t/s", "answer t/s")]
    rows += [
        (f"{row.format} as stored" if row.quant is None else f"--quant {row.quant}", size(row.weight_bytes),
         size(row.total_bytes), "no" if not row.fits else "in part" if row.far_bytes else "yes",
         f"{row.longest_context:,}" if row.longest_context else "-",
         _rate(row.prefill), _rate(row.decode))
        for row in made.formats
    ]  # fmt: skip
    yield from aligned(rows, left=(0, 3))
    yield from (f"left out: {reason}" for reason in made.left_out)
    for row in made.formats:
        if row.fits and row.far_bytes:
            yield f"in part: {size(row.far_bytes)} stay in the machine's memory; how fast the GPU reads it is not measured"
    if made.speed is not None:
        yield "speeds are the most that this machine allows, for one sequence"
    yield ""
    cells = [["KV cache", "context", *(f"batch {batch} " for batch in made.batches)]]
    for kept in made.cache:
        sizes = [size(each) + (" " if fits else "*") for each, fits in zip(kept.num_bytes, kept.fits, strict=True)]
        cells.append([kept.cache_type, f"{kept.context:,}", *sizes])
    yield from aligned(cells, left=(0,))
    if not all(all(kept.fits) for kept in made.cache):
        more = f", where it gets {size(made.cache_room)}; --kv-cache SIZE gives it more" if made.cache_room else ""
        yield f"* does not fit beside the weights{more}"
    if compared is not None:
        yield ""
        yield from _comparison(compared)


def _comparison(compared: list[Comparison]) -> list[str]:
    rows = [["loaded", "planned", "found", ""]]
    for each in compared:
        shown = [
            "-" if value is None else size(value) if each.unit == "B" else f"{_rate(value)} t/s"
            for value in (each.planned, each.found)
        ]
        rows.append([each.what, *shown, "" if each.share is None else f"{each.share:.0%}"])
    return aligned(rows, left=(0,))


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
