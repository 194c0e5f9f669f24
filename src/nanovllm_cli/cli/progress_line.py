"""The progress of downloads, loading and prefill as one line on a terminal's stderr; nothing where there is none.

Drawn by whoever makes progress, at most ten times a second: no thread, so nothing to stop when a signal ends the
program.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from nanovllm_cli.cli import signals
from nanovllm_cli.cli.output import Console
from nanovllm_cli.progress import Unit

PROMPT_WORTH_SHOWING = 256  # tokens
_BAR = 20
_REDRAW_SECONDS = 0.1


class ProgressLine:
    """A `nanovllm_cli.progress.LoadProgress` on a Console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._full, self._empty = ("━", "─") if console.err.can_show("━─") else ("#", "-")
        self._name = self._found = ""
        self._total: int | None = None
        self._unit: Unit = "tokens"
        self._count = 0
        self._began = self._drawn = 0.0

    def stage(self, name: str, total: int | None, unit: Unit) -> None:
        signals.check()
        self._name, self._total, self._unit, self._count, self._found = name, total, unit, 0, ""
        self._began = self._drawn = time.monotonic()
        self._console.announce(self._render(self._began))

    def advance(self, n: int) -> None:
        signals.check()
        self._count += n
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self._console.status(self._render(now))

    def found(self, text: str) -> None:
        """What the stage has come to so far: from its next step on it is shown."""
        self._found = text

    def done(self) -> None:
        self._console.status("")

    def note(self, message: str) -> None:
        self._console.say(message, "dim")

    def starting(self) -> AbstractContextManager[None]:
        return signals.insisting()

    def _render(self, now: float) -> str:
        seconds = now - self._began
        parts = [self._name]
        if self._total:
            share = min(self._count / self._total, 1.0)
            filled = int(share * _BAR)
            parts.append(self._full * filled + self._empty * (_BAR - filled) + f" {share:4.0%}")
            parts.append(f"{amount(self._count, self._unit)} of {amount(self._total, self._unit)}")
        elif self._count:
            parts.append(amount(self._count, self._unit))
        if self._count and seconds > 1.0:
            rate = self._count / seconds
            parts.append(f"{amount(rate, self._unit)}/s")
            if self._total and self._unit == "B":
                parts.append(f"{duration((self._total - self._count) / rate)} left")
        if self._found:
            parts.append(self._found)
        return "  ".join(parts)


class PromptProgress:
    """How much of one prompt has been read, where that takes a while."""

    def __init__(self, console: Console) -> None:
        self._line = ProgressLine(console)
        self._read = 0

    def show(self, done: int, total: int) -> None:
        """Tokens."""
        if total < PROMPT_WORTH_SHOWING:
            return
        if not self._read:
            self._line.stage("reading the prompt", total, "tokens")
        self._line.advance(max(done - self._read, 0))
        self._read = max(done, 1)


def amount(count: float, unit: Unit) -> str:
    shown = f"{count:,.0f}"
    return size(count) if unit == "B" else f"{shown} {unit if shown != '1' else 'batch' if unit == 'batches' else unit[:-1]}"


def size(num_bytes: float) -> str:
    """Bytes as a person reads them: 1.4 GiB."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {name}" if name == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {name}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def counted(number: int, thing: str) -> str:
    """1 token, 2,048 tokens."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
