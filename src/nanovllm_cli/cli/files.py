"""A file that appears under its name whole or not at all: written beside it, flushed to the disk, renamed over it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from nanovllm_cli.errors import OutputError, UsageError

_HINTS: dict[type[OSError], str] = {
    FileNotFoundError: "create its folder first",
    IsADirectoryError: "name a file",
    PermissionError: "choose a place that you may write to",
}
_PART_AT_END = re.compile(r"-\d{5}-of-\d{5}$")


class WholeFile:
    """A text file that gets its name with `commit`, and leaves nothing behind without it.

    Links are followed; an existing file's permissions are kept. What is no regular file (/dev/stdout, a FIFO) has no
    half to hide and is written straight. Raises OutputError at once where nothing could be written later.
    """

    def __init__(self, path: Path, mode: int | None = None) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self._temporary: Path | None = None
        try:
            self._file = self._open(mode)
        except OSError as failure:
            raise OutputError(f"cannot write {path}: {failure.strerror}", _HINTS.get(type(failure))) from failure

    def write(self, text: str) -> None:
        try:
            self._file.write(text.encode("utf-8", "replace"))
        except OSError as failure:
            raise self._failed(failure) from failure

    def commit(self) -> None:
        """Everything written so far is the file, on the disk, under its name."""
        try:
            self._file.flush()
            if self._temporary is not None:
                os.fsync(self._file.fileno())
            self._file.close()
            if self._temporary is not None:
                os.replace(self._temporary, self._target)
                self._temporary = None
        except OSError as failure:
            raise self._failed(failure) from failure

    def keep(self) -> Path | None:
        """What was written so far stays beside the file, as FILE.partial, which is replaced; None where there is nothing to keep,
        as it is written already. The file itself is what it was."""
        if self._temporary is None:
            return None
        kept = self._target.with_name(f"{self._target.name}.partial")
        try:
            self._file.close()
            os.replace(self._temporary, kept)
            self._temporary = None
        except OSError as failure:
            raise self._failed(failure) from failure
        return kept

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def _open(self, mode: int | None) -> BinaryIO:
        if is_special(self.path):
            return os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND), "wb")
        try:
            existing = stat.S_IMODE(self._target.stat().st_mode)
            os.close(os.open(self._target, os.O_WRONLY))  # a read-only file is not replaced behind its owner's back
        except FileNotFoundError:
            existing = 0o666 & ~_umask()
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._target.parent)
        self._temporary = Path(name)
        os.fchmod(handle, existing if mode is None else mode)
        return os.fdopen(handle, "wb")

    def _failed(self, failure: OSError) -> OutputError:
        self._discard()
        return OutputError(f"cannot write {self.path}: {failure.strerror}", _HINTS.get(type(failure)))

    def _discard(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            self._temporary = None


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """`text` as a file that appears whole. Raises OutputError."""
    with WholeFile(path, mode) as file:
        file.write(text)
        file.commit()


def output_path(output: str | None) -> Path | None:
    """What -o names; None without it, and for `-`, which is standard output. Raises UsageError for an empty name: most likely a
    script's variable that is not set."""
    if output == "":
        raise UsageError("-o needs the name of a file")
    return None if output is None or output == "-" else Path(output)


def model_path(output: str | None) -> Path | None:
    """The same of a model, which is no stream."""
    if output == "-":
        raise UsageError("a model is not written to standard output", "-o names a file or a folder")
    return output_path(output)


def is_special(path: Path) -> bool:
    """Whether a name stands for a device, a FIFO or a descriptor (/dev/stdout), to be written and never replaced. /dev/shm has
    files like any other folder."""
    if os.path.isdir(path):
        return False
    if str(path).startswith(("/dev/", "/proc/")) and not str(path).startswith("/dev/shm/"):
        return True
    return os.path.exists(path) and not os.path.isfile(path)


def stem_of(source: str) -> str:
    """What an output is named after: a repository's last word, a folder's name, a file's without its ending and the number of
    its part."""
    path = Path(os.path.abspath(source))  # `.` has a name, and a link keeps its own
    return _PART_AT_END.sub("", path.stem if os.path.isfile(path) else path.name)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
