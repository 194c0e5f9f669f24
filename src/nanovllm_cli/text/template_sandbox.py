"""The Jinja environment that chat templates run in: transformers' dialect, in a sandbox with limits.

A template comes with a model from anywhere. Jinja's immutable sandbox keeps it from Python's internals; this file keeps
it from running or growing without end. Nothing is interrupted from outside: every operation that could be repeated or
could be large reports to a `Budget` before or after it happens, and the budget raises. For that the syntax tree is
rewritten once, when a template is compiled (`_Meter`): loops count their turns, and operations that Jinja compiles to
bare Python (comparisons, `~`, slices, literals) go through metered filters. Since each operation is bounded by the
budget's sizes, the time limit is overshot by few operations at most.

The dialect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`, `break` and
`continue`, trimmed blocks. Not covered: including other templates, `lipsum`, asynchronous templates.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from nanovllm_cli.text.template_budget import (
    CONTAINERS,
    FILTER_CHECKS,
    Budget,
    LimitExceeded,
    check_binop,
    check_compare,
    check_format,
    check_method,
)

_current: ContextVar[Budget] = ContextVar("template_budget")


def spending(budget: Budget, pieces: Callable[[], Iterable[str]]) -> str:
    """Joins what a rendering generates, under `budget`."""
    token = _current.set(budget)
    try:
        with budget.without_collector():
            return "".join(pieces())
    finally:
        _current.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One dialect for all templates. Rendering happens within `spending`, which says what it may use."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%", "/", "//"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed at run time, where they are metered
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
        )
        kept = ("range", "dict", "cycler", "joiner")
        self.globals = {
            **{name: self.globals[name] for name in kept},
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: _metered(function, FILTER_CHECKS.get(name)) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.filters.update({_TURN: _turn, _WEIGHED: _weighed, _SMALL: _small, _MADE: _made, _JOIN: _concat})
        self.filters[_COMPARED] = _compared
        self.tests = {name: _metered(function, check_compare) for name, function in self.tests.items()}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        budget.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            check_method(budget, owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, int | float) or __obj is bytes:
            raise jinja2.exceptions.SecurityError("methods of numbers are not available to templates")
        elif isinstance(__obj, type) or isinstance(owner, dict | type):
            budget.read([*args, *kwargs.values()])
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _current.get()
        budget.tick()
        check_binop(budget, operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """A template may put items into its lists, as Kimi's does: what it was given are copies."""
        return (attr in ("append", "pop") and type(obj) is list) or super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _small(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        template: str = value.__self__
        takes_mapping = value.__name__ == "format_map"
        formatter = _MeteredFormatter(self, escape=template.escape if isinstance(template, Markup) else str)

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(template)
            if takes_mapping:
                (kwargs,), args = args, ()
            return type(template)(formatter.vformat(template, args, kwargs))

        return checked


class _MeteredFormatter(SandboxedEscapeFormatter):
    """What a field writes may lie deep in what it was given."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        found = super().get_field(field_name, args, kwargs)
        _current.get().read(found[0])
        return found


# Names of filters that only the rewriting writes: no template can spell them in its source.
_TURN, _WEIGHED, _SMALL, _MADE, _JOIN, _COMPARED = ("meter turn", "meter weighed", "meter small", "meter made",
                                                   "meter join", "meter compared")  # fmt: skip


class _Meter(NodeTransformer):
    """Rewrites a template so that what Jinja compiles to bare Python goes through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(nodes.Not(_through(_TURN, nodes.Const(0))), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_through(_TURN, nodes.Const(text)), lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return _through(_COMPARED, node.expr, nodes.Const(node.ops[0].op), node.ops[0].expr)
        node.expr = _through(_SMALL, node.expr)
        for operand in node.ops:
            operand.expr = _through(_SMALL, operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_JOIN, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(_WEIGHED, node) if _holds_values(node.items) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(_WEIGHED, node) if node.ctx == "load" and _holds_values(node.items) else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _through(_SMALL, pair.key)
        return _through(_WEIGHED, node) if _holds_values([pair.value for pair in node.items]) else node


def _through(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _holds_values(items: list[nodes.Expr]) -> bool:
    return any(not isinstance(item, nodes.Const) for item in items)


def _turn(text: Any) -> None:
    """One turn of a loop, which writes at most `text` characters of constant text."""
    budget = _current.get()
    budget.tick()
    budget.claim(1 + (text if isinstance(text, int) else 0))


def _weighed(value: Any) -> Any:
    """A container that the template put together: it must not hold more than could be printed."""
    budget = _current.get()
    budget.weigh(value)
    return budget.made(value)


def _small(value: Any) -> Any:
    """A key, or an operand of a chain of comparisons."""
    budget = _current.get()
    budget.tick()
    if isinstance(value, CONTAINERS) and budget.weigh(value) > _MAX_SMALL:
        raise LimitExceeded(f"it compares values of more than {_MAX_SMALL} items")
    return value


_MAX_SMALL = 1 << 16


def _made(value: Any) -> Any:
    return _current.get().made(value)


def _concat(values: list[Any]) -> str:
    budget = _current.get()
    budget.read(values)
    return "".join(map(str, values))


def _compared(left: Any, name: str, right: Any) -> Any:
    budget = _current.get()
    check_compare(budget, left, right)
    return _COMPARISONS[name](left, right)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Runs on every value that is written out. Taking the context keeps Jinja from doing so while it compiles."""
    return _current.get().read(value)


def _metered(function: Any, check: Callable[..., None] | None) -> Callable[..., Any]:
    """A filter or test that reports to the budget. Attributes that tell Jinja how to call it are kept."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        budget.tick()
        if check is not None:
            if len(args) > leading and isinstance(args[leading], Iterator):
                args = (*args[:leading], list(args[leading]), *args[leading + 1 :])
            check(budget, *args[leading:], **kwargs)
        return budget.made(function(*args, **kwargs))

    return run


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it into prompts: no HTML escapes, Unicode as it is."""
    budget = _current.get()
    budget.read(value)
    if (indent if isinstance(indent, int) else len(indent or "")) > 64:
        raise LimitExceeded("it indents by more than 64 columns")
    out: list[str] = []
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for piece in encoder.iterencode(value):
        budget.tick()
        budget.claim(len(piece))
        out.append(piece)
    return "".join(out)


def _raise_exception(message: Any) -> None:
    """How a template refuses its messages."""
    raise jinja2.exceptions.TemplateError(str(message)[:2000])


def _strftime_now(format: str) -> str:
    if len(format) > 200 or re.search(r"[0-9]{4}", format):
        raise LimitExceeded("it asks for too long a date")
    return (_current.get().now or datetime.now()).strftime(format)


class _TemplateNamespace(Namespace):
    """Jinja's namespace, but names that begin with an underscore are refused, and printing one shows no contents."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's own, so that an attribute may be called `self`
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
