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

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm_cli.cli.habits import near_settings
from nanovllm_cli.cli.toml_text import TomlText
from nanovllm_cli.errors import UsageError

PROJECT_FILE = "nanovllm.toml"
MAX_BYTES = 1 << 20

Table = Mapping[str, Any]

_SHARED_TABLES = ("default", "models", "aliases")


@dataclass(frozen=True, slots=True)
class Origin:
    """A value and the place in a file where it stands. table: as the file has it, `models."qwen3:8b"`."""

    value: Any
    file: Path
    line: int
    table: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class SettingsFile:
    """One file. Raises UsageError where it cannot be read; what its tables hold is checked by `load_settings`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise UsageError(f"{path} is longer than {MAX_BYTES >> 20} MiB", "settings are a few lines")
            self.text = TomlText(data.decode("utf-8-sig").replace("\r\n", "\n"))
        except OSError as failure:
            raise UsageError(f"cannot read {path}: {failure.strerror}") from failure
        except UnicodeDecodeError as failure:
            where = failure.object.count(b"\n", 0, failure.start) + 1
            raise UsageError(f"{path}:{where}: not UTF-8", f"convert it: iconv -f ISO-8859-1 -t UTF-8 {path}") from failure
        except (ValueError, RecursionError) as failure:
            raise UsageError(f"{path} is not TOML: {failure}", "correct that line") from failure
        self.tables: Table = self.text.tables

    def table(self, path: tuple[str, ...]) -> Table:
        """A table, or an empty one."""
        inner: Any = self.tables
        for name in path:
            inner = inner.get(name, {})
        return inner if isinstance(inner, dict) else {}

    def keys(self, path: tuple[str, ...], names: Iterable[str]) -> list[str]:
        """Those of a table that are one of `names`, be it spelt with _, as the file has them. The last one counts."""
        known = set(names)
        return [key for key, value in self.table(path).items() if flag_name(key) in known and not isinstance(value, dict)]

    def origin(self, path: tuple[str, ...], key: str) -> Origin:
        """Of a value that is there."""
        return Origin(self.table(path)[key], self.path, self.text.line_of(*path, key) or 1, table_name(path))

    def place(self, *path: str) -> str:
        """file:line, for messages."""
        line = self.text.line_of(*path)
        return f"{self.path}:{line}" if line else str(self.path)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files say, most important first. flags: for each command, flag name -> parameter name."""

    files: tuple[SettingsFile, ...]
    flags: Mapping[str, Mapping[str, str]]

    def aliases(self) -> dict[str, Origin]:
        found: dict[str, Origin] = {}
        for file in reversed(self.files):
            found |= {name: file.origin(("aliases",), name) for name in file.table(("aliases",))}
        return found

    def resolve(self, model: str) -> str:
        """The model that an alias stands for; any other name as it is."""
        aliases = {name: origin.value for name, origin in self.aliases().items()}
        for _ in range(len(aliases)):
            model = aliases.get(model, model)
        if model in aliases and aliases[model] != model:
            raise UsageError(f"the alias {model!r} leads in a circle", "look at [aliases] in the settings files")
        return model

    def origins(self, command: str, model: str | None) -> dict[str, Origin]:
        """Parameter name -> its value for one command and the model it was called with, and where that stands."""
        names = self.flags.get(command, {})
        tables: list[tuple[str, ...]] = [("default",), *_table_of(command)]
        if model is not None:
            tables += [("models", self.resolve(model)), ("models", model)]
        return {
            names[flag_name(key)]: file.origin(table, key)
            for file in reversed(self.files)
            for table in tables
            for key, value in file.table(table).items()
            if flag_name(key) in names and not isinstance(value, dict)
        }


def load_settings(flags: Mapping[str, Mapping[str, str]]) -> Settings:
    """Both files, checked. Raises UsageError."""
    found = [path for path in (project_file(), user_file()) if path is not None and _is_there(path)]
    files = tuple(map(SettingsFile, found))
    for file in files:
        check(file, flags)
    return Settings(files, flags)


def project_file(start: Path | None = None) -> Path | None:
    """The nearest project file at or above `start`, else the current folder, and not beyond the repository that it is in."""
    start = start or working_folder()
    for folder in (start, *start.parents) if start is not None else ():
        if _is_there(folder / PROJECT_FILE):
            return folder / PROJECT_FILE
        if os.path.exists(folder / ".git"):
            return None
    return None


