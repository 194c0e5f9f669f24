"""Weights as HQQ stores them (Badri & Shaji 2023), in safetensors that transformers has written.

    W_q           codes, all groups below each other: bytes [R / n, S] with n codes each, of which the first R / n groups have the
                  highest bits, the next those below, and so on; of 3 bits int32 [ceil(R / 10), S], ten codes from bit 27 down
    scale, zero   [R, 1], of a float type: number = (code - zero) * scale
    shape [2], axis, nbits, group_size, packing, and others that say how it was made

With axis 1 a group is S columns of a row, and R groups are the weight's rows one behind the other: what `Affine` says, with a
minimum of -zero * scale, both in float32, as a product has more digits than its factors. With axis 0, W_q's columns and scales
[1, R]: a group is one of a column's numbers in each of S rows that lie apart. Nothing is multiplied so; such weights are read as
the numbers that they stand for, in the compute type, as are groups of fewer than 16. `view_as_float` changes how W_q is labelled,
not its bytes.

Source: hqq 0.2.8's quantize.py, bitpack.py and utils.py. Not covered: scales that are quantized themselves, which hqq does not
write into safetensors, and the library's own `qmodel.pt`, a pickle.

Legend: N rows, K columns (inputs); R groups of S numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import Affine
from nanovllm_cli.quant.rows import AffineRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_weight import FLOATS, Module, Part, QuantizedWeight, modules

SETTINGS = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
    "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
SUFFIXES = ("W_q", "scale", "zero", "scale_q", "zero_q", "meta_scale", "meta_zero", *SETTINGS)
IN_A_BYTE = {8: 1, 6: 1, 5: 1, 4: 2, 2: 4, 1: 8}
IN_A_WORD = 10
"""Codes of 3 bits."""
GROUPS = (256, 128, 64, 32, 16)
_WHOLE = ("U8", "I8", "I16", "I32", "I64")
_STORED = (*FLOATS, "U8", "I32", "F64")
MAX_SIDE = 1 << 31


@dataclass(frozen=True)
class HQQWeight:
    """format: None of numbers that no kernel has groups for. groups: how many there are, of `size` numbers. settings: tensors
    that say how codes lie, read when this was made."""

    format: Affine | None
    shape: tuple[int, int]
    bits: int
    axis: Literal[0, 1]
    groups: int
    size: int
    codes: Part
    scales: Part
    zeros: Part
    settings: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.codes, self.scales, self.zeros, *self.settings

    @property
    def stored_as(self) -> str:
        return f"hqq{self.bits}:group={self.size}" if self.format is None else self.format.name

    def rows(self, first: int, end: int) -> AffineRows | torch.Tensor:
        width = self.shape[1]
        if self.axis == 0:
            places = torch.arange(first * width, end * width)
            codes = self._codes(places // self.groups, places % self.groups)
            scales, zeros = (part[places % self.groups] for part in self._floats())
            return ((codes.float() - zeros) * scales).view(-1, width)
        per_row = width // self.size
        own = torch.arange(first * per_row, end * per_row)
        codes = self._codes(own, None).view(end - first, width)
        scales, zeros = (part[own].view(end - first, per_row) for part in self._floats())
        if self.format is None:
            spread = (part.repeat_interleave(self.size, 1) for part in (zeros, scales))
            return (codes.float() - next(spread)) * next(spread)
        repeat = self.size // self.format.group
        return AffineRows(codes, *(part.repeat_interleave(repeat, 1).contiguous() for part in (scales, -zeros * scales)))

    def _floats(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R] of scales and of zeros, whose products are numbers."""
        scales, zeros = (part.checked_numbers(part.read().float().flatten()) for part in (self.scales, self.zeros))
        self.zeros.checked_numbers(scales * zeros)
        return scales, zeros

    def _codes(self, rows: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
        """uint8: of W_q unpacked, those of these rows, and of these columns where there are any."""
        across = self.groups if self.axis == 0 else self.size
        data = self.codes.read_bytes()
        data = data.view(torch.int32).view(-1, across) if self.bits == 3 else data.view(-1, across)
        height, width = data.shape[0], 3 if self.bits == 3 else 8 // IN_A_BYTE[self.bits]
        highest = width * ((IN_A_WORD if self.bits == 3 else IN_A_BYTE[self.bits]) - 1)
        found = data[rows % height] if columns is None else data[rows % height, columns]
        shifts = (highest - width * (rows // height)).to(data.dtype)
        codes = (found >> (shifts.unsqueeze(1) if columns is None else shifts) & ((1 << width) - 1)).to(torch.uint8)
        if width > self.bits and bool((codes >= 1 << self.bits).any()):
            raise self.codes.damaged(f"has codes of more than {self.bits} bits")
        return codes


def read_hqq(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. What each module's tensors are it says itself; config's settings are those of new ones."""
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, SUFFIXES):
        if module.has("scale_q") or module.has("zero_q") or module.has("meta_scale") or module.has("meta_zero"):
            some = next(suffix for suffix in ("scale_q", "zero_q", "meta_scale", "meta_zero") if module.has(suffix))
            raise module.any(some).unsupported("belongs to scales that are quantized themselves", "take a model without them")
        if module.has("W_q") or (module.has("scale") and module.has("zero")):
            weights[module.weight_name] = _weight(module)
    return weights


def _weight(module: Module) -> HQQWeight:
    codes, shape = module.part("W_q", _STORED), module.part("shape", ("I64", "I32"), (2,))
    num_rows, width = shape.read().tolist()
    if not (0 < num_rows < MAX_SIDE and 0 < width < MAX_SIDE):
        raise shape.damaged(f"says that the weight is {num_rows} x {width}")
    bits, axis = _number(module, "nbits"), _number(module, "axis")
    if bits not in IN_A_BYTE and bits != 3:
        raise module.any("nbits").unsupported(f"says {bits}", "known: 1, 2, 3, 4, 5, 6 and 8 bits")
    if axis not in (0, 1):
        raise module.any("axis").damaged(f"says {axis}, expected 0 or 1")
    if module.has("channel_wise") and not _number(module, "channel_wise"):
        raise module.any("channel_wise").unsupported("says that one scale is for all numbers", "take another model")
    size = _number(module, "group_size") if module.has("group_size") else (width if axis == 1 else num_rows)
    if size < 1 or (width if axis == 1 else num_rows) % size:
        raise module.any("group_size").misfit(f"says {size}, which {num_rows} x {width} numbers don't divide into")
    groups = num_rows * width // size
    _check_packing(module, bits)
    rows, across = (groups, size) if axis == 1 else (size, groups)
    num_bytes = 4 * across * -(-rows // IN_A_WORD) if bits == 3 else rows // IN_A_BYTE[bits] * across
    if codes.num_bytes != num_bytes or (bits != 3 and rows % IN_A_BYTE[bits]):
        raise codes.misfit(f"has {codes.num_bytes} bytes, expected {num_bytes} for {groups} groups of {size} in {bits} bits")
    wanted = ((groups, 1), (groups,)) if axis == 1 else ((1, groups), (groups,))
    scales, zeros = (module.part(suffix, FLOATS, *wanted) for suffix in ("scale", "zero"))
    group = next((each for each in GROUPS if size % each == 0), 0)
    form = Affine(max(bits, 2), group, "float32") if axis == 1 and group else None  # type: ignore[arg-type]
    settings = tuple(module.any(suffix) for suffix in SETTINGS if module.has(suffix))
    return HQQWeight(form, (num_rows, width), bits, axis, groups, size, codes, scales, zeros, settings)  # type: ignore[arg-type]


def _number(module: Module, suffix: str) -> int:
    """A whole one, whatever it is labelled as."""
    part = module.part(suffix, (*_WHOLE, "F32"), (), (1,))
    value = part.read().flatten()[0].item()
    if value != value or not float(value).is_integer():
        raise part.unsupported(f"says {value:g}", "known: whole numbers")
    return int(value)


def _check_packing(module: Module, bits: int) -> None:
    """CheckpointError where it is named otherwise than codes of these bits lie."""
    if not module.has("packing"):
        return
    part = module.part("packing", ("U8",), (None,))
    name = bytes(part.read()[:40].tolist()).decode("latin-1")
    wanted = {3: "3bit_32", 4: "4bit_u8", 2: "2bit_u8", 1: "1bit_u8"}.get(bits, "8bit_u8")
    if name != wanted:
        raise part.misfit(f"says {name!r}, expected {wanted!r} for {bits} bits")
