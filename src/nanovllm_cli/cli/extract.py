"""The first fenced code block of an answer (CommonMark 0.31, section 4.5), also where a list has indented it."""

from __future__ import annotations

import re
from typing import NamedTuple

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^\n]*)")


class CodeBlock(NamedTuple):
    """closed: False where the answer ended inside the block."""

    text: str
    closed: bool


def first_code_block(answer: str) -> CodeBlock | None:
    """The block's lines without its fences and without its indentation, or None where there is none."""
    lines = answer.splitlines(keepends=True)
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None or (fence[2][0] == "`" and "`" in fence[3]):
            continue
        block: list[str] = []
        for inner in lines[number + 1 :]:
            if _closes(inner, fence[2]):
                return CodeBlock("".join(block), True)
            block.append(_dedented(inner, len(fence[1])))
        return CodeBlock("".join(block), False)
    return None


def _closes(line: str, opening: str) -> bool:
    text = line.strip()
    return len(text) >= len(opening) and set(text) == {opening[0]}


def _dedented(line: str, width: int) -> str:
    blank = len(line) - len(line.lstrip(" \t"))
    return line[min(width, blank) :]