def working_folder() -> Path | None:
    """None where it was removed while a shell was in it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _is_there(path: Path) -> bool:
    """A folder counts, and is refused when it is read; devices do not, so that a link to /dev/null is no file. In a folder that
    this user may not look into (another's home under `sudo -u`) there is nothing; Path.is_file raises before Python 3.14."""
    return os.path.isfile(path) or os.path.isdir(path)


def user_file() -> Path | None:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "nanovllm" / "config.toml" if home.startswith("/") else None


def table_name(path: tuple[str, ...]) -> str:
    """`run`, `bench.serve`, `models."qwen3:8b"`."""
    return f'models."{path[1]}"' if path[0] == "models" and len(path) > 1 else ".".join(path)


def as_words(value: Any, param: Any) -> Any:
    """A TOML value as the parser of the option `param` would have had it from the command line. Raises ValueError for a list
    where that takes one value."""
    if getattr(param, "multiple", False) or param.nargs != 1:
        return [_word(each, "takes values, not lists of them") for each in (value if isinstance(value, list) else [value])]
    is_switch = getattr(param, "is_flag", False) or getattr(param, "count", False)
    return value if is_switch and isinstance(value, bool) else _word(value, "takes one value, not a list")


def _word(value: Any, otherwise: str) -> str:
    if isinstance(value, list | dict):
        raise ValueError(otherwise)
    return str(value).lower() if isinstance(value, bool) else str(value)


def check(file: SettingsFile, flags: Mapping[str, Mapping[str, str]]) -> None:
    """Raises UsageError for the first table, key or alias that has no meaning."""
    every_flag = {name for names in flags.values() for name in names}
    for section, table in file.tables.items():
        _known(file, (section,), {*_SHARED_TABLES, *(name.partition(".")[0] for name in flags)}, "table")
        if not isinstance(table, dict):
            raise UsageError(f"{file.place(section)}: [{section}] is not a table")
        if section == "aliases":
            _check_aliases(file, table)
        elif section == "models":
            for model, settings in table.items():
                _check_keys(file, ("models", model), settings, every_flag)
        elif section == "default":
            _check_keys(file, (section,), table, every_flag)
        else:
            _check_command(file, section, table, flags)


def _table_of(command: str) -> list[tuple[str, ...]]:
    """The table of a command; a table in a table for one inside a group. Those of `nanovllm models` have none."""
    first, _, rest = command.partition(".")
    return [] if first in _SHARED_TABLES else [(first, rest) if rest else (first,)]


def _check_command(file: SettingsFile, section: str, table: Table, flags: Mapping[str, Mapping[str, str]]) -> None:
    """A command's own settings, and the tables of the commands inside it."""
    own = set(flags.get(section, ()))
    inner = {name.partition(".")[2] for name in flags if name.startswith(f"{section}.")}
    tables = {name: value for name, value in table.items() if isinstance(value, dict) and flag_name(name) not in own}
    for name, settings in tables.items():
        _known(file, (section, name), inner, f"command of {section}")
        _check_keys(file, (section, name), settings, set(flags[f"{section}.{name}"]))
    _check_keys(file, (section,), {key: value for key, value in table.items() if key not in tables}, own)


def _check_aliases(file: SettingsFile, table: Table) -> None:
    for name, target in table.items():
        if not isinstance(target, str) or not target:
            raise UsageError(f"{file.place('aliases', name)}: [aliases] {name} is not the name of a model")


def _check_keys(file: SettingsFile, table: tuple[str, ...], settings: object, names: set[str]) -> None:
    section = table_name(table)
    if not isinstance(settings, dict):
        raise UsageError(f"{file.place(*table)}: [{section}] is not a table")
    for key, value in settings.items():
        _known(file, (*table, key), names, f"setting in [{section}]")
        if isinstance(value, dict):
            raise UsageError(f"{file.place(*table, key)}: {key} in [{section}] is a table, not a value")


def _known(file: SettingsFile, path: tuple[str, ...], known: Iterable[str], what: str) -> None:
    name = path[-1] if len(path) == 1 else flag_name(path[-1])
    if name not in (names := sorted(known)):
        near, hint = near_settings(name, names), None
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        elif what == "table":
            hint = f"settings stand below the [name] of a table: {', '.join(names)}"
        raise UsageError(f"{file.place(*path)}: {name!r} is no {what}", hint)


def flag_name(key: str) -> str:
    """What a file's key may be spelt for."""
    return key.replace("_", "-")
