"""What a hub is asked over HTTP, and how much of its answers is believed.

`huggingface_hub` gives the session (proxies, certificates), the token and the addresses. The answers are read here: where that
package makes a path of what a server says (an ETag, a commit), a server could name any file of this machine. So what ends in a
path is checked, every answer but a file's content is read up to a limit, and redirects are followed one by one: never from https
to http, and without the token once they leave the hub's own origin.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from nanovllm_cli.errors import AccessRefusedError, CheckpointError, DownloadError, ModelNotFoundError, NanovllmError
from nanovllm_cli.weights.json_file import parse_json

REQUEST_TIMEOUT = 10.0  # seconds without an answer
MAX_LISTING_BYTES = 16 << 20  # one of ten thousand files has two of them
_MAX_FILE_BYTES = 1 << 50
_MAX_REDIRECTS = 10
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_FILE_NAME = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
LOOK = "check HF_ENDPOINT and the proxy"


class Listing(NamedTuple):
    """A repository at one commit. `sizes`: path -> bytes, 0 where the hub does not say; `etags`: of the large files, their
    SHA-256."""

    commit: str
    sizes: Mapping[str, int]
    etags: Mapping[str, str]


class FileInfo(NamedTuple):
    """etag: fit to be a file's name. sha256: of the content, where the etag is one. size: None where the hub does not say."""

    etag: str
    sha256: str | None
    size: int | None


class HubUnreachableError(DownloadError):
    """No answer, or none that makes sense: the one failure that a copy in the cache makes good."""


def endpoint() -> str:
    """The hub's address, for messages: without a name and a password in it."""
    from huggingface_hub import constants

    scheme, mark, rest = constants.ENDPOINT.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + mark + host.rpartition("@")[2] + slash + path


def list_files(repo: str, revision: str) -> Listing:
    """One request, and what the HTTP client raises besides typed errors."""
    from huggingface_hub import constants

    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
    data = bytearray()
    with _answer("GET", url, repo, revision) as answer:
        for chunk in answer.iter_bytes(1 << 16):
            data += chunk
            if len(data) > MAX_LISTING_BYTES:
                raise HubUnreachableError(f"{endpoint()} lists {repo} in more than {MAX_LISTING_BYTES >> 20} MiB", LOOK)
    try:
        return _listing(parse_json(bytes(data), f"{endpoint()}: what it says of {repo}"), repo)
    except CheckpointError as error:
        raise HubUnreachableError(error.message, LOOK) from error


def file_info(repo: str, commit: str, name: str) -> FileInfo:
    """One request and the hub's own redirects, and what the HTTP client raises besides typed errors."""
    with _answer("HEAD", _url(repo, commit, name), repo, commit, name) as answer:
        answer.read()  # nothing, after which the connection can be used again
        headers = answer.headers
        etag = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
        size = headers.get("X-Linked-Size") or (None if answer.has_redirect_location else headers.get("Content-Length"))
    if not etag:
        raise HubUnreachableError(f"{endpoint()} gives no ETag for {repo}/{name}", LOOK)
    if size is not None and not (size.isascii() and size.isdigit() and len(size) < 16 and int(size) <= _MAX_FILE_BYTES):
        raise HubUnreachableError(f"{endpoint()} gives no size for {repo}/{name} that makes sense: {size[:40]!r}", LOOK)
    if not _FILE_NAME.fullmatch(etag) or etag.endswith(".incomplete"):
        etag = hashlib.sha1(etag.encode(), usedforsecurity=False).hexdigest()
    digest = etag.lower() if _SHA256.fullmatch(etag) else None
    return FileInfo(etag, digest, None if size is None else int(size))


@contextmanager
def content(repo: str, commit: str, name: str, first: int = 0, last: int | None = None) -> Iterator[Any]:
    """A file's bytes from `first` on: the HTTP client's answer, of status 206, 200 (all of it) or 416. Raises what it raises
    besides typed errors."""
    headers = {"Range": f"bytes={first}-{'' if last is None else last}"} if first or last is not None else {}
    with _answer("GET", _url(repo, commit, name), repo, commit, name, headers) as answer:
        yield answer


