"""Rules of GBNF that do not refer to themselves, as regular expressions."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm_cli.constrain.gbnf_syntax import MAX_NESTING, Choice, Name, Node, Repeat, Rules, Sequence, Terminal

_MAX_EXPRESSION = 20_000


class NoExpression(Exception):
    """A rule refers to itself, or its expression grows too large."""


@dataclass
class Expressions:
    """Rules are written into each other. An expression reads a text in every way, as GBNF does."""

    rules: Rules
    known: dict[str, str] = field(default_factory=dict)

    def of(self, node: Node) -> str:
        """Raises NoExpression."""
        return self._node(node, 0)

    def _rule(self, name: str, depth: int) -> str:
        if name not in self.known:
            self.known[name] = self._node(self.rules[name], depth + 1)
        return self.known[name]

    def _node(self, node: Node, depth: int) -> str:
        if depth > MAX_NESTING:  # which is where recursion ends, too
            raise NoExpression
        match node:
            case Terminal(expression):
                text = expression
            case Name(rule):
                text = self._rule(rule, depth)
            case Sequence(parts):
                text = self._bounded(parts, depth, "")
            case Choice(ways):
                text = f"(?:{self._bounded(ways, depth, '|')})"
            case Repeat(part, low, high):
                text = f"(?:{self._node(part, depth + 1)}){{{low},{'' if high is None else high}}}"
        if len(text) > _MAX_EXPRESSION:
            raise NoExpression
        return text

    def _bounded(self, nodes: tuple[Node, ...], depth: int, between: str) -> str:
        texts, size = [], 0
        for node in nodes:
            texts.append(self._node(node, depth + 1))
            size += len(texts[-1])
            if size > _MAX_EXPRESSION:
                raise NoExpression
        return between.join(texts)
