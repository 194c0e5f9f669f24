"""How far back what a layer keeps is seen, which says whether it need be kept for good; see `engine/near.py`."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.mixer_spec import AttentionSpec, MixerSpec

OF_TOKENS = 2
"""Parts of a layer with digests that belong to tokens, the first ones: keys, and what digests are made of."""


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


def num_near(mixer: MixerSpec | None, reach: int | None, num_parts: int) -> int:
    """Of so many parts that a layer keeps in a block, how many first ones are seen no further than that: all, or none, or what
    belongs to tokens where digests stand for these."""
    if reach is None:
        return 0
    has_digests = isinstance(mixer, AttentionSpec) and mixer.shared is not None and mixer.shared.digests is not None
    return OF_TOKENS if has_digests else num_parts


def _reach(mixer: MixerSpec | None) -> int | None:
    """Not of one that keeps other things in a block, too."""
    if isinstance(mixer, AttentionSpec) and mixer.shared is not None:
        assert mixer.window is not None
        return max(mixer.window, 0 if mixer.shared.digests is None else mixer.shared.digests.reach)
    if not isinstance(mixer, AttentionSpec) or mixer.both_ways or mixer.latent is not None or mixer.convolved is not None:
        return None
    return mixer.window or mixer.chunk
