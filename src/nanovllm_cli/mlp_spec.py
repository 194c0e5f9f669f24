"""MLPs and mixtures of experts as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanovllm_cli.curve_spec import GATED, Activation, XieluSpec
from nanovllm_cli.router_spec import RouterSpec


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)). fused: gate and up are one tensor of the checkpoint, in this order. swiglu_oai, relu2_gated,
    relu_gated: see `kernels.reference.gated_activation`. relu2, lone_gelu, lone_gelu_tanh, lone_relu, lone_silu, xielu: without
    a gate, down(act(up(x))). down: without, act(up(x)) is what comes of it, as of an expert of values (`AttentionSpec.values`).
    curve: of xielu. cutoff: of gates only what is above their mean and so many times their deviation counts, see
    `kernels.reference.sparse_gate`; None: all. limit: act(gate) is that at the most, and up lies between it and its negative
    (Step 3.5), of silu alone; None: they are as they are. gate_held: the gate is that at the most, not what act makes of it
    (Maple). normed: what down reads is normed (BitNet). down_bias: that alone has a bias. factor: each column of gate and up is
    times a number of the checkpoint's times this (nGPT); None: they have none."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False
    curve: XieluSpec | None = None
    cutoff: float | None = None
    limit: float | None = None
    gate_held: bool = False
    normed: bool = False
    down_bias: bool = False
    factor: float | None = None
    down: bool = True

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def parts(self) -> dict[str, int]:
        """Rows of what reads its input, by name, as a checkpoint has it."""
        if self.fused:
            return {"gate_up": 2 * self.intermediate_size}
        return dict.fromkeys(("gate", "up") if self.gated else ("up",), self.intermediate_size)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width."""
        inner = (2 if self.gated else 1) * self.intermediate_size
        biases = inner * (self.bias + (self.factor is not None)) + hidden_size * (self.bias or self.down_bias)
        return hidden_size * (inner + self.down * self.intermediate_size) + biases

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with."""
        return self.num_weights(hidden_size)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture of experts: sum over a token's experts of weight * expert(x). Shazeer et al. 2017.

    The router gives each token a logit for each of num_experts, plus a learned one with router_bias. The experts_per_token with
    the largest logits take part, the lower number first among equals; their weights are the softmax of all logits, or with
    norm_topk of theirs alone. scoring, selection_bias, scale, expert_scale: see `mixture.Scoring`. groups, groups_taken: experts
    of so many groups alone are looked at; a group's rank is that of its best, with sigmoids of its two best together. shared: an
    expert that every token takes, which weighs 1, or with shared_gate a sigmoid of a number that a row of weights gives it.
    averaged: half of the sum of both is what comes out. router: logits are what an MLP makes, and none may be taken (ZAYA1).
    ranks_logits (Kolibri): experts are chosen by logits and their bias, and weigh by sigmoids all the same.
    nearness (Phi-3.5-MoE): weights are what `mixture.shares_among_near` makes of logits, and nothing else counts.
    routed_early (SmallThinker): logits are made of the residual stream as the layer finds it, before the norm of its mixer.
    scales_input (Llama 4): a token's one expert reads it times the sigmoid of its logit, and weighs 1.
    table_rows (DeepSeek-V4): a token's experts are those of its row in a table of so many, and the router weighs them alone.
    latent_size (Nemotron 3 Super): experts read and give so many numbers of a token, which one matrix makes of what the router
    reads, and another makes as many as before of their sum. None: they read what the router does.
    seen (ERNIE 4.5 VL): the mixture, without a shared expert, that tokens of the numbers seen_ids go through instead: those that
    stand for images, and what is around them. What a token is follows from its number, wherever it stands.
    apart (Gemma 4): the shared expert has the layer's MLP's place, the mixture goes beside it: experts and router each read the
    residual stream through a norm of their own, logits are divided by sqrt(hidden_size), and both results are normed.
    """

    num_experts: int
    experts_per_token: int
    expert: MLPSpec
    norm_topk: bool
    router_bias: bool = False
    scoring: Literal["softmax", "sigmoid", "root softplus"] = "softmax"
    selection_bias: bool = False
    scale: float = 1.0
    expert_scale: bool = False
    groups: int = 1
    groups_taken: int = 1
    shared: MLPSpec | None = None
    shared_gate: bool = False
    averaged: bool = False
    ranks_logits: bool = False
    nearness: float | None = None
    scales_input: bool = False
    routed_early: bool = False
    apart: bool = False
    latent_size: int | None = None
    table_rows: int = 0
    router: RouterSpec | None = None
    seen: MoESpec | None = None
    seen_ids: tuple[int, ...] = ()

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width."""
        beside = 0 if self.seen is None else self.seen._every(hidden_size)
        return self._every(hidden_size) + self.num_routed(hidden_size) + beside

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with: the router's, and of the experts that it takes."""
        return self._every(hidden_size) + self.experts_per_token * self.expert.num_weights(self.width(hidden_size))

    def width(self, hidden_size: int) -> int:
        """Of what an expert reads, and of what it gives."""
        return self.latent_size or hidden_size

    def num_routed(self, hidden_size: int) -> int:
        """Numbers in its experts, but for a shared one."""
        own = self.num_experts * self.expert.num_weights(self.width(hidden_size))
        return own + (0 if self.seen is None else self.seen.num_routed(hidden_size))

    def share_taken(self, hidden_size: int) -> float:
        """Of what its experts are, what those are that a token takes, of a text."""
        if self.seen is None:
            return self.experts_per_token / self.num_experts
        return self.experts_per_token * self.expert.num_weights(self.width(hidden_size)) / self.num_routed(hidden_size)

    def _every(self, hidden_size: int) -> int:
        """What all tokens take."""
        shared = 0 if self.shared is None else self.shared.num_weights(hidden_size)
        beside = hidden_size * (self.shared_gate + 2 * (self.latent_size or 0))
        own = self.num_experts * (hidden_size + self.router_bias + self.selection_bias + self.expert_scale)
        own += self.table_rows * self.experts_per_token
        return shared + beside + (own if self.router is None else self.router.num_weights(hidden_size, self.num_experts))
