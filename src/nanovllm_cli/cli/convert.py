"""`nanovllm convert`: a model in another format or other numbers. The work is in `weights/convert.py`."""

from __future__ import annotations

import shlex
from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.command import OUTPUT, expand, option
from nanovllm_cli.cli.files import model_path, stem_of
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_model
from nanovllm_cli.cli.options import MessageOptions, ModelWord, SourceOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, size
from nanovllm_cli.cli.shared_options import adapters
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.weights.files import without_quant

if TYPE_CHECKING:
    from nanovllm_cli.weights.checkpoint import Checkpoint
    from nanovllm_cli.weights.convert import Plan, Target
    from nanovllm_cli.weights.convert_tensors import Step

EXAMPLE = "for example: nanovllm convert tiny --to gguf --outtype q8_0"
_LONG_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Into what, and where."""

    to: Literal["gguf", "hf", "safetensors"] | None = option(
        "--to",
        help="gguf: a file for llama.cpp and this program. hf, safetensors: a folder for transformers and vLLM. "
        "[by -o, else the other of the two]",
        panel=OUTPUT,
    )
    outtype: str = option(
        "--outtype", "--dtype",
        help="auto (as it is), f32, f16, bf16; for GGUF also q8_0, q4_0 and the other block types. [auto]",
        default="auto", panel=OUTPUT, metavar="TYPE", envvar=None,
    )
    lora: list[str] | None = option(
        "--lora", help="An adapter to write into the weights: PEFT's folder, a .gguf file, or a name on the hub. Repeatable.",
        panel=OUTPUT, metavar="PATH", envvar=None,
    )
    lora_scaled: list[Any] | None = option(
        "--lora-scaled", help="The same, of another strength: PATH:0.5. Repeatable.",
        panel=OUTPUT, metavar="PATH:SCALE", parser=parsers.scaled, envvar=None,
    )
    allow_requantize: bool = option(
        "--allow-requantize", help="Turn block types into other block types; both losses add up.",
        default=False, panel=OUTPUT,
    )
    output: str | None = option(
        "-o", "--output", "--outfile",
        help="The file, or folder, that is written, whole or not at all. [in this folder, named after the model]",
        panel=OUTPUT, metavar="PATH", envvar=None,
    )
    split_max_size: int | None = option(
        "--split-max-size",
        help="Most bytes of tensors in a file, such as 2G; for GGUF this makes a folder of parts. [5 GB a file of a folder]",
        panel=OUTPUT, metavar="SIZE", parser=parsers.memory, envvar=None,
    )
    force: bool = option(
        "--force", help="Replace the output where it exists.", default=False, panel=OUTPUT, envvar=None
    )
    dry_run: bool = option(
        "--dry-run", help="Say what would be written, and write nothing.", default=False, panel=OUTPUT, envvar=None
    )
    json: bool = option("--json", help="What was done as one JSON object.", default=False, panel=OUTPUT)


@expand
def convert(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    source: SourceOptions,
    options: ConvertOptions,
    messages: MessageOptions,
) -> None:
    """Write a model in another format: Hugging Face to GGUF and back, other types, parts and shards into one.

    Pickled weights (.bin) become safetensors; they are read in a process of their own that runs nothing of theirs.
    Tensors, tokens, template and settings come out the same; what the new format has no place for is named. What a model sees by
    becomes a GGUF file of its own, mmproj-….gguf, beside the model's. The input is never changed, and what is written appears
    whole or not at all. The output's path goes to stdout.
    """
    screen = screen_for(messages)
    name = named_model(ctx.obj, model_word or source.model, EXAMPLE)
    named = model_path(options.output)
    screen.announce(f"opening {name}")
    with signals.insisting():
        from nanovllm_cli.weights import convert as conversion
        from nanovllm_cli.weights.adapted import merged
        from nanovllm_cli.weights.convert_tensors import quantized_already
        from nanovllm_cli.weights.shapes import refuse_made_up
        from nanovllm_cli.weights.source import find_adapters, resolve
    refuse_made_up(name)
    outtype = options.outtype.lower()
    outtype = _LONG_NAMES.get(outtype, outtype)
    progress = ProgressLine(screen)
    resolved = resolve(name, offline=source.offline, revision=source.revision, progress=progress)
    lora = find_adapters(adapters(options.lora, options.lora_scaled), offline=source.offline, progress=progress)
    for adapter in lora:
        screen.say(f"with the adapter {adapter}", "dim")
    with conversion.open_source(resolved.path) as opened:
        checkpoint = merged(opened, lora) if lora else opened
        target = _target(options, checkpoint)
        _check_outtype(outtype, target, name)
        made = conversion.plan(checkpoint, target, outtype, options.split_max_size, name=resolved.repo)
        if made.requantized and not options.allow_requantize:
            step = made.requantized[0]
            raise quantized_already(name, step.name, step.before.lower())
        default = _default_name(resolved.repo or str(resolved.path), made, outtype, "-merged" if lora else "")
        output = named or Path(default)
        for adapter in lora:
            if output.resolve() in (own := Path(adapter.name).resolve(), *own.parents):
                raise UsageError(f"{output} is an adapter that is read, or holds it", "-o names another output")
        conversion.check_output(checkpoint, made, output, replace=options.force)
        if not options.dry_run:
            conversion.write(checkpoint, made, output, replace=options.force, progress=progress)
            if made.tower is not None:
                screen.say(str(made.tower.write(output, replace=options.force, progress=progress)))
        _report(made, name, output, options, screen, _numbers(checkpoint, made))


def _target(options: ConvertOptions, checkpoint: Checkpoint) -> Target:
    """What was asked for; else by the output's name; else the other format, and for pickles safetensors."""
    if options.to is not None:
        return "gguf" if options.to == "gguf" else "hf"
    if options.output is not None and options.output.endswith(".gguf"):
        return "gguf"
    from nanovllm_cli.weights.pickled import PickledCheckpoint

    return "hf" if checkpoint.format == "gguf" or isinstance(checkpoint, PickledCheckpoint) else "gguf"


