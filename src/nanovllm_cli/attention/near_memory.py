"""What layers with a window keep of the cache's blocks, which is given back behind it; see `engine/near.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli import system
from nanovllm_cli.mixer_spec import AttentionSpec, MixerSpec


class NearMemory:
    """sides: keys and values of such layers; the first axis counts blocks."""

    def __init__(self, sides: Sequence[torch.Tensor]) -> None:
        self._sides = [side.flatten().view(torch.uint8).view(len(side), -1) for side in sides]
        self._gives_back = False

    def give_back(self, blocks: Sequence[int]) -> None:
        """The pages of these blocks, in rising order, are no memory any more, until they are written again."""
        if not blocks:
            return
        if not self._gives_back:
            self._gives_back = True
            for side in self._sides:
                system.keep_pages_small(side.data_ptr(), side.nbytes)
        runs = [(blocks[0], blocks[0])]
        for block in blocks[1:]:
            first, last = runs[-1]
            runs[-1:] = [(first, block)] if block == last + 1 else [(first, last), (block, block)]
        for side in self._sides:
            size = side.shape[1]
            for first, last in runs:
                system.give_back(side.data_ptr() + first * size, (last + 1 - first) * size)


def near_reach(mixers: Sequence[MixerSpec | None]) -> int:
    """Tokens that the widest window sees; 0 where there is none."""
    return max((reach for reach in reaches(mixers) if reach is not None), default=0)


def reaches(mixers: Sequence[MixerSpec | None]) -> list[int | None]:
    """How far back each layer's keys are seen, by itself and those that read them; None: to the beginning, or it has none."""
    found = [_reach(mixer) for mixer in mixers]
    for i, mixer in enumerate(mixers):
        if isinstance(mixer, AttentionSpec) and mixer.reads is not None:
            own, read = found[i], found[mixer.reads]
            found[mixer.reads] = None if own is None or read is None else max(own, read)
            found[i] = None
    return found


def _reach(mixer: MixerSpec | None) -> int | None:
    return (mixer.window or mixer.chunk) if isinstance(mixer, AttentionSpec) and not mixer.both_ways else None
