"""What configs say of mixtures of experts: which layers have one, how many experts of what size, how the router weighs them.

Not covered: models with experts that every token takes (Qwen2-MoE, DeepSeek), or whose router is not a softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import MLPSpec, MoESpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader

MAX_EXPERTS = 1024
MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How one family's config.json calls things. count: the first of these that is there. size: of an expert. norm_topk: a
    flag's key, or what it always is."""

    count: tuple[str, ...]
    size: str
    norm_topk: str | bool


QWEN_KEYS = ExpertKeys(("num_experts", "num_local_experts"), "moe_intermediate_size", "norm_topk_prob")
MIXTRAL_KEYS = ExpertKeys(("num_local_experts",), "intermediate_size", True)

QWEN_NAMES = {
    "blocks.{i}.router.weight": "model.layers.{i}.mlp.gate.weight",
    **{
        f"blocks.{{i}}.experts.{{e}}.{part}.weight": f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight"
        for part in MATRICES
    },
}
MIXTRAL_NAMES = {
    "blocks.{i}.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
    **{
        f"blocks.{{i}}.experts.{{e}}.{part}.weight": f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}.weight"
        for part, theirs in zip(MATRICES, ("w1", "w3", "w2"), strict=True)
    },
}
GGUF_EXPERT_NAMES = {
    **{f"blocks.{{i}}.router.{kind}": f"blk.{{i}}.ffn_gate_inp.{kind}" for kind in ("weight", "bias")},
    **{
        f"blocks.{{i}}.experts.{{e}}.{part}.{kind}": f"blk.{{i}}.ffn_{part}_exps.{{e}}.{kind}"
        for part in MATRICES
        for kind in ("weight", "bias")
    },
}
"""A file has the experts of a layer in one tensor; weights/stacked.py takes it apart."""


def mlps_from_hf(read: ConfigReader, keys: ExpertKeys | None, dense: MLPSpec, layers: int) -> list[MLPSpec | MoESpec]:
    """Of each layer. dense: of those that have no experts."""
    if keys is None:
        return [dense] * layers
    count = read.integer(next(filter(read.has, keys.count), keys.count[0]))
    norm = keys.norm_topk if isinstance(keys.norm_topk, bool) else read.flag(keys.norm_topk, False)
    chosen = read.integer("num_experts_per_tok")
    mixture = _mixture(read, count, chosen, replace(dense, intermediate_size=read.integer(keys.size)), norm)
    step, excepted = read.integer("decoder_sparse_step", 1), read.values.get("mlp_only_layers") or []
    if not isinstance(excepted, list) or not all(type(layer) is int for layer in excepted):
        raise CheckpointError(f"{read.where}: 'mlp_only_layers' must be a list of layers", BROKEN)
    return [mixture if (i + 1) % step == 0 and i not in excepted else dense for i in range(layers)]


def mlps_from_gguf(
    read: ConfigReader, key: Callable[[str], str], dense: MLPSpec, layers: int, names: set[str]
) -> list[MLPSpec | MoESpec]:
    """The same of GGUF metadata. llama.cpp makes the weights of a token's experts 1 together in all architectures that are read
    here. names: the file's tensors, which tell what layers have a router."""
    count = read.integer(key("expert_count"), 0, least=0)
    if count == 0:
        return [dense] * layers
    if (scale := read.number(key("expert_weights_scale"), 0.0, positive=False)) not in (0.0, 1.0):
        raise UnsupportedError(f"{read.where}: weights of experts times {scale:g}", "known: 1")
    if read.integer(key("expert_gating_func"), 0, least=0) not in (0, 1, 3):  # softmax, of all logits or of the chosen ones
        raise UnsupportedError(f"{read.where}: experts that are not weighed by a softmax", "known: softmax")
    size = read.integer(key("expert_feed_forward_length"), dense.intermediate_size)
    expert = replace(dense, intermediate_size=size, bias="blk.0.ffn_gate_exps.bias" in names)
    mixture = _mixture(read, count, read.integer(key("expert_used_count")), expert, norm_topk=True)
    mixture = replace(mixture, router_bias="blk.0.ffn_gate_inp.bias" in names)
    return [mixture if f"blk.{i}.ffn_gate_inp.weight" in names else dense for i in range(layers)]


def _mixture(read: ConfigReader, count: int, chosen: int, expert: MLPSpec, norm_topk: bool) -> MoESpec:
    if count > MAX_EXPERTS:
        raise CheckpointError(f"{read.where} asks for {count} experts; at most {MAX_EXPERTS} are believed", BROKEN)
    if chosen > count:
        raise CheckpointError(f"{read.where}: a token can't take {chosen} of {count} experts", BROKEN)
    return MoESpec(count, chosen, expert, norm_topk)
