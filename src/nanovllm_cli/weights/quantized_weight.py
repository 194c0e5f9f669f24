"""What all readers of quantized checkpoints share: a module's tensors, looked up with their headers checked, and unpacking.

A family (`quantized_fp8.py`, `quantized_gptq.py`, …) turns the tensors of each module into a `QuantizedWeight`. Headers are
checked when it is made, values as rows are read. Every error names the tensor.

Legend: n rows, N rows of the whole weight, K columns (inputs), G groups along a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.quant.format import Format, ScaleType
from nanovllm_cli.quant.rows import QuantizedRows
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView
from nanovllm_cli.weights.folder_config import SETTINGS
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.stacked import stack_of

QUANTIZED_ELSEWHERE = "the checkpoint is incomplete, or was written by a tool that does it another way"
FLOATS = ("F16", "BF16", "F32")
BYTES = ("U8",)
_LARGEST_SCALE = torch.finfo(torch.float32).max / 448  # the largest number of any 8-bit code: fp8's
_SCALE_NAMES: dict[str, ScaleType] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class QuantizedWeight(Protocol):
    """One weight, made of `parts`. format: None where rows are plain numbers. shape: (N, K), or more in front of the columns,
    which rows run through one after the other."""

    @property
    def format(self) -> Format | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...

    def rows(self, first: int, end: int) -> QuantizedRows | torch.Tensor:
        """Rows first … end - 1; first is a multiple of ROWS_TOGETHER. CheckpointError for values that cannot be."""


@runtime_checkable
class InNumbers(Protocol):
    """A weight whose rows may be plain numbers. stored_as: what its codes are called."""

    @property
    def stored_as(self) -> str: ...


@runtime_checkable
class HasScales(Protocol):
    """A weight whose scales are one tensor."""

    @property
    def scales(self) -> Part: ...


def numbers(weight: QuantizedWeight, first: int, end: int) -> torch.Tensor:
    """float32 [n, K]: what rows first … end - 1 stand for."""
    rows = weight.rows(first, end)
    if isinstance(rows, torch.Tensor):
        return rows.float()
    assert weight.format is not None
    return weight.format.dequantize(rows)


@dataclass(frozen=True)
class Part:
    """One tensor of a weight."""

    checkpoint: Checkpoint
    name: str
    dtype_name: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """A view of the file: not to be written to."""
        return self.checkpoint.tensor(self.name)

    def read_bytes(self) -> torch.Tensor:
        """uint8 [bytes], whatever the type."""
        return self.checkpoint.raw(self.name).flatten()

    @property
    def num_bytes(self) -> int:
        return self.checkpoint.info(self.name).num_bytes

    @property
    def scale_type(self) -> ScaleType:
        """Of one that holds scales: the type that a format keeps them in."""
        return _SCALE_NAMES[self.dtype_name]

    def checked_scales(self, scales: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """Some of its values, finite and above 0, or not below where `zero` says so, and with finite products."""
        values = scales.float()
        good = values >= 0 if zero else values > 0
        if not bool((good & torch.isfinite(values)).all()):
            wanted = "below 0" if zero else "0 or below"
            raise self.damaged(f"has scales that are {wanted}, infinite or NaN")
        if bool((values > _LARGEST_SCALE).any()):
            raise self.damaged(f"has scales of up to {float(values.max()):.1e}, with which weights are infinite")
        return scales

    def checked_numbers(self, values: torch.Tensor) -> torch.Tensor:
        """Some of its values, of any sign, with which weights are finite."""
        if not bool((values.float().abs() <= _LARGEST_SCALE).all()):  # which a NaN is not, either
            raise self.damaged(f"has numbers that are NaN or infinite, or above {_LARGEST_SCALE:.1e}")
        return values

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.path}: tensor {self.name!r} {what}", DOWNLOAD_AGAIN)

    def misfit(self, what: str) -> CheckpointError:
        """For a tensor that contradicts the config, or its neighbours."""
        return CheckpointError(f"{self.checkpoint.path}: tensor {self.name!r} {what}", QUANTIZED_ELSEWHERE)

    def unsupported(
        self, what: str, hint: str = "take the model in another format; README.md lists them"
    ) -> UnsupportedError:
        return UnsupportedError(f"{self.checkpoint.path}: tensor {self.name!r} {what}", hint)

    def check_width(self, form: Format, width: int) -> None:
        """UnsupportedError, with its name, where the format can't keep rows of so many columns."""
        try:
            form.check_width(width)
        except UnsupportedError as error:
            raise self.unsupported(f"can't be kept: {error.message}") from error


def those(*parts: Part | None) -> tuple[Part, ...]:
    """Of parts that a weight may have the ones that it has."""
    return tuple(part for part in parts if part is not None)


