"""The gated delta rule, and Mamba-2's, on the CPU: tensors in, checks, addresses to the compiled kernel (cpu_delta.py).

What a token needs of those before it is a state of each value head and the last inputs of a convolution. They lie in blocks, as
they are behind the last of a block's tokens that was computed: the engine has one such block for a whole sequence. A block has
two places for them. A step reads the one whose stamp says how many tokens went into it, and writes the other: it can be repeated.

Legend: T tokens, B sequences, K key heads of E dims, V value heads of D dims, N blocks, P blocks in a table.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_delta

MOST_TOGETHER = 8
TASKS_A_THREAD = 3


def gated_delta(
    projected: torch.Tensor,
    gates: torch.Tensor,
    taps: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
    taps_bias: torch.Tensor | None,
    tiled: bool,
    states: torch.Tensor,
    inputs: torch.Tensor,
    stamps: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """projected [T, channels + V * D], gates [T, 2 * V] fp32 -> [T, V * D]: see `reference.gated_delta`, of each sequence behind
    what the cache has of it; NaN where it has nothing. With skip [V] fp32 see `reference.state_space`: gates are [T, V], and norm
    is not read.

    taps [width, channels], taps_bias [channels]; decay, decay_bias [V], norm [D] fp32. states [N, 2, V, E, D] fp32, inputs
    [N, 2, width - 1, channels], stamps [N, 2, V] int32: what was behind so many tokens, in two places of a block. query_starts
    [B + 1], kv_lens [B], block_tables [B, P] int32: see `Batch`, of blocks of block_size tokens.
    """
    (tokens, _), dtype, (width, channels) = projected.shape, projected.dtype, taps.shape
    num_blocks, _, num_values, key_dim, value_dim = states.shape
    num_keys = (channels - num_values * value_dim) // (2 * key_dim)
    num_sequences, table_width = block_tables.shape
    f32, i32 = torch.float32, torch.int32
    out = cpu.new_tensor((tokens, num_values * value_dim), dtype)
    ints = (
        cpu.address_of(projected, dtype, tokens, channels + num_values * value_dim),
        cpu.address_of(gates, f32, tokens, (1 if skip is not None else 2) * num_values), tokens,
        cpu.address_of(taps, dtype, width, channels), width,
        cpu.address_of(decay, f32, num_values), cpu.address_of(decay_bias, f32, num_values),
        *((cpu.address_of(norm, f32, value_dim), 0) if skip is None else (0, cpu.address_of(skip, f32, num_values))),
        0 if taps_bias is None else cpu.address_of(taps_bias, dtype, channels),
        num_keys, key_dim, num_values, value_dim,
        1 if tiled else _together(num_values // num_keys, num_sequences * num_values), int(tiled),
        cpu.address_of(states, f32, num_blocks, 2, num_values, key_dim, value_dim),
        cpu.address_of(inputs, dtype, num_blocks, 2, width - 1, channels),
        cpu.address_of(stamps, i32, num_blocks, 2, num_values), num_blocks, block_size,
        cpu.address_of(query_starts, i32, num_sequences + 1), cpu.address_of(kv_lens, i32, num_sequences),
        cpu.address_of(block_tables, i32, num_sequences, table_width), num_sequences, table_width, out.data_ptr(),
    )  # fmt: skip
    work = tokens * num_values * key_dim * value_dim * 4
    cpu.launch(cpu_delta.gated_delta, work, cpu.tags_of(dtype), ints, (eps,))
    return out


def _together(group: int, heads: int) -> int:
    """How many value heads a task takes, of groups that share a key head: what comes of keys and queries is computed once for
    them. As many as leave every thread some tasks; no number depends on it."""
    most = min(MOST_TOGETHER, int(heads / (TASKS_A_THREAD * cpu.num_threads())))
    return max(count for count in range(1, group + 1) if group % count == 0 and count <= max(1, most))