def _url(repo: str, commit: str, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, name, revision=commit)


@contextmanager
def _answer(
    method: str, url: str, repo: str, revision: str, name: str | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """The answer behind the redirects. To HEAD it is the hub's own, which knows the file, before one that leads to a store."""
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    session = get_session()
    more = {"Accept-Encoding": "identity", **(headers or {})}
    request = session.build_request(method, url, headers={**build_hf_headers(), **more}, timeout=REQUEST_TIMEOUT)
    what = f"{repo}/{name}" if name else repo
    for _ in range(_MAX_REDIRECTS + 1):
        with closing(session.send(request, stream=True, follow_redirects=False)) as answer:
            following = answer.next_request
            leaves = following is not None and _origin(following.url) != _origin(request.url)
            is_told = "X-Linked-Etag" in answer.headers or "ETag" in answer.headers
            if following is None or (method == "HEAD" and leaves and is_told):
                _check(answer, repo, revision, what)
                yield answer
                return
        if following.url.scheme not in ("http", "https") or (request.url.scheme, following.url.scheme) == ("https", "http"):
            raise HubUnreachableError(f"{endpoint()} leads from {request.url.scheme} to {following.url.scheme} for {what}", LOOK)
        request = following
    raise HubUnreachableError(f"{endpoint()} leads on and on for {what}: more than {_MAX_REDIRECTS} redirects", LOOK)


def _origin(url: Any) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _check(answer: Any, repo: str, revision: str, what: str) -> None:
    """Raises ModelNotFoundError, AccessRefusedError, HubUnreachableError. What an error's page says is not read."""
    status = answer.status_code
    if status in (200, 206, 416) or answer.has_redirect_location:
        coded = answer.headers.get("Content-Encoding", "identity")
        if coded.lower() != "identity":  # a few bytes could become gigabytes, which the client makes of them at once
            raise HubUnreachableError(f"{endpoint()} answers compressed ({coded[:20]!r}) for {what}, unasked", LOOK)
        return
    code = answer.headers.get("X-Error-Code")
    if code == "RevisionNotFound":
        raise ModelNotFoundError(f"{repo} has no revision {revision!r}", "leave the part after @ out, or check it")
    raise _refusal(status, code, repo, what)


def _refusal(status: int, code: str | None, repo: str, what: str) -> NanovllmError:
    if code == "GatedRepo":
        return AccessRefusedError(
            f"{repo} is gated: the hub refuses to hand it out",
            f"accept its licence at {endpoint()}/{repo}, then log in with `hf auth login` or set HF_TOKEN",
        )
    if status in (401, 403):
        return AccessRefusedError(
            f"the hub refuses access to {what}: it is private, or there is no such model",
            "check the name; log in with `hf auth login` or set HF_TOKEN",
        )
    if status in (404, 410):
        return ModelNotFoundError(f"{what} is not on {endpoint()}")
    return HubUnreachableError(f"{endpoint()} answers {status} for {what}", "try again later")


def _listing(told: Mapping[str, Any], repo: str) -> Listing:
    """Raises HubUnreachableError for what is no listing."""
    commit, files = told.get("sha"), told.get("siblings") or []
    if not (isinstance(commit, str) and COMMIT.fullmatch(commit)):
        raise HubUnreachableError(f"{endpoint()} gave no commit for {repo}", LOOK)
    sizes: dict[str, int] = {}
    etags: dict[str, str] = {}
    for file in files if isinstance(files, list) else [None]:
        name, size, lfs = (file.get(key) for key in ("rfilename", "size", "lfs")) if isinstance(file, dict) else (None, 0, None)
        digest = lfs.get("sha256") if isinstance(lfs, dict) else None
        is_size = size is None or (isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= _MAX_FILE_BYTES)
        is_digest = digest is None or (isinstance(digest, str) and _SHA256.fullmatch(digest))
        if not (isinstance(name, str) and is_size and is_digest):
            raise HubUnreachableError(f"{endpoint()} lists a file of {repo} in a way that makes no sense: {file!r:.100}", LOOK)
        sizes[name] = size or 0
        if digest is not None:
            etags[name] = digest.lower()
    return Listing(commit, sizes, etags)
