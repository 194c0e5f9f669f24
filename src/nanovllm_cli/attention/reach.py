"""How far back what a layer keeps is seen, which says whether it need be kept for good; see `engine/near.py`."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.mixer_spec import AttentionSpec, MixerSpec


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
    """Not of one that keeps other things in a block, too."""
    if not isinstance(mixer, AttentionSpec) or mixer.both_ways or mixer.latent is not None or mixer.convolved is not None:
        return None
    return mixer.window or mixer.chunk
