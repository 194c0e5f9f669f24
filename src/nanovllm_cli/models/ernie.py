"""ERNIE 4.5: Llama with its rotary pairs side by side; with experts, shared ones, and a bias by which they are chosen alone. What
sees has experts of its own for images (`MoESpec.seen`), with numbers behind those for texts, and routers turned over
(`weights/stacked.py`). What it sees by: `towers_ernie.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys, layers_without_experts
from nanovllm_cli.models.families import section_keys
from nanovllm_cli.models.family import ANOTHER, IDS_OF_IMAGES, Family, GGUFField, has_all, no_file
from nanovllm_cli.models.names import MATRICES, MLP_BIASES, SHARED_NAMES
from nanovllm_cli.models.rotary import rope_section, with_sections
from nanovllm_cli.rope_spec import RopeSpec


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


_FIRST, _LAST = "moe_layer_start_index", "moe_layer_end_index"
_OF_BOTH = "moe_num_experts", "moe_intermediate_size", _FIRST, _LAST
"""Of experts for texts, and of those for images, in a list."""
_SIZES = 1536, 512
_OF_IMAGES, _PUBLISHED_ID = "of_images.", "im_patch_id"


def _of_texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same of texts alone, and what is of images apart. A last layer with experts behind the last layer is that; layers that
    have experts for one kind alone are not believed in."""
    said = {"moe_intermediate_size": [*_SIZES], "moe_layer_start_index": 1, **config}
    lists = {key: said[key] for key in _OF_BOTH if isinstance(said.get(key), list) and said[key]}
    found = {**said, **{key: each[0] for key, each in lists.items()}}
    found |= {f"{_OF_IMAGES}{key}": each[1] for key, each in lists.items() if len(each) > 1 and each[1] != -1}
    end, layers = found.get("moe_layer_end_index"), found.get("num_hidden_layers")
    if type(end) is type(layers) is int and end >= layers:
        found["moe_layer_end_index"] = None
    if found.get("mlp_layer_types") is not None:
        found |= {"mlp_only_layers": layers_without_experts(found, 1), **dict.fromkeys((_FIRST, f"{_OF_IMAGES}{_FIRST}"), 0)}
    return found


_IDS = dict(zip(IDS_OF_IMAGES, (100295, 101304, 101305, 103367, 101306, 101307), strict=True))
"""Where a config does not say."""
_SECTIONS = [22, 22, 20]


def _that_sees(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """With experts for images; frequencies turn by lines and columns in turns, and the lowest by time."""
    spec = _with_experts_from_hf(spec, read)

    def turned(rope: RopeSpec) -> RopeSpec:
        if not rope.sections:
            told = rope_section(read).values.get("mrope_section") or read.values.get("freq_allocation")
            rows = (rope.dim // 2 - told) // 2 if type(told) is int else None
            rope = with_sections(rope, _SECTIONS if rows is None else [rows, rows, told], read)
        if rope.sections and (len(rope.sections) != 3 or rope.sections[0] != rope.sections[1]):
            told = f"{read.where}: rotary positions in sections of {[*rope.sections]}"
            raise UnsupportedError(told, "known: as many of lines as of columns, and of time")
        return replace(rope, dealt=True)

    known = _IDS | {"image_token_id": read.integer(_PUBLISHED_ID, _IDS["image_token_id"], least=0)}
    ids = {read.integer(key, usual, least=0) for key, usual in known.items()}
    if read.values.get(f"{_OF_IMAGES}{_FIRST}", first := read.values.get(_FIRST)) != first or not (
        read.integer(f"{_OF_IMAGES}{_LAST}", spec.num_layers) >= spec.num_layers - 1
    ):
        told = f"{read.where}: layers with experts for texts alone, or for images alone"
        raise UnsupportedError(told, "known: for both, or for none")

    def seeing(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        if not isinstance(mlp, MoESpec):
            return mlp
        count, size = (read.integer(f"{_OF_IMAGES}{key}", usual) for key, usual in (
            ("moe_num_experts", mlp.num_experts), ("moe_intermediate_size", _SIZES[1])))  # fmt: skip
        if count != mlp.num_experts:
            raise UnsupportedError(f"{read.where}: {count} experts for images", f"known: as many as for texts, {mlp.num_experts}")
        seen = replace(mlp, expert=replace(mlp.expert, intermediate_size=size), shared=None)
        return replace(mlp, seen=seen, seen_ids=tuple(sorted(ids)))

    return spec.each_rope(turned).each_mlp(seeing)


_EXPERTS = "blocks.{i}.seen."
ERNIE_VL_NAMES = (
    "Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration", "Ernie4_5_VLMoEForCausalLM",
)  # fmt: skip
ERNIE4_5_VL = replace(
    ERNIE4_5_MOE,
    config=_of_texts,
    aside=("model.vision_model.", "model.resampler_model.", "vision_model."),
    defaults={key: value for key, value in ERNIE4_5_MOE.defaults.items() if key not in _OF_BOTH[1:3]} | {
        "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    },
    hf=_that_sees,
    hf_names={
        **ERNIE4_5_MOE.hf_names,
        f"{_EXPERTS}router.weight": "model.layers.{i}.mlp.gate.weight_1",
        f"{_EXPERTS}router.selection_bias": "model.layers.{i}.mlp.moe_statics.e_score_correction_bias.1",
        **{f"{_EXPERTS}experts.{{e}}.{part}.weight": f"model.layers.{{i}}.mlp.vision.experts.{{e}}.{part}_proj.weight"
           for part in MATRICES},
    },
    gguf_like=no_file("ERNIE 4.5 VL"),
)  # fmt: skip
