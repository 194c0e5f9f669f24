"""What batches of both kinds share: lines of JSON that fail alone, what tells one from another, what is said of all together."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from nanovllm_cli.cli.inputs import MAX_INPUT_BYTES, STANDARD_INPUT, decode, open_input
from nanovllm_cli.cli.log import ON_SCREEN
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.cli.results import Results
from nanovllm_cli.errors import RequestError, UsageError

logger = logging.getLogger(__name__)


def raw_lines(source: str, screen: Console) -> Iterator[tuple[int, bytes]]:
    """All lines of a file but the blank ones, with their numbers. Raises UsageError for a file that cannot be read at all."""
    with open_input(source, screen) as file:
        number = 0
        while data := file.readline(MAX_INPUT_BYTES + 1):
            number += 1
            if len(data) > MAX_INPUT_BYTES:
                raise UsageError(f"{shown(source)} has a line of more than {MAX_INPUT_BYTES >> 20} MiB")
            if data.strip():
                yield number, data


def parsed(data: bytes, example: str) -> dict[str, Any]:
    """example: what a line looks like. Raises UsageError for anything but an object."""
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
        raise UsageError("not a JSON object", f"write {example}")
    return value


def digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def shown(source: str) -> str:
    return "standard input" if source == STANDARD_INPUT else source


class Tally:
    """How far a batch is, and what is said at its end. stats: whether that is shown; None: unless --quiet."""

    def __init__(self, results: Results, total: int, screen: Console, stats: bool | None) -> None:
        self._results, self._total, self._screen = results, total, screen
        self._shows = stats if stats is not None else not screen.quiet
        self._progress = ProgressLine(screen)
        self._began = time.monotonic()
        self.kept = self.failed = self.prompt_tokens = self.answer_tokens = 0

    def begin(self, kept: int) -> None:
        """kept: results that are there already."""
        self._began, self.kept = time.monotonic(), kept
        if kept:
            self._screen.say(f"{kept} of {self._total} results are there already")
        self._progress.stage("answering", self._total, "lines")
        self._progress.advance(kept)

    def put(self, position: int, line: str) -> None:
        self._results.put(position, line)
        self._progress.advance(1)

    def finish(self, *more: str) -> None:
        """Raises RequestError if a line failed."""
        self._progress.done()
        self._results.finish()
        seconds = time.monotonic() - self._began
        rate = f", {self.answer_tokens / seconds:,.1f} tok/s" if self.answer_tokens else ""
        parts = [
            f"{self._total} lines ({self.kept} kept, {self.failed} failed) in {seconds:.1f} s",
            f"prompts {self.prompt_tokens} tokens",
            f"answers {self.answer_tokens} tokens{rate}",
            *more,
        ]
        text = " | ".join(parts)
        logger.info("%s", text, extra={ON_SCREEN: self._shows})
        if self._shows:
            self._screen.line(text, "dim")
        if self.failed:
            raise RequestError(f"{self.failed} of {self._total} lines failed", 'the "error" of each says why')


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
