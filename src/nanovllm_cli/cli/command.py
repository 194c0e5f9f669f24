"""How commands are declared: groups of options as dataclasses, help in sections, defaults from the settings files.

`expand` lets a command take whole groups (`options.ModelOptions`, …), so that an option is declared once for all
commands. `Command` is Typer's command with differences: help is plain text in sections (rich's panels cost more than the rest of
`--help` together), a model's settings are looked up before the flags are read, a flag that was misspelt behind one dash is named
as such, and an error about an option that nobody typed says where its value comes from.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from nanovllm_cli.cli.command_tree import parameters, variable_of
from nanovllm_cli.cli.habits import is_habit
from nanovllm_cli.cli.help import write_commands, write_examples, write_options
from nanovllm_cli.cli.output import console
from nanovllm_cli.cli.settings import Origin, Settings, as_words, load_settings, working_folder
from nanovllm_cli.cli.slips import typed_twice, unread_variables
from nanovllm_cli.errors import AccessRefusedError, ModelNotFoundError, NanovllmError, UsageError

TYPED = "nanovllm.typed"  # in a context's meta: all words behind the command's name
ORIGINS = "nanovllm.origins"  # in a context's meta: where the values from settings files stand
_OPTION = "option"  # in a field's metadata
_ANYWHERE = ("config", "completion")
"""What runs in a folder that was deleted. Elsewhere a library of torch's (MKL) ends the process there, in words of its own."""


def option(*flags: str, help: str, panel: str, default: Any = None, **more: Any) -> Any:
    """A field of a group of options. More is passed on to `typer_option`."""
    return dataclasses.field(default=default, metadata={_OPTION: typer_option(*flags, help=help, panel=panel, **more)})


def typer_option(*flags: str, help: str, panel: str, **more: Any) -> Any:
    """typer.Option whose environment variables are NANOVLLM_ and a long flag each, first the longest where envvar says no other:
    for the type of fields that several groups have, as in `Offline = Annotated[bool, typer_option("--offline", …)]`. panel: the
    section of the help it is in."""
    longest, *others = sorted((flag.split("/")[0] for flag in flags if flag.startswith("--")), key=len, reverse=True) or flags
    settings: dict[str, Any] = {"envvar": variable_of(longest), "show_envvar": False, "show_default": False} | more
    if settings["envvar"] is not None:
        settings["envvar"] = list(dict.fromkeys((settings["envvar"], *map(variable_of, (longest, *others)))))
    return typer.Option(*flags, help=help, rich_help_panel=panel, **settings)


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, with every parameter that is a dataclass replaced by that dataclass's fields, as Typer wants to see
    them."""
    groups: dict[str, Any] = {}
    expanded: list[inspect.Parameter] = []
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name == "return":
            continue
        if not dataclasses.is_dataclass(hint):
            plain = inspect.signature(function).parameters[name]
            expanded.append(plain.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = hint
        types = types_of(hint)
        for field in dataclasses.fields(hint):
            keyword = inspect.Parameter.KEYWORD_ONLY
            expanded.append(inspect.Parameter(field.name, keyword, default=field.default, annotation=types[field.name]))

    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        function(**values)

    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    command.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    return command


def types_of(group: Any) -> dict[str, Any]:
    """The types of a group's fields with their options, as Typer wants to see them."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        if _OPTION in field.metadata:
            hints[field.name] = Annotated[hints[field.name], field.metadata[_OPTION]]
    return hints


