"""From what a user calls a model to the files of it on this machine, downloaded first where that is needed.

Tried in this order: random:SHAPE, which needs no files; an existing path; a name on the hub (`hf:org/repo`, a huggingface.co
address, `org/repo`, each with `:quant`, `@revision` or a GGUF's path after it); an alias. Downloads go into the Hugging Face
cache and nowhere else. What the files hold is not looked at here: `checkpoint.py` opens them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import unquote

from nanovllm_cli.config import EngineConfig, Lora, LoraModule
from nanovllm_cli.errors import AccessRefusedError, ModelNotFoundError, NanovllmError, UsageError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.weights import hub
from nanovllm_cli.weights.aliases import ALIASES, BUNDLED
from nanovllm_cli.weights.files import (
    Choose,
    Weights,
    choose,
    choose_adapter,
    choose_mmproj,
    choose_seeing,
    mmproj_of,
    quant_of,
    some,
    split_parts,
    told_bytes,
)
from nanovllm_cli.weights.hub_http import HubUnreachableError, Listing
from nanovllm_cli.weights.near_names import near_files, near_names
from nanovllm_cli.weights.shapes import RANDOM, shape_config

DEFAULT_REVISION = "main"
_MAX_ALIAS_STEPS = 8
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")


@dataclass(frozen=True)
class ResolvedModel:
    """`path` is for `open_checkpoint`; `name` is what the user wrote. `repo` and `revision` (a commit) are None for
    paths and for the bundled model, `quant` for everything but GGUF files of the hub. `num_bytes`: of all its files. `mmproj`: a
    file that a GGUF model may see by."""

    path: Path
    name: str
    repo: str | None
    revision: str | None
    quant: str | None
    num_bytes: int
    format: Literal["hf", "gguf"]
    mmproj: Path | None = None

    def __str__(self) -> str:
        size = told_bytes(self.num_bytes)
        if self.repo is None:
            return f"{self.path} ({size})"
        quant = f", {self.quant}" if self.quant else ""
        return f"{self.repo}@{(self.revision or '')[:7]}{quant} ({size})"

    def told_as(self, name: str) -> str:
        """What `name` is, for people; a path is not said twice."""
        return str(self) if Path(name) == self.path else f"{name}: {self}"


@dataclass(frozen=True)
class RemoteModel:
    """A model on the hub that is not here, or not completely, or not its newest version: what `download` would fetch."""

    name: str
    repo: str
    revision: str
    listing: Listing
    weights: Weights

    @property
    def hub_name(self) -> HubName:
        """Exactly these files."""
        return HubName(self.repo, self.weights.quant, self.listing.commit, self.weights.entry)


class HubName(NamedTuple):
    """What a name on the hub says. `file` is a GGUF's path in the repository."""

    repo: str
    quant: str | None = None
    revision: str | None = None
    file: str | None = None


Meant = TypeVar("Meant", Path | HubName, Path | HubName | None)


def resolve(
    name: str,
    *,
    offline: bool = False,
    revision: str | None = None,
    quant: str | None = None,
    aliases: Mapping[str, str] | None = None,
    progress: LoadProgress | None = None,
    pick: Choose = choose,
) -> ResolvedModel:
    """The model that `name` means, on this machine. pick: which files of a repository it is made of.

    `revision` and `quant` count where the name has none of its own; `aliases` are the user's, and come before ours.
    `progress` hears of the download, and of choices made (`note`). HF_HUB_OFFLINE means `offline`.

    Raises ModelNotFoundError (with the nearest names), AccessRefusedError, DownloadError, DoesNotFitError (disk),
    UnsupportedError (nothing readable in it), UsageError (no such quantization or file, a name with two meanings).
    """
    progress = progress or NullProgress()
    found = locate(name, offline=offline, revision=revision, quant=quant, aliases=aliases, progress=progress, pick=pick)
    return found if isinstance(found, ResolvedModel) else download(found, progress)


def find_adapters(lora: Iterable[Lora], *, offline: bool = False, progress: LoadProgress | None = None) -> tuple[Lora, ...]:
    """The same, by their paths on this machine; a name on the hub is downloaded. Raises what `resolve` raises."""
    return tuple(Lora(str(_part("adapter", each.name, offline, progress, choose_adapter)), each.scale) for each in lora)


