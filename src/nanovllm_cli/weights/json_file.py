"""Reading JSON that somebody else wrote: bounded, strict, with errors that name the file.

`parse_json` is for bytes that are already here (the header of a safetensors file), `read_json_file` for a file.
Both refuse what Python's parser is too kind about: NaN and Infinity, anything that is not an object at the top,
nesting deep enough to exhaust the stack, and, on request, keys that occur twice. Nothing here knows what the keys mean.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm_cli.errors import AccessRefusedError, CheckpointError

MAX_CONFIG_BYTES = 10_000_000  # of config.json and its kin
MAX_DEPTH = 200  # of nesting; the deepest of real configs has about six


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within, a failure of the system's is one to read `path`: CheckpointError, or AccessRefusedError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file", "download the model again, or check the folder") from error
    except PermissionError as error:
        raise AccessRefusedError(f"{path}: permission denied", "check the file's permissions") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_is_the_file(path: Path, beginning: bytes) -> None:
    """Raises CheckpointError for what a clone or a download may leave where a file should be."""
    if beginning.startswith(b"version https://git-lfs.github.com/"):
        raise CheckpointError(f"{path}: what Git LFS keeps in place of the file", "git lfs pull in its folder fetches that")
    if beginning.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        hint = "download it again; a file's address on the hub has /resolve/ in it, not /blob/"
        raise CheckpointError(f"{path}: a page of the web, not the file", hint)


def read_json_file(path: Path, max_bytes: int, *, unique_keys: bool = False, infinity: bool = False) -> dict[str, Any]:
    """The object in `path`, which may hold at most `max_bytes`. infinity: an Infinity, which configs of state spaces have for a
    bound that is none, becomes what newer ones write: {"__float__": "Infinity"}.

    Raises CheckpointError when it is missing, too large, not UTF-8, not JSON, not an object or nested too deeply,
    AccessRefusedError when this user may not read it.
    """
    with reading(path):
        if not path.is_file():
            raise FileNotFoundError
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    check_is_the_file(path, data[:64])
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than the {max_bytes} bytes that such a file may have")
    return parse_json(data, str(path), unique_keys=unique_keys, infinity=infinity)


def parse_json(data: bytes, where: str, *, unique_keys: bool = False, infinity: bool = False) -> dict[str, Any]:
    """The object that `data` spells; `where` starts the message of every CheckpointError."""
    hint = "the file is damaged: download it again"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 (byte {error.start})", hint) from error
    try:
        value = json.loads(
            text,
            parse_constant=_named if infinity else _refuse_constant,
            object_pairs_hook=_unique_object if unique_keys else None,
        )
    except RecursionError as error:
        raise CheckpointError(f"{where}: JSON nested too deeply", hint) from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{where}: not JSON: {error.msg} at {place}", hint) from error
    except ValueError as error:  # constants, double keys, integers with more digits than Python converts
        raise CheckpointError(f"{where}: {error}", hint) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {_kind(value)}", hint)
    if _depth_exceeds(value, MAX_DEPTH):
        raise CheckpointError(f"{where}: JSON nested deeper than {MAX_DEPTH} levels", hint)
    return value


def _named(constant: str) -> Any:
    return {"__float__": constant} if constant == "Infinity" else _refuse_constant(constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {double!r} occurs twice")
    return result


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Walks level by level, so that the check itself cannot run out of stack."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}[type(value)]
