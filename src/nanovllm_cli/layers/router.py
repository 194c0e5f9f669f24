"""A router that is an MLP, and reads what the one of the layer before has made of a token, see `RouterSpec`; and what routers
keep for others to read."""

from __future__ import annotations

import torch

from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.router_spec import RouterSpec


class HandedOn:
    """What a step's last router leaves to the next one, rows [T, width], None before the first; of a mixture that is routed
    early, what it leaves to its own experts: logits [T, E]. ids [T]: the step's tokens, of mixtures that go by a table. seen [T]
    bool: which of them take the experts of `MoESpec.seen`; None where none does."""

    def __init__(self, mixture: MoESpec | None = None) -> None:
        self.rows: torch.Tensor | None = None
        self._seen_ids = None if mixture is None or mixture.seen is None else torch.tensor(mixture.seen_ids)
        self.ids: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None

    def begin(self, ids: torch.Tensor) -> None:
        """A step of these tokens [T]."""
        self.ids, self.seen = ids, self.of_images(ids)

    def are_texts(self, ids: torch.Tensor) -> bool:
        """Whether none of these tokens takes experts for images, as in all recorded steps."""
        return self.of_images(ids) is None

    def of_images(self, ids: torch.Tensor) -> torch.Tensor | None:
        """[T] bool: which of these tokens do; None where none does."""
        if self._seen_ids is None:
            return None
        found = torch.isin(ids, self._seen_ids)
        return found if bool(found.any()) else None

    def keep(self, rows: torch.Tensor) -> None:
        """Only these tokens go on."""
        self.rows = None if self.rows is None else self.rows[rows]
        self.ids = None if self.ids is None else self.ids[rows]
        self.seen = None if self.seen is None else self.seen[rows]


class Router:
    """rows [T, hidden] -> [T, E] fp32, of which sigmoids are weights: see `compressed_rules.of_the_best`. All of it is small, and
    plain and whole in every process. handed: shared by all routers of a model."""

    def __init__(self, spec: RouterSpec, num_experts: int, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        whole, width = kit.undivided, spec.width
        self.ops, self.handed = kit.ops, HandedOn()
        self.into = Linear(hidden_size, {"router_in": width}, whole, bias=True)
        self.gains = kit.zeros(width, dtype=torch.float32) if spec.reads_last else None
        self.nothing = kit.zeros(width, dtype=torch.float32)
        self.norm = RMSNorm(norm, width, whole)
        self.inner = [Linear(width, {f"router_{i}": width}, whole, bias=True) for i in range(2)]
        self.out = Linear(width, {"router_out": num_experts + 1}, whole)
        self.bias = kit.zeros(num_experts + 1, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.into(x)
        if self.gains is not None:
            last = self.handed.rows
            assert last is not None, "the layer before has a router"
            rows = self.ops.add(rows, self.ops.rescale(last, self.nothing, self.gains))
        self.handed.rows = rows
        h = self.norm.alone(rows)
        for linear in self.inner:
            h = linear.gated(h, "lone_gelu")
        return self.ops.of_the_best(self.out.weight.matmul(h, None, torch.float32), self.bias)

    def slots(self) -> Slots:
        slots = {name: slot for linear in (self.into, *self.inner, self.out) for name, slot in linear.slots().items()}
        slots |= {} if self.gains is None else {"router_gains": table_slot(self.gains)}
        return slots | {"router_norm.weight": self.norm.slots()["weight"], "router_bias": table_slot(self.bias)}
