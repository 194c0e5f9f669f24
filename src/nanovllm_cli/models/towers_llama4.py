"""How Llama 4 sees (Scout, Maverick): its configs -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`.

Squares of one size, whose patches have learned and rotary positions; an image is cut into tiles, in its own shape, and all of it
is behind these. Colours are computed with in float32, where transformers' image processor rounds them to bfloat16.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MOST_TILES,
    check_divides,
    check_only,
    check_squares,
    colours_of,
    depth_of,
    heads_of,
    resample_of,
    side_of,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

MOST_PATCHES = 16
"""Tiles of an image, of settings that say nothing."""
_TOKENS = ImageTokens(
    "<|image|>", "<|patch|>", before="<|image_start|>", after="<|image_end|>", between="<|tile_x_separator|>",
    pieces_end="<|tile_y_separator|>", whole="<|image|>", alone="<|image|>",
)  # fmt: skip


def llama4(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "llama4_vision_model")
    check_only(vision, hidden_act="gelu", norm_eps=1e-5, vision_feature_select_strategy="default",
               multi_modal_projector_bias=False)  # fmt: skip
    side, patch = side_of(vision, "image_size", 448), side_of(vision, "patch_size", 14)
    hidden, merge = vision.integer("hidden_size", 768), _merge(vision)
    check_divides(vision, side, patch * merge, f"tokens of {merge} x {merge} patches of {patch}")
    inner, between = vision.integer("intermediate_size", 5632), vision.integer("projector_output_dim", 4096)
    widths = {"intermediate_size": (inner, hidden * merge**2),
              "projector_input_dim": (vision.integer("projector_input_dim", 4096), between),
              "vision_output_dim": (vision.integer("vision_output_dim", 7680), between)}  # fmt: skip
    for key, (said, known) in widths.items():
        if said != known:
            raise CheckpointError(f"{vision.where}: {key!r} is {said}, where {known} numbers are read", BROKEN)
    tower = TowerSpec(
        patch_size=patch,
        merge=merge,
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 34),
        num_heads=heads_of(vision, "num_attention_heads", hidden, parts=4),
        intermediate_size=inner,
        out_size=text_width(config),
        activation="gelu",
        norm="layer",
        eps=1e-5,
        projector="shuffled",
        projector_eps=0.0,
        projector_size=between,
        positions=(side // patch) ** 2,
        lead=True,
        theta=theta_of(vision),
        stored="axes",
        pre_norm=True,
        norm_placed=True,
        post_norm=True,
    )
    return VisionSpec(tower, _rule(tower, images, side), _TOKENS, *colours_of(images, HALVES))


def _merge(vision: ConfigReader) -> int:
    """Of a share of a side's patches, which are joined."""
    share = vision.number("pixel_shuffle_ratio", 0.5)
    merge = round(1 / share) if 1 / 16 <= share <= 1 else 0
    if merge * share != 1:
        raise CheckpointError(f"{vision.where}: 'pixel_shuffle_ratio' must be one whole number's part, not {share}", BROKEN)
    return merge


def _rule(tower: TowerSpec, images: ConfigReader, side: int) -> SizeRule:
    check_squares(images, side)
    if images.flag("resize_to_max_canvas", False):
        raise UnsupportedError(f"{images.where}: images as large as may be (resize_to_max_canvas) are not supported", ANOTHER)
    most, resample = images.integer("max_patches", MOST_PATCHES), resample_of(images, 2)
    if most > MOST_TILES or most * side**2 > MAX_PIXELS:
        raise CheckpointError(f"{images.where}: {most} pieces of {side} x {side} pixels are not believed", BROKEN)
    return SizeRule("canvas", tower.cell, resample=resample, tile=side, least_tiles=1, most_tiles=most, nearest="size", kept=True)


_LAYER = "vision_model.model.layers.{i}"
LLAMA4_NAMES = weights_and_biases({
    "patch": "vision_model.patch_embedding.linear",
    "pre_norm": "vision_model.layernorm_pre",
    "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.{i}.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": f"{_LAYER}.self_attn.o_proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.{i}.up": f"{_LAYER}.mlp.fc1",
    "layers.{i}.down": f"{_LAYER}.mlp.fc2",
    "post_norm": "vision_model.layernorm_post",
    "projector.up": "vision_model.vision_adapter.mlp.fc1",
    "projector.down": "vision_model.vision_adapter.mlp.fc2",
    "projector.out": "multi_modal_projector.linear_1",
}) | {
    "lead.weight": ("vision_model.class_embedding",),
    "positions.weight": ("vision_model.positional_embedding_vlm",),
}  # fmt: skip
