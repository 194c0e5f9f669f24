"""The Hugging Face hub and its cache, behind four calls: list a repository, fetch files, look into the cache, name it.

Everything lies where `huggingface_hub` keeps it (blobs, snapshots, refs, locks), and nowhere else. That package does
the requests and the small files. Large ones are fetched here, over plain HTTP also where it would take Xet, as it would
throw a part away whenever a connection is reset or the process ends: into `blobs/<etag>.incomplete` under its lock,
continued with Range, compared with the SHA-256 that the etag of a large file is, and put into place by a rename.

A branch's `refs` entry is written when its files are complete, so that a later offline start never meets half a model.
Which files a model needs is decided in `files.py`, what a name means in `source.py`. `huggingface_hub` is imported when
the first request is made: looking into the cache needs none of it.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nanovllm_cli.errors import (
    AccessRefusedError,
    DoesNotFitError,
    DownloadError,
    ModelNotFoundError,
    NanovllmError,
)
from nanovllm_cli.folders import in_home
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.files import stays_inside

T = TypeVar("T")

RESUMABLE_BYTES = 8 << 20  # files from this size on are fetched here; for smaller ones starting again costs nothing
RETRY_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt; an attempt that brought data starts them anew
REQUEST_TIMEOUT = 10.0  # seconds without an answer
_MAX_SKIPPED = 64 << 20  # bytes that are read in vain to get at a part of a file
_SPARE_BYTES = 64 << 20  # that a download leaves free on the disk
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Listing(NamedTuple):
    """A repository at one commit. `sizes`: path -> bytes, 0 where the hub does not say; `etags`: of the large files."""

    commit: str
    sizes: Mapping[str, int]
    etags: Mapping[str, str]


class HubUnreachableError(DownloadError):
    """No answer, or none that makes sense: the one failure that a copy in the cache makes good."""


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
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            meant = [path.name for path in folder.glob("snapshots/*") if is_commit(path.name, revision)]
            if len(meant) != 1:
                return None
            commit = meant[0]
    snapshot = folder / "snapshots" / commit
    return (commit, snapshot) if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def list_repo(repo: str, revision: str, *, attempts: int = 1) -> Listing:
    """One request. Raises HubUnreachableError, ModelNotFoundError, AccessRefusedError."""
    from huggingface_hub import HfApi

    def ask() -> Listing:
        with _translated(repo, revision):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=REQUEST_TIMEOUT)
            if not _COMMIT.fullmatch(info.sha or ""):
                raise HubUnreachableError(f"{_endpoint()} gave no commit for {repo}", "check HF_ENDPOINT and the proxy")
            files = info.siblings or []
            return Listing(
                str(info.sha),
                {file.rfilename: file.size or 0 for file in files},
                {file.rfilename: file.lfs.sha256 for file in files if file.lfs},
            )

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
        _fetch_file(repo, listing.commit, name, _Meter(progress, listing.sizes.get(name, 0)))
    progress.done()
    return snapshot


def read_range(repo: str, commit: str, name: str, first: int, count: int) -> bytes:
    """`count` bytes of a file on the hub from `first` on, or as many as there are; nothing is kept. Raises what `list_repo`
    raises."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url = hf_hub_url(repo, name, revision=commit)
    wanted = {"Accept-Encoding": "identity", "Range": f"bytes={first}-{first + count - 1}"}

    def ask() -> bytes:
        with (
            _translated(repo, commit, name),
            get_session().stream(
                "GET", url, headers={**build_hf_headers(), **wanted}, timeout=REQUEST_TIMEOUT, follow_redirects=True
            ) as answer,
        ):
            hf_raise_for_status(answer)
            skipped = 0 if answer.status_code == 206 else first  # a server that does not know Range sends everything
            if skipped > _MAX_SKIPPED:
                raise HubUnreachableError(f"{_endpoint()} sends no parts of files", "download the model to look into it")
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


def _fetch_file(repo: str, commit: str, name: str, meter: _Meter) -> None:
    from huggingface_hub import hf_hub_download

    more: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:
        more["tqdm_class"] = meter.as_tqdm()

    def download() -> None:
        with _translated(repo, commit, name):
            if meter.size >= RESUMABLE_BYTES:
                _fetch_blob(repo, commit, name, meter)
            hf_hub_download(repo, name, revision=commit, **more)

    _with_retries(download, 1 + len(RETRY_WAITS), meter)
    meter.reached(meter.size)


