"""The Hugging Face hub and its cache, behind four calls: list a repository, fetch files, look into the cache, name it.

Everything lies where `huggingface_hub` keeps it (blobs, snapshots, refs, locks), and nowhere else. Files are fetched
over plain HTTP also where that package would take Xet, as it would throw a part away whenever a connection is reset or the
process ends: into `blobs/<etag>.incomplete` under its lock, continued with Range, compared with the listing's size and with the
SHA-256 that the etag of a large file is, and put into place by a rename. What is believed of answers is `hub_http.py`'s matter.

A branch's `refs` entry is written when its files are complete, so that a later offline start never meets half a model.
Which files a model needs is decided in `files.py`, what a name means in `source.py`. `huggingface_hub` is imported when
the first request is made: looking into the cache needs none of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from nanovllm_cli.errors import AccessRefusedError, DoesNotFitError, DownloadError, ModelNotFoundError, NanovllmError
from nanovllm_cli.folders import in_home
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.files import stays_inside
from nanovllm_cli.weights.hub_http import (
    COMMIT,
    LOOK,
    FileInfo,
    HubUnreachableError,
    Listing,
    content,
    endpoint,
    file_info,
    list_files,
)

T = TypeVar("T")

RETRY_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt; an attempt that brought data starts them anew
FIRST_ATTEMPTS = 3
"""Of the first request, which fails at once where there is no network, and for a path that was misspelt."""
_MAX_SKIPPED = 64 << 20  # bytes that are read in vain to get at a part of a file
_SPARE_BYTES = 64 << 20  # that a download leaves free on the disk


def offline_by_environment() -> bool:
    values = (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper()
    return values in ("1", "ON", "YES", "TRUE")


def cache_folder() -> Path:
    """Where `huggingface_hub` keeps models, by the same variables and in the same order."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(in_home(folder) if folder.startswith("~/") else os.path.expanduser(folder)))


def repo_folder(repo: str) -> Path:
    return cache_folder() / ("models--" + repo.replace("/", "--"))


def is_commit(commit: str, wanted: str) -> bool:
    """Whether a revision names this commit, by seven of its digits or more."""
    return len(wanted) >= 7 and commit.startswith(wanted.lower())


def cached_repos() -> list[str]:
    """The repositories that have a snapshot in the cache, for completion and for suggestions."""
    with suppress(OSError):
        folders = [folder.name for folder in cache_folder().glob("models--*") if (folder / "snapshots").is_dir()]
        return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in folders)
    return []


def cached_snapshot(repo: str, revision: str) -> tuple[str, Path] | None:
    """The commit that a branch, tag or commit stood for when it was last downloaded, and its folder. Commits may be short."""
    folder = repo_folder(repo)
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            ref = folder / "refs" / revision
            if not ref.is_file():  # a pipe, which another user of a shared cache may have made, would keep us waiting
                raise FileNotFoundError
            with ref.open() as file:
                commit = file.read(80).strip()
        except (OSError, ValueError):
            meant = [path.name for path in folder.glob("snapshots/*") if is_commit(path.name, revision)]
            if len(meant) != 1:
                return None
            commit = meant[0]
    snapshot = folder / "snapshots" / commit
    return (commit, snapshot) if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def list_repo(repo: str, revision: str, *, attempts: int = 1) -> Listing:
    """One request. Raises HubUnreachableError, ModelNotFoundError, AccessRefusedError."""

    def ask() -> Listing:
        with _translated(repo):
            return list_files(repo, revision)

    return _with_retries(ask, attempts)


def fetch(repo: str, listing: Listing, names: Sequence[str], progress: LoadProgress) -> Path:
    """Downloads those of `names` that the cache lacks, and gives the snapshot's folder.

    Raises DoesNotFitError before the first byte when the disk has no room for them, and what `list_repo` raises.
    """
    snapshot = repo_folder(repo) / "snapshots" / listing.commit
    missing = [name for name in names if not (snapshot / name).exists()]
    if not missing:
        return snapshot
    num_bytes = sum(listing.sizes.get(name, 0) for name in missing)
    _check_disk(repo, num_bytes - sum(_part_bytes(repo, listing.etags.get(name)) for name in missing))
    progress.stage(f"download {repo}", num_bytes or None, "B")
    for name in missing:
        _fetch_file(repo, listing, name, _Meter(progress, listing.sizes.get(name, 0)))
    progress.done()
    return snapshot


