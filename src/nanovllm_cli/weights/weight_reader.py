"""WeightReader: the weights of a checkpoint one by one, whatever they are stored as. The loader talks to nothing else.

A weight may be several tensors of a file (codes, scales, zero points); a reader folds them into one, under the name that the
weight has in a plain checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.quant.format import Blocks, Format
from nanovllm_cli.quant.gguf_blocks import BLOCKS, is_finite
from nanovllm_cli.quant.rows import BlockRows, QuantizedRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.stacked import expert_of, stack_of

LARGEST_FACTOR = torch.finfo(torch.float32).max / (6 * 448)
"""Of all of a weight in NVFP4, whose largest number and scale that are."""
SLICE_BYTES = 16 << 20
ROWS_TOGETHER = 128
"""Slices begin at multiples of it, so that blocks of rows that share a scale are never cut."""

Slices = Iterator[tuple[torch.Tensor | QuantizedRows, int]]


class WeightReader(Protocol):
    """Errors are CheckpointError or UnsupportedError, and name the tensor."""

    def names(self) -> set[str]:
        """Of weights, as a plain checkpoint calls them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """(rows, columns) of a matrix as the model sees it."""

    def num_bytes(self, name: str) -> int:
        """Stored bytes of everything that the weight is made of."""

    def format(self, name: str) -> Format | None:
        """What the weight is stored in; None for plain numbers."""

    def stored_as(self, name: str) -> str | None:
        """What a weight's codes are called; None for a tensor of plain numbers."""

    def slices(self, name: str) -> Slices:
        """(rows, index of the first) in order, some MiB at a time; floats are finite. File pages are let go as it proceeds."""


class PlainReader:
    """A WeightReader for tensors that are plain numbers, one a weight."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._names = set(checkpoint.names())

    def names(self) -> set[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.info(name).shape

    def num_bytes(self, name: str) -> int:
        return self.checkpoint.info(name).num_bytes

    def format(self, name: str) -> Format | None:
        return None

    def stored_as(self, name: str) -> str | None:
        return None if (form := self.format(name)) is None else form.name

    def slices(self, name: str) -> Slices:
        for rows, first in float_slices(self.checkpoint, name):
            check_finite(self.checkpoint, name, rows)
            yield rows, first


class GGUFReader(PlainReader):
    """A WeightReader that hands on the blocks of a GGUF file as they are. Those of NVFP4 may have a number beside them that
    multiplies all of a weight (`ffn_up.scale`, one an expert of a stack), and one for inputs, which are kept finer here."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._factors = factors_beside(checkpoint)
        beside = set(self._factors.values())
        self._names = self._names - beside - {name.removesuffix("scale") + "input_scale" for name in beside}

    def format(self, name: str) -> Format | None:
        info = self.checkpoint.info(name)
        return Blocks(info.dtype_name) if len(info.shape) == 2 and info.dtype_name in BLOCKS else None

    def slices(self, name: str) -> Slices:
        form = self.format(name)
        if form is None:
            yield from super().slices(name)
            return
        data = self.checkpoint.raw(name)
        for first, end in row_slices(data.shape[0], 2 * self.shape(name)[1]):
            rows = data[first:end]
            if not is_finite(self.checkpoint.info(name).dtype_name, rows):
                raise not_finite(self.checkpoint, name)
            yield BlockRows(rows, self._factors_of(name, len(rows))), first
            self.checkpoint.release(name)

    def _factors_of(self, name: str, num_rows: int) -> torch.Tensor | None:
        if name not in self._factors:
            return None
        beside, expert = self._factors[name], expert_of(self.checkpoint, name)
        found, stack = self.checkpoint.tensor(beside).float(), self.checkpoint.info(stack_of(self.checkpoint, name))
        if found.shape != ((1,) if expert is None else stack.shape[:1]):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {beside!r} has the shape {list(found.shape)}, which is not one number a matrix",
                DOWNLOAD_AGAIN,
            )
        factor = found[expert or 0]
        if not 0 < float(factor) < LARGEST_FACTOR:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {beside!r} has {float(factor):.1e}, by which nothing can be multiplied",
                DOWNLOAD_AGAIN,
            )
        return factor.repeat(num_rows)


def factors_beside(checkpoint: Checkpoint) -> dict[str, str]:
    """Weights of a GGUF file that have numbers beside them: a weight's name -> that tensor's. Gemma 4 multiplies what its experts
    give by such numbers itself, which is the same."""
    names, found = set(checkpoint.names()), {}
    own = ".ffn_down_exps." if checkpoint.config.get("general.architecture") == "gemma4" else None
    for name in names:
        if name.endswith(".weight") and checkpoint.info(name).dtype_name == "NVFP4":
            stem = stack_of(checkpoint, name).removesuffix("weight")
            if f"{stem}scale" in names and not (own and stem.endswith(own)):
                found[name] = f"{stem}scale"
    return found


def refuse_factors(checkpoint: Checkpoint) -> None:
    """UnsupportedError where blocks alone do not say what weights are."""
    for name in sorted(factors_beside(checkpoint)) if checkpoint.format == "gguf" else ():
        raise UnsupportedError(
            f"{checkpoint.path}: tensor {name!r} is NVFP4 with a number beside it, which runs here, and can be copied",
            "take the original model for another type",
        )


def row_slices(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, end) of slices of about SLICE_BYTES, in order."""
    step = max(1, SLICE_BYTES // max(1, row_bytes) // ROWS_TOGETHER) * ROWS_TOGETHER
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def float_slices(checkpoint: Checkpoint, name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """(rows, index of the first) of one tensor, in order."""
    info = checkpoint.info(name)
    if len(info.shape) < 2:
        yield checkpoint.tensor(name), 0
        checkpoint.release(name)
        return
    for first, end in row_slices(info.shape[0], 4 * math.prod(info.shape[1:])):
        yield checkpoint.tensor(name, rows=(first, end)), first
        checkpoint.release(name)


def check_finite(checkpoint: Checkpoint, name: str, rows: torch.Tensor) -> None:
    """CheckpointError or UnsupportedError where rows are not plain finite numbers."""
    if not rows.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} holds {rows.dtype}, not numbers that a layer can use",
            "the checkpoint is incomplete, or its config belongs to another model",
        )
    if rows.dtype.itemsize < 2:
        raise UnsupportedError(
            f"{checkpoint.path}: tensor {name!r} holds {rows.dtype}, but its config says nothing of scales",
            "take the model in bfloat16, or a GGUF of it",
        )
    if rows.numel() == 0:
        return
    low, high = torch.aminmax(rows)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise not_finite(checkpoint, name)


def not_finite(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: tensor {name!r} has values that are NaN or infinite", DOWNLOAD_AGAIN
    )
