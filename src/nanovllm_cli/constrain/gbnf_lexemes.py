"""Longer lexemes for GBNF whose rules refer to themselves: the most that can be taken greedily and mean the same.

llguidance reads lexeme by lexeme, and takes each as long as any that may come here can be, as lexers do; GBNF reads a text in
every way that its rules allow. Both are the same where no lexeme that is whole can be mistaken for the beginning of a longer
one:

    there are no lexemes A and B that may come at one place, no text w of B and no letter c that may follow B, so that A has a
    text which begins with w c

For then, whichever way a text is read, its first lexeme ends where llguidance ends it, and so does the next. (Of several
lexemes that end there llguidance keeps all.) So lexemes begin as large as they can be, the parts of rules that hold nothing which
refers to itself, and whoever is an A is taken apart until there is none: single characters never are.

What may come, and what may follow, is taken for more than it is: letters that are not ASCII count as one, repetitions as endless,
and sets of lexemes come from the rules without their context (FIRST and FOLLOW: Aho, Sethi, Ullman, "Compilers", 1986, 4.4;
positions of an expression: Glushkov, "The abstract theory of automata", 1961).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanovllm_cli.constrain.gbnf_expressions import Expressions, NoExpression
from nanovllm_cli.constrain.gbnf_syntax import MAX_NESTING, Choice, Name, Node, Repeat, Rules, Sequence, Terminal

MAX_WORK = 200_000
"""Pairs of positions, nodes and symbols that are looked at before a grammar is left as it is: a fifth of a second."""
_MAX_POSITIONS = 400
_EMPTY = Sequence(())


def with_lexemes(rules: Rules) -> Rules | None:
    """Rules that say the same, whose Terminals are lexemes. None where only single characters would be left, or it would take too
    long to find out."""
    search = _Search(rules)
    try:
        found = search.rules_of_lexemes()
    except _TooMuch:
        return None
    return found if any(lexeme.is_long for lexeme in search.lexemes.values()) else None


class _TooMuch(Exception):
    pass


@dataclass(eq=False)
class _Lexeme:
    """parts: what it reads, one behind the other. expression: that as a regular expression. The rest are Glushkov's sets, as
    bits: letters of each position, positions that may come first, that may come last, and behind each."""

    parts: tuple[Node, ...]
    expression: str
    letters: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0

    @property
    def is_long(self) -> bool:
        return any(self.behind)

    @property
    def first_letters(self) -> int:
        return self.letters_at(self.first)

    def letters_at(self, positions: int) -> int:
        found = 0
        for i in _bits(positions):
            found |= self.letters[i]
        return found


@dataclass
class _Flow:
    """What lexemes may come where, as sets of their numbers. first, nullable, follow: of rules. next: behind a lexeme."""

    first: dict[str, int]
    nullable: dict[str, bool]
    follow: dict[str, int]
    next: list[int]


class _Search:
    """rules: as they were read. lexed: of those that are rules still, with lexemes for Terminals, named by number."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._expressions = Expressions(rules)
        self._work = 0
        self._lexed: Rules = {}
        self._unread: Rules = {"root": rules["root"]}
        self._closed = _closed_rules(rules)
        self._numbers: dict[str, int] = {}
        self.lexemes: dict[int, _Lexeme] = {}

    def rules_of_lexemes(self) -> Rules:
        self._read_all()
        while (too_long := self._mistaken()) is not None:
            apart = self._apart(self.lexemes.pop(too_long))
            self._read_all()
            self._lexed = {name: _replaced(node, too_long, apart) for name, node in self._lexed.items()}
        return self._lexed

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise _TooMuch

    # ---- lexemes ----

    def _read_all(self) -> None:
        """Rules that are referred to, and those that they refer to."""
        while self._unread:
            name, node = self._unread.popitem()
            self._lexed[name] = _EMPTY
            self._lexed[name] = self._apart(_Lexeme((node,), "")) if self._is_closed(node) else self._with_lexemes(node)

    def _refer(self, name: str) -> Name:
        if name not in self._lexed:
            self._unread[name] = self._rules[name]
        return Name(name)

    def _with_lexemes(self, node: Node) -> Node:
        self._count(1)
        match node:
            case Sequence(parts):
                found, run = list[Node](), list[Node]()
                for part in parts:
                    if self._is_closed(Sequence((*run, part))):
                        run.append(part)
                        continue
                    found += [self._lexeme(tuple(run))] if run else []
                    run = [part] if (closed := self._is_closed(part)) else []
                    found += [] if closed else [self._with_lexemes(part)]
                return Sequence((*found, *([self._lexeme(tuple(run))] if run else [])))
            case Choice(ways):
                return Choice(tuple(self._lexeme((way,)) if self._is_closed(way) else self._with_lexemes(way) for way in ways))
            case Repeat(part, low, high):
                return Repeat(self._lexeme((part,)) if self._is_closed(part) else self._with_lexemes(part), low, high)
            case Name(rule):
                return self._refer(rule)
            case Terminal():
                return self._lexeme((node,))

    def _is_closed(self, node: Node) -> bool:
        """Whether it is an expression: holds nothing that refers to itself."""
        if not self._closed.issuperset(_names(node)):
            return False
        try:
            self._count(1 + len(self._expressions.of(node)) // 20)
        except NoExpression:
            return False
        return True

    def _lexeme(self, parts: tuple[Node, ...]) -> Node:
        """These as a lexeme; lexemes are never empty."""
        whole = Sequence(parts)
        if self._may_be_empty(whole):
            if len(parts) > 1:
                return Sequence(tuple(self._lexeme((part,)) for part in parts))
            some = self._not_empty(parts[0])
            return _EMPTY if some is None else Choice((self._lexeme((some,)), _EMPTY))
        try:
            lexeme = _Lexeme(parts, self._expressions.of(whole))
            _, lexeme.first, lexeme.last = self._positions(lexeme, whole)
        except NoExpression:
            return self._with_lexemes(whole)
        number = self._numbers.setdefault(lexeme.expression, len(self._numbers))
        self.lexemes.setdefault(number, lexeme)
        return Terminal(lexeme.expression, number)

    def _may_be_empty(self, node: Node) -> bool:
        match node:
            case Terminal():
                return False
            case Name(rule):
                return self._may_be_empty(self._rules[rule])
            case Choice(ways):
                return any(map(self._may_be_empty, ways))
            case Sequence(parts):
                return all(map(self._may_be_empty, parts))
            case Repeat(part, low, high):
                return low == 0 or high == 0 or self._may_be_empty(part)

    def _not_empty(self, node: Node) -> Node | None:
        """What says the same but nothing; None where that is all it says."""
        self._count(1)
        if not self._may_be_empty(node):
            return node
        match node:
            case Terminal():
                return node
            case Name(rule):
                return self._not_empty(self._rules[rule])
            case Repeat(part, _, high):
                some = None if high == 0 else self._not_empty(part)
                return None if some is None else Repeat(some, 1, high)
            case Choice(ways):
                return _choice([some for way in ways if (some := self._not_empty(way)) is not None])
            case Sequence(parts):  # the first that is not empty, and what comes behind it
                some_parts = [(self._not_empty(part), parts[i + 1 :]) for i, part in enumerate(parts)]
                return _choice([Sequence((some, *rest)) for some, rest in some_parts if some is not None])

    def _positions(self, lexeme: _Lexeme, node: Node) -> tuple[bool, int, int]:
        """Adds a node's. Whether it may be empty, and which of its positions may come first and last."""
        match node:
            case Terminal(_, letters):
                if len(lexeme.letters) == _MAX_POSITIONS:
                    raise NoExpression
                lexeme.letters.append(letters)
                lexeme.behind.append(0)
                self._count(1)
                own = 1 << len(lexeme.letters) - 1
                return False, own, own
            case Name(rule):
                return self._positions(lexeme, self._rules[rule])
            case Choice(ways):
                nullable, first, last = False, 0, 0
                for way in ways:
                    may_be_empty, begin, end = self._positions(lexeme, way)
                    nullable, first, last = nullable or may_be_empty, first | begin, last | end
                return nullable, first, last
            case Sequence(parts):
                nullable, first, last = True, 0, 0
                for part in parts:
                    may_be_empty, begin, end = self._positions(lexeme, part)
                    _link(lexeme, last, begin)
                    first |= begin if nullable else 0
                    last = end | (last if may_be_empty else 0)
                    nullable = nullable and may_be_empty
                return nullable, first, last
            case Repeat(part, low, high):
                if high == 0:
                    return True, 0, 0
                may_be_empty, first, last = self._positions(lexeme, part)
                if high is None or high > 1:
                    _link(lexeme, last, first)
                return may_be_empty or low == 0, first, last

    def _apart(self, lexeme: _Lexeme) -> Node:
        """What it reads, as smaller lexemes."""
        *before, last = lexeme.parts
        if before:
            return Sequence((self._lexeme(tuple(before)), self._lexeme((last,))))
        match last:
            case Sequence(parts):
                return self._apart(_Lexeme(parts, ""))
            case Choice(ways):
                return Choice(tuple(self._lexeme((way,)) for way in ways))
            case Repeat(part, low, high):
                return Repeat(self._lexeme((part,)), low, high)
            case Name(rule):
                return self._refer(rule)
            case Terminal():
                return self._lexeme((last,))

    # ---- what may come where ----

    def _mistaken(self) -> int | None:
        """The number of a lexeme that another one may be taken for the beginning of."""
        flow = self._flow()
        beginnings = {number: lexeme.first_letters for number, lexeme in self.lexemes.items()}
        beside = dict.fromkeys(self.lexemes, 0)
        for alive in self._places(flow, beginnings):
            for number in _bits(alive):
                beside[number] |= alive
        follow = {number: _union(beginnings[each] for each in _bits(flow.next[number])) for number in self.lexemes}
        for a, lexeme in self.lexemes.items():
            for b in _bits(beside[a] if lexeme.is_long else 0):
                if beginnings[a] & beginnings[b] and self._goes_on(lexeme, self.lexemes[b], follow[b]):
                    return a
        return None

    def _places(self, flow: _Flow, beginnings: dict[int, int]) -> set[int]:
        """Which lexemes may come at one place: at the beginning, or behind a lexeme. Where two may come that have a text in
        common, both may have been read, and what comes then is behind either."""
        behind, changed = list(flow.next), True
        while changed:
            changed = False
            for alive in {flow.first["root"], *behind}:
                self._count(alive.bit_count() ** 2 // 4)
                for a in _bits(alive):
                    for b in _bits(alive):
                        if beginnings[a] & beginnings[b] and behind[a] != behind[b]:
                            behind[a] = behind[b] = behind[a] | behind[b]
                            changed = True
        return {flow.first["root"], *behind}

    def _goes_on(self, a: _Lexeme, b: _Lexeme, follows: int) -> bool:
        """Whether a letter that may follow b goes on in a, behind a text of b."""
        waiting = [(i, j) for i in _bits(a.first) for j in _bits(b.first) if a.letters[i] & b.letters[j]]
        seen = set(waiting)
        while waiting:
            i, j = waiting.pop()
            self._count(1)
            if b.last >> j & 1 and a.letters_at(a.behind[i]) & follows:
                return True
            for pair in ((k, m) for k in _bits(a.behind[i]) for m in _bits(b.behind[j]) if a.letters[k] & b.letters[m]):
                if pair not in seen:
                    seen.add(pair)
                    waiting.append(pair)
        return False

    def _flow(self) -> _Flow:
        names = self._lexed
        flow = _Flow(dict.fromkeys(names, 0), dict.fromkeys(names, False), dict.fromkeys(names, 0), [0] * len(self._numbers))
        changed = True
        while changed:
            changed = False
            for name, node in names.items():
                found = self._begins(node, flow)
                changed |= found != (flow.nullable[name], flow.first[name])
                flow.nullable[name], flow.first[name] = found
        changed = True
        while changed:
            before = dict(flow.follow)
            for name, node in names.items():
                self._followed(node, flow.follow[name], flow)
            changed = before != flow.follow
        return flow

    def _begins(self, node: Node, flow: _Flow) -> tuple[bool, int]:
        """Whether it may be empty, and the lexemes that it begins with."""
        self._count(1)
        match node:
            case Terminal(_, number):
                return False, 1 << number
            case Name(rule):
                return flow.nullable[rule], flow.first[rule]
            case Choice(ways):
                found = [self._begins(way, flow) for way in ways]
                return any(nullable for nullable, _ in found), _union(first for _, first in found)
            case Sequence(parts):
                begun = 0
                for part in parts:
                    nullable, first = self._begins(part, flow)
                    begun |= first
                    if not nullable:
                        return False, begun
                return True, begun
            case Repeat(part, low, high):
                nullable, first = (True, 0) if high == 0 else self._begins(part, flow)
                return nullable or low == 0, first

    def _followed(self, node: Node, follow: int, flow: _Flow) -> None:
        """Behind a node come the lexemes `follow`: passes that on to its parts."""
        self._count(1)
        match node:
            case Terminal(_, number):
                flow.next[number] |= follow
            case Name(rule):
                flow.follow[rule] |= follow
            case Choice(ways):
                for way in ways:
                    self._followed(way, follow, flow)
            case Sequence(parts):
                for part in reversed(parts):
                    self._followed(part, follow, flow)
                    nullable, first = self._begins(part, flow)
                    follow = first | (follow if nullable else 0)
            case Repeat(part, _, high):
                again = self._begins(part, flow)[1] if high is None or high > 1 else 0
                self._followed(part, follow | again, flow)


def _closed_rules(rules: Rules) -> set[str]:
    """Those that do not refer to themselves, not through others either, as far as an expression can be nested."""
    referred, closed = {name: set(_names(node)) for name, node in rules.items()}, set[str]()
    for _ in range(MAX_NESTING):
        more = [name for name, names in referred.items() if names <= closed]
        if not more:
            break
        closed.update(more)
        for name in more:
            del referred[name]
    return closed


def _names(node: Node) -> Iterator[str]:
    match node:
        case Name(rule):
            yield rule
        case Choice(nodes) | Sequence(nodes):
            for each in nodes:
                yield from _names(each)
        case Repeat(part):
            yield from _names(part)


def _choice(ways: list[Node]) -> Node | None:
    return Choice(tuple(ways)) if ways else None


def _link(lexeme: _Lexeme, these: int, those: int) -> None:
    for i in _bits(these):
        lexeme.behind[i] |= those


def _replaced(node: Node, number: int, by: Node) -> Node:
    match node:
        case Terminal(_, own):
            return by if own == number else node
        case Name():
            return node
        case Choice(ways):
            return Choice(tuple(_replaced(way, number, by) for way in ways))
        case Sequence(parts):
            return Sequence(tuple(_replaced(part, number, by) for part in parts))
        case Repeat(part, low, high):
            return Repeat(_replaced(part, number, by), low, high)


def _union(sets: Iterator[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
