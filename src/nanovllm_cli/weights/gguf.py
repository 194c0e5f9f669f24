"""Reading GGUF without trusting it: metadata, the tensor table, and tensors as views or dequantized.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every count,
length and offset in the file is compared with the bytes that are left before anything is allocated for it. Of the
`gguf` package only the numbers of the tensor types and the dequantization of their blocks are used; what it does not have is our
own (`quant/gguf_types.py`, `quant/gguf_blocks.py`).

What the metadata keys mean is the business of `models/` and `text/`; the parts of a split model are put together in
`checkpoint.py`. Big-endian files are refused.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant import gguf_blocks
from nanovllm_cli.quant.gguf_types import BY_NUMBER, NEWER, TensorType
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN, MappedFile

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_METADATA_BYTES = 1 << 28  # of everything before the tensor data; real files have 5 to 30 MB, most of it vocabulary
MAX_ARRAY_ELEMENTS = 1 << 23  # over all arrays of a file together; the largest vocabularies come to two million
MAX_ENTRIES = 1 << 16  # tensors, and metadata keys
MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64
MAX_DIMS = 4
_DEQUANTIZE_ELEMENTS = 1 << 20  # at once: what the temporary arrays of a dequantization are sized by

_SCALARS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = _SCALARS[GGUFValueType.UINT32]
_U64 = _SCALARS[GGUFValueType.UINT64]

# The types that are plain numbers, and so can be looked at in place
_PLAIN: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class GGUFEntry(NamedTuple):
    """Where a tensor lies: `start` counts from the beginning of the file. `shape` is in torch order, rows first;
    the file has it the other way round."""

    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def dtype_name(self) -> str:
        return self.type.name

    @property
    def row_bytes(self) -> int:
        return (self.shape[-1] if self.shape else 1) // self.type.block_len * self.type.block_bytes

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GGUFFile:
    """One `.gguf` file. `metadata`: key -> bool, int, float, str, or a list of those; `metadata_types`: key -> its type and,
    for an array, that of its items, as numbers of GGUFValueType; `entries`: name -> GGUFEntry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        try:
            self.metadata, self.metadata_types, self.entries = _HeaderReader(self.file).read()
        except NanovllmError:
            self.file.close()
            raise

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its `rows` from the first to before the second, along the first dimension.

        Plain numbers are read-only views of the file. Block types are dequantized into float32, some rows at a time, so that
        no second copy of the whole exists.
        UnsupportedError for block types of no weights (Q8_1, Q8_K).
        """
        entry = self.entries[name]
        if rows is not None:
            entry = _rows_of(entry, *rows)
        if (plain := _PLAIN.get(entry.type.name)) is not None:
            return self.file.tensor(entry.start, entry.shape, plain)
        return self._dequantized(name, entry)

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes as a read-only view, uint8 of shape (rows, bytes of a row)."""
        entry = self.entries[name]
        return self.file.tensor(entry.start, (entry.num_rows, entry.row_bytes), torch.uint8)

    def release(self, name: str) -> None:
        entry = self.entries[name]
        self.file.release(entry.start, entry.num_bytes)

    def close(self) -> None:
        self.file.close()

    def _dequantized(self, name: str, entry: GGUFEntry) -> torch.Tensor:
        """Row by row where rows are long, many rows at once where they are short."""
        result = torch.empty(entry.shape, dtype=torch.float32)
        flat = result.view(-1)
        block_len, block_bytes = entry.type.block_len, entry.type.block_bytes
        blocks = self.file.array(entry.start, entry.num_bytes).reshape(-1, block_bytes)
        step = max(1, _DEQUANTIZE_ELEMENTS // block_len)
        for first in range(0, len(blocks), step):
            try:
                with np.errstate(all="ignore"):  # broken scales give NaN, which the loader looks for
                    values = _numbers(entry.type, blocks[first : first + step])
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"{self.path}: tensor {name!r} has the type {entry.type.name}, which cannot be dequantized",
                    "take another quantization of this model, for example Q4_K_M or Q8_0",
                ) from error
            flat[first * block_len : first * block_len + values.size] = torch.from_numpy(values.reshape(-1))
        return result


def _numbers(kind: TensorType, blocks: np.ndarray) -> np.ndarray:
    """float32 of whole blocks, in any shape."""
    if kind in NEWER:
        return gguf_blocks.dequantize(kind.name, torch.from_numpy(blocks)).numpy()
    values: np.ndarray = dequantize(_wide(blocks), GGMLQuantizationType(kind.number))
    return values


