"""`nanovllm run --batch`: a file of prompts, all at once through the engine, results as JSON lines in the order of
the prompts.

On stdout a result is printed as soon as all before it are. With `-o FILE` every result goes to `FILE.partial` the
moment it is there, and FILE appears, whole and in order, at the end: an interrupted batch goes on where it was when
the same command is given again. What FILE and FILE.partial hold is used where it answers the same line under the same
settings (a record's `key`), is run again where it was an error, and is never dropped: anything else in them is
refused without --overwrite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from nanovllm_cli.cli import records, signals
from nanovllm_cli.cli.form import FORM_KEYS, form_of_line
from nanovllm_cli.cli.inputs import MAX_INPUT_BYTES, STANDARD_INPUT, checked, decode, open_input
from nanovllm_cli.cli.log import ON_SCREEN
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, size
from nanovllm_cli.cli.question import Question, checked_messages, new_question, with_system
from nanovllm_cli.cli.results import Results
from nanovllm_cli.errors import RequestError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.system import peak_memory_bytes

if TYPE_CHECKING:
    from nanovllm_cli.cli.answering import Answerer, Result

_PROMPT_KEYS = ("prompt", "messages", "id")
_PARAM_KEYS = tuple(
    item.name for item in dataclasses.fields(SamplingParams) if item.name not in ("constraint", "reasoning", "transcript")
)
_HABITS = {
    "text": "prompt", "input": "prompt", "question": "prompt", "instruction": "prompt", "custom_id": "id",
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "n_predict": "max_tokens", "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty", "response_format": "json_schema", "temp": "temperature",
}  # fmt: skip
"""What other programs call the fields of a line."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """given: fields of SamplingParams from the command line. settings: whatever else decides what an answer is, besides the
    system prompt."""

    keeps_reasoning: bool
    stats: bool | None
    given: dict[str, Any]
    system: str | None
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the file. content: what it says; or `broken`: why it says nothing."""

    number: int
    digest: str
    content: dict[str, Any]
    broken: UsageError | None = None

    @property
    def id(self) -> Any:
        return self.content.get("id")


def read_lines(source: str, screen: Console) -> list[Line]:
    """Every line of a file but the blank ones. Raises UsageError for a file that cannot be read at all."""
    with open_input(source, screen) as file:
        lines = [_line(number, data) for number, data in enumerate(_raw_lines(file, source), 1) if data.strip()]
    if not lines:
        raise UsageError(f"{_shown(source)} has no prompts", 'each line is {"prompt": "…"} or {"messages": […]}')
    return lines


def run_batch(
    answerer: Answerer, options: BatchOptions, lines: list[Line], results: Results, screen: Console
) -> None:
    """Runs what has no result yet. Raises RequestError at the end if a line failed."""
    try:
        _Run(answerer, options, results, screen).run(lines)
    except BaseException:
        if kept_in := results.kept_in:
            screen.say(f"finished results are kept in {kept_in}; the same command goes on from there")
        raise


class _Run:
    def __init__(self, answerer: Answerer, options: BatchOptions, results: Results, screen: Console) -> None:
        self.answerer = answerer
        self.options = options
        self.results = results
        self.screen = screen
        self.progress = ProgressLine(screen)
        self.failed = 0
        self.prompt_tokens = 0
        self.answer_tokens = 0

    def run(self, lines: list[Line]) -> None:
        began = time.monotonic()
        options = self.options
        asked = {"model": self.answerer.identity, "given": options.given, "system": options.system}
        settings = _digest(asked | {"keeps_reasoning": options.keeps_reasoning} | options.settings)[:12]
        keys = [f"{settings}-{line.digest}" for line in lines]
        kept = self.results.resume(keys, [line.number for line in lines])
        if kept:
            self.screen.say(f"{kept} of {len(lines)} results are there already")
        self.progress.stage("answering", len(lines), "lines")
        self.progress.advance(kept)
        with contextlib.closing(self.answerer.ask_all(self._questions(lines))) as found:
            for position, result in found:
                signals.check()
                self._finish(position, lines[position], result, keys[position])
        self.progress.done()
        self.results.finish()
        self._tell(len(lines), kept, time.monotonic() - began)
        if self.failed:
            raise RequestError(f"{self.failed} of {len(lines)} lines failed", 'the "error" of each says why')

    def _questions(self, lines: list[Line]) -> Iterator[tuple[int, Question, dict[str, Any]]]:
        """What is left to be asked, by its position."""
        for position, line in enumerate(lines):
            if self.results.has(position):
                continue
            if line.broken is not None:
                self._fail(position, line, line.broken)
                continue
            content = line.content
            given = self.options.given | _given(content)
            if "messages" in content:
                yield position, Question(with_system(content["messages"], self.options.system)), given
            else:
                chats, system = self.answerer.chats, self.options.system
                yield position, new_question(content["prompt"], chats=chats, system=system), given

    def _finish(self, position: int, line: Line, result: Result | Exception, key: str) -> None:
        if isinstance(result, Exception):
            self._fail(position, line, result)
            return
        self.prompt_tokens += result.usage.prompt_tokens or 0
        self.answer_tokens += result.usage.answer_tokens or 0
        errors = [each.error or "aborted" for each in result.answers if each.finish_reason in ("error", "abort")]
        record = {"id": line.id, "line": line.number}
        if errors:
            self.failed += 1
            record["error"] = records.error_record(RequestError(errors[0]))
        keeps = self.options.keeps_reasoning
        self._put(position, record | records.result_record(result, self.answerer.name, keeps_reasoning=keeps), key)

    def _fail(self, position: int, line: Line, failure: Exception) -> None:
        self.failed += 1
        self._put(position, {"id": line.id, "line": line.number, "error": records.error_record(failure)}, "")

    def _put(self, position: int, record: records.Record, key: str) -> None:
        self.results.put(position, records.dumps(record | {"key": key}))
        self.progress.advance(1)

    def _tell(self, total: int, kept: int, seconds: float) -> None:
        shows = self.options.stats if self.options.stats is not None else not self.screen.quiet
        rate = f", {self.answer_tokens / seconds:,.1f} tok/s" if self.answer_tokens else ""
        parts = [
            f"{total} lines ({kept} kept, {self.failed} failed) in {seconds:.1f} s",
            f"prompts {self.prompt_tokens} tokens",
            f"answers {self.answer_tokens} tokens{rate}",
            f"memory {size(peak_memory_bytes())}",
        ]
        text = " | ".join(parts)
        logger.info("%s", text, extra={ON_SCREEN: shows})
        if shows:
            self.screen.line(text, "dim")


