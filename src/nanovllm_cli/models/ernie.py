"""ERNIE 4.5: Llama with its rotary pairs side by side; with experts, shared ones, and a bias by which they are chosen alone. What
sees has experts for images beside those for texts, which are left aside, and routers turned over (`weights/stacked.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys, layers_without_experts
from nanovllm_cli.models.families import section_keys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all
from nanovllm_cli.models.names import MLP_BIASES, SHARED_NAMES


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """ "use_bias" is of all projections."""
    bias = read.flag("use_bias", False)
    return spec.with_mlps(bias=bias).with_attention(qkv_bias=bias, out_bias=bias)


_NORM_MIN = 1e-12  # so little that it is nothing


def _with_experts_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.values.get("moe_layer_end_index") not in (None, -1, spec.num_layers - 1):
        raise UnsupportedError("an ERNIE whose last layers have no experts is not supported", ANOTHER)
    if read.flag("use_bias", False):
        raise UnsupportedError("an ERNIE with biases of experts is not supported", ANOTHER)
    if (least := read.number("moe_norm_min", _NORM_MIN, positive=False)) > _NORM_MIN:
        raise UnsupportedError(f"an ERNIE whose weights of experts are divided by {least:g} at least", f"known: {_NORM_MIN:g}")
    return spec


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """llama.cpp asks for experts in all layers from the first one that has some, whatever a file says."""
    has_experts = [isinstance(block.mlp, MoESpec) for block in spec.blocks]
    if not any(has_experts):
        return {}
    has_all(spec.architecture, experts_in_all_layers_behind_the_first_with_some=all(has_experts[has_experts.index(True) :]))
    return {"interleave_moe_layer_step": 1}


_DEFAULTS = {"rope_theta": 5e5, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
ERNIE4_5 = Family(
    "ernie4_5",
    interleaved=True,
    interleaved_gguf=True,
    tied_by_default=True,
    defaults=_DEFAULTS | {"head_dim": 128, "num_key_value_heads": 2},
    hf=_from_hf,
    gguf_homeless=MLP_BIASES,
)
PADDLEOCR = replace(
    ERNIE4_5, name="paddleocr", interleaved=False, interleaved_gguf=False, gguf_keys=section_keys,
    defaults={**ERNIE4_5.defaults, "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
              "num_attention_heads": 16},
)  # fmt: skip
"""That sees, whose pairs are halves."""
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    gguf_name="ernie4_5-moe",
    experts=ExpertKeys(
        ("moe_num_experts",), "moe_intermediate_size", norm_topk=True, taken="moe_k", first="moe_layer_start_index",
        step="moe_layer_interval", shared="moe_num_shared_experts", length_in_gguf=True, selection_bias=True,
    ),
    defaults=_DEFAULTS | {"num_key_value_heads": 4, "moe_layer_start_index": 1, "moe_num_shared_experts": 2, "moe_k": 6,
                          "moe_num_experts": 64, "moe_intermediate_size": 1536},
    hf_names=SHARED_NAMES
    | {"blocks.{i}.router.selection_bias": "model.layers.{i}.mlp.moe_statics.e_score_correction_bias.0"},
    hf=_with_experts_from_hf,
    gguf_keys=_keys,
)  # fmt: skip


_OF_BOTH = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")
"""Of experts for texts, and of those for images, in a list."""


def _of_texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same of texts alone. A last layer with experts behind the last layer is that."""
    said = {"moe_intermediate_size": 1536, "moe_layer_start_index": 1, **config}
    found = {**said, **{key: said[key][0] for key in _OF_BOTH if isinstance(said.get(key), list) and said[key]}}
    end, layers = found.get("moe_layer_end_index"), found.get("num_hidden_layers")
    if type(end) is type(layers) is int and end >= layers:
        found["moe_layer_end_index"] = None
    if found.get("mlp_layer_types") is not None:
        found |= {"mlp_only_layers": layers_without_experts(found, 1), "moe_layer_start_index": 0}
    return found


def _that_sees(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _with_experts_from_hf(spec, read).each_rope(lambda rope: replace(rope, sections=()))


ERNIE4_5_VL = replace(
    ERNIE4_5_MOE,
    config=_of_texts,
    aside=("model.vision_model.", "model.resampler_model.", "vision_model."),
    defaults={key: value for key, value in ERNIE4_5_MOE.defaults.items() if key not in _OF_BOTH[1:3]} | {
        "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    },
    hf=_that_sees,
)  # fmt: skip
