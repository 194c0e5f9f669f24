"""Which heads of a layer each of several processes computes. What has too few is computed by all of them, on products that are
whole; so are norms of all heads together, and of each with gains of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from nanovllm_cli.digest_spec import SharedSpec
from nanovllm_cli.distributed.division import Division
from nanovllm_cli.mixer_spec import AttentionSpec, ConvolvedSpec, MixerSpec, PairSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.state_spec import DeltaSpec

Mixer = TypeVar("Mixer", bound=MixerSpec)


def num_units(mixer: MixerSpec) -> int:
    """Of heads that stay together, as they share keys and values, or keys. 0 where a layer can't be divided."""
    match mixer:
        case AttentionSpec(convolved=ConvolvedSpec()) | AttentionSpec(values=MoESpec()) | AttentionSpec(shared=SharedSpec()):
            return 0
        case AttentionSpec(latent=None):
            return mixer.num_kv_heads if mixer.qk_norm_of not in ("all heads", "each head") else 0
        case AttentionSpec():
            return mixer.num_heads  # what is kept of a token is for all of them, and each process keeps it
        case DeltaSpec(mamba=False):
            in_order = not mixer.tiled or mixer.num_keys == mixer.num_values
            return mixer.num_keys if in_order and not mixer.channel_rank else 0
    return 0


def own_units(mixer: MixerSpec, rank: int, size: int) -> range | None:
    """Those of a process; None where all compute the whole layer."""
    units = num_units(mixer)
    return Division((units,), size, units).ranges(rank)[0] if units >= size > 1 else None


def own_mixer(mixer: Mixer, rank: int, size: int) -> Mixer:
    """What a process computes of a layer."""
    if isinstance(mixer, PairSpec):
        if mixer.ahead is not None:
            return mixer
        return replace(mixer, attention=own_mixer(mixer.attention, rank, size))
    own = own_units(mixer, rank, size)
    changes: dict[str, Any] = {}
    if own is not None:
        match mixer:
            case AttentionSpec(latent=None):
                changes = {"num_heads": len(own) * mixer.queries_a_key, "num_kv_heads": len(own)}
            case AttentionSpec():
                changes = {"num_heads": len(own)}
            case DeltaSpec():
                changes = {"num_keys": len(own), "num_values": len(own) * (mixer.num_values // mixer.num_keys)}
    return replace(mixer, **changes)


def own_spec(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The same of all layers, and of what they attend to: what a process's KV cache is for."""

    blocks = []
    for block in spec.blocks:
        cross, looks, mixer = block.cross, block.looks, block.mixer
        own = replace(
            block,
            mixer=mixer and own_mixer(mixer, rank, size),
            cross=cross and replace(cross, attention=own_mixer(cross.attention, rank, size)),
            looks=looks and replace(looks, attention=own_mixer(looks.attention, rank, size)),
        )
        blocks.append(own)
    encoder = spec.encoder and own_spec(spec.encoder, rank, size)
    return replace(spec, blocks=tuple(blocks), encoder=encoder)
