"""Log-probabilities of drawn tokens and of the most likely ones, on a GPU (logprobs.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable, Slices, check_call, constants

THREADS = 512


def token_logprobs(
    launcher: Launcher, logits: torch.Tensor, table: SamplingTable, buffers: SamplingBuffers, slices: Slices
) -> None:
    """After both other kernels: what the rows of logits [B, V] that want logprobs report. Other rows' entries are left alone."""
    check_call(launcher, logits, table, buffers)
    batch, vocab_size = logits.shape
    args = (
        logits, buffers.rows, table.params, buffers.scratch, buffers.token_ids, buffers.status, buffers.values, buffers.ranks,
        buffers.top_ids, buffers.top_values, np.int32(vocab_size), np.int32(slices.length), np.int32(buffers.top_ids.shape[1]),
    )  # fmt: skip
    launcher.launch(variant(vocab_size), (slices.blocks, batch, 1), (THREADS, 1, 1), args)


def variant(vocab_size: int) -> Kernel:
    return Kernel("logprobs", "token_logprobs", constants(vocab_size))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(151_936), variant(50_257)]
