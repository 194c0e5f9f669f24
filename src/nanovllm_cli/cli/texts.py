"""Texts that a command reads instead of prompts: arguments, lines of files and of standard input, and how long they may be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from nanovllm_cli.cli.command import typer_option
from nanovllm_cli.cli.inputs import STANDARD_INPUT, checked, read_standard_input, read_text
from nanovllm_cli.cli.log import ON_SCREEN
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, counted
from nanovllm_cli.errors import DoesNotFitError, UsageError

TEXTS = "Texts"
TOGETHER = 1024
"""Texts of which what the model makes is in memory at once."""

Files = Annotated[
    list[str] | None,
    typer_option("-f", "--file", help="A text a line from a file; - is standard input. Repeatable.",
                 panel=TEXTS, metavar="FILE", envvar=None),
]  # fmt: skip
Whole = Annotated[bool, typer_option("--whole", help="Each file, and standard input, is one text.", panel=TEXTS, envvar=None)]
Truncate = Annotated[
    bool, typer_option("--truncate", help="Cut texts that are longer than the context, instead of failing.", panel=TEXTS)
]

logger = logging.getLogger(__name__)


class Text(NamedTuple):
    """place: where it comes from, for messages. shown: how it is told from others in what is printed."""

    text: str
    place: str
    shown: str


def texts_of(words: Sequence[str], files: Sequence[str] | None, whole: bool, screen: Console, nothing: UsageError) -> list[Text]:
    """All that there are: of standard input, of files, and the arguments. Raises `nothing` where there are none."""
    sources = [name for name in files or () if name != STANDARD_INPUT]
    found: list[Text] = []
    if STANDARD_INPUT in (*words, *(files or ())) or (sys.stdin is not None and not sys.stdin.isatty()):
        found += _of_source(read_standard_input(screen), "standard input", whole)
    for name in sources:
        found += _of_source(read_text(name), name, whole)
    said = [word for word in words if word != STANDARD_INPUT]
    found += [Text(checked(word, f"text {i}"), f"text {i}", word) for i, word in enumerate(said, 1)]
    if not found:
        raise nothing
    return found


def _of_source(content: str, name: str, whole: bool) -> list[Text]:
    """One text, which the source's name stands for, or one of each line that is not empty."""
    if whole:
        text = content.removesuffix("\n").removesuffix("\r")
        return [Text(text, name, name)] if text else []
    lines = (line.removesuffix("\r") for line in content.split("\n"))
    return [Text(line, f"line {number} of {name}", line) for number, line in enumerate(lines, 1) if line.strip()]


def check_lengths(
    texts: Sequence[Text], encoded: Sequence[Sequence[int]], limit: int, hint: str, screen: Console, *, cut: bool
) -> None:
    """Raises UsageError for a text without tokens and, unless longer ones are cut, DoesNotFitError for one of more than `limit`.
    hint: what to do about that."""
    for each, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise UsageError(f"{each.place} has no tokens: there is nothing to read")
        if len(ids) > limit and not cut:
            raise DoesNotFitError(f"{each.place} has {len(ids)} tokens, and {limit} fit into the context", hint)
    if too_long := sum(len(ids) > limit for ids in encoded):
        screen.say(f"{too_long} of {len(encoded)} texts are cut to {limit} tokens")


def read_line(screen: Console, num_texts: int, num_tokens: int, seconds: float) -> None:
    """A line of how fast texts were read."""
    rate = num_tokens / max(seconds, 1e-9)
    told = f"{counted(num_texts, 'text')}, {counted(num_tokens, 'token')} in {seconds:.1f} s, {rate:,.0f} tok/s"
    logger.info("%s", told, extra={ON_SCREEN: not screen.quiet})
    screen.say(told, "dim")


def progress_of(screen: Console, stage: str, num_texts: int) -> ProgressLine:
    progress = ProgressLine(screen)
    progress.stage(stage, num_texts, "texts")
    return progress


def labels_among(labels: Sequence[str], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Those of a model's labels that are asked for, in any case. Raises UsageError for one that it has not."""
    if asked is None:
        return tuple(labels)
    names = {name.casefold(): name for name in asked}
    for folded, name in names.items():
        if folded not in map(str.casefold, labels):
            some = ", ".join(labels[:20]) + (", …" if len(labels) > 20 else "")
            raise UsageError(f"the model has no label {name!r}", f"there are: {some}")
    return tuple(label for label in labels if label.casefold() in names)
