"""One answer of `run` on its way to where it belongs: screen, pipe or file; and what is kept and said of it at its end.

With tools it is the last of several, each of which is the answer to what the calls of the one before gave. Before its end nobody
knows which is the last: a terminal sees each as it comes, what programs read is held back until then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli import answer as answers
from nanovllm_cli.cli import history, signals
from nanovllm_cli.cli.history import Message
from nanovllm_cli.cli.log import ON_SCREEN
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import PromptProgress, counted
from nanovllm_cli.cli.question import Question
from nanovllm_cli.cli.run_options import OutputOptions
from nanovllm_cli.errors import RequestError

if TYPE_CHECKING:
    from nanovllm_cli.chat.conversation import Call
    from nanovllm_cli.chat.toolbox import Outcome, Toolbox
    from nanovllm_cli.cli.answering import Answer, Answerer, Answering
    from nanovllm_cli.cli.files import WholeFile

_STATUS_SECONDS = 0.1

logger = logging.getLogger(__name__)


class RunAnswer:
    """A prompt, and the present one of the answers that follow from it. tools: that it may call; then what programs read is held
    until it is known to be of the last one."""

    def __init__(
        self,
        answerer: Answerer,
        question: Question,
        given: dict[str, Any],
        options: OutputOptions,
        screen: Console,
        file: WholeFile | None,
        tools: Toolbox | None = None,
    ) -> None:
        self._answerer, self._question, self._given = answerer, question, given
        self._options, self._screen, self._file = options, screen, file
        self._answering = answerer.ask(question, given)
        self._calls: list[Call] = []
        self._results: dict[str, Outcome] = {}
        self._has_called = False
        self._tools = tools
        holds = tools is not None and not (screen.out.is_terminal and file is None)
        streams = screen.out.is_terminal or screen.out.is_pipe  # which may lead to the same screen
        self._hidden = holds or file is not None or options.json or options.extract or not streams
        write = file.write if file is not None else screen.answer
        self._printer = _printer(options, screen, write, answerer.name, self._answering, holds=holds)

    def answer(self) -> None:
        """Streams it to where it belongs. Where it calls tools they run, and another one answers what they give, until one calls
        none."""
        try:
            calls = self._stream()
            if self._tools is not None:
                hint = "fewer tools, or a prompt that says when it is done, may end it"
                self._tools.follow(calls, self._take, self._again, hint)
        finally:
            self._save()
        self._finish()

    def _stream(self) -> list[Call]:
        """The present answer, and what it calls."""
        answering, printer, screen = self._answering, self._printer, self._screen
        status = _Status(screen, hidden=self._hidden)
        try:
            with contextlib.closing(answering):
                for pieces in answering:
                    signals.check()
                    status.show(answering)
                    printer.step(pieces)
        except BaseException:
            if self._answerer.dictates and not answering.finished:
                _keep_heard(answering, printer, screen, self._file)
            raise
        finally:
            if not answering.finished:
                printer.cut(answering.flush())
                screen.end_answer()
        if not answering.finished:
            raise RequestError("the engine gave no answer", "run it again with --debug")
        self._calls = _calls_of(answering.answers.first)
        if self._calls:
            printer.goes_on(answering.answers.first.content)
            screen.end_answer()
            logger.info("%s", answering.statistics(time.monotonic()).line())
        return self._calls

    def _take(self, call: Call, result: Outcome) -> None:
        self._results[call.id] = result
        shown = {"images": len(result.images)} if result.images else {}
        self._printer.called({"name": call.name, "arguments": call.arguments, "result": result.text, **shown})

    def _again(self) -> list[Call]:
        """The next answer, which has the results."""
        question = Question(self._said())
        self._screen.status("reading the results")
        self._answering, self._question = self._answerer.ask(question, self._given), question
        self._calls, self._results, self._has_called = [], {}, True
        return self._stream()

    def _save(self) -> None:
        """Keeps what was said for --continue, an answer without a word too: the run before is not the last."""
        if self._options.no_save or not (self._answering.began or self._has_called):
            return
        beside: dict[str, Any] = {"lora": self._answerer.adapters, "changes": self._answerer.changes}
        if self._question.messages is None:
            text = self._question.text + self._answering.answers.first.content
            history.save(history.LastRun(self._answerer.name, text=text, **beside))
        else:
            history.save(history.LastRun(self._answerer.name, messages=self._said(), **beside))

    def _finish(self) -> None:
        """The end of the last answer. Raises what failed in it."""
        answering, options, screen = self._answering, self._options, self._screen
        statistics = answering.statistics(time.monotonic())
        try:
            self._printer.finish(answering.result, statistics)
        finally:
            screen.end_answer()
        if self._file is not None:
            self._file.commit()
        found = answering.result.answers
        for answer in found:
            answer.check()
        if "max_tokens" not in self._given and any(answer.finish_reason == "length" for answer in found):
            screen.say(f"cut off: {self._answerer.limit(self._given)}", "dim")
        elif any(answer.finish_reason == "repetition" for answer in found):
            screen.say("cut off where it repeated itself: --max-repeats 0 lets it", "dim")
        elif _is_hidden(found, options, screen):
            hint = "a larger -n leaves room for an answer, --reasoning show shows the rest"
            screen.say(f"cut off while it reasoned: {hint}", "dim")
        elif self._question.goes_on and not any(answer.content for answer in found):
            screen.say("nothing follows: that answer was at its end; -p TEXT says something to it", "dim")
        shows = options.stats if options.stats is not None else not (screen.quiet or options.json or options.jsonl)
        logger.info("%s", statistics.line(), extra={ON_SCREEN: shows})
        if shows:
            screen.line(statistics.line(), "dim")

    def _said(self) -> list[Message]:
        """The conversation, with the present answer and what came of its calls: no template is to meet one without a result."""
        messages = list(self._question.messages or ())
        if not self._answering.began:
            return messages
        before = str(messages.pop().get("content") or "") if self._question.goes_on else ""
        answer = self._answering.answers.first
        said: Message = {"role": "assistant", "content": before + answer.content}
        if not self._calls:
            return [*messages, said]
        from nanovllm_cli.chat.conversation import Message as Turn
        from nanovllm_cli.chat.prompt import NOT_RUN

        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        said["tool_calls"] = [each.for_template() for each in self._calls]
        messages.append(said)
        for call in self._calls:
            text, images = self._results.get(call.id, (NOT_RUN, ()))
            messages.append(Turn(0, None, "tool", text, images=images, call_id=call.id, name=call.name).for_template())
        return messages


def _calls_of(answer: Answer) -> list[Call]:
    if not answer.calls or answer.finish_reason == "error":
        return []
    from nanovllm_cli.chat.toolbox import calls_of

    return calls_of(answer, is_whole=answer.finish_reason not in ("length", "repetition"))


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
    options: OutputOptions, screen: Console, write: answers.Write, name: str, answering: Answering, *, holds: bool
) -> answers.Printer:
    if options.json:
        return answers.JsonPrinter(write, name, reasoning=options.reasoning)
    if options.jsonl:
        splits = answering.result.splits
        return answers.JsonLinesPrinter(write, name, splits=splits, reasoning=options.reasoning)
    return answers.TextPrinter(screen, write, reasoning=options.reasoning, extract=options.extract, holds=holds)


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
