"""A mixture of experts in a block's place for an MLP: a router chooses some of them for each token, and only those compute.

Each expert is an `MLP` of its own, with weights in whatever format they have; the router's stay plain. How they are run and added
is in `kernels/mixture.py`.
"""

from __future__ import annotations

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.kernels.mixture import Groups, Scoring
from nanovllm_cli.kernels.ops import Hidden, plain
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mlp import MLP
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.router import HandedOn, Router
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows


class MoE:
    """sum over a token's experts of weight * expert(x), and the shared expert's."""

    def __init__(self, spec: MoESpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.ops = kit.ops
        self.expert_width, self.dtype = spec.width(hidden_size), kit.dtype
        self.deep = None if spec.router is None else Router(spec.router, spec.num_experts, norm, hidden_size, kit)
        self.router = None if self.deep else kit.undivided.weight({"router": spec.num_experts}, hidden_size)
        self.router_bias = kit.zeros(spec.num_experts, dtype=torch.float32) if spec.router_bias else None
        self.early = HandedOn() if spec.routed_early else None
        self.latent_in = self.latent_out = None
        if (latent := spec.latent_size) is not None:
            assert not spec.apart, "no model has both"
            self.latent_in = Linear(hidden_size, {"latent_in": latent}, kit)
            self.latent_out = Linear(latent, {"latent_out": hidden_size}, kit)
        self.experts = [MLP(spec.expert, norm, self.expert_width, kit.at(f"experts.{e}")) for e in range(spec.num_experts)]
        self.shared = None if spec.shared is None else MLP(spec.shared, norm, hidden_size, kit.at("shared"))
        self.shared_gate = kit.undivided.weight({"shared.gate_row": 1}, hidden_size) if spec.shared_gate else None
        self.scoring: Scoring | None = None
        by_sigmoid, in_groups = spec.scoring == "sigmoid", spec.groups > 1
        by_root = spec.scoring == "root softplus"
        self.handed = HandedOn() if spec.table_rows else None
        if by_sigmoid or by_root or in_groups or spec.selection_bias or spec.scale != 1.0 or spec.expert_scale:
            bias, scales = kit.zeros(2, spec.num_experts, dtype=torch.float32)
            groups = Groups(spec.groups, spec.groups_taken, 2 if by_sigmoid else 1) if in_groups else None
            own = scales if spec.expert_scale else None
            table = kit.zeros(spec.table_rows, spec.experts_per_token, dtype=torch.int64) if spec.table_rows else None
            self.scoring = Scoring(
                by_sigmoid, bias, spec.scale, own, groups, by_logit=spec.ranks_logits, root_softplus=by_root, table=table
            )
        assert not spec.table_rows or self.scoring is not None, "no model has a table beside a softmax"
        if spec.nearness is not None:
            assert self.scoring is None, "no model has more there"
            self.scoring = Scoring(nearness=spec.nearness)
        assert not spec.scales_input or (spec.experts_per_token == 1 and spec.norm_topk and self.scoring is None), "weights of 1"
        self.seen = None if spec.seen is None else MoE(spec.seen, norm, hidden_size, kit.at("seen"))
        self.kinds = HandedOn()
        self.apart = _Apart(norm, hidden_size, kit) if spec.apart else None
        self.mixture = kit.ops.mixture(self.experts, spec.experts_per_token, spec.norm_topk, self.scoring)

    def __call__(self, x: Hidden, slots: torch.Tensor | None = None) -> torch.Tensor:
        """slots [T]: the batch's. Of rows without one anything may come out."""
        x = plain(x, self.ops)
        own = self._by_kind(x)
        if own is None:
            logits = self._logits(x)
            own = self.mixture(self.read(x, logits), logits, slots, self._ids)
            own = own if self.latent_out is None else self.latent_out(own)
        return own if self.shared is None else self.ops.add(own, self._shared(self.shared, x), 0.5 if self.spec.averaged else 1.0)

    def onto(self, residual: torch.Tensor, x: Hidden, slots: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `Linear.onto`."""
        assert not self.spec.averaged, "no model adds halves there"
        x = plain(x, self.ops)
        shared = None
        if self.shared is not None:
            shared = self.shared.onto(residual, x) if self.shared_gate is None else self._shared(self.shared, x)
        if (of_kinds := self._by_kind(x)) is not None:
            return of_kinds if shared is None else self.ops.add(of_kinds, shared)
        logits = self._logits(x)
        if self.latent_out is None:
            own = self.mixture.onto(residual, self.read(x, logits), logits, slots, self._ids)
        else:
            own = self.latent_out.onto(residual, self.mixture(self.read(x, logits), logits, slots, self._ids))
        if shared is None or own is None:
            return own if shared is None else shared
        return self.ops.add(own, shared)

    def beside(self, x: Hidden, residual: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        """Of a mixture that goes beside an MLP: the sum of both, normed each. x: what the MLP reads."""
        assert self.apart is not None
        assert self.shared is not None
        assert self.router is not None
        norms = self.apart
        found = norms.after_shared.alone(self.shared(x))
        logits = self.router.matmul(norms.router(None, residual), None, torch.float32)
        self.ops.scale(logits, residual.shape[1] ** -0.5)
        own = self.mixture(plain(norms.experts(None, residual), self.ops), logits, slots)
        return self.ops.add(found, norms.after_experts.alone(own))

    def share(self, handed: HandedOn) -> None:
        """handed: what routers keep, of all layers of a model."""
        if self.deep is not None:
            self.deep.handed = handed
        if self.early is not None:
            self.early = handed
        if self.handed is not None:
            self.handed = handed
        if self.seen is not None:
            self.kinds = handed

    def route(self, stream: torch.Tensor) -> None:
        """Of a mixture that is routed early: what its experts will be chosen by. stream [T, hidden]: as the layer finds it."""
        assert self.early is not None
        assert self.router is not None
        self.early.rows = self.router.matmul(stream, self.router_bias, torch.float32)

    def _by_kind(self, x: torch.Tensor) -> torch.Tensor | None:
        """What experts give, but for the shared one, of a step in which some tokens take those of `seen`; None of any other."""
        if self.seen is None or self.kinds.seen is None:
            return None
        made = torch.empty_like(x)
        for own, are_its in ((self, ~self.kinds.seen), (self.seen, self.kinds.seen)):
            rows = are_its.nonzero()[:, 0]
            if len(rows):
                read = x[rows]
                made[rows] = own.mixture(read, own._logits(read))
        return made

    def _shared(self, shared: MLP, x: torch.Tensor) -> torch.Tensor:
        if self.shared_gate is None:
            return shared(x)
        return self.ops.sigmoid_gate(shared(x), self.shared_gate.matmul(x, None, torch.float32))

    def read(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What experts read."""
        x = x if self.latent_in is None else self.latent_in(x)
        return self.ops.best_gate(x, logits) if self.spec.scales_input else x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.deep is not None:
            return self.deep(x)
        if self.early is not None:
            assert self.early.rows is not None, "it is routed before its mixer computes"
            return self.early.rows
        assert self.router is not None
        return self.router.matmul(x, self.router_bias, torch.float32)

    @property
    def _ids(self) -> torch.Tensor | None:
        """Whose rows of the table count, where there is one."""
        return None if self.handed is None else self.handed.ids

    @property
    def recordable(self) -> bool:
        """See `WeightStorage`: whether the experts can, together."""
        return self.mixture.can_be_recorded(self.expert_width, self.dtype)

    @property
    def expert_bytes(self) -> int:
        """Memory of the experts' matrices."""
        matrices = (linear for expert in self.experts for linear in (expert.gate_up, expert.down))
        own = sum(linear.weight.num_bytes for linear in matrices if linear is not None)
        return own + (0 if self.seen is None else self.seen.expert_bytes)

    def slots(self) -> Slots:
        slots: Slots = {} if self.deep is None else self.deep.slots()
        if (router := self.router) is not None:
            shape = self.spec.num_experts, router.width
            slots["router.weight"] = WeightSlot(shape, lambda rows, first: router.load_rows(first, rows))
        if self.router_bias is not None:
            slots["router.bias"] = table_slot(self.router_bias)
        if self.spec.selection_bias and self.scoring is not None and self.scoring.bias is not None:
            slots["router.selection_bias"] = table_slot(self.scoring.bias)
        if self.scoring is not None and (table := self.scoring.table) is not None:
            slots["router_table.weight"] = _experts_slot(table, self.spec.num_experts)
        if self.scoring is not None and self.scoring.expert_scale is not None:
            slots["router.expert_scale"] = table_slot(self.scoring.expert_scale)
        if self.apart is not None:
            slots |= self.apart.slots()
        if self.seen is not None:
            slots |= {f"seen.{name}": slot for name, slot in self.seen.slots().items()}
        if self.shared is not None:
            slots |= {f"shared.{name}": slot for name, slot in self.shared.slots().items()}
        if (gate := self.shared_gate) is not None:
            slots["shared.gate_row.weight"] = WeightSlot((1, gate.width), lambda rows, first: gate.load_rows(first, rows))
        for latent in (self.latent_in, self.latent_out):
            slots |= {} if latent is None else latent.slots()
        for e, expert in enumerate(self.experts):
            slots |= {f"experts.{e}.{name}": slot for name, slot in expert.slots().items()}
        return slots


def _experts_slot(table: torch.Tensor, num_experts: int) -> WeightSlot:
    """A slot for the numbers of each token's experts, in any order."""

    def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "whole numbers"
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < num_experts:
            raise CheckpointError(f"a table of {num_experts} experts names others", "the file is damaged, or of another model")
        table[first : first + len(rows)].copy_(rows.long().sort(-1).values)

    return WeightSlot(tuple(table.shape), load, counts=True)


class _Apart:
    """The norms of a mixture that goes beside an MLP."""

    def __init__(self, norm: NormSpec, width: int, kit: Kit) -> None:
        self.router, self.experts, self.after_shared, self.after_experts = (RMSNorm(norm, width, kit) for _ in range(4))

    def slots(self) -> Slots:
        norms = {
            "router.norm": self.router,
            "experts_norm": self.experts,
            "after_shared_norm": self.after_shared,
            "after_experts_norm": self.after_experts,
        }
        return {f"{name}.weight": norm.slots()["weight"] for name, norm in norms.items()}
