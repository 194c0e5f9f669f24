"""A state space with attention and an MLP ahead of it that several layers have in common (Zamba 2, Glorioso et al. 2024). See
`AheadSpec`."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import HeadNorms, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache, taken_apart
from nanovllm_cli.kernels.ops import Addend, Hidden, side_by_side
from nanovllm_cli.layers.delta import Mamba
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mixer_spec import AheadSpec, AttentionSpec, PairSpec
from nanovllm_cli.norm_spec import NormSpec


class Beside:
    """What a layer adds to a shared product: of each part up(down(x)). Rows lie as those of the parts do."""

    def __init__(self, parts: dict[str, int], width: int, rank: int, kit: Kit) -> None:
        self.ops, self.parts = kit.ops, parts
        self.down = [Linear(width, {f"{part}_down": rank}, kit) for part in parts]
        self.up = [Linear(rank, {f"{part}_up": rows}, kit) for part, rows in parts.items()]

    def __call__(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """product [T, rows] itself, with what comes beside it of x [T, width]."""
        found = [up(down(x)) for down, up in zip(self.down, self.up, strict=True)]
        if len(found) == 1:
            return self.ops.add(product, found[0])
        joined, first = self.ops.room(product.shape[0], product.shape[1], product.dtype), 0
        for rows in found:
            self.ops.put_columns(rows, joined, first)
            first += rows.shape[1]
        return self.ops.add(product, joined)

    def slots(self) -> Slots:
        return {name: slot for linear in (*self.down, *self.up) for name, slot in linear.slots().items()}


class Shared:
    """What several layers have in common, and what each of them has beside it, by its number among them. Where several
    processes compute the model, products are whole in each, and so is its attention."""

    def __init__(self, ahead: AheadSpec, attention: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        width, parts = attention.read_size, {"q": q, "k": kv, "v": kv}
        self.norm, self.mlp_norm = RMSNorm(norm, width, kit), RMSNorm(norm, hidden_size, kit)
        self.qkv, self.out = Linear(width, parts, kit), Linear(q, {"o": hidden_size}, kit)
        self.gate_up = Linear(hidden_size, inner := {"gate_up": 2 * ahead.inner}, kit)
        self.down = Linear(ahead.inner, {"down": hidden_size}, kit)
        places = {use: kit.at(f"uses.{use}") for use in ahead.uses}
        turned = places if ahead.beside_attention else {}
        self.beside_qkv = {use: Beside(parts, width, ahead.rank, own) for use, own in turned.items()}
        self.beside_mlp = {use: Beside(inner, hidden_size, ahead.rank, own) for use, own in places.items()}

    def slots(self) -> Slots:
        slots = {name: slot for linear in (self.qkv, self.out, self.gate_up, self.down) for name, slot in linear.slots().items()}
        for each in (self.beside_qkv, self.beside_mlp):
            slots |= {f"uses.{use}.{name}": slot for use, beside in each.items() for name, slot in beside.slots().items()}
        norms = {"ahead_norm": self.norm, "ahead_mlp_norm": self.mlp_norm}
        return slots | {f"{name}.weight": norm.slots()["weight"] for name, norm in norms.items()}


class AheadOfState(Mixer):
    """state(norm(x + out(mlp(attention(x and what the first layer read)))))."""

    def __init__(self, spec: PairSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        assert spec.ahead is not None
        self.spec, self.ahead = spec.attention, spec.ahead
        more = self.spec.qkv_bias, self.spec.out_bias, self.spec.qk_norm, self.spec.sinks, self.spec.gated
        assert not any(more), "no model has these there"
        self.ops, self.backend = kit.ops, kit.backend
        self.own = Shared(spec.ahead, spec.attention, norm, hidden_size, kit) if spec.ahead.uses else None
        self._shared = self.own
        self.out = Linear(hidden_size, {"ahead_out": hidden_size}, kit)
        self.state = Mamba(spec.state, norm, hidden_size, kit)

    def share(self, owners: dict[int, Shared]) -> None:
        """Finds who has what this layer shares, among those of layers before it, or is the one."""
        if self.own is not None:
            owners[self.ahead.of] = self.own
        self._shared = owners[self.ahead.of]

    def __call__(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        raise AssertionError("it reads the residual stream and brings the norm in: see `led`")

    def led(
        self, x: Addend | None, residual: torch.Tensor, norm: RMSNorm, inputs: StepInputs, cache: LayerCache
    ) -> torch.Tensor:
        """What joins the residual stream [T, hidden] behind x. norm: of what the state reads."""
        shared, use = self._shared, self.ahead.use
        assert shared is not None
        assert inputs.entered is not None
        if x is not None:
            self.ops.join(x, residual)
        keys, state = taken_apart(cache)
        rows = shared.norm.alone(side_by_side(residual, inputs.entered, self.ops))
        qkv = shared.qkv(rows)
        if (beside := shared.beside_qkv.get(use)) is not None:
            qkv = beside(qkv, rows)
        angles = inputs.angles[self.spec.rope]
        found = self.backend.attend(self.spec, qkv, HeadNorms(), angles, None, keys, inputs.step, inputs.distances)
        h = shared.mlp_norm.alone(shared.out(found))
        both = shared.beside_mlp[use](shared.gate_up(h), h)
        inner = self.ops.gated(both[:, : self.ahead.inner], both[:, self.ahead.inner :], self.ahead.activation)
        raised = self.ops.add(self.out(shared.down(inner)), residual)
        return self.state(norm(None, raised), inputs, state)

    def slots(self) -> Slots:
        return ({} if self.own is None else self.own.slots()) | self.out.slots() | self.state.slots()
