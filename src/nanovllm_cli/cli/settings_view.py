"""What is set, looked at as a whole: each value with its place and the commands that get it; what a key of `config get` means.

Values come from the environment and from `settings.py`; nothing is changed or printed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli.cli.command_tree import Page, Parameter
from nanovllm_cli.cli.habits import near_settings, nearest
from nanovllm_cli.cli.settings import Origin, Settings, SettingsFile, flag_name, user_file, working_folder
from nanovllm_cli.cli.toml_text import literal
from nanovllm_cli.errors import UsageError
from nanovllm_cli.folders import in_home

_LISTS = ("list", "ls", "show")  # what others call it


class Row(NamedTuple):
    """A value, what says so (an environment variable, a place in a file, or None for the default), and for which commands."""

    key: str
    value: Any
    origin: Origin | str | None
    commands: list[str]
    model: str | None = None


class Target(NamedTuple):
    """A key in a table, and the option that it sets (None for an alias), as a command has it. names: keys that set the same
    option of every command that the table is for."""

    table: tuple[str, ...]
    key: str
    command: Page | None
    parameter: Parameter | None
    names: tuple[str, ...] = ()


def rows(root: Page, settings: Settings, only: str, model: str | None, with_defaults: bool) -> Iterator[Row]:
    """What is set, each value once, with all commands that get it from the same place; then models' own and aliases.

    only: one command's name, or "" for all. model: the one whose settings count; None lists those of all models.
    """
    commands = [each for each in root.every() if each.settings]
    if only:
        commands = [_named(commands, only)]
    found: dict[tuple[str, str], Row] = {}
    for command in commands:
        origins = settings.origins(command.name, model)
        for each in command.settings:
            assert each.key is not None
            origin = _variable(each) or origins.get(each.name)
            if origin is not None or with_defaults:
                value = _default(each) if origin is None else value_at(origin, each)
                row = found.setdefault((each.key, str(origin or value)), Row(each.key, value, origin, []))
                row.commands.append(command.name)
    yield from found.values()
    if model is None:
        for file in settings.files:
            for name in file.table(("models",)):
                yield from _models_rows(commands, file, name)
    if not only:
        yield from (Row(name, origin.value, origin, []) for name, origin in settings.aliases().items())


def _models_rows(commands: list[Page], file: SettingsFile, model: str) -> Iterator[Row]:
    """What a file says of one model."""
    found: dict[tuple[str, str], Row] = {}
    for command in commands:
        for each in command.settings:
            if keys := file.keys(("models", model), each.setting_names):
                origin = file.origin(("models", model), keys[-1])
                row = found.setdefault((str(each.key), str(origin)), Row(str(each.key), origin.value, origin, [], model))
                row.commands.append(command.name)
    yield from found.values()


def value_of(settings: Settings, target: Target) -> Origin | str | None:
    """Where the value of a key comes from: the name of a variable, or a place in a file."""
    if target.parameter is None or target.command is None:
        return settings.aliases().get(target.key)
    variable = _variable(target.parameter)
    if variable:
        return variable
    if target.table == ("default",):
        found = ((file, file.keys(target.table, target.parameter.setting_names)) for file in settings.files)
        return next((file.origin(target.table, keys[-1]) for file, keys in found if keys), None)
    model = target.table[1] if target.table[0] == "models" else None
    return settings.origins(target.command.name, model).get(target.parameter.name)


def keys_of(file: SettingsFile, target: Target) -> list[str]:
    """All keys of a file's table that say what `target` says: another name of the option, or the same with _."""
    if target.parameter is None:
        return [target.key] if target.key in file.table(target.table) else []
    return file.keys(target.table, target.names)


def value_at(origin: Origin | str, option: Parameter | None) -> Any:
    """What a place in a file or a variable says; of an option that can be repeated, the variable's words are its values."""
    if isinstance(origin, Origin):
        return origin.value
    text = os.environ[origin]
    return text.split() if option is not None and option.repeats else text


def target_of(root: Page, word: str) -> Target:
    """What KEY means. Raises UsageError with the nearest that means something."""
    table, _, key = word.rpartition(".")
    if word.startswith("aliases."):
        name = _unquoted(word.partition(".")[2])
        if not name:
            raise UsageError("an alias has no name", 'for example: nanovllm config set aliases.mine "org/repo"')
        return Target(("aliases",), name, None, None)
    commands = [each for each in root.every() if each.settings]
    if table.startswith("models.") and len(table) > len("models."):
        path: tuple[str, ...] = ("models", _unquoted(table.partition(".")[2]))
    elif table in ("", "default"):
        path = ("default",)
    else:
        commands = [_named(commands, table)]
        path = tuple(table.split(".", 1))
    key = flag_name(key)
    for command in commands:
        if (option := command.setting(key)) is not None:
            knowing = [each for each in commands if each.setting(key)]
            same = (name for name in option.setting_names if [each for each in commands if each.setting(name)] == knowing)
            return Target(path, key, command, option, tuple(same))
    refused = next((each for command in root.every() for each in command.options if f"--{key}" in each.flags), None)
    if refused is not None and not table:
        variable = f", or as {refused.variables[0]} in the environment" if refused.variables else ""
        raise UsageError(f"--{key} can't be set in a file", f"give it on the command line{variable}")
    known = sorted({name for command in commands for each in command.settings for name in each.setting_names})
    near = near_settings(key, known)
    raise UsageError(
        f"{key!r} is no setting of {table or 'any command'}",
        f"did you mean {' or '.join(near)}?" if near else "nanovllm config --all lists them",
    )


def _unquoted(name: str) -> str:
    """A model's name, which files have in quotes: models."qwen3:8b"."""
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] and name[0] in "\"'" else name


def _named(commands: list[Page], name: str) -> Page:
    for each in commands:
        if each.name == name:
            return each
    names = [each.name for each in commands]
    near = nearest(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"those that have: {', '.join(names)}"
    if name in _LISTS:
        hint = "nanovllm config alone shows everything that is set"
    raise UsageError(f"there is no command {name!r} that has settings", hint)


def record(row: Row) -> dict[str, Any]:
    made = {"key": row.key, "value": row.value, "from": "default", "commands": row.commands, "model": row.model}
    if isinstance(row.origin, str):
        return made | {"from": "environment", "variable": row.origin}
    if row.origin is not None:
        kind = "user" if row.origin.file == user_file() else "project"
        return made | {"from": kind, "file": str(row.origin.file), "line": row.origin.line, "table": row.origin.table}
    return made | {"value": None, "default": row.value}


def place(origin: Origin | str | None) -> str:
    if isinstance(origin, Origin):
        return f"{short(origin.file)}:{origin.line} [{origin.table}]"
    return origin or "default"


def short(file: Path) -> str:
    """With ~ for the home folder, and as seen from here."""
    for start, before in ((working_folder(), ""), (in_home("~"), "~/")):
        if start is not None and file.is_relative_to(start):
            return before + str(file.relative_to(start))
    return str(file)


def shown(value: Any) -> str:
    """On a line of its own: a list as TOML has it, anything else without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return literal(value) if isinstance(value, list) else str(value)


def _variable(each: Parameter) -> str | None:
    """The first of its environment variables that is set to something."""
    return next(filter(os.environ.get, each.variables), None)


def _default(each: Parameter) -> str:
    """As the help has it, in brackets at its end."""
    return each.help.rpartition("[")[2].rstrip("].") if each.help.endswith("]") else "off" if not each.value else ""

