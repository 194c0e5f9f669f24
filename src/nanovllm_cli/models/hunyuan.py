"""Hunyuan (V1): Llama, with norms of heads of q and k behind their rotation. Its "dynamic" scaling is another base, the same
whatever the length (alpha: NTK-aware scaling, bloc97 2023). A13B has experts in all layers, and one more that every token takes.

HunYuan-VL's is the dense one, whose frequencies are divided among four positions of an image's tokens (XD-RoPE): both halves of a
pair turn by the same, as in the publisher's own code and llama.cpp. In transformers 5.24 they turn by two.

Hy3 (HY V3): norms of heads in front of their rotation, experts behind the first layer that are chosen by sigmoids and a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys, layers_without_experts
from nanovllm_cli.models.families import section_keys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all, usual_keys, weight_keys
from nanovllm_cli.models.names import MTP_HF_NAMES, OUT_BIAS, QWEN_NAMES, SHARED_NAMES, projections
from nanovllm_cli.models.rotary import checked_rope, normed_when_turned, rope_section
from nanovllm_cli.rope_spec import RopeSpec


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    section, max_position = rope_section(read), read.integer("max_position_embeddings", 2048)
    if not section.values.get("alpha"):
        return normed_when_turned(spec)
    alpha = section.number("alpha")

    def stretched(rope: RopeSpec) -> RopeSpec:
        if rope.scaling != "dynamic":
            return rope
        plain = RopeSpec(
            rope.dim, _stretched(rope, alpha), attention_factor=rope.attention_factor, original_len=max_position,
            sections=rope.sections,
        )  # fmt: skip
        return checked_rope(plain, spec.attention.head_dim, section)

    found = spec.each_rope(stretched)
    return normed_when_turned(found if found == spec else replace(found, max_position=max_position))


def _stretched(rope: RopeSpec, alpha: float) -> float:
    """Its base."""
    return float(rope.theta * alpha ** (rope.dim / (rope.dim - 2)))


def _of_four_positions(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with the names that transformers has for what the publisher's configs say."""
    found = dict(config)
    for key, own in (("attention_head_dim", "head_dim"), ("org_vocab_size", "vocab_size")):
        found[own] = config.get(own, config.get(key))
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(section := config.get(key), Mapping):
            found[key] = section = dict(section)
            for kind in ("rope_type", "type"):
                if section.get(kind) == "xdrope":
                    section[kind] = "dynamic"
            sections = section.pop("xdrope_section", None)
            if sections is not None and section.setdefault("mrope_section", sections) != sections:
                raise CheckpointError(f"config.json: two lists of sections in {key!r} contradict each other", BROKEN)
    return {key: value for key, value in found.items() if value is not None}


def _vl_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a HunYuan-VL", use_qk_norm=True, use_cla=False, use_mla=False)
    if read.integer("num_experts", 1, least=0) > 1:
        raise UnsupportedError(f"{read.where}: a HunYuan-VL with experts", ANOTHER)
    return _from_hf(spec, read)


def _vl_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """alpha is beside the base that it stretches, in files of llama.cpp's converter."""
    alpha, head_dim = read.number(key("rope.scaling.alpha"), 0.0, positive=False), spec.attention.head_dim
    if alpha > 0:
        spec = spec.each_rope(lambda rope: checked_rope(replace(rope, theta=_stretched(rope, alpha)), head_dim, read))
    return normed_when_turned(spec)


