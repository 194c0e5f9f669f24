"""The paged KV cache: per layer a few tensors of blocks, in the layout of the backend that reads them.

What belongs to a block lies in it, the scales of a quantized cache too: whoever copies or shares blocks knows nothing of formats.
Nor of convolutions, whose past is there as well: the inputs of a block's tokens. So their prefixes are found, and their sequences
forked, preempted and led back behind guesses, as those of attention are.

What layers with a window keep of a block is of no use behind it: there may be fewer of these parts than of blocks, with numbers
and tables of their own (`engine/near.py`). So it is with what layers with digests keep of tokens; digests stay.

A state (the delta rule's, Mamba's) belongs to a sequence instead, as it is as large as hundreds of tokens' keys and values:
layers that keep one have num_states of them (kernels/states.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from nanovllm_cli.attention.reach import num_near, reaches
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec, MixerSpec, PairSpec, state_in
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, StateSpec

ALIGNMENT = 64
"""Of each tensor: the kernels' widest loads, and lines of a CPU's caches."""
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
"""Keys and values of one layer, the inputs of its convolution, or its states; the first axis counts blocks, or states."""
BlockPart = tuple[tuple[int, ...], torch.dtype]
"""Of one block in one tensor: shape and type."""


STATE_PARTS = 6
"""Tensors of what a layer keeps in a state, but for what n-grams need of the tokens before."""


def state_parts(mixer: StateSpec, dtype: torch.dtype, max_guesses: int) -> list[BlockPart]:
    """Of one of `States`, and of `NGramPast` behind it, where there are n-grams."""
    values, gates = mixer.num_values, mixer.num_gates
    ngrams = mixer.ngrams if isinstance(mixer, DeltaSpec) else None
    past: list[BlockPart] = []
    if ngrams is not None:
        past = [((2, ngrams.num_before, ngrams.channels), dtype), ((2, ngrams.longest - 1), torch.int32)]
    return [
        ((2, values, mixer.key_dim, mixer.value_dim), torch.float32),
        ((2, mixer.width - 1, mixer.channels), dtype),
        ((2, max_guesses, mixer.num_guessed), dtype),
        ((2, max_guesses, gates), torch.float32),
        ((2, values), torch.int32),
        ((2, values), torch.int32),
        *past,
    ]


class BlockMover(Protocol):
    """Whole blocks of one cache, in all its layers."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to), at least one; no target is a source, or twice a target."""

    def take_out(self, blocks: list[int]) -> torch.Tensor:
        """What these hold, on the host: uint8 [len(blocks), block_bytes], what each layer keeps, in order."""

    def put_in(self, blocks: list[int], data: torch.Tensor) -> None:
        """Fills these, none of them twice, with what `take_out` gave of others."""


class NothingInBlocks:
    """A BlockMover of no layers."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def take_out(self, blocks: list[int]) -> torch.Tensor:
        return torch.empty(len(blocks), 0, dtype=torch.uint8)

    def put_in(self, blocks: list[int], data: torch.Tensor) -> None:
        assert not data.numel(), "nobody keeps this"


class CacheLayout(Protocol):
    """The part of an AttentionBackend that says what its cache looks like."""

    cache_dtypes: tuple[torch.dtype, torch.dtype]
    """Of K's and V's tensors."""

    dtype: torch.dtype
    """Of what goes into convolutions."""

    max_guesses: int
    """Of a sequence in a step, for states."""

    def block_parts(self, mixer: AttentionSpec | ConvSpec) -> list[BlockPart]:
        """What a layer keeps in a block."""

    def empty_cache(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory for a cache, as uint8."""

    def block_mover(self, layers: list[LayerCache]) -> BlockMover:
        """What copies whole blocks in all layers of this cache, and takes them out and in."""


