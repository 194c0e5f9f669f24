"""Attention and a state space of one block, side by side: both read what one norm gives, and what they find is added up."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache, taken_apart
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.attention import Attention
from nanovllm_cli.layers.delta import Mamba
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mixer_spec import PairSpec
from nanovllm_cli.norm_spec import NormSpec


class Pair(Mixer):
    """attention(x) + state(x)."""

    def __init__(self, spec: PairSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.ops = kit.ops
        self.attention = Attention(spec.attention, norm, hidden_size, kit)
        self.state = Mamba(spec.state, norm, hidden_size, kit)

    def __call__(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        keys, state = taken_apart(cache)
        return self.ops.add(self.attention(x, inputs, keys), self.state(x, inputs, state))

    def slots(self) -> Slots:
        return self.attention.slots() | self.state.slots()
