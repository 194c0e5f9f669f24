"""The gated delta rule, and Mamba-2's, on the CPU: tensors in, checks, addresses to the compiled kernel (cpu_delta.py).

Legend: T tokens, B sequences, K key heads of E dims, V value heads of D dims, N states.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_delta
from nanovllm_cli.kernels.states import ByChannel, States

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
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
    most: float = 1.0,
    by_channel: ByChannel | None = None,
    by_sigmoid: bool = False,
) -> torch.Tensor:
    """projected [T, channels + V * D], gates [T, 2 * V] fp32 -> [T, V * D]: see `state_rules.gated_delta`, of each sequence
    behind what its state has of it; NaN where it has nothing. With skip [V] fp32 see `state_rules.state_space`: gates are [T, V],
    and norm is not read. With by_channel see `state_rules.channel_delta`: projected is [T, channels], gates are [T, V],
    decay_bias is [V * E]. most: the largest beta. by_sigmoid: of z, in place of its silu.

    taps [width, channels], taps_bias [channels]; decay, decay_bias [V], norm [D] fp32. query_starts [B + 1], kv_lens, known_lens
    [B] int32: see `Batch`. state_of [B] int32: which of the states is a sequence's.
    """
    (tokens, _), dtype, (width, channels) = projected.shape, projected.dtype, taps.shape
    num_states, _, num_values, key_dim, value_dim = states.matrices.shape
    num_keys = (channels - num_values * value_dim) // (2 * key_dim)
    num_sequences, max_guesses, values = len(kv_lens), states.guesses.shape[2], num_values * value_dim
    own_gates = num_values if skip is not None or by_channel is not None else 2 * num_values
    num_gates = own_gates if by_channel is None else num_values * (1 + key_dim)
    num_biases = num_values if by_channel is None else num_values * key_dim
    floor = 0.0 if by_channel is None else by_channel.floor
    f32, i32 = torch.float32, torch.int32
    out = cpu.new_tensor((tokens, values), dtype)
    ints = (
        cpu.address_of(projected, dtype, tokens, channels + (values if by_channel is None else 0)),
        cpu.address_of(gates, f32, tokens, own_gates), tokens,
        cpu.address_of(taps, dtype, width, channels), width,
        cpu.address_of(decay, f32, num_values), cpu.address_of(decay_bias, f32, num_biases),
        *((cpu.address_of(norm, f32, value_dim), 0) if skip is None else (0, cpu.address_of(skip, f32, num_values))),
        0 if taps_bias is None else cpu.address_of(taps_bias, dtype, channels),
        num_keys, key_dim, num_values, value_dim,
        1 if tiled else _together(num_values // num_keys, num_sequences * num_values), int(tiled),
        cpu.address_of(states.matrices, f32, num_states, 2, num_values, key_dim, value_dim),
        cpu.address_of(states.inputs, dtype, num_states, 2, width - 1, channels),
        cpu.address_of(states.guesses, dtype, num_states, 2, max_guesses, channels),
        cpu.address_of(states.guess_gates, f32, num_states, 2, max_guesses, num_gates),
        cpu.address_of(states.stamps, i32, num_states, 2, num_values),
        cpu.address_of(states.reaches, i32, num_states, 2, num_values), num_states, max_guesses,
        cpu.address_of(query_starts, i32, num_sequences + 1), cpu.address_of(kv_lens, i32, num_sequences),
        cpu.address_of(known_lens, i32, num_sequences), cpu.address_of(state_of, i32, num_sequences), num_sequences,
        0 if by_channel is None else cpu.address_of(by_channel.rates, f32, tokens, num_values * key_dim),
        0 if by_channel is None else cpu.address_of(by_channel.z, dtype, tokens, values),
        out.data_ptr(), int(by_sigmoid),
    )  # fmt: skip
    work = tokens * num_values * key_dim * value_dim * 4
    cpu.launch(cpu_delta.gated_delta, work, cpu.tags_of(dtype), ints, (eps, most, floor))
    return out


def _together(group: int, heads: int) -> int:
    """How many value heads a task takes, of groups that share a key head: what comes of keys and queries is computed once for
    them. As many as leave every thread some tasks; no number depends on it."""
    most = min(MOST_TOGETHER, int(heads / (TASKS_A_THREAD * cpu.num_threads())))
    return max(count for count in range(1, group + 1) if group % count == 0 and count <= max(1, most))
