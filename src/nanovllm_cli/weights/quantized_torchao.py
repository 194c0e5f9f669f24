"""Weights as torchao lays them into safetensors (from 0.14 on): of q_proj.weight the tensors q_proj._weight_qdata, _weight_scale
and so on, and what class they were of, as JSON, in the file's metadata under the weight's name.

    Float8Tensor                qdata e4m3 [N, K]; scale one, [N, 1] or one a block of 128 x 128
    Int8Tensor                  qdata int8 [N, K]; scale [N, G], zero_point int8 [N, G] or none
    IntxUnpackedToInt8Tensor    the same for 1 to 8 bits, one number a byte; zero_point of a float type, too
    Int4Tensor                  qdata [N, K / 2], number 2 i in the low and 2 i + 1 in the high nibble, two's complement;
                                scale and zero_point [G, N]: number * scale + zero_point
    Int4TilePackedTo4dTensor    qdata int32 [N / 8, K / 128, 32, 4], N and K filled up to multiples of 8 and 1024; scale_and_zero
                                [G, N, 2]: (code - 8) * scale + zero

The last is what NVIDIA's tensor cores read; AMD's write it in another order under the same shape, which nothing shows.
Inputs that are rounded as they come (act_quant_kwargs) are, to FP8, and to int8 without zero points; others are kept finer.
Sources: torchao 0.18's tensor classes and safetensors_support.py; PyTorch's int4mm.cu; FBGEMM's int4_row_quantize_zp.

Legend: N rows, K columns (inputs), G groups along a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import FP8_BLOCK, Affine, Integer
from nanovllm_cli.quant.rows import AffineRows, IntegerRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.json_file import parse_json
from nanovllm_cli.weights.quantized_fp8 import fp8_weight
from nanovllm_cli.weights.quantized_gptq import rounded_activations
from nanovllm_cli.weights.quantized_weight import (
    FLOATS,
    QUANTIZED_ELSEWHERE,
    Module,
    Part,
    QuantizedWeight,
    modules,
    those,
    unpack,
)

PREFIX = "_weight_"
PARTS = (
    "qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale", "act_quant_scale", "act_quant_zero_point",
    "per_tensor_scale", "act_per_tensor_scale",
)  # fmt: skip
KINDS = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Int4TilePackedTo4dTensor")
MAX_SETTINGS_CHARS = 20_000
"""Of one weight's JSON."""
_TILE, _WIDE = 8, 1024
_INTS: dict[int, Literal[2, 3, 4, 8]] = {1: 2, 2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}


@dataclass(frozen=True)
class WholeWeight:
    """Codes from a byte each, with zero points that are whole numbers. bits: of the codes, which have a sign."""

    format: Integer
    shape: tuple[int, int]
    bits: int
    codes: Part
    scales: Part
    zeros: Part | None
    others: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, self.zeros, *self.others)

    def rows(self, first: int, end: int) -> IntegerRows:
        codes = _with_middle(self.codes, self.codes.read()[first:end], self.bits, self.format.middle)
        scales = self.scales.checked_scales(self._of_rows(self.scales.read(), first, end))
        if self.zeros is None or not self.format.zeros:
            return IntegerRows(codes, scales)
        zeros = self._of_rows(self.zeros.read(), first, end)
        return IntegerRows(codes, scales, _with_middle(self.zeros, zeros, self.bits, self.format.middle))

    def _of_rows(self, values: torch.Tensor, first: int, end: int) -> torch.Tensor:
        return values.reshape(-1, values.shape[-1]).expand(self.shape[0], -1)[first:end].contiguous()


@dataclass(frozen=True)
class GroupsWeight:
    """Codes of four bits, a scale and a number that is added a group, both [G, N]. tiled: whether codes lie as tensor cores read
    them, and numbers beside scales [G, N, 2]. others: tensors that are not read."""

    format: Affine
    shape: tuple[int, int]
    codes: Part
    scales: Part
    zeros: Part | None
    others: tuple[Part, ...]
    tiled: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, self.zeros, *self.others)

    def rows(self, first: int, end: int) -> AffineRows:
        width = self.shape[1]
        groups = width // self.format.group
        if self.zeros is None:
            both = self.scales.checked_numbers(self.scales.read()[:groups, first:end].float())
            codes, scales, zeros = untiled(self.codes.read(), first, end)[:, :width], both[..., 0].t(), both[..., 1].t()
        else:
            codes = unpack(self.codes.read()[first:end].contiguous().view(torch.uint8), 4, width) ^ 8
            scales, zeros = (part.checked_numbers(part.read()[:, first:end].t().float()) for part in (self.scales, self.zeros))
        return AffineRows(codes.contiguous(), scales.contiguous(), (zeros - 8 * scales).contiguous())


