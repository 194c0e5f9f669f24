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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli import records, signals
from nanovllm_cli.cli.batch_lines import Tally, digest, parsed, raw_lines, shown
from nanovllm_cli.cli.form import FORM_KEYS, form_of_line
from nanovllm_cli.cli.inputs import checked
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import size
from nanovllm_cli.cli.question import Question, checked_messages, new_question, with_system
from nanovllm_cli.cli.results import Results
from nanovllm_cli.errors import RequestError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.system import peak_memory_bytes
from nanovllm_cli.text.batch_form import placed

if TYPE_CHECKING:
    from nanovllm_cli.cli.answering import Answerer, Result

_EXAMPLE = '{"prompt": "…"} or {"messages": […]}'
_OF_OPENAI = "nanovllm run-batch MODEL FILE runs requests as OpenAI's batches have them"
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
    lines = [_line(number, data) for number, data in raw_lines(source, screen)]
    if not lines:
        raise UsageError(f"{shown(source)} has no prompts", f"each line is {_EXAMPLE}")
    if all(line.broken is not None and line.broken.hint == _OF_OPENAI for line in lines):
        raise UsageError(f"{shown(source)} has requests as OpenAI's batches have them", _OF_OPENAI)
    return lines


def run_batch(
    answerer: Answerer, options: BatchOptions, lines: list[Line], results: Results, screen: Console
) -> None:
    """Runs what has no result yet. Raises RequestError at the end if a line failed."""
    try:
        _Run(answerer, options, results, Tally(results, len(lines), screen, options.stats)).run(lines)
    except BaseException:
        if kept_in := results.kept_in:
            screen.say(f"finished results are kept in {kept_in}; the same command goes on from there")
        raise


class _Run:
    def __init__(self, answerer: Answerer, options: BatchOptions, results: Results, tally: Tally) -> None:
        self.answerer = answerer
        self.options = options
        self.results = results
        self.tally = tally

    def run(self, lines: list[Line]) -> None:
        options = self.options
        asked = {"model": self.answerer.identity, "given": options.given, "system": options.system}
        settings = digest(asked | {"keeps_reasoning": options.keeps_reasoning} | options.settings)[:12]
        keys = [f"{settings}-{line.digest}" for line in lines]
        self.tally.begin(self.results.resume(keys, [line.number for line in lines]))
        with contextlib.closing(self.answerer.ask_all(self._questions(lines))) as found:
            for position, result in found:
                signals.check()
                self._finish(position, lines[position], result, keys[position])
        self.tally.finish(f"memory {size(peak_memory_bytes())}")

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
        self.tally.prompt_tokens += result.usage.prompt_tokens or 0
        self.tally.answer_tokens += result.usage.answer_tokens or 0
        errors = [each.error or "aborted" for each in result.answers if each.finish_reason in ("error", "abort")]
        record = {"id": line.id, "line": line.number}
        if errors:
            self.tally.failed += 1
            record["error"] = records.error_record(RequestError(errors[0]))
        keeps = self.options.keeps_reasoning
        self._put(position, record | records.result_record(result, self.answerer.name, keeps_reasoning=keeps), key)

    def _fail(self, position: int, line: Line, failure: Exception) -> None:
        self.tally.failed += 1
        self._put(position, {"id": line.id, "line": line.number, "error": records.error_record(failure)}, "")

    def _put(self, position: int, record: records.Record, key: str) -> None:
        self.tally.put(position, records.dumps(record | {"key": key}))


def _line(number: int, data: bytes) -> Line:
    content: dict[str, Any] = {}
    try:
        value = parsed(data, _EXAMPLE)
        content = {"id": _checked_id(value)}  # worth repeating even where the rest is wrong
        content = _checked(value)
    except UsageError as failure:
        return Line(number, digest(data.hex())[:20], content, placed(failure, number))
    return Line(number, digest(content)[:20], content)


def _meant(key: str, value: dict[str, Any], known: Sequence[str]) -> str | None:
    """What to write in place of a field that there is not."""
    if isinstance(value.get("body"), dict):
        return _OF_OPENAI
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
