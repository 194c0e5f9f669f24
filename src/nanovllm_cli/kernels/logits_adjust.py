"""Logits as they are drawn from, and the largest of them, on a GPU (logits_adjust.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable, Slices, check_call, constants

THREADS = 512


def largest_logits(
    launcher: Launcher, logits: torch.Tensor, table: SamplingTable, buffers: SamplingBuffers, slices: Slices
) -> None:
    """Adjust logits [B, V] where a row asks for it, find what must not be drawn from, and draw for greedy rows."""
    check_call(launcher, logits, table, buffers)
    batch, vocab_size = logits.shape
    args = (
        logits, buffers.adjusted, buffers.rows, table.params, table.positions, table.masks, table.stop_ids, table.bias_ids,
        table.biases, table.counts, table.prompt_bits, buffers.scratch, buffers.token_ids, buffers.status,
        np.int32(vocab_size), np.int32(slices.length), np.int32(slices.column_lanes),
        np.int32(table.stop_ids.shape[1]), np.int32(table.bias_ids.shape[1]),
    )  # fmt: skip
    launcher.launch(variant(vocab_size), (slices.blocks, batch, 1), (THREADS, 1, 1), args)


def variant(vocab_size: int) -> Kernel:
    return Kernel("logits_adjust", "largest_logits", constants(vocab_size))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(151_936), variant(50_257)]
