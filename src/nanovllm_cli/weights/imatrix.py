"""Importance matrices as llama.cpp writes them: for each weight, how large what its columns meet is, in mean squares over a text.

A GGUF file has for each weight `NAME.in_sum2` [matrices, K], sums of squares, and `NAME.counts` [matrices, 1], of how many
tokens: several matrices where a weight is the experts of a layer. The older binary form has, after the number of entries, for
each: its name, a number of calls, and so many times the means, whose experts lie behind each other. K: columns of a weight.

Raises CheckpointError for what is neither, or damaged.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.gguf import GGUFFile
from nanovllm_cli.weights.mapped import MappedFile

SUMS, COUNTS = ".in_sum2", ".counts"
_HINT = "it should be what llama-imatrix wrote for this model"
_MAX_ENTRIES, _MAX_NAME_BYTES = 1_000_000, 1024
_INT = struct.Struct("<i")


class ImportanceFile(NamedTuple):
    """weights: of a weight's GGUF name, one number a column, or of several matrices one after the other, [n]; 0 where a matrix
    met nothing. digest: of what was read."""

    name: str
    weights: Mapping[str, torch.Tensor]
    digest: str

    def of(self, name: str, width: int, matrix: int, matrices: int) -> torch.Tensor | None:
        """[width] of one of a weight's matrices; None where the file has none, or nothing was seen. CheckpointError where the
        file's weight has another shape."""
        found = self.weights.get(name)
        if found is None:
            return None
        if len(found) != matrices * width:
            raise CheckpointError(f"{self.name}: {name} has {len(found)} numbers for {matrices * width} columns", _HINT)
        own = found[matrix * width : (matrix + 1) * width]
        return own if own.any() else None


def read_importance(path: Path) -> ImportanceFile:
    file = MappedFile(path)
    try:
        is_gguf = file.data[:4] == b"GGUF"
        weights: dict[str, torch.Tensor] = {}
        for name, values in _of_gguf(path) if is_gguf else _of_older_form(file):
            if name in weights:
                raise CheckpointError(f"{path}: {name} occurs twice", _HINT)
            weights[name] = values
    finally:
        file.close()
    digest = hashlib.blake2b(digest_size=16)
    for name, values in sorted(weights.items()):
        if not values.isfinite().all() or (values < 0).any():
            raise CheckpointError(f"{path}: {name} has numbers that are no mean of squares", _HINT)
        digest.update(name.encode() + b"\0" + values.numpy().tobytes())
    if not weights:
        raise CheckpointError(f"{path}: no weight is in it", _HINT)
    return ImportanceFile(path.name, weights, digest.hexdigest())


def _of_gguf(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    file = GGUFFile(path)
    try:
        if file.metadata.get("general.type") != "imatrix":
            raise UnsupportedError(f"{path}: a GGUF file, but no importance matrix", _HINT)
        for name in file.entries:
            if name.endswith(SUMS):
                weight = name.removesuffix(SUMS)
                counts = file.entries.get(weight + COUNTS)
                sums = file.entries[name]
                if counts is None or {sums.dtype_name, counts.dtype_name} != {"F32"} or math.prod(counts.shape) != sums.num_rows:
                    raise CheckpointError(f"{path}: {weight} has sums, and no counts that go with them", _HINT)
                if not sums.num_bytes or not counts.num_bytes:
                    raise CheckpointError(f"{path}: {weight} has no numbers", _HINT)
                seen = file.tensor(weight + COUNTS).reshape(-1, 1)
                squares = file.tensor(name).reshape(len(seen), -1)
                yield weight, torch.where(seen > 0, squares / seen, torch.zeros(())).flatten()
    finally:
        file.close()


def _of_older_form(file: MappedFile) -> Iterator[tuple[str, torch.Tensor]]:
    at = 0

    def number(what: str, most: int) -> int:
        nonlocal at
        if at + _INT.size > file.size:
            raise CheckpointError(f"{file.path}: the file ends before {what}", _HINT)
        (value,) = _INT.unpack_from(file.data, at)
        at += _INT.size
        if not 0 <= value <= most:
            raise CheckpointError(f"{file.path}: no importance matrix: {what} would be {value}", _HINT)
        return int(value)

    for _ in range(number("the number of entries", _MAX_ENTRIES)):
        size = number("the length of a name", min(_MAX_NAME_BYTES, file.size))
        name = file.data[at : at + size].decode("utf-8", "replace")
        at += size
        calls = number("a number of calls", 2**31 - 1)
        count = number("a number of columns", max(0, file.size - at) // 4)
        values = file.tensor(at, (count,), torch.float32).clone() if at + 4 * count <= file.size else None
        if values is None:
            raise CheckpointError(f"{file.path}: the file ends within {name!r}", _HINT)
        at += 4 * count
        yield name, values / max(calls, 1)