def _raw_lines(file: BinaryIO, source: str) -> Iterator[bytes]:
    while data := file.readline(MAX_INPUT_BYTES + 1):
        if len(data) > MAX_INPUT_BYTES:
            raise UsageError(f"{_shown(source)} has a line of more than {MAX_INPUT_BYTES >> 20} MiB")
        yield data


def _line(number: int, data: bytes) -> Line:
    content: dict[str, Any] = {}
    try:
        value = _parsed(data)
        content = {"id": _checked_id(value)}  # worth repeating even where the rest is wrong
        content = _checked(value)
    except UsageError as failure:
        failure.message = f"line {number}: {failure.message}"
        failure.args = (failure.message,)
        return Line(number, _digest(data.hex())[:20], content, failure)
    return Line(number, _digest(content)[:20], content)


def _parsed(data: bytes) -> dict[str, Any]:
    text = decode(data, "it")
    try:
        value = json.loads(text.rstrip(), parse_constant=_no_constant)
    except RecursionError as failure:
        raise UsageError("nested too deeply") from failure
    except json.JSONDecodeError as failure:  # its own words count lines of a text that is one
        raise UsageError(f"not JSON: {failure.msg} at character {failure.pos + 1}") from failure
    except ValueError as failure:
        raise UsageError(f"not JSON: {failure}") from failure
    if not isinstance(value, dict):
        raise UsageError("not a JSON object", 'write {"prompt": "…"} or {"messages": […]}')
    return value


def _meant(key: str, value: dict[str, Any], known: Sequence[str]) -> str | None:
    """What to write in place of a field that there is not."""
    if isinstance(value.get("body"), dict):
        return "a line has its fields itself, and not in a body: id, and prompt or messages"
    if key in _HABITS:
        return f"here it is {_HABITS[key]}"
    near = difflib.get_close_matches(key, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else None


def _checked_id(value: dict[str, Any]) -> str | int | None:
    found = value.get("id")
    if not isinstance(found, str | int | None):
        raise UsageError("an id is a string or a number")
    return checked(found, "the id") if isinstance(found, str) else found


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    known = (*_PROMPT_KEYS, *_PARAM_KEYS, *FORM_KEYS)
    for key in value:
        if key not in known:
            raise UsageError(f"unknown field {key!r}", _meant(key, value, known))
    if ("prompt" in value) == ("messages" in value):
        raise UsageError("a line has either a prompt or messages")
    if "prompt" in value:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise UsageError("prompt is not a text, or an empty one")
        checked(value["prompt"])
    else:
        checked_messages(value["messages"])
    if isinstance(value.get("logit_bias"), dict):
        value["logit_bias"] = _with_ids(value["logit_bias"])
    SamplingParams(**{name: value[name] for name in _PARAM_KEYS if name in value})  # refuses what is out of bounds
    form_of_line(value)
    return value


def _given(content: dict[str, Any]) -> dict[str, Any]:
    return {name: content[name] for name in _PARAM_KEYS if name in content} | form_of_line(content)


def _with_ids(biases: dict[str, Any]) -> dict[int, Any]:
    """JSON's keys are strings; a token id is a number."""
    try:
        return {int(key): bias for key, bias in biases.items()}
    except ValueError as failure:
        raise UsageError("logit_bias has a key that is not a token id") from failure


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(source: str) -> str:
    return "standard input" if source == STANDARD_INPUT else source
