"""Numbers that each layer gets of each token, beside what the layers before have made of it (Gemma 3n and 4, EmbeddingGemma 2).

A second embedding has them for all layers at once; what a projection makes of the first one's rows is added, normed layer by
layer. In a layer they gate a narrow MLP, whose result, normed, joins the residual stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nanovllm_cli.kernels.ops import Addend
from nanovllm_cli.layers.embedding import Embedding, storage_slot
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.quant.rows import QuantizedRows, take_rows


class PerLayerInputs:
    """(embedding's rows * sqrt(width) + norm(project(x))) / sqrt(2), of `width` numbers a layer; norm(project(x)) where they have
    no embedding. Tokens behind those that have a row of the checkpoint's have the first one's."""

    def __init__(self, spec: ModelSpec, kit: Kit) -> None:
        self.width, self.own_rows = spec.per_layer_width, spec.per_layer_rows or spec.vocab_size
        self.ops = kit.ops
        every = self.width * spec.num_layers
        table = kit.weight({"per_layer_embedding": spec.vocab_size}, every) if spec.per_layer_embedded else None
        self.embedding = None if table is None else Embedding(table)
        self.project = Linear(spec.hidden_size, {"per_layer_projection": every}, kit)
        # The projection is divided by sqrt(hidden_size) before its norm, which does not see it but for eps.
        self.norm = RMSNorm(replace(spec.norm, eps=spec.norm.eps * spec.hidden_size), self.width, kit)

    def __call__(self, ids: torch.Tensor, table: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """ids [T], with a table indices into it; x [T, hidden]: what the first layer reads. Gives [T, layers * width]."""
        made = self.project(x)
        projected = self.norm.alone(made.view(-1, self.width)).view(made.shape)
        if self.embedding is None:
            return projected
        own = self.ops.scale(self.embedding(ids, table), self.width**0.5)
        return self.ops.add(own, projected, 0.5**0.5)

    def slots(self) -> Slots:
        slots = self.project.slots() | {"per_layer_norm.weight": self.norm.slots()["weight"]}
        if self.embedding is None:
            return slots
        weight = self.embedding.weight
        table = storage_slot(weight)
        if self.own_rows < weight.num_rows:
            table = WeightSlot((self.own_rows, weight.width), self._load_table)
        return slots | {"per_layer_embedding.weight": table}

    def _load_table(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert self.embedding is not None
        weight = self.embedding.weight
        weight.load_rows(first, rows)
        for place in range(self.own_rows, weight.num_rows) if first == 0 else ():
            weight.load_rows(place, take_rows(rows, slice(0, 1)))


class PerLayer:
    """norm(out(gelu(gate(x)) * own)), a layer's part, which joins the residual stream with a factor. own [T, width] may be
    columns of a wider tensor."""

    def __init__(self, spec: ModelSpec, kit: Kit) -> None:
        self.ops = kit.ops
        self.gate = Linear(spec.hidden_size, {"per_layer_gate": spec.per_layer_width}, kit)
        self.out = Linear(spec.per_layer_width, {"per_layer_out": spec.hidden_size}, kit)
        self.norm = RMSNorm(spec.norm, spec.hidden_size, kit)

    def __call__(self, x: torch.Tensor, own: torch.Tensor, factor: float) -> Addend:
        return self.norm.before_joining(self.out(self.ops.gated(self.gate(x), own, "gelu_tanh")), factor)

    def slots(self) -> Slots:
        return self.gate.slots() | self.out.slots() | {"after_per_layer_norm.weight": self.norm.slots()["weight"]}
