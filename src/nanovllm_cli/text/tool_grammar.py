"""Tool calls as grammars: what `tool_choice` and strict tools mean, in llguidance's dialect of Lark.

A special token of the vocabulary matches as that token (`<[id]>`), a tag that is ordinary text matches as text. White space
inside arguments is bounded, as `constrain/grammar.py` has it. Where arguments stand between tags (Qwen3-Coder, GLM) or have names
(Python), they come in the order of the schema, first those that must be there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.tool_calls import Tool, ToolChoice

LINE = "\n?"
"""A part of a grammar: a line break, or none."""
GAP = "[ \n]?"
"""The same, or a space."""
_WHITE_SPACE = r" |\n[ \t]{0,40}"
ANYTHING = "(?s:.*)"
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_PYTHON_ONLY = r"/True|False|None|'([^'\\\n]|\\[^xuU\n])*'/"
COMBINATIONS = frozenset(("$ref", "anyOf", "oneOf", "allOf", "not", "if"))
NOTES = frozenset((
    "type", "title", "description", "default", "examples", "enum", "const", "$defs", "definitions", "$schema", "$id", "$comment",
))  # fmt: skip
"""Keywords that hold nobody to anything by themselves, or are looked at everywhere."""
EITHER = "leave out the form or the tools; a request may also set tool_choice to none or required"
TEXT_KEYWORDS = frozenset(("type", "title", "description", "default", "examples", "enum", "const", "minLength", "maxLength"))


class Marked(str):
    """A tag of which a part in the middle, the mark, may be a token of its own."""

    mark: str

    def __new__(cls, before: str, mark: str, behind: str) -> Marked:
        tag = super().__new__(cls, before + mark + behind)
        tag.mark = mark
        return tag


class Writer:
    """Expressions of one grammar, and the rules that they need."""

    def __init__(self, special_tokens: Mapping[str, int], names: Sequence[str] = ()) -> None:
        """names: of the tools."""
        self._special, self.names = special_tokens, names
        self._numbers = count()
        self._shared: dict[str, str] = {}
        self.rules: list[str] = []

    def is_token(self, text: str) -> bool:
        """Whether there is a token in it, so that ordinary text can't be the same."""
        return (text.mark if isinstance(text, Marked) else text) in self._special

    def sequence(self, *parts: str) -> str:
        """Tags and other fixed text behind each other."""
        return " ".join(self._part(part) for part in parts if part)

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        return self._add(f"r{next(self._numbers)}", options, body)

    def once(self, key: str, build: Callable[[str], str]) -> str:
        """The name of the rule for `key`, made at its first use. build: its body; it is told the name, and may use the rule."""
        if key not in self._shared:
            self._shared[key] = name = f"r{next(self._numbers)}"
            self._add(name, "", build(name))
        return self._shared[key]

    def terminal(self, body: str) -> str:
        """The name of a new terminal: regular expressions, and what combines them."""
        return self._add(f"T{next(self._numbers)}", "", body)

    def text_before(self, tag: str, pattern: str = ANYTHING, without: str = "") -> str:
        """Text that matches a pattern, up to where `tag` stands first; the tag is included. without: see `_without`; only where
        the tag is a token."""
        if not self.is_token(tag):
            return self.rule(f"/{pattern}/", f"[suffix={quoted(tag)}]")
        if not isinstance(tag, Marked):
            return f"{self.terminal(f'/{pattern}/{without}')}? {self.sequence(tag)}"
        before, _, behind = tag.partition(tag.mark)
        text = self.terminal(f"/{pattern}{escaped(before)}/{without}")
        return f"{text if before else f'{text}?'} {self.sequence(tag.mark, behind)}"

    def anything(self) -> str:
        """Any text, or none."""
        return f"{self.terminal(f'/{ANYTHING}/')}?"

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """A value of this schema. strict: keywords that can't be held to are an error."""
        options = {"whitespace_pattern": _WHITE_SPACE, "lenient": not strict}
        return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)

    def _add(self, name: str, options: str, body: str) -> str:
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _part(self, part: str) -> str:
        if part == LINE:
            return f"{quoted(LINE[0])}?"
        if part == GAP:
            return f'({quoted(" ")} | {quoted(LINE[0])})?'
        if isinstance(part, Marked) and self.is_token(part):
            before, _, behind = part.partition(part.mark)
            return self.sequence(before, part.mark, behind)
        return f"<[{self._special[part]}]>" if part in self._special else quoted(part)


