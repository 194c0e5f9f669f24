"""RWKV-7's time mixing on the CPU: tensors in, checks, addresses to the compiled kernels (cpu_wkv.py).

A layer takes a state's places by three kernels: rows that take a share of the row before, for the time mixing; the rule; and the
same rows for the MLP. Only the last one says that a place is a state. States are `states.States`, whose matrices [M, 2, V, D, D]
have rows of keys and columns of values; inputs [M, 2, 1, 2 * C] and guesses [M, 2, G, 2 * C] are what both mixings read;
guess_gates [M, 2, G, 5 * C]: what is kept, keys, values, what is taken off, what is put there.

Legend: T tokens, B sequences, M states, V heads of D numbers, C = V * D, P mixtures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.kernels import cpu, cpu_wkv
from nanovllm_cli.kernels.ops import Squash
from nanovllm_cli.kernels.scan import of_sequences
from nanovllm_cli.kernels.states import States

_KINDS: dict[Squash, int] = {"tanh": cpu_wkv.TANH, "sigmoid": cpu_wkv.SIGMOID}
TIME, CHANNEL = 0, 1
"""Which of a layer's two mixings rows are for: the first to take a state's places, and the last."""


class WkvInputs(NamedTuple):
    """What the rule reads of a step's tokens, all [T, C]: r, k, v and gates as projected; decays, rates and mixes fp32, what the
    narrow matrices gave; first: values of the first layer. There mixes and first are None."""

    r: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor
    mixes: torch.Tensor | None
    first: torch.Tensor | None


def token_shift(
    x: torch.Tensor,
    shares: torch.Tensor,
    part: int,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """x [T, C], shares [P, C] fp32 -> [P, T, C]: see `wkv_rules.token_shift`, of each sequence behind what its state has of it;
    NaN where it has nothing. part: TIME or CHANNEL.

    query_starts [B + 1], kv_lens, known_lens [B] int32: see `Batch`. state_of [B] int32: which of the states is a sequence's.
    """
    (tokens, channels), dtype, num_shares = x.shape, x.dtype, len(shares)
    num_states, _, num_values, _, value_dim = states.matrices.shape
    out = cpu.new_tensor((num_shares, tokens, channels), dtype)
    max_guesses = states.guesses.shape[2]
    ints = (
        cpu.address_of(x, dtype, tokens, num_values * value_dim), tokens,
        cpu.address_of(shares, torch.float32, num_shares, channels), num_shares, part, num_values, value_dim,
        cpu.address_of(states.inputs, dtype, num_states, 2, 1, 2 * channels),
        cpu.address_of(states.guesses, dtype, num_states, 2, max_guesses, 2 * channels),
        *_places(states), *of_sequences(query_starts, kv_lens, known_lens, state_of), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_wkv.token_shift, tokens * channels * (num_shares + 2), cpu.tags_of(dtype), ints)
    return out


def squash(x: torch.Tensor, kind: Squash, dtype: torch.dtype) -> torch.Tensor:
    """x [T, n] fp32 -> [T, n] of dtype: tanh or sigmoid of each."""
    out = cpu.new_tensor(tuple(x.shape), dtype)
    ints = (cpu.address_of(x, torch.float32, *x.shape), *x.shape, _KINDS[kind], out.data_ptr())
    cpu.launch(cpu_wkv.squash, 32 * x.numel(), cpu.tags_of(dtype), ints)
    return out


def wkv7(
    inputs: WkvInputs,
    tables: torch.Tensor,
    eps: float,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """-> [T, C]: see `wkv_rules.wkv7`, of each sequence behind what its state has of it; NaN where it has nothing. tables [8, C]
    fp32. The others: see `token_shift`, which comes first and last in a layer."""
    (tokens, channels), dtype, f32 = inputs.r.shape, inputs.r.dtype, torch.float32
    num_states, _, num_values, dim, _ = states.matrices.shape
    max_guesses = states.guesses.shape[2]
    out = cpu.new_tensor((tokens, channels), dtype)
    mixes, first = inputs.mixes, inputs.first
    assert (mixes is None) == (first is None), "the first layer has neither"
    ints = (
        *(cpu.address_of(each, dtype, tokens, channels) for each in (inputs.r, inputs.k, inputs.v, inputs.gates)),
        cpu.address_of(inputs.decays, f32, tokens, channels), cpu.address_of(inputs.rates, f32, tokens, channels),
        0 if mixes is None else cpu.address_of(mixes, f32, tokens, channels),
        0 if first is None else cpu.address_of(first, dtype, tokens, channels), tokens,
        cpu.address_of(tables, f32, 8, channels), num_values, dim,
        cpu.address_of(states.matrices, f32, num_states, 2, num_values, dim, dim),
        cpu.address_of(states.guess_gates, f32, num_states, 2, max_guesses, 5 * channels),
        *_places(states), *of_sequences(query_starts, kv_lens, known_lens, state_of), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_wkv.wkv7, tokens * channels * dim * 5, cpu.tags_of(dtype), ints, (eps,))
    return out


def _places(states: States) -> tuple[int, ...]:
    num_states, _, num_values, _, _ = states.matrices.shape
    addresses = (cpu.address_of(each, torch.int32, num_states, 2, num_values) for each in (states.stamps, states.reaches))
    return (*addresses, num_states, states.guesses.shape[2])
