"""llama.cpp's grammars (GBNF) as llguidance reads them.

A grammar in which no rule refers to itself becomes one regular expression. Any other becomes Lark, with lexemes as long as they
can be without changing what it says (gbnf_lexemes.py), or else with a lexeme for every character.
Repetitions become left recursions, which an Earley parser reads in linear time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llguidance import LLMatcher

from nanovllm_cli.constrain.gbnf_expressions import Expressions, NoExpression
from nanovllm_cli.constrain.gbnf_lexemes import with_lexemes
from nanovllm_cli.constrain.gbnf_syntax import Choice, Name, Node, Repeat, Rules, Sequence, Terminal, read_gbnf

_NOTHING = '""'


def grammars_of_gbnf(text: str) -> list[str]:
    """The grammar, which starts with `root`, for llguidance; of several texts that say the same, the quickest first. Raises
    UsageError, with the line, for what is no GBNF."""
    rules = read_gbnf(text)
    letter_by_letter = _Lark(rules).text()
    try:
        return [LLMatcher.grammar_from_regex(Expressions(rules).of(rules["root"])), letter_by_letter]
    except NoExpression:
        lexemes = with_lexemes(rules)
        return [letter_by_letter] if lexemes is None else [_Lark(lexemes).text(), letter_by_letter]


def lark_of_gbnf(text: str) -> str:
    """The grammar as Lark, letter by letter, to be a part of a greater one. Raises UsageError as above."""
    return _Lark(read_gbnf(text)).text()


@dataclass
class _Lark:
    """A rule is r0, r1, … in order of first sight; what repeats gets rules of its own, x1, x2, …"""

    rules: Rules
    lines: list[str] = field(default_factory=list)
    num_own: int = 0

    def text(self) -> str:
        self.names = {name: f"r{number}" for number, name in enumerate(self.rules)}
        for name, node in self.rules.items():
            self.lines.append(f"{self.names[name]}: {self._node(node)}")
        return "\n".join(["%llguidance {}", f"start: {self.names['root']}", *self.lines]) + "\n"

    def _node(self, node: Node) -> str:
        match node:
            case Terminal(expression):
                return f"/{expression}/"
            case Name(rule):
                return self.names[rule]
            case Sequence(parts):
                return f"({' '.join(map(self._node, parts))})" if parts else _NOTHING
            case Choice(ways):
                return f"({' | '.join(map(self._node, ways))})"
            case Repeat(part, 0, 1):
                return f"({self._node(part)} | {_NOTHING})"
            case Repeat(part, low, high):
                return self._repeated(self._own(self._node(part)), low, high)

    def _repeated(self, item: str, low: int, high: int | None) -> str:
        if high is None:  # at least low
            name = f"x{self.num_own + 1}"
            return self._own(f"{' '.join([item] * low) or _NOTHING} | {name} {item}")
        # at most high - low more: each rule is one item longer than the last
        more = ""
        for _ in range(high - low):
            more = self._own(f"{_NOTHING} | {item} {more}")
        return "(" + (" ".join([item] * low + [more] * (high > low)) or _NOTHING) + ")"

    def _own(self, body: str) -> str:
        self.num_own += 1
        self.lines.append(f"x{self.num_own}: {body}")
        return f"x{self.num_own}"


