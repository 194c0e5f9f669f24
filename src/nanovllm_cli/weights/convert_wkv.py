"""Tensors of RWKV-7 as llama.cpp's converter has them: shares of the token before are one tensor of a layer, and the first layer
has matrices of values, which llama.cpp asks for and does not read: those of its rates once more."""

from __future__ import annotations

import re

from nanovllm_cli.layers.wkv import SHARES
from nanovllm_cli.models.family import Family
from nanovllm_cli.weights.convert_tensors import Step

_SHARE = re.compile(r"(blk\.\d+\.time_mix_lerp_)([a-z])\.weight")
_RATES = re.compile(r"blk\.0\.time_mix_a([012])\.weight")


def with_shares_as_one(steps: list[Step], family: Family) -> list[Step]:
    """The same of a folder's tensors for a file of such a model; those of others as they are."""
    if (family.gguf_name or family.name) != "rwkv7":
        return steps
    shares: dict[str, dict[str, Step]] = {}
    found: list[Step] = []
    for step in steps:
        if (share := _SHARE.fullmatch(step.name)) is not None:
            shares.setdefault(share[1], {})[share[2]] = step
            continue
        found.append(step)
        if (rates := _RATES.fullmatch(step.name)) is not None:
            found.append(step._replace(name=f"blk.0.time_mix_v{rates[1]}.weight"))
    for place, parts in shares.items():
        own = tuple(parts[part] for part in SHARES)
        before_bytes = sum(part.before_bytes for part in own)
        shape = (len(own), 1, 1, *own[0].shape)
        found.append(own[0]._replace(name=f"{place}fused.weight", source=None, shape=shape, parts=own, before_bytes=before_bytes))
    return found
