"""MLX's quantized weights as a GGUF file can have them: a checkpoint with the same numbers under the same names.

    affine of 1 to 4 bits, of 5   Q4_1 and Q5_1, whose numbers are scale * code + minimum, too, of 32 columns each: to the bit
                                  where scales and biases are numbers of float16, as those of trained models mostly are
    mxfp4, nvfp4                  MXFP4 and NVFP4, the same bits in another order
    any other                     numbers, rounded to the type of the scales, as MLX rounds them where it dequantizes

Matrices of a layer's experts become one tensor there: all of them have one type.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import torch

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.gguf_types import TENSOR_TYPES
from nanovllm_cli.quant.rows import AffineRows, BlockRows
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo, as_bytes
from nanovllm_cli.weights.mlx_names import METHOD
from nanovllm_cli.weights.quantized_mlx import AffineWeight, read_mlx
from nanovllm_cli.weights.quantized_mxfp4 import MXFP4Weight
from nanovllm_cli.weights.quantized_nvfp4 import NVFP4Weight
from nanovllm_cli.weights.quantized_weight import QuantizedWeight, Unpacked, numbers
from nanovllm_cli.weights.weight_reader import row_slices

BLOCK = 32
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT = re.compile(r"\.experts\.\d+\.")


def is_quantized_by_mlx(checkpoint: Checkpoint) -> bool:
    settings = checkpoint.config.get("quantization_config")
    return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD


def as_gguf_has_them(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one of MLX's with such weights. Reads all scales. Raises as `read_mlx`."""
    if not is_quantized_by_mlx(checkpoint):
        return checkpoint
    settings = ConfigReader(checkpoint.config["quantization_config"], f"{checkpoint.path}: quantization_config")
    return MLXNumbers(checkpoint, read_mlx(checkpoint, settings))


class MLXNumbers(Unpacked):
    """kinds: a weight's name -> its type, of a GGUF file or of plain numbers. `tensor` gives float32 of either: what is kept so
    (routers) is not rounded."""

    def __init__(self, inner: Checkpoint, weights: Mapping[str, QuantizedWeight]) -> None:
        super().__init__(inner, weights)
        own = {name: _kind(weight) for name, weight in weights.items()}
        together: defaultdict[str, set[str]] = defaultdict(set)
        for name, kind in own.items():
            together[_EXPERT.sub(".experts.", name)].add(kind)
        self.kinds = {
            name: kind if len(together[_EXPERT.sub(".experts.", name)]) == 1 else _plain_kind(weights[name])
            for name, kind in own.items()
        }

    @property
    def rounded(self) -> list[str]:
        """Names of weights that become plain numbers."""
        return [name for name, kind in self.kinds.items() if kind in _DTYPES]

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
        weight = self._weights[name]
        if self.kinds[name] in _DTYPES:
            return as_bytes(self.tensor(name).to(_DTYPES[self.kinds[name]]))
        found = weight.rows(0, weight.shape[0])
        if isinstance(found, BlockRows):
            return found.data
        assert isinstance(found, AffineRows)
        return affine_blocks(found, high_bit=self.kinds[name] == "Q5_1")


def affine_blocks(rows: AffineRows, *, high_bit: bool) -> torch.Tensor:
    """uint8 [n, bytes], GGUF's Q5_1 with a high bit, else Q4_1: scale, minimum, the fifth bits of codes in order, then code i
    beside code i + 16. Scales and minima are numbers of float16."""
    n, width = rows.codes.shape
    repeat = width // BLOCK // rows.scales.shape[1]
    codes = rows.codes.view(n, width // BLOCK, BLOCK)
    heads = torch.stack([part.half().repeat_interleave(repeat, 1) for part in (rows.scales, rows.minima)], -1)
    low = codes & 15
    parts = [heads.contiguous().view(torch.uint8), low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4]
    if high_bit:
        eights = (codes >> 4).view(n, width // BLOCK, BLOCK // 8, 8)
        parts.insert(1, (eights << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8))
    return torch.cat(parts, -1).flatten(1)


def _kind(weight: QuantizedWeight) -> str:
    if isinstance(weight, MXFP4Weight):
        return "MXFP4"
    if isinstance(weight, NVFP4Weight):
        return "NVFP4" if weight.factor is None else _plain_kind(weight)
    assert isinstance(weight, AffineWeight)
    if weight.bits > 5 or weight.format.group % BLOCK or not _fits_halves(weight):
        return _plain_kind(weight)
    return "Q5_1" if weight.bits == 5 else "Q4_1"


def _plain_kind(weight: QuantizedWeight) -> str:
    return weight.scales.dtype_name if isinstance(weight, AffineWeight) else "F32"


def _fits_halves(weight: AffineWeight) -> bool:
    """Whether all scales and biases are numbers of float16."""
    for part in (weight.scales, weight.biases):
        if part.dtype_name == "F16":
            continue
        for first, end in row_slices(part.shape[0], 4 * part.shape[1]):
            values = part.checkpoint.tensor(part.name, (first, end))
            if not torch.equal(values.half().float(), values.float()):
                return False
        part.checkpoint.release(part.name)
    return True
