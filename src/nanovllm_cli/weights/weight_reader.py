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
from nanovllm_cli.quant.gguf_blocks import BLOCKS, decompose
from nanovllm_cli.quant.rows import BlockRows, QuantizedRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN

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

    def slices(self, name: str) -> Slices:
        for rows, first in float_slices(self.checkpoint, name):
            check_finite(self.checkpoint, name, rows)
            yield rows, first


class GGUFReader(PlainReader):
    """A WeightReader that hands on the blocks of a GGUF file as they are."""

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
            parts = decompose(self.checkpoint.info(name).dtype_name, rows)
            lows = parts.minima()
            if not (parts.scales().isfinite().all() and (lows is None or lows.isfinite().all())):
                raise not_finite(self.checkpoint, name)
            yield BlockRows(rows), first
            self.checkpoint.release(name)


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
