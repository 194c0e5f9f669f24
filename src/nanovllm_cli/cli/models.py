"""`nanovllm models`: what is in the Hugging Face cache, what comes into it and what goes. `hub_cache.py` does the work."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from nanovllm_cli.cli import signals
from nanovllm_cli.cli.command import OUTPUT, Command, expand, group, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import named_model
from nanovllm_cli.cli.models_show import count, show
from nanovllm_cli.cli.options import MessageOptions, SourceOptions
from nanovllm_cli.cli.output import Console, one_line
from nanovllm_cli.cli.progress_line import ProgressLine, size
from nanovllm_cli.cli.settings import Settings
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.errors import NanovllmError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.weights.hub_cache import CachedModel, Removal
    from nanovllm_cli.weights.source import HubName

EXAMPLE = "for example: nanovllm models {} qwen3:0.6b"
CONTEXT = 4096
_HEADINGS = ("name", "short", "weights", "parameters", "size", "needs", "used", "")
ModelWord = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="org/repo[:quant][@revision], or a short name.")
]


def build() -> typer.Typer:
    app = group("See, download and remove models.", name="models")
    app.command("list", cls=Command)(list_models)
    app.command("show", cls=Command)(show)
    app.command("pull", cls=Command)(pull)
    app.command("rm", cls=Command)(remove)
    return app


@dataclass(frozen=True, slots=True)
class ListOptions:
    """What is listed, and how."""

    short_names: bool = option(
        "--short-names", help="All short names and what they stand for, here or not.",
        default=False, panel=OUTPUT, envvar=None,
    )
    json: bool = option("--json", help="One JSON object.", default=False, panel=OUTPUT)


class _Row(NamedTuple):
    """A model of the list. needs: bytes of memory with a context of CONTEXT tokens, or its own if that is less."""

    model: CachedModel
    short: str | None
    stored: str | None
    parameters: int | None
    needs: int | None
    problem: str | None

    def cells(self, now: float) -> tuple[str, ...]:
        model = self.model
        return (
            model.name, self.short or "-", self.stored or model.quant or "-",
            "-" if self.parameters is None else count(self.parameters), size(model.num_bytes),
            "-" if self.needs is None else size(self.needs),
            "-" if not model.last_used else ago(now - model.last_used),
            f"can't run: {one_line(self.problem)}" if self.problem else "",
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        model = self.model
        return {
            "name": model.name, "short_name": self.short, "repo": model.repo, "revision": model.revision,
            "refs": list(model.refs), "quant": model.quant, "path": None if model.path is None else str(model.path),
            "files": model.num_files, "bytes": model.num_bytes, "last_used": model.last_used, "stored": self.stored,
            "parameters": self.parameters, "needs_bytes": self.needs, "loadable": self.problem is None,
            "problem": self.problem,
        }  # fmt: skip


@expand
def list_models(*, ctx: typer.Context, options: ListOptions, messages: MessageOptions) -> None:
    """List the models that are on this machine: in the Hugging Face cache, and the one that comes with the package.

    For each: what its weights are stored as, the size of its files, the memory that it needs with a context of 4,096 tokens, when
    it was last used; and why, where it can't be run here.
    """
    screen = screen_for(messages)
    short = _short_names(ctx.obj)
    if options.short_names:
        _print_short_names(short, screen, as_json=options.json)
        return
    screen.announce("looking into the cache")
    with signals.insisting():
        from nanovllm_cli.weights import hub_cache
    by_repo = {repo: name for name, repo in reversed(short.items())}
    rows = []
    for model in [_bundled(), *hub_cache.cached_models()]:
        signals.check()
        screen.status(f"looking at {model.name}")
        rows.append(_looked_at(model, by_repo.get(model.repo)))
    screen.status("")
    if options.json:
        screen.record({"models": [row.record() for row in rows], "context": CONTEXT})
        return
    now = time.time()
    width = screen.out.width() if screen.out.is_terminal else None
    screen.lines(aligned([_HEADINGS, *(row.cells(now) for row in rows)], left=(0, 1, 2, 7), width=width))
    total = sum(row.model.num_bytes for row in rows[1:])
    screen.say(f"{len(rows) - 1} models in the cache, {size(total)}; nanovllm models list --short-names lists others", "dim")


def _looked_at(model: CachedModel, short: str | None) -> _Row:
    """With what its headers say. A model that can't be opened says why."""
    if model.path is None:
        return _Row(model, short, None, None, None, model.problem)
    from nanovllm_cli.planning.plan import needed_bytes
    from nanovllm_cli.weights.checkpoint import open_checkpoint

    try:
        with open_checkpoint(model.path) as checkpoint:
            facts, needs = needed_bytes(checkpoint, CONTEXT)
    except NanovllmError as error:
        return _Row(model, short, None, None, None, error.message)
    return _Row(model, short, facts.stored, facts.num_parameters, needs, None)


