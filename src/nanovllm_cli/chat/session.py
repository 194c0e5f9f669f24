"""Conversations on the disk: one file a session, one line of JSON an event, appended and flushed before it counts.

    {"event": "session", "format": "nanovllm chat", "version": 1, "created": "2026-11-21T15:04:05Z", "model": "tiny"}
    {"event": "message", "id": 1, "parent": null, "role": "user", "content": "hi"}

A process that is killed leaves at worst half a line at the end, which is dropped. A session is open in one process at a
time (a lock on its file). `index.json` beside the sessions is a cache of what `entries` shows, checked against the files'
sizes and times: it is made again where it is missing or damaged. Beside NAME.jsonl may lie NAME.kv (`LLM.save_kv`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanovllm_cli import system
from nanovllm_cli.chat.conversation import Conversation, Event, is_int
from nanovllm_cli.cli.files import write_whole
from nanovllm_cli.errors import NanovllmError, OutputError, SessionError, UsageError

FORMAT, VERSION = "nanovllm chat", 1
MAX_SESSION_BYTES = 256 << 20
_NAME = re.compile(r"[\w][\w.+-]{0,63}")
_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """A session in the list. `updated`: seconds since 1970. `title`: its first message, shortened."""

    name: str
    title: str
    model: str
    turns: int
    updated: float


class Session:
    """One conversation's file, locked while it is open. It appears with the first event."""

    def __init__(
        self, folder: Path, name: str, model: str, *, handle: int | None = None, is_own_choice: bool = True
    ) -> None:
        """handle: of a file that is there already, locked. is_own_choice: the name was not asked for, and may change."""
        self.name = name
        self._folder = folder
        self._model = model
        self._handle = handle
        self._is_own_choice = is_own_choice

    @property
    def path(self) -> Path:
        return self._folder / (self.name + _SUFFIX)

    @property
    def kv_path(self) -> Path:
        return self.path.with_suffix(".kv")

    @property
    def exists(self) -> bool:
        return self._handle is not None

    def append(self, event: Event) -> None:
        """Safe on the disk when this returns. Raises OutputError or SessionError."""
        if self._handle is None:
            self._create()
        self._write(event)

    def rename(self, name: str) -> None:
        """Raises UsageError for a name that is taken or none."""
        new = Session(self._folder, checked_name(name), self._model)
        if os.path.exists(new.path):
            raise UsageError(f"there is a session {name} already", "choose another name")
        if self.exists:
            with _telling(new.path):
                os.rename(self.path, new.path)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.kv_path, new.kv_path)
        self.name, self._is_own_choice = new.name, False

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _create(self) -> None:
        chosen, number = self.name, 1
        with _telling(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while self._handle is None:
            with _telling(self.path):
                self._handle = _create(self.path)
            if self._handle is None and not self._is_own_choice:
                raise SessionError(f"another process has begun a session {self.name}")
            if self._handle is None:
                number += 1
                self.name = f"{chosen}-{number}"
        _lock(self._handle, self.name)
        header = {"event": "session", "format": FORMAT, "version": VERSION}
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._write(header | {"created": created, "model": self._model})

    def _write(self, event: Event) -> None:
        assert self._handle is not None
        data = (json.dumps(event, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        end = os.lseek(self._handle, 0, os.SEEK_END)
        if end + len(data) > MAX_SESSION_BYTES:  # it could not be read again; images are what gets there
            longest = f"{self.path} would be longer than {MAX_SESSION_BYTES >> 20} MiB"
            raise OutputError(longest, "/clear and then /save begin another session")
        try:
            with _telling(self.path):
                written = 0
                while written < len(data):
                    written += os.write(self._handle, data[written:])
                os.fsync(self._handle)
        except OutputError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, end)  # no half line in the middle, should the next one fit
            raise


class Sessions:
    """All sessions of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """The latest first."""
        return [path.stem for path in sorted(self._files(), key=_modified, reverse=True)]

    def new(self, model: str, name: str | None = None) -> Session:
        """A session whose file comes with its first event; without a name it is called by the date."""
        if name is not None:
            return Session(self.folder, checked_name(name), model, is_own_choice=False)
        return Session(self.folder, datetime.now().strftime("%Y-%m-%d-%H%M"), model)

    def find(self, name: str) -> str | None:
        """The session that a name or the beginning of one stands for; None where there is none. Raises UsageError where it
        could be several."""
        names = self.names()
        if checked_name(name) in names:
            return name
        near = [each for each in names if each.startswith(name)]
        if len(near) > 1:
            raise UsageError(
                f"{name} is the beginning of several sessions: {', '.join(near[:8])}", "write more of the name"
            )
        return near[0] if near else None

    def open(self, name: str) -> tuple[Session, list[Event]]:
        """An existing session and its events, to go on with. Raises SessionError."""
        path = self.folder / (name + _SUFFIX)
        handle = _open(path, name)
        try:
            _lock(handle, name)
            data = _read(path)
            events = _events(data, path)
            if not data.endswith(b"\n"):
                os.ftruncate(handle, data.rfind(b"\n") + 1)
        except BaseException:
            os.close(handle)
            raise
        return Session(self.folder, name, last_model(events), handle=handle, is_own_choice=False), events

    def delete(self, name: str) -> None:
        """Raises UsageError where there is none, SessionError where it is in use."""
        if name not in self.names():
            raise UsageError(f"there is no session {name}", "--list-sessions shows them all")
        path = self.folder / (name + _SUFFIX)
        handle = _open(path, name)
        try:
            _lock(handle, name)
            with _telling(path):
                path.unlink()
                path.with_suffix(".kv").unlink(missing_ok=True)
        finally:
            os.close(handle)

    def entries(self) -> list[Entry]:
        """What there is, the latest first; of files that cannot be read only the name. Keeps the index."""
        known = _read_index(self._index)
        found: dict[str, dict[str, Any]] = {}
        for path in self._files():
            with contextlib.suppress(OSError):
                stat = path.stat()
                stamp, kept = [stat.st_size, stat.st_mtime_ns], known.get(path.stem)
                if kept is None or kept["stamp"] != stamp or kept["entry"]["updated"] != stat.st_mtime:
                    kept = {"stamp": stamp, "entry": asdict(_summary(path, stat.st_mtime))}
                found[path.stem] = kept
        if found != known:
            index = json.dumps({"version": VERSION, "sessions": found}, ensure_ascii=False) + "\n"
            with contextlib.suppress(OutputError, OSError):
                write_whole(self._index, index, mode=0o600)
        entries = [Entry(**each["entry"]) for each in found.values()]
        return sorted(entries, key=lambda entry: entry.updated, reverse=True)

    @property
    def _index(self) -> Path:
        return self.folder / "index.json"

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.stem)]


def checked_name(name: str) -> str:
    """`name`, if a session may be called so. Raises UsageError."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name[:80]!r} cannot be the name of a session",
            "use letters, digits and _ . + -, at most 64, a letter or digit first",
        )
    return name


def kept_ids(events: list[Event]) -> list[int]:
    """The tokens whose KV was saved last; nothing where the line makes no sense (it only ever saves time)."""
    ids = next((event.get("ids") for event in reversed(events) if event.get("event") == "kv"), None)
    return ids if isinstance(ids, list) and all(is_int(each) and each >= 0 for each in ids) else []


def last_model(events: list[Event]) -> str:
    """The model that was talked to last."""
    models = [event.get("model") for event in events if event.get("event") in ("session", "message")]
    return next((model for model in reversed(models) if isinstance(model, str) and model), "")


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SESSION_BYTES + 1)
    except OSError as failure:
        raise SessionError(f"cannot read {path}: {failure.strerror}") from failure
    if len(data) > MAX_SESSION_BYTES:
        raise SessionError(f"{path} is longer than {MAX_SESSION_BYTES >> 20} MiB")
    return data


