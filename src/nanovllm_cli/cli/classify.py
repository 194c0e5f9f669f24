"""`nanovllm classify`: texts in, what a classifier makes of each out, in their order."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm_cli.cli.batch_lines import parsed
from nanovllm_cli.cli.command import OUTPUT, expand, option
from nanovllm_cli.cli.files import WholeFile, output_path
from nanovllm_cli.cli.inputs import checked
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import load, name_and_words, named_model
from nanovllm_cli.cli.options import MemoryOptions, MessageOptions, ModelOptions, ModelWord, refuse_both
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.texts import (
    TEXTS,
    TOGETHER,
    Files,
    Text,
    Truncate,
    Whole,
    check_lengths,
    labels_among,
    progress_of,
    read_line,
    texts_of,
)
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import NanovllmError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.weights.classes import Classes, Classification

EXAMPLE = 'for example: nanovllm classify MODEL "What a day!"'
LABELS = "Labels"
_HALF = 0.5
_CONVERSATION = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'


@dataclass(frozen=True, slots=True)
class JudgedOptions:
    """What is classified."""

    file: Files = None
    whole: Whole = False
    second: str | None = option(
        "--second", help="Put this behind each text, for models that judge two together, as whether one follows from the other.",
        panel=TEXTS, metavar="TEXT", envvar=None,
    )
    chat: bool = option(
        "--chat", help='Each text is a conversation, {"messages": [...]}, as models of rewards read them.',
        default=False, panel=TEXTS, envvar=None,
    )
    truncate: Truncate = False


@dataclass(frozen=True, slots=True)
class LabelOptions:
    """Which labels, and how they are written."""

    top: int | None = option(
        "--top", help="So many labels of each text. [the likeliest; where labels exclude no other, all of 0.5 and more]",
        panel=LABELS, metavar="N", min=1,
    )
    label: list[str] | None = option("--label", help="Only this one. Repeatable.", panel=LABELS, metavar="NAME", envvar=None)
    min_score: float | None = option("--min-score", help="Only labels of this score and more.", panel=LABELS, metavar="P")
    raw: bool = option("--raw", help="The numbers as they are before they are probabilities.", default=False, panel=LABELS)
    json: bool = option("--json", help="A JSON object a text, with all labels.", default=False, panel=OUTPUT)
    output: str | None = option(
        "-o", "--output", help="Write to a file, whole or not at all.", panel=OUTPUT, metavar="FILE", envvar=None
    )


@expand
def classify(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Each is a text; lines of standard input, if any, go before them.")
    ] = None,
    model: ModelOptions,
    texts: JudgedOptions,
    labels: LabelOptions,
    engine: MemoryOptions,
    messages: MessageOptions,
) -> None:
    """Tell the class of each text: its mood, its language, whether it is spam, how good an answer is.

    A line of a score (a probability), a tab, a label, a tab and the text. Models are those that are published as classifiers, or
    as models of rewards; `nanovllm run --choice` has any other one choose.
    """
    screen = screen_for(messages)
    refuse_both(second=texts.second is not None, chat=texts.chat)
    name, spoken = name_and_words(model, model_word, words or [])
    name = named_model(ctx.obj, name, EXAMPLE)
    read = texts_of(spoken, texts.file, texts.whole, screen, UsageError("there is no text to classify", EXAMPLE))
    config = engine.config(model, max_num_seqs=min(len(read), EngineConfig().max_num_seqs))
    path = output_path(labels.output)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(WholeFile(path)) if path is not None else None  # before anything slow happens
        llm = stack.enter_context(contextlib.closing(load(name, model, config, screen).llm))
        if llm.classes is None:
            raise _has_no_labels(llm)
        if llm.classes.each:
            raise UnsupportedError(f"{llm.name} labels tokens, and no texts", "nanovllm redact MODEL --json tells what they mark")
        if not texts.chat:
            refuse_typed(ctx, ["chat_template"], "is given, and texts are read as they are", "--chat reads conversations")
        write = screen.answer if file is None else file.write
        _Run(llm, llm.classes, texts, labels, screen, write).run(read)
        if file is not None:
            file.commit()


class _Run:
    """Raises UsageError, and DoesNotFitError for a text that is too long, before anything is computed."""

    def __init__(
        self, llm: LLM, classes: Classes, texts: JudgedOptions, labels: LabelOptions, screen: Console,
        write: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._llm, self._classes = llm, classes
        self._texts, self._labels = texts, labels
        self._screen, self._write = screen, write
        wanted = labels_among(classes.labels, labels.label)
        self._wanted = [i for i, label in enumerate(classes.labels) if label in wanted]

    def run(self, read: list[Text]) -> None:
        ids = [self._ids(each) for each in read]
        limit, texts = self._llm.context_len, self._texts
        check_lengths(read, ids, limit, "--truncate cuts what is too long", self._screen, cut=texts.truncate)
        ids = [self._llm.tokenizer.truncated(each, limit) for each in ids]
        began, progress = time.monotonic(), progress_of(self._screen, "classifying", len(read))
        for first in range(0, len(ids), TOGETHER):
            part = ids[first : first + TOGETHER]
            found = self._llm.classify(part, activation=not self._labels.raw, progress=lambda done, total: progress.advance(1))
            self._write("".join(self._lines(first + i, read[first + i], each) for i, each in enumerate(found)))
        progress.done()
        read_line(self._screen, len(ids), sum(map(len, ids)), time.monotonic() - began)

    def _ids(self, text: Text) -> Sequence[int]:
        if self._texts.chat:
            return self._conversation(text)
        second = None if self._texts.second is None else checked(self._texts.second, "--second")
        return self._classes.prompt(self._llm.tokenizer, text.text, second)

    def _conversation(self, text: Text) -> Sequence[int]:
        try:
            messages = parsed(text.text.encode(), _CONVERSATION).get("messages")
            if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
                raise UsageError("no list of messages", f"for example: {_CONVERSATION}")
            return self._llm.encode_chat(messages, add_generation_prompt=False)
        except NanovllmError as error:
            error.message = f"{text.place}: {error.message}"
            raise

    def _lines(self, index: int, text: Text, found: Classification) -> str:
        """What is printed of one text; nothing, where no label of it is wanted."""
        ordered = sorted(self._wanted, key=lambda i: -found.probs[i])
        if self._labels.json:
            scores = [{"label": self._classes.labels[i], "score": found.probs[i]} for i in self._taken(ordered, found)]
            record = {"index": index, "text": text.shown, "label": found.label, "score": max(found.probs), "labels": scores}
            return json.dumps(record, ensure_ascii=False) + "\n"
        shown = " ".join(text.shown.split())
        return "".join(f"{found.probs[i]:.6f}\t{self._classes.labels[i]}\t{shown}\n" for i in self._taken(ordered, found))

    def _taken(self, ordered: list[int], found: Classification) -> list[int]:
        """Those of the labels, likeliest first, that are to be told."""
        asked, most, least = self._labels, self._labels.top, self._labels.min_score
        if most is None and least is None and asked.label is None and not asked.json:
            likely = [] if self._classes.exclusive or asked.raw else [i for i in ordered if found.probs[i] >= _HALF]
            return likely or ordered[:1]
        return [i for i in ordered[:most] if least is None or found.probs[i] >= least]


def _has_no_labels(llm: LLM) -> UnsupportedError:
    does, instead = "writes text", "nanovllm run MODEL --choice spam --choice ham has it choose"
    if llm.scoring is not None:
        does, instead = "is a reranker", "nanovllm embed MODEL --query TEXT ranks texts"
    elif not llm.spec.has_head:
        does, instead = "embeds texts", "nanovllm embed MODEL --query TEXT finds those that are near"
    return UnsupportedError(f"{llm.name} {does}, and has no labels", instead)
