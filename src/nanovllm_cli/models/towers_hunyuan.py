"""How HunYuan-VL (HunyuanOCR) sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`.
Images of any shape; lines have rows at their ends, and an image one at either end, that the tower makes, too.

Positions are made of the table as the publisher's own code does it, and llama.cpp: for sides a tenth of a patch longer.
transformers, whose results are otherwise the same, leaves that out.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.tower_configs import (
    CLIP,
    activation_of,
    check_only,
    check_same,
    depth_of,
    heads_of,
    of_any_area,
    positions_of,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_IMAGE = "<\uff5chy_place\u2581holder\u2581no\u2581102\uff5c>"
_TOKENS = ImageTokens(_IMAGE, _IMAGE)  # the template writes what is around it


def hunyuan(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings, which name a way of resizing that no code has ever used."""
    vision = vision_section(config)
    hidden, heads_key = vision.integer("hidden_size", 1152), "num_attention_heads"
    heads = heads_of(vision, heads_key, hidden, parts=1)
    check_only(
        vision, interpolate_mode="bilinear", temporal_patch_size=1, head_dim=hidden // heads,
        num_key_value_heads=vision.values.get("num_key_value_heads") and heads,
    )  # fmt: skip
    patch, side = vision.integer("patch_size", 16), vision.integer("max_image_size", 2048)
    eps = vision.number("rms_norm_eps", 1e-5)
    tower = TowerSpec(
        patch_size=patch,
        merge=vision.integer("spatial_merge_size", 2),
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 27),
        num_heads=heads,
        intermediate_size=vision.integer("intermediate_size", 4304),
        out_size=text_width(config),
        activation=activation_of(vision, "gelu"),
        norm="layer",
        eps=eps,
        patch_bias=True,
        positions=positions_of(vision, side, patch),
        stretch="tenth",
        projector="lined",
        projector_eps=eps,
    )
    check_same(images, spatial_patch_size=1)
    images = ConfigReader({key: value for key, value in images.values.items() if key != "resample"}, images.where)
    return replace(of_any_area(config, images, tower, _TOKENS, CLIP, (1 << 18, 1 << 22)), has_grid=False)


_LAYER = "vit.layers.{i}"
HUNYUAN_NAMES = weights_and_biases({
    "patch": "vit.embeddings.patch_embedding",
    "positions": "vit.embeddings.position_embedding",
    "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.{i}.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": f"{_LAYER}.self_attn.o_proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.{i}.up": f"{_LAYER}.mlp.dense_h_to_4h",
    "layers.{i}.down": f"{_LAYER}.mlp.dense_4h_to_h",
    "projector.norm": "vit.perceive.before_rms",
    "projector.join": "vit.perceive.proj.0",
    "projector.first": "vit.perceive.proj.2",
    "projector.out": "vit.perceive.mlp",
    "projector.after_norm": "vit.perceive.after_rms",
}) | {
    "projector.line_end.weight": ("vit.perceive.image_newline",),
    "projector.begin.weight": ("vit.perceive.image_begin",),
    "projector.end.weight": ("vit.perceive.image_end",),
}  # fmt: skip
