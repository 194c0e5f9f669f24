"""`nanovllm quantize`: a model in fewer bits, with its quality card. The work is in `quantization/`."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nanovllm_cli.cli import signals
from nanovllm_cli.cli.command import OUTPUT, expand, is_typed, option
from nanovllm_cli.cli.files import model_path, stem_of
from nanovllm_cli.cli.inputs import read_text
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_model
from nanovllm_cli.cli.options import MessageOptions, SourceOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, duration, size
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.quantization.plan import Plan
    from nanovllm_cli.quantization.texts import NamedText
    from nanovllm_cli.weights.imatrix import ImportanceFile

EXAMPLE = "for example: nanovllm quantize tiny --to int8"
QUANTIZATION = "Quantization"
_TYPE_AT_END = re.compile(r"[-.](?:bf16|f16|f32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Into what, how, and where."""

    to: str | None = option(
        "--to",
        help="int8, int8-weight-only, fp8[:block=128], int4[:group=N][:zeros] make a folder for vLLM, transformers and this "
        "program; q8_0, q4_0, q4_k_m, q5_k_m, q6_k and the like a GGUF file.",
        panel=QUANTIZATION, metavar="FORMAT", envvar=None,
    )
    algorithm: Literal["rtn", "gptq", "awq", "imatrix"] = option(
        "--algorithm",
        help="rtn rounds to nearest; the others look at what the layers see, and lose less: gptq chooses codes of int and fp8, "
        "imatrix of q2_k to q6_k, awq scales what goes into either. [rtn; imatrix with --imatrix]",
        default="rtn", panel=QUANTIZATION,
    )
    imatrix: str | None = option(
        "--imatrix", help="An importance matrix of llama.cpp's to go by, .gguf or .dat, instead of a calibration.",
        panel=QUANTIZATION, metavar="FILE", envvar=None,
    )  # fmt: skip
    calibration: str | None = option(
        "--calibration",
        help="What gptq, awq, imatrix and --target-bpw let the model read: a text, or .jsonl with text, prompt or messages. "
        "[bundled]",
        panel=QUANTIZATION, metavar="FILE",
    )
    num_samples: int | None = option(
        "--num-samples",
        help="Most pieces of 512 tokens to calibrate with; for a reranker, pairs with as many tokens. [128]",
        panel=QUANTIZATION, min=1, max=100_000,
    )
    tensor_type: list[str] | None = option(
        "--tensor-type",
        help="Another format, or 'keep', for weights whose name the regular expression is found in. Repeatable; the first "
        "counts.",
        panel=QUANTIZATION, metavar="REGEX=FORMAT", envvar=None,
    )
    target_bpw: float | None = option(
        "--target-bpw",
        help="Bits a weight on average, over all matrices: formats of the layers are chosen by what they cost.",
        panel=QUANTIZATION, metavar="BITS", min=1.0, max=16.0,
    )
    head: str | None = option(
        "--head", help="Format of the head, or keep. [keep; GGUF: q6_k]", panel=QUANTIZATION, metavar="FORMAT"
    )
    embedding: str | None = option(
        "--embedding", help="Format of the embedding, or keep. [keep; GGUF: as the mix has it]",
        panel=QUANTIZATION, metavar="FORMAT",
    )
    allow_requantize: bool = option(
        "--allow-requantize", help="Take a model that is quantized already; both losses add up.",
        default=False, panel=QUANTIZATION,
    )
    output: str | None = option(
        "-o", "--output",
        help="The folder, or GGUF file, that is written, whole or not at all. [in this folder, named after the model]",
        panel=OUTPUT, metavar="PATH", envvar=None,
    )
    force: bool = option(
        "--force", help="Replace the output where it exists.", default=False, panel=OUTPUT, envvar=None
    )
    dry_run: bool = option(
        "--dry-run", help="Say what every weight would become, and write nothing.",
        default=False, panel=OUTPUT, envvar=None,
    )
    no_verify: bool = option(
        "--no-verify", help="Leave out the quality card, which takes two passes over a text.",
        default=False, panel=OUTPUT,
    )
    verify_text: str | None = option(
        "--verify-text", help="The text of the quality card. [bundled]", panel=OUTPUT, metavar="FILE"
    )
    verify_tokens: int = option(
        "--verify-tokens", help="Most tokens that are read of it. [4096]", default=4096, panel=OUTPUT, min=2, max=10_000_000
    )
    json: bool = option("--json", help="What was done as one JSON object.", default=False, panel=OUTPUT)


