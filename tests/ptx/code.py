"""PTX as text into what the machine runs (machine.h): instructions with their operands in a thread's registers."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SPECIALS = ("%tid", "%ntid", "%ctaid", "%nctaid")  # by axis; in the machine's order
LANE, WARP = 12, 13
PARAM_BYTES = 8
"""Each parameter takes so many, whatever its type."""
# Like machine.h's Line.
LINE = np.dtype(
    [(name, np.int32) for name in ("meaning", "guard", "negated", "first", "count", "bytes", "width", "is_signed")]
    + [("extra", np.int64), ("line", np.int32)],
    align=True,
)
# Shared memory begins behind what the system takes of it on newer GPUs. What is asked for with dynamic_bytes comes last, on the
# boundary that it is declared with and on none beyond.
RESERVED_BYTES = 1024
POISON = 0xFFFF_FFFF_FFFF_FFFF

_STATEMENT = re.compile(r"(?:@(?P<not>!?)(?P<guard>[%\w]+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<operands>[^;]*);", re.DOTALL)
_LABEL = re.compile(r"([$\w]+):(?!:)")
_VARIABLE = re.compile(
    r"\.(?P<space>shared|local)\s+\.align\s+(?P<align>\d+)\s+\.[bsu](?P<bits>\d+)\s+(?P<name>[$\w]+)(?:\[(?P<count>\d*)\])?;"
)
_DIRECTIVE = re.compile(r"\.(?:reg\s+\.\w+\s+(?P<registers>[^;]*)|(?:shared|local|pragma)\s[^;]*);")
_MEMORY = re.compile(
    r"(?P<name>ld|st)(?:\.volatile)?(?P<space>\.(?:global|shared|local|param))?(?:\.(?:cg|nc|L1::\w+|L2::\w+))*"
    r"(?:\.v(?P<width>[24]))?\.(?P<type>[bsuf])(?P<bits>\d+)"
)
_MOVE = re.compile(r"mov\.[bu](32|64)")
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+")
_NUMBER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+)U?$")


class UnknownCode(AssertionError):
    """An instruction, a name or a form that the machine has no meaning for."""


class Code(NamedTuple):
    """lines: of LINE. registers: as they are when a thread starts. specials: (register, which). num_params: of the entry.
    shared_bytes: declared, from RESERVED_BYTES on; dynamic_at is where the launch's own begin. max_threads: of a block."""

    lines: np.ndarray
    operands: np.ndarray
    registers: np.ndarray
    specials: np.ndarray
    num_params: int
    shared_bytes: int
    dynamic_at: int
    local_bytes: int
    max_threads: int


@dataclass
class _Entry:
    """What is known while the lines of an entry are read."""

    meaning: Callable[[str], int]
    names: list[dict[str, int]] = field(default_factory=lambda: [{}])  # registers, by scope
    numbered: set[str] = field(default_factory=set)  # what the numbered ones begin with
    registers: list[int] = field(default_factory=list)  # values at the start
    constants: dict[int, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)  # addresses in their space
    labels: dict[str, int] = field(default_factory=dict)
    branches: list[tuple[int, str]] = field(default_factory=list)
    specials: list[tuple[int, int]] = field(default_factory=list)
    lines: list[tuple[int, ...]] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)

    def register(self, name: str) -> int:
        for scope in reversed(self.names):
            if name in scope:
                return scope[name]
        which = _special(name)
        if which is None and name.rstrip("0123456789") not in self.numbered:
            raise UnknownCode(f"a name that nothing declares: {name}")
        self.names[0][name] = self._new(POISON)
        if which is not None:
            self.specials.append((self.names[0][name], which))
        return self.names[0][name]

    def constant(self, value: int) -> int:
        value &= POISON
        if value not in self.constants:
            self.constants[value] = self._new(value)
        return self.constants[value]

    def declare(self, names: str) -> None:
        """Of registers in this scope; or numbered ones, like `%r<9>`."""
        for name in names.split(","):
            if "<" in name:
                self.numbered.add(name.strip().partition("<")[0])
            else:
                self.names[-1][name.strip()] = self._new(POISON)

    def operand(self, text: str) -> int:
        if text == "_":
            return self._new(POISON)
        if text[0] == "0" and text[1:2] in ("f", "F", "d", "D") and len(text) in (10, 18):
            return self.constant(int(text[2:], 16))
        if _NUMBER.match(text):
            return self.constant(int(text.rstrip("U"), 0))
        if re.match(r"\d+\.\d+$", text):
            return self.constant(struct.unpack("<I", struct.pack("<f", float(text)))[0])
        if text in self.symbols:
            return self.constant(self.symbols[text])
        return self.register(text)

    def add(
        self, line: int, guard: tuple[int, bool], name: str, operands: list[int], shape: tuple[int, int, bool], extra: int
    ) -> None:
        """shape: bytes of an element in memory, how many, whether they are signed. extra: see machine.h."""
        meaning = self.meaning(name)
        if meaning < 0:
            raise UnknownCode(f"line {line}: an instruction without a meaning: {name}")
        bytes, width, is_signed = shape
        first = len(self.operands)
        self.operands += operands
        self.lines.append((meaning, *guard, first, len(operands), bytes, width, is_signed, extra, line))

    def _new(self, value: int) -> int:
        self.registers.append(value)
        return len(self.registers) - 1


