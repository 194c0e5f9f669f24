"""`nanovllm perplexity`: how well a model knows a text; and what another form of it has lost. The work is in
`quantization/perplexity.py` and `card.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.command import ENGINE, OUTPUT, expand, is_typed, option
from nanovllm_cli.cli.inputs import STANDARD_INPUT, read_standard_input, read_text
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_models
from nanovllm_cli.cli.options import Device, DType, MessageOptions, ModelWord, SourceOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, duration
from nanovllm_cli.cli.shared_options import HfOverrides, OverrideKv, overrides
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import DifferenceError, UnsupportedError, UsageError
from nanovllm_cli.overrides import as_overrides

if TYPE_CHECKING:
    from nanovllm_cli.quantization.original import Original
    from nanovllm_cli.quantization.perplexity import Windows
    from nanovllm_cli.quantization.texts import NamedText
    from nanovllm_cli.quantization.vector_quality import AnyQuality

EXAMPLE = "for example: nanovllm perplexity tiny"
MEASURING = "Measuring"
_OF_TEXTS = (".txt", ".md", ".raw")
"""Ends of names. WikiText's, by which llama-perplexity is shown, has the last."""


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """What is read, and how it is computed."""

    text: str | None = option(
        "-f", "--file", "--text", help="The text, taken as it is; - is standard input. [bundled]",
        panel=MEASURING, metavar="FILE", envvar=None,
    )
    ctx_size: int = option(
        "-c", "--ctx-size",
        help="Tokens of a window; each begins anew, and what is left at the end of the text is none. [512] Of models that embed "
        "or rank, the most of a passage. [64]",
        default="512", panel=MEASURING, metavar="SIZE", parser=parsers.count, envvar=None,
    )
    chunks: int = option(
        "--chunks", help="Most windows, passages, or a reranker's queries; -1 takes the whole text. [-1]",
        default=-1, panel=MEASURING, min=-1, envvar=None,
    )
    all: bool = option(
        "--all", help="Score all tokens of a window but its first, as quality cards do, and not its second half alone.",
        default=False, panel=MEASURING, envvar=None,
    )
    parse_special: bool | None = option(
        "--parse-special/--no-parse-special",
        help="Whether control tokens written in the text are what they name. [on for the bundled text, which has some; off for "
        "others, as llama-perplexity has it]",
        panel=MEASURING, envvar=None,
    )  # fmt: skip
    override_kv: OverrideKv = None
    hf_overrides: HfOverrides = None
    dtype: DType = EngineConfig().dtype
    device: Device = "auto"
    threads: int | None = option("-t", "--threads", help="CPU threads. [-1: one a core; of a Mac, one a fast core]", panel=ENGINE)
    json: bool = option("--json", help="The result as one JSON object.", default=False, panel=OUTPUT)
    fail_above: float | None = option(
        "--fail-above",
        help="Exit with 7 where the mean KL divergence is above this, such as 0.02; of models that embed, 1 minus the mean "
        "cosine; of rerankers, the mean difference of scores. [never]",
        panel=OUTPUT, metavar="LOSS", min=0.0, envvar=None,
    )  # fmt: skip

    @parsers.by_their_flags()
    def engine_config(self) -> EngineConfig:
        """Raises UsageError."""
        threads, others = None if self.threads == -1 else self.threads, overrides(self.override_kv, self.hf_overrides)
        return EngineConfig(dtype=self.dtype, device=self.device, threads=threads, overrides=as_overrides(others))


@expand
def perplexity(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    other_word: Annotated[
        str | None,
        typer.Argument(metavar="OTHER", help="Another form of the same model, such as a quantized one."),
    ] = None,
    source: SourceOptions,
    options: PerplexityOptions,
    messages: MessageOptions,
) -> None:
    """Measure the perplexity of a text, or what another form of a model has lost.

    As llama-perplexity does it, so that numbers can be compared: the text is cut into windows, BOS stands in place of a window's
    first token where the tokenizer puts one before a text, and the second half of each window is scored. With OTHER both
    models read the same windows, one after the other: KL divergence of OTHER's next-token probabilities from MODEL's, how often
    the most likely token is the same, and both perplexities. Other settings, by --override-kv, are OTHER's then.

    Models that embed read passages of the text instead: the cosine of each one's two vectors, and whether its nearest passages
    stay the same; rerankers pairs of a query and a passage: how far their scores differ.
    """
    screen = screen_for(messages)
    names = named_models(ctx.obj, [word for word in (source.model, model_word, other_word) if word], EXAMPLE)
    _check(ctx, options, names)
    config = options.engine_config()
    text = measured_text(options.text, screen)
    screen.announce(f"opening {names[0]}")
    with signals.insisting():
        from nanovllm_cli.quantization import perplexity as measuring
        from nanovllm_cli.quantization.passages import PASSAGE, Cut
    progress = ProgressLine(screen)
    parses = options.text is None if options.parse_special is None else options.parse_special
    with _opened(names, source, config, progress) as models:
        screen.status("cutting the text")
        if len(models) == 1 and not models[0].spec.has_head:
            raise UnsupportedError(
                f"{names[0]} embeds or ranks: it gives no probabilities, and so no text has a perplexity",
                "name another form of it behind it: their vectors, or scores, are compared",
            )
        if len(models) == 2 and measuring.by_vectors(*models):
            refuse_typed(ctx, ["all"], "is given, and nothing is scored in models that embed or rank", "leave it out")
            passage = options.ctx_size if is_typed(ctx, "ctx_size") else PASSAGE
            most = None if options.chunks == -1 else options.chunks
            cut = Cut(passage, most=most, parse_special=parses, reads_lines=False)
            record = {"model": names[0], "text": text.name, "ctx_size": passage}

            def by_vectors() -> AnyQuality:
                one, other = models
                return measuring.compare_vectors(one, other, text, cut, progress, config)

            _compare(models, by_vectors, lambda quality: [("compared", quality.extent(text.name))], record, options, screen)
            return
        tokenizers = [model.tokenizer() for model in models]
        every = [measuring.text_ids(tokenizer, text, parse_special=parses) for tokenizer in tokenizers]
        most = None if options.chunks == -1 else options.chunks
        windows = measuring.cut(every[0], tokenizers[0].prefix_ids, options.ctx_size, most=most, whole=options.all)
        measuring.check_fits(windows, models[0].spec)
        record = {"model": names[0], "text": text.name, "ctx_size": options.ctx_size, "chunks": len(windows.ids)}
        record |= {"scored": "all" if options.all else "second half", "tokens": windows.scored}
        if len(models) == 1:
            _measure(models[0], windows, record, options, config, screen, progress)
        else:
            measuring.check_alike(every[0], every[1], models[0].spec, models[1].spec)

            def by_logits() -> AnyQuality:
                one, other = (model.checkpoint for model in models)
                return measuring.compare(one, other, windows, progress, config)

            _compare(models, by_logits, lambda quality: _facts(record), record, options, screen)