@expand
def quantize(
    *,
    ctx: typer.Context,
    model_word: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A path, org/repo[@revision], or a short name; or -m.")
    ] = None,
    source: SourceOptions,
    options: QuantizeOptions,
    messages: MessageOptions,
) -> None:
    """Write a model in fewer bits, and say what that costs.

    The quality card compares the new model's next-token probabilities with the original's on a text that was not used for
    calibration: of models that embed, the vectors of its passages and what is nearest to each; of rerankers, scores of pairs of a
    query and a passage. It is kept beside the weights. The input is never changed, and the output appears whole or not at all. A
    run that was interrupted goes on from where it was when the same command is given again. The output's path goes to stdout.
    """
    screen = screen_for(messages)
    name = named_model(ctx.obj, model_word or source.model, EXAMPLE)
    if options.to is None:
        raise UsageError("--to is missing", EXAMPLE)
    named = model_path(options.output)
    began = time.monotonic()
    screen.announce(f"opening {name}")
    with signals.insisting():
        from nanovllm_cli.quantization import pipeline
        from nanovllm_cli.quantization.original import open_original
        from nanovllm_cli.quantization.plan import Choices, make_plan
        from nanovllm_cli.weights.heads import classifies
        from nanovllm_cli.weights.shapes import refuse_made_up
        from nanovllm_cli.weights.source import resolve
    refuse_made_up(name)
    tensor_types = tuple(_tensor_type(text) for text in options.tensor_type or [])
    choices = Choices(options.to, tensor_types, options.head, options.embedding, options.allow_requantize)
    kind = choices.kind  # refuses what means nothing before anything is downloaded
    _check_together(ctx, options, kind)
    importance = None if options.imatrix is None else _importance(options.imatrix)
    calibration = _text(options.calibration, "calibration")
    verify_text = _text(options.verify_text, "verification")
    progress = ProgressLine(screen)
    resolved = resolve(name, offline=source.offline, revision=source.revision, progress=progress)
    output = named or Path(_default_name(resolved.repo or str(resolved.path), options.to, kind))
    card = None
    with open_original(name, resolved.path) as original:
        plan = make_plan(original, choices)
        method = pipeline.Method("imatrix" if importance else options.algorithm, calibration, importance=importance)
        if options.num_samples is not None:
            method = replace(method, num_samples=options.num_samples)
        if options.target_bpw is not None:
            plan = pipeline.plan_with_target(original, plan, options.target_bpw, method, progress)
        if options.dry_run:
            pipeline.check_method(original, plan, method)
            _print_weights(plan, screen)
        else:
            verification = None if options.no_verify else pipeline.Verification(verify_text, options.verify_tokens)
            card = pipeline.quantize_model(
                original, plan, method, output, verification, progress, replace=options.force
            )
    for note in plan.notes:
        screen.say(note)
    _print_table(plan, screen)
    if card is not None:
        screen.say(f"against the original, {card.quality.extent(card.text)}:")
        _print_columns([(name, value) for name, value in card.quality.figures()], screen)
    if options.json:
        record = {
            "model": name, "output": str(output), "written": not options.dry_run, "seconds": round(time.monotonic() - began, 3),
            **plan.as_json(), "algorithm": method.algorithm, "card": None if card is None else card.as_json(),
        }  # fmt: skip
        screen.record(record)
    elif options.dry_run:
        screen.say(f"would write {output} ({size(plan.bytes_after)}); nothing was written")
    else:
        screen.say(f"done in {duration(time.monotonic() - began)}", "dim")
        verb = "run" if original.spec.has_head else "embed"
        query = ' --query "a story"' if classifies(original.checkpoint) else ""
        screen.say(f'nanovllm {verb} {shlex.quote(str(output))} "Once upon a time"{query}', "dim")
        screen.answer(f"{output}\n")


