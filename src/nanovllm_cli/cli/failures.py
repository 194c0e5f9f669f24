"""What any exception means to a person: one line of what, one of what to do, and the exit code.

Typed errors say it themselves. The parser's errors are put in our words, with the nearest flags. The rest are faults
of ours, and say so.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import typer

from nanovllm_cli.cli.command import TYPED, full_name, source_of
from nanovllm_cli.cli.command_tree import root_page
from nanovllm_cli.cli.habits import (
    command_hint,
    near_flags,
    near_values,
    option_hint,
    our_name,
    subcommand_hint,
    value_hint,
    words_hint,
)
from nanovllm_cli.errors import NanovllmError

_NUMBERS = {
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
    "Input should be a valid integer, got a number with a fractional part": "not a whole number",
    "Input should be a valid boolean, unable to interpret input": "neither on nor off: write 1 or 0",
    "Input should be a valid number, unable to parse string as a number": "not a number",
}
_A_PROMPT = "put -- before a prompt that begins with a dash"
_USUAL = ("NUMBA_NUM_THREADS", "NUMBA_CACHE_DIR")


class Explanation(NamedTuple):
    message: str
    hint: str | None
    exit_code: int


def explanation(error: BaseException) -> Explanation:
    if isinstance(error, NanovllmError):
        return Explanation(error.message, error.hint, error.exit_code)
    if isinstance(error, typer.TyperException):
        return _of_usage(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return Explanation("out of memory", "try a smaller --ctx-size, a smaller --kv-cache or a smaller model", 5)
    # A folder of which nobody thought that it could be closed to this user.
    if isinstance(error, PermissionError) and isinstance(error.filename, str | bytes):
        places = "HOME, XDG_CACHE_HOME, XDG_STATE_HOME and HF_HOME say where files are kept"
        return Explanation(f"{os.fsdecode(error.filename)}: permission denied", f"check its permissions; {places}", 4)
    text = str(error).split("\n")[0]
    message = f"internal error: {type(error).__name__}{': ' + text if text else ''}"
    return Explanation(message, f"{_without_variables()}run it again with --debug, and report what that shows", 1)


def _without_variables() -> str:
    """What to try first, where the environment makes of a library another than the one that was tested."""
    theirs = sorted(name for name in os.environ if name.startswith("NUMBA_") and name not in _USUAL)
    return f"try without {' and '.join(theirs)} in the environment; else " if theirs else ""


def _of_usage(error: typer.TyperException) -> Explanation:
    ctx: Any = getattr(error, "ctx", None)
    is_unknown = hasattr(error, "possibilities")
    copied = _peers_options(ctx) if ctx is not None and is_unknown else {}
    if len(copied) > 1 and getattr(error, "option_name", None) in copied:
        return Explanation(f"no such options: {_listed(copied)}", _hints_of(copied), error.exit_code)
    message = error.message if is_unknown else error.format_message()
    typed = _refused_value(error)
    for theirs, ours in _NUMBERS.items():
        message = message.replace(theirs, ours if typed is None else f"{typed!r:.60} is {ours}")
    return Explanation(_sentence(message), _usage_hint(error, ctx), error.exit_code)


def _peers_options(ctx: Any) -> dict[str, str]:
    """All options of peers' among what was typed, as in a command that was copied from elsewhere, and what to type instead."""
    options = [param for param in ctx.command.get_params(ctx) if param.param_type_name == "option"]
    flags, valued = _flags(ctx), {flag for param in options if not (param.is_flag or param.count) for flag in param.opts}
    words: list[str] = ctx.meta.get(TYPED, [])
    found: dict[str, str] = {}
    before = ""
    for word in words[: words.index("--")] if "--" in words else words:
        name = word.partition("=")[0]
        hint = option_hint(name, flags, full_name(ctx)) if name not in flags and before not in valued else None
        found |= {name: hint} if hint else {}
        before = word
    return found


def _flags(ctx: Any) -> set[str]:
    return {flag for param in ctx.command.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)}


def _hints_of(hints: dict[str, str]) -> str:
    """Each said once, with the options that it is about."""
    about: dict[str, list[str]] = {}
    for flag, hint in hints.items():
        about.setdefault(hint, []).append(flag)
    return "; ".join(f"{_listed(flags)}: {hint}" for hint, flags in about.items())


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _refused_value(error: typer.TyperException) -> str | None:
    """What was typed where a number stands, from the error that the parser made its own of."""
    told = getattr(error.__cause__ or error.__context__, "errors", None)
    value = told()[0].get("input") if told is not None else None
    return value if isinstance(value, str) else None


