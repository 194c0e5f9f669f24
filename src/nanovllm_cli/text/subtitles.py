"""Passages as files of subtitles: SubRip (.srt) and WebVTT (https://www.w3.org/TR/webvtt1/)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nanovllm_cli.text.dictation import Passage

Subtitles = Literal["srt", "vtt"]


def subtitles(passages: Sequence[Passage], form: Subtitles) -> str:
    """The whole file."""
    return head(form) + "".join(cue(passage, number, form) for number, passage in enumerate(passages, 1))


def head(form: Subtitles) -> str:
    return "WEBVTT\n\n" if form == "vtt" else ""


def cue(passage: Passage, number: int, form: Subtitles) -> str:
    """One of them, with the empty line behind it. An arrow in a text would be taken for a time's."""
    text = " ".join(passage.text.split()).replace("-->", "->")
    if form == "vtt":
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        return f"{_time(passage.start, '.')} --> {_time(passage.end, '.')}\n{text}\n\n"
    return f"{number}\n{_time(passage.start, ',')} --> {_time(passage.end, ',')}\n{text}\n\n"


def _time(seconds: float, mark: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{mark}{whole % 1000:03}"
