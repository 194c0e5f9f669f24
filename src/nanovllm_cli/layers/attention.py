"""The attention of a block: projections and norms around an AttentionBackend."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import QKNorm, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.model_spec import AttentionSpec, NormSpec


class Attention(Mixer):
    """out(attend(qkv(x)))."""

    def __init__(self, spec: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.backend = kit.backend
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(hidden_size, {"qkv": q + 2 * kv} if spec.fused_qkv else {"q": q, "k": kv, "v": kv}, kit, spec.qkv_bias)
        self.out = Linear(q, {"o": hidden_size}, kit, spec.out_bias)
        q_gains, k_gains = kit.zeros(2, spec.head_dim).fill_(1 - norm.offset)
        self.norm = QKNorm(q_gains, k_gains, norm.eps, norm.offset) if spec.qk_norm else QKNorm()
        self.stored_offset = norm.stored_offset
        self.sinks = kit.zeros(spec.num_heads, dtype=torch.float32) if spec.sinks else None

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        angles = inputs.angles[self.spec.rope]
        return self.backend.attend(self.spec, self.qkv(x), self.norm, angles, self.sinks, cache, inputs.step)

    def slots(self) -> Slots:
        slots = self.qkv.slots() | self.out.slots()
        norms = {"q_norm.weight": self.norm.q, "k_norm.weight": self.norm.k}
        slots |= {name: table_slot(weight, self.stored_offset) for name, weight in norms.items() if weight is not None}
        if self.sinks is not None:
            slots["sinks"] = table_slot(self.sinks)
        return slots