class Bound(NamedTuple):
    """A tool as a grammar is to hold an answer to it. schema: of all its arguments. strict: what can't be held to is an error,
    and not just left to the model."""

    name: str
    schema: Mapping[str, Any]
    strict: bool

    @classmethod
    def of(cls, tool: Tool, choice: ToolChoice) -> Bound:
        """Where the model is free to call or not, only strict tools are held to their schema. A tool without one takes
        nothing."""
        if choice == "auto" and not tool.strict:
            return cls(tool.name, {"type": "object"}, False)
        if not tool.parameters:
            return cls(tool.name, {"type": "object", "properties": {}, "additionalProperties": False}, tool.strict)
        return cls(tool.name, {"type": "object", **tool.parameters}, tool.strict)

    def arguments(self, writer: Writer) -> str:
        """All arguments as an object."""
        return writer.json(self.schema, strict=self.strict)

    def argument(self, writer: Writer, schema: Mapping[str, Any]) -> str:
        """A single one, of this schema, as JSON."""
        definitions = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        return writer.json({**definitions, **schema}, strict=self.strict)


WriteCall = Callable[[Writer, Bound], str]
"""An expression for one call."""


@dataclass(frozen=True)
class CallGrammar:
    """How calls stand in an answer: trigger before call (between call)* after.

    trigger: what begins a call in the middle of a text. Without one, calls are the whole answer, known by its first character.
    """

    call: WriteCall
    trigger: str = ""
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def section(self, writer: Writer, call: str, *, parallel: bool) -> str:
        """What follows the trigger."""
        further = f"({writer.sequence(*self.between)} {call})*" if parallel and self.between else ""
        return f"{writer.sequence(*self.before)} {call} {further} {writer.sequence(*self.after)}"

    def demanded(self, writer: Writer, call: str, *, parallel: bool, reasons: bool) -> str:
        """An answer that is calls. reasons: line breaks may come first, behind the reasoning."""
        lead = writer.terminal(r"/[ \n]{1,4}/") + "? " if reasons else ""
        return f"{lead}{writer.sequence(self.trigger)} {self.section(writer, call, parallel=parallel)}"

    def content(self, writer: Writer, form: str) -> str:
        """An answer in a form of its own. Where nothing marks a call, llguidance's lexer cannot tell the two apart in time."""
        if not self.trigger:
            raise UnsupportedError(
                "this model's calls are not marked, so a form does not go with tools that may be called",
                EITHER,
            )
        return form

    def no_call(self, writer: Writer) -> str:
        """What keeps a terminal from matching text that begins a call."""
        return "" if not self.trigger or writer.is_token(self.trigger) else _without(self.trigger)

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        """Any text, in which a call, once begun, is a known one. openers: whatever else begins a call is not written."""
        section = self.section(writer, call, parallel=parallel)
        without = "".join(_without(tag) for tag in openers if tag != self.trigger and not writer.is_token(tag))
        if not self.trigger:
            text = writer.terminal(rf"/\s*([^\s{{\[](?s:.*))?/{without}")
            return f"{text}? | {section}"
        text = writer.terminal(f"/{ANYTHING}/{without}")
        if writer.is_token(self.trigger):
            head = writer.text_before(self.trigger, without=without)
        else:
            head = writer.rule(f"{text} {quoted(self.trigger)}", "[lazy]")
        return f"({head} {section}){'*' if parallel else '?'} {text}?"


class SolarGrammar(CallGrammar):
    """Of Solar Open: content and calls are messages of their own, which the prompt or the answer begins."""

    def demanded(self, writer: Writer, call: str, *, parallel: bool, reasons: bool) -> str:
        return f"{self._begin(writer)} {super().demanded(writer, call, parallel=parallel, reasons=False)}"

    def content(self, writer: Writer, form: str) -> str:
        return f"{self._begin(writer)} {writer.sequence('<|content|>')} {form}"

    def no_call(self, writer: Writer) -> str:
        return ""

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        said = f"{writer.sequence('<|content|>')} {writer.anything()}"
        called = f"{writer.sequence(self.trigger)} {self.section(writer, call, parallel=parallel)}"
        return f"{self._begin(writer)} ({said} | {called})"

    def _begin(self, writer: Writer) -> str:
        return f"({writer.sequence('<|begin|>', 'assistant')})?"


