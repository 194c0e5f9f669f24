"""`nanovllm control-vector`: what leads a model from some texts to others, as a file. The work is in `steering.py`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.command import ENGINE, OUTPUT, expand, option
from nanovllm_cli.cli.files import is_special, model_path
from nanovllm_cli.cli.inputs import read_text
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_model
from nanovllm_cli.cli.options import Device, DType, MessageOptions, ModelWord, SourceOptions
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.steering import Pair
    from nanovllm_cli.text.tokenizer import Tokenizer

EXAMPLE = "for example: nanovllm control-vector tiny --positive happy.txt --negative sad.txt -o happy.gguf"
TEXTS = "Texts"


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """From which texts, how, and where to."""

    positive: str | None = option(
        "--positive", "--positive-file", help="Texts, one a line, that the vector leads to. \\n in one is a new line in it.",
        panel=TEXTS, metavar="FILE", envvar=None,
    )
    negative: str | None = option(
        "--negative", "--negative-file", help="As many that it leads away from, the other of each pair in the same line.",
        panel=TEXTS, metavar="FILE", envvar=None,
    )
    method: Literal["pca", "mean"] = option(
        "--method",
        help="What is taken of a layer's differences: the first principal component, or the mean. Either is made 1 long. [pca]",
        default="pca", panel=TEXTS,
    )
    dtype: DType = EngineConfig().dtype
    device: Device = "auto"
    threads: int | None = option("-t", "--threads", help="CPU threads. [-1: one a core; of a Mac, one a fast core]", panel=ENGINE)
    output: str | None = option(
        "-o", "--output", help="The file that is written, whole or not at all.",
        panel=OUTPUT, metavar="FILE", envvar=None,
    )
    force: bool = option("--force", help="Replace the output where it exists.", default=False, panel=OUTPUT, envvar=None)
    json: bool = option("--json", help="What was done as one JSON object.", default=False, panel=OUTPUT)

    @parsers.by_their_flags()
    def engine_config(self) -> EngineConfig:
        """Raises UsageError."""
        return EngineConfig(dtype=self.dtype, device=self.device, threads=None if self.threads == -1 else self.threads)


@expand
def control_vector(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    source: SourceOptions,
    options: VectorOptions,
    messages: MessageOptions,
) -> None:
    """Make a control vector: what leads a model from some texts to others.

    Two files have a text a line, in pairs that differ in nothing else than what the vector is to be about. What layers make of
    the last token of each is compared: so a text ends where that difference shows, such as behind the beginning of an answer.
    Texts are taken as they are: write a chat model's turns into them as its template does. --control-vector FILE then leads that
    model. The output's path goes to stdout.
    """
    screen = screen_for(messages)
    name = named_model(ctx.obj, model_word or source.model, EXAMPLE)
    if options.positive is None or options.negative is None or options.output is None:
        raise UsageError("--positive, --negative and -o are all needed", EXAMPLE)
    output = model_path(options.output)
    assert output is not None
    if is_special(output):
        raise UsageError(f"{output} is no file, and control vectors are read from one", "name a file")
    config = options.engine_config()
    texts = _texts(options.positive, options.negative)
    screen.announce(f"opening {name}")
    with signals.insisting():
        from nanovllm_cli import steering
        from nanovllm_cli.quantization.logits import MeasuredModel
        from nanovllm_cli.quantization.original import open_original
        from nanovllm_cli.weights.convert import is_input_file
        from nanovllm_cli.weights.source import resolve
        from nanovllm_cli.weights.writer import exists_already
    if output.exists() and not options.force:
        raise exists_already(output)
    progress = ProgressLine(screen)
    resolved = resolve(name, offline=source.offline, revision=source.revision, progress=progress)
    with open_original(name, resolved.path) as original:
        if is_input_file(original.checkpoint, output):
            raise UsageError(f"{output} is the input", "-o names another output")
        steering.check_model(original.spec)
        pairs = _pairs(original.tokenizer(), texts, original.spec.max_position)
        longest = max(len(ids) for pair in pairs for ids in pair)
        model = MeasuredModel(original.checkpoint, longest, config, progress=progress)
        found = steering.find_directions(model, pairs, options.method, progress)
    steering.write_directions(found, output, original.spec.architecture, replace=options.force)
    if options.json:
        record: dict[str, Any] = {"model": name, "output": str(output), "method": options.method, "pairs": len(pairs)}
        screen.record(record | {"layers": sorted(found)})
        return
    screen.say(f"{len(pairs)} pairs of texts; directions for the layers {min(found)} to {max(found)}", "dim")
    screen.say(f"nanovllm run {shlex.quote(name)} --control-vector {shlex.quote(str(output))} …", "dim")
    screen.answer(f"{output}\n")


def _texts(*names: str) -> list[tuple[str, str]]:
    """Pairs of lines; those that are empty in both files are left out. Raises UsageError."""
    positive, negative = ([line.removesuffix("\r") for line in read_text(name).split("\n")] for name in names)
    counts = [sum(bool(line.strip()) for line in lines) for lines in (positive, negative)]
    if counts[0] != counts[1]:
        told = f"{names[0]} has {counts[0]} texts, {names[1]} has {counts[1]}"
        raise UsageError(told, "a line of one and the same line of the other are a pair")
    if not counts[0]:
        raise UsageError(f"{names[0]} and {names[1]} have no texts", "write one a line")
    pairs = []
    for number, both in enumerate(zip_longest(positive, negative, fillvalue=""), 1):
        missing = [name for name, line in zip(names, both, strict=True) if not line.strip()]
        if len(missing) == 1:
            raise UsageError(f"line {number} of {missing[0]} is empty", "the other file has a text there, and they are a pair")
        if not missing:
            pairs.append((parsers.escaped(both[0]), parsers.escaped(both[1])))
    return pairs


def _pairs(tokenizer: Tokenizer, texts: list[tuple[str, str]], most: int) -> list[Pair]:
    from nanovllm_cli.steering import Pair

    pairs = [Pair(*(tokenizer.encode(text) for text in both)) for both in texts]
    for ids in (ids for pair in pairs for ids in pair):
        if len(ids) > most:
            raise DoesNotFitError(f"a text has {len(ids)} tokens, the model's context holds {most}", "write shorter lines")
        if not ids:
            raise UsageError("a text has no tokens", "write something into each line")
    return pairs
