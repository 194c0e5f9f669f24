"""The form that an answer must have: `--json-schema` and its kin, and the same in a line of `--batch`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_cli.cli.command import FORM, option
from nanovllm_cli.cli.inputs import checked, read_text
from nanovllm_cli.constraint import Constraint, ConstraintKind
from nanovllm_cli.errors import UsageError

FORM_KEYS = ("json_schema", "json_object", "regex", "choice", "grammar", "reasoning_budget")
"""What a line of a batch may ask for, as the options do."""


@dataclass(frozen=True, slots=True)
class FormOptions:
    """What the whole answer must be, behind its reasoning; at most one of them."""

    json_schema: str | None = option(
        "-j", "--json-schema", help="JSON of this schema. @FILE reads it; so does a name that ends in .json.",
        panel=FORM, metavar="JSON|@FILE",
    )
    json_schema_file: str | None = option(
        "-jf", "--json-schema-file", help="JSON of the schema in a file.", panel=FORM, metavar="FILE"
    )
    json_object: bool = option("--json-object", help="Any JSON object.", default=False, panel=FORM)
    regex: str | None = option(
        "--regex", help="What this regular expression matches, whole.", panel=FORM, metavar="REGEX"
    )
    choice: list[str] | None = option("--choice", help="One of these texts. Repeatable.", panel=FORM, metavar="TEXT")
    grammar: str | None = option(
        "--grammar",
        help="What this grammar describes: llama.cpp's GBNF (root ::= …), or Lark (start: …). @FILE reads it.",
        panel=FORM, metavar="TEXT|@FILE",
    )
    grammar_file: str | None = option("--grammar-file", help="The same, from a file.", panel=FORM, metavar="FILE")
    reasoning_budget: int | None = option(
        "--reasoning-budget", help="Most tokens of reasoning; 0 ends it at once. [-1: no limit]", panel=FORM
    )

    def given(self) -> dict[str, Any]:
        """The "constraint" and the "reasoning_budget" that were asked for. Raises UsageError for what no model could follow."""
        schema = self.json_schema
        if schema is not None and schema.rstrip().endswith(".json") and not schema.lstrip().startswith(("{", "@")):
            schema = f"@{schema}"
        return _asked(
            {
                "--json-schema": None if schema is None else ("json_schema", _text(schema)),
                "--json-schema-file": _in_file("json_schema", self.json_schema_file),
                "--json-object": ("json_object", "") if self.json_object else None,
                "--regex": None if self.regex is None else ("regex", self.regex),
                "--choice": ("choice", json.dumps(self.choice)) if self.choice else None,
                "--grammar": None if self.grammar is None else ("grammar", _text(self.grammar)),
                "--grammar-file": _in_file("grammar", self.grammar_file),
            },
            self.reasoning_budget,
            "--reasoning-budget",
        )


def form_of_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of a batch asks for, as `FormOptions.given`. Raises UsageError."""
    schema, choice = line.get("json_schema"), line.get("choice")
    texts = {name: line[name] for name in ("regex", "grammar") if line.get(name) is not None}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"{name} is a text")
    if not isinstance(line.get("json_object"), bool | None):
        raise UsageError("json_object is true or false")
    return _asked(
        {
            "json_schema": None if schema is None else ("json_schema", schema if isinstance(schema, str) else json.dumps(schema)),
            "json_object": ("json_object", "") if line.get("json_object") else None,
            "choice": None if choice is None else ("choice", json.dumps(choice)),
            **{name: (name, text) for name, text in texts.items()},
        },
        line.get("reasoning_budget"),
        "reasoning_budget",
    )


def _asked(found: Mapping[str, tuple[str, str] | None], budget: Any, budget_name: str) -> dict[str, Any]:
    """found: by the name that it was asked for with, the kind of constraint and its text; kind "grammar" is one of two.

    Raises UsageError where two contradict each other, and for what no model could follow.
    """
    asked = [(name, *form) for name, form in found.items() if form is not None]
    if len(asked) > 1:
        raise UsageError(f"{asked[0][0]} and {asked[1][0]} cannot be used together")
    given: dict[str, Any] = {}
    for name, kind, text in asked:
        if _is_nothing(kind, text):
            raise UsageError(f"{name} is empty", "leave it out for an answer of any form")
        from nanovllm_cli.constrain.grammar import check

        constraint = Constraint(_kind(kind, text), checked(text, name))
        check(constraint)
        given["constraint"] = constraint
    if budget is not None:
        if type(budget) is not int or not -1 <= budget < 2**31:
            raise UsageError(f"{budget_name} is a number of tokens, or -1 for no limit")
        given["reasoning_budget"] = budget
    return given


def refuse_with_beams(given: Mapping[str, Any]) -> None:
    """UsageError for a form, or a budget, of answers that are looked for, of which they have none."""
    has_budget = given.get("reasoning_budget", -1) >= 0
    if given.get("num_beams", 1) > 1 and ("constraint" in given or has_budget):
        what = "the reasoning of an answer has no budget" if has_budget else "an answer has no form"
        raise UsageError(f"{what} where it is looked for by --beams", "leave one of them out")


def _is_nothing(kind: str, text: str) -> bool:
    """Whether no answer but an empty one could match: more likely a script's variable that is not set. A choice may be an empty
    text beside others, and an expression a blank."""
    if kind == "choice":
        return text in ("[]", '[""]')
    return kind != "json_object" and not (text if kind == "regex" else text.strip())


def _kind(kind: str, text: str) -> ConstraintKind:
    if kind == "grammar":
        return "gbnf" if "::=" in text else "lark"
    return kind  # type: ignore[return-value]


def _text(value: str) -> str:
    return read_text(value[1:]) if value.startswith("@") else value


def _in_file(kind: str, name: str | None) -> tuple[str, str] | None:
    return None if name is None else (kind, read_text(name))
