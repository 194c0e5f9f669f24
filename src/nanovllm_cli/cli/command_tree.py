"""The command line as plain values: what help, manual pages and completions say of a command and its options.

`page` walks the tree that Typer built; nothing else looks into Typer's parameters. Hidden commands and options are left out.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

ENVIRONMENT_PREFIX = "NANOVLLM_"
HELP_FLAGS = ("-h", "--help")
_NOT_FOR_FILES = ("FILE", "PATH", "PATH:SCALE", "FILE:SCALE", "NAME=PATH", "FOLDER", "URL", "KEY", "HOST", "ORIGIN", "TOOL")


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option, or an argument (which has no flags).

    off: the flags that turn a switch off. value: what stands behind the flag, as the help shows it; "" for a switch.
    choices: the words that it can be, where that is a short list. variables: of the environment, by the names of its long flags;
    the first is the one that settings files go by.
    """

    name: str
    flags: tuple[str, ...]
    off: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str
    section: str
    repeats: bool
    required: bool
    variables: tuple[str, ...]

    @property
    def is_argument(self) -> bool:
        return not self.flags

    @property
    def key(self) -> str | None:
        """Its name in settings files, where it may stand in them: whatever the environment may set and names no file and no
        server, nor whose pages use one. A file in a project that somebody only looks at does not say what is read or written, nor
        who gets a key, nor who gets in."""
        if not self.variables or self.value in _NOT_FOR_FILES:
            return None
        return self.variables[0].removeprefix(ENVIRONMENT_PREFIX).replace("_", "-").lower()

    @property
    def setting_names(self) -> list[str]:
        """All names that settings files may have for it."""
        return [flag.lstrip("-") for flag in self.flags if flag.startswith("--")] if self.key else []

    @property
    def synopsis(self) -> str:
        """`-c, --ctx-size SIZE`, `--stats / --no-stats`, `MODEL`."""
        names = ", ".join(self.flags)
        if self.off:
            names += " / " + ", ".join(self.off)
        return f"{names} {self.value}".strip()


@dataclass(frozen=True, slots=True)
class Page:
    """A command. words: `("nanovllm", "bench", "serve")`. text: paragraphs after the summary. A group has `commands`, and
    parameters of its own where it is a command as well."""

    words: tuple[str, ...]
    summary: str
    text: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    commands: tuple[Page, ...]
    reads_settings: bool

    @property
    def name(self) -> str:
        """What settings files and examples call it: `run`, `bench.serve`; "" for the program."""
        return ".".join(self.words[1:])

    @property
    def arguments(self) -> list[Parameter]:
        return [each for each in self.parameters if each.is_argument]

    @property
    def options(self) -> list[Parameter]:
        return [each for each in self.parameters if not each.is_argument]

    @property
    def settings(self) -> list[Parameter]:
        """The options that settings files may set."""
        return [each for each in self.parameters if each.key and self.reads_settings]

    def setting(self, name: str) -> Parameter | None:
        """The one of them that goes by this name."""
        return next((each for each in self.settings if name in each.setting_names), None)

    def every(self) -> Iterator[Page]:
        """This page and all below it."""
        yield self
        for command in self.commands:
            yield from command.every()


def variable_of(flag: str) -> str:
    """The environment's name for a flag."""
    return ENVIRONMENT_PREFIX + flag.lstrip("-").replace("-", "_").upper()


def page(command: Any, *words: str) -> Page:
    """What Typer's `command` is, under the name `words`."""
    own = getattr(command, "default", None) or command
    inner = [each for each in getattr(command, "commands", {}).values() if not each.hidden]
    summary, *text = paragraphs(own.help) or [""]
    pages = tuple(page(each, *words, each.name) for each in inner)
    return Page(words, summary, tuple(text), parameters(own), pages, getattr(own, "reads_settings", False))


def root_page(ctx: Any) -> Page:
    """The whole program's, in whose context something runs."""
    root = ctx.find_root()
    return page(root.command, str(root.info_name))


def parameters(command: Any) -> tuple[Parameter, ...]:
    """Of a command itself, the help's own flag last."""
    found = [parameter(each) for each in command.params if not getattr(each, "hidden", False)]
    section = found[-1].section if found and not found[-1].is_argument else "Options"
    return *found, Parameter("help", HELP_FLAGS, (), "", (), "This text.", section, False, False, ())


def paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n") if part.strip()]


def parameter(param: Any) -> Parameter:
    """What Typer's `param` is."""
    is_option = param.param_type_name == "option"
    choices, kind = _kind(param.type_descriptor.annotation)
    is_switch = is_option and (param.is_flag or param.count)
    shown = param.metavar or "|".join(choices) or {int: "N", float: "N"}.get(kind, "TEXT")
    repeats = bool(param.multiple or param.nargs != 1) and not is_switch
    default = "Options" if is_option else "Arguments"
    return Parameter(
        name=param.name,
        flags=tuple(sorted(param.opts, key=lambda flag: flag.startswith("--"))) if is_option else (),
        off=tuple(param.secondary_opts),
        value="" if is_switch else shown,
        choices=choices,
        help=param.help or "",
        section=getattr(param, "rich_help_panel", None) or default,
        repeats=repeats,
        required=bool(param.required),
        variables=tuple(param.envvar or ()) if is_option else (),
    )


def sections(parameters: tuple[Parameter, ...]) -> dict[str, list[Parameter]]:
    """By the help's headings, in the order in which they come."""
    found: dict[str, list[Parameter]] = {}
    for each in parameters:
        found.setdefault(each.section, []).append(each)
    return found


def _kind(annotation: Any) -> tuple[tuple[str, ...], Any]:
    """The choices of an annotation, and the type that is left when Optional and list are taken off."""
    origin = get_origin(annotation)
    if origin is Literal:
        return tuple(map(str, get_args(annotation))), str
    if origin in (Union, types.UnionType, list, tuple):
        inner = [each for each in get_args(annotation) if each not in (type(None), Ellipsis)]
        return _kind(inner[0]) if inner else ((), str)
    return (), annotation