def _fetch_blob(repo: str, commit: str, name: str, meter: _Meter) -> None:
    """Puts a large file's blob where `huggingface_hub` will find it, unless it is there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    url = hf_hub_url(repo, name, revision=commit)
    metadata = get_hf_file_metadata(url, timeout=REQUEST_TIMEOUT)
    etag, size = metadata.etag, metadata.size
    if not etag or not size or not re.fullmatch(r"[\w.-]+", etag):
        return
    blob = repo_folder(repo) / "blobs" / etag
    lock = cache_folder() / ".locks" / repo_folder(repo).name / f"{etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            part = _part_path(repo, etag)
            digest = _continue_part(url, part, size, meter)
            if len(etag) == 64 and digest != etag.lower():
                part.unlink()
                raise DownloadError(f"{repo}: {name} arrived damaged (SHA-256 {digest}, expected {etag})", "try again")
            os.replace(part, blob)


def _continue_part(url: str, part: Path, size: int, meter: _Meter) -> str:
    """Appends to `part` until it has `size` bytes; gives the SHA-256 of the whole. Where it cannot be continued (it is
    too long, or the server does not know Range) it starts anew."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    digest = hashlib.sha256()
    with part.open("ab+") as file:
        file.seek(0)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        done = file.tell()
        meter.reached(done)
        if done == size:
            return digest.hexdigest()
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        with get_session().stream(
            "GET", url, headers=headers, timeout=REQUEST_TIMEOUT, follow_redirects=True
        ) as answer:
            if answer.status_code == 416:  # the part is longer than the file: not of this one
                file.truncate(0)
            hf_raise_for_status(answer)
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
            f"{url}: expected {size} bytes, found {done}", "try again: it goes on where it stopped"
        )
    return digest.hexdigest()


class _Meter:
    """How much of one file has come, reported once: what a retry brings again is not counted again."""

    def __init__(self, progress: LoadProgress, size: int) -> None:
        self.size = size
        self.highest = 0
        self._progress = progress
        self._lock = threading.Lock()  # Xet reports from threads of its own

    def reached(self, position: int) -> None:
        with self._lock:
            if (more := min(position, self.size) - self.highest) > 0:
                self.highest += more
                self._progress.advance(more)

    def note(self, message: str) -> None:
        self._progress.note(message)

    def as_tqdm(self) -> type:
        """A class with as much of tqdm as `huggingface_hub` uses of one; each instance counts one attempt."""
        meter = self

        class Counter:
            def __init__(self, *_args: Any, total: float | None = None, initial: float = 0, **_more: Any) -> None:
                self.total, self.n, self.disable = total, initial, False

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0
                meter.reached(int(self.n))

            def __enter__(self) -> Counter:
                return self

            def __exit__(self, *_error: object) -> None:
                pass

            def _nothing(self, *_args: Any, **_more: Any) -> None:
                pass

            close = refresh = clear = reset = _nothing
            set_description = set_description_str = set_postfix = set_postfix_str = _nothing

        return Counter


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
                meter.note(f"{error.message}; trying again in {wait:g} s")
            time.sleep(wait)


@contextmanager
def _translated(repo: str, revision: str, name: str | None = None) -> Iterator[None]:
    """The failures of `huggingface_hub` and of its HTTP client as ours."""
    from huggingface_hub import errors

    what = f"{repo}/{name}" if name else repo
    try:
        yield
    except NanovllmError:
        raise
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo} has no revision {revision!r}", "leave the part after @ out, or check it"
        ) from (error)
    except errors.HfHubHTTPError as error:
        raise _http_error(error, what, repo) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repo!r} is not the name of a repository", "names look like org/repo") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFitError(f"the disk of {cache_folder()} is full", _ROOM) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessRefusedError(
                f"{cache_folder()} cannot be written to: {error.strerror}", "set HF_HOME to a folder of your own"
            ) from error
        if isinstance(cause := error.__cause__, errors.HfHubHTTPError):
            raise _http_error(cause, what, repo) from error
        raise _unreachable(what, error.__cause__ or error) from error
    except Exception as error:  # the HTTP client's own tree, and answers that are not what they should be
        raise _unreachable(what, error) from error


_ROOM = "free some space, or set HF_HOME to a folder on a larger disk"


def _http_error(error: Any, what: str, repo: str) -> NanovllmError:
    status = getattr(error.response, "status_code", 0)
    gated = error.response.headers.get("X-Error-Code") == "GatedRepo"
    if gated:
        return AccessRefusedError(
            f"{repo} is gated: the hub refuses to hand it out",
            f"accept its licence at {_endpoint()}/{repo}, then log in with `hf auth login` or set HF_TOKEN",
        )
    if status in (401, 403):
        return AccessRefusedError(
            f"the hub refuses access to {what}: it is private, or there is no such model",
            "check the name; log in with `hf auth login` or set HF_TOKEN",
        )
    if status in (404, 410):
        return ModelNotFoundError(f"{what} is not on {_endpoint()}")
    return HubUnreachableError(f"{_endpoint()} answers {status} for {what}", "try again later")


def _unreachable(what: str, error: BaseException) -> HubUnreachableError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return HubUnreachableError(
        f"cannot get {what} from {_endpoint()}: {reason}",
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


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
