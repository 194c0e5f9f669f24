"""The paged KV cache: per layer a few tensors of blocks, in the layout of the backend that reads them.

What belongs to a block lies in it, the scales of a quantized cache too: whoever copies or shares blocks knows nothing of formats.
Nor of convolutions, whose past is there as well: the inputs of a block's tokens. So their prefixes are found, and their sequences
forked, preempted and led back behind guesses, as those of attention are.

A state (the delta rule's) belongs to a block as well: the one behind the last of its tokens that is computed. It is as large as
hundreds of tokens' keys and values, so blocks are larger where there are states (STATE_BLOCK). Two places for it let a step be
repeated: see kernels/delta.py. What a state was behind a guess that did not hold, nobody knows: such models take none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import DeltaSpec, MixerSpec, ModelSpec

STATE_BLOCK = 256
"""Tokens of a block at least, where it has states: found prefixes are a multiple of it."""
# What a cache can be kept as, beside the compute type.
QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def cache_dtypes(names: tuple[str, str], dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """What K and V are kept as, given EngineConfig's names and the compute type. UnsupportedError for another dense type."""
    computed = str(dtype).removeprefix("torch.")
    for name in names:
        if name not in ("auto", computed, *QUANTIZED):
            raise UnsupportedError(
                f"a KV cache of {name} where {computed} is computed", f"known: auto, {computed}, {', '.join(QUANTIZED)}"
            )
    k, v = (QUANTIZED.get(name, dtype) for name in names)
    return k, v


LayerCache = tuple[torch.Tensor, ...]
"""Keys and values of one layer, the inputs of its convolution, or its states; the first axis counts blocks."""
BlockPart = tuple[tuple[int, ...], torch.dtype]
"""Of one block in one tensor: shape and type."""


def settled(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The settings as they are for this model. UnsupportedError for those that it can't have."""
    if not spec.has_states:
        return config
    if config.max_guesses:
        raise UnsupportedError(
            f"a {spec.architecture} model can't take back a guess: its layers keep a state instead of each token",
            "leave --speculate and --draft-model away",
        )
    return replace(config, block_size=max(config.block_size, STATE_BLOCK))


def state_parts(mixer: DeltaSpec, dtype: torch.dtype) -> list[BlockPart]:
    """Of a block: states, inputs of the convolution, and behind how many tokens each value head has them, in two places."""
    states = 2, mixer.num_values, mixer.key_dim, mixer.value_dim
    inputs, stamps = (2, mixer.width - 1, mixer.channels), (2, mixer.num_values)
    return [(states, torch.float32), (inputs, dtype), (stamps, torch.int32)]


class BlockMover(Protocol):
    """Whole blocks of one cache, in all its layers."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to), at least one; no target is a source, or twice a target."""

    def take_out(self, blocks: list[int]) -> torch.Tensor:
        """What these hold, on the host: uint8 [len(blocks), block_bytes], what each layer keeps, in order."""

    def put_in(self, blocks: list[int], data: torch.Tensor) -> None:
        """Fills these, none of them twice, with what `take_out` gave of others."""


class CacheLayout(Protocol):
    """The part of an AttentionBackend that says what its cache looks like."""

    cache_dtypes: tuple[torch.dtype, torch.dtype]
    """Of K's and V's tensors."""

    def block_parts(self, mixer: MixerSpec) -> list[BlockPart]:
        """What a layer keeps in a block."""

    def empty_cache(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory for a cache, as uint8."""

    def block_mover(self, layers: list[LayerCache]) -> BlockMover:
        """What copies whole blocks in all layers of this cache, and takes them out and in."""


class KVCache:
    """num_blocks blocks for every layer, in one allocation. mixers: of each layer."""

    def __init__(self, num_blocks: int, mixers: Sequence[MixerSpec], layout: CacheLayout) -> None:
        self.num_blocks = num_blocks
        layers = [layout.block_parts(mixer) for mixer in mixers]
        sizes = [num_blocks * _num_bytes(part) for parts in layers for part in parts]
        memory = iter(torch.split(layout.empty_cache(sum(sizes)), sizes))
        self.layers: list[LayerCache] = [
            tuple(next(memory).view(dtype).view(num_blocks, *shape) for shape, dtype in parts) for parts in layers
        ]
        self.blocks = layout.block_mover(self.layers)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in all layers: copy-on-write."""
        if pairs:
            self.blocks.copy(pairs)


def block_bytes(mixers: Sequence[MixerSpec], layout: CacheLayout) -> int:
    """Memory of one block over all layers."""
    return sum(_num_bytes(part) for mixer in mixers for part in layout.block_parts(mixer))


def _num_bytes(part: BlockPart) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize
