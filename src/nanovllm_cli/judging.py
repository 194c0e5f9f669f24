"""Judging: what an `LLM` says of texts instead of answering them: vectors, how near two are, scores of documents, classes, and
what tokens mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Never, TypeGuard, get_args

from nanovllm_cli.config import Lora
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.requests import Requests
from nanovllm_cli.engine.vectors import nearness, unit
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.model_spec import Pooled, Pooling
from nanovllm_cli.progress import Counted, counting
from nanovllm_cli.prompts import Prompt, listed, token_ids
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.spans import WINDOW, Marking, Piece, Span, joined, pieces
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vllm_names import refuse_others
from nanovllm_cli.weights.classes import Classes, Classification
from nanovllm_cli.weights.pooling import Embedding
from nanovllm_cli.weights.scoring import Scoring

_AT_ONCE = 64  # texts whose tokens get labels, and pieces of them, whose numbers are in memory as Python has them

TextOrPair = Prompt | tuple[str, str]
"""A prompt, or two texts that are read together."""


class Judging:
    """embedding: what its files say of vectors of texts. scoring: of a model that ranks; classes: of one that has labels."""

    name: str
    tokenizer: Tokenizer
    embedding: Embedding
    scoring: Scoring | None
    classes: Classes | None
    context_len: int
    _requests: Requests

    @property
    def pooling(self) -> Pooled:
        """How it makes one vector of a text, where nobody says otherwise."""
        return self.embedding.pooling or "mean"

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        *,
        lora: Sequence[Lora] = (),
        progress: Counted | None = None,
        use_tqdm: bool = False,
        **others: Never,
    ) -> list[list[float]]:
        """[vector_size] numbers for each text, not normalised: the mean over its tokens behind the model's last norm, or the row
        of its last or first one, and what dense layers make of it; None: as the model has it. lora: see SamplingParams. Raises as
        `generate` does."""
        refuse_others("embed", others, ("pooling", "lora"))
        progress = counting("texts", progress, use_tqdm)
        if (refusal := self.embedding.refusal) is not None:
            raise UnsupportedError(refusal.message, refusal.hint)
        if pooling is not None and pooling not in get_args(Pooling):
            raise UsageError(f"unknown pooling {pooling!r}", f"known: {', '.join(get_args(Pooling))}")
        prompts = [token_ids(text, self.tokenizer.encode) for text in listed(texts)]
        return self.pooled(prompts, pooling or self.pooling, progress, SamplingParams(lora=lora).lora)

    def rank(self, query: str, documents: Sequence[str], *, progress: Counted | None = None) -> list[float]:
        """How well each document answers a query, in their order: a reranker's score of the two together, or the cosine of their
        vectors, of a model that embeds. Raises as `generate` does."""
        if not isinstance(documents, list | tuple) or not all(isinstance(text, str) for text in (query, *documents)):
            raise UsageError("a query is a text, and documents are a list of texts")
        if self.scoring is not None:
            return self.scores([self.scoring.prompt(self.tokenizer, query, each) for each in documents], progress=progress)
        target, *vectors = map(unit, self.embed([query, *documents], progress=progress))
        return [nearness(target, vector) for vector in vectors]

    def scores(self, prompts: Sequence[Sequence[int]], *, progress: Counted | None = None) -> list[float]:
        """A reranker's score of each prompt that its `scoring` has made of a query and a document. UnsupportedError where it is
        none; the rest as `generate`."""
        if self.scoring is None:
            raise UnsupportedError(f"{self.name} is no reranker", "rank goes by the vectors of a model that embeds")
        return list(map(self.scoring.score, self.pooled(prompts, self.pooling, progress)))

    def classify(
        self,
        texts: TextOrPair | Sequence[TextOrPair],
        *,
        activation: bool = True,
        progress: Counted | None = None,
        use_tqdm: bool = False,
        **others: Never,
    ) -> list[Classification]:
        """The likeliest label of each text, or pair of texts, and probabilities of all `classes.labels`. Control tokens in them
        are text. activation: False for the head's numbers. UnsupportedError of a model without labels; else as `generate`."""
        refuse_others("classify", others, ("activation",))
        progress, classes = counting("texts", progress, use_tqdm), self.classes
        if classes is None:
            raise UnsupportedError(f"{self.name} has no labels", "take a classifier; --choice keeps an answer to some words")
        if classes.each:
            raise UnsupportedError(f"{self.name} gives each token a label, and a text none", "spans(texts) finds what they mark")
        each: list[Any] = [texts] if _is_pair(texts) else listed(texts)  # type: ignore[arg-type]
        prompts = [self._read(text, classes) for text in each]
        return [classes.of(numbers, activation=activation) for numbers in self.pooled(prompts, self.pooling, progress)]

    def spans(
        self, texts: str | Sequence[str], *, progress: Counted | None = None, use_tqdm: bool = False
    ) -> list[list[Span]]:
        """What a model that gives tokens labels marks in each text: names, addresses. A text that is longer than it can see is
        read in pieces. UnsupportedError of another model; else as `generate`."""
        progress = counting("texts", progress, use_tqdm)
        if self.classes is None or not self.classes.each:
            raise UnsupportedError(f"{self.name} gives tokens no labels", "take a model that finds names, or private data")
        each = [texts] if isinstance(texts, str) else texts
        if not isinstance(each, list | tuple) or not all(isinstance(text, str) for text in each):
            raise UsageError("a text is wanted, or a list of texts")
        marking, found = Marking.of(self.classes.labels), list[list[Span]]()
        for first in range(0, len(each), _AT_ONCE):
            group = each[first : first + _AT_ONCE]
            placed = [self.tokenizer.placed(text) for text in group]
            left = pieces(self.tokenizer, placed, min(self.context_len, WINDOW))
            numbers = joined(self.tokenizer, len(group), len(self.classes.labels), self._numbers(left))
            found += [marking.spans(*one) for one in zip(group, placed, numbers, strict=True)]
            if progress is not None:
                progress(len(found), len(each))
        return found

    def pooled(
        self, prompts: Sequence[Sequence[int]], wanted: Pooled | Alignment, progress: Counted | None, lora: Sequence[Lora] = ()
    ) -> list[list[float]]:
        """What `Engine.embed` makes of each, in their order."""
        return self._requests.embed(prompts, wanted, progress, lora)

    def _read(self, text: TextOrPair, classes: Classes) -> Sequence[int]:
        if _is_pair(text):
            return classes.prompt(self.tokenizer, *text)
        return token_ids(text, lambda words: classes.prompt(self.tokenizer, words))  # type: ignore[arg-type]

    def _numbers(self, left: Iterator[Piece]) -> Iterator[tuple[Piece, Sequence[float]]]:
        while group := list(islice(left, _AT_ONCE)):
            yield from zip(group, self.pooled([piece.ids for piece in group], self.pooling, None), strict=True)


def _is_pair(given: object) -> TypeGuard[tuple[str, str]]:
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(text, str) for text in given)
