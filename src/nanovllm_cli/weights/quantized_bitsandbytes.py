"""Weights as bitsandbytes stores them.

    nf4     weight: two codes a byte, the first in the high nibble, of the flattened matrix
            weight.absmax [N * K / blocksize]: float32, or, scaled themselves, bytes that stand for
            nested_quant_map[byte] * nested_absmax[i / nested_blocksize] + nested_offset
            weight.quant_map: the 16 values; weight.quant_state.bitsandbytes__nf4: JSON with shape and block sizes
    int8    weight int8 [N, K]; SCB [N]: the largest magnitude of a row, that 127 stands for

Source: bitsandbytes' QuantState and dequantize_blockwise. A module is quantized if it has a quant_state or SCB, so
llm_int8_skip_modules is not needed. int8 weights run with activations as they are; LLM.int8() would round all but outliers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import NF4, Integer, Nf4
from nanovllm_cli.quant.rows import IntegerRows, Nf4Rows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.json_file import parse_json
from nanovllm_cli.weights.quantized_weight import BYTES, Module, Part, QuantizedWeight, modules, those

NF4_STATE, FP4_STATE = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
SUFFIXES = (
    "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", NF4_STATE, FP4_STATE,
    "SCB", "weight_format",
)  # fmt: skip
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STORAGE_TYPES = ("U8", "I8", "F16", "BF16", "F32")  # bnb_4bit_quant_storage: how the bytes are labelled
MAX_STATE_BYTES = 10_000
FLOAT32 = ("F32",)


@dataclass(frozen=True)
class NestedScales:
    """Scales that are quantized themselves, with their own scale a block."""

    codes: Part
    scales: Part
    values: Part
    block: int
    offset: float


@dataclass(frozen=True)
class Nf4Weight:
    """values, state: read when this was made."""

    format: Nf4
    shape: tuple[int, int]
    codes: Part
    scales: Part | NestedScales
    values: Part
    state: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        scales = self.scales
        own = (scales,) if isinstance(scales, Part) else (scales.codes, scales.scales, scales.values)
        return (self.codes, self.values, self.state, *own)

    def rows(self, first: int, end: int) -> Nf4Rows:
        width = self.shape[1]
        packed = self.codes.read_bytes()[first * width // 2 : -(-end * width // 2)]
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten()[: (end - first) * width]
        groups = width // self.format.group
        return Nf4Rows(codes.view(-1, width), self._scales(first * groups, end * groups).view(-1, groups))

    def _scales(self, first: int, end: int) -> torch.Tensor:
        """float32 of blocks first … end - 1. A block of zeros has the scale 0."""
        scales = self.scales
        if isinstance(scales, Part):
            return scales.checked_scales(scales.read().flatten()[first:end], zero=True)
        outer = scales.scales.checked_scales(scales.scales.read().flatten(), zero=True)
        values = scales.values.read()[scales.codes.read().flatten()[first:end].long()]
        result = (
            values * outer[torch.arange(first, end) // scales.block] + scales.offset
        )  # rounding may bring it below 0
        if not bool(result.isfinite().all()):
            raise scales.scales.damaged("makes scales that are infinite")
        return result


@dataclass(frozen=True)
class Int8Weight:
    format: Integer
    shape: tuple[int, ...]
    codes: Part
    largest: Part
    layout: Part | None

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.largest, self.layout)

    def rows(self, first: int, end: int) -> IntegerRows:
        largest = self.largest.checked_scales(self.largest.read()[first:end], zero=True)
        codes = self.codes.read()[first:end].view(torch.uint8) ^ 128  # from -128 … 127
        return IntegerRows(codes, (largest / 127).unsqueeze(1))


def read_bitsandbytes(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights."""
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, SUFFIXES):
        if module.has(FP4_STATE):
            raise module.part(FP4_STATE, BYTES).unsupported(
                "says that the weight is FP4", "known of bitsandbytes: nf4, int8"
            )
        kind = module.any("weight").dtype_name if module.has("weight") else ""
        if kind == "U8" or module.has(NF4_STATE) or module.has("weight.absmax"):
            weights[module.weight_name] = _nf4_weight(module)
        elif kind == "I8" or module.has("SCB"):
            weights[module.weight_name] = _int8_weight(module)
    return weights


def _int8_weight(module: Module) -> Int8Weight:
    codes = module.matrix("weight", ("I8",))
    largest = module.part("SCB", FLOAT32, (codes.shape[0],))
    layout = module.part("weight_format", BYTES, (), (1,)) if module.has("weight_format") else None
    if layout is not None and int(layout.read().flatten()[0]) != 0:
        raise layout.unsupported("says that the weight is laid out for a GPU", "known: row by row")
    return Int8Weight(Integer(8, 0, activation="none", scales="float32"), codes.shape, codes, largest, layout)


def _nf4_weight(module: Module) -> Nf4Weight:
    state = module.part(NF4_STATE, BYTES, (None,))
    if state.num_bytes > MAX_STATE_BYTES:
        raise state.damaged(f"has {state.num_bytes} bytes, more than {MAX_STATE_BYTES}")
    where = f"{state.checkpoint.path}: tensor {state.name!r}"
    read = ConfigReader(parse_json(state.read().numpy().tobytes(), where, unique_keys=True), where)
    if read.text("quant_type") != "nf4":
        raise state.misfit(f"says {read.text('quant_type')[:20]!r} in it")
    num_rows, width = _shape(read, state)
    block = read.integer("blocksize")
    if block not in BLOCK_SIZES:
        raise state.misfit(f"has blocks of {block}, expected one of {', '.join(map(str, BLOCK_SIZES))}")
    form = Nf4(block)
    state.check_width(form, width)
    codes = module.part("weight", STORAGE_TYPES)
    if codes.num_bytes != num_rows * width // 2:
        raise codes.misfit(f"has {codes.num_bytes} bytes, expected {num_rows * width // 2} for {num_rows} x {width}")
    values = module.part("weight.quant_map", FLOAT32, (16,))
    if not torch.equal(values.read(), torch.tensor(NF4)):
        raise values.unsupported("holds other values than NF4's")
    return Nf4Weight(
        form, (num_rows, width), codes, _scales(module, read, num_rows * width // block), values, state
    )


def _scales(module: Module, read: ConfigReader, count: int) -> Part | NestedScales:
    if not module.has("weight.nested_absmax"):
        return module.part("weight.absmax", FLOAT32, (count,), (count, 1))
    block = read.integer("nested_blocksize")
    offset = read.number("nested_offset", positive=False)
    blocks = -(-count // block)
    values = module.part("weight.nested_quant_map", FLOAT32, (256,))
    if not bool(values.read().isfinite().all()):
        raise values.damaged("has values that are NaN or infinite")
    return NestedScales(
        module.part("weight.absmax", BYTES, (count,), (count, 1)),
        module.part("weight.nested_absmax", FLOAT32, (blocks,), (blocks, 1)),
        values,
        block,
        offset,
    )


def _shape(read: ConfigReader, state: Part) -> tuple[int, int]:
    sizes = read.numbers("shape", 2)
    if any(size != int(size) or size >= 1 << 31 for size in sizes):
        raise state.damaged(f"says that the weight is {sizes[0]:g} x {sizes[1]:g}")
    return int(sizes[0]), int(sizes[1])