def read_range(repo: str, commit: str, name: str, first: int, count: int) -> bytes:
    """`count` bytes of a file on the hub from `first` on, or as many as there are; nothing is kept. Raises what `list_repo`
    raises."""

    def ask() -> bytes:
        with _translated(f"{repo}/{name}"), content(repo, commit, name, first, first + count - 1) as answer:
            if answer.status_code == 416:  # the file ends before
                return b""
            skipped = 0 if answer.status_code == 206 else first  # a server that does not know Range sends everything
            if skipped > _MAX_SKIPPED:
                raise HubUnreachableError(f"{endpoint()} sends no parts of files", "download the model to look into it")
            data = bytearray()
            for chunk in answer.iter_bytes(1 << 16):
                data += chunk
                if len(data) >= skipped + count:
                    break
            return bytes(data[skipped : skipped + count])

    return _with_retries(ask, 1 + len(RETRY_WAITS))


def remember_revision(repo: str, revision: str, commit: str) -> None:
    """Writes `refs/<revision>`, as `huggingface_hub` does: whole or not at all. A read-only cache is left alone."""
    path = repo_folder(repo) / "refs" / revision
    if revision == commit or not stays_inside(revision):
        return
    with suppress(OSError, ValueError):
        if path.is_file() and path.read_text() == commit:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(commit)
        os.replace(temporary, path)


def _fetch_file(repo: str, listing: Listing, name: str, meter: _Meter) -> None:
    def download() -> None:
        with _translated(f"{repo}/{name}"):
            info = file_info(repo, listing.commit, name)
            size = meter.size if info.size is None else info.size
            if info.size is None and not size:
                raise HubUnreachableError(f"{endpoint()} does not say how large {repo}/{name} is", LOOK)
            if meter.size not in (0, size):
                raise DownloadError(f"{repo}: {name} has {meter.size} bytes in the hub's listing, and {size} by itself", LOOK)
            if not meter.size:
                _check_disk(repo, size)
            _fetch_blob(repo, listing, name, info, size, meter)

    _with_retries(download, 1 + len(RETRY_WAITS), meter)
    meter.reached(meter.size)


def _fetch_blob(repo: str, listing: Listing, name: str, info: FileInfo, size: int, meter: _Meter) -> None:
    """Puts a file's blob where `huggingface_hub` would look for it, unless it is there, and links to it in the snapshot."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    blob = repo_folder(repo) / "blobs" / info.etag
    pointer = repo_folder(repo) / "snapshots" / listing.commit / name
    lock = cache_folder() / ".locks" / repo_folder(repo).name / f"{info.etag}.lock"
    for folder in (blob.parent, pointer.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.is_file() or blob.stat().st_size != size:
            part = _part_path(repo, info.etag)
            digest = _continue_part(repo, listing.commit, name, part, size, meter)
            for expected in (listing.etags.get(name), info.sha256):
                if expected not in (None, digest):
                    part.unlink()
                    raise DownloadError(f"{repo}: {name} arrived damaged (SHA-256 {digest}, expected {expected})", "try again")
            os.replace(part, blob)
        _link(pointer, blob)


def _link(pointer: Path, blob: Path) -> None:
    """A relative link in the snapshot; the blob itself where there can be none."""
    handle, temporary = tempfile.mkstemp(dir=pointer.parent)
    os.close(handle)
    os.unlink(temporary)
    try:
        os.symlink(os.path.relpath(blob, pointer.parent), temporary)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        temporary = str(blob)
    os.replace(temporary, pointer)


def _open_part(part: Path) -> BinaryIO:
    """The file that a download grows in, to read and append. What another user of a shared cache may have put in its place, a
    link to a file of this user's or a pipe that nobody writes to, makes room for a new one."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(part, flags, 0o666)
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return os.fdopen(handle, "ab+")
        os.close(handle)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES):
            raise
    part.unlink()
    return os.fdopen(os.open(part, flags | os.O_EXCL, 0o666), "ab+")