class HarmonyGrammar:
    """Of gpt-oss: a call is a message of its own, and ends the answer."""

    def call(self, writer: Writer, tool: Bound) -> str:
        kind = f"({quoted(' ')} {writer.sequence('<|constrain|>', 'json')})?"
        head = writer.sequence("<|channel|>", f"commentary to=functions.{tool.name}")
        return f"{head} {kind} {writer.sequence('<|message|>')} {tool.arguments(writer)}"

    def demanded(self, writer: Writer, call: str, *, parallel: bool, reasons: bool) -> str:
        return f"({self.begin(writer)})? {call}"

    def content(self, writer: Writer, form: str) -> str:
        return f"({self.begin(writer)})? {writer.sequence('<|channel|>', 'final', '<|message|>')} {form}"

    def no_call(self, writer: Writer) -> str:
        return ""  # a call has a channel of its own

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        head = f'{writer.sequence("<|channel|>")} ("analysis" | "commentary" | "final") {writer.sequence("<|message|>")}'
        message = f"{head} {writer.text_before('<|end|>')} {self.begin(writer)}"
        return f"({self.begin(writer)})? ({message})* ({head} {writer.anything()} | {call})"

    def begin(self, writer: Writer) -> str:
        """Of a message, which the prompt may have written."""
        return writer.sequence("<|start|>", "assistant")


def content(writer: Writer, form: Constraint, grammar: CallGrammar | HarmonyGrammar) -> str:
    """An answer that is no call, in the form that was asked for. A grammar is one of its own inside of this one: it must be known
    to be one, and what it is made of cannot be kept from beginning a call as terminals are."""
    assert form.kind != "gbnf", "it comes as Lark"
    if form.kind == "lark":
        if grammar.no_call(writer):
            raise UnsupportedError(
                "this model's calls begin with ordinary text, so a grammar does not go with tools that may be called",
                EITHER,
            )
        return grammar.content(writer, writer.rule(f"%lark {{\n{form.text}\n}}"))
    if form.kind in ("regex", "choice"):
        chosen = form.kind == "choice"
        text = " | ".join(map(quoted, json.loads(form.text))) if chosen else f"/{_between_slashes(form.text)}/"
        return grammar.content(writer, writer.terminal(f"({text}){grammar.no_call(writer)}"))
    schema = json.loads(form.text) if form.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, Mapping):
        raise UsageError("the JSON schema is not an object")
    return grammar.content(writer, writer.json(schema, strict=True))


# ---- calls ----


def json_call(key: str = "arguments", *, open: str = "", close: Sequence[str] = ()) -> WriteCall:
    """{"name": …, "arguments": {…}}. open, close: what stands around it."""

    def write(writer: Writer, tool: Bound) -> str:
        head = f'{open}{{"name": {quoted(tool.name)}, "{key}": '
        return f"{writer.sequence(head)} {tool.arguments(writer)} {writer.sequence('}', *close)}"

    return write


def named_call(before: Sequence[str], between: Sequence[str], after: Sequence[str] = ()) -> WriteCall:
    """A name and JSON, with fixed text around them."""

    def write(writer: Writer, tool: Bound) -> str:
        head = writer.sequence(*before, tool.name, *between)
        return f"{head} {tool.arguments(writer)} {writer.sequence(*after)}"

    return write


def mistral_call(writer: Writer, tool: Bound) -> str:
    """A name, which an id may follow, and JSON."""
    call_id = f"({writer.sequence('[CALL_ID]')} {writer.terminal('/[a-zA-Z0-9]{9}/')})?"
    return f"{quoted(tool.name)} {call_id} {writer.sequence('[ARGS]')} {tool.arguments(writer)}"


def kimi_call(writer: Writer, tool: Bound) -> str:
    """functions.NAME:NUMBER and JSON."""
    number = writer.terminal("/[0-9]{1,4}/")
    head = f"{writer.sequence(f'functions.{tool.name}:')} {number} {writer.sequence('<|tool_call_argument_begin|>')}"
    return f"{head} {tool.arguments(writer)} {writer.sequence('<|tool_call_end|>')}"


def cohere_call(writer: Writer, tool: Bound) -> str:
    """{"tool_call_id": "NUMBER", "tool_name": …, "parameters": {…}}."""
    number = writer.terminal("/[0-9]{1,4}/")
    head = writer.sequence('{"tool_call_id": "')
    name = writer.sequence(f'", "tool_name": {quoted(tool.name)}, "parameters": ')
    return f"{head} {number} {name} {tool.arguments(writer)} {writer.sequence('}')}"


