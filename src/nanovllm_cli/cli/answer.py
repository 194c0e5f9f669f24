"""Printing an answer while it is written: as text, as one JSON object, or as JSON lines.

A `Transcript` splits what arrives into reasoning and content; a printer shows it. Printers know nothing about
engines: they see outputs, in order, and are told how it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from nanovllm_cli.cli import records
from nanovllm_cli.cli.extract import first_code_block
from nanovllm_cli.cli.output import Console
from nanovllm_cli.errors import RequestError

if TYPE_CHECKING:
    from nanovllm_cli.engine.outputs import CompletionOutput, RequestOutput
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.text.reasoning import ReasoningSplitter

ReasoningChoice = Literal["show", "hide", "auto"]
Write = Callable[[str], None]


class Piece(NamedTuple):
    """What one step added to one answer."""

    answer: CompletionOutput
    reasoning: str
    content: str


class Transcript:
    """Reasoning and content of every answer so far. make_parser: None for text that has no reasoning in it."""

    def __init__(self, make_parser: Callable[[], ReasoningSplitter] | None) -> None:
        self._make_parser = make_parser
        self._parsers: dict[int, ReasoningSplitter] = {}
        self._ended: set[int] = set()
        self.contents: dict[int, str] = {}
        self.reasonings: dict[int, str] = {}

    def add(self, output: RequestOutput) -> list[Piece]:
        """The new pieces in `output`: one for each answer that grew or ended."""
        pieces = []
        for answer in output.outputs:
            ends = answer.finish_reason is not None and answer.index not in self._ended
            if answer.delta_text or answer.delta_ids or ends:
                reasoning, content = self._split(answer, ends)
                self.contents[answer.index] = self.contents.get(answer.index, "") + content
                self.reasonings[answer.index] = self.reasonings.get(answer.index, "") + reasoning
                pieces.append(Piece(answer, reasoning, content))
            if ends:
                self._ended.add(answer.index)
        return pieces

    def flush(self) -> str:
        """Content that was held back when an answer was cut off: of the first answer, the one that is on the screen."""
        parser = self._parsers.get(0)
        if parser is None or 0 in self._ended:
            return ""
        content = parser.finish().content
        self.contents[0] += content
        return content

    @property
    def splits(self) -> bool:
        return self._make_parser is not None

    def _split(self, answer: CompletionOutput, ends: bool) -> tuple[str, str]:
        if self._make_parser is None:
            return "", answer.delta_text
        parser = self._parsers.get(answer.index)
        if parser is None:
            parser = self._parsers[answer.index] = self._make_parser()
        reasoning, content = parser.push(answer.delta_text)
        if ends:
            last = parser.finish()
            reasoning, content = reasoning + last.reasoning, content + last.content
        return reasoning, content


class Printer(Protocol):
    """Shows an answer. Either `finish` comes last, or `cut` where the run was interrupted."""

    def step(self, pieces: list[Piece]) -> None: ...

    def finish(self, output: RequestOutput, statistics: records.Statistics) -> None: ...

    def cut(self) -> None: ...


class TextPrinter:
    """The answer as it is. The first of several answers streams, the others follow after a line of three dashes."""

    def __init__(
        self, console: Console, write: Write, transcript: Transcript, *, reasoning: ReasoningChoice, extract: bool
    ) -> None:
        self._console = console
        self._write = write
        self._transcript = transcript
        self._extract = extract
        self._shows_reasoning = reasoning == "show" or (
            reasoning == "auto" and console.err.is_terminal and not console.quiet
        )
        self._last = "\n"

    def step(self, pieces: list[Piece]) -> None:
        for answer, reasoning, content in pieces:
            if answer.index == 0:
                if reasoning and self._shows_reasoning:
                    self._console.aside(reasoning)
                if not self._extract:
                    self._put(content)

    def finish(self, output: RequestOutput, statistics: records.Statistics) -> None:
        for answer in output.outputs:
            if answer.index > 0:
                self._end_line()
                self._put("---\n")
            content = self._transcript.contents.get(answer.index, "")
            if self._extract:
                self._put_code(content)
            elif answer.index > 0:
                self._put(content)
        self._end_line()

    def cut(self) -> None:
        if not self._extract:
            self._put(self._transcript.flush())
            self._end_line()

    def _put_code(self, content: str) -> None:
        block = first_code_block(content)
        if block is None:
            self._console.aside(content)
            raise RequestError("the answer has no code block", "the whole answer is above; ask for a code block")
        self._put(block.text)
        if not block.closed:
            self._console.say("the answer ends inside its code block")

    def _put(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self._write(text)

    def _end_line(self) -> None:
        if self._last != "\n":
            self._put("\n")


class JsonPrinter:
    """One object at the end, and nothing before."""

    def __init__(self, write: Write, transcript: Transcript, llm: LLM, *, reasoning: ReasoningChoice) -> None:
        self._write = write
        self._transcript = transcript
        self._llm = llm
        self._keeps_reasoning = transcript.splits and reasoning != "hide"

    def step(self, pieces: list[Piece]) -> None:
        pass

    def finish(self, output: RequestOutput, statistics: records.Statistics) -> None:
        record = result_record(output, self._transcript, self._llm, self._keeps_reasoning)
        self._write(records.dumps(record | {"statistics": records.statistics_record(statistics)}) + "\n")

    def cut(self) -> None:
        pass


class JsonLinesPrinter:
    """An event for each step of each answer, then an "end" event with how it ended and the statistics."""

    def __init__(self, write: Write, transcript: Transcript, llm: LLM, *, reasoning: ReasoningChoice) -> None:
        self._write = write
        self._transcript = transcript
        self._llm = llm
        self._keeps_reasoning = transcript.splits and reasoning != "hide"

    def step(self, pieces: list[Piece]) -> None:
        for answer, reasoning, content in pieces:
            event: records.Record = {"event": "token", "index": answer.index, "text": content}
            if self._keeps_reasoning:
                event["reasoning"] = reasoning
            event["token_ids"] = list(answer.delta_ids)
            if answer.logprobs is not None:
                new = answer.logprobs[len(answer.logprobs) - len(answer.delta_ids) :]
                event["logprobs"] = records.logprob_records(new, self._llm)
            self._write(records.dumps(event) + "\n")

    def finish(self, output: RequestOutput, statistics: records.Statistics) -> None:
        answers = [
            {
                "index": answer.index,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "num_tokens": len(answer.token_ids),
            }
            | ({"error": answer.error} if answer.error is not None else {})
            for answer in output.outputs
        ]
        record = records.result_record(output, answers, self._llm.name)
        self._write(
            records.dumps({"event": "end"} | record | {"statistics": records.statistics_record(statistics)}) + "\n"
        )

    def cut(self) -> None:
        pass


def result_record(output: RequestOutput, transcript: Transcript, llm: LLM, keeps_reasoning: bool) -> records.Record:
    """A finished request with the texts that the transcript holds."""
    answers = [
        records.answer_record(
            answer,
            transcript.contents.get(answer.index, ""),
            transcript.reasonings.get(answer.index, "") if keeps_reasoning else None,
            llm,
        )
        for answer in output.outputs
    ]
    return records.result_record(output, answers, llm.name)
