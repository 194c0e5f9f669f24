"""What a model that embeds, ranks or classifies reads for a quality card: passages of a text, and pairs of a query and a passage.
With pairs rerankers are calibrated, too.

    passage     sentences and lines one behind the other, as they stand in the text, up to PASSAGE tokens with what the tokenizer
                puts around them; what is longer by itself is cut at a space. One that was there before is left out
    pairs       the beginning of a passage is a query; the documents are what is left of it, and of the DOCUMENTS - 1 passages
                that come next

No prompt of the model's stands before a passage. A reranker's template is around each pair.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from nanovllm_cli.errors import DoesNotFitError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.quantization.texts import NamedText, documents
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.classes import Classes, classes_of
from nanovllm_cli.weights.pooling import embedding_of, use_of
from nanovllm_cli.weights.scoring import Scoring, scoring_of, second_text_of
from nanovllm_cli.weights.tokenizer import check_size

PASSAGE = 64
DOCUMENTS = 4
LEAST_PASSAGES, LEAST_QUERIES = 3, 2
_ENDS = re.compile(r"[.!?]\s+|[。！？]|\n+")


@dataclass(frozen=True, slots=True)
class Reading:
    """ids: of each text, or pair. seconds: of each, where the second of two texts begins, or 0. scoring: of a reranker, whose
    pairs come DOCUMENTS with the same query at a time. classes: of a classifier, that of one label being a reranker."""

    ids: Sequence[Sequence[int]]
    seconds: Sequence[int]
    scoring: Scoring | None = None
    classes: Classes | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))


class Cut(NamedTuple):
    """How a text is read. passage: most tokens of one. num_tokens: most in all; most: passages, or queries; None is no limit.
    parse_special: control tokens written in it are what they name. reads_lines: a .jsonl file is what its lines say."""

    passage: int = PASSAGE
    num_tokens: int | None = None
    most: int | None = None
    parse_special: bool = True
    reads_lines: bool = True


class Passage(NamedTuple):
    text: str
    ids: list[int]


def embeds(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether vectors or scores are what a model is for: it has no head, or its files say how it pools."""
    return not spec.has_head or embedding_of(checkpoint).pooling is not None


def reading_of(checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer, text: NamedText, cut: Cut, hint: str) -> Reading:
    """Of a model for which `embeds` holds, from the text's beginning. hint: what to do where the text is too short.

    UsageError for such a one, UnsupportedError where the model can make neither vectors nor scores here, DoesNotFitError where a
    reranker's context has no room for a pair.
    """
    embedding = use_of(embedding_of(checkpoint), spec)
    scoring = scoring_of(checkpoint, tokenizer)
    check_size(tokenizer, spec.vocab_size)
    limit = min(cut.passage, spec.max_position)
    if limit <= len(tokenizer.encode("")):
        raise UsageError(f"a passage of {limit} tokens has no room for a text", hint)
    whole = documents(text, tokenizer) if cut.reads_lines else [text.text]
    found = passages(tokenizer, whole, limit, parse_special=cut.parse_special)
    groups = ([passage.ids] for passage in found) if scoring is None else _pairs(found, scoring, tokenizer, spec.max_position)
    taken = list(_within(groups, cut))
    least, called = (LEAST_PASSAGES, "passages") if scoring is None else (LEAST_QUERIES, "queries")
    if len(taken) < least:
        told = f"{len(taken)} {called} of at most {limit} tokens, and {least} are needed"
        raise UsageError(f"{text.name} is too short: {told}", hint)
    ids = [each for group in taken for each in group]
    second_text = second_text_of(embedding, tokenizer, spec)
    return Reading(ids, [0 if second_text is None else second_text(each) for each in ids], scoring, classes_of(checkpoint))


def passages(
    tokenizer: Tokenizer, texts: Iterable[str], limit: int, *, parse_special: bool = True
) -> Iterator[Passage]:
    """Of at most `limit` tokens, some of them its own, no two with the same ones. None goes over from one text to the next."""
    seen = {tuple(tokenizer.encode(""))}
    for words in _passages(tokenizer, texts, limit, parse_special):
        ids = tokenizer.truncated(tokenizer.encode(words, parse_special=parse_special), limit)
        if tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield Passage(words, ids)


def _passages(tokenizer: Tokenizer, texts: Iterable[str], limit: int, parse_special: bool) -> Iterator[str]:
    def fits(words: str) -> bool:
        return len(tokenizer.encode(words.strip(), parse_special=parse_special)) <= limit

    for document in texts:
        taken = ""
        for part in _parts(document, fits):
            if not fits(taken + part):
                yield from filter(None, [taken.strip()])
                taken = ""
            taken += part
        yield from filter(None, [taken.strip()])


def _parts(document: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Sentences and lines, and parts of those that do not fit; all together the document."""
    ends = [found.end() for found in _ENDS.finditer(document)]
    for start, end in zip([0, *ends], [*ends, len(document)], strict=True):
        yield from _halved(document[start:end], fits)


def _halved(words: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """At spaces near the middle, if there are any, until all parts fit or are a character."""
    if len(words) < 2 or fits(words):
        yield words
        return
    middle = len(words) // 2
    at = words.rfind(" ", 1, middle) + 1 or middle
    yield from _halved(words[:at], fits)
    yield from _halved(words[at:], fits)


def _pairs(found: Iterator[Passage], scoring: Scoring, tokenizer: Tokenizer, limit: int) -> Iterator[list[list[int]]]:
    """Token ids of a query's pairs, of as much of each document as the context holds."""
    near: deque[tuple[str, str]] = deque(maxlen=DOCUMENTS)
    for passage in found:
        query, rest = _divided(passage.text)
        if not query or not rest:
            continue
        near.append((query, rest))
        if len(near) == DOCUMENTS:
            query = near[0][0]
            pairs = [_pair(scoring, tokenizer, query, document, limit) for _, document in near]
            if (longest := max(map(len, pairs))) > limit:
                raise DoesNotFitError(
                    f"a query and nothing beside it takes {longest} tokens, and the model's context holds {limit}",
                    "take a reranker with a longer context",
                )
            yield pairs


def _pair(scoring: Scoring, tokenizer: Tokenizer, query: str, document: str, limit: int) -> list[int]:
    ids = scoring.prompt(tokenizer, query, document)
    return ids if len(ids) <= limit else scoring.fitting(tokenizer, query, document, limit)


def _divided(passage: str) -> tuple[str, str]:
    """Its first quarter, up to the end of a word, and the rest."""
    quarter = len(passage) // 4
    at = passage.find(" ", quarter)
    at = quarter if at == -1 else at
    return passage[:at].strip(), passage[at:].strip()


def _within(groups: Iterator[list[list[int]]], cut: Cut) -> Iterator[list[list[int]]]:
    left = cut.num_tokens
    for group in islice(groups, cut.most):
        if left is not None and (left := left - sum(map(len, group))) < 0:
            return
        yield group