def _continue_part(repo: str, commit: str, name: str, part: Path, size: int, meter: _Meter) -> str:
    """Appends to `part` until it has `size` bytes; gives the SHA-256 of the whole. Where it cannot be continued (it is
    too long, or the server does not know Range) it starts anew."""
    digest = hashlib.sha256()
    with _open_part(part) as file:
        file.seek(0)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        done = file.tell()
        meter.reached(done)
        if done == size:
            return digest.hexdigest()
        with content(repo, commit, name, done) as answer:
            if answer.status_code == 416:  # the part is longer than the file: not of this one
                file.truncate(0)
                raise HubUnreachableError(f"{endpoint()} has no more of {repo}/{name}", "try again")
            came = answer.headers.get("Content-Range", "")
            if done and answer.status_code == 206 and not came.startswith(f"bytes {done}-"):
                raise HubUnreachableError(f"{endpoint()} sends another part of {repo}/{name}: {came[:60]!r}", LOOK)
            if done and answer.status_code != 206:  # the server does not know Range and sends everything
                file.truncate(0)
                digest, done = hashlib.sha256(), 0
            for chunk in answer.iter_bytes(1 << 20):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                meter.reached(done)
                if done > size:
                    break
        file.flush()
        os.fsync(file.fileno())
    if done != size:
        if done > size:
            part.unlink()
        raise HubUnreachableError(
            f"{repo}/{name}: expected {size} bytes, found {done}", "try again: it goes on where it stopped"
        )
    return digest.hexdigest()


class _Meter:
    """How much of one file has come, reported once: what a retry brings again is not counted again."""

    def __init__(self, progress: LoadProgress, size: int) -> None:
        self.size = size
        self.highest = 0
        self.progress = progress

    def reached(self, position: int) -> None:
        if (more := min(position, self.size) - self.highest) > 0:
            self.highest += more
            self.progress.advance(more)


def _with_retries(action: Callable[[], T], attempts: int, meter: _Meter | None = None) -> T:
    """Repeats after HubUnreachableError, with growing waits; an attempt that moved the meter does not count."""
    failures = 0
    while True:
        before = meter.highest if meter else 0
        try:
            return action()
        except HubUnreachableError as error:
            failures = failures + 1 if not meter or meter.highest == before else 1
            if failures >= attempts:
                raise
            wait = RETRY_WAITS[min(failures, len(RETRY_WAITS)) - 1]
            if meter:
                meter.progress.note(f"{error.message}; trying again in {wait:g} s")
            time.sleep(wait)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The failures of the disk, of `huggingface_hub` and of its HTTP client as ours."""
    from huggingface_hub import errors

    try:
        yield
    except NanovllmError:
        raise
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{what!r} is not the name of a repository", "names look like org/repo") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFitError(f"the disk of {cache_folder()} is full", _ROOM) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessRefusedError(
                f"{cache_folder()} cannot be written to: {error.strerror}", "set HF_HOME to a folder of your own"
            ) from error
        raise _unreachable(what, error) from error
    except Exception as error:  # the HTTP client's own tree, and answers that are not what they should be
        raise _unreachable(what, error) from error


_ROOM = "free some space, or set HF_HOME to a folder on a larger disk"


def _unreachable(what: str, error: BaseException) -> HubUnreachableError:
    reason = re.sub(r"\[Errno -?\d+\] ", "", " ".join(str(error).split()))[:200] or type(error).__name__
    return HubUnreachableError(
        f"cannot get {what} from {endpoint()}: {reason}",
        "check the connection, HF_ENDPOINT and the proxy; --offline uses only what is in the cache",
    )


def _part_bytes(repo: str, etag: str | None) -> int:
    """What an earlier attempt left of a file."""
    with suppress(OSError):
        return _part_path(repo, etag).stat().st_size if etag else 0
    return 0


def _part_path(repo: str, etag: str) -> Path:
    return repo_folder(repo) / "blobs" / f"{etag}.incomplete"


def _check_disk(repo: str, num_bytes: int) -> None:
    folder = cache_folder()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if num_bytes + _SPARE_BYTES > free:
        raise DoesNotFitError(
            f"{repo} needs {num_bytes / 2**30:.1f} GiB on disk, {free / 2**30:.1f} GiB are free in {cache_folder()}",
            _ROOM,
        )