def action_call(writer: Writer, tool: Bound) -> str:
    """{"tool_name": …, "parameters": {…}}, in lines."""
    head = writer.sequence(f'{{\n        "tool_name": {quoted(tool.name)},\n        "parameters": ')
    end = writer.sequence("\n    }")
    return f"{head} {tool.arguments(writer)} {end}"


def solar_call(writer: Writer, tool: Bound) -> str:
    """An id of ten letters and digits, a name, and JSON."""
    call_id = writer.terminal("/[a-z0-9]{10}/")
    name = writer.sequence("<|tool_call:name|>", tool.name, "<|tool_call:args|>")
    return f"{call_id} {name} {tool.arguments(writer)} {writer.sequence('<|tool_call:end|>')}"


def python_call(writer: Writer, tool: Bound) -> str:
    """name(argument=value, …), values as JSON writes them. Where any argument will do, also some that only Python knows."""
    required, optional = parameters(tool)
    pieces = {
        name: f"{quoted(name + '=')} {tool.argument(writer, schema)}" for name, schema in (required | optional).items()
    }
    comma = quoted(", ")
    if not pieces and tool.schema.get("additionalProperties") is not False:
        value = f"({writer.json({}, strict=False)} | {writer.terminal(_PYTHON_ONLY)})"
        any_argument = writer.rule(f"{writer.terminal(ANY_KEY)} {quoted('=')} {value}")
        body = f"({any_argument} ({comma} {any_argument})*)?"
    elif required:
        body = f" {comma} ".join(pieces[name] for name in required)
        body += "".join(f" ({comma} {pieces[name]})?" for name in optional)
    else:
        names = list(optional)
        lists = [
            pieces[name] + "".join(f" ({comma} {pieces[later]})?" for later in names[place + 1 :])
            for place, name in enumerate(names)
        ]
        body = f"({' | '.join(lists)})?" if lists else ""
    return f"{quoted(tool.name + '(')} {body} {quoted(')')}"


def parameters(tool: Bound) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of the arguments that must be there, and of those that may."""
    open_ended = sorted(COMBINATIONS.intersection(tool.schema))
    if open_ended and tool.strict:
        raise UnsupportedError(
            f"the strict tool {tool.name!r} combines schemas by {open_ended[0]!r}, which this model's calls can't be held to",
            "give it plain properties, or leave strict out",
        )
    properties = tool.schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise UsageError(f"the properties of the tool {tool.name!r} are not an object")
    schemas = {name: schema if isinstance(schema, Mapping) else {} for name, schema in properties.items()}
    required = listed(tool.schema, "required", tool) if "required" in tool.schema else []
    return (
        {name: schema for name, schema in schemas.items() if name in required},
        {name: schema for name, schema in schemas.items() if name not in required},
    )


def check_keywords(schema: Mapping[str, Any], known: Set[str], tool: Bound) -> None:
    """Raises UnsupportedError where a strict tool has others in its schema."""
    if tool.strict and (unknown := sorted(schema.keys() - known)):
        raise UnsupportedError(
            f"the strict tool {tool.name!r} has {unknown[0]!r} in its schema: this model's calls can't be held to it",
            "leave that keyword out, or leave strict out",
        )


def choices_in(schema: Mapping[str, Any], tool: Bound) -> Sequence[Any] | None:
    """The values that a schema lists; None where it does not."""
    if "const" in schema:
        return [schema["const"]]
    return None if schema.get("enum") is None else listed(schema, "enum", tool)


def listed(schema: Mapping[str, Any], keyword: str, tool: Bound) -> Sequence[Any]:
    value = schema[keyword]
    if not isinstance(value, list | tuple):
        raise UsageError(f"{keyword!r} in the schema of the tool {tool.name!r} is not a list")
    return value


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _between_slashes(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    lines = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "\r": r"\r", "\\\r": r"\r"}
    return re.sub(r"\\.|[/\n\r]", lambda match: lines.get(match.group(), match.group()), pattern, flags=re.DOTALL)


def _without(tag: str) -> str:
    """Behind a terminal: it matches no text that `tag` stands in."""
    return f" & ~/{ANYTHING}{escaped(tag)}{ANYTHING}/"


def escaped(text: str) -> str:
    """Text as a regular expression between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
