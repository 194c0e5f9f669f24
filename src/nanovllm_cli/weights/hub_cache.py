"""What is in the Hugging Face cache, and taking something out of it. Nothing outside of it is ever touched.

The cache is `huggingface_hub`'s; so are looking through it and deleting, which keeps blobs that another revision needs.
Which of its files make a model is `files.py`'s matter; whether that can be run, whoever opens it knows.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli.errors import AccessRefusedError, BusyError, ModelNotFoundError, NanovllmError, UsageError
from nanovllm_cli.weights import hub
from nanovllm_cli.weights.files import Weights, choose, quants, some
from nanovllm_cli.weights.source import HubName


class CachedModel(NamedTuple):
    """One model of a repository, at one revision. refs: branches and tags that stand for it. path: for `open_checkpoint`, None
    where problem says why it can't be opened. num_files, num_bytes: its own, settings included. last_used: a time, in seconds."""

    repo: str
    revision: str
    refs: tuple[str, ...]
    quant: str | None
    path: Path | None
    num_files: int
    num_bytes: int
    last_used: float
    problem: str | None

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        quant = f":{self.quant}" if self.quant else ""
        return f"{self.repo}{quant}" + ("" if "main" in self.refs else f"@{self.revision[:7]}")


class Removal(NamedTuple):
    """What would be removed: revisions of a repository, as short names; bytes that it frees. carry_out: does it."""

    repo: str
    revisions: tuple[str, ...]
    num_bytes: int
    carry_out: Callable[[], None]


def cached_models() -> list[CachedModel]:
    """All models of the cache by name, also those that can't be opened. Raises AccessRefusedError."""
    found: list[CachedModel] = []
    repos = _models(_scan())
    for repo in repos:
        for revision in sorted(repo.revisions, key=lambda revision: -float(revision.last_modified)):
            found += _models_of(repo, revision)
    problem = "broken, or never finished: models pull goes on, models rm removes it"
    for name in sorted(set(hub.cached_repos()) - {str(repo.repo_id) for repo in repos}):
        size = _num_bytes(hub.repo_folder(name))
        found.append(CachedModel(name, "", ("main",), None, None, 0, size, 0.0, problem))
    return sorted(found, key=lambda model: model.repo.lower())


def _models_of(repo: Any, revision: Any) -> list[CachedModel]:
    """One row for safetensors, one for each quantization of GGUF files, one with a problem where there is neither."""
    snapshot = Path(revision.snapshot_path)
    files = {Path(file.file_path).relative_to(snapshot).as_posix(): file for file in revision.files}

    def row(weights: Weights | None, problem: str | None, quant: str | None = None) -> CachedModel:
        names = list(files) if weights is None else [name for name in weights.files if name in files]
        path = None
        if weights is not None and problem is None:
            path = snapshot / weights.entry if weights.entry else snapshot
        used = max((float(files[name].blob_last_accessed) for name in names), default=float(repo.last_accessed))
        size = sum(files[name].size_on_disk for name in names)
        refs = tuple(sorted(revision.refs))
        return CachedModel(repo.repo_id, revision.commit_hash, refs, quant, path, len(names), size, used, problem)

    kinds: Sequence[str | None] = () if "config.json" in files else quants(files)
    rows = []
    for quant in kinds or (None,):
        try:
            weights = choose(list(files), repo.repo_id, quant=quant).with_shards(snapshot)
            missing = [name for name in weights.files if name not in files]
            problem = f"incomplete: {some(missing, 2)} missing; models pull goes on" if missing else None
            rows.append(row(weights, problem, quant))
        except NanovllmError as error:
            rows.append(row(None, error.message, quant))
    return rows