def _wide(blocks: np.ndarray) -> np.ndarray:
    """The same bytes in rows of about 64 blocks: the `gguf` package loops in Python over groups of 16 rows."""
    num_blocks, block_bytes = blocks.shape
    per_row = next(n for n in (64, 32, 16, 8, 4, 2, 1) if num_blocks % n == 0)
    return blocks.reshape(num_blocks // per_row, per_row * block_bytes)


def _rows_of(entry: GGUFEntry, first: int, stop: int) -> GGUFEntry:
    """The entry of rows `first` to `stop` (exclusive)."""
    assert entry.shape, "a scalar has no rows"
    assert 0 <= first <= stop <= entry.shape[0], f"rows {first}:{stop} of a tensor of {entry.shape}"
    assert len(entry.shape) > 1 or entry.type.name in _PLAIN, "a single row of blocks is not divided"
    bytes_each = entry.num_bytes // max(entry.shape[0], 1)
    shape = (stop - first, *entry.shape[1:])
    return entry._replace(shape=shape, start=entry.start + first * bytes_each, num_bytes=shape[0] * bytes_each)


class _HeaderReader:
    """Reads from the start of the file to the end of the tensor table; `position` is the next byte."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.size = file.size
        self.end = min(file.size, MAX_METADATA_BYTES)
        self.data = file.data
        self.position = 0
        self.elements_left = MAX_ARRAY_ELEMENTS

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[int, int | None]], dict[str, GGUFEntry]]:
        """Metadata, their types, tensors."""
        self._magic()
        self._check_version()
        num_tensors = self._count("tensors", least_bytes=8 + 4 + 4 + 8)
        num_keys = self._count("metadata keys", least_bytes=8 + 1 + 4 + 1)
        metadata: dict[str, Any] = {}
        types: dict[str, tuple[int, int | None]] = {}
        alignment = DEFAULT_ALIGNMENT
        for _ in range(num_keys):
            key = self._key()
            if key in metadata:
                raise self._broken(f"the metadata key {key!r} occurs twice")
            value_type = self._number(_U32)
            items_at = self.position
            metadata[key] = self._value(key, value_type, depth=0)
            is_array = value_type == GGUFValueType.ARRAY
            types[key] = (value_type, _U32.unpack_from(self.data, items_at)[0] if is_array else None)
            if key == "general.alignment":
                alignment = self._alignment(value_type, metadata[key])
        return metadata, types, self._tensors(num_tensors, alignment)

    def _magic(self) -> None:
        magic = self.data[:4]
        if magic != b"GGUF":
            if magic in (b"ggml", b"lmgg", b"fmgg", b"tjgg", b"algg"):
                raise UnsupportedError(
                    f"{self.path}: an old GGML file, from before GGUF", "download a GGUF of this model"
                )
            raise self._broken(f"not a GGUF file: it starts with {magic!r}")
        self.position = 4

    def _check_version(self) -> None:
        version: int = self._number(_U32)
        if version == 0:
            raise self._broken("GGUF version 0 does not exist")
        if version & 0xFFFF == 0:  # the bytes are in the other order
            raise UnsupportedError(
                f"{self.path}: a big-endian GGUF file", "convert it with gguf_convert_endian.py from the gguf package"
            )
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{self.path}: GGUF version {version}, known: {', '.join(map(str, VERSIONS))}",
                "download a newer file" if version < min(VERSIONS) else "update nanovllm, or download another file",
            )

    def _count(self, what: str, least_bytes: int) -> int:
        count: int = self._number(_U64)
        if count * least_bytes > self.end - self.position:
            raise self._broken(f"{count} {what} do not fit into the file's {self.size} bytes")
        if count > MAX_ENTRIES:
            raise self._broken(f"{count} {what}: at most {MAX_ENTRIES} are read")
        return count

    def _key(self) -> str:
        key = self._string("a metadata key", MAX_KEY_BYTES, errors="strict")
        if not key:
            raise self._broken("a metadata key is empty")
        return key

    def _value(self, key: str, value_type: int, depth: int) -> Any:
        if (scalar := _SCALARS.get(value_type)) is not None:
            return self._number(scalar)
        if value_type == GGUFValueType.STRING:
            return self._string(f"the value of {key!r}", self.end)
        if value_type == GGUFValueType.ARRAY:
            return self._array(key, depth + 1)
        raise self._broken(f"the metadata key {key!r} has the unknown type {value_type}")

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self._broken(f"the arrays of {key!r} are nested deeper than {MAX_ARRAY_DEPTH} levels")
        item_type = self._number(_U32)
        count = self._number(_U64)
        scalar = _SCALARS.get(item_type)
        least_bytes = scalar.size if scalar else 8 if item_type == GGUFValueType.STRING else 12
        if count * least_bytes > self.end - self.position:
            raise self._broken(f"the {count} elements of {key!r} do not fit into the file's {self.size} bytes")
        self.elements_left -= count * (8 if item_type == GGUFValueType.ARRAY else 1)
        if self.elements_left < 0:
            raise self._broken(f"{key!r} brings the file's arrays to more than {MAX_ARRAY_ELEMENTS} elements")
        if scalar is not None:
            first = self.position
            self.position += count * scalar.size
            numbers: list[Any] = np.frombuffer(self.data[first : self.position], dtype=scalar.format).tolist()
            return numbers
        if item_type == GGUFValueType.STRING:
            return self._strings(key, count)
        if item_type != GGUFValueType.ARRAY:
            raise self._broken(f"the array {key!r} has elements of the unknown type {item_type}")
        return [self._array(key, depth + 1) for _ in range(count)]

    def _strings(self, key: str, count: int) -> list[str]:
        """A vocabulary has 150,000 of them: the loop is `_string` written out."""
        data, position, end, unpack = self.data, self.position, self.end, _U64.unpack_from
        result: list[str] = []
        for index in range(count):
            first = position + 8
            if first > end:
                raise self._broken(f"the file ends in element {index} of {key!r}")
            position = first + unpack(data, position)[0]
            if position > end:
                raise self._broken(f"element {index} of {key!r} is longer than the file's {self.size} bytes")
            result.append(data[first:position].decode("utf-8", "replace"))
        self.position = position
        return result

    def _alignment(self, value_type: int, value: Any) -> int:
        if value_type != GGUFValueType.UINT32:
            raise self._broken("general.alignment is not an unsigned 32-bit number")
        alignment = int(value)
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment}: expected a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, GGUFEntry]:
        entries: dict[str, GGUFEntry] = {}
        for index in range(num_tensors):
            name = self._string(f"the name of tensor {index}", MAX_NAME_BYTES, errors="strict")
            if name in entries:
                raise self._broken(f"the tensor {name!r} occurs twice")
            entries[name] = self._tensor(name)
        data_start = -(-self.position // alignment) * alignment
        placed = {name: entry._replace(start=data_start + entry.start) for name, entry in entries.items()}
        end, before = data_start, ""
        for name, entry in sorted(placed.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if (entry.start - data_start) % alignment:
                raise self._broken(
                    f"tensor {name!r} starts at {entry.start - data_start}, which is not a multiple of {alignment}"
                )
            if entry.num_bytes == 0:
                continue
            if entry.start < end:
                raise self._broken(f"tensor {name!r} overlaps {before!r}")
            end, before = entry.start + entry.num_bytes, name
            if end > self.size:
                raise self._broken(f"tensor {name!r} should end at byte {end}, the file ends at {self.size}")
        return placed

    def _tensor(self, name: str) -> GGUFEntry:
        """An entry whose `start` still counts from the data section."""
        num_dims = self._number(_U32)
        if num_dims > MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {num_dims} dimensions, at most {MAX_DIMS} exist")
        dims = [self._number(_U64) for _ in range(num_dims)]
        type_number = self._number(_U32)
        start = self._number(_U64)
        tensor_type = BY_NUMBER.get(type_number)
        if tensor_type is None:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} has the unknown type {type_number}",
                "take another quantization of this model, for example Q4_K_M or Q8_0",
            )
        block_len, block_bytes = tensor_type.block_len, tensor_type.block_bytes
        if dims and dims[0] % block_len:
            raise self._broken(
                f"tensor {name!r}: rows of {dims[0]} do not divide into {tensor_type.name} blocks of {block_len}"
            )
        num_bytes = math.prod(dims) // block_len * block_bytes
        too_many = math.prod(max(dim, 1) for dim in dims) >= 1 << 60  # also where a zero makes the bytes vanish
        if too_many or num_bytes + start > self.size or (not dims and block_len > 1):
            raise self._broken(
                f"tensor {name!r}: {tensor_type.name} of shape {dims[::-1]} at {start} does not fit into the file's "
                f"{self.size} bytes"
            )
        return GGUFEntry(tensor_type, tuple(reversed(dims)), start, num_bytes)

    def _string(self, what: str, max_bytes: int, errors: str = "replace") -> str:
        num_bytes = self._number(_U64)
        if num_bytes > self.end - self.position:
            raise self._broken(f"{what} would have {num_bytes} bytes, the file has {self.size}")
        if num_bytes > max_bytes:
            raise self._broken(f"{what} has {num_bytes} bytes, at most {max_bytes} are allowed")
        first = self.position
        self.position += num_bytes
        try:
            return self.data[first : self.position].decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8") from error

    def _number(self, kind: struct.Struct) -> Any:
        if kind.size > self.end - self.position:
            where = "the file ends" if self.end == self.size else f"the metadata goes on past {self.end} bytes"
            raise self._broken(f"{where} in the header, at byte {self.position}")
        value = kind.unpack_from(self.data, self.position)[0]
        self.position += kind.size
        return value

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", DOWNLOAD_AGAIN)