_OTHER_NAMES = {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}
_BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def _one_for_all(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What it lists of layers as one number for all; its experts are as large as "intermediate_size" says where nothing else is
    said."""
    found = {**usual_keys(config, _OTHER_NAMES), **config}
    for key in _BY_LAYER:
        value = found.get(key)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise UnsupportedError(f"config.json: a {key!r} that is another in some layers", ANOTHER)
            found[key] = value[0]
    if found.get("moe_intermediate_size") is None:
        found["moe_intermediate_size"] = config.get("intermediate_size")
    return found


def _with_experts_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """What published configs say beside what transformers reads has to be as it is in all of them."""
    check_usual(
        read, "a Hunyuan", use_qk_norm=True, use_mixed_mlp_moe=True, norm_topk_prob=True, use_cla=False, use_mla=False,
        group_limited_greedy=False, position_embedding_xdrope=False,
    )  # fmt: skip
    if read.integer("moe_layer_num_skipped", 0, least=0) or read.number("routed_scaling_factor", 1.0) != 1.0:
        raise UnsupportedError(f"{read.where}: a Hunyuan with layers without experts, or with weights of experts scaled", ANOTHER)
    return _from_hf(spec, read)


def _third(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the layers that have no experts by their numbers."""
    num_dense = ConfigReader(config, "config.json").integer("first_k_dense_replace", 1, least=0)
    return {**config, "mlp_only_layers": layers_without_experts(config, num_dense)}


def _third_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(
        read, "a Hy3", qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True
    )
    if not read.integer("num_shared_experts", least=0):
        raise UnsupportedError(f"{read.where}: a Hy3 without an expert that every token takes", ANOTHER)
    return spec


def _third_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, experts=spec.mixture is not None, output_without_a_bias=not spec.attention.out_bias)
    return weight_keys(spec)


HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense",
    gguf_name="hunyuan-dense",
    qk_norm=True,
    defaults={"rms_norm_eps": 1e-5},
    hf_names={f"blocks.{{i}}.{part[0]}_norm.weight": f"model.layers.{{i}}.self_attn.{part}_layernorm.weight"
              for part in ("query", "key")},
    hf=_from_hf,
    gguf=lambda spec, read, key: normed_when_turned(spec),
    gguf_homeless=(OUT_BIAS,),
)  # fmt: skip
HUNYUAN_VL = replace(
    HUNYUAN_DENSE,
    name="hunyuan_vl",
    gguf_name="hunyuan_vl",
    tied_by_default=True,
    config=_of_four_positions,
    hf=_vl_from_hf,
    gguf=_vl_from_gguf,
    gguf_keys=section_keys,
)
HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    name="hunyuan_v1_moe",
    gguf_name="hunyuan-moe",
    experts=ExpertKeys(("num_experts",), "moe_intermediate_size", True, taken="moe_topk", shared="num_shared_expert",
                       length_in_gguf=True),
    config=_one_for_all,
    defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1, "num_shared_expert": 1},
    hf_names={**QWEN_NAMES, **HUNYUAN_DENSE.hf_names}
    | {"blocks.{i}.router.weight": "model.layers.{i}.mlp.gate.wg.weight"}
    | projections("blocks.{i}.shared.", "model.layers.{i}.mlp.shared_mlp."),
    hf=_with_experts_from_hf,
)
_MLP = "model.layers.{i}.mlp"
HY_V3 = Family(
    "hy_v3",
    qk_norm=True,
    experts=ExpertKeys(
        ("num_experts", "num_local_experts"), "moe_intermediate_size", True, shared="num_shared_experts",
        scale="router_scaling_factor", length_in_gguf=True, scoring="sigmoid", selection_bias=True,
    ),
    config=_third,
    defaults={
        "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
        "max_position_embeddings": 131072, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1536, "router_scaling_factor": 2.826,
    },
    hf_names={
        **QWEN_NAMES,
        "blocks.{i}.router.weight": f"{_MLP}.router.gate.weight",
        "blocks.{i}.router.selection_bias": f"{_MLP}.expert_bias",
        **projections("blocks.{i}.shared.", f"{_MLP}.shared_mlp."),
    },
    gguf_names={"blocks.{i}.router.selection_bias": "blk.{i}.exp_probs_b"},
    peft_names={ours: theirs for ours, theirs in SHARED_NAMES.items() if ".shared." in ours},
    hf=_third_from_hf,
    gguf=lambda spec, read, key: spec.with_mlps(MoESpec, norm_topk=read.flag(key("expert_weights_norm"), False)),
    gguf_keys=_third_keys,
    mtp_names={**MTP_HF_NAMES, "norm.weight": "model.layers.{i}.final_layernorm.weight"},
)
