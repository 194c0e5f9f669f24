"""Weights that others quantized as a GGUF file can have them: a checkpoint with their numbers under the same names.

    MXFP4, NVFP4 without a number for all   the same bits in another order
    symmetric integers of 2 to 4 bits, 8    Q4_0, Q8_0: scale * (code - middle)
    integers of 2 to 4 bits, zero points    Q4_1, whose numbers are scale * code + minimum: minima are rounded to float16
    affine of 2 to 5 bits                   Q4_1 and Q5_1; MLX's only where no minimum is rounded
    any other                               numbers, in the type of MLX's and HQQ's scales, or the model's

Blocks are of 32 columns, and their scales in float16: groups of a multiple of 32 whose scales are numbers of float16, as those of
most models are. Columns in another order (GPTQ's desc_act) have no such groups. Matrices of a layer's experts become one tensor
there: all of them have one type.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from nanovllm_cli.quant.format import Affine, Blocks, Format, Integer
from nanovllm_cli.quant.gguf_types import TENSOR_TYPES
from nanovllm_cli.quant.rows import AffineRows, BlockRows, IntegerRows
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo, as_bytes
from nanovllm_cli.weights.quantized_hqq import HQQWeight
from nanovllm_cli.weights.quantized_microscaled import MicroscaledWeight
from nanovllm_cli.weights.quantized_mlx import AffineWeight
from nanovllm_cli.weights.quantized_nvfp4 import NVFP4Weight
from nanovllm_cli.weights.quantized_rows import RowsOf, whole_of
from nanovllm_cli.weights.quantized_weight import HasScales, Part, QuantizedWeight, Unpacked, numbers
from nanovllm_cli.weights.weight_reader import row_slices

BLOCK = 32
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_MODEL = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_EXPERT = re.compile(r"\.experts\.\d+\.")


class GGUFNumbers(Unpacked):
    """kinds: a weight's name -> its type, of a GGUF file or of plain numbers. `tensor` gives float32 of either: what is kept so
    (routers) is not rounded. Reads all scales. left_out: ends of names of tensors that no model has."""

    def __init__(self, inner: Checkpoint, weights: Mapping[str, QuantizedWeight], left_out: Collection[str]) -> None:
        super().__init__(inner, weights)
        self._names = [name for name in self._names if not name.endswith(tuple(left_out))]
        told = self.config.get("text_config") or self.config
        dtype = told.get("dtype") or told.get("torch_dtype") or self.config.get("dtype") or self.config.get("torch_dtype")
        self._of_model = _OF_MODEL.get(str(dtype).removeprefix("torch."), "BF16")
        wholes = {weight.name: weight.whole for weight in weights.values() if isinstance(weight, RowsOf)}
        self._weights = {**wholes, **weights}
        self._whole = {name: whole_of(weight) for name, weight in self._weights.items()}
        own = {name: self._kind(weight) for name, weight in self._whole.items()}
        together: defaultdict[str, set[str]] = defaultdict(set)
        for name, kind in own.items():
            together[_EXPERT.sub(".experts.", name)].add(kind)
        self.kinds = {
            name: kind if len(together[_EXPERT.sub(".experts.", name)]) == 1 else self._plain_kind(self._whole[name])
            for name, kind in own.items()
        }

    @property
    def told(self) -> list[str]:
        """A line each for what becomes of codes and scales where it is not the same in blocks."""
        kinds = {name: self.kinds[name] for name in self._names if name in self.kinds}
        numbers = [kind for kind in kinds.values() if kind in _DTYPES]
        minima = [name for name, kind in kinds.items() if kind in ("Q4_1", "Q5_1") and not _is_of_mlx(self._whole[name])]
        dtypes = " and ".join(sorted(set(numbers)))
        told = {
            f"weights in codes that have no type in GGUF, and become numbers of {dtypes}: {len(numbers)}": numbers,
            f"weights that keep their codes and scales, and of which what is added is rounded to float16: {len(minima)}": minima,
        }
        return [line for line, found in told.items() if found]

    def stack_of(self, name: str) -> str:
        """And of those that are: it is there under that name, too."""
        weight = self._weights.get(name)
        return weight.name if isinstance(weight, RowsOf) else super().stack_of(name)

    def info(self, name: str) -> TensorInfo:
        if name not in self.kinds:
            return super().info(name)
        shape, kind = self._weights[name].shape, TENSOR_TYPES[self.kinds[name]]
        return TensorInfo(name, shape, kind.name, math.prod(shape) // kind.block_len * kind.block_bytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self.kinds:
            return super().tensor(name, rows)
        return numbers(self._weights[name], *(rows or (0, self._weights[name].shape[0])))

    def raw(self, name: str) -> torch.Tensor:
        if name not in self.kinds:
            return super().raw(name)
        weight, kind = self._weights[name], self.kinds[name]
        if kind in _DTYPES:
            return as_bytes(self.tensor(name).to(_DTYPES[kind]))
        found = weight.rows(0, weight.shape[0])
        if isinstance(found, BlockRows):
            return found.data
        if isinstance(found, AffineRows):
            return affine_blocks(found, high_bit=kind == "Q5_1")
        assert isinstance(found, IntegerRows)
        assert isinstance(weight.format, Integer)
        return integer_blocks(found, weight.format)

    def _kind(self, weight: QuantizedWeight) -> str:
        form = weight.format
        if isinstance(form, Blocks):
            whole = not isinstance(weight, NVFP4Weight) or weight.factor is None
            return form.type if whole else self._plain_kind(weight)
        return _block_kind(weight, form) or self._plain_kind(weight)

    def _plain_kind(self, weight: QuantizedWeight) -> str:
        if isinstance(weight, AffineWeight | HQQWeight):
            return weight.scales.dtype_name
        if isinstance(weight, MicroscaledWeight):
            return "BF16"
        return "F32" if isinstance(weight, NVFP4Weight) and weight.unit != 1 else self._of_model


def _is_of_mlx(weight: QuantizedWeight) -> bool:
    return isinstance(weight, AffineWeight)


def _block_kind(weight: QuantizedWeight, form: Format | None) -> str | None:
    """GGUF's type with the same codes and scales, if there is one."""
    if not isinstance(form, Affine | Integer) or not isinstance(weight, HasScales) or (form.group or weight.shape[-1]) % BLOCK:
        return None
    if isinstance(form, Integer):
        kinds = {8: None if form.zeros else "Q8_0"}
        kind = kinds.get(form.bits, "Q4_1" if form.zeros else "Q4_0")
        fits = not form.ordered and kind is not None and form.scales == _scale_name(weight.scales) and _fits_halves(weight.scales)
        return kind if fits else None
    exact = [weight.scales, weight.biases] if isinstance(weight, AffineWeight) else [weight.scales]
    bits = weight.bits if isinstance(weight, AffineWeight | HQQWeight) else form.bits
    return ("Q5_1" if bits == 5 else "Q4_1") if bits <= 5 and all(map(_fits_halves, exact)) else None


