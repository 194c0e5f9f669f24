"""One answer of `run` on its way to where it belongs: screen, pipe or file; and what is kept and said of it at its end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli import answer as answers
from nanovllm_cli.cli import history, signals
from nanovllm_cli.cli.log import ON_SCREEN
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import PromptProgress, counted
from nanovllm_cli.cli.question import Question
from nanovllm_cli.cli.run_options import OutputOptions
from nanovllm_cli.errors import RequestError

if TYPE_CHECKING:
    from nanovllm_cli.cli.answering import Answer, Answerer, Answering
    from nanovllm_cli.cli.files import WholeFile

_STATUS_SECONDS = 0.1

logger = logging.getLogger(__name__)


def answer_one(
    answerer: Answerer,
    question: Question,
    given: dict[str, Any],
    options: OutputOptions,
    screen: Console,
    file: WholeFile | None,
) -> None:
    """Streams the answer to where it belongs."""
    answering = answerer.ask(question, given)
    printer = _printer(options, screen, file.write if file is not None else screen.answer, answerer.name, answering)
    streams = screen.out.is_terminal or screen.out.is_pipe  # which may lead to the same screen
    status = _Status(screen, hidden=file is not None or options.json or options.extract or not streams)
    try:
        with contextlib.closing(answering):
            for pieces in answering:
                signals.check()
                status.show(answering)
                printer.step(pieces)
    except BaseException:
        if answerer.dictates and not answering.finished:
            _keep_heard(answering, printer, screen, file)
        raise
    finally:
        if not answering.finished:
            printer.cut(answering.flush())
            screen.end_answer()
        if answering.began and not options.no_save:
            _save(answerer, question, answering.answers.first.content)
    if not answering.finished:
        raise RequestError("the engine gave no answer", "run it again with --debug")
    statistics = answering.statistics(time.monotonic())
    try:
        printer.finish(answering.result, statistics)
    finally:
        screen.end_answer()
    if file is not None:
        file.commit()
    answers = answering.result.answers
    for answer in answers:
        answer.check()
    if "max_tokens" not in given and any(answer.finish_reason == "length" for answer in answers):
        screen.say(f"cut off: {answerer.limit(given)}", "dim")
    elif any(answer.finish_reason == "repetition" for answer in answers):
        screen.say("cut off where it repeated itself: --max-repeats 0 lets it", "dim")
    elif _is_hidden(answers, options, screen):
        screen.say("cut off while it reasoned: a larger -n leaves room for an answer, --reasoning show shows the rest", "dim")
    elif question.goes_on and not any(answer.content for answer in answers):
        screen.say("nothing follows: that answer was at its end; -p TEXT says something to it", "dim")
    shows = options.stats if options.stats is not None else not (screen.quiet or options.json or options.jsonl)
    logger.info("%s", statistics.line(), extra={ON_SCREEN: shows})
    if shows:
        screen.line(statistics.line(), "dim")


def _save(answerer: Answerer, question: Question, content: str) -> None:
    """Keeps what was said for --continue, an answer without a word too: the run before is not the last."""
    beside: dict[str, Any] = {"lora": answerer.adapters, "changes": answerer.changes}
    if question.messages is None:
        history.save(history.LastRun(answerer.name, text=question.text + content, **beside))
        return
    messages = list(question.messages)
    before = str(messages.pop().get("content") or "") if question.goes_on else ""
    answer = {"role": "assistant", "content": before + content}
    history.save(history.LastRun(answerer.name, messages=[*messages, answer], **beside))


def _keep_heard(answering: Answering, printer: answers.Printer, screen: Console, file: WholeFile | None) -> None:
    """Of a transcript that is broken off, which may have taken an hour."""
    for answer in answering.result.answers:
        answer.finish_reason = answer.finish_reason or "interrupted"
    if not any(answer.content for answer in answering.result.answers):
        return
    printer.finish(answering.result, answering.statistics(time.monotonic()))
    if file is not None and (kept := file.keep()) is not None:
        screen.say(f"what was heard so far is in {kept}")


def _is_hidden(found: Sequence[Answer], options: OutputOptions, screen: Console) -> bool:
    """Whether one of them was cut off before it came to anything that is shown."""
    if options.json or options.jsonl or answers.shows_reasoning(options.reasoning, screen):
        return False
    return any(each.finish_reason == "length" and each.reasoning and not each.content for each in found)


def _printer(
    options: OutputOptions, screen: Console, write: answers.Write, name: str, answering: Answering
) -> answers.Printer:
    if options.json:
        return answers.JsonPrinter(write, name, reasoning=options.reasoning)
    if options.jsonl:
        splits = answering.result.splits
        return answers.JsonLinesPrinter(write, name, splits=splits, reasoning=options.reasoning)
    return answers.TextPrinter(screen, write, reasoning=options.reasoning, extract=options.extract)


class _Status:
    """The status line while the model reads and, where the answer is not on the screen, while it writes."""

    def __init__(self, screen: Console, *, hidden: bool) -> None:
        self._screen = screen
        self._hidden = hidden
        self._prompt = PromptProgress(screen)
        self._drawn = 0.0

    def show(self, answering: Answering) -> None:
        if not answering.began:
            if answering.prompt_len is not None:
                self._prompt.show(answering.num_read, answering.prompt_len)
        elif self._hidden and time.monotonic() - self._drawn >= _STATUS_SECONDS:
            self._drawn = time.monotonic()
            count = sum(answer.num_tokens or 0 for answer in answering.answers.in_order())
            self._screen.status(f"writing  {counted(count, 'token')}")
