"""Compressed convolutional attention of a block (Figliolia et al. 2025): queries and keys go through two short convolutions
before they meet, and half of the values are those of the token before. See `ConvolvedSpec`."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import HeadNorms, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.quant.rows import QuantizedRows


class ConvolvedAttention(Projected):
    """out(attend(met(qkv(x)))). The first convolution has a tap of each channel for each of `taps` tokens, the second a matrix of
    each head for each of `head_taps`, which reads what the first gives for as many tokens: so the first is computed as often,
    with its taps moved. Values of the token before are one more channel each, with a single tap of 1. All of it reads inputs that
    lie in the sequence's blocks, behind keys and values. Where several processes compute the model, each has the whole layer."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, kit: Kit) -> None:
        convolved, self.spec = spec.convolved, spec
        assert convolved is not None
        more = spec.qkv_bias, spec.out_bias, spec.qk_norm, spec.sinks, spec.softcap, spec.clip, spec.gated, spec.value_dim
        assert not any(more), "no model has these there"
        self.backend, self.ops, self.convolution = kit.backend, kit.ops, spec.past
        dim, keys = spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.width, heads = spec.num_heads * dim + keys, spec.num_heads + spec.num_kv_heads
        parts = {"q": self.width - keys, "k": keys, "v_before": keys // 2, "v": keys // 2}
        self.qkv = Linear(hidden_size, parts, kit)
        count = convolved.head_taps
        size = convolved.width, self.convolution.channels
        self._each_taps = [kit.zeros(*size) for _ in range(count)]
        self._each_taps[0][-2, self.width :] = 1
        self.taps_bias = kit.zeros(self.convolution.channels)
        self.matrices = [kit.ops.head_matrices(heads, dim, dim, kit.dtype) for _ in range(count)]
        self.bias = kit.zeros(self.width)
        self.gains = kit.zeros(spec.num_kv_heads, dtype=torch.float32)
        self.least = torch.finfo(kit.dtype).eps
        self.out = Linear(spec.num_heads * dim, {"o": hidden_size}, kit)
        self._rows: list[torch.Tensor] = []

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        projected, dim = self.qkv(x), self.spec.head_dim
        gated = self.ops.with_open_gates(projected, self.convolution.channels)
        past, bias = cache[-1:], self.taps_bias
        made = [self.backend.convolve(self.convolution, gated, taps, bias, past, inputs.step) for taps in self._each_taps]
        found = self.matrices[0].products(made[0], 0, dim)
        for matrices, rows in zip(self.matrices[1:], made[1:], strict=True):
            found = self.ops.add(found, matrices.products(rows, 0, dim))
        heads = dim, self.spec.num_kv_heads
        qkv = self.ops.met_heads(projected, found, self.bias, made[0], self.gains, *heads, self.least)
        return self.backend.attend(
            self.spec, qkv, HeadNorms(), inputs.angles[self.spec.rope], None, cache[:-1], inputs.step, inputs.distances
        )

    def slots(self) -> Slots:
        convolved = self.spec.convolved
        assert convolved is not None
        own = {
            "conv.weight": WeightSlot((self.width, convolved.taps), self._load_taps, plain=True),
            "conv.bias": table_slot(self.taps_bias[: self.width]),
            "head_conv.weight": WeightSlot((self.width, self.spec.head_dim, convolved.head_taps), self._load_heads, plain=True),
            "head_conv.bias": table_slot(self.bias),
            "k_gains": table_slot(self.gains),
        }
        return self.qkv.slots() | own | self.out.slots()

    @property
    def head_bytes(self) -> int:
        return sum(matrices.num_bytes for matrices in self.matrices)

    def _load_taps(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "a plain slot"
        count, (num_rows, own) = len(self._each_taps), rows.shape
        for late, taps in enumerate(self._each_taps):  # what is found so many tokens late
            begin = count - 1 - late
            taps[begin : begin + own, first : first + num_rows].copy_(rows.T)

    def _load_heads(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """rows [some, D, head_taps]; of a head whose rows are not all there they wait."""
        assert isinstance(rows, torch.Tensor), "a plain slot"
        dim = self.spec.head_dim
        waiting = torch.cat([*self._rows, rows])
        head, count = (first + len(rows) - len(waiting)) // dim, len(waiting) // dim
        for i in range(count):
            for late, matrices in enumerate(self.matrices):
                matrices.load(head + i, waiting[i * dim : (i + 1) * dim, :, len(self.matrices) - 1 - late])
        self._rows = [waiting[count * dim :].clone()] if len(waiting) % dim else []