def _events(data: bytes, path: Path) -> list[Event]:
    """Every whole line. Raises SessionError for what is no session, with the line."""
    events: list[Event] = []
    hint = "move the file away, or choose another --session"
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise SessionError(f"{path} is damaged in line {number}" if events else f"{path} is no session", hint)
        if not events and (event.get("event"), event.get("format")) != ("session", FORMAT):
            raise SessionError(f"{path} is no session", hint)
        if not events and event.get("version") != VERSION:
            raise SessionError(
                f"{path} was written by another version of nanovllm ({event.get('version')!r:.20})", hint
            )
        events.append(event)
    if not events:
        raise SessionError(f"{path} is no session: it is empty", hint)
    return events


def _summary(path: Path, updated: float) -> Entry:
    try:
        events = _events(_read(path), path)
        conversation = Conversation.replay(events)
    except NanovllmError:
        return Entry(path.stem, "(cannot be read)", "", 0, updated)
    return Entry(path.stem, conversation.title, last_model(events), conversation.num_turns, updated)


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    """What the index says, entry by entry, as far as it makes sense."""
    try:
        sessions = json.loads(path.read_bytes())["sessions"]
        good = {name: kept for name, kept in sessions.items() if isinstance(kept["stamp"], list)}
        return {name: kept for name, kept in good.items() if _is_entry(Entry(**kept["entry"]), name)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _is_entry(entry: Entry, name: str) -> bool:
    texts = all(isinstance(text, str) for text in (entry.title, entry.model))
    return texts and entry.name == name and isinstance(entry.turns, int) and isinstance(entry.updated, int | float)


def _open(path: Path, name: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as failure:
        raise SessionError(f"cannot open the session {name}: {failure.strerror}") from failure


def _create(path: Path) -> int | None:
    """None where there is such a file already."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None


def _lock(handle: int, name: str) -> None:
    if not system.lock(handle):
        raise SessionError(f"the session {name} is open in another terminal", "close it there, or choose another --session")


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise OutputError(
            f"cannot write {path}: {failure.strerror}", "--no-save goes on without keeping anything"
        ) from failure


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
