"""`--json-schema` and its kin on the command line, in a batch and in a conversation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forked_commands import Commands
from nanovllm_cli.chat import sampling
from nanovllm_cli.cli.form import FormOptions, form_of_line
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.errors import AccessRefusedError, NanovllmError, UsageError
from nanovllm_cli.text.reasoning import HARMONY, THINK

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}'
FINAL = "<|channel|>final<|message|>"
GBNF = 'root ::= "a" | "b"\n'


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    home = tmp_path_factory.mktemp("home")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are
    keep = {name: value for name, value in os.environ.items() if not name.startswith("NANOVLLM_")}
    return Commands(keep | {"HOME": str(home), "XDG_CACHE_HOME": cache, "NANOVLLM_CTX_SIZE": "1024"})


def test_options_and_files_say_the_same(tmp_path: Path) -> None:
    schema, grammar, lark = tmp_path / "s.json", tmp_path / "g.gbnf", tmp_path / "g.lark"
    schema.write_text(SCHEMA)
    grammar.write_text(GBNF)
    lark.write_text('start: "a"')
    wanted = {"constraint": Constraint("json_schema", SCHEMA)}
    for options in (
        FormOptions(json_schema=SCHEMA), FormOptions(json_schema=f"@{schema}"), FormOptions(json_schema=str(schema)),
        FormOptions(json_schema_file=str(schema)),
    ):  # fmt: skip
        assert options.given() == wanted
    for options in (FormOptions(grammar=GBNF), FormOptions(grammar=f"@{grammar}"), FormOptions(grammar_file=str(grammar))):
        assert options.given() == {"constraint": Constraint("gbnf", GBNF)}
    assert FormOptions(grammar_file=str(lark)).given() == {"constraint": Constraint("lark", 'start: "a"')}
    assert FormOptions(regex="@x{2}").given() == {"constraint": Constraint("regex", "@x{2}")}
    assert FormOptions(choice=["a,b", "é"]).given() == {"constraint": Constraint("choice", json.dumps(["a,b", "é"]))}
    assert FormOptions(json_object=True, reasoning_budget=0).given() == {
        "constraint": Constraint("json_object"), "reasoning_budget": 0
    }  # fmt: skip
    assert FormOptions().given() == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "a", "json_object": True}, "--json-object and --regex cannot be used together"),
        ({"grammar": GBNF, "grammar_file": "x"}, "there is no file x"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "@nowhere.json"}, "there is no file nowhere.json"),
        ({"json_schema": "nowhere.json"}, "there is no file nowhere.json"),
        ({"json_schema_file": "/"}, "is a folder"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a\udcff"}, "--regex is not valid Unicode"),
        ({"grammar": "root ::= x"}, "no rule 'x'"),
        ({"grammar": "x: y"}, ""),
        ({"reasoning_budget": -2}, "--reasoning-budget is a number of tokens, or -1"),
    ],
)
def test_options_without_meaning_are_refused_before_a_model_is_there(options: dict[str, Any], said: str) -> None:
    with pytest.raises((UsageError, AccessRefusedError)) as caught:
        FormOptions(**options).given()
    assert said in caught.value.message


def test_lines_of_a_batch_say_it_in_json() -> None:
    assert form_of_line({"json_schema": {"enum": [1]}}) == {"constraint": Constraint("json_schema", '{"enum": [1]}')}
    assert form_of_line({"json_schema": SCHEMA}) == {"constraint": Constraint("json_schema", SCHEMA)}
    assert form_of_line({"choice": ["a"], "reasoning_budget": 5}) == {
        "constraint": Constraint("choice", '["a"]'), "reasoning_budget": 5
    }  # fmt: skip
    assert form_of_line({"grammar": GBNF, "json_object": False}) == {"constraint": Constraint("gbnf", GBNF)}
    assert form_of_line({"prompt": "x"}) == {}
    for line in (
        {"regex": 3}, {"choice": "a"}, {"choice": []}, {"json_object": 1}, {"json_object": "yes"}, {"json_schema": 3},
        {"grammar": ["a"]}, {"regex": "a", "choice": ["b"]}, {"reasoning_budget": True}, {"reasoning_budget": 1.5},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            form_of_line(line)


def test_a_conversation_sets_them_one_after_another() -> None:
    given = sampling.changed({"temperature": 0.5}, sampling.setting("choice"), "red 'dark green'")
    assert given == {"temperature": 0.5, "constraint": Constraint("choice", '["red", "dark green"]')}
    given = sampling.changed(given, sampling.setting("grammar"), 'start: "a"')
    assert given == {"temperature": 0.5, "constraint": Constraint("lark", 'start: "a"')}
    given = sampling.changed(given, sampling.setting("json-object"), "on")
    assert given["constraint"] == Constraint("json_object")
    assert sampling.changed(given, sampling.setting("regex"), sampling.DEFAULT) == {"temperature": 0.5}
    for name, value in (("regex", "("), ("json-schema", "{"), ("num-answers", "2")):
        with pytest.raises(NanovllmError):
            sampling.changed({}, sampling.setting(name), value)


def test_where_reasoning_may_come_first_follows_from_the_prompt() -> None:
    for form in (True, False):
        assert THINK.phase("<|im_start|>assistant\n", to_content=form) == ReasoningPhase("<think>", "</think>")
        assert THINK.phase("assistant\n<think>\n", 5, to_content=form) == ReasoningPhase("<think>", "</think>", True, 5)
        assert THINK.phase("assistant\n<think>\n\n</think>\n\n", 5, to_content=form) is None
        assert HARMONY.phase(f"<|start|>assistant{FINAL}", to_content=form) is None
    for prompt, begun in (("<|start|>assistant", False), (f"<|start|>assistant{HARMONY.open}", True)):
        assert HARMONY.phase(prompt, 9, to_content=True) == ReasoningPhase(HARMONY.open, FINAL, True, 9)
        assert HARMONY.phase(prompt, 9, to_content=False) == ReasoningPhase(HARMONY.open, "<|end|>", begun, 9)


def test_run_answers_in_the_form_that_was_asked_for(commands: Commands) -> None:
    result = commands.run("run", "tiny", "-q", "-n", "200", "-s", "3", "-j", SCHEMA, "Who?")
    assert result.code == 0
    jsonschema.validate(result.json, json.loads(SCHEMA))
    assert commands.run("run", "tiny", "-q", "--raw", "--choice", "this", "--choice", "that", "Who?").out in ("this\n", "that\n")
    refused = commands.run("run", "nowhere/to-be-found", "--offline", "--regex", "(", "Who?")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: the regular expression can't be used: unclosed group")


def test_run_bounds_reasoning_and_constrains_what_follows(commands: Commands) -> None:
    asked = ("run", "tiny", "-q", "--json", "-s", "5", "--think", "on", "-n", "100", "Tell me a story.")
    free = commands.run(*asked, "--reasoning-budget", "3").json["answers"][0]
    assert len(free["reasoning"].split()) <= 3
    assert free["text"]
    forced = commands.run(*asked, "--reasoning-budget", "4", "--choice", "yes", "--choice", "no").json["answers"][0]
    assert forced["text"] in ("yes", "no")
    assert forced["reasoning"]
    assert forced["finish_reason"] == "stop"
    refused = commands.run("run", "tiny", "-q", "--raw", "--reasoning-budget", "4", "Tell me a story.")
    assert refused.code == 2
    assert "--reasoning-budget has no meaning" in refused.err


def test_each_line_of_a_batch_has_its_own_form(commands: Commands, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "regex": "[0-9]{3}"},
        {"prompt": "b", "choice": ["x"], "regex": "y"},
        {"prompt": "c"},
        {"prompt": "d", "json_schema": {"enum": [17]}, "max_tokens": 50},
        {"prompt": "e", "grammar": "start: <no-such-token>"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = commands.run("run", "tiny", "-q", "--batch", str(tmp_path / "in.jsonl"), "--choice", "option", "-n", "40")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert records[0]["answers"][0]["text"].isdigit()
    assert "cannot be used together" in records[1]["error"]["message"]
    assert records[2]["answers"][0]["text"] == "option"
    assert records[3]["answers"][0]["text"] == "17"
    assert "unknown special token" in records[4]["error"]["message"]
    assert result.code == 1
