"""Passages as files of subtitles: SubRip (.srt) and WebVTT (https://www.w3.org/TR/webvtt1/)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from nanovllm_cli.text.dictation import Passage
from nanovllm_cli.text.words import Word

Subtitles = Literal["srt", "vtt"]


class Line(NamedTuple):
    """What is shown from one moment to another, in seconds."""

    start: float
    end: float
    text: str


def subtitles(passages: Sequence[Passage], form: Subtitles) -> str:
    """The whole file."""
    return head(form) + "".join(cue(line, number, form) for number, line in enumerate(lines(passages), 1))


def lines(passages: Sequence[Passage], max_words: int | None = None, max_width: int | None = None) -> Iterator[Line]:
    """Passages as they are; or cut into lines of so many words and characters at the most, where their words are known. A word
    that is longer than a line has one of its own."""
    for passage in passages:
        if not passage.words or max_words is max_width is None:
            yield Line(passage.start, passage.end, _shown(passage.text))
            continue
        held: list[Word] = []
        for word in passage.words:
            is_full = max_words is not None and len(held) >= max_words
            if held and (is_full or (max_width is not None and len(_text([*held, word])) > max_width)):
                yield Line(held[0].start, held[-1].end, _text(held))
                held = []
            held.append(word)
        yield Line(held[0].start, held[-1].end, _text(held))


def _text(words: Sequence[Word]) -> str:
    return _shown("".join([each.text for each in words]))


def _shown(text: str) -> str:
    return " ".join(text.split())


def head(form: Subtitles) -> str:
    return "WEBVTT\n\n" if form == "vtt" else ""


def cue(line: Line, number: int, form: Subtitles) -> str:
    """One of them, with the empty line behind it. An arrow in a text would be taken for a time's."""
    text = line.text.replace("-->", "->")
    if form == "vtt":
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        return f"{_time(line.start, '.')} --> {_time(line.end, '.')}\n{text}\n\n"
    return f"{number}\n{_time(line.start, ',')} --> {_time(line.end, ',')}\n{text}\n\n"


def _time(seconds: float, mark: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{mark}{whole % 1000:03}"
