"""OLMo Hybrid: the gated delta rule in three of four layers, which norm what they read, and OLMo 3's attention without windows in
the others, which norm what they add. Published ones have no positions. q, k and v of the delta rule have projections and taps of
their own, and betas go up to 2, so that states may turn what they have over (Grazzi et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import Family, no_file
from nanovllm_cli.models.names import POST_HF_NAMES, projections
from nanovllm_cli.models.qwen_next import ATTENTION, LINEAR, check_activation, kinds_of_layers, with_delta
from nanovllm_cli.models.rotary import rope_section
from nanovllm_cli.state_spec import DeltaSpec

EPS = 1e-5
"""Of the norm behind the delta rule, whatever a config has for the others."""
_DELTA = "model.layers.{i}.linear_attn"


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    layers = spec.num_layers

    def usual(i: int) -> str:
        return ATTENTION if i % 4 == 3 or (layers < 4 and i == layers - 1) else LINEAR

    is_linear = [kind == LINEAR for kind in kinds_of_layers(read, layers, usual)]
    if not any(is_linear):
        raise CheckpointError(f"{read.where}: all layers have attention", BROKEN)
    check_activation(read)
    heads = spec.attention.num_heads
    keys, values = (read.integer(f"linear_num_{of}_heads", heads) for of in ("key", "value"))
    key_dim = read.integer("linear_key_head_dim", max(1, 3 * spec.hidden_size // (4 * keys)))
    delta = DeltaSpec(
        keys, key_dim, values, read.integer("linear_value_head_dim", 2 * key_dim), read.integer("linear_conv_kernel_dim", 4),
        apart=True, most=2.0 if read.flag("linear_allow_neg_eigval", True) else 1.0, eps=EPS,
    )  # fmt: skip
    spec = with_delta(spec if _rotates(read) else spec.with_attention(rope=None), delta, is_linear, read.where)
    blocks = (block if own else replace(block, order="post") for block, own in zip(spec.blocks, is_linear, strict=True))
    return replace(spec, blocks=tuple(blocks))


def _rotates(read: ConfigReader) -> bool:
    """A rotary base of null says that there are no positions; none at all, that it is the usual one."""
    said = [values["rope_theta"] for values in (rope_section(read).values, read.values) if "rope_theta" in values]
    return not said or said[0] is not None


OLMO_HYBRID = Family(
    "olmo_hybrid",
    attention={"qk_norm_of": "all heads"},
    qk_norm=True,
    defaults={"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 30, "max_position_embeddings": 65536},
    hf_names=POST_HF_NAMES | {
        "blocks.{i}.attention_norm.weight": "model.layers.{i}.attention_layer_norm.weight",
        "blocks.{i}.mlp_norm.weight": "model.layers.{i}.feedforward_layer_norm.weight",
        **projections("blocks.{i}.delta_", f"{_DELTA}.", "qkvba"),
        **{f"blocks.{{i}}.delta.{part}_taps": f"{_DELTA}.{part}_conv1d.weight" for part in "qkv"},
        "blocks.{i}.delta_z.weight": f"{_DELTA}.g_proj.weight",
        "blocks.{i}.delta_out.weight": f"{_DELTA}.o_proj.weight",
        "blocks.{i}.delta.decay": f"{_DELTA}.A_log",
        "blocks.{i}.delta.decay_bias": f"{_DELTA}.dt_bias",
        "blocks.{i}.delta.norm.weight": f"{_DELTA}.o_norm.weight",
    },
    hf=_from_hf,
    gguf_like=no_file("OLMo Hybrid"),
)  # fmt: skip