def removal(name: HubName) -> Removal:
    """What of the cache `name` stands for: all revisions of a repository, or the one that it names. A repository without a whole
    revision, of a download that was broken off, goes with what there is of it.

    Raises ModelNotFoundError for what is not there, UsageError for a part of a revision, BusyError for a repository that is
    being downloaded.
    """
    if name.quant or name.file:
        raise UsageError(
            f"only whole revisions are removed, and {name.quant or name.file} is a part of one", f"name {name.repo}"
        )
    _check_no_download(name.repo)
    info = _scan()
    repo = next((repo for repo in _models(info) if str(repo.repo_id) == name.repo), None)
    folder = hub.repo_folder(name.repo)
    if repo is None and name.repo in hub.cached_repos() and name.revision is None and not folder.is_symlink():
        return Removal(name.repo, (), _num_bytes(folder), partial(_carry_out, name.repo, partial(shutil.rmtree, folder)))
    if repo is None:
        there = some(hub.cached_repos(), 8)
        raise ModelNotFoundError(f"{name.repo} is not in the cache ({hub.cache_folder()})", f"cached are: {there or 'none'}")
    revisions = sorted(repo.revisions, key=lambda revision: -float(revision.last_modified))
    if name.revision is not None:
        wanted = name.revision
        revisions = [each for each in revisions if wanted in each.refs or hub.is_commit(each.commit_hash, wanted)]
        if not revisions:
            there = some([", ".join(sorted(each.refs)) or each.commit_hash[:7] for each in repo.revisions], 8)
            raise ModelNotFoundError(f"{name.repo} has no revision {wanted!r} in the cache", f"there are: {there}")
    of_repo = dataclasses.replace(info, repos=frozenset({repo}))  # a commit may be in a copy of the repository, too
    strategy = of_repo.delete_revisions(*(each.commit_hash for each in revisions))
    _check_inside(strategy)
    shown = tuple(each.commit_hash[:7] for each in revisions)
    num_bytes = _num_bytes(folder) if strategy.repos else int(strategy.expected_freed_size)
    return Removal(name.repo, shown, num_bytes, partial(_carry_out, name.repo, strategy.execute))


def _check_no_download(repo: str) -> None:
    """Raises BusyError while a process, which may be another program's, holds a lock of a file of the repository."""
    for path in (hub.cache_folder() / ".locks" / hub.repo_folder(repo).name).glob("*.lock"):
        try:
            with open(path, "rb", opener=_at_once) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{repo} is being downloaded", "wait until that is over, or end it") from None
        except OSError:  # it is gone; or not to be told here, and what may not be removed will be refused
            continue


def _at_once(path: str, flags: int) -> int:
    """A pipe by the name of a lock does not wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _num_bytes(folder: Path) -> int:
    """Of all files, also those of downloads that were broken off. What links lead to is counted where it lies."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _carry_out(repo: str, remove: Callable[[], object]) -> None:
    _check_no_download(repo)  # again: a person has been asked since
    try:
        remove()
    except OSError as error:
        raise AccessRefusedError(f"{hub.cache_folder()}: {error.strerror or error}", "check its permissions") from error


def _check_inside(strategy: Any) -> None:
    """Raises AccessRefusedError where a link of the cache leads out of it: what it leads to is not the cache's to delete."""
    root = hub.cache_folder().resolve()
    for path in (*strategy.blobs, *strategy.refs, *strategy.repos, *strategy.snapshots, *strategy.files):
        place = Path(path).parent.resolve() / Path(path).name
        if not place.is_relative_to(root):
            raise AccessRefusedError(f"{place} is outside of the cache, and is not removed", "take the link to it out by hand")


def _models(info: Any) -> list[Any]:
    """The repositories of models in what `_scan` gives: those with a revision."""
    return [] if info is None else [repo for repo in info.repos if repo.repo_type == "model" and repo.revisions]


def _scan() -> Any:
    """`huggingface_hub`'s view of the whole cache; None where there is no cache yet."""
    from huggingface_hub import errors, scan_cache_dir

    try:
        return scan_cache_dir(hub.cache_folder())
    except errors.CacheNotFound:
        return None
    except PermissionError as error:
        raise AccessRefusedError(f"{hub.cache_folder()}: permission denied", "check the permissions of the cache") from error
