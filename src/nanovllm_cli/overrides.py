"""Other settings than a model's files have: of config.json, or of a GGUF's metadata.

    nanovllm run mixture --override-kv qwen3moe.expert_used_count=int:4
    nanovllm run mixture --hf-overrides '{"num_experts_per_tok": 4}'

What nothing asks for while a model is read would change nothing: `check_asked` refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nanovllm_cli.errors import UsageError

MAX_DEPTH = 8
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object"}


class Override(NamedTuple):
    """path: of keys, one for each object that the setting lies in. value: as JSON."""

    path: tuple[str, ...]
    value: str

    @property
    def name(self) -> str:
        return ".".join(self.path)


def as_overrides(given: object) -> tuple[Override, ...]:
    """Of a mapping, in which others may lie, or of what this has made. Raises UsageError."""
    if isinstance(given, tuple) and all(isinstance(each, Override) for each in given):
        return given
    if not isinstance(given, Mapping):
        raise UsageError(f"overrides are settings and their values, not {given!r}")
    return tuple(_flat(given, ()))


def _flat(given: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[Override]:
    for key, value in given.items():
        if not isinstance(key, str) or not key:
            raise UsageError(f"the name of a setting is a text, not {key!r}")
        own = (*path, key)
        if len(own) > MAX_DEPTH:
            raise UsageError(f"overrides lie in at most {MAX_DEPTH} objects: {'.'.join(own)}")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, own)
        else:
            try:
                yield Override(own, json.dumps(value, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise UsageError(f"the value of {'.'.join(own)} is not one that JSON has: {value!r}") from error


class _Watch(NamedTuple):
    """names: what was replaced. waiting: of that what nobody has asked for, and whether the files lack it. unsure: what they lack
    and somebody may have asked for, who went through all settings."""

    names: list[str]
    waiting: dict[tuple[str, ...], bool]
    unsure: list[str]


def replaced(config: Mapping[str, Any], overrides: Sequence[Override]) -> Settings:
    """A config with other values. Raises UsageError where the file has a value of another kind."""
    watch = _Watch([each.name for each in overrides], {}, [])
    whole: dict[str, Any] = dict(config)
    for override in overrides:
        place = whole
        for depth, key in enumerate(override.path[:-1], 1):
            inner = place.get(key)
            if inner is not None and not isinstance(inner, Mapping):
                raise UsageError(f"{'.'.join(override.path[:depth])} is {_kind(inner)} in the model's files, and has no settings")
            place[key] = dict(inner or {})
            place = place[key]
        key, value = override.path[-1], json.loads(override.value)
        _check_kind(override.name, place.get(key), value)
        watch.waiting[override.path] = key not in place
        place[key] = value
    return _settings(whole, (), watch)


def _check_kind(name: str, old: Any, new: Any) -> None:
    if old is None or new is None:
        return
    number = isinstance(old, int | float) and isinstance(new, int | float)
    if isinstance(old, bool) != isinstance(new, bool) or not (number or isinstance(new, type(old))):
        raise UsageError(f"{name} is {_kind(old)} in the model's files ({str(old)[:40]}), and cannot be {json.dumps(new)[:40]}")


def _kind(value: Any) -> str:
    return next((words for kind, words in _KINDS.items() if isinstance(value, kind)), "something else")


def _settings(values: Mapping[str, Any], path: tuple[str, ...], watch: _Watch) -> Settings:
    inside = {each[len(path)] for each in watch.waiting if len(each) > len(path) + 1 and each[: len(path)] == path}
    own = {key: _settings(value, (*path, key), watch) if key in inside else value for key, value in values.items()}
    return Settings(own, path, watch)


class Settings(dict[str, Any]):
    """An object of settings that notes who asks for what of it."""

    def __init__(self, values: Mapping[str, Any], path: tuple[str, ...], watch: _Watch) -> None:
        super().__init__(values)
        self._path, self._watch = path, watch

    @property
    def watch(self) -> _Watch:
        return self._watch

    def above(self, defaults: Mapping[str, Any]) -> Settings:
        """These where there are such, and defaults: nobody has asked yet."""
        return Settings({**defaults, **dict(dict.items(self))}, self._path, self._watch)

    def _note(self, key: object) -> None:
        self._watch.waiting.pop((*self._path, key), None)  # type: ignore[arg-type]

    def _note_all(self) -> None:
        for key in dict.keys(self):
            path = (*self._path, key)
            if self._watch.waiting.pop(path, False):
                self._watch.unsure.append(".".join(path))

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._note_all()
        return super().__iter__()

    def keys(self) -> Any:
        self._note_all()
        return super().keys()

    def values(self) -> Any:
        self._note_all()
        return super().values()

    def items(self) -> Any:
        self._note_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return dict(other) | self.copy()


def above_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`config` where it says something, null too, which is none."""
    return config.above(defaults) if isinstance(config, Settings) else {**defaults, **config}


def blamed(config: Mapping[str, Any]) -> str | None:
    """A hint for who finds that a model's files make no sense; None where nothing in them was replaced."""
    if not isinstance(config, Settings) or not config.watch.names:
        return None
    return f"the files may be sound: they have another {' and '.join(config.watch.names)}"


def check_asked(config: Mapping[str, Any]) -> list[str]:
    """Of a model that has been read: raises UsageError for what was replaced and made no difference to anything. Returns notes on
    what its files don't have, and perhaps nothing asks for."""
    if not isinstance(config, Settings):
        return []
    for name in (".".join(path) for path in config.watch.waiting):
        near = _near(name, sorted(_names(config)))
        raise UsageError(
            f"no part of this model asks for {name!r}, so that another value would change nothing",
            f"did you mean {near}?" if near else "names are those of its config.json, or of a GGUF file's metadata",
        )
    return [f"{name} is not in the model's files, and perhaps nothing asks for it" for name in config.watch.unsure]


def _names(values: dict[str, Any]) -> Iterator[str]:
    for key, value in dict.items(values):
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _names(value))


def _near(name: str, names: Sequence[str]) -> str | None:
    import difflib  # for one who mistyped

    return next(iter(difflib.get_close_matches(name, [each for each in names if each != name], 1)), None)