def _measure(
    model: Original, windows: Windows, record: dict[str, Any], options: PerplexityOptions, config: EngineConfig,
    screen: Console, progress: ProgressLine,
) -> None:  # fmt: skip
    from nanovllm_cli.quantization.logits import MeasuredModel
    from nanovllm_cli.quantization.perplexity import perplexity as measure

    loaded = MeasuredModel(model.checkpoint, options.ctx_size, config, progress=progress)
    began = time.monotonic()
    found = measure(loaded, windows, progress, lambda so_far: progress.found(f"perplexity {so_far}"))
    seconds = time.monotonic() - began
    rate = len(windows.ids) * options.ctx_size / seconds
    if options.json:
        record |= {"perplexity": asdict(found), "dtype": str(loaded.dtype).removeprefix("torch.")}
        record |= {"seconds": round(seconds, 3), "tokens_per_second": round(rate, 1)}
    _show([("perplexity", str(found)), *_facts(record)], record, options, screen)
    screen.say(f"{rate:,.0f} tokens/s, {duration(seconds)}", "dim")


def _compare(
    models: Sequence[Original], measure: Callable[[], AnyQuality], facts: Callable[[AnyQuality], list[tuple[str, str]]],
    record: dict[str, Any], options: PerplexityOptions, screen: Console,
) -> None:  # fmt: skip
    """facts: what else stands below the figures. Raises DifferenceError for more loss than may be."""
    from nanovllm_cli.quantization.verify_text import OurWords, differences

    one, other = models
    for line in differences(OurWords(one.checkpoint.path), OurWords(other.checkpoint.path)):
        screen.say(f"the tokenizers differ, but not over this text: {line}", "dim")
    began = time.monotonic()
    quality = measure()
    seconds = time.monotonic() - began
    figures = [*quality.figures(f"of {one.name}", f"of {other.name}"), *facts(quality)]
    record |= {"other": other.name, "quality": asdict(quality), "seconds": round(seconds, 3)}
    _show(figures, record, options, screen)
    screen.say(f"done in {duration(seconds)}", "dim")
    name, loss = quality.loss
    if options.fail_above is not None and loss > options.fail_above:
        raise DifferenceError(f"{name} is {loss:.5f}, above {options.fail_above:g}")


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    where = f"the {record['scored']} of " if record["scored"] != "all" else ""
    windows = "a window" if record["chunks"] == 1 else f"{record['chunks']:,} windows"
    return [("scored", f"{record['tokens']:,} tokens of {record['text']}: {where}{windows} of {record['ctx_size']:,}")]


def _show(figures: Sequence[tuple[str, str]], record: dict[str, Any], options: PerplexityOptions, screen: Console) -> None:
    screen.status("")
    if options.json:
        screen.record(record)
    else:
        screen.lines(aligned(figures, left=(0, 1)))


def _check(ctx: typer.Context, options: PerplexityOptions, names: Sequence[str]) -> None:
    """UsageError, or UnsupportedError, for what was asked and can't be."""
    if len(names) > 2:
        raise UsageError("more than two models were named", EXAMPLE)
    if len(names) == 2 and names[1].endswith(_OF_TEXTS):
        raise UsageError(f"{names[1]} is a text, and no form of {names[0]}", f"a text is named by -f: {names[0]} -f {names[1]}")
    if len(names) == 1 and options.fail_above is not None:
        raise UsageError("--fail-above has no meaning without OTHER", "it is about what OTHER has lost")
    if options.chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to measure", "-1 takes the whole text")


def measured_text(path: str | None, screen: Console) -> NamedText:
    """A file's, standard input's, or the bundled one."""
    from nanovllm_cli.quantization.texts import NamedText, bundled_text

    if path is None:
        return bundled_text("verification")
    if path == STANDARD_INPUT:
        return NamedText("standard input", read_standard_input(screen))
    return NamedText(Path(path).name, read_text(path))


@contextmanager
def _opened(
    names: Sequence[str], source: SourceOptions, config: EngineConfig, progress: ProgressLine
) -> Iterator[list[Original]]:
    """Other settings are the last one's: they make another form of a model."""
    from nanovllm_cli.quantization.original import open_original
    from nanovllm_cli.weights.source import resolve

    found = [resolve(name, offline=source.offline, revision=source.revision, progress=progress) for name in names]
    given = [(), config.overrides][-len(names) :]
    with ExitStack() as stack:
        several = zip(names, found, given, strict=True)
        yield [stack.enter_context(open_original(name, each.path, others)) for name, each, others in several]