def find_parts(config: EngineConfig, *, offline: bool = False, progress: LoadProgress | None = None) -> EngineConfig:
    """The same, with adapters, draft model and what images are read by, by their paths on this machine. Raises what `resolve`
    raises."""
    modules = find_adapters([Lora(module.path) for module in config.lora_modules], offline=offline, progress=progress)
    config = replace(
        config,
        lora=find_adapters(config.lora, offline=offline, progress=progress),
        lora_modules=tuple(LoraModule(own.name, path) for own, (path, _) in zip(config.lora_modules, modules, strict=True)),
    )
    if config.mmproj is not None:
        config = replace(config, mmproj=str(_mmproj(config.mmproj, offline, progress)))
    if config.draft_model is None:
        return config
    return replace(config, draft_model=str(_part("draft model", config.draft_model, offline, progress, choose)))


def files_for(config: EngineConfig) -> Choose:
    """What chooses a model's files for an engine of these settings."""
    return choose_seeing if config.mmproj is None and config.mmproj_auto else choose


def _mmproj(name: str, offline: bool, progress: LoadProgress | None) -> Path:
    path = _part("mmproj", name, offline, progress, choose_mmproj)
    if not path.is_dir():
        return path
    return path / choose_mmproj([file.name for file in path.iterdir()], str(path)).files[0]


def _part(what: str, name: str, offline: bool, progress: LoadProgress | None, pick: Choose) -> Path:
    """Where it is on this machine; its name alone may look like a model's, so an error says what was looked for."""
    try:
        return resolve(name, offline=offline, progress=progress, pick=pick).path
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"no {what} {name}: {error.message}", error.hint) from error


def locate(
    name: str,
    *,
    offline: bool = False,
    revision: str | None = None,
    quant: str | None = None,
    aliases: Mapping[str, str] | None = None,
    progress: LoadProgress | None = None,
    pick: Choose = choose,
) -> ResolvedModel | RemoteModel:
    """What `name` means, as for `resolve`, before anything is downloaded. A branch on the hub is always asked for, if the hub
    can be reached: a copy that is here may be old. Raises what `resolve` raises, except for what a download needs."""
    progress = progress or NullProgress()
    meant = None if name.startswith(RANDOM) else meaning(name, aliases)
    meant = with_revision(meant, revision, name, progress)
    if meant is None:
        return _made_up(name)
    if isinstance(meant, Path):
        return _local(meant, name, quant)
    meant = meant._replace(quant=meant.quant or quant)
    try:
        return _from_hub(meant, name, offline or hub.offline_by_environment(), progress, pick)
    except (ModelNotFoundError, AccessRefusedError, HubUnreachableError) as error:
        if there := near_files(name):  # a path that was misspelt looks like a repository
            error.hint = " ".join(filter(None, (there, error.hint)))
        elif isinstance(error, ModelNotFoundError):
            error.hint = error.hint or near_names(meant.repo, _every_name(_known(aliases)))
        raise


def meaning(name: str, aliases: Mapping[str, str] | None = None) -> Path | HubName:
    """What `name` says, without looking further than for a path: a file or folder here, or a name on the hub.

    Raises ModelNotFoundError (with the nearest names), UsageError for aliases that lead in a circle.
    """
    if (path := _existing_path(name)) is not None:
        return path
    known = _known(aliases)
    target = name
    for _ in range(_MAX_ALIAS_STEPS):
        if target.lower() == BUNDLED and BUNDLED not in (aliases or {}):
            return _bundled()
        alias, at, alias_revision = target.partition("@")
        if alias.lower() not in known:
            break
        target = known[alias.lower()]
        if at:
            target = target.partition("@")[0] + at + alias_revision
        if (path := _existing_path(target)) is not None:
            return path
    else:
        raise UsageError(f"the alias {name!r} leads in a circle", "look at [aliases] in the configuration")
    parsed = parse_hub_name(target)
    if parsed is None:
        raise _not_found(name, known)
    return parsed


def with_revision(meant: Meant, revision: str | None, name: str, progress: LoadProgress) -> Meant:
    """`meant`, which `name` says, with `revision` where it has none of its own; `progress` hears where it counts for nothing."""
    if revision is None:
        return meant
    if not isinstance(meant, HubName):
        progress.note(f"revision {revision} is not looked at: {name} does not come from the hub")
        return meant
    if meant.revision not in (None, revision):
        progress.note(f"revision {revision} is not looked at: {name} has one of its own")
    return meant._replace(revision=meant.revision or revision)