def _check_together(ctx: typer.Context, options: QuantizeOptions, kind: str) -> None:
    """UsageError for options that don't go with each other."""
    if options.imatrix is not None and is_typed(ctx, "algorithm") and options.algorithm != "imatrix":
        raise UsageError(f"--imatrix is given, and {options.algorithm} goes by other numbers", "leave one of them out")
    if (options.algorithm == "rtn" or options.imatrix is not None) and options.target_bpw is None:
        hint = "add --algorithm gptq, awq or imatrix, or leave it out"
        refuse_typed(ctx, ["calibration", "num_samples"], "is given, and nothing is calibrated", hint)
    if options.no_verify:
        why = "is given, and --no-verify leaves the quality card out"
        refuse_typed(ctx, ["verify_text", "verify_tokens"], why, "leave one of them out")
    if kind == "hf" and options.output is not None and options.output.lower().endswith(".gguf"):
        raise UsageError(
            f"{options.to} makes a folder, and {options.output} is called like a GGUF file",
            "--to q4_0, q4_k_m and the like make GGUF files",
        )


def _tensor_type(text: str) -> tuple[str, str]:
    """Split at the last = that stands before a format: regular expressions have them too, and so have formats."""
    match = re.fullmatch(r"(.+)=([a-z][\w-]*(?::\w+(?:=\d*)?)*)", text, re.IGNORECASE | re.DOTALL)
    if match is None:
        raise UsageError(
            f"--tensor-type {text[:80]!r} is not REGEX=FORMAT", "for example: --tensor-type 'down_proj=int8'"
        )
    return match[1], match[2]


def _importance(path: str) -> ImportanceFile:
    from nanovllm_cli.weights.imatrix import read_importance

    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}", "--imatrix takes what llama-imatrix wrote, or --algorithm imatrix measures")
    return read_importance(Path(path))


def _text(path: str | None, split: Literal["calibration", "verification"]) -> NamedText:
    """A file's text, or the bundled one."""
    from nanovllm_cli.quantization.texts import NamedText, bundled_text

    return bundled_text(split) if path is None else NamedText(Path(path).name, read_text(path))


def _default_name(source: str, to: str, kind: str) -> str:
    """Named after the repository, the folder or the file: tiny-int4-g32, tiny-Q4_K_M.gguf."""
    stem = _TYPE_AT_END.sub("", stem_of(source)) or "model"
    if kind == "gguf":
        return f"{stem}-{to.upper()}.gguf"
    return f"{stem}-{to.lower().replace(':group=', '-g').replace(':block=', '-b').replace(':', '-')}"


def _print_weights(plan: Plan, screen: Console) -> None:
    lines = [("weight", "shape", "format", "size", "bits a weight")]
    for item in plan.items:
        rows, width = item.weight.shape
        form = "as it is" if item.format is None else item.format.name
        bits = f"{8 * item.num_bytes / (rows * width):.2f}"
        lines.append((item.weight.output, f"{rows} x {width}", form, size(item.num_bytes), bits))
    _print_columns(lines, screen)


def _print_table(plan: Plan, screen: Console) -> None:
    lines = [("format", "weights", "numbers", "before", "after", "bits a weight")]
    lines += [
        (row.format, str(row.weights), f"{row.numbers:,}", size(row.before), size(row.after), f"{row.bits:.2f}")
        for row in plan.rows()
    ]
    lines.append(
        ("all", str(len(plan.items)), f"{plan.num_weights:,}", size(plan.bytes_before), size(plan.bytes_after),
         f"{plan.bits_a_weight:.2f}")
    )  # fmt: skip
    _print_columns(lines, screen)


def _print_columns(lines: Sequence[tuple[str, ...]], screen: Console) -> None:
    """The first column is words, the others are numbers."""
    for line in aligned(lines, left=(0,)):
        screen.say(line)
