"""What one rendering of a chat template may use, and what single operations are checked for before they run.

An operation is checked where its result can be much larger than its operands, or where it reads through operands that
may repeat themselves (a list that holds another one a thousand times). `template_sandbox` calls all of this.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError, TemplateRuntimeError

MAX_INT_BITS = 4096
MAX_FIELD_WIDTH = 4096
CONTAINERS = (list, tuple, Mapping, set, frozenset, KeysView, ValuesView, ItemsView, range)
SIZED = (str, bytes, *CONTAINERS)
_TICKS_PER_LOOK = 16
_CLAIM_TO_LOOK = 1 << 16


class LimitExceeded(Exception):
    """A template asked for more time or space than it is given. Not a Jinja error, so that nothing swallows it."""


class Budget:
    """What one rendering may use: CPU seconds of its thread, and characters or items brought into being."""

    def __init__(self, seconds: float, size: int, now: datetime | None = None) -> None:
        """`now`: the date that the template may write, today's where it is not given."""
        self.size, self.now = size, now
        self._seconds = seconds
        self._deadline = time.thread_time() + seconds
        self._left = size
        self._ticks = 0

    @contextlib.contextmanager
    def without_collector(self) -> Iterator[None]:
        """Within, what Python's collector takes of this thread's time is not the template's: in a process with millions of
        objects one walk is a second."""
        thread, began = threading.get_ident(), 0.0

        def note(phase: str, info: dict[str, int]) -> None:
            nonlocal began
            if threading.get_ident() != thread:
                return
            if phase == "start":
                began = time.thread_time()
            else:
                self._deadline += time.thread_time() - began

        gc.callbacks.append(note)
        try:
            yield
        finally:
            gc.callbacks.remove(note)

    def tick(self) -> None:
        """Before every operation that may be repeated; looks at the clock now and then."""
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0:
            self._look()

    def claim(self, size: int) -> None:
        """Before or after `size` characters or items come into being or are read through."""
        self._left -= max(size, 0)
        if self._left < 0:
            raise LimitExceeded(f"it builds more than {self.size} characters")
        if size > _CLAIM_TO_LOOK:
            self._look()

    def made(self, value: Any) -> Any:
        """Claims the room that a new value takes, not that of what it refers to, and returns it."""
        self.tick()
        if isinstance(value, SIZED):
            self.claim(len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise LimitExceeded(f"it computes an integer of more than {MAX_INT_BITS} bits")
        return value

    def weigh(self, value: Any) -> int:
        """Characters and items in a value, counted as often as they would be printed. Raises beyond the limit."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, CONTAINERS):
            return 1
        total = 0
        stack: list[Any] = [value]
        while stack:
            item = stack.pop()
            self.tick()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                total += 1 + len(item)
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, CONTAINERS):
                total += 1 + len(item)
                stack += item
            if total > self.size:
                raise LimitExceeded(f"it builds more than {self.size} characters")
        return total

    def read(self, value: Any) -> Any:
        """Claims all of a value, before it is printed, joined or searched, and returns it."""
        self.tick()
        self.claim(self.weigh(value))
        return value

    def _look(self) -> None:
        if time.thread_time() > self._deadline:
            raise LimitExceeded(f"it runs longer than {self._seconds:g} s")


def check_binop(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Products, powers and `%` formatting."""
    if operator == "*":
        if isinstance(left, int):
            left, right = right, left
        if isinstance(left, str | bytes | list | tuple) and isinstance(right, int):
            budget.claim(len(left) * right if isinstance(left, str | bytes) else budget.weigh(left) * right)
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_percent(budget, left, right)


def check_compare(budget: Budget, left: Any = None, right: Any = None, *_: Any) -> None:
    """Comparing reads through the left side; searching does so once for every item."""
    budget.tick()
    if isinstance(right, list | tuple):
        budget.claim(budget.weigh(left) * len(right) // 8)
        if isinstance(left, CONTAINERS):
            budget.claim(budget.weigh(right) // 8)
    elif isinstance(left, CONTAINERS):
        budget.claim(budget.weigh(left) // 8)
    elif isinstance(left, str) and isinstance(right, str):
        budget.claim(len(right) // 64)


def check_format(template: str) -> None:
    """`str.format`: no computed and no wide fields."""
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise TemplateRuntimeError(str(error)) from None
    if any(spec and ("{" in spec or _is_wide(spec)) for _, _, spec, _ in fields):
        raise LimitExceeded(f"it formats to more than {MAX_FIELD_WIDTH} columns")


def check_method(budget: Budget, owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
    """String methods whose result can be larger than what goes in."""
    if name in ("center", "ljust", "rjust", "zfill"):
        _claim_width(budget, args[0] if args else None)
    elif name == "expandtabs":
        size = args[0] if args else kwargs.get("tabsize", 8)
        budget.claim(len(owner) * size if isinstance(size, int) else 0)
    elif name == "replace":
        _check_replace(budget, owner, *args, **kwargs)
    elif name == "join" and args:
        _check_join(budget, args[0], owner)
    elif name in ("translate", "maketrans"):
        raise SecurityError(f"{name} is not available to templates")
    elif name in ("split", "rsplit", "splitlines", "partition", "count", "find", "index"):
        budget.claim(len(owner) // 64)


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise LimitExceeded(f"it computes an integer of more than {MAX_INT_BITS} bits")


def _is_wide(spec: str) -> bool:
    """Python takes digits of all scripts."""
    return any(len(digits) > 9 or int(digits) > MAX_FIELD_WIDTH for digits in re.findall(r"\d+", spec))


def _check_percent(budget: Budget, template: str | bytes, values: Any) -> None:
    """No computed and no wide fields, and no brackets in the name of one. A mapping's values may be written in each."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    fields = re.findall(r"%(?:\([^()]*\))?([-+ #0-9.*]*)(.?)", text, re.DOTALL)
    if any("*" in spec or kind == "(" or _is_wide(spec) for spec, kind in fields):
        raise LimitExceeded(f"it formats to more than {MAX_FIELD_WIDTH} columns")
    budget.claim(budget.weigh(values) * (len(fields) if isinstance(values, Mapping) else 1))


def _claim_width(budget: Budget, width: Any) -> None:
    if isinstance(width, int):
        budget.claim(width)


def _check_replace(budget: Budget, text: Any, old: Any = "", new: Any = "", count: Any = -1, **_: Any) -> None:
    old, new = (value if isinstance(value, str | bytes) else str(value) for value in (old, new))
    text = text if isinstance(text, str | bytes) else str(text)
    times = text.count(old) if type(text) is type(old) else 0
    budget.claim(len(text) + times * len(new))


def _check_join(budget: Budget, values: Any, d: Any = "", *_: Any, **__: Any) -> None:
    """d: Jinja's name of what comes between."""
    if isinstance(values, SIZED):
        budget.read(values)
        budget.claim(len(values) * len(str(d)))


def _check_indent(budget: Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    budget.claim((str(text).count("\n") + 1) * size)


def _check_width(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Of a line, or how many parts: each filter has a name of its own for it."""
    for width in (*args, *kwargs.values()):
        _claim_width(budget, width)


def _check_round(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int):
        _check_bits(4 * abs(precision))


def _check_read(budget: Budget, value: Any = None, *args: Any, **kwargs: Any) -> None:
    budget.read([value, *args, *kwargs.values()])


def _check_format_filter(budget: Budget, template: Any = "", *args: Any, **kwargs: Any) -> None:
    _check_percent(budget, str(template), kwargs or args)


def _check_sum(budget: Budget, values: Any = None, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise SecurityError("sum of anything but numbers is not available to templates")


def _refuse(budget: Budget, *_: Any, **__: Any) -> None:
    raise SecurityError("this filter is not available to templates")


FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_width,
    "slice": _check_width,
    "center": _check_width,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "format": _check_format_filter,
    "round": _check_round,
    "sum": _check_sum,
    **dict.fromkeys(("string", "pprint", "escape", "e", "forceescape", "xmlattr"), _check_read),
    **dict.fromkeys(("sort", "dictsort", "unique", "groupby", "min", "max"), _check_read),
    **dict.fromkeys(("lower", "upper", "capitalize", "title", "trim", "striptags", "truncate"), _check_read),
    **dict.fromkeys(("int", "float", "wordcount", "urlencode", "safe"), _check_read),
    **dict.fromkeys(("urlize", "wordwrap"), _refuse),
}
