"""Reading numbers out of untrusted configs: config.json of a Hugging Face folder, metadata of a GGUF file.

A value that is missing, of the wrong type or out of bounds raises CheckpointError with the key's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError

MAX_INT = 1 << 31
MAX_NUMBER = 1e18
MIN_NUMBER = 1e-18  # above 0: what is divided by it stays a number
BROKEN = "the file is damaged, or for another kind of model"
_MISSING = object()


class ConfigReader:
    """Typed look-ups in one mapping. where: what it is called in messages ("config.json")."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _MISSING, least: int = 1) -> int:
        """A whole number in [least, 2**31)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MAX_INT:
            raise self._bad(key, f"a whole number of at least {least}", value)
        return value

    def number(self, key: str, default: Any = _MISSING, positive: bool = True) -> float:
        """A number of at most 1e18 either way, above 0 (1e-18 at least) unless told otherwise."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_NUMBER:
            raise self._bad(key, "a number, and not a huge one", value)
        if positive and value < MIN_NUMBER:
            raise self._bad(key, f"a number of at least {MIN_NUMBER:g}", value)
        return float(value)

    def cap(self, key: str) -> float | None:
        """A number above 0; None where it is 0, or none."""
        return self.number(key) if self.values.get(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, "true or false", value)
        return value

    def does(self, key: str, default: bool) -> bool:
        """A flag of which null is false to transformers, and not the default: those of an image processor's settings, and few
        others."""
        return self.values.get(key, default) is not None and self.flag(key, default)

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, "a string", value)
        return value

    def numbers(self, key: str, length: int | None = None) -> tuple[float, ...]:
        """A list of numbers from 1e-18 to 1e18, of that length where one is given."""
        value = self._get(key, _MISSING)
        good = isinstance(value, (list, tuple)) and all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and MIN_NUMBER <= v <= MAX_NUMBER for v in value
        )
        if not good or (length is not None and len(value) != length):
            raise self._bad(key, f"a list of {length if length is not None else 'positive'} numbers", value)
        return tuple(float(v) for v in value)

    def integers(self, key: str, length: int) -> list[int]:
        """One for each of so many layers: a list, or a number for all of them."""
        value = self._get(key, _MISSING)
        if not isinstance(value, (list, tuple)):
            return [self.integer(key)] * length
        if len(value) != length:
            raise self._bad(key, f"a list of {length} numbers", value)
        return [ConfigReader({key: each}, self.where).integer(key) for each in value]

    def kinds(self, key: str, length: int, *known: str) -> list[str] | None:
        """Names of the kinds of so many layers; None where none are listed. UnsupportedError for one that is not known."""
        kinds = self.values.get(key)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != length or not all(isinstance(kind, str) for kind in kinds):
            raise CheckpointError(f"{self.where}: {key!r} must be a list of {length} kinds", BROKEN)
        if unknown := [kind for kind in kinds if kind not in known]:
            what = f"{self.where}: layer type {unknown[0][:80]!r} is not supported"
            raise UnsupportedError(what, f"known: {', '.join(known)}")
        return kinds

    def zeros(self, key: str, length: int) -> list[bool]:
        """Of so many layers, which have a 0 in a list; none without a list."""
        value = self.values.get(key)
        return [each == 0 for each in value[:length]] if isinstance(value, (list, tuple)) else [False] * length

    def with_firsts(self, *keys: str) -> ConfigReader:
        """The same with the first entry above 0 of those of these that are lists."""
        lists = {key: value for key in keys if isinstance(value := self.values.get(key), (list, tuple)) and value}
        firsts = {key: next(filter(None, value), value[0]) for key, value in lists.items()}
        return ConfigReader({**self.values, **firsts}, self.where)

    def section(self, key: str) -> ConfigReader:
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._bad(key, "an object", value)
        return ConfigReader(value, f"{self.where}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(
                f"{self.where} has no {key!r}", "the file is incomplete, or for another kind of model"
            )
        return default

    def _bad(self, key: str, wanted: str, value: Any) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CheckpointError(f"{self.where}: {key!r} must be {wanted}, not {shown}", BROKEN)
