"""What was meant and has no effect, though every word of it is valid: a variable of the environment that no option reads, and an
option that was typed twice. Both are warned of and no error, but for a prompt: a variable may be for another version, and who
calls an alias types its options again to change them.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from nanovllm_cli.cli.command_tree import ENVIRONMENT_PREFIX, root_page, variable_of
from nanovllm_cli.cli.habits import near_flags, renamed
from nanovllm_cli.errors import UsageError

_BY_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?")
"""What it sets in every container beside a service that is called nanovllm."""


def unread_variables(ctx: Any) -> Iterator[str]:
    """A line for each variable with our prefix that no option of any command has."""
    ours = sorted(name for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX) and value)
    here = {name for param in ctx.command.params for name in param.envvar or ()}
    if here.issuperset(ours):  # as nearly always: nothing is to be gathered from all commands
        return
    options = [option for each in root_page(ctx).every() for option in each.options]
    known = {variable for option in options for variable in option.variables}
    every_flag = {flag for option in options for flag in option.flags}
    flags = {flag for flag in every_flag if variable_of(flag) in known}
    for name in ours:
        word = name.removeprefix(ENVIRONMENT_PREFIX)
        if name not in known and not _BY_KUBERNETES.fullmatch(word):
            yield f"{name} is no option's variable{_meant('--' + word.lower().replace('_', '-'), flags, every_flag)}"


def _meant(flag: str, flags: set[str], every_flag: set[str]) -> str:
    """flags: those that have a variable."""
    if flag in every_flag:
        return f": {flag} is for the command line alone"
    ours = renamed(flag, flags)
    near = [ours] if ours else near_flags(flag, flags)
    return f"; did you mean {' or '.join(map(variable_of, near))}?" if near else ""


def typed_twice(ctx: Any, words: Sequence[str]) -> Iterator[str]:
    """A line for each option that holds one value and was typed with several. words: ones that the parser has accepted. Raises
    UsageError where it is the prompt, of which nobody would leave out a part."""
    gathering = copy.copy(ctx.command)
    gathering.params = [_gathering(param) for param in ctx.command.params]
    values, _, _ = gathering.make_parser(ctx).parse_args(list(words))
    for param in ctx.command.params:
        if _holds_one(param) and len(set(values.get(param.name) or ())) > 1:
            names = (word.partition("=")[0] for word in words)
            flag = next((name for name in names if name in param.opts), max(param.opts, key=len))
            if param.name == "prompt":
                batch = any("--batch" in each.opts for each in ctx.command.params)
                more = "; --batch FILE answers several" if batch else ""
                raise UsageError(f"{flag} was given twice", f"make one text of them{more}")
            yield f"{flag} was given twice: the last one counts"


def _holds_one(param: Any) -> bool:
    return param.param_type_name == "option" and not (param.multiple or param.count or param.is_flag)


def _gathering(param: Any) -> Any:
    """The parameter, as one that keeps all of its values."""
    if _holds_one(param):
        param = copy.copy(param)
        param.multiple = True
    return param
