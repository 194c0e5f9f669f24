"""What `--help` prints below its first paragraphs: options in sections, commands with whole summaries, examples."""

from __future__ import annotations

import textwrap
from typing import Any

from nanovllm_cli.cli.command_tree import paragraphs, parameters, sections
from nanovllm_cli.cli.examples import EXAMPLES

_WIDEST_LEFT = 32
_GAP = 2


def write_options(command: Any, formatter: Any) -> None:
    for title, members in sections(parameters(command)).items():
        with formatter.section(title):
            _write_rows(formatter, [(each.synopsis, each.help) for each in members])


def write_commands(group: Any, formatter: Any) -> None:
    shown = [command for command in group.commands.values() if not command.hidden]
    if not shown:
        return
    with formatter.section("Commands"):
        _write_rows(formatter, [(command.name, (paragraphs(command.help) or [""])[0]) for command in shown])


def write_examples(name: str, formatter: Any) -> None:
    """name: the command's, as settings files call it."""
    if name not in EXAMPLES:
        return
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        for line, does in EXAMPLES[name].items():
            formatter.write(f"{indent}{line}\n{indent}    {does}\n")


def _write_rows(formatter: Any, rows: list[tuple[str, str]]) -> None:
    """Two columns; a left side that is too long has a line to itself. Flags are not cut at their hyphens."""
    indent = formatter.current_indent
    left = min(max(len(name) for name, _ in rows), _WIDEST_LEFT) + _GAP
    for name, text in rows:
        lines = textwrap.wrap(text, max(formatter.width - indent - left, 20), break_on_hyphens=False) or [""]
        if len(name) + _GAP > left:
            formatter.write(f"{'':{indent}}{name}\n")
            name = ""
        formatter.write(f"{'':{indent}}{name:{left}}{lines[0]}".rstrip() + "\n")
        for line in lines[1:]:
            formatter.write(f"{'':{indent + left}}{line}\n")
