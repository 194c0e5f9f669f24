"""`nanovllm config`: what is set, where it comes from, and changes to the settings files. `settings.py` reads them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from nanovllm_cli.cli.command import (
    OUTPUT,
    Command,
    DefaultGroup,
    SettinglessCommand,
    command_flags,
    expand,
    group,
    option,
)
from nanovllm_cli.cli.command_tree import Page, root_page
from nanovllm_cli.cli.files import write_whole
from nanovllm_cli.cli.inputs import checked
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, ModelOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.sampling_options import AnswersOptions
from nanovllm_cli.cli.settings import (
    PROJECT_FILE,
    Settings,
    SettingsFile,
    as_words,
    check,
    project_file,
    table_name,
    user_file,
    working_folder,
)
from nanovllm_cli.cli.settings_view import (
    Row,
    Target,
    keys_of,
    place,
    record,
    rows,
    short,
    shown,
    target_of,
    value_at,
    value_of,
)
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.cli.toml_text import TomlText
from nanovllm_cli.errors import OutputError, UsageError

FILES = "Files"
NEW_FILE = """\
# Settings of nanovllm; see nanovllm-config(5). For example:
#
# [default]
# temp = 0.7
#
# [aliases]
# mine = "someone/something-GGUF:Q4_K_M"
"""
_SWITCH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """What is shown, and how."""

    model: str | None = option(
        "-m", "--model", help="With the settings of this model.", panel=OUTPUT, metavar="MODEL", envvar=None
    )
    all: bool = option("--all", help="Defaults too.", default=False, panel=OUTPUT, envvar=None)
    json: bool = option("--json", help="A JSON list instead of text.", default=False, panel=OUTPUT, envvar=None)


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Which of the two files."""

    project: bool = option(
        "--project", help=f"{PROJECT_FILE} of this project, in place of the user's own file.",
        default=False, panel=FILES, envvar=None,
    )


KeyWord = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="temp (for every command), run.temp, bench.serve.temp, models.NAME.temp, aliases.NAME."
    ),
]


def build() -> typer.Typer:
    app = group("Show what is set and where it comes from, and change it.", DefaultGroup)
    app.command("config", cls=Command)(show)
    app.command("get", cls=Command)(get)
    app.command("set", cls=SettinglessCommand)(set_value)
    app.command("unset", cls=SettinglessCommand)(unset)
    app.command("path", cls=SettinglessCommand)(path)
    app.command("edit", cls=SettinglessCommand)(edit)
    return app


@expand
def show(
    *,
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="Only what this command would get, such as run or bench serve."),
    ] = None,
    options: ShowOptions,
    messages: MessageOptions,
) -> None:
    """Show what is set and where it comes from, and change it.

    A flag wins over its environment variable, that over the project's file, that over the user's, and that over the default.
    Each line has a value, where it comes from, and the commands that get it.
    """
    screen = screen_for(messages)
    root = root_page(ctx)
    assert isinstance(ctx.obj, Settings)
    found = list(rows(root, ctx.obj, ".".join(words or []), options.model, options.all))
    if options.json:
        screen.answer(json.dumps([record(row) for row in found], ensure_ascii=False, indent=2) + "\n")
        return
    if not found:
        user = user_file()
        files = PROJECT_FILE if user is None else f"{short(user)} or {PROJECT_FILE}"
        screen.say(f"nothing is set, neither in the environment nor in {files}")
    _print(found, root, screen)


@expand
def get(*, ctx: typer.Context, key: KeyWord, messages: MessageOptions) -> None:
    """Print the value that counts, from wherever it is. The exit code is 1 where there is none.

    With a model's name in the key: what a command gets for that model.
    """
    screen = screen_for(messages)
    assert isinstance(ctx.obj, Settings)
    target = target_of(root_page(ctx), key)
    origin = value_of(ctx.obj, target)
    if origin is None:
        raise NotSet(f"{key} is not set", "nanovllm config shows what is")
    value = value_at(origin, target.parameter)
    screen.answer("".join(f"{shown(each)}\n" for each in (value if isinstance(value, list) else [value])))


@expand
def set_value(
    *,
    ctx: typer.Context,
    key: KeyWord,
    values: Annotated[
        list[str], typer.Argument(metavar="VALUE", help="More than one for an option that can be repeated.")
    ],
    files: FileOptions,
    messages: MessageOptions,
) -> None:
    """Set a value in the user's file, or with --project in the project's. Other lines and comments stay as they are."""
    screen = screen_for(messages)
    root = root_page(ctx)
    target = target_of(root, key)
    value = _checked_value(ctx, target, key, values)
    file = _file(files)
    key, text = target.key, TomlText("")
    if os.path.exists(file):
        there = SettingsFile(file)
        key, *others = keys_of(there, target) or [key]
        text = _without(there.text, target, others)
    _write(file, text.with_value(target.table, key, value))
    screen.say(f"{key} = {shown(value)} in [{table_name(target.table)}] of {short(file)}")


