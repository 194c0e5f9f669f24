"""Writing GGUF in pieces: header and tensor table by the `gguf` package, then the tensors' bytes as they come.

A header is a mapping of key -> GGUFValue, which carries the type that the key has in the file. `HeaderBuilder` makes one
out of the package's own `add_…` methods, so that keys and types are those of llama.cpp's converter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGUFValueType, Keys
from gguf.gguf_writer import SHARD_NAME_FORMAT, GGUFValue, WriterState

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.gguf_types import TensorType
from nanovllm_cli.weights.gguf import DEFAULT_ALIGNMENT, MAX_NAME_BYTES
from nanovllm_cli.weights.writer import TensorWriter

Header = dict[str, GGUFValue]

_FLOATS = (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64)
_OWN_KEYS = ("general.alignment", "split.no", "split.count", "split.tensors.count")  # of a file, not of a model


class GGUFTensor(NamedTuple):
    """A tensor that will be written. `shape` in torch order, rows first."""

    name: str
    shape: tuple[int, ...]
    type: TensorType

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_len * self.type.block_bytes


class HeaderBuilder(GGUFWriter):  # type: ignore[misc]
    """The package's writer without a file: only its `add_…` methods are used, and what they have put together."""

    def __init__(self, architecture: str) -> None:
        super().__init__(None, architecture)

    def header(self) -> Header:
        return dict(self.kv_data[0])

    def dropped(self) -> list[str]:
        """Takes out what does not have the type that its key says (model cards hold anything); their keys."""
        wrong = [key for key, value in self.kv_data[0].items() if not _fits(value)]
        for key in wrong:
            del self.kv_data[0][key]
        return wrong


def header_of(metadata: Mapping[str, Any], types: Mapping[str, tuple[int, int | None]]) -> Header:
    """The metadata of a file that was read, to be written again. Keys that describe the file itself are left out, and
    empty arrays, which the format's writers do not write. CheckpointError where they do not say what the file is of."""
    ConfigReader(metadata, "the file").text(Keys.General.ARCHITECTURE)
    header: Header = {}
    for key, value in metadata.items():
        if key in _OWN_KEYS or value == []:
            continue
        kind, items = types[key]
        if items == GGUFValueType.ARRAY:
            raise CheckpointError(f"the metadata key {key!r} holds arrays of arrays, which cannot be written")
        header[key] = GGUFValue(value, GGUFValueType(kind), None if items is None else GGUFValueType(items))
    return header


class GGUFPartWriter(TensorWriter[GGUFTensor]):
    """One `.gguf` file, whole or part `number` of `count` (from 0), whose tensors arrive in order, in slices.

    The first part has the header; the others say only which part they are. `total`: tensors of all parts.
    """

    def __init__(
        self,
        file: BinaryIO,
        header: Header,
        tensors: Iterable[GGUFTensor],
        number: int = 0,
        count: int = 1,
        total: int = 0,
    ) -> None:
        super().__init__(file, tensors, DEFAULT_ALIGNMENT)
        writer = GGUFWriter(None, header[Keys.General.ARCHITECTURE].value)
        writer.kv_data = [dict(header) if number == 0 else {}]
        if count > 1:
            writer.add_uint16(Keys.Split.LLM_KV_SPLIT_NO, number)
            writer.add_uint16(Keys.Split.LLM_KV_SPLIT_COUNT, count)
            writer.add_int32(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, total)
        for tensor in self._left:
            if len(tensor.name.encode()) >= MAX_NAME_BYTES:
                raise CheckpointError(
                    f"the tensor name {tensor.name!r} is longer than GGUF's {MAX_NAME_BYTES - 1} bytes"
                )
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=tensor.type.number
            )
        writer.fout, writer.state = [file], WriterState.EMPTY
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        except (struct.error, ValueError, UnicodeEncodeError) as error:
            raise CheckpointError(f"the metadata cannot be written as GGUF: {error}") from error
        file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def part_names(stem: str, count: int) -> list[str]:
    """What the files of a model in `count` parts are called."""
    return [str(SHARD_NAME_FORMAT.format(stem, number, count)) for number in range(1, count + 1)]


def _fits(field: GGUFValue) -> bool:
    """Whether the value is of the field's type, in the range of the 32-bit numbers that all header keys have."""
    value: Any = field.value
    if field.type == GGUFValueType.ARRAY:
        kinds = set(map(type, value))
        return len(kinds) == 1 and (kinds <= {str, bool, float} or (kinds == {int} and all(-(2**31) <= i < 2**31 for i in value)))
    if field.type == GGUFValueType.STRING:
        return isinstance(value, str)
    if field.type == GGUFValueType.BOOL or isinstance(value, bool):
        return field.type == GGUFValueType.BOOL and isinstance(value, bool)
    if field.type in _FLOATS:
        return isinstance(value, int | float) and abs(value) < 3e38
    return isinstance(value, int) and -(2**31) <= value < 2**31