class Command(TyperCommand):
    """A command whose help has sections and whose defaults may come from settings files."""

    reads_settings = True

    def get_help_option(self, ctx: Any) -> Any:
        return _on_our_stdout(super().get_help_option(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, formatter)
        around = ctx.parent.command.commands.get(self.name) if ctx.parent is not None else None
        if isinstance(around, DefaultGroup):
            around.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(full_name(ctx), formatter)

    def invoke(self, ctx: Any) -> Any:
        try:
            if working_folder() is None and full_name(ctx).split(".")[0] not in _ANYWHERE:
                raise UsageError("this folder is not there any more", "go to another one")
            return super().invoke(ctx)
        except NanovllmError as error:
            aliases = _aliases_in(ctx) if isinstance(error, ModelNotFoundError | AccessRefusedError) else ()
            hints = [*aliases, *filter(None, [error.hint]), *_sources_of(ctx, error)]
            error.hint = "; ".join(hints) or None
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = self._without_equals_signs(ctx, args)
        words = ctx.meta[TYPED] = list(args)
        self._refuse_habits(ctx, words)
        if self.reads_settings and not ctx.resilient_parsing and not {"-h", "--help", "--version"} & set(words):
            settings = load_settings(command_flags(ctx))
            ctx.obj = settings
            name = full_name(ctx)
            everywhere = settings.origins(name, None).get("model")
            model = self._model_of(ctx, words, None if everywhere is None else _only(everywhere.value))
            ctx.meta[ORIGINS] = settings.origins(name, model)
            params = {param.name: param for param in self.get_params(ctx)}
            origins = ctx.meta[ORIGINS].items()
            ctx.default_map = {name: partial(_words_of, origin, params[name]) for name, origin in origins}
        try:
            rest: list[str] = super().parse_args(ctx, args)
            _settle_loudness(ctx)
            if not ctx.resilient_parsing:
                self._warn(ctx, words)
            return rest
        except typer.TyperException as failure:
            if getattr(failure, "ctx", ctx) is None:
                failure.ctx = ctx  # type: ignore[attr-defined]
            misspelt = self._misspelt_flag(ctx, failure, words)
            if misspelt is None:
                raise
            raise misspelt from failure

    def _warn(self, ctx: Any, words: Sequence[str]) -> None:
        """Of what has no effect, unless with --quiet. words: that were parsed."""
        slips = [*typed_twice(ctx, words), *(unread_variables(ctx) if self.reads_settings else ())]
        for slip in [] if ctx.params.get("quiet") else slips:
            console().line(f"warning: {slip}")

    def _model_of(self, ctx: Any, words: list[str], from_file: str | None) -> str | None:
        """The model that this call is about, before anything is judged: its settings are defaults for the rest.

        from_file: the one that settings files name. As -m, it makes every argument of a command with a prompt part of that.
        """
        try:
            values, _, _ = self.make_parser(ctx).parse_args(list(words))
        except typer.TyperException:
            return None  # the real parse will say what is wrong
        named = values.get("model")
        if not named:
            param = next((param for param in self.get_params(ctx) if param.name == "model"), None)
            named = param.resolve_envvar_value(ctx) if param is not None else None
        if not named and any(param.name == "words" for param in self.get_params(ctx)):
            named = from_file
        return _only(named) or _only(values.get("model_word")) or from_file

    def _without_equals_signs(self, ctx: Any, words: Sequence[str]) -> list[str]:
        """`-n=4` as `-n 4`: the parser takes the sign for a part of the value, though not behind `-ctk` and `--predict`. Raises
        UsageError for `-n=`."""
        options: list[Any] = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        valued = {flag for param in options for flag in param.opts if not (param.is_flag or param.count)}
        switches = {flag for param in options for flag in param.opts} - valued
        found: list[str] = []
        is_value = False
        for at, word in enumerate(words):
            if word == "--":
                return [*found, *words[at:]]
            is_short = not is_value and word[2:3] == "=" and word[:2] in valued
            if is_short and len(word) == 3:
                raise UsageError(f"{word} has no value", f"{word[:2]} takes one: {word[:2]} VALUE")
            if not is_value and word[2:3] == "=" and word[:2] in switches:
                raise UsageError(f"{word[:2]} takes no value", f"write {word[:2]}")
            found += [word[:2], word[3:]] if is_short else [word]
            is_value = not is_value and word in valued
        return found

    def _refuse_habits(self, ctx: Any, words: list[str]) -> None:
        """A peer's `-fa`, `-fa=on` or `-hf`, or another command's `-mm`, would be read as `-f a`, or as a plea for help."""
        flags = {flag for param in self.get_params(ctx) for flag in param.opts}
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.split("=")[0]
            if name[:2] in flags and name not in flags and (is_habit(name) or name in _every_flag(ctx)):
                raise NoSuchFlag(name, ctx)

    def _misspelt_flag(self, ctx: Any, failure: Exception, words: list[str]) -> typer.TyperException | None:
        """`-ngl 99` reaches the parser as `-n gl`: said as what it is, an option that does not exist."""
        param = getattr(failure, "param", None)
        short = [flag for flag in getattr(param, "opts", []) if len(flag) == 2]
        suspect = getattr(failure, "option_name", None)
        if suspect is not None and len(suspect) == 2:
            short = [suspect]
        flags = [flag for param in self.get_params(ctx) for flag in param.opts]
        for word in words:
            name = word
            if name in flags or not word[2:3].isalpha():
                continue
            if any(word.startswith(flag) for flag in short):
                return NoSuchFlag(name, ctx)
            if suspect is not None and word[:2] in flags and suspect[1:] in word[2:]:  # `-hello` reaches it as `-h`, `-e`, …
                return NoSuchFlag(name, ctx)
        return None


class SettinglessCommand(Command):
    """A command that works whatever is in the settings files: one that mends them, or that a shell runs at its start."""

    reads_settings = False


class Group(TyperGroup):
    """The program itself, and commands that belong together. Where a command is named at once, the group's own options are
    left alone: to convert the values that they do not have, Typer would import all of pydantic."""

    _is_passed_by = False

    def get_help_option(self, ctx: Any) -> Any:
        return _on_our_stdout(super().get_help_option(ctx))

    def get_params(self, ctx: Any) -> list[Any]:
        return [] if self._is_passed_by else super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._is_passed_by = bool(args) and args[0] in self.commands
        try:
            return super().parse_args(ctx, args)
        finally:
            self._is_passed_by = False

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_options(self, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands(self, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(full_name(ctx) if ctx.parent is not None else "", formatter)


class DefaultGroup(Group):
    """A group that is a command as well: the one of its commands that has the group's own name (`default`) takes what none of
    the others is named for. A model that is called like one of the others is reached by -m."""

    def __init__(self, *, name: str | None = None, commands: Any = None, **attributes: Any) -> None:
        super().__init__(name=name, commands=commands, **attributes)
        self.default: Any = self.commands.pop(name or "")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent=parent, **extra)
        if args and not _is_a_model(args[0]):
            near = difflib.get_close_matches(args[0], self.commands, n=1, cutoff=0.8)
            if near:
                raise UsageError(
                    f"{info_name} has no command {args[0]!r}",
                    f"did you mean {near[0]}? A model of that name is reached by -m {args[0]}",
                )
        return self.default.make_context(info_name, args, parent=parent, **extra)


def _on_our_stdout(help_option: Any) -> Any:
    """--help that is written as answers are: the parser's own passes over a stdout that is closed, and trips over a full one."""

    def show(ctx: Any, param: Any, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            console().out.write(ctx.get_help() + "\n")
            raise typer.Exit

    if help_option is not None:
        help_option.callback = show
    return help_option


def _is_a_model(word: str) -> bool:
    """Whether a word can't be meant as a command's name."""
    return word.startswith("-") or bool({"/", ":", "."} & set(word)) or os.path.exists(word)


def group(help: str, cls: type[Group] = Group, **more: Any) -> typer.Typer:
    """An application of the house's kind: the program, or commands under one name."""
    return typer.Typer(
        cls=cls,
        help=help,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        suggest_commands=False,
        **more,
    )


class NoSuchFlag(typer.TyperException):
    """A flag that no option has. option_name and possibilities are named as in the parser's own error, which guesses there."""

    exit_code = 2

    def __init__(self, option_name: str, ctx: Any) -> None:
        super().__init__(f"No such option: {option_name}")
        self.ctx = ctx
        self.option_name = option_name
        self.possibilities = None


def command_flags(ctx: Any) -> dict[str, dict[str, str]]:
    """For each command, by its full name, the names that its settings may have, with the parameter each one sets."""
    root = ctx.find_root().command
    commands = getattr(root, "commands", None) or {root.name or "": root}
    return {name: _settable(command) for name, command in _full_names(commands)}


def _every_flag(ctx: Any) -> set[str]:
    """Of all commands."""
    commands = getattr(ctx.find_root().command, "commands", {})
    return {flag for _, command in _full_names(commands) for param in command.params for flag in param.opts}


def _full_names(commands: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """run, bench, bench.serve, …: commands as the settings files call them."""
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            yield prefix + name, command
            continue
        if isinstance(command, DefaultGroup):
            yield prefix + name, command.default
        yield from _full_names(inner, f"{prefix}{name}.")


def full_name(ctx: Any) -> str:
    """`run`, `bench.serve`: as settings files call a context's command."""
    names = []
    while ctx.parent is not None:
        names.append(ctx.command.name)
        ctx = ctx.parent
    return ".".join(reversed(names)) or ctx.command.name or ""


def _settle_loudness(ctx: Any) -> None:
    """-v wins over a --quiet of the environment or of a settings file, and both together only say what goes into a file. Raises
    UsageError."""
    given = ctx.params
    if ctx.resilient_parsing or not (given.get("quiet") and given.get("verbose")) or given.get("log_file"):
        return
    if is_typed(ctx, "verbose"):
        if is_typed(ctx, "quiet"):
            raise UsageError("-q and -v cannot be used together", "with --log-file, -v is for the file")
        given["quiet"] = False


def _only(value: Any) -> str | None:
    """A word, also where it is the only one of several that there could be."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None


def _settable(command: Any) -> dict[str, str]:
    known = parameters(command) if getattr(command, "reads_settings", False) else ()
    return {name: each.name for each in known for name in each.setting_names}


def _words_of(origin: Origin, param: Any) -> Any:
    """What the parser of `param` gets of a settings file, where nothing else says it. Raises UsageError."""
    try:
        return as_words(origin.value, param)
    except ValueError as failure:
        raise UsageError(f"{max(param.opts, key=len)} {failure}", f"the value comes from {origin}") from failure


def source_of(ctx: Any, param: Any) -> str | None:
    """Where a value comes from that was not typed: a variable, or a place in a settings file."""
    source = ctx.get_parameter_source(param.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"the environment variable {next(filter(os.environ.get, param.envvar))}"
    if source is not None and source.name == "DEFAULT_MAP":
        return str(ctx.meta[ORIGINS][param.name])
    return None


def _sources_of(ctx: Any, error: NanovllmError) -> list[str]:
    """A sentence for each option that an error speaks of, by its name or its value's, and that was not typed."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", f"{error.message} {error.hint}"))
    words = set(re.findall(r"[\w.:/-]{3,}", error.message))
    found = []
    for param in ctx.command.params:
        where, flags, value = source_of(ctx, param), named & {*param.opts, *param.secondary_opts}, ctx.params.get(param.name)
        if where and (flags or (isinstance(value, str) and value in words)):
            found.append((min(flags) if flags else flag_of(ctx, param.name), where))
    alone = len(found) == len(named) == 1
    return [f"{'the value' if alone else flag} comes from {where}" for flag, where in found]


def _aliases_in(ctx: Any) -> list[str]:
    """A sentence for each alias of the settings files that was typed: an error names what it stands for."""
    if not isinstance(ctx.obj, Settings):
        return []
    typed = [each for value in ctx.params.values() for each in (value if isinstance(value, list | tuple) else [value])]
    return [f"{name} stands for {origin.value} in {origin}" for name, origin in ctx.obj.aliases().items() if name in typed]


# Sections of the help.
MODEL, PROMPT, SAMPLING, ENGINE, OUTPUT, MESSAGES = "Model", "Prompt", "Sampling", "Engine", "Output", "Messages"
FORM, TRANSCRIPT = "Form of the answer", "Transcript"
CONVERSATION, TOOLS, SESSIONS, SERVER = "Conversation", "Tools", "Sessions", "Server"


def is_typed(ctx: Any, name: str) -> bool:
    """Whether the command line has this parameter. What the environment and settings files say are defaults: they are for where
    they have a meaning."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def flag_of(ctx: Any, name: str) -> str:
    """What a person calls this parameter: its longest flag, or an argument's name in the help."""
    param = next(param for param in ctx.command.params if param.name == name)
    return str(max(param.opts, key=len)) if param.opts[0].startswith("-") else str(param.metavar or name)