@expand
def unset(*, ctx: typer.Context, key: KeyWord, files: FileOptions, messages: MessageOptions) -> None:
    """Take a value out of the user's file, or with --project out of the project's."""
    screen = screen_for(messages)
    target = target_of(root_page(ctx), key)
    file = _file(files)
    if not os.path.exists(file) or not (keys := keys_of(there := SettingsFile(file), target)):
        raise UsageError(f"{key} is not set in {file}", "nanovllm config shows what is")
    *others, last = keys
    _write(file, _without(there.text, target, others).without(target.table, last))
    screen.say(f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} out of [{table_name(target.table)}] of {short(file)}")


@expand
def path(*, files: FileOptions, messages: MessageOptions) -> None:
    """Print where the user's file is, be it there or not; with --project the project's."""
    screen = screen_for(messages)
    screen.answer(f"{_file(files)}\n")


@expand
def edit(*, ctx: typer.Context, files: FileOptions, messages: MessageOptions) -> None:
    """Open the file in $VISUAL or $EDITOR, and check what comes of it."""
    screen_for(messages)
    file = _file(files)
    wanted = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        editor = shlex.split(wanted) or ["vi"]
    except ValueError as failure:
        raise UsageError(f"cannot run {wanted}: {failure}", "set EDITOR to the editor you use") from failure
    if not os.path.exists(file):
        _write(file, NEW_FILE)
    try:
        code = subprocess.call([*editor, str(file)])
    except OSError as failure:
        raise UsageError(f"cannot run {editor[0]}: {failure.strerror}", "set EDITOR to the editor you use") from failure
    if code:
        raise OutputError(f"{editor[0]} ended with exit code {code}", f"look at {file}")
    check(SettingsFile(file), command_flags(ctx))


def _without(text: TomlText, target: Target, keys: list[str]) -> TomlText:
    for key in keys:
        text = TomlText(text.without(target.table, key))
    return text


class NotSet(OutputError):
    """There is no value to print."""


def _checked_value(ctx: typer.Context, target: Target, key: str, words: list[str]) -> Any:
    """The words as TOML's value. Raises UsageError, or the parser's error for what the option would not take."""
    if target.command is None or target.parameter is None:
        if len(words) > 1 or not words[0]:
            raise UsageError(f"{key} takes the name of one model")
        return checked(words[0], "the name")
    command: Any = ctx.find_root().command
    for word in target.command.words[1:]:
        command = command.commands[word]
    param = next(each for each in getattr(command, "default", command).params if each.name == target.parameter.name)
    value: Any = list(words)
    if not target.parameter.repeats:
        if len(words) > 1:
            raise UsageError(f"{key} takes one value, not {len(words)}", "put it in quotes if it has spaces")
        value = _number(words[0])
    if param.is_flag:
        if words[0].lower() not in _SWITCH:
            raise UsageError(f"{key} is a switch: {words[0]!r} is neither true nor false")
        value = _SWITCH[words[0].lower()]
    for word in words:
        checked(word, f"the value of {key}")
    _refuse_out_of_bounds(param.name, param.process_value(ctx, as_words(value, param)))
    return value


def _refuse_out_of_bounds(name: str, value: Any) -> None:
    """Raises UsageError for what is of the right type and still more or less than any command could use."""
    if name in {each.name for each in fields(AnswersOptions)}:
        AnswersOptions(**{name: value}).given()
    elif name in {each.name for each in fields(EngineOptions)} and not isinstance(value, list | tuple):  # bench takes several
        EngineOptions(**{name: value}).config(ModelOptions())


def _number(word: str) -> Any:
    """A number that is written back as it was; anything else stays a string."""
    for kind in (int, float):
        try:
            if str(kind(word)) == word and word not in ("inf", "nan", "-inf"):
                return kind(word)
        except ValueError:
            pass
    return word


def _file(files: FileOptions) -> Path:
    """Raises UsageError where there is no home to keep settings in."""
    if files.project:
        here = working_folder()
        if here is None:
            raise UsageError("this folder is not there any more", "go to another one")
        return project_file(here) or here / PROJECT_FILE
    file = user_file()
    if file is None:
        raise UsageError(
            "there is no home folder to keep settings in", "set HOME or XDG_CONFIG_HOME to an absolute path"
        )
    return file


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise OutputError(f"cannot create {file.parent}: {failure.strerror}") from failure
    write_whole(file, text)


def _print(found: list[Row], root: Page, screen: Console) -> None:
    knowing: dict[str, list[str]] = {}
    for command in root.every():
        for each in command.settings:
            knowing.setdefault(str(each.key), []).append(command.name)
    cells = []
    for row in found:
        whom = "all that have it" if row.commands == knowing.get(row.key) else ", ".join(row.commands) or "alias"
        with_model = f", with {row.model}" if row.model else ""
        value = f"= {shown(row.value)}" if row.origin else f"({row.value or 'none'})"
        cells.append((f"{row.key} {value}", place(row.origin), whom + with_model))
    screen.lines(aligned(cells, left=(0, 1, 2)))
