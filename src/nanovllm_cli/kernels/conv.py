"""The gated short convolution on the CPU: tensors in, checks, addresses to the compiled kernel (cpu_conv.py).

What a token needs of those before it is what they put in: b * h. It lies in the sequence's blocks, where attention has keys and
values.

Legend: T tokens, B sequences, N blocks, P blocks in a table.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_conv


def gated_conv(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 3 * channels] -> [T, channels]: see `reference.gated_conv`, of each sequence behind what cache has of it.

    weight [width, channels]; bias [channels] or None; cache [N, BLOCK, channels]: the inputs of each block's tokens. query_starts
    [B + 1], kv_lens [B], block_tables [B, P] int32: see `Batch`.
    """
    (tokens, _), dtype, (width, channels) = projected.shape, projected.dtype, weight.shape
    num_sequences, table_width = block_tables.shape
    out = cpu.new_tensor((tokens, channels), dtype)
    ints = (
        cpu.address_of(projected, dtype, tokens, 3 * channels), tokens, channels, cpu.address_of(weight, dtype, width, channels),
        0 if bias is None else cpu.address_of(bias, dtype, channels), width,
        cpu.address_of(cache, dtype, len(cache), cpu.BLOCK, channels), len(cache),
        cpu.address_of(query_starts, torch.int32, num_sequences + 1), cpu.address_of(kv_lens, torch.int32, num_sequences),
        cpu.address_of(block_tables, torch.int32, num_sequences, table_width), num_sequences, table_width, out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_conv.gated_conv, 8 * (width + 2) * out.numel(), cpu.tags_of(dtype), ints)
    return out
