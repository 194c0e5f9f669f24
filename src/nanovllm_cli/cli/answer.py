"""Printing an answer while it is written: as text, as one JSON object, or as JSON lines.

A printer sees pieces, in order, and is told how it ended; it knows nothing about who answers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

from nanovllm_cli.cli import records
from nanovllm_cli.cli.answering import Piece, Result
from nanovllm_cli.cli.output import Console
from nanovllm_cli.errors import RequestError

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^\n]*)")  # of code, also where a list has indented it (CommonMark 0.31, section 4.5)

ReasoningChoice = Literal["show", "hide", "auto"]
Write = Callable[[str], None]


def shows_reasoning(choice: ReasoningChoice, console: Console) -> bool:
    """Whether reasoning goes to stderr."""
    return choice == "show" or (choice == "auto" and console.err.is_terminal and not console.quiet)


class Printer(ABC):
    """Shows an answer. Either `finish` comes last, or `cut` where the run was interrupted."""

    def step(self, pieces: list[Piece]) -> None:
        """As they come."""
        return

    def goes_on(self, content: str) -> None:
        """An answer that has come is not the last: it calls tools, and said this before. Others follow, and their pieces."""
        return

    def called(self, call: records.Record) -> None:
        """One of these calls has a result."""
        return

    @abstractmethod
    def finish(self, result: Result, statistics: records.Statistics) -> None: ...

    def cut(self, held_back: str) -> None:
        """held_back: the end of the first answer, which has not come as a piece."""
        return


class TextPrinter(Printer):
    """The answer as it is. The first of several answers streams, the others follow after a line of three dashes.

    holds: until its end, as nobody knows before whether an answer is the last one; what others say goes to stderr.
    """

    def __init__(
        self, console: Console, write: Write, *, reasoning: ReasoningChoice, extract: bool, holds: bool = False
    ) -> None:
        self._console = console
        self._write = write
        self._extract = extract
        self._holds = holds and not extract
        self._held = ""
        self._shows_reasoning = shows_reasoning(reasoning, console)
        self._last = "\n"

    def step(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.answer.index == 0:
                if piece.reasoning and self._shows_reasoning:
                    self._console.aside(piece.reasoning)
                if self._holds:
                    self._held += piece.content
                elif not self._extract:
                    self._put(piece.content)

    def goes_on(self, content: str) -> None:
        self._held = ""
        if not (self._holds or self._extract):
            self._end_line()
        elif content and not self._console.quiet:
            self._console.aside(content if content.endswith("\n") else f"{content}\n")

    def finish(self, result: Result, statistics: records.Statistics) -> None:
        self._put(self._held)
        for answer in result.answers:
            if answer.index > 0:
                self._end_line()
                self._put("---\n")
            if self._extract:
                self._put_code(answer.content)
            elif answer.index > 0:
                self._put(answer.content)
        self._end_line()

    def cut(self, held_back: str) -> None:
        if not self._extract:
            self._put(self._held + held_back)
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


class JsonPrinter(Printer):
    """One object at the end, and nothing before. name: the model's."""

    def __init__(self, write: Write, name: str, *, reasoning: ReasoningChoice) -> None:
        self._write = write
        self._name = name
        self._keeps_reasoning = reasoning != "hide"
        self._calls: list[records.Record] = []
        self._said = ""

    def goes_on(self, content: str) -> None:
        self._said = content

    def called(self, call: records.Record) -> None:
        self._calls.append(call | ({"said": self._said} if self._said else {}))
        self._said = ""

    def finish(self, result: Result, statistics: records.Statistics) -> None:
        record = records.result_record(result, self._name, keeps_reasoning=self._keeps_reasoning)
        if self._calls:
            record["answers"][0]["calls"] = self._calls
        self._write(records.dumps(record | {"statistics": records.statistics_record(statistics)}) + "\n")


class JsonLinesPrinter(Printer):
    """An event for each step of each answer and for each call of a tool, then an "end" event with how it ended and the
    statistics. name: the model's. splits: whether reasoning is told apart."""

    def __init__(self, write: Write, name: str, *, splits: bool, reasoning: ReasoningChoice) -> None:
        self._write = write
        self._name = name
        self._splits = splits
        self._keeps_reasoning = reasoning != "hide"

    def step(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            event: records.Record = {"event": "token", "index": piece.answer.index, "text": piece.content}
            if self._keeps_reasoning and (self._splits or piece.reasoning):
                event["reasoning"] = piece.reasoning
            if piece.token_ids is not None:
                event["token_ids"] = list(piece.token_ids)
            if piece.logprobs is not None:
                event["logprobs"] = piece.logprobs
            if piece.segments is not None:
                event["segments"] = piece.segments
            self._write(records.dumps(event) + "\n")

    def called(self, call: records.Record) -> None:
        self._write(records.dumps({"event": "call", "index": 0, **call}) + "\n")

    def finish(self, result: Result, statistics: records.Statistics) -> None:
        record = {"event": "end", **records.end_record(result, self._name)}
        self._write(records.dumps(record | {"statistics": records.statistics_record(statistics)}) + "\n")


class CodeBlock(NamedTuple):
    """closed: False where the answer ended inside the block."""

    text: str
    closed: bool


def first_code_block(answer: str) -> CodeBlock | None:
    """The first fenced block's lines without its fences and without its indentation, or None where there is none."""
    lines = answer.splitlines(keepends=True)
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None or (fence[2][0] == "`" and "`" in fence[3]):
            continue
        block: list[str] = []
        for inner in lines[number + 1 :]:
            if _closes(inner, fence[2]):
                return CodeBlock("".join(block), True)
            block.append(_dedented(inner, len(fence[1])))
        return CodeBlock("".join(block), False)
    return None


def _closes(line: str, opening: str) -> bool:
    text = line.strip()
    return len(text) >= len(opening) and set(text) == {opening[0]}


def _dedented(line: str, width: int) -> str:
    blank = len(line) - len(line.lstrip(" \t"))
    return line[min(width, blank) :]