def _check_outtype(outtype: str, target: Target, name: str) -> None:
    """Raises UsageError for what is no type of a file; with the command that makes it, where another does."""
    from nanovllm_cli.quant.format_names import FORMAT_NAMES
    from nanovllm_cli.quantization.mixes import MIXES
    from nanovllm_cli.weights.convert_tensors import BLOCK_TYPES, check_outtype

    try:
        check_outtype(outtype, target)
    except UsageError as error:
        if outtype.split(":")[0] not in {*FORMAT_NAMES, *MIXES} - {*BLOCK_TYPES}:
            raise
        raise UsageError(error.message, f"nanovllm quantize {shlex.quote(name)} --to {outtype}") from error


def _default_name(source: str, made: Plan, outtype: str, kind: str) -> str:
    """Named after the repository, the folder or the file: tiny-Q8_0.gguf, tiny-hf, tiny-f16."""
    stem = (without_quant(stem_of(source)) or "model") + kind
    if made.target == "hf":
        return f"{stem}-{'hf' if outtype == 'auto' else outtype}"
    return f"{stem}-{made.type_name if outtype == 'auto' else outtype.upper()}" + ("" if made.is_folder else ".gguf")


def _numbers(checkpoint: Checkpoint, made: Plan) -> dict[str, int] | None:
    """Of each kind of tensors, where a folder that others quantized is written as it is, whose words hold several numbers each.
    None of any other, empty where nobody here reads it."""
    from nanovllm_cli.weights.folder_config import quantization_of
    from nanovllm_cli.weights.quantized import open_reader
    from nanovllm_cli.weights.tensor_classes import class_of

    if made.target != "hf" or checkpoint.format != "hf" or quantization_of(checkpoint.config) is None:
        return None
    try:
        reader = open_reader(checkpoint)
    except UnsupportedError:
        return {}
    found: defaultdict[str, int] = defaultdict(int)
    for name in reader.names():
        found[class_of(name)] += prod(reader.shape(name))
    return dict(found)


def _report(
    made: Plan, name: str, output: Path, options: ConvertOptions, screen: Console, numbers: dict[str, int] | None
) -> None:
    rows = [_Row.of(kind, steps) for kind, steps in _by_class(made.steps).items()]
    for note in made.notes:
        screen.say(f"not carried: {note}")
    total = _Row.of("total", made.steps)
    if numbers is not None:
        rows = [replace(row, weights=numbers.get(row.kind)) for row in rows]
        total = replace(total, weights=sum(numbers.values()) or None)
    for line in _table([*rows, total]):
        screen.say(line)
    mmproj = None if made.tower is None else str(made.tower.path(output))
    if options.json:
        record: dict[str, Any] = {
            "model": name, "output": str(output), "mmproj": mmproj, "format": made.target, "written": not options.dry_run,
            "bytes": made.num_bytes, "not_carried": made.notes, "tensors": [row.record() for row in rows],
        }  # fmt: skip
        screen.record(record)
    elif options.dry_run:
        beside = "" if made.tower is None else f", and {mmproj} ({size(made.tower.num_bytes)})"
        screen.say(f"would write {output} ({size(made.num_bytes)}){beside}; nothing was written")
    else:
        if made.has_family:
            verb = "run" if made.has_head else "embed"
            screen.say(f'nanovllm {verb} {shlex.quote(str(output))} "Once upon a time"', "dim")
        screen.answer(f"{output}\n")


@dataclass(frozen=True, slots=True)
class _Row:
    """Tensors of a kind, together. weights: None, where nobody here can tell."""

    kind: str
    count: int
    weights: int | None
    before: str
    before_bytes: int
    after: str
    after_bytes: int

    @classmethod
    def of(cls, kind: str, steps: list[Step]) -> _Row:
        return cls(
            kind, len(steps), sum(prod(step.shape) for step in steps),
            _types(step.before for step in steps), sum(step.before_bytes for step in steps),
            _types(step.after for step in steps), sum(step.num_bytes for step in steps),
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        return {
            "class": self.kind, "count": self.count, "weights": self.weights, "from": self.before,
            "from_bytes": self.before_bytes, "to": self.after, "to_bytes": self.after_bytes,
        }  # fmt: skip


def _table(rows: list[_Row]) -> list[str]:
    cells = [("tensors", "count", "from", "", "to", "", "bits a weight")]
    cells += [
        (row.kind, str(row.count), row.before, size(row.before_bytes), row.after, size(row.after_bytes),
         "-" if row.weights is None else f"{8 * row.after_bytes / max(row.weights, 1):.2f}")
        for row in rows
    ]  # fmt: skip
    return aligned(cells, left=(0, 2, 4))


def _by_class(steps: list[Step]) -> dict[str, list[Step]]:
    from nanovllm_cli.weights.tensor_classes import class_of

    classes: defaultdict[str, list[Step]] = defaultdict(list)
    for step in steps:
        classes[class_of(step.name)].append(step)
    return dict(classes)


def _types(names: Any) -> str:
    found = dict.fromkeys(name for name in names if name != "-")
    return ", ".join(found) if len(found) < 4 else f"{len(found)} types"