class KVCache:
    """num_blocks blocks for every layer that has keys and values or a convolution, num_states states for every other, in one
    allocation. mixers: of each layer. num_parts: where it is not 0, so many in place of blocks for layers with a window, of which
    is_near says of which that is all; others have those first parts of theirs that are near in them, and the rest in blocks.
    states: what copies states; None where no layer has one."""

    def __init__(
        self,
        num_blocks: int,
        mixers: Sequence[MixerSpec | None],
        layout: CacheLayout,
        num_states: int = 1,
        num_parts: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        parts = [[*_block_parts(mixer, layout), *_state_parts(mixer, layout)] for mixer in mixers]
        kept = [len(_block_parts(mixer, layout)) for mixer in mixers]  # none of those that read another's, or have none
        near_kept = [num_near(*each) for each in zip(mixers, reaches(mixers), kept, strict=True)]
        self._has_parts = num_parts > 0
        self.is_near = [self._has_parts and 0 < own == every for own, every in zip(near_kept, kept, strict=True)]
        of_near = num_parts if self._has_parts else num_blocks
        counts = [
            [of_near] * own + [num_blocks] * (every - own) + [num_states] * (len(all_parts) - every)
            for own, every, all_parts in zip(near_kept, kept, parts, strict=True)
        ]
        sizes = [n * _num_bytes(part) for ns, every in zip(counts, parts, strict=True) for n, part in zip(ns, every, strict=True)]
        rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        pieces = torch.split(layout.empty_cache(sum(rooms)), rooms)
        memory = iter([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
        self.layers: list[LayerCache] = [
            tuple(next(memory).view(dtype).view(n, *shape) for n, (shape, dtype) in zip(ns, every, strict=True))
            for ns, every in zip(counts, parts, strict=True)
        ]
        split = [(layer[:own], layer[own:]) for layer, own in zip(self.layers, kept, strict=True)]
        halves = [(blocks[own:], blocks[:own]) for (blocks, _), own in zip(split, near_kept, strict=True)]
        far, near = [half for half, _ in halves if half], [half for _, half in halves if half]
        self._far_bytes = sum(side[0].nbytes for layer in far for side in layer) if num_blocks else 0
        self._blocks = layout.block_mover(far) if far else NothingInBlocks()
        self._parts = layout.block_mover(near) if near else NothingInBlocks()
        states = [state for _, state in split if state]
        self.states = layout.block_mover(states) if states else None
        for i, mixer in enumerate(mixers):
            if isinstance(mixer, AttentionSpec) and mixer.reads is not None:
                self.layers[i], self.is_near[i] = self.layers[mixer.reads], self.is_near[mixer.reads]

    def copy_blocks(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy whole blocks in all layers: copy-on-write. (from, to, and of which part to which)."""
        if copies:
            self._blocks.copy([(source, target) for source, target, *_ in copies])
            self._parts.copy([copy[2:] if self._has_parts else copy[:2] for copy in copies])

    def take_out(self, blocks: list[int], parts: list[int]) -> torch.Tensor:
        """What these hold, on the host: uint8 [len(blocks), block_bytes], layers with a window behind the others. parts: the
        numbers that they have there; below 0 of those that are gone, which are zeros."""
        near = self._parts.take_out([max(0, part) for part in parts] if self._has_parts else blocks)
        if self._has_parts:
            near[[part < 0 for part in parts]] = 0
        return torch.cat([self._blocks.take_out(blocks), near], dim=1)

    def put_in(self, blocks: list[int], parts: list[int], data: torch.Tensor) -> None:
        """Fills these, none of them twice, with what `take_out` gave of others; not parts that are gone."""
        far, near = data[:, : self._far_bytes], data[:, self._far_bytes :]
        self._blocks.put_in(blocks, far.contiguous())
        if not self._has_parts:
            self._parts.put_in(blocks, near.contiguous())
        elif there := [i for i, part in enumerate(parts) if part >= 0]:
            self._parts.put_in([parts[i] for i in there], near[there])

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from, to), of whole states."""
        if pairs:
            assert self.states is not None
            self.states.copy(list(pairs))


class BorrowedCache(KVCache):
    """Of layers that read those of another cache, each the one that its mixer's `reads` is. What moves blocks does so there."""

    def __init__(self, cache: KVCache, mixers: Sequence[MixerSpec | None]) -> None:
        self.num_blocks, self.states = cache.num_blocks, None
        places = [mixer.reads for mixer in mixers if isinstance(mixer, AttentionSpec) and mixer.reads is not None]
        self.layers = [cache.layers[place] for place in places]
        self.is_near = [cache.is_near[place] for place in places]
        assert len(self.layers) == len(mixers), "all of them read"

    def copy_blocks(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        assert not copies, "whose cache it is does"


def parts_of(mixer: MixerSpec | None, layout: CacheLayout) -> list[BlockPart]:
    """What a layer keeps: in a block, then in a state."""
    return [*_block_parts(mixer, layout), *_state_parts(mixer, layout)]


def taken_apart(cache: LayerCache) -> tuple[LayerCache, LayerCache]:
    """Of a layer with attention and a state beside it: what each of them keeps."""
    return cache[:-STATE_PARTS], cache[-STATE_PARTS:]


def block_bytes(mixers: Sequence[MixerSpec | None], layout: CacheLayout) -> int:
    """Memory of one block over all layers."""
    return sum(_num_bytes(part) for mixer in mixers for part in _block_parts(mixer, layout))


def near_bytes(mixers: Sequence[MixerSpec | None], layout: CacheLayout) -> int:
    """Of those of a block what layers with a window keep."""
    total = 0
    for mixer, reach in zip(mixers, reaches(mixers), strict=True):
        parts = _block_parts(mixer, layout)
        total += sum(map(_num_bytes, parts[: num_near(mixer, reach, len(parts))]))
    return total


def state_bytes(mixers: Sequence[MixerSpec | None], layout: CacheLayout) -> int:
    """Memory of one state over all layers; 0 where none has one."""
    return sum(_num_bytes(part) for mixer in mixers for part in _state_parts(mixer, layout))


def _block_parts(mixer: MixerSpec | None, layout: CacheLayout) -> list[BlockPart]:
    mixer = mixer.attention if isinstance(mixer, PairSpec) else mixer
    if mixer is None or isinstance(mixer, StateSpec) or (isinstance(mixer, AttentionSpec) and mixer.reads is not None):
        return []
    if isinstance(mixer, AttentionSpec) and mixer.convolved is not None:
        return [*layout.block_parts(mixer), *layout.block_parts(mixer.past)]
    return layout.block_parts(mixer)


def _state_parts(mixer: MixerSpec | None, layout: CacheLayout) -> list[BlockPart]:
    state = state_in(mixer)
    return [] if state is None else state_parts(state, layout.dtype, layout.max_guesses)


def _num_bytes(part: BlockPart) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize
