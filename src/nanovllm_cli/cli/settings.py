"""Settings files: `nanovllm.toml` of the project (this folder or the nearest above), then the user's own `config.toml`.

    [default]               for every command that has such an option
    temp = 0.7
    [run]                   for one command
    ctx-size = "32K"
    [bench.serve]           for a command inside a group; [bench] is for `nanovllm bench` itself
    num-prompts = 100
    [models."qwen3:8b"]     for one model
    top-k = 20
    [aliases]
    mine = "someone/something-GGUF:Q4_K_M"

Within a file the model's table wins over the command's, that over [default]; the project's file wins over the user's
as a whole. The commands of `nanovllm models` have no tables of their own. Names are those of the flags. A name that no option
has is an error, and so is a file that cannot be read: a setting that has no effect is worse than none.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm_cli.errors import UsageError

PROJECT_FILE = "nanovllm.toml"

Table = Mapping[str, Any]

_SHARED_TABLES = ("default", "models", "aliases")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files say, most important first. flags: for each command, flag name -> parameter name."""

    files: tuple[Table, ...]
    flags: Mapping[str, Mapping[str, str]]

    def resolve(self, model: str) -> str:
        """The model that an alias stands for; any other name as it is."""
        aliases: dict[str, str] = {}
        for file in reversed(self.files):
            aliases |= file.get("aliases", {})
        for _ in range(len(aliases)):
            model = aliases.get(model, model)
        if model in aliases and aliases[model] != model:
            raise UsageError(f"the alias {model!r} leads in a circle", "look at [aliases] in the settings files")
        return model

    def defaults_for(self, command: str, model: str | None) -> dict[str, Any]:
        """Parameter name -> value, for one command and the model it was called with."""
        names = self.flags.get(command, {})
        defaults: dict[str, Any] = {}
        for file in reversed(self.files):
            models = file.get("models", {})
            resolved = self.resolve(model) if model is not None else None
            for table in (file.get("default"), _table_of(file, command), models.get(resolved), models.get(model)):
                for key, value in (table or {}).items():
                    if _flag(key) in names and not isinstance(value, dict):
                        defaults[names[_flag(key)]] = _as_words(value)
        return defaults


def load_settings(flags: Mapping[str, Mapping[str, str]]) -> Settings:
    """Both files, checked. Raises UsageError."""
    found = [path for path in (project_file(Path.cwd()), user_file()) if path is not None and path.is_file()]
    return Settings(tuple(_read(path, flags) for path in found), flags)


def project_file(start: Path) -> Path | None:
    """The nearest project file at or above `start`, not beyond the repository that `start` is in."""
    for folder in (start, *start.parents):
        if (folder / PROJECT_FILE).is_file():
            return folder / PROJECT_FILE
        if (folder / ".git").exists():
            return None
    return None


def user_file() -> Path | None:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "nanovllm" / "config.toml" if home.startswith("/") else None


def _read(path: Path, flags: Mapping[str, Mapping[str, str]]) -> Table:
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as failure:
        raise UsageError(f"cannot read {path}: {failure.strerror}") from failure
    except ValueError as failure:
        raise UsageError(f"{path} is not TOML: {failure}") from failure
    every_flag = {name for names in flags.values() for name in names}
    for section, table in tables.items():
        _known(path, section, {*_SHARED_TABLES, *(name.partition(".")[0] for name in flags)}, "table")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: [{section}] is not a table")
        if section == "aliases":
            _check_aliases(path, table)
        elif section == "models":
            for model, settings in table.items():
                _check_keys(path, f'models."{model}"', settings, every_flag)
        elif section == "default":
            _check_keys(path, section, table, every_flag)
        else:
            _check_command(path, section, table, flags)
    return tables


def _table_of(file: Table, command: str) -> Table | None:
    """The table of a command; a table in a table for one inside a group."""
    first, _, rest = command.partition(".")
    table = None if first in _SHARED_TABLES else file.get(first)
    return table.get(rest) if table is not None and rest else table


def _check_command(path: Path, section: str, table: Table, flags: Mapping[str, Mapping[str, str]]) -> None:
    """A command's own settings, and the tables of the commands inside it."""
    own = set(flags.get(section, ()))
    inner = {name.partition(".")[2] for name in flags if name.startswith(f"{section}.")}
    tables = {name: value for name, value in table.items() if isinstance(value, dict) and _flag(name) not in own}
    for name, settings in tables.items():
        _known(path, name, inner, f"command of {section}")
        _check_keys(path, f"{section}.{name}", settings, set(flags[f"{section}.{name}"]))
    _check_keys(path, section, {key: value for key, value in table.items() if key not in tables}, own)


def _check_aliases(path: Path, table: Table) -> None:
    for name, target in table.items():
        if not isinstance(target, str) or not target:
            raise UsageError(f"{path}: [aliases] {name} is not the name of a model")


def _check_keys(path: Path, section: str, table: object, names: set[str]) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [{section}] is not a table")
    for key, value in table.items():
        _known(path, _flag(key), names, f"setting in [{section}]")
        if isinstance(value, dict):
            raise UsageError(f"{path}: {key} in [{section}] is a table, not a value")


def _known(path: Path, name: str, known: Iterable[str], what: str) -> None:
    known = sorted(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise UsageError(f"{path}: {name!r} is no {what}", f"did you mean {' or '.join(near)}?" if near else None)


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _as_words(value: Any) -> Any:
    """A TOML value as the flag's parser would have had it from the command line."""
    if isinstance(value, list):
        return [_as_words(item) for item in value]
    return value if isinstance(value, bool) else str(value)
