"""Qwen3-Next, Qwen3.5 and 3.6: the gated delta rule in three of four layers, attention with gates in the others; with experts, a
shared one that each token weighs, as Qwen2-MoE has it. Of those that see, the part that reads and writes text: its positions are
those of any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.families import QWEN2
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_none
from nanovllm_cli.models.names import QWEN_NAMES, projections
from nanovllm_cli.models.rotary import woven
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.state_spec import DeltaSpec

LINEAR, ATTENTION = "linear_attention", "full_attention"
MAX_TAPS = 64
FULL_EVERY = 4
SECTIONS = (11, 11, 10)
"""Of Qwen3.5's rotary positions; see `RopeSpec`."""

_DELTA = "model.layers.{i}.linear_attn"
DELTA_NAMES = {
    **{f"blocks.{{i}}.delta_{part}.weight": f"{_DELTA}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")},
    "blocks.{i}.delta_out.weight": f"{_DELTA}.out_proj.weight",
    "blocks.{i}.delta.taps": f"{_DELTA}.conv1d.weight",
    "blocks.{i}.delta.decay": f"{_DELTA}.A_log",
    "blocks.{i}.delta.decay_bias": f"{_DELTA}.dt_bias",
    "blocks.{i}.delta.norm.weight": f"{_DELTA}.norm.weight",
}
"""The taps of a channel are a matrix of one row there; weights/stacked.py makes a row of it."""
SHARED_NAMES = {
    "blocks.{i}.shared.gate_row.weight": "model.layers.{i}.mlp.shared_expert_gate.weight",
    **projections("blocks.{i}.shared.", "model.layers.{i}.mlp.shared_expert."),
}  # fmt: skip
_MOE_NAMES = DELTA_NAMES | QWEN_NAMES | SHARED_NAMES
WEIGHED = ExpertKeys(
    ("num_experts",), "moe_intermediate_size", "norm_topk_prob", shared_size="shared_expert_intermediate_size"
)
"""With a shared expert that each token weighs."""
_GGUF_NAMES = {
    "blocks.{i}.mlp_norm.weight": "blk.{i}.post_attention_norm.weight",
    "blocks.{i}.delta_qkv.weight": "blk.{i}.attn_qkv.weight",
    "blocks.{i}.delta_z.weight": "blk.{i}.attn_gate.weight",
    "blocks.{i}.delta_b.weight": "blk.{i}.ssm_beta.weight",
    "blocks.{i}.delta_a.weight": "blk.{i}.ssm_alpha.weight",
    "blocks.{i}.delta_out.weight": "blk.{i}.ssm_out.weight",
    "blocks.{i}.delta.taps": "blk.{i}.ssm_conv1d.weight",
    "blocks.{i}.delta.decay": "blk.{i}.ssm_a",
    "blocks.{i}.delta.decay_bias": "blk.{i}.ssm_dt.bias",
    "blocks.{i}.delta.norm.weight": "blk.{i}.ssm_norm.weight",
    "blocks.{i}.shared.gate_row.weight": "blk.{i}.ffn_gate_inp_shexp.weight",
}


_MTP_NAMES = {
    "embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "join.weight": "mtp.fc.weight",
    "norm.weight": "mtp.norm.weight",
}


def with_delta(spec: ModelSpec, delta: DeltaSpec, is_linear: list[bool], where: str) -> ModelSpec:
    """The same with the delta rule in these layers. CheckpointError for one that is not believed."""
    if delta.num_values % delta.num_keys:
        raise CheckpointError(f"{where}: {delta.num_values} value heads can't share {delta.num_keys} key heads evenly", BROKEN)
    if delta.width > MAX_TAPS:
        raise CheckpointError(f"{where}: convolutions over {delta.width} tokens; at most {MAX_TAPS} are believed", BROKEN)
    if all(is_linear):
        raise CheckpointError(f"{where}: no layer has attention", BROKEN)
    return spec.with_mixers(delta if own else mixer for mixer, own in zip(spec.mixers, is_linear, strict=True))


def hybrid(spec: ModelSpec, delta: DeltaSpec, is_linear: list[bool], gated: bool, stored_offset: float, where: str) -> ModelSpec:
    spec = with_delta(spec, delta, is_linear, where).with_attention(gated=gated, qk_norm=True, fused_qkv=False)
    return replace(spec, norm=NormSpec(spec.norm.eps, offset=1.0, stored_offset=stored_offset))


def kinds_of_layers(read: ConfigReader, layers: int, usual: Callable[[int], str], *others: str) -> list[str]:
    """LINEAR, ATTENTION or one of `others`, of each layer; `usual`: of the i-th where the config doesn't list them."""
    kinds = read.kinds("layer_types", layers, LINEAR, ATTENTION, *others)
    return [usual(i) for i in range(layers)] if kinds is None else kinds