def untiled(data: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """uint8 codes [end - first, K] of int32 [N / 8, K / 128, 32, 4]; first is a multiple of 8. Of eight rows a lane has row
    lane / 4, and of 16 columns those from 2 (lane % 4) on, two and again two behind eight; a word has two such sixteens, whose
    even columns come first."""
    some = data[first // _TILE : -(-end // _TILE)].contiguous()
    tiles, across = some.shape[:2]
    codes = unpack(some.view(torch.uint8), 4, 32).view(tiles, across, _TILE, 4, 4, 2, 2, 2)
    turned = codes.permute(0, 2, 1, 4, 6, 7, 3, 5)  # row, 128 columns, word, sixteen, eight, lane, odd
    return turned.reshape(tiles * _TILE, -1)[: end - first]


def _with_middle(part: Part, values: torch.Tensor, bits: int, middle: int) -> torch.Tensor:
    """uint8, the middle for 0. CheckpointError for numbers that need more bits."""
    low, high = (int(each) for each in torch.aminmax(values))
    if low < -(1 << bits - 1) or high >= 1 << bits - 1:
        raise part.misfit(f"has numbers from {low} to {high}, which {bits} bits don't hold")
    return (values.short() + middle).to(torch.uint8)


def read_torchao(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. What each is the files' metadata says; config's settings are those of new ones."""
    if other := next((name for name in checkpoint.names() if name.endswith("_qdata") and f".{PREFIX}" not in name), None):
        raise UnsupportedError(f"{checkpoint.path}: tensor {other!r} is of no layer's weight", "take the unquantized model")
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, [PREFIX + part for part in PARTS]):
        parts = {name.removeprefix(PREFIX): theirs for name, theirs in module.suffixes.items()}
        own = Module(checkpoint, module.name, parts, PREFIX)
        weights[module.weight_name] = _weight(module, own)
    return weights


def _weight(module: Module, own: Module) -> QuantizedWeight:
    """own: the module's tensors by the names of PARTS."""
    kind, said = _settings(module)
    if "act_pre_scale" in own.suffixes:
        raise own.any("act_pre_scale").unsupported("scales what goes into a layer", "take a model without it")
    match kind:
        case "Float8Tensor":
            return _fp8(module, own, said)
        case "Int8Tensor":
            return _whole(own, said, 8, _rounds_to_int8(own, said))
        case "IntxUnpackedToInt8Tensor":
            return _whole(own, said, _bits(said), False)
        case "Int4Tensor":
            return _pairs(own, said)
        case "Int4TilePackedTo4dTensor":
            return _tiles(own, said)
    raise UnsupportedError(f"{said.where}: a tensor of the class {kind[:40]!r}", f"known: {', '.join(KINDS)}")


def _settings(module: Module) -> tuple[str, ConfigReader]:
    """A weight's class, and what its files' metadata says of it."""
    text = module.checkpoint.file_metadata.get(module.weight_name)
    where = f"{module.checkpoint.path}: metadata of {module.weight_name!r}"
    if text is None:
        raise CheckpointError(f"{where} is missing, which says what its tensors are", QUANTIZED_ELSEWHERE)
    if len(text) > MAX_SETTINGS_CHARS:
        raise CheckpointError(f"{where} has {len(text)} characters, at most {MAX_SETTINGS_CHARS} are read", QUANTIZED_ELSEWHERE)
    whole = ConfigReader(parse_json(text.encode(), where, unique_keys=True), where)
    return whole.text("_type"), ConfigReader(whole.section("_data").values, where)


def _block(said: ConfigReader, shape: tuple[int, int], scales: Part) -> tuple[int, int]:
    """Rows and columns that share a scale; those that are not said follow from how many there are."""
    found = said.values.get("block_size")
    if found is None or found == []:
        return shape if scales.shape in ((), (1,), (1, 1)) else (1, shape[1])
    if not isinstance(found, list) or len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
        raise CheckpointError(f"{said.where}: 'block_size' must be a list of two sizes", QUANTIZED_ELSEWHERE)
    return min(found[0], shape[0]), min(found[1], shape[1])


def _fp8(module: Module, own: Module, said: ConfigReader) -> QuantizedWeight:
    codes = own.matrix("qdata", ("F8_E4M3",))
    num_rows, width = codes.shape
    scales = own.part("scale", FLOATS)
    block = _block(said, (num_rows, width), scales)
    blocks = block == (FP8_BLOCK, FP8_BLOCK) and len(scales.shape) == 2 and scales.shape != (1, 1)
    if not blocks and block not in ((1, width), (num_rows, width)):
        told = f"{said.where}: FP8 with a scale for {block[0]} x {block[1]} numbers"
        raise UnsupportedError(told, f"known: one a row, a tensor or {FP8_BLOCK} x {FP8_BLOCK}")
    renamed = Module(module.checkpoint, module.name, {"weight": codes.name, "weight_scale": scales.name})
    return fp8_weight(renamed, "weight_scale", blocks, "dynamic" if said.has("act_quant_kwargs") else "none")


def _bits(said: ConfigReader) -> int:
    kind = said.section("target_dtype").text("_data")
    bits = next((each for each in _INTS if kind == f"int{each}"), 0)
    if not bits:
        raise UnsupportedError(f"{said.where}: numbers of the type {kind[:40]!r}", "known: int1 to int8")
    return bits


def _rounds_to_int8(own: Module, said: ConfigReader) -> bool:
    """As they come, with a scale a token, and no zero points."""
    if not said.has("act_quant_kwargs") or "act_quant_scale" in own.suffixes:
        return False
    inputs = said.section("act_quant_kwargs").section("_data")
    return bool(_name(inputs.values.get("mapping_type")) in (None, "SYMMETRIC"))


def _name(value: Any) -> Any:
    """Of what an enumeration has."""
    return value.get("_data") if isinstance(value, Mapping) else value


def _whole(own: Module, said: ConfigReader, bits: int, rounds: bool) -> WholeWeight:
    codes = own.matrix("qdata", ("I8",))
    num_rows, width = codes.shape
    block = _block(said, (num_rows, width), own.part("scale", FLOATS))
    if block[0] not in (1, num_rows) or width % block[1] or (block[0] > 1 and block[1] != width):
        told = f"{said.where}: a scale for {block[0]} x {block[1]} numbers"
        raise UnsupportedError(told, "known: one a group of columns, a row or a tensor")
    shape = (num_rows // block[0], width // block[1])
    single = ((), (1,)) if shape == (1, 1) else ()
    scales = own.part("scale", FLOATS, shape, *single)
    zeros, has_zeros = None, False
    if own.has("zero_point"):
        zeros = own.part("zero_point", (*FLOATS, "I8", "I32", "I64"), shape, *single)
        values = zeros.checked_numbers(zeros.read()).float()
        has_zeros = bool(values.any())
        if has_zeros and not bool((values == values.round()).all()):
            raise zeros.unsupported("has zero points that are no whole numbers", "known: whole ones")
    form = Integer(
        _INTS[bits],
        0 if block[1] == width else block[1],
        zeros=has_zeros,
        activation="int8" if rounds else rounded_activations(_INTS[bits]),
        scales=scales.scale_type,
    )
    read = (codes.name, scales.name, "" if zeros is None else zeros.name)
    others = tuple(own.any(suffix) for suffix, name in own.suffixes.items() if name not in read)
    return WholeWeight(form, (num_rows, width), bits, codes, scales, zeros, others)


def _group(said: ConfigReader, shape: tuple[int, int], scales: Part) -> Affine:
    rows, size = _block(said, shape, scales)
    if rows != 1 or shape[1] % size:
        raise UnsupportedError(f"{said.where}: a scale for {rows} x {size} of {shape[1]} numbers", "known: groups of columns")
    form = Affine(4, size, "float32")
    scales.check_width(form, shape[1])
    return form


def _pairs(own: Module, said: ConfigReader) -> GroupsWeight:
    codes = own.matrix("qdata", ("I8", "U8"))
    shape = codes.shape[0], codes.shape[1] * 2
    scales = own.part("scale", FLOATS, (None, shape[0]))
    form = _group(said, shape, scales)
    wanted = (shape[1] // form.group, shape[0])
    scales, zeros = own.part("scale", FLOATS, wanted), own.part("zero_point", FLOATS, wanted)
    return GroupsWeight(form, shape, codes, scales, zeros, (), tiled=False)


def _tiles(own: Module, said: ConfigReader) -> GroupsWeight:
    codes = own.part("qdata", ("I32",), (None, None, 32, 4))
    sizes = said.values.get("shape")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise CheckpointError(f"{said.where}: 'shape' must be a list of two sizes", QUANTIZED_ELSEWHERE)
    num_rows, width = sizes
    filled, wide = -(-num_rows // _TILE) * _TILE, -(-width // _WIDE) * _WIDE
    if codes.shape != (filled // _TILE, wide // 128, 32, 4):
        raise codes.misfit(f"has the shape {list(codes.shape)}, which {num_rows} x {width} numbers don't have")
    both = own.part("scale_and_zero", FLOATS, (None, filled, 2))
    form = _group(said, (num_rows, width), both)
    own.part("scale_and_zero", FLOATS, (wide // form.group, filled, 2))
    return GroupsWeight(form, (num_rows, width), codes, both, None, (), tiled=True)
