"""Attention to what an encoder has made (`CrossSpec`): queries are of a step's tokens, keys and values of the encoder's rows, and
kept once, in the step that has the tokens which stand for these."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.encoded import AttendsToEncoded, EncodedRows
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mixer_spec import AttentionSpec


class Cross(Projected):
    """out(attend(q(x))). Where several processes compute the model, each has some of the heads, and their part of the cache."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self._whole = kit.own_mixer(spec), spec
        self._backend = kit.backend
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        plain = AttentionSpec(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, None, spec.qkv_bias, spec.out_bias, scale=spec.scale,
            key_bias=spec.key_bias,
        )  # fmt: skip
        assert spec == plain, "no model has more there"
        of_queries, of_kept, self._gather = None, None, None
        if kit.own_units(spec) is not None:
            of_queries, of_kept = (Cut(sections, spec.num_kv_heads, "none") for sections in ((q,), (kv, kv)))
            self._gather = kit.gathering(q, spec.num_kv_heads)
        self.q = Linear(hidden_size, {"cross_q": q}, kit, spec.qkv_bias, of_queries)
        self.kv = Linear(hidden_size, {"cross_k": kv, "cross_v": kv}, kit, spec.qkv_bias, of_kept)
        self.out = Linear(q, {"cross_o": hidden_size}, kit, spec.out_bias)

    @property
    def backend(self) -> AttendsToEncoded:
        assert isinstance(self._backend, AttendsToEncoded), "platforms whose backends can't refuse such a model"
        return self._backend

    def keep(self, rows: EncodedRows, cache: LayerCache) -> None:
        """Writes keys and values of an encoder's rows to the cache."""
        self.backend.keep_encoded(self.spec, self.kv(rows.values), rows, cache)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        q = self.q(x)
        if inputs.asks is not None:
            inputs.asks.append(q.clone())
        found = self.backend.attend_encoded(self.spec, q, cache, inputs.step)
        return found if self._gather is None else self._gather(found)

    def slots(self) -> Slots:
        slots = self.q.slots() | self.kv.slots() | self.out.slots()
        if not self._whole.key_bias:
            slots.pop("cross_k.bias", None)
        return slots
