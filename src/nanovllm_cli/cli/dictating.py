"""A Whisper, or a Moonshine, in this process as `run` sees it: what is said in a sound, as text or as subtitles, by pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.answering import Answer, Answering, Answers, Given, Piece, Result, Usage
from nanovllm_cli.cli.parsers import by_their_flags
from nanovllm_cli.cli.question import WORDS, Question, kind_of
from nanovllm_cli.cli.records import Record, Statistics
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.content_parts import SOUNDS, VIDEOS
from nanovllm_cli.text.dictation import Heard, Passage
from nanovllm_cli.text.plain_dictation import check_plain
from nanovllm_cli.text.scribe import Task
from nanovllm_cli.text.spoken import told
from nanovllm_cli.text.subtitles import cue, head, lines
from nanovllm_cli.text.wishes import Wishes
from nanovllm_cli.transcribing import passages_of

if TYPE_CHECKING:
    from nanovllm_cli.engine.outputs import RequestOutput
    from nanovllm_cli.llm import LLM

_ONLY = {
    "n": "--num-answers", "logprobs": "--logprobs", "stop": "--stop", "constraint": "a form of the answer",
    "reasoning_budget": "--reasoning-budget",
}  # fmt: skip
"""Of an answer that somebody gives; a transcript has none of it."""


class DictationAnswering(Answering):
    """The transcripts of a question's sounds, one after another, each an answer. Raises UsageError for what else it has."""

    def __init__(self, llm: LLM, question: Question, given: Given, load_seconds: float | None = None) -> None:
        self.answers = Answers()
        self._usage = Usage(0, 0, 0)
        self._load_seconds = load_seconds
        self._llm = llm
        self._asked = time.monotonic()
        self._first: float | None = None
        self._finished = False
        self._asked_for = question.wishes
        self._subtitles = question.wishes.subtitles
        self._count = 0
        self._wishes = _wishes(llm, question, given)
        self._sounds, self._names, self._index = question.sounds, question.names, 0
        self._steps = self._begun()

    @property
    def began(self) -> bool:
        return self._first is not None

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def result(self) -> Result:
        return Result(self.answers.in_order(), self._usage, splits=False)

    def __next__(self) -> list[Piece]:
        if self._finished:
            raise StopIteration
        answer = self.answers.at(self._index)
        try:
            step = next(self._steps)
        except StopIteration:
            answer.finish_reason = "stop"
            rest = "" if answer.content else self._written(answer, [])  # what a file begins with in which nobody speaks
            answer.content += rest
            self._index += 1
            self._finished = self._index == len(self._sounds)
            self._steps = self._steps if self._finished else self._begun()
            return [Piece(answer, "", rest, None, None)]
        if isinstance(step, Heard):
            answer.language = step.language
            return []
        text, segments = self._written(answer, step), [_segment(each) for each in step]
        answer.content += text
        answer.segments = [*(answer.segments or ()), *segments]
        return [Piece(answer, "", text, None, None, segments)]

    def statistics(self, now: float) -> Statistics:
        return Statistics.of_server(self._usage, (None, None), self._asked, self._first, now)

    def close(self) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()

    def _begun(self) -> Iterator[Heard | list[Passage]]:
        where = self._names[self._index] if self._names else "the sound"
        return passages_of(self._llm, self._sounds[self._index], self._wishes, self._heed, where)

    def _written(self, answer: Answer, passages: list[Passage]) -> str:
        begins = not answer.content
        if self._subtitles is None:
            text = "".join(each.text for each in passages)
            return text.lstrip() if begins else text
        parts = [head(self._subtitles)] if begins else []
        for line in lines(passages, self._asked_for.max_words, self._asked_for.max_line_width):
            self._count += 1
            parts.append(cue(line, self._count, self._subtitles))
        return "".join(parts)

    def _heed(self, output: RequestOutput) -> None:
        if self._first is None:
            self._first = time.monotonic()
        drawn = sum(each.num_tokens for each in output.outputs)
        prompt, cached, count = (each or 0 for each in self._usage)
        cached += output.metrics.num_cached_tokens
        self._usage = Usage(prompt + len(output.prompt_token_ids), cached, count + drawn)
        answer = self.answers.at(self._index)
        answer.num_tokens = (answer.num_tokens or 0) + drawn


def _segment(passage: Passage) -> Record:
    """As openai/whisper's JSON has it, without its tokens."""
    record: Record = {
        "start": round(passage.start, 3), "end": round(passage.end, 3), "text": passage.text,
        "temperature": passage.temperature, "avg_logprob": _finite(passage.mean_logprob),
        "compression_ratio": passage.squeezed, "no_speech_prob": passage.silent,
    }  # fmt: skip
    if passage.words:
        record["words"] = [
            {"word": each.text, "start": each.start, "end": each.end, "probability": each.probability} for each in passage.words
        ]
    return record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@by_their_flags()
def _wishes(llm: LLM, question: Question, given: Given) -> Wishes:
    hint = f"for example: nanovllm run {llm.name} --audio talk.wav"
    kinds = {kind_of(each) for each in question.sounds}
    if kinds != {SOUNDS}:
        what = f", and looks at no {WORDS[(kinds - {SOUNDS}).pop()]}" if kinds else ""
        hint = "--audio talk.mp4 is a video's sound" if VIDEOS in kinds else hint
        raise UsageError(f"{llm.name} writes down what is said in a sound{what}", hint)
    if len(question.sounds) > 1 and question.wishes.subtitles is not None:
        what = f"a file of subtitles is of one sound, and this is about {len(question.sounds)}"
        raise UsageError(what, 'for f in *.mp3; do nanovllm run MODEL --audio "$f" --subtitles srt -o "$f.srt"; done')
    usual = {"n": 1, "stop": ()}
    unknown = [flag for name, flag in _ONLY.items() if given.get(name) is not None and given[name] != usual.get(name)]
    if unknown:
        raise UsageError(f"{unknown[0]} has no meaning for a transcript", "leave it out")
    sampling: dict[str, Any] = {name: value for name, value in given.items() if name not in ("temperature", *_ONLY)}
    temperature = given.get("temperature") or None
    wishes = question.wishes
    is_plain = llm.hearing is not None and llm.hearing.plain
    if is_plain and (flags := [*wishes.flags, *(["--language"] if told(wishes.language) is not None else [])]):
        raise UsageError(f"{flags[0]} is for Whispers, and {llm.name} is none", "leave it out, or take whisper:tiny")
    task: Task = "translate" if wishes.translate else "transcribe"
    timed = wishes.subtitles is not None
    words = wishes.word_times or wishes.max_words is not None or wishes.max_line_width is not None
    prompt = question.text or None
    made = Wishes(wishes.language, task, prompt, timed, temperature, sampling=sampling, words=words, **wishes.own)
    if is_plain:
        check_plain(made)
    return made

