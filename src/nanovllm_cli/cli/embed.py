"""`nanovllm embed`: texts in, a vector for each out, in their order; or, with --query, the texts that are nearest to one.

A reranker has no vectors: with --query it reads each text together with that, and its score takes the cosine's place.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_cli.cli.command import OUTPUT, expand, is_typed, option
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
    progress_of,
    read_line,
    texts_of,
)
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.model_spec import Pooling

if TYPE_CHECKING:
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.weights.scoring import Scoring

EXAMPLE = 'for example: nanovllm embed tiny "Once upon a time"'
VECTORS = "Vectors"
_OF_VECTORS = ["pooling", "dimensions", "prompt_name"]
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of the prompts that sentence-transformers puts before what is sought, and before what is searched."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What is embedded, and what stands before it."""

    file: Files = None
    whole: Whole = False
    prompt_name: str | None = option(
        "--prompt-name", help="Put this prompt of the model's before each text. [the model's default, if it has one]",
        panel=TEXTS, metavar="NAME",
    )
    prefix: str | None = option("--prefix", help="Put this before each text.", panel=TEXTS, metavar="TEXT")
    query: str | None = option(
        "--query",
        help="Print the texts that are nearest to this one in place of vectors, best first. It stands behind the model's prompt "
        "for queries, if there is one, and the others behind that for documents. A reranker scores each text beside it.",
        panel=TEXTS, metavar="TEXT", envvar=None,
    )
    top: int | None = option("--top", help="At most so many of them. [all]", panel=TEXTS, metavar="N", min=1)
    truncate: Truncate = False


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """What vectors are made of, and how they are written."""

    pooling: Pooling | None = option(
        "--pooling",
        help="What becomes the vector: the mean of all tokens, the last one or the first (cls). [as the model has it]",
        panel=VECTORS,
    )
    dimensions: int | None = option(
        "--dimensions", help="Only the first N numbers of each, for models that were trained for it. [all]",
        panel=VECTORS, metavar="N", min=1,
    )
    normalize: bool = option("--normalize/--no-normalize", help="Of length 1. [on]", default=True, panel=VECTORS)
    json: bool = option(
        "--json", help="One JSON object, as OpenAI's API has it; of --query, one a text.", default=False, panel=OUTPUT
    )
    raw: bool = option("--raw", help="Numbers alone, a text a line, with spaces between them.", default=False, panel=OUTPUT)
    output: str | None = option(
        "-o", "--output", help="Write to a file, whole or not at all.", panel=OUTPUT, metavar="FILE", envvar=None
    )


@expand
def embed(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Each is a text; lines of standard input, if any, go before them.")
    ] = None,
    model: ModelOptions,
    texts: TextOptions,
    vectors: VectorOptions,
    engine: MemoryOptions,
    messages: MessageOptions,
) -> None:
    """Make a vector of each text, or find the texts nearest to one.

    A line of JSON for each text, in their order: {"index": 0, "text": "…", "embedding": […]}; with --query, lines of a score (the
    cosine, 1 at most, or what a reranker says, from 0 to 1), a tab and a text. A model pools as its files say, and by the mean
    where they say nothing.
    """
    screen = screen_for(messages)
    _refuse_contradictions(ctx, texts, vectors)
    name, spoken = name_and_words(model, model_word, words or [])
    name = named_model(ctx.obj, name, EXAMPLE)
    read = texts_of(spoken, texts.file, texts.whole, screen, UsageError("there is no text to embed", EXAMPLE))
    config = engine.config(model, max_num_seqs=min(len(read) + 1, EngineConfig().max_num_seqs))
    path = output_path(vectors.output)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(WholeFile(path)) if path is not None else None  # before anything slow happens
        llm = stack.enter_context(contextlib.closing(load(name, model, config, screen).llm))
        _refuse_of_its_kind(ctx, llm)
        _Run(llm, texts, vectors, screen, screen.answer if file is None else file.write).run(read)
        if file is not None:
            file.commit()


