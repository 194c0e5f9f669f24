"""Reading safetensors without trusting them: one file, or the shards that an index file names.

The format is eight bytes of header length, a JSON header (name -> dtype, shape, data_offsets), then the data:
https://github.com/huggingface/safetensors#format. Checked before any tensor is handed out: the header's size, that the
tensors cover the data section exactly, one after the other, that each has as many bytes as its dtype and shape say,
and that the file ends where the data ends. Nothing is read but the header: tensors are views of the mapped file.

Which names a model needs is the loader's business, which folder to look into is `checkpoint.py`'s.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.weights.files import read_index, some
from nanovllm_cli.weights.json_file import parse_json
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN, MappedFile

MAX_HEADER_BYTES = 100_000_000
MAX_NAME_CHARS = 1024  # several times the longest of real names; what takes names apart may take them apart at each dot
_MAX_DIMS = 32
_MAX_ELEMENTS = 2**60

# dtype -> bits of an element, and the torch dtype where torch has one of whole bytes
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "U16": (16, torch.uint16),
    "I16": (16, torch.int16),
    "U32": (32, torch.uint32),
    "I32": (32, torch.int32),
    "U64": (64, torch.uint64),
    "I64": (64, torch.int64),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "F32": (32, torch.float32),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
}


class SafetensorsEntry(NamedTuple):
    """Where a tensor lies: `start` counts from the beginning of the file."""

    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """One `.safetensors` file. `entries` is in the header's order; `metadata` is its `__metadata__`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        try:
            self.entries, self.metadata = _read_header(self.file)
        except NanovllmError:
            self.file.close()
            raise

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A read-only view over the file, of all or of rows from the first to before the second.
        UnsupportedError for dtypes that are not whole bytes."""
        entry = self.entries[name]
        stored = DTYPES[entry.dtype_name][1]
        if stored is None:
            raise UnsupportedError(f"{self.path}: tensor {name!r} has the dtype {entry.dtype_name}, less than a byte")
        view = self.file.tensor(entry.start, entry.shape, stored)
        return view if rows is None else view[rows[0] : rows[1]]

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes, uint8 of shape (rows, bytes of a row); a vector is one row, as are rows that end within a byte."""
        entry = self.entries[name]
        data = self.file.tensor(entry.start, (entry.num_bytes,), torch.uint8)
        has_rows = len(entry.shape) > 1 and entry.num_bytes and entry.num_bytes % entry.shape[0] == 0
        return data.reshape(entry.shape[0] if has_rows else 1, -1)

    def release(self, name: str) -> None:
        entry = self.entries[name]
        self.file.release(entry.start, entry.num_bytes)

    def close(self) -> None:
        self.file.close()


def open_sharded(index_path: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open shard that holds it, for a `*.safetensors.index.json`.

    The shards must lie in the index's folder, all be there, and hold exactly the tensors that the index says.
    """
    weight_map = read_index(index_path)
    shards: dict[str, SafetensorsFile] = {}
    try:
        missing = [name for name in sorted(set(weight_map.values())) if not (index_path.parent / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{index_path}: {len(missing)} of {len(set(weight_map.values()))} shards are missing: {some(missing)}",
                "the download is incomplete: download the model again",
            )
        for shard_name in dict.fromkeys(weight_map.values()):
            shards[shard_name] = SafetensorsFile(index_path.parent / shard_name)
        _check_shards(index_path, weight_map, shards)
    except NanovllmError:
        for shard in shards.values():
            shard.close()
        raise
    return {name: shards[shard_name] for name, shard_name in weight_map.items()}


def _check_shards(index_path: Path, weight_map: dict[str, str], shards: dict[str, SafetensorsFile]) -> None:
    for shard_name, shard in shards.items():
        expected = {name for name, where in weight_map.items() if where == shard_name}
        missing = sorted(expected - shard.entries.keys())
        if missing:
            raise CheckpointError(
                f"{shard.path}: {len(missing)} tensors that {index_path.name} expects are not in it: {some(missing)}",
                "index and shards are of different versions: download the model again",
            )
        extra = sorted(shard.entries.keys() - expected)
        if extra:
            raise CheckpointError(
                f"{shard.path}: holds {len(extra)} tensors that {index_path.name} does not name: {some(extra)}",
                "index and shards are of different versions: download the model again",
            )


def _read_header(file: MappedFile) -> tuple[dict[str, SafetensorsEntry], dict[str, str]]:
    def broken(what: str) -> CheckpointError:
        return CheckpointError(f"{file.path}: {what}", DOWNLOAD_AGAIN)

    if file.size < 8:
        raise broken(f"{file.size} bytes are too few for a safetensors file")
    header_len = int.from_bytes(file.data[:8], "little")
    if header_len > MAX_HEADER_BYTES:
        raise broken(f"the header would have {header_len} bytes, at most {MAX_HEADER_BYTES} are read: not safetensors?")
    if header_len > file.size - 8:
        raise broken(f"the header should have {header_len} bytes, the file ends after {file.size - 8}")
    header = parse_json(file.data[8 : 8 + header_len], f"{file.path}: header", unique_keys=True)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # which MLX writes
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken("__metadata__ is not a table of strings")
    entries = {name: _read_entry(file.path, name, fields, 8 + header_len) for name, fields in header.items()}

    end = 8 + header_len
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            problem = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            raise broken(f"tensor {name!r} {problem}: expected at byte {end}, found at {entry.start}")
        end += entry.num_bytes
    if end != file.size:
        raise broken(f"the tensors end at byte {end}, the file at {file.size}")
    return entries, metadata


def _read_entry(path: Path, name: str, fields: Any, data_start: int) -> SafetensorsEntry:
    def broken(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {what}", DOWNLOAD_AGAIN)

    if len(name) > MAX_NAME_CHARS:
        told = f"a tensor's name has {len(name)} characters, at most {MAX_NAME_CHARS} are read: {name[:40]!r}…"
        raise CheckpointError(f"{path}: {told}")
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise broken("expected dtype, shape and data_offsets")
    dtype_name, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise UnsupportedError(f"{path}: tensor {name!r} has the unknown dtype {dtype_name!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise broken("its shape is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken("data_offsets are not a begin and an end")
    if math.prod(max(dim, 1) for dim in shape) > _MAX_ELEMENTS:
        raise broken(f"shape {shape} has more elements than any file")
    num_bytes, rest = divmod(math.prod(shape) * DTYPES[dtype_name][0], 8)
    if rest or num_bytes != offsets[1] - offsets[0]:
        raise broken(
            f"{dtype_name} of shape {shape} takes {num_bytes + bool(rest)} bytes, "
            f"its offsets say {offsets[1] - offsets[0]}"
        )
    return SafetensorsEntry(dtype_name, tuple(shape), data_start + offsets[0], num_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
