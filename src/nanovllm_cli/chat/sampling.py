"""`/set`: the options of the command line for sampling and for the form of answers, by their names, one at a time."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from nanovllm_cli.cli.command import types_of
from nanovllm_cli.cli.form import FormOptions
from nanovllm_cli.cli.habits import renamed
from nanovllm_cli.cli.parsers import unescaped
from nanovllm_cli.cli.sampling_options import SamplingOptions
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError

_FIELDS = {
    "predict": "max_tokens",
    "bad_word": "bad_words",
    "dry_sequence_breaker": "dry_sequence_breakers",
    "sampler_seq": "samplers",
}
DEFAULT = "default"
NOTHING = ('""', "''")
"""An empty text as a command's argument."""
_HABITS = {
    "parameter": "/set NAME VALUE", "system": "/system TEXT", "think": "/think on", "nothink": "/think off",
    "format": "/set json-object on", "noformat": "/set json-object off", "verbose": "/stats",
    "quiet": "/stats, which shows nothing by itself", "nohistory": "nanovllm chat --no-save",
    "nowordwrap": "nanovllm chat --markdown never",
}  # fmt: skip
"""What Ollama's `/set` knows besides, and what to type here."""


class Setting(NamedTuple):
    """name: the flag without its dashes. option: of its group. field: of SamplingParams."""

    group: type[SamplingOptions | FormOptions]
    name: str
    option: str
    field: str
    kind: type
    help: str
    parse: Callable[[str], Any] | None

    @property
    def is_read_from_a_file(self) -> bool:
        """Another way to say what a setting without `-file` holds."""
        return self.group is FormOptions and self.option.endswith("_file")

    @property
    def nothing(self) -> str:
        """How it is shown where it holds nothing."""
        return "off" if self.kind is bool else "none"

    def is_in(self, given: Mapping[str, Any]) -> bool:
        value = given.get(self.field)
        return self.field in given and (not isinstance(value, Constraint) or self._is_of(value))

    def of_form(self, form: Constraint) -> str:
        """What this setting holds of the form that answers have; one setting does."""
        if not self._is_of(form):
            return self.nothing
        return form.text.strip().replace("\n", "\\n") or "on"

    def _is_of(self, form: Constraint) -> bool:
        kind = "grammar" if form.kind in ("gbnf", "lark") else form.kind
        return self.option.removesuffix("_file") == kind


@cache
def settings() -> Mapping[str, Setting]:
    """By every name that a flag has: temp, predict and n, …"""
    found: dict[str, Setting] = {}
    options = [(group, *each) for group in (SamplingOptions, FormOptions) for each in types_of(group).items()]
    for group, option, hint in options:
        if option == "reasoning_budget":  # no field of SamplingParams
            continue
        declared, info = get_args(hint)
        flags = [info.default, *info.param_decls]  # in an annotation Typer takes the first flag for a default
        names = [flag.lstrip("-") for flag in flags]
        first_long = next(flag for flag in flags if flag.startswith("--")).lstrip("-")
        field = "constraint" if group is FormOptions else _FIELDS.get(option, option)
        setting = Setting(group, first_long, option, field, _kind(declared), info.help or "", info.parser)
        found |= dict.fromkeys(names, setting)
    return found


def setting(name: str) -> Setting:
    """Raises UsageError for a name that no option has, with the nearest ones."""
    known = settings()
    bare = name.lstrip("-").replace("_", "-")
    if bare not in known:
        near = difflib.get_close_matches(bare, [each for each in known if len(each) > 1], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "/set lists them"
        ours = renamed(f"--{bare}", {f"--{each}" for each in known})
        habit = _HABITS.get(bare) or (ours and f"/set {ours.lstrip('-')}")
        raise UsageError(f"there is no setting {name!r}", f"here it is {habit}" if habit else hint)
    return known[bare]


def changed(given: Mapping[str, Any], chosen: Setting, value: str) -> dict[str, Any]:
    """`given`, fields of SamplingParams, after `/set NAME VALUE`. Raises UsageError for what has no meaning."""
    rest = {field: kept for field, kept in given.items() if field != chosen.field}
    if value == DEFAULT:
        return rest
    return rest | chosen.group(**{chosen.option: _parsed(chosen, value)}).given()


def shown(params: object, chosen: Setting) -> str:
    """The value that counts now."""
    value = getattr(params, chosen.field)
    if isinstance(value, tuple):
        return " ".join(shlex.quote(unescaped(each)) for each in value) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{token_id}{bias:+g}" for token_id, bias in value.items())
    if isinstance(value, Constraint):
        return chosen.of_form(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return chosen.nothing if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(declared: Any) -> type:
    """bool, int, float, str or list, of a hint that may allow None."""
    inner = next((each for each in get_args(declared) if each is not type(None)), declared)
    kind: type = get_origin(inner) or inner
    assert kind in (bool, int, float, str, list), declared
    return kind


def _parsed(chosen: Setting, value: str) -> Any:
    if chosen.kind is str and value in NOTHING:
        raise UsageError(f"{chosen.name} is empty", f"/set {chosen.name} {DEFAULT} leaves it out")
    try:
        if chosen.kind is bool:
            return _SWITCH[value]
        if chosen.kind is list:
            words = _words(value)
            return [chosen.parse(word) if chosen.parse else word for word in words]
        return chosen.parse(value) if chosen.parse else chosen.kind(value)
    except KeyError:
        raise UsageError(f"{chosen.name} is on or off, not {value!r:.60}") from None
    except ValueError as failure:
        expected = {int: "a whole number", float: "a number"}.get(chosen.kind)
        raise UsageError(
            f"{chosen.name}: {value!r:.60} is not {expected}" if expected else f"{chosen.name}: {failure}"
        ) from None


def _words(text: str) -> list[str]:
    """Split at blanks outside of quotation marks. A `\\` stays, as it begins a line break or a tab. Raises ValueError."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    return list(lexer)


_SWITCH = {"on": True, "true": True, "off": False, "false": False}
