"""`nanovllm __complete KIND`: what the shells' completions ask for when Tab is pressed, one word a line, a tab, what it is.

It stands before everything else in `app.main` and needs no parser, so that an answer takes a few hundredths of a second. It
never says what is wrong: somebody is in the middle of typing.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

Word = tuple[str, str]

_PLAIN = re.compile(r"[\w.+:/@][\w.+:/@=-]*")


def complete(arguments: list[str]) -> None:
    """Prints the words of the kind that is asked for; nothing for a kind that there is not."""
    words = dict.fromkeys(_KINDS[arguments[0]]()) if arguments and arguments[0] in _KINDS else {}
    with contextlib.suppress(OSError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        sys.stdout.write("".join(f"{word}\t{meaning}\n" for word, meaning in words if _is_plain(word, meaning)))
        sys.stdout.flush()


def models() -> Iterator[Word]:
    """One's own short names, ours, and the repositories that are in the cache."""
    from nanovllm_cli.weights.aliases import ALIASES, BUNDLED

    own = _own_aliases()
    yield from own.items()
    yield BUNDLED, "comes with the package"
    yield from ((name, repo) for name, repo in ALIASES.items() if name not in own)
    yield from cached_models()


def cached_models() -> Iterator[Word]:
    """What takes room on this machine."""
    from nanovllm_cli.weights.hub import cached_repos

    yield from ((repo, "in the cache") for repo in cached_repos())


def sessions() -> Iterator[Word]:
    """Saved conversations, the latest first."""
    from nanovllm_cli.folders import state_folder

    files = sorted((state_folder() / "sessions").glob("*.jsonl"), key=_modified, reverse=True)
    yield from ((file.stem, "conversation") for file in files)


_KINDS: dict[str, Callable[[], Iterator[Word]]] = {
    "models": models,
    "cached-models": cached_models,
    "sessions": sessions,
}


def _own_aliases() -> dict[str, str]:
    """[aliases] of the files as they are, be they right or wrong otherwise; the project's over the user's."""
    from nanovllm_cli.cli.settings import project_file, user_file
    from nanovllm_cli.cli.toml_text import parse

    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for path in (user_file(), project_file()):
            with contextlib.suppress(OSError, ValueError):
                tables = parse(path.read_text("utf-8")) if path is not None else {}
                aliases = tables.get("aliases")
                if isinstance(aliases, dict):
                    found |= {name: to for name, to in aliases.items() if isinstance(to, str)}
    return found


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _is_plain(word: str, meaning: str) -> bool:
    """Whether the shell may have it: files of others say what an alias is called, and it is put on the command line as it is."""
    return _PLAIN.fullmatch(word) is not None and meaning.isprintable()
