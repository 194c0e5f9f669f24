"""Results of a batch on their way out: in order, whole lines only, none lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli import system
from nanovllm_cli.cli.files import WholeFile, is_special
from nanovllm_cli.cli.records import Record, dumps
from nanovllm_cli.errors import OutputError, UsageError


class Form(NamedTuple):
    """How results of one kind are told apart. key: what a record is a result of, a line under some settings; None where it is no
    result at all. failed: whether it is to be tried again. numbered: a line of JSON and its record, as the result of the line
    with this number."""

    key: Callable[[Record], str | None]
    failed: Callable[[Record], bool]
    numbered: Callable[[str, Record, int], str]


class Results:
    """Takes one line of JSON for each of `count` positions, in any order.

    path: None prints in order, as soon as the order allows. A regular file (or one to be) is written at the end, with
    a journal beside it meanwhile; a device or a FIFO is written straight, in order. Raises OutputError at once for a
    place that cannot be written to.
    """

    def __init__(
        self, path: Path | None, overwrite: bool, count: int, write: Callable[[str], None], form: Form | None = None
    ) -> None:
        self._form = form or OWN
        self._lines: list[str | None] = [None] * count
        self._next = 0
        self._path = path
        self._overwrite = overwrite
        self._write: Callable[[str], None] | None = write
        self._file: WholeFile | None = None
        self._journal: int | None = None
        self._finished = False
        if path is None:
            return
        if is_special(path):
            self._file = WholeFile(path)
            self._write = self._file.write
            return
        with WholeFile(path):
            pass  # a place that cannot be written to is found now, not after the work
        self._write = None
        self._journal_path = path.with_name(path.name + ".partial")
        self._journal = _open_journal(self._journal_path)

    def resume(self, keys: Sequence[str], numbers: Sequence[int]) -> int:
        """Takes over results that are there already; how many. keys: what identifies the result of each position. numbers: of
        the lines that they answer now. Raises UsageError for results that would be lost."""
        if self._journal is None or self._path is None:
            return 0
        waiting: dict[str, list[int]] = defaultdict(list)
        for position in reversed(range(len(keys))):
            waiting[keys[position]].append(position)
        known, kept = set(keys), 0
        for path in (self._path, self._journal_path):
            for line in _lines_of(path):
                found = _result_of(line, path, self._overwrite, self._form)
                if found is None:
                    continue
                key, record = found
                if waiting[key]:
                    position = waiting[key].pop()
                    self._lines[position] = self._form.numbered(line, record, numbers[position])
                    kept += 1
                elif key not in known and not self._overwrite:
                    raise UsageError(
                        f"{path} holds results of other prompts, another model or other settings",
                        "choose another -o, or add --overwrite to drop them",
                    )
        return kept

    @property
    def kept_in(self) -> Path | None:
        """Where an interrupted batch leaves its results, if it has any and has not come to its end."""
        if self._journal is None or self._finished or os.fstat(self._journal).st_size == 0:
            return None
        return self._journal_path

    def has(self, position: int) -> bool:
        return self._lines[position] is not None

    def put(self, position: int, line: str) -> None:
        """A new result. Safe from a crash of this process when this returns, where there is a journal."""
        self._lines[position] = line
        if self._journal is not None:
            self._append(line)
        elif self._write is not None:
            while self._next < len(self._lines) and (following := self._lines[self._next]) is not None:
                self._write(following + "\n")
                self._next += 1

    def finish(self) -> None:
        """Every position has its line: the file gets its name."""
        if self._file is not None:
            self._file.commit()
        if self._journal is None or self._path is None:
            return
        with WholeFile(self._path) as file:
            for line in self._lines:
                if line is not None:
                    file.write(line + "\n")
            file.commit()
        self._finished = True
        with contextlib.suppress(OSError):
            self._journal_path.unlink()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.__exit__(*exception)
        if self._journal is not None:
            with contextlib.suppress(OSError):
                if os.fstat(self._journal).st_size == 0:
                    self._journal_path.unlink(missing_ok=True)
            os.close(self._journal)
            self._journal = None

    def _append(self, line: str) -> None:
        assert self._journal is not None
        data = (line + "\n").encode()
        try:
            while data:
                data = data[os.write(self._journal, data) :]
        except OSError as failure:
            raise OutputError(
                f"cannot write {self._journal_path}: {failure.strerror}", "make room, then give the same command again"
            ) from failure


def _open_journal(path: Path) -> int:
    """The journal, locked, without the half line that a crash may have left at its end. A link in its place, which another user
    of the folder may have made, is not followed: it could be to any file of this user's."""
    try:
        journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as failure:
        why = "it is a link" if failure.errno == errno.ELOOP else failure.strerror
        raise OutputError(f"cannot write {path}: {why}") from failure
    found = os.fstat(journal)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(journal)
        raise OutputError(f"cannot write {path}: it is no file of its own", "remove it, or choose another -o")
    if not system.lock(journal):
        os.close(journal)
        raise OutputError(f"another batch is writing {path}", "wait for it, or choose another -o")
    data = path.read_bytes()
    os.ftruncate(journal, data.rfind(b"\n") + 1)
    return journal


def _lines_of(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text("utf-8", "replace").split("\n") if line]
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise OutputError(f"cannot read the results in {path}: {failure.strerror}") from failure


def _numbered(line: str, record: Record, number: int) -> str:
    """As it is there where its number is right: lines may have been added before it."""
    return line if record.get("line") == number else dumps(record | {"line": number})


OWN = Form(lambda record: record.get("key"), lambda record: "error" in record, _numbered)
"""Of `run --batch`."""


def _result_of(line: str, path: Path, overwrite: bool, form: Form) -> tuple[str, Record] | None:
    """A result, behind what it is of; None for one that is to be tried again."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    key = form.key(record) if isinstance(record, dict) else None
    if isinstance(key, str):
        return None if form.failed(record) else (key, record)
    if overwrite:
        return None
    raise UsageError(f"{path} holds something else than results of a batch", "choose another -o")