@dataclass(frozen=True)
class Module:
    """The tensors of one module. suffixes: what follows its name, a dot and the prefix -> the tensor's name."""

    checkpoint: Checkpoint
    name: str
    suffixes: Mapping[str, str]
    prefix: str = ""

    @property
    def weight_name(self) -> str:
        return f"{self.name}.weight"

    def has(self, suffix: str) -> bool:
        return suffix in self.suffixes

    def any(self, suffix: str) -> Part:
        """One that is there, whatever it is."""
        info = self.checkpoint.info(self.suffixes[suffix])
        return Part(self.checkpoint, info.name, info.dtype_name, info.shape)

    def part(self, suffix: str, dtypes: Collection[str], *shapes: tuple[int | None, ...]) -> Part:
        """A tensor that must be there, in one of these dtypes and, where any are given, shapes (None: any size)."""
        if suffix not in self.suffixes:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {f'{self.name}.{self.prefix}{suffix}'!r} is missing, which belongs to "
                f"{min(self.suffixes.values())!r}",
                QUANTIZED_ELSEWHERE,
            )
        part = self.any(suffix)
        if part.dtype_name not in dtypes:
            raise part.misfit(f"holds {part.dtype_name}, expected {' or '.join(sorted(dtypes))}")
        if shapes and not any(_fits(part.shape, shape) for shape in shapes):
            wanted = " or ".join(
                str(["any" if dim is None else dim for dim in shape]) for shape in dict.fromkeys(shapes)
            )
            raise part.misfit(f"has the shape {list(part.shape)}, expected {wanted}")
        return part

    def matrix(self, suffix: str, dtypes: Collection[str]) -> Part:
        """A tensor of two dimensions, neither of them 0."""
        part = self.part(suffix, dtypes, (None, None))
        if 0 in part.shape:
            raise part.misfit(f"has the shape {list(part.shape)}, which holds nothing")
        return part


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, dim) for dim, want in zip(shape, wanted, strict=True))


def modules(checkpoint: Checkpoint, suffixes: Collection[str]) -> list[Module]:
    """All modules that have tensors with these suffixes."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    longest_first = sorted(suffixes, key=len, reverse=True)
    for name in checkpoint.names():
        for suffix in longest_first:
            if name.endswith(f".{suffix}"):
                found[name.removesuffix(f".{suffix}")][suffix] = name
                break
    return [Module(checkpoint, name, own) for name, own in found.items()]


class Unpacked(CheckpointView):
    """A checkpoint that has weights in place of what they are made of, and says nothing of quantization; what they become,
    others say."""

    def __init__(self, inner: Checkpoint, weights: Mapping[str, QuantizedWeight]) -> None:
        super().__init__(inner)
        self.config = {key: value for key, value in inner.config.items() if key not in SETTINGS}
        gone = {part.name for weight in weights.values() for part in weight.parts} - weights.keys()
        self._names = list(dict.fromkeys([*(name for name in inner.names() if name not in gone), *weights]))
        self._weights = weights

    def names(self) -> list[str]:
        return self._names

    def stack_of(self, name: str) -> str:
        """As `stacked.stack_of`, of weights that are not quantized."""
        return stack_of(self._inner, name)

    def release(self, name: str) -> None:
        if name not in self._weights:
            super().release(name)
            return
        for part in self._weights[name].parts:
            self._inner.release(stack_of(self._inner, part.name))


def unpack(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """uint8 codes [..., count] out of bytes [..., bytes]: code i is at bit i * bits, counted from the lowest of the first byte,
    and may begin in one byte and end in the next."""
    if bits == 8:
        return data[..., :count]
    if bits in (1, 2, 4):
        codes = torch.stack([(data >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)
        return codes.flatten(-2)[..., :count]
    assert bits in (3, 5, 6)
    short = -data.shape[-1] % bits
    parts = torch.nn.functional.pad(data, (0, short)).reshape(*data.shape[:-1], -1, bits)
    parts = parts.to(torch.int32 if bits == 3 else torch.int64)
    eight = parts[..., 0]
    for i in range(1, bits):
        eight = eight | parts[..., i] << 8 * i
    codes = torch.stack([(eight >> bits * i & ((1 << bits) - 1)).to(torch.uint8) for i in range(8)], -1)
    return codes.flatten(-2)[..., :count]


def ggml_nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n / 2] of numbers of four bits, of which 2 i and 2 i + 1 share one, as ggml has them: i beside i + n / 2."""
    numbers = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    half = pairs.shape[-1]
    return numbers[..., :half] | numbers[..., half:] << 4


def unpack_columns(words: torch.Tensor, bits: int, first: int, end: int) -> torch.Tensor:
    """uint8 [end - first, X]: columns first … end - 1 of a matrix whose rows are packed into int32 words [X, words], transposed.
    first is a multiple of 32, where a word begins whatever the bits."""
    assert first % 32 == 0
    some = words[:, first * bits // 32 : -(-end * bits // 32)].contiguous()
    return unpack(some.view(torch.uint8), bits, end - first).t().contiguous()


def num_words(count: int, bits: int) -> int:
    """int32 words that so many codes are packed into."""
    return -(-count * bits // 32)
