"""From logits to tokens on a GPU (logits_adjust.cu, sampling.cu, logprobs.cu), with the CPU sampler's meaning.

One launch where every row is greedy, two where some draw at random, one more where some want logprobs. All read the table and
`rows` on the device, so a captured graph serves whatever the slots hold; a kernel with nothing to do for a row leaves at once.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher
from nanovllm_cli.kernels.logits_adjust import largest_logits
from nanovllm_cli.kernels.logprobs import token_logprobs
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable, Slices, check_call, constants, divide

THREADS = 512


def sample(
    launcher: Launcher,
    logits: torch.Tensor,
    table: SamplingTable,
    buffers: SamplingBuffers,
    *,
    only_greedy: bool = False,
    has_logprobs: bool = True,
    slices: Slices | None = None,
) -> None:
    """Draw buffers.token_ids[:B] from logits [B, V] float32 for the slots in buffers.rows[:B], and advance those slots.

    logits are not changed. only_greedy: no row has a temperature. has_logprobs: some row may want them.
    """
    if not len(logits):
        return
    slices = slices or divide(logits.shape[1], logits.shape[0], launcher.num_multiprocessors)
    largest_logits(launcher, logits, table, buffers, slices)
    if not only_greedy:
        draw_tokens(launcher, logits, table, buffers, slices)
    if has_logprobs:
        token_logprobs(launcher, logits, table, buffers, slices)


def draw_tokens(
    launcher: Launcher, logits: torch.Tensor, table: SamplingTable, buffers: SamplingBuffers, slices: Slices
) -> None:
    """After `largest_logits`, with the same slices: draw for the rows of logits [B, V] that are not greedy."""
    check_call(launcher, logits, table, buffers)
    batch, vocab_size = logits.shape
    args = (
        logits, buffers.adjusted, buffers.rows, table.params, table.positions, table.counts, buffers.scratch,
        buffers.token_ids, buffers.status, np.int32(vocab_size), np.int32(slices.length),
    )  # fmt: skip
    launcher.launch(variant(vocab_size), (slices.blocks, batch, 1), (THREADS, 1, 1), args)


def variant(vocab_size: int) -> Kernel:
    return Kernel("sampling", "draw_tokens", constants(vocab_size))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(151_936), variant(50_257)]