def _bundled() -> CachedModel:
    from nanovllm_cli.weights.aliases import BUNDLED
    from nanovllm_cli.weights.hub_cache import CachedModel
    from nanovllm_cli.weights.source import resolve

    found = resolve(BUNDLED)
    return CachedModel(BUNDLED, "bundled", ("main",), None, found.path, 0, found.num_bytes, 0.0, None)


def _short_names(settings: object) -> dict[str, str]:
    """The user's before ours."""
    from nanovllm_cli.weights.aliases import ALIASES

    own = {name: origin.value for name, origin in settings.aliases().items()} if isinstance(settings, Settings) else {}
    return {**own, **{name: repo for name, repo in ALIASES.items() if name not in own}}


def _print_short_names(short: dict[str, str], screen: Console, *, as_json: bool) -> None:
    from nanovllm_cli.weights.hub import cached_repos

    here = set(cached_repos())
    if as_json:
        screen.record({"short_names": short, "cached": sorted(here & set(short.values()))})
        return
    rows = [("short", "stands for", ""), *((name, repo, "here" if repo in here else "") for name, repo in short.items())]
    screen.lines(aligned(rows, left=(0, 1, 2)))


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What is printed."""

    json: bool = option("--json", help="What was fetched as one JSON object.", default=False, panel=OUTPUT)


@expand
def pull(
    *, ctx: typer.Context, model_word: ModelWord = None, source: SourceOptions, options: PullOptions, messages: MessageOptions
) -> None:
    """Download a model into the Hugging Face cache, or what is missing of it, with what a GGUF model sees by. Interrupted
    downloads go on where they stopped.

    The path to its files goes to stdout.
    """
    screen = screen_for(messages)
    name = named_model(ctx.obj, model_word or source.model, EXAMPLE.format("pull"))
    screen.announce(f"looking for {name}")
    with signals.insisting():
        from nanovllm_cli.weights.files import choose_seeing
        from nanovllm_cli.weights.source import resolve
    pick, progress = choose_seeing, ProgressLine(screen)
    found = resolve(name, offline=source.offline, revision=source.revision, progress=progress, pick=pick)
    screen.say(found.told_as(name), "dim")
    if options.json:
        record = {
            "name": name, "repo": found.repo, "revision": found.revision, "quant": found.quant, "path": str(found.path),
            "bytes": found.num_bytes, "format": found.format,
        }  # fmt: skip
        screen.record(record)
    else:
        screen.answer(f"{found.path}\n")


@dataclass(frozen=True, slots=True)
class RemoveOptions:
    """Whether to ask."""

    yes: bool = option("-y", "--yes", help="Don't ask.", default=False, panel=OUTPUT, envvar=None)


@expand
def remove(*, ctx: typer.Context, model_word: ModelWord = None, options: RemoveOptions, messages: MessageOptions) -> None:
    """Remove a model from the Hugging Face cache: all of it, or the revision behind an @.

    It says what would go and how much that frees, and asks; in a script -y has to say yes. Files that another revision uses stay.
    Nothing outside of the cache is ever removed.
    """
    screen = screen_for(messages)
    meant = hub_name(named_model(ctx.obj, model_word, EXAMPLE.format("rm")))
    from nanovllm_cli.weights import hub_cache

    found = hub_cache.removal(meant)
    number = len(found.revisions)
    revisions = f"{number} revision{'' if number == 1 else 's'} ({', '.join(found.revisions)})" if number else "no whole revision"
    screen.say(f"{found.repo}: {revisions}, {size(found.num_bytes)}")
    if not options.yes and not _agreed(found, screen):
        screen.say("nothing was removed")
        raise typer.Exit(1)
    found.carry_out()
    screen.say(f"removed; {size(found.num_bytes)} are free again")


def _agreed(found: Removal, screen: Console) -> bool:
    if sys.stdin is None or not sys.stdin.isatty() or not screen.err.is_terminal:
        raise UsageError("nobody is here to be asked", "-y removes without asking")
    screen.ask(f"remove {found.repo} from the cache? [y/N] ")
    reply = sys.stdin.readline()
    if not reply:
        screen.left_open()
    return reply.strip().lower() in ("y", "yes")


def hub_name(name: str) -> HubName:
    """A name that can be looked up in the cache. Raises UsageError for paths: they are not the cache's."""
    from nanovllm_cli.weights.aliases import BUNDLED
    from nanovllm_cli.weights.source import meaning

    meant = meaning(name)
    if name == BUNDLED:
        raise UsageError(f"{name} comes with the package, and stays", "nanovllm models list shows what came from the hub")
    if isinstance(meant, Path):
        raise UsageError(f"{name} is not in the cache but at {meant}", "name org/repo, or a short name")
    return meant


def ago(seconds: float) -> str:
    """How long that is, roughly."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (unit != "days" and seconds >= length):
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
