"""GGUF's tensor types by name and by number, with their blocks' sizes: those of the `gguf` package, and newer ones of llama.cpp's
(ggml.h, ggml-common.h) that a release of the package does not have, or cannot dequantize."""

from __future__ import annotations

from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType


class TensorType(NamedTuple):
    """block_len: numbers of a row that are rounded together, 1 for plain numbers; block_bytes: what they take."""

    name: str
    number: int
    block_len: int
    block_bytes: int


NEWER = (TensorType("Q1_0", 41, 128, 18), TensorType("Q2_0", 42, 64, 18))
"""What gguf 0.19 does not dequantize."""
TENSOR_TYPES: dict[str, TensorType] = {
    **{kind.name: TensorType(kind.name, int(kind), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType},
    **{kind.name: kind for kind in NEWER},
}
BY_NUMBER = {kind.number: kind for kind in TENSOR_TYPES.values()}

FILE_TYPES: dict[str, int] = {
    **{kind.name: int(kind) for kind in LlamaFileType}, "MOSTLY_Q1_0": 40, "MOSTLY_Q2_0": 41
}  # fmt: skip
"""Numbers of general.file_type."""