def _scale_name(part: Part) -> str:
    return part.scale_type if part.dtype_name in _DTYPES else ""


def _fits_halves(part: Part) -> bool:
    """Whether all are numbers of float16."""
    if part.dtype_name == "F16":
        return True
    rows = part.shape[0] if len(part.shape) > 1 else 1
    for first, end in row_slices(rows, 4 * math.prod(part.shape) // max(1, rows)):
        values = part.checkpoint.tensor(part.name, (first, end)) if len(part.shape) > 1 else part.read()
        if not torch.equal(values.half().float(), values.float()):
            return False
    part.checkpoint.release(part.name)
    return True


def affine_blocks(rows: AffineRows, *, high_bit: bool) -> torch.Tensor:
    """uint8 [n, bytes], GGUF's Q5_1 with a high bit, else Q4_1: scale, minimum, the fifth bits of codes in order, then code i
    beside code i + 16. Scales and minima are rounded to float16."""
    n, width = rows.codes.shape
    codes = rows.codes.view(n, width // BLOCK, BLOCK)
    low = codes & 15
    parts = [_heads(rows.codes, rows.scales, rows.minima), low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4]
    if high_bit:
        eights = (codes >> 4).view(n, width // BLOCK, BLOCK // 8, 8)
        parts.insert(1, (eights << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, -1).flatten(1)


def integer_blocks(rows: IntegerRows, form: Integer) -> torch.Tensor:
    """uint8 [n, bytes]: with zero points as `affine_blocks`, else GGUF's Q8_0, a scale and signed bytes, or Q4_0, a scale and
    code i, from 8 for 0, beside code i + 16. Scales are numbers of float16."""
    if rows.zeros is not None:
        return affine_blocks(AffineRows(rows.codes, rows.scales, -rows.zeros.float() * rows.scales.float()), high_bit=False)
    n, width = rows.codes.shape
    codes, heads = rows.codes.view(n, width // BLOCK, BLOCK), _heads(rows.codes, rows.scales)
    if form.bits == 8:
        return torch.cat([heads, codes ^ 128], -1).flatten(1)
    codes = codes + (8 - form.middle)
    return torch.cat([heads, codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4], -1).flatten(1)


def _heads(codes: torch.Tensor, *numbers_of_groups: torch.Tensor) -> torch.Tensor:
    """Bytes [n, K / 32, 2 a number] of numbers [n, G], each of them for as many blocks as a group has."""
    repeat = codes.shape[1] // BLOCK // numbers_of_groups[0].shape[1]
    spread = [part.half().repeat_interleave(repeat, 1) for part in numbers_of_groups]
    return torch.stack(spread, -1).contiguous().view(torch.uint8)
