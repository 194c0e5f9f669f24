"""Colours for code, a line at a time, in time linear in its length: the lexer goes on where the last line left it.

Pygments' lexers want whole files. For those made of regular expressions and states (nearly all) this walks their rules
itself, and keeps the stack of states between lines. The last token of a line is lexed again with the next one, so that
a comment or a string may go on; and where one rule matches all of a comment or string, an end is lent to it as long as it
has none. The other lexers see single lines.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nanovllm_cli.chat.flow import PLAIN, Piece

_LANGUAGE = re.compile(r"\s*\{?\.?([^\s,:{}]*).*", re.DOTALL)  # python title="x"; python:a.py; {.python .numberLines}
_MAX_LINE = 2000
_ENDS = {"/*": "*/", "<!--": "-->", "`": "`", "'": "'", '"': '"'}  # of what may go on for several lines
_MAX_IDLE = 100  # rules in a row that match nothing and only change the state
_MAX_CARRIED = 8000  # characters of an unfinished token that are looked at again; what is longer begins anew

# Names as in Pygments' hierarchy of tokens; the nearest ancestor counts.
_STYLES = {
    "Comment": "2;3",
    "Comment.Preproc": "35",
    "Keyword": "35",
    "Keyword.Constant": "36",
    "Literal.Number": "36",
    "Literal.String": "32",
    "Literal.String.Interpol": "36",
    "Name.Function": "34",
    "Name.Class": "34;1",
    "Name.Decorator": "35",
    "Name.Builtin": "36",
    "Name.Tag": "34",
    "Name.Attribute": "36",
    "Operator.Word": "35",
    "Generic.Deleted": "31",
    "Generic.Inserted": "32",
    "Generic.Heading": "1",
    "Generic.Subheading": "35",
    "Generic.Prompt": "2",
}

log = logging.getLogger(__name__)

_Token = tuple[int, Any, str]
_Stack = list[str]


class Highlighter:
    """One block of code. info: what stands behind its fence, whose first word is the language; an unknown one is plain."""

    def __init__(self, info: str) -> None:
        self._lexer = _lexer(_LANGUAGE.sub(r"\1", info).lower())
        self._stack: _Stack = ["root"]
        self._carried = ""

    def line(self, text: str) -> list[Piece]:
        """The pieces of the next line, given without its end."""
        if self._lexer is None or len(text) > _MAX_LINE:
            self._carried, self._stack = "", ["root"]
            return [Piece(text)]
        skipped = len(self._carried)
        source = f"{self._carried}{text}\n"
        try:
            tokens = self._lex(source)
        except Exception as failure:  # rules of some language that nobody has tried on such text
            log.debug("%r cannot read %r: %s", self._lexer, text, failure)
            self._lexer = None
            return [Piece(text)]
        pieces = []
        for begin, kind, token in tokens:
            shown = token[max(skipped - begin, 0) : max(len(source) - 1 - begin, 0)]
            if shown:
                pieces.append(Piece(shown, _style(str(kind).removeprefix("Token."))))
        return pieces

    def _lex(self, source: str) -> list[_Token]:
        """The tokens of `source`, the last of which is carried to the next line, with the stack in front of it."""
        if not _has_states(self._lexer):
            return list(self._lexer.get_tokens_unprocessed(source))
        for opener, end in _ENDS.items():
            if _is_open(source, opener, end):
                steps = list(_walk(self._lexer, source + end, self._stack))
                going_on = next((i for i, step in enumerate(steps) if _covers(step, len(source))), None)
                if going_on is not None:
                    return self._carry(source, steps[: going_on + 1])
        return self._carry(source, list(_walk(self._lexer, source, self._stack)))

    def _carry(self, source: str, steps: list[_Step]) -> list[_Token]:
        last = steps[-1]
        self._stack = last.stack
        self._carried = source[last.begin :] if len(source) - last.begin <= _MAX_CARRIED else ""
        return [token for step in steps for token in step.tokens]


class _Step(NamedTuple):
    """A match of a rule: where it is, the stack in front of it, its tokens."""

    begin: int
    end: int
    stack: _Stack
    tokens: list[_Token]


def _is_open(source: str, opener: str, end: str) -> bool:
    if opener == end:
        return source.count(opener) % 2 == 1
    return source.rfind(opener) > source.rfind(end)


def _covers(step: _Step, end: int) -> bool:
    """Whether a step begins in front of the newline at `end` - 1 and goes on behind it."""
    return step.begin < end - 1 and step.end > end


def _walk(lexer: Any, source: str, stack: _Stack) -> Iterator[_Step]:
    """The matches of rules, one behind the other.

    What rules mean is Pygments' documentation, "Write your own lexer"; `_tokens` is what its metaclass makes of them.
    """
    from pygments.token import Error, Text, _TokenType

    position = idle = 0
    while position < len(source):
        for matches, action, transition in lexer._tokens[stack[-1]]:
            match = matches(source, position)
            if match is None:
                continue
            if action is None:
                found = []
            elif isinstance(action, _TokenType):
                found = [(position, action, match.group())]
            else:
                found = list(action(lexer, match))
            idle += 1
            if match.end() > position:
                idle = 0
                yield _Step(position, match.end(), stack, found)
            if idle > _MAX_IDLE:
                raise RecursionError(f"state {stack[-1]} reads nothing")
            position = match.end()
            stack = _after(stack, transition)
            break
        else:
            is_end = source[position] == "\n"
            yield _Step(position, position + 1, stack, [(position, Text if is_end else Error, source[position])])
            stack = ["root"] if is_end else stack
            position += 1


def _after(stack: _Stack, transition: Any) -> _Stack:
    """The stack behind a rule: states to push, "#push", "#pop", or -n for so many pops."""
    if transition is None:
        return stack
    if isinstance(transition, int):
        return stack[:transition] or stack[:1]
    stack = list(stack)
    for step in transition if isinstance(transition, tuple) else (transition,):
        if step == "#pop":
            stack = stack[:-1] or stack
        else:
            stack.append(stack[-1] if step == "#push" else step)
    return stack


@functools.cache
def _aliases() -> dict[str, str]:
    """Language as people write it -> name of the lexer that comes with Pygments."""
    from pygments.lexers import get_all_lexers

    return {alias.lower(): name for name, aliases, _, _ in get_all_lexers(plugins=False) for alias in aliases}


def _lexer(language: str) -> Any:
    """The lexer for a language, or None."""
    if not language:
        return None
    from pygments.lexers import find_lexer_class

    name = _aliases().get(language)
    lexer_class: Callable[[], Any] | None = None if name is None else find_lexer_class(name)
    return None if lexer_class is None else lexer_class()


def _has_states(lexer: Any) -> bool:
    from pygments.lexer import ExtendedRegexLexer, RegexLexer

    return isinstance(lexer, RegexLexer) and not isinstance(lexer, ExtendedRegexLexer)


@functools.cache
def _style(kind: str) -> str:
    """ "Name.Function.Magic" -> the style of Name.Function."""
    while kind:
        if kind in _STYLES:
            return _STYLES[kind]
        kind = kind.rpartition(".")[0]
    return PLAIN