def read(text: str, entry: str, meaning: Callable[[str], int]) -> Code:
    """The code of one entry. meaning: the number of an instruction's name in the machine, negative where it has none."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(rf"\.entry {re.escape(entry)}\((?P<params>.*?)\)(?P<limits>[^{{]*)\{{", text, re.DOTALL)
    if found is None:
        raise UnknownCode(f"no entry {entry}")
    params = re.findall(r"\.param\s+\.[usf](?:32|64)\s+(\w+)", found["params"])
    if len(params) != found["params"].count(".param"):
        raise UnknownCode("a parameter that is neither a number nor an address")
    known = _Entry(meaning)
    known.symbols = {name: PARAM_BYTES * place for place, name in enumerate(params)}
    at, local_bytes, dynamic = RESERVED_BYTES, 0, None
    end = _end(text, found.end())
    for declared in _VARIABLE.finditer(text, 0, end):
        align, size = int(declared["align"]), int(declared["bits"]) // 8 * int(declared["count"] or 1)
        if declared["space"] == "local":
            known.symbols[declared["name"]] = place = -(-local_bytes // align) * align
            local_bytes = place + size
        elif declared["count"] == "":
            dynamic = declared["name"], align
        else:
            known.symbols[declared["name"]] = place = -(-at // align) * align
            at = place + size
    shared_bytes = at - RESERVED_BYTES
    if dynamic is not None:
        name, align = dynamic
        at = -(-at // align) * align
        at += align if at % (2 * align) == 0 else 0
        known.symbols[name] = at
    for statement in _statements(text, found.end(), end, known):
        _add(known, *statement)
    lines = np.array(known.lines, LINE)
    for place, label in known.branches:
        if label not in known.labels:
            raise UnknownCode(f"no label {label}")
        lines["extra"][place] = known.labels[label]
    specials = np.array(known.specials, np.int32).reshape(-1, 2)
    operands, registers = np.array(known.operands, np.int32), np.array(known.registers, np.uint64)
    limit = re.search(r"\.maxntid (\d+)", found["limits"])
    max_threads = int(limit[1]) if limit else 1024
    return Code(lines, operands, registers, specials, len(params), shared_bytes, at, local_bytes, max_threads)


def _end(text: str, at: int) -> int:
    """Where the braces that are open at a place are closed."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise UnknownCode("an entry without an end")


def _statements(text: str, at: int, end: int, known: _Entry) -> Iterator[tuple[int, re.Match[str]]]:
    """Instructions with their lines. Scopes, labels and declarations change what is known."""
    line, counted = text.count("\n", 0, at) + 1, at
    while True:
        while at < end and text[at].isspace():
            at += 1
        if at >= end:
            return
        line, counted = line + text.count("\n", counted, at), at
        if text[at] == "{":
            known.names.append({})
            at += 1
        elif text[at] == "}":
            known.names.pop()
            at += 1
        elif directive := _DIRECTIVE.match(text, at):
            if directive["registers"]:
                known.declare(directive["registers"])
            at = directive.end()
        elif label := _LABEL.match(text, at):
            known.labels[label[1]] = len(known.lines)
            at = label.end()
        elif statement := _STATEMENT.match(text, at):
            yield line, statement
            at = statement.end()
        else:
            raise UnknownCode(f"line {line}: {text[at : at + 60]!r}")


def _add(known: _Entry, line: int, statement: re.Match[str]) -> None:
    name, texts = statement["name"], _OPERAND.findall(statement["operands"])
    guard = (known.register(statement["guard"]), statement["not"] == "!") if statement["guard"] else (-1, False)
    shape, extra = (0, 1, False), 0
    if name == "bra" or name == "bra.uni":
        known.branches.append((len(known.lines), texts[0]))
        known.add(line, guard, "bra", [], shape, 0)
        return
    if memory := _MEMORY.fullmatch(name):
        name = memory["name"] + (memory["space"] or "")
        shape = int(memory["bits"]) // 8, int(memory["width"] or 1), memory["type"] == "s"
        if shape[0] * shape[1] > 16:
            raise UnknownCode(f"line {line}: more than 16 bytes at once")
    elif _MOVE.fullmatch(name) and any(text[0] == "{" for text in texts):
        parts = max(text.count(",") + 1 for text in texts)
        shape = int(name[-2:]) // 8 // parts, parts, False
        name = "mov.unpack" if texts[0][0] == "{" else "mov.pack"
    elif name.startswith("shfl."):
        if "|" not in statement["operands"]:
            texts.insert(1, "_")
    elif "|" in statement["operands"]:
        raise UnknownCode(f"line {line}: two results")
    operands: list[int] = []
    for text in texts:
        if text[0] == "{":
            operands += [known.operand(part.strip()) for part in text[1:-1].split(",")]
        elif text[0] == "[":
            address = _ADDRESS.fullmatch(text)
            if address is None:
                raise UnknownCode(f"line {line}: an address like {text}")
            operands.append(known.operand(address[1]))
            extra = int(address[2] or 0)
        else:
            operands.append(known.operand(text))
    if extra and not (memory or name.startswith(("atom", "ldmatrix"))):
        raise UnknownCode(f"line {line}: an address with an offset")
    known.add(line, guard, name, operands, shape, extra)


def _special(name: str) -> int | None:
    """Which of the machine's special registers it is."""
    kind, _, axis = name.partition(".")
    if kind in SPECIALS and axis in ("x", "y", "z"):
        return 3 * SPECIALS.index(kind) + "xyz".index(axis)
    return {"%laneid": LANE, "%warpid": WARP}.get(name)
