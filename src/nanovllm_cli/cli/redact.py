"""`nanovllm redact`: a text in, the same out without what a model marks in it: names, addresses, secrets."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_cli.cli.command import OUTPUT, expand, option
from nanovllm_cli.cli.files import WholeFile, output_path
from nanovllm_cli.cli.inputs import MAX_INPUT_BYTES, STANDARD_INPUT, as_it_is, checked, decode, open_input
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import load, name_and_words, named_model
from nanovllm_cli.cli.options import MemoryOptions, MessageOptions, ModelOptions, ModelWord
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.texts import TEXTS, labels_among, read_line
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.text.spans import Span

EXAMPLE = "for example: nanovllm redact MODEL <letter.txt"
MARKED = "What is taken out"
_BLOCK = 1 << 16  # characters of a long text that are looked at together, up to the end of a line
_FIELD = re.compile(r"\{(label|n)\}")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read."""

    file: list[str] | None = option(
        "-f", "--file", help="A file; - is standard input. Repeatable.", panel=TEXTS, metavar="FILE", envvar=None
    )
    lines: bool = option(
        "--lines", help="Look at each line by itself, and write it as soon as it is there.", default=False, panel=TEXTS
    )


@dataclass(frozen=True, slots=True)
class MarkedOptions:
    """What is taken out, and what comes in its place."""

    label: list[str] | None = option(
        "--label", help="Only what is marked so. Repeatable. [all]", panel=MARKED, metavar="NAME", envvar=None
    )
    min_score: float = option(
        "--min-score", help="Only what the model is so sure of, from 0 to 1. [0]", default=0.0, panel=MARKED, metavar="P",
        min=0.0, max=1.0,
    )
    with_: str = option(
        "--with",
        help="What stands in its place: {label} is the label, {n} a number, the same for the same words. [[{label}]]",
        default="[{label}]", panel=MARKED, metavar="TEXT",
    )
    json: bool = option("--json", help="One JSON object: the text, and what was marked in it.", default=False, panel=OUTPUT)
    output: str | None = option(
        "-o", "--output", help="Write to a file, whole or not at all.", panel=OUTPUT, metavar="FILE", envvar=None
    )


@expand
def redact(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Behind standard input and files, if any.")] = None,
    model: ModelOptions,
    read: ReadOptions,
    marked: MarkedOptions,
    engine: MemoryOptions,
    messages: MessageOptions,
) -> None:
    """Take names, addresses, secrets out of a text, by a model that marks them.

    The rest comes out as it went in, byte by byte. Such a model finds most of what it was trained for, and not all: what must not
    get out is for a person to look at.
    """
    screen = screen_for(messages)
    if marked.json and read.lines:
        raise UsageError("--json and --lines cannot be used together")
    name, spoken = name_and_words(model, model_word, words or [])
    name = named_model(ctx.obj, name, EXAMPLE)
    path = output_path(marked.output)
    text = None if read.lines else as_it_is(spoken, read.file or [], screen)
    if text is None and not read.lines:
        raise UsageError("there is no text to read", EXAMPLE)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(WholeFile(path)) if path is not None else None  # before anything slow happens
        llm = stack.enter_context(contextlib.closing(load(name, model, engine.config(model), screen).llm))
        if llm.classes is None or not llm.classes.each:
            raise UnsupportedError(f"{llm.name} gives tokens no labels, and marks nothing", "privacy-filter is a model that does")
        refuse_typed(ctx, ["chat_template"], "is given, and texts are read as they are", "leave it out")
        run = _Run(llm, marked, screen, screen.verbatim if file is None else file.write)
        if text is None:
            run.lines(spoken, read.file or [])
        else:
            run.whole(text, ends="\n" if spoken and not text.endswith("\n") else "")
        if file is not None:
            file.commit()


class _Run:
    """Raises UsageError for labels that the model has not."""

    def __init__(self, llm: LLM, marked: MarkedOptions, screen: Console, write: Callable[[str], None]) -> None:
        from nanovllm_cli.text.spans import Marking

        assert llm.classes is not None
        self._llm, self._marked, self._screen, self._write = llm, marked, screen, write
        self._labels = labels_among(Marking.of(llm.classes.labels).names, marked.label)
        self._instead = checked(marked.with_, "--with")
        self._numbers: dict[str, dict[str, int]] = {}
        self._counts: Counter[str] = Counter()
        self._texts, self._began = 0, time.monotonic()

    def whole(self, text: str, ends: str = "") -> None:
        """ends: what is written behind it."""
        found, at, parts = list[dict[str, Any]](), 0, list[str]()
        for block in _blocks(text):
            spans = self._spans(block)
            written = self._without(block, spans)
            if self._marked.json:
                parts.append(written)
                found += [_record(block, span, at) for span in spans]
            else:
                self._write(written)
            at += len(block)
        if self._marked.json:
            self._write(json.dumps({"text": "".join(parts), "spans": found}, ensure_ascii=False) + "\n")
        else:
            self._write(ends)
        self._tell()

    def lines(self, words: Sequence[str], files: Sequence[str]) -> None:
        reads = STANDARD_INPUT in (*words, *files) or not (words or files)
        for name in dict.fromkeys([*([STANDARD_INPUT] if reads else []), *files]):
            with open_input(name, self._screen) as source:
                for number, data in enumerate(iter(lambda: source.readline(MAX_INPUT_BYTES), b""), 1):
                    place = f"line {number} of {'standard input' if name == STANDARD_INPUT else name}"
                    if len(data) == MAX_INPUT_BYTES:
                        raise DoesNotFitError(f"{place} has more than {MAX_INPUT_BYTES >> 20} MiB", "cut it")
                    self._line(decode(data, place, exact=True))
        for word in words:
            if word != STANDARD_INPUT:
                self._line(checked(word) + "\n")
        self._tell()

    def _line(self, line: str) -> None:
        self._write("".join(self._without(block, self._spans(block)) for block in _blocks(line)))

    def _spans(self, text: str) -> list[Span]:
        (found,) = self._llm.spans(text)
        self._texts += 1
        return [span for span in found if span.label in self._labels and span.score >= self._marked.min_score]

    def _without(self, text: str, spans: Sequence[Span]) -> str:
        parts, at = list[str](), 0
        for span in spans:
            parts += [text[at : span.start], self._in_place_of(span.label, text[span.start : span.end])]
            at = span.end
        self._counts.update(span.label for span in spans)
        return "".join([*parts, text[at:]])

    def _in_place_of(self, label: str, words: str) -> str:
        known = self._numbers.setdefault(label, {})
        number = known.setdefault(" ".join(words.split()).casefold(), len(known) + 1)
        return _FIELD.sub(lambda field: label if field[1] == "label" else str(number), self._instead)

    def _tell(self) -> None:
        marked = ", ".join(f"{count} {label}" for label, count in self._counts.most_common()) or "nothing"
        self._screen.say(f"marked: {marked}", "dim")
        read_line(self._screen, self._texts, self._llm.stats().scheduled_tokens, time.monotonic() - self._began)


def _record(text: str, span: Span, at: int) -> dict[str, Any]:
    """at: where the text begins in what was read."""
    return {
        "label": span.label, "start": at + span.start, "end": at + span.end, "score": span.score,
        "text": text[span.start : span.end],
    }  # fmt: skip


def _blocks(text: str) -> Iterator[str]:
    """Parts of it, each up to the end of a line where that is near."""
    at = 0
    while at < len(text):
        end = min(at + _BLOCK, len(text))
        if end < len(text):
            end = text.rfind("\n", at + _BLOCK // 2, end) + 1 or end
        yield text[at:end]
        at = end