def check_activation(read: ConfigReader) -> None:
    if read.text("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError("the delta rule behind another activation than silu is not supported", ANOTHER)


def delta_from_hf(read: ConfigReader) -> DeltaSpec:
    keys, values = ((read.integer(f"linear_num_{of}_heads"), read.integer(f"linear_{of}_head_dim")) for of in ("key", "value"))
    return DeltaSpec(*keys, *values, read.integer("linear_conv_kernel_dim"))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    def usual(i: int) -> str:
        return LINEAR if (i + 1) % read.integer("full_attention_interval", FULL_EVERY) else ATTENTION

    kinds = kinds_of_layers(read, spec.num_layers, usual)
    if read.flag("attention_bias", False):
        raise UnsupportedError("gated attention with biases is not supported", ANOTHER)
    check_activation(read)
    gated = read.flag("attn_output_gate", True)
    return hybrid(spec, delta_from_hf(read), [kind == LINEAR for kind in kinds], gated, 0.0, read.where)


def _from_hf_35(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return woven(_from_hf(spec, read), SECTIONS)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str], tiled: bool = True) -> ModelSpec:
    """llama.cpp's converter deals value heads out to key heads in turn, but for Qwen3-Next, and has decays and gains as they are
    multiplied."""
    listed = read.values.get(key("attention.recurrent_layers"))
    if isinstance(listed, list | tuple):
        if len(listed) < spec.num_layers or not all(isinstance(each, bool) for each in listed):
            raise CheckpointError(f"{read.where}: the recurrent layers must be a list of {spec.num_layers} flags", BROKEN)
        is_linear = list(listed[: spec.num_layers])
    else:
        every = read.integer(key("full_attention_interval"), FULL_EVERY)
        is_linear = [(i + 1) % every != 0 for i in range(spec.num_layers)]
    num_values, inner = read.integer(key("ssm.time_step_rank")), read.integer(key("ssm.inner_size"))
    if inner % num_values:
        raise CheckpointError(f"{read.where}: {num_values} value heads have no even share of {inner}", BROKEN)
    delta = DeltaSpec(
        read.integer(key("ssm.group_count")), read.integer(key("ssm.state_size")), num_values, inner // num_values,
        read.integer(key("ssm.conv_kernel")), tiled=tiled, log_decay=False,
    )  # fmt: skip
    return hybrid(spec, delta, is_linear, True, 1.0, read.where)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """Earlier versions of llama.cpp have each so many-th layer with attention, and read no list."""
    is_linear = [isinstance(mixer, DeltaSpec) for mixer in spec.mixers]
    has_none(f"a {spec.architecture} model", attention_in_all_layers=not any(is_linear))
    delta = next(mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec))
    keys: dict[str, GGUFField] = {
        "ssm.conv_kernel": delta.width, "ssm.state_size": delta.key_dim, "ssm.group_count": delta.num_keys,
        "ssm.time_step_rank": delta.num_values, "ssm.inner_size": delta.values, "attention.recurrent_layers": is_linear,
    }  # fmt: skip
    every = is_linear.index(False) + 1
    if is_linear == [(i + 1) % every != 0 for i in range(spec.num_layers)]:
        keys["full_attention_interval"] = every
    return keys


def _keys_of_35(spec: ModelSpec) -> dict[str, GGUFField]:
    """llama.cpp wants to know how images' positions divide a head, of those that see none too."""
    rope = spec.attention.rope
    sections = rope.sections if rope is not None and rope.sections else SECTIONS
    return {**_keys(spec), "rope.dimension_sections": [*sections, 0]}


_DEFAULTS = {"partial_rotary_factor": 0.25, "max_position_embeddings": 32768, "head_dim": 256, "linear_num_key_heads": 16,
             "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
             "num_attention_heads": 16, "vocab_size": 248320}  # fmt: skip
QWEN3_5 = Family(
    "qwen3_5",
    qk_norm=True,
    qkv_bias=False,
    defaults=_DEFAULTS | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4},
    hf_names=DELTA_NAMES,
    gguf_names=_GGUF_NAMES,
    hf=_from_hf_35,
    gguf=_from_gguf,
    gguf_name="qwen35",
    gguf_keys=_keys_of_35,
    gguf_heads_dealt=True,
    mtp_names=_MTP_NAMES,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    gguf_name="qwen35moe",
    experts=replace(WEIGHED, norm_topk=True),
    defaults=_DEFAULTS | {"hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40, "num_key_value_heads": 2,
                          "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                          "shared_expert_intermediate_size": 512},
    hf_names=_MOE_NAMES,
)  # fmt: skip
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="qwen3_next",
    gguf_name="qwen3next",
    experts=WEIGHED,
    defaults=_DEFAULTS | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "num_key_value_heads": 2,
                          "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "vocab_size": 151936,
                          "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    hf=_from_hf,
    gguf=lambda spec, read, key: _from_gguf(spec, read, key, tiled=False),
    gguf_keys=_keys,
    gguf_heads_dealt=False,
)  # fmt: skip
"""Its projections lie otherwise; weights/stacked.py takes them apart."""
QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    gguf_name="qwen2moe",
    experts=WEIGHED,
    defaults={**QWEN2.defaults, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
              "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    hf_names=QWEN_NAMES | SHARED_NAMES,
    gguf_names={"blocks.{i}.shared.gate_row.weight": _GGUF_NAMES["blocks.{i}.shared.gate_row.weight"]},
    gguf=lambda spec, read, key: spec.with_mlps(MoESpec, norm_topk=False),
)  # fmt: skip
