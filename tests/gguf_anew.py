"""A GGUF file once more, with something changed in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize


def written_anew(
    path: Path,
    to: Path,
    keys: Mapping[str, Any] | None = None,
    drop: Collection[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    arch: str | None = None,
    rounded: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """keys: others, or None for none. drop: tensors that are left out. tensors: others, in float32. arch: another architecture,
    by whose name the keys begin then. rounded: tensors of float32, and the blocks that they become."""
    file = gguf.GGUFReader(path)
    own = str(file.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(to, arch or own)
    for key, field in file.fields.items():
        value = keys[key] if keys is not None and key in keys else field.contents()
        if key.startswith("GGUF.") or key == "general.architecture" or value is None:
            continue
        name = key.replace(f"{own}.", f"{arch}.", 1) if arch is not None and key.startswith(f"{own}.") else key
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    for key, value in (keys or {}).items():
        if key not in file.fields and value is not None:
            add(writer, key, value)
    for tensor in file.tensors:
        if tensor.name not in drop:
            numbers = (tensors or {}).get(tensor.name)
            kind = None if numbers is not None else tensor.tensor_type
            if rounded is not None and tensor.name in rounded:
                kind = rounded[tensor.name]
                numbers = quantize(tensor.data, kind)
            writer.add_tensor(tensor.name, tensor.data if numbers is None else numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    by_type = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    by_type[type(value)](key, value)
