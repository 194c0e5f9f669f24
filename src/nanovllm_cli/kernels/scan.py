"""Mamba's first rule on the CPU: tensors in, checks, addresses to the compiled kernels (cpu_scan.py).

It takes three kernels, as what decides how much of a state is kept is made of what the convolution gives: the convolution, the
norms behind the second projection, and the scan. States are `states.States`, whose matrices [M, 2, V, N, D] are of V heads of D
channels side by side, a row for each of N numbers; guesses are [M, 2, G, 2 * channels], inputs of the convolution and what it
gave; guess_gates [M, 2, G, channels + N], rates and B.

Legend: T tokens, B sequences, M states.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_scan
from nanovllm_cli.kernels.states import States


def causal_conv(
    projected: torch.Tensor,
    taps: torch.Tensor,
    taps_bias: torch.Tensor | None,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 2 * channels], whose first half counts -> [T, channels]: see `state_rules.causal_conv`, of each sequence
    behind what its state has of it; NaN where it has nothing. `selective_scan` has to follow with the same step.

    taps [width, channels], taps_bias [channels] or None. query_starts [B + 1], kv_lens, known_lens [B] int32: see `Batch`.
    state_of [B] int32: which of the states is a sequence's.
    """
    (tokens, _), dtype, (width, channels) = projected.shape, projected.dtype, taps.shape
    out = cpu.new_tensor((tokens, channels), dtype)
    num_states, _, num_values, _, value_dim = states.matrices.shape
    max_guesses, i32 = states.guesses.shape[2], torch.int32
    ints = (
        cpu.address_of(projected, dtype, tokens, 2 * channels), tokens, cpu.address_of(taps, dtype, width, channels), width,
        0 if taps_bias is None else cpu.address_of(taps_bias, dtype, channels), num_values, value_dim,
        cpu.address_of(states.inputs, dtype, num_states, 2, width - 1, channels),
        cpu.address_of(states.guesses, dtype, num_states, 2, max_guesses, 2 * channels),
        cpu.address_of(states.stamps, i32, num_states, 2, num_values),
        cpu.address_of(states.reaches, i32, num_states, 2, num_values), num_states, max_guesses,
        *of_sequences(query_starts, kv_lens, known_lens, state_of), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_scan.causal_conv, tokens * channels * (width + 8), cpu.tags_of(dtype), ints)
    return out


def scan_parts(
    x: torch.Tensor, rank: int, gains: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, rank + 2 * N] fp32 -> [T, rank] of dtype, [T, 2 * N] fp32: see `state_rules.scan_parts`. gains [rank + 2 * N]."""
    tokens, width = x.shape
    into, both = cpu.new_tensor((tokens, rank), dtype), cpu.new_tensor((tokens, width - rank), torch.float32)
    ints = (
        cpu.address_of(x, torch.float32, tokens, width), tokens, rank, (width - rank) // 2,
        0 if gains is None else cpu.address_of(gains, torch.float32, width), into.data_ptr(), both.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_scan.scan_parts, 4 * x.numel(), cpu.tags_of(dtype), ints, (eps,))
    return into, both


def selective_scan(
    projected: torch.Tensor,
    x: torch.Tensor,
    rates: torch.Tensor,
    both: torch.Tensor,
    decay: torch.Tensor,
    rate_bias: torch.Tensor,
    skip: torch.Tensor,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 2 * channels], whose second half is z, x [T, channels], rates [T, channels] and both [T, 2 * N] fp32 ->
    [T, channels]: see `state_rules.selective_scan`, of each sequence behind what its state has of it; NaN where it has nothing.

    decay [V, N, D], rate_bias, skip [channels] fp32. The others: see `causal_conv`, which comes first.
    """
    (tokens, channels), dtype = x.shape, x.dtype
    num_states, _, num_values, key_dim, value_dim = states.matrices.shape
    max_guesses, f32, i32 = states.guesses.shape[2], torch.float32, torch.int32
    out = cpu.new_tensor((tokens, channels), dtype)
    ints = (
        cpu.address_of(projected, dtype, tokens, 2 * channels), cpu.address_of(x, dtype, tokens, num_values * value_dim),
        cpu.address_of(rates, f32, tokens, channels), cpu.address_of(both, f32, tokens, 2 * key_dim), tokens,
        cpu.address_of(decay, f32, num_values, key_dim, value_dim), cpu.address_of(rate_bias, f32, channels),
        cpu.address_of(skip, f32, channels), key_dim, num_values, value_dim,
        cpu.address_of(states.matrices, f32, num_states, 2, num_values, key_dim, value_dim),
        cpu.address_of(states.guesses, dtype, num_states, 2, max_guesses, 2 * channels),
        cpu.address_of(states.guess_gates, f32, num_states, 2, max_guesses, channels + key_dim),
        cpu.address_of(states.stamps, i32, num_states, 2, num_values),
        cpu.address_of(states.reaches, i32, num_states, 2, num_values), num_states, max_guesses,
        *of_sequences(query_starts, kv_lens, known_lens, state_of), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_scan.selective_scan, tokens * channels * key_dim * 12, cpu.tags_of(dtype), ints)
    return out


def of_sequences(
    query_starts: torch.Tensor, kv_lens: torch.Tensor, known_lens: torch.Tensor, state_of: torch.Tensor
) -> tuple[int, ...]:
    """What kernels with states are told of a step's sequences: addresses of these, and how many there are."""
    count, i32 = len(kv_lens), torch.int32
    addresses = (cpu.address_of(each, i32, count) for each in (kv_lens, known_lens, state_of))
    return (cpu.address_of(query_starts, i32, count + 1), *addresses, count)
