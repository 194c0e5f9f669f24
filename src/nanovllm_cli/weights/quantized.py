"""Checkpoints that others quantized: a WeightReader by what config.json's quantization_config says.

Each family (`FAMILIES`) finds its weights and knows what their tensors mean; here they become one reader, in which a weight is
one name again. What is not quantized (norms, biases, layers that were left out) is read as in any checkpoint. Scales of a
quantized KV cache are left aside: the cache's type is the engine's choice, not the checkpoint's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.quant.format import Format
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.folder_config import quantization_of
from nanovllm_cli.weights.mlx_names import METHOD
from nanovllm_cli.weights.quantized_bitnet import as_numbers, read_bitnet
from nanovllm_cli.weights.quantized_bitsandbytes import read_bitsandbytes
from nanovllm_cli.weights.quantized_compressed import read_compressed
from nanovllm_cli.weights.quantized_fp8 import read_fbgemm, read_fp8
from nanovllm_cli.weights.quantized_gguf import GGUFNumbers
from nanovllm_cli.weights.quantized_gptq import read_auto_round, read_awq, read_gptq
from nanovllm_cli.weights.quantized_hqq import read_hqq
from nanovllm_cli.weights.quantized_mlx import read_mlx
from nanovllm_cli.weights.quantized_modelopt import read_modelopt
from nanovllm_cli.weights.quantized_mxfp4 import read_mxfp4
from nanovllm_cli.weights.quantized_quark import read_quark
from nanovllm_cli.weights.quantized_rows import RowsOf, apart, stored_bytes
from nanovllm_cli.weights.quantized_torchao import read_torchao
from nanovllm_cli.weights.quantized_weight import InNumbers, QuantizedWeight
from nanovllm_cli.weights.stacked import unstacked
from nanovllm_cli.weights.weight_reader import GGUFReader, PlainReader, Slices, WeightReader, row_slices

ReadFamily = Callable[[Checkpoint, ConfigReader], dict[str, QuantizedWeight]]
FAMILIES: dict[str, ReadFamily] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitnet": read_bitnet,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "hqq": read_hqq,
    METHOD: read_mlx,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "quark": read_quark,
    "torchao": read_torchao,
}
KV_CACHE_SCALES = (
    ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".kv_scale", ".output_scale", ".prob_output_scale",
    ".output_zero_point",
)  # fmt: skip


def open_reader(checkpoint: Checkpoint) -> WeightReader:
    """The reader for what a checkpoint is made of. UnsupportedError for kinds of quantization that nothing here reads."""
    checkpoint = unstacked(checkpoint)
    if checkpoint.format == "gguf":
        return GGUFReader(checkpoint)
    return quantized_reader(checkpoint) or PlainReader(checkpoint)


def quantized_reader(checkpoint: Checkpoint) -> PlainReader | None:
    """The reader of a quantized checkpoint, None for one that is not. UnsupportedError for methods that nothing here reads."""
    weights = _weights(checkpoint)
    return None if weights is None else QuantizedReader(checkpoint, weights)


def takes_apart(reader: WeightReader) -> bool:
    """Whether it has several weights, or another order of rows, of what is one matrix of its files."""
    return isinstance(reader, QuantizedReader) and reader.takes_apart


def without_codes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one whose codes and scales are what a GGUF file can have of them: blocks, or the numbers that
    they stand for; BitNet's are numbers."""
    numbers = as_numbers(checkpoint)
    if numbers is not checkpoint:
        return numbers
    weights = _weights(checkpoint)
    return checkpoint if weights is None else GGUFNumbers(checkpoint, weights, KV_CACHE_SCALES)


def _weights(checkpoint: Checkpoint) -> dict[str, QuantizedWeight] | None:
    """By their names; None of a checkpoint that is not quantized."""
    settings = quantization_of(checkpoint.config)
    if settings is None:
        return None
    where = f"{checkpoint.path}: quantization_config"
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{where} must be an object", BROKEN)
    config = ConfigReader(settings, where)
    method = _method(config)
    if method not in FAMILIES:
        raise UnsupportedError(
            f"{where}: weights quantized by {method[:40]!r}", f"known: {', '.join(FAMILIES)}, and GGUF files"
        )
    return apart(FAMILIES[method](checkpoint, config), checkpoint.config)


def _method(config: ConfigReader) -> str:
    """Early bitsandbytes and compressed-tensors didn't write their names."""
    values: Mapping[str, Any] = config.values
    if "quant_method" not in values and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        return "bitsandbytes"
    if "quant_method" not in values and "config_groups" in values:
        return "compressed-tensors"
    return config.text("quant_method").lower().removeprefix("intel/")  # as AutoRound once had it


class QuantizedReader(PlainReader):
    """A WeightReader: `weights` by name, and all tensors that no weight is made of as they are."""

    def __init__(self, checkpoint: Checkpoint, weights: Mapping[str, QuantizedWeight]) -> None:
        super().__init__(checkpoint)
        self._weights = weights
        parts = {part.name for weight in weights.values() for part in weight.parts}
        plain = {name for name in self._names - parts if not name.endswith(KV_CACHE_SCALES)}
        self._names = plain | weights.keys()
        self.takes_apart = any(isinstance(weight, RowsOf) for weight in weights.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape if name in self._weights else super().shape(name)

    def num_bytes(self, name: str) -> int:
        if name not in self._weights:
            return super().num_bytes(name)
        return stored_bytes(self._weights[name])

    def format(self, name: str) -> Format | None:
        return self._weights[name].format if name in self._weights else None

    def stored_as(self, name: str) -> str | None:
        weight = self._weights.get(name)
        return weight.stored_as if isinstance(weight, InNumbers) else super().stored_as(name)

    def slices(self, name: str) -> Slices:
        if name not in self._weights:
            yield from super().slices(name)
            return
        weight = self._weights[name]
        *outer, width = weight.shape
        for first, end in row_slices(math.prod(outer), 4 * width):
            yield weight.rows(first, end), first
            for part in weight.parts:
                self.checkpoint.release(part.name)
