"""A Whisper in this process as `run` sees it: what is said in a sound, as text or as subtitles, window by window."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.answering import Answering, Answers, Given, Piece, Result, Usage
from nanovllm_cli.cli.question import Question, kind_of
from nanovllm_cli.cli.records import Record, Statistics
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.content_parts import SOUNDS
from nanovllm_cli.text.dictation import Heard, Passage
from nanovllm_cli.text.scribe import Task
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
    """The transcript of a question's only sound. Raises UsageError for what it has beside that."""

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
        wishes = _wishes(llm, question, given)
        self._steps = passages_of(llm, question.sounds[0], wishes, self._heed)

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
        answer = self.answers.first
        try:
            step = next(self._steps)
        except StopIteration:
            if self._finished:
                raise
            self._finished, answer.finish_reason = True, "stop"
            rest = "" if answer.content else self._written([])  # what a file begins with in which nobody speaks
            answer.content += rest
            return [Piece(answer, "", rest, None, None)]
        if isinstance(step, Heard):
            return []
        text, segments = self._written(step), [_segment(each) for each in step]
        answer.content += text
        answer.segments = [*(answer.segments or ()), *segments]
        return [Piece(answer, "", text, None, None, segments)]

    def statistics(self, now: float) -> Statistics:
        return Statistics.of_server(self._usage, (None, None), self._asked, self._first, now)

    def close(self) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()

    def _written(self, passages: list[Passage]) -> str:
        begins = not self.answers.first.content
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
        self.answers.first.num_tokens = count + drawn


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


def _wishes(llm: LLM, question: Question, given: Given) -> Wishes:
    if len(question.sounds) != 1 or kind_of(question.sounds[0]) != SOUNDS:
        told = f"{llm.name} writes down what is said in one sound, and this is about {len(question.sounds) or 'none'}"
        raise UsageError(told, f"for example: nanovllm run {llm.name} --audio talk.wav")
    unknown = [flag for name, flag in _ONLY.items() if given.get(name) not in (None, 1, ())]
    if unknown:
        raise UsageError(f"{unknown[0]} has no meaning for a transcript", "leave it out")
    sampling: dict[str, Any] = {name: value for name, value in given.items() if name not in ("temperature", *_ONLY)}
    temperature = given.get("temperature") or None
    wishes = question.wishes
    task: Task = "translate" if wishes.translate else "transcribe"
    timed = wishes.subtitles is not None
    words = wishes.word_times or wishes.max_words is not None or wishes.max_line_width is not None
    prompt = question.text or None
    return Wishes(wishes.language, task, prompt, timed, temperature, sampling=sampling, words=words, **wishes.own)

