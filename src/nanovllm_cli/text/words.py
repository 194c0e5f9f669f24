"""Passages with their words, and when each of these is said: what becomes of the moments at which a text's tokens begin.

As OpenAI's code has it (`timing.py` and `tokenizer.py` of openai/whisper), with its punctuation and its numbers: a word is what a
space begins, or in languages that have none a character; punctuation is its neighbour's; a word next to a pause is no longer
than twice the usual one. What a model's attention says of a word's border is good to a tenth of a second or so.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from nanovllm_cli.text.tokenizer import Tokenizer

SPACELESS = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages whose words no spaces part."""
_BEFORE, _BEHIND = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
_ENDS = ".。!！?？"
_LONGEST_USUAL, _LONG_PAUSE, _NEAR = 0.7, 4, 0.5
_UNKNOWN = "\ufffd"


class Word(NamedTuple):
    """start, end: seconds. probability: the mean of its tokens', as they were drawn."""

    text: str
    start: float
    end: float
    probability: float


class Spoken(NamedTuple):
    """Words of one passage, and from when to when it is said, by them."""

    words: tuple[Word, ...]
    start: float
    end: float


class Said(NamedTuple):
    """A passage whose words are wanted: ids of its text alone, their probabilities, and its times as the model wrote them."""

    token_ids: Sequence[int]
    probabilities: Sequence[float]
    start: float
    end: float


@dataclass(slots=True)
class _Word:
    text: str
    first: int
    count: int
    start: float
    end: float
    probability: float


def spoken(
    tokenizer: Tokenizer, said: Sequence[Said], begins: Sequence[float], offset: float, language: str | None, until: float
) -> list[Spoken]:
    """said: the passages of a window. begins: of each of their tokens, and of the end behind the last one, seconds behind
    `offset`, where the window begins. Tokens that have none are of no word. until: when the last passage before these was over.
    """
    ids = [each for passage in said for each in passage.token_ids][: len(begins) - 1]
    chances = [each for passage in said for each in passage.probabilities]
    words: list[_Word] = []
    first = 0
    for text, count in words_of(tokenizer, ids, language):
        last = first + count
        mean = sum(chances[first:last]) / count
        words.append(_Word(text, first, count, begins[first], begins[last], mean))
        first = last
    durations = [each.end - each.start for each in words if each.end > each.start]
    usual = min(_LONGEST_USUAL, median(durations)) if durations else 0.0
    if durations:
        _shorten_at_ends(words, 2 * usual)
    _join_punctuation(words)
    found, first = [], 0
    for passage in said:
        last = first + len(passage.token_ids)
        own = [each for each in words if each.text and first <= each.first < last]
        for word in own:
            word.start, word.end = round(offset + word.start, 2), round(offset + word.end, 2)
        found.append(_placed(own, passage, usual, until))
        until, first = found[-1].end if own else until, last
    return found


def words_of(tokenizer: Tokenizer, ids: Sequence[int], language: str | None) -> list[tuple[str, int]]:
    """A text's words, with the spaces in front of them and punctuation by itself, and how many tokens each is."""
    pieces = list(_characters(tokenizer, ids))
    if language in SPACELESS:
        return pieces
    words: list[tuple[str, int]] = []
    for text, count in pieces:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, count))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + count
    return words


def _characters(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
    """As few tokens at a time as are whole characters. What is none in the whole text either is taken as it is."""
    whole, place, held = tokenizer.decode(list(ids)), 0, list[int]()
    for each in ids:
        held.append(each)
        text = tokenizer.decode(held)
        unknown = text.find(_UNKNOWN)
        if unknown < 0 or whole[place + unknown : place + unknown + 1] == _UNKNOWN:
            yield text, len(held)
            place, held = place + len(text), []
    if held:
        yield tokenizer.decode(held), len(held)


def _shorten_at_ends(words: Sequence[_Word], longest: float) -> None:
    """A pause between sentences is no part of a word beside it."""
    for before, each in pairwise(words):
        if each.end - each.start <= longest:
            continue
        if each.text in _ENDS:
            each.end = each.start + longest
        elif before.text in _ENDS:
            each.start = each.end - longest


def _join_punctuation(words: Sequence[_Word]) -> None:
    """Into a neighbour, whose times stay; what has joined has no text left."""
    behind = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        if words[i].text.startswith(" ") and words[i].text.strip() in _BEFORE:
            words[behind].text, words[behind].first = words[i].text + words[behind].text, words[i].first
            words[i].text = ""
        else:
            behind = i
    before = 0
    for i in range(1, len(words)):
        if not words[before].text.endswith(" ") and words[i].text in _BEHIND:
            words[before].text += words[i].text
            words[i].text = ""
        else:
            before = i


def _placed(words: Sequence[_Word], passage: Said, usual: float, until: float) -> Spoken:
    """With the borders of the passage that the model wrote where words run far beyond them, and else with those of its words."""
    if not words:
        return Spoken((), passage.start, passage.end)
    first, last, longest = words[0], words[-1], 2 * usual
    second = words[1] if len(words) > 1 else None
    is_long = first.end - first.start > longest or (second is not None and second.end - first.start > 2 * longest)
    if first.end - until > _LONG_PAUSE * usual and is_long:
        if second is not None and second.end - second.start > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0.0, first.end - longest)
    start, end = first.start, last.end
    if passage.start < first.end and passage.start - _NEAR > first.start:
        start = passage.start
        first.start = max(0.0, min(first.end - usual, passage.start))
    if passage.end > last.start and passage.end + _NEAR < last.end:
        end = passage.end
        last.end = max(last.start + usual, passage.end)
    told = tuple([Word(each.text, round(each.start, 2), round(each.end, 2), each.probability) for each in words])
    start, end = round(start, 2), round(end, 2)
    return Spoken(told, *((start, end) if end > start else (passage.start, passage.end)))