def _known(aliases: Mapping[str, str] | None) -> dict[str, str]:
    """All aliases, the user's before ours."""
    return {**ALIASES, **{alias.lower(): target for alias, target in (aliases or {}).items()}}


def _every_name(known: Mapping[str, str]) -> list[str]:
    return [BUNDLED, *known, *hub.cached_repos(), *known.values()]


def parse_hub_name(name: str) -> HubName | None:
    """`[hf:]org/repo[:quant][@revision]`, `org/repo/path/file.gguf`, or an address; None for other text.

    A repository without an organization needs `hf:`, as a bare word is an alias.
    """
    rest, prefixed, revision = name, False, None
    for prefix in ("hf://", "hf:", "https://", "http://"):
        if rest.lower().startswith(prefix):
            rest, prefixed = rest[len(prefix) :], prefix.startswith("hf")
            break
    host, slash, path = rest.partition("/")
    endpoint = os.environ.get("HF_ENDPOINT", "").partition("://")[2].partition("/")[0]
    if slash and host and host.lower() in (*_HOSTS, endpoint):
        path = path.partition("?")[0].partition("#")[0]
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve"):
            revision, parts = parts[3], [*parts[:2], *parts[4:]]
        rest, prefixed = "/".join(parts), True
    elif "://" in name and not prefixed:
        return None
    rest, _, after_at = rest.partition("@")
    rest, _, quant = rest.partition(":")
    parts = rest.split("/")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    if (
        not _REPO.fullmatch(repo)
        or len(repo) > 96
        or "--" in repo
        or ".." in repo
        or (len(parts) == 1 and not prefixed)
    ):
        return None
    if not all(parts) or (_looks_like_path(name) and not file):
        return None
    return HubName(repo, quant or None, after_at or revision, file or None)


def download(remote: RemoteModel, progress: LoadProgress) -> ResolvedModel:
    """Fetches what the cache lacks of it. Raises what `hub.fetch` raises."""
    repo, weights, listing = remote.repo, remote.weights, remote.listing
    if weights.index_file:
        weights = weights.with_shards(hub.fetch(repo, listing, [weights.index_file], NullProgress()))
    snapshot = hub.fetch(repo, listing, weights.files, progress)
    hub.remember_revision(repo, remote.revision, listing.commit)
    return _resolved(snapshot, listing.commit, weights, repo, remote.name)


def cached_copy(wanted: HubName, name: str) -> ResolvedModel | None:
    """The model as the cache has it, if it has all of it; nobody is asked whether it is the newest."""
    return _from_cache(wanted, wanted.revision or DEFAULT_REVISION, name, choose)


def _from_hub(
    wanted: HubName, name: str, offline: bool, progress: LoadProgress, pick: Choose
) -> ResolvedModel | RemoteModel:
    revision = wanted.revision or DEFAULT_REVISION
    here = _from_cache(wanted, revision, name, pick)
    is_fixed = here is not None and hub.is_commit(here.revision or "", revision)  # a commit never changes: nothing to ask
    if here is not None and (offline or is_fixed):
        return here
    if offline:
        raise ModelNotFoundError(
            f"{wanted.repo} is not in the cache ({hub.cache_folder()}), at least not completely, and this is offline",
            "run once without --offline and HF_HUB_OFFLINE; cached are: " + (some(hub.cached_repos(), 8) or "none"),
        )
    try:
        listing = hub.list_repo(wanted.repo, revision, attempts=1 if here else hub.FIRST_ATTEMPTS)
    except HubUnreachableError as error:
        if here is None:
            raise
        progress.note(f"{error.message}; using the copy in the cache, {(here.revision or '')[:7]}")
        return here
    except AccessRefusedError as error:
        if here is not None:
            error.hint = f"{error.hint}; --offline uses the copy in the cache"
        raise
    weights = pick(listing.sizes, wanted.repo, quant=wanted.quant, file=wanted.file)
    if weights.note:
        progress.note(weights.note)
    return RemoteModel(name, wanted.repo, revision, listing, weights)