class _Run:
    """Raises UsageError, and DoesNotFitError for a text that is too long, before anything is computed."""

    def __init__(
        self, llm: LLM, texts: TextOptions, vectors: VectorOptions, screen: Console, write: Callable[[str], None]
    ) -> None:
        self.llm = llm
        self.texts = texts
        self.vectors = vectors
        self.screen = screen
        self.write = write
        self.pooling = vectors.pooling or llm.embedding.pooling_of_texts
        size = llm.vector_size
        if vectors.dimensions is not None and vectors.dimensions > size:
            raise UsageError(f"--dimensions {vectors.dimensions}: vectors of {llm.name} have {size}", f"at most {size}")

    def run(self, read: list[Text]) -> None:
        asked = None if self.texts.query is None else Text(checked(self.texts.query, "--query"), "--query", "")
        query: list[int] = []
        if asked is None:
            ids = self._encoded(read, self._before(()))
        elif self.llm.scoring is not None:
            ids = self._pairs(read, asked.text, self.llm.scoring)
        else:
            before = self._before(_DOCUMENT)
            query = self._encoded([asked], self.llm.embedding.prompt(self._known(_QUERY), self.pooling))[0]
            ids = self._encoded(read, before)
        began = time.monotonic()
        if asked is None:
            self._write_vectors(read, ids)
        else:
            self._write_nearest(read, self._nearness(query, ids) if query else self._scores(ids))
        read_line(self.screen, len(ids), sum(map(len, ids)) + len(query), time.monotonic() - began)

    def _before(self, kinds: Sequence[str]) -> str:
        """What stands before each text. kinds: names of prompts that are for such texts."""
        if self.texts.prefix is not None:
            return checked(self.texts.prefix, "--prefix")
        name = self._known(kinds) if self.texts.prompt_name is None else self.texts.prompt_name
        before = self.llm.embedding.prompt(name, self.pooling)
        if before and self.texts.prompt_name is None:
            self.screen.say(f"each text stands behind the model's prompt {name or self.llm.embedding.default_prompt!r}", "dim")
        return before

    def _known(self, kinds: Sequence[str]) -> str | None:
        return next((kind for kind in kinds if kind in self.llm.embedding.prompts), None)

    def _encoded(self, texts: list[Text], before: str) -> list[list[int]]:
        """Token ids of each, with what stands before it."""
        limit = self.llm.context_len
        encoded = self.llm.tokenizer.encode_batch([before + each.text for each in texts])
        self._check(texts, encoded, limit, self.texts.truncate)
        return [self.llm.tokenizer.truncated(ids, limit) for ids in encoded]

    def _pairs(self, texts: list[Text], query: str, scoring: Scoring) -> list[list[int]]:
        """What a reranker reads: each text beside the query. Of one that is too long the end is cut, if that is wanted."""
        limit, tokenizer = self.llm.context_len, self.llm.tokenizer
        before = "" if self.texts.prefix is None else checked(self.texts.prefix, "--prefix")
        encoded = [scoring.prompt(tokenizer, query, before + each.text) for each in texts]
        self._check(texts, encoded, limit, self.texts.truncate)
        for i, each in enumerate(texts):
            if len(encoded[i]) > limit:
                encoded[i] = scoring.fitting(tokenizer, query, before + each.text, limit)
        self._check(texts, encoded, limit, False)
        return encoded

    def _check(self, texts: list[Text], encoded: list[list[int]], limit: int, truncate: bool) -> None:
        hint = "the query alone takes too many" if self.texts.truncate else "--truncate cuts what is too long"
        check_lengths(texts, encoded, limit, hint, self.screen, cut=truncate)

    def _vectors(self, ids: list[list[int]]) -> Iterator[list[list[float]]]:
        """Of some texts after the other, as they are to be written."""
        from nanovllm_cli.engine.vectors import unit

        progress = progress_of(self.screen, "embedding", len(ids))
        for first in range(0, len(ids), TOGETHER):
            found = self.llm.embed(ids[first : first + TOGETHER], self.pooling, progress=lambda done, total: progress.advance(1))
            found = [vector[: self.vectors.dimensions] for vector in found]
            yield [unit(vector) for vector in found] if self.vectors.normalize else found
        progress.done()

    def _nearness(self, query: list[int], ids: list[list[int]]) -> list[float]:
        from nanovllm_cli.engine.vectors import nearness

        ((target,),) = self._vectors([query])
        return [nearness(target, vector) for vectors in self._vectors(ids) for vector in vectors]

    def _scores(self, ids: list[list[int]]) -> list[float]:
        progress = progress_of(self.screen, "ranking", len(ids))
        scores: list[float] = []
        for first in range(0, len(ids), TOGETHER):
            scores += self.llm.scores(ids[first : first + TOGETHER], progress=lambda done, total: progress.advance(1))
        progress.done()
        return scores

    def _write_vectors(self, read: list[Text], ids: list[list[int]]) -> None:
        index = 0
        if self.vectors.json:
            self.write('{"object": "list", "model": ' + _dumped(self.llm.name) + ', "data": [')
        for vectors in self._vectors(ids):
            lines = []
            for vector in vectors:
                if self.vectors.json:
                    lines.append((", " if index else "") + _dumped({"object": "embedding", "index": index, "embedding": vector}))
                elif self.vectors.raw:
                    lines.append(" ".join(map(repr, vector)) + "\n")
                else:
                    lines.append(_dumped({"index": index, "text": read[index].shown, "embedding": vector}) + "\n")
                index += 1
            self.write("".join(lines))
        if self.vectors.json:
            count = sum(map(len, ids))
            self.write('], "usage": ' + _dumped({"prompt_tokens": count, "total_tokens": count}) + "}\n")

    def _write_nearest(self, read: list[Text], scores: list[float]) -> None:
        from nanovllm_cli.engine.vectors import by_score

        for index, score in by_score(scores)[: self.texts.top]:
            shown = read[index].shown
            if self.vectors.json:
                self.write(_dumped({"index": index, "score": score, "text": shown}) + "\n")
            else:
                self.write(f"{score:.6f}\t{' '.join(shown.split())}\n")


def _refuse_contradictions(ctx: typer.Context, texts: TextOptions, vectors: VectorOptions) -> None:
    """Raises UsageError for options that cannot both have an effect, or none where they are."""
    refuse_both(json=vectors.json, raw=vectors.raw)
    refuse_both(prompt_name=texts.prompt_name is not None, prefix=texts.prefix is not None)
    if texts.query is None:
        refuse_typed(ctx, ["top"], "is given, and nothing is sought", "add --query TEXT, or leave it out")
    else:
        refuse_typed(ctx, ["raw", "normalize"], "is given, and --query prints no vectors", "leave one of them out")


def _refuse_of_its_kind(ctx: typer.Context, llm: LLM) -> None:
    """Raises UsageError for options without a meaning for it, and UnsupportedError where a reranker is asked for vectors."""
    if llm.scoring is None:
        if llm.classes is not None:
            raise UnsupportedError(f"{llm.name} is a classifier, which makes no vectors", "nanovllm classify MODEL reads texts")
        refuse_typed(ctx, ["chat_template"], "is given, and the model is no reranker", "leave it out: texts are read as they are")
        return
    if not is_typed(ctx, "query"):
        raise UnsupportedError(f"{llm.name} is a reranker, which makes no vectors", "--query TEXT ranks the texts")
    refuse_typed(ctx, _OF_VECTORS, "is given, and a reranker makes no vectors", "leave it out")


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
