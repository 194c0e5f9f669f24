"""What the pages name is there: rooms and their tiers, files, what stands in them, and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

import costs
from nanovllm_cli.cli.command_tree import page
from nanovllm_cli.cli.program import PROGRAM, build
from test_imports import FILES, PACKAGE, TIERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {path.name for top in ("src", "tests", "scripts", "benchmarks") for path in (ROOT / top).rglob("*.*")}
OTHERS = {
    "--install", "--index-url", "--memory", "--cpus", "--cpuset-cpus", "--spec-type", "--strict", "--platform", "--cache-dir",
    "--write",
}  # fmt: skip
"""Options of other programs, and of scripts."""
NO_MODULES = {"cuda.core", "model.safetensors", "reasoning.encrypted_content"}
"""A package, a file and a field, whose beginnings are called as modules are."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_tiers_that_are_told_are_those_that_are_held() -> None:
    told = {}
    for tier, rooms in re.findall(r"^\| (\d) \| (.*?) \|", text_of(ROOT / "docs" / "architecture.md"), re.MULTILINE):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", rooms), int(tier))
    assert told == TIERS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_files_that_a_page_names_are_there(path: Path) -> None:
    named = set(re.findall(r"(?<![\w…*<])(\w+\.(?:py|cu|cuh))\b", text_of(path)))
    placeholders = {name for name in named if re.search(r"(^|_)x(_|\.)", name)}
    assert sorted(named - placeholders - NAMES) == []


def test_each_room_of_the_package_has_its_line() -> None:
    told = text_of(ROOT / "docs" / "architecture.md").partition("## Files")[2]
    rooms = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.*") if "__pycache__" not in path.parts}
    assert {room for room in rooms if not re.search(rf"^  {re.escape(room)}[/ ]", told, re.MULTILINE)} <= {
        "__init__.py", "__main__.py", "py.typed",
    }  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_a_page_names_of_a_module_stands_in_it(path: Path) -> None:
    """`module.name`, with or without the module's room."""
    wrong = set()
    for module, name in re.findall(r"`(?:\w+/)*([a-z_0-9]+)\.([A-Za-z_]+)(?:\([^`]*\))?`", text_of(path)):
        files = [file for file in FILES if file.stem == module and name not in ("py", "cu", "h", "md", "json")]
        stands = re.compile(rf"^ *(?:(?:async )?def |class )?{name}\b|\b{name} = ", re.MULTILINE)
        if files and not any(stands.search(text_of(file)) for file in files):
            wrong.add(f"{module}.{name}")
    assert wrong <= NO_MODULES


def test_what_is_told_of_costs_is_what_counts() -> None:
    told = " ".join(text_of(ROOT / "CONTRIBUTING.md").split())
    assert f"as many run as fit {costs.SECONDS:g} s; what takes more than {costs.DEAR:g} s takes turns" in told
    assert f"with other commits, {costs.RAREST} at the most" in told


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_options_that_a_page_names_are_there(path: Path) -> None:
    root = page(get_command(build()), PROGRAM)
    known = {flag for each in root.every() for option in each.options for flag in (*option.flags, *option.off)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text_of(path)))
    assert sorted(named - known - OTHERS) == []


RANGE = r"([\d.]+) to ([\d.]+)"


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ("Zen 4", rf"On a Zen 4 .*?: prefill {RANGE} .*? one sequence {RANGE} .*? four together {RANGE}\."),
        ("Zen 3", rf"\(Zen 3\), .*?: prefill {RANGE}, one sequence {RANGE}, sixteen {RANGE}\."),
    ],
)
def test_what_the_readme_says_of_other_machines_was_measured_there(machine: str, sentence: str) -> None:
    """The least and the most of a column; one sequence of gpt-oss is told apart."""
    rows = re.search(rf"^\| {machine}, against .*?\n\n", text_of(ROOT / "docs/measuring.md"), re.MULTILINE | re.DOTALL)
    told = re.search(sentence, " ".join(text_of(ROOT / "README.md").split()))
    assert rows is not None
    assert told is not None
    columns = zip(*(row.split("|")[2:-1] for row in rows[0].strip().splitlines()[2:]), strict=True)
    found = [sorted(set(re.findall(r"= ([\d.]+)", " ".join(each))) - {"1.01"}, key=float) for each in columns]
    assert list(told.groups()) == [end for each in (found[0], found[1], found[-1]) for end in (each[0], each[-1])]