def _from_cache(wanted: HubName, revision: str, name: str, pick: Choose) -> ResolvedModel | None:
    """The model as the cache has it, if it has all of it."""
    cached = hub.cached_snapshot(wanted.repo, revision)
    if cached is None:
        return None
    commit, snapshot = cached
    names = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    try:
        weights = pick(names, wanted.repo, quant=wanted.quant, file=wanted.file).with_shards(snapshot)
    except NanovllmError:
        return None
    if not all((snapshot / file).is_file() for file in weights.files):
        return None
    return _resolved(snapshot, commit, weights, wanted.repo, name)


def _resolved(snapshot: Path, commit: str, weights: Weights, repo: str, name: str) -> ResolvedModel:
    path = snapshot / weights.entry if weights.entry else snapshot
    num_bytes = sum((snapshot / file).stat().st_size for file in weights.files)
    mmproj = snapshot / weights.mmproj if weights.mmproj else None
    return ResolvedModel(path, name, repo, commit, weights.quant, num_bytes, "gguf" if weights.entry else "hf", mmproj)


def _existing_path(name: str) -> Path | None:
    if not name or "\0" in name:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except PermissionError as error:
        if not _looks_like_path(name) and not os.access(".", os.X_OK):
            return None  # in a folder that is closed to this user no name is a path
        raise AccessRefusedError(f"{name}: permission denied", "check the permissions of the folder") from error
    except (OSError, RuntimeError):  # too long for a path, a home folder that is not known
        return None


def _local(path: Path, name: str, quant: str | None) -> ResolvedModel:
    """A path as it is; of a folder with several GGUF models the one of that quantization."""
    try:
        if path.is_dir():
            files = [file for file in path.iterdir() if file.is_file()]
            if quant is not None:
                weights = choose([file.name for file in files], str(path), quant=quant)
                assert weights.entry is not None
                return _local(path / weights.entry, name, None)
            kinds = {file.suffix for file in files}
            format_: Literal["hf", "gguf"] = "gguf" if ".gguf" in kinds and ".safetensors" not in kinds else "hf"
        else:
            if quant is not None and quant_of(path.name).casefold() != quant.casefold():
                raise UsageError(f"{path} is {quant_of(path.name)}, not {quant}", "name one of the two")
            files = [path.with_name(part) for part in split_parts(path.name)]
            format_ = "hf" if path.suffix == ".safetensors" else "gguf"
        num_bytes = sum(file.stat().st_size for file in files if file.is_file())
        mmproj = mmproj_of(path) if format_ == "gguf" else None
    except PermissionError as error:
        raise AccessRefusedError(f"{path}: permission denied", "check its permissions") from error
    return ResolvedModel(path, name, None, None, None, num_bytes, format_, mmproj)


def _made_up(name: str) -> ResolvedModel:
    """Weights that no file holds: their size follows from the shape."""
    from nanovllm_cli.weights.convert_names import tensor_shapes
    from nanovllm_cli.weights.random_weights import BF16_BYTES

    config = shape_config(name.removeprefix(RANDOM))
    family = hf_family(config)
    shapes = tensor_shapes(spec_from_hf(config, family), family.names("hf")).values()
    return ResolvedModel(Path(name), name, None, None, None, BF16_BYTES * sum(map(math.prod, shapes)), "hf")


def _bundled() -> Path:
    path = Path(str(resources.files("nanovllm_cli").joinpath("assets", BUNDLED)))
    if not path.is_dir():
        raise ModelNotFoundError("the bundled model is not part of this installation", "install nanovllm-cli again")
    return path


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.endswith((".gguf", ".safetensors"))


def _not_found(name: str, known: Mapping[str, str]) -> ModelNotFoundError:
    shown = name if name.isprintable() else repr(name)
    shown = shown if len(shown) <= 200 else shown[:200] + "…"
    if "\0" not in name and os.path.islink(os.path.expanduser(name)):
        return ModelNotFoundError(f"{shown} is a link to a file that is not there", "put the file there, or link to another")
    if name.startswith("file://"):
        return ModelNotFoundError(f"{shown} is no model's address", f"a path is given as it is: {name.removeprefix('file://')}")
    if "://" in name:
        return ModelNotFoundError(
            f"{shown} is no model's address", "addresses of https://huggingface.co are; download others first"
        )
    hint = near_files(name) or near_names(name, _every_name(known))
    if _looks_like_path(name) or "/" in name:
        return ModelNotFoundError(f"{shown}: no such file or folder", hint)
    return ModelNotFoundError(
        f"no model is called {shown}", hint or "a name is a path, org/repo on the hub, or an alias such as qwen3:0.6b"
    )