def _usage_hint(error: Any, ctx: Any) -> str:
    help_line = f"{ctx.command_path if ctx is not None else 'nanovllm'} --help lists the options"
    name = getattr(error, "option_name", None)
    flags = _flags(ctx) if ctx else set()
    if name is not None and any(map(str.isspace, name)) and _takes_a_prompt(ctx):
        return f"{_A_PROMPT}; {help_line}"
    habit = option_hint(name, flags, full_name(ctx) if ctx is not None else "") if name is not None else None
    if habit:
        return habit
    near = near_flags(name, flags) if name is not None and hasattr(error, "possibilities") else []
    slip = f"did you mean {' or '.join(near)}?" if near else ""
    for flag in dict.fromkeys(filter(None, (name, our_name(name or "")))):
        elsewhere = _commands_with(flag, ctx) if flag not in flags else []
        if elsewhere:
            names = _listed(elsewhere if len(elsewhere) < 4 else [*elsewhere[:3], "others"])
            return f"nanovllm {names} {'has' if len(elsewhere) == 1 else 'have'} {flag}; {slip or help_line}"
    if slip:
        return slip
    param = getattr(error, "param", None)
    if param is not None and ctx is not None:
        where = source_of(ctx, param)
        if where is not None:
            return f"the value comes from {where}"
        told = re.search(r"'(.*)' is not one of ('.*')", error.message)
        if told and (elsewhere_said := value_hint(param.opts, told[1])):
            return elsewhere_said
        if told and (meant := near_values(told[1], told[2].strip("'").split("', '"))):
            return f"did you mean {meant[0]}?"
    if name is not None and (name[1:2].isdigit() or re.fullmatch(r"-[^\W\d_-]{3,}", name)) and _takes_a_prompt(ctx):
        return f"{_A_PROMPT}; {help_line}"
    commands = getattr(getattr(ctx, "command", None), "commands", None)
    if commands:
        return _command_hint(error, ctx, sorted(commands))
    if ctx is not None and "unexpected extra argument" in error.message:
        return words_hint(ctx.command.name) or help_line
    return help_line


def _takes_a_prompt(ctx: Any) -> bool:
    arguments = [] if ctx is None else [param for param in ctx.command.params if param.param_type_name == "argument"]
    return any(param.metavar in ("PROMPT", "TEXT") for param in arguments)


def _commands_with(flag: str, ctx: Any) -> list[str]:
    """Commands that have an option of this very name, in the order of the help."""
    if ctx is None or ctx.parent is None:
        return []
    every = root_page(ctx).every()
    return [" ".join(each.words[1:]) for each in every if any(flag in (*option.flags, *option.off) for option in each.options)]


def _command_hint(error: Any, ctx: Any, commands: list[str]) -> str:
    words = error.message.split("'")
    name = words[1] if len(words) > 2 else ""
    habit = command_hint(name, commands) if ctx.parent is None else subcommand_hint(ctx.command.name, name)
    if habit:
        return habit
    near = difflib.get_close_matches(name, commands, cutoff=0.65)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if ctx.parent is None and _is_no_command(name):
        return "a model and what it is asked stand behind a command: nanovllm run MODEL PROMPT; nanovllm chat MODEL"
    example = "" if ctx.parent is not None else '; for example: nanovllm run tiny "Once upon a time"'
    return f"commands: {', '.join(commands)}{example}"


def _is_no_command(word: str) -> bool:
    """Whether a word is meant for a model or a prompt."""
    from nanovllm_cli.weights.aliases import ALIASES, BUNDLED

    odd = {"/", ":", ".", " "} & set(word)
    return bool(odd) or word == BUNDLED or word in ALIASES or os.path.exists(word)


def _sentence(message: str) -> str:
    """The parser's message as ours are: no capital, no full stop, not the name of a Python exception."""
    message = " ".join(message.split()).removesuffix(".").replace(": Value error, ", ": ").replace(". Choose from:", ":")
    for theirs, ours in (("greater", "at least"), ("less", "at most")):
        message = message.replace(f"Input should be {theirs} than or equal to", f"must be {ours}")
    return message[:1].lower() + message[1:]


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, ImportError):  # of a library that a limit of the address space (ulimit -v) leaves no room for
        return "failed to map segment from shared object" in text and "not permitted" not in text
    return isinstance(error, RuntimeError | OSError) and (
        "can't allocate memory" in text or "Cannot allocate memory" in text
    )
