"""From logits to tokens on a GPU (logits_adjust.cu, sampling.cu, logprobs.cu), with the CPU sampler's meaning.

One launch where every row is greedy, two where some draw at random, one more where some want logprobs. All read the table and
`rows` on the device, so a captured graph serves whatever the slots hold; a kernel with nothing to do for a row leaves at once.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Arg, Kernel, Launcher
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable, Slices, check_call, constants, divide

THREADS = 512
ENTRIES = {"logits_adjust": "largest_logits", "sampling": "draw_tokens", "logprobs": "token_logprobs"}
"""By source, in the order in which they run."""


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

    logits are not changed. only_greedy: no row has a temperature. has_logprobs: some row may want them; other rows' entries are
    left alone.
    """
    batch, vocab_size = logits.shape
    if not batch:
        return
    check_call(launcher, logits, table, buffers)
    slices = slices or divide(vocab_size, batch, launcher.num_multiprocessors)
    grid = (slices.blocks, batch, 1)
    vocabulary, length = np.int32(vocab_size), np.int32(slices.length)

    def launch(stem: str, *args: Arg) -> None:
        launcher.launch(variant(stem, vocab_size), grid, (THREADS, 1, 1), args)

    launch(
        "logits_adjust", logits, buffers.adjusted, buffers.rows, table.params, table.positions, table.masks, table.stop_ids,
        table.bias_ids, table.biases, table.counts, table.prompt_bits, buffers.scratch, buffers.token_ids, buffers.status,
        vocabulary, length, np.int32(slices.column_lanes), np.int32(table.stop_ids.shape[1]), np.int32(table.bias_ids.shape[1]),
    )  # fmt: skip
    if not only_greedy:
        launch(
            "sampling", logits, buffers.adjusted, buffers.rows, table.params, table.positions, table.counts, buffers.scratch,
            buffers.token_ids, buffers.status, vocabulary, length,
        )  # fmt: skip
    if has_logprobs:
        launch(
            "logprobs", logits, buffers.rows, table.params, buffers.scratch, buffers.token_ids, buffers.status, buffers.values,
            buffers.ranks, buffers.top_ids, buffers.top_values, vocabulary, length, np.int32(buffers.top_ids.shape[1]),
        )  # fmt: skip


def variant(stem: str, vocab_size: int) -> Kernel:
    return Kernel(stem, ENTRIES[stem], constants(vocab_size))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(stem, vocab_size) for stem in ENTRIES for vocab_size in (151_936, 50_257)]
