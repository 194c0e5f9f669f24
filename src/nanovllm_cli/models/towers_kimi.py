"""How Kimis see (Kimi-VL, Kimi K2.5 and later), by MoonViT: their configs -> VisionSpec, and what their folders call a tower's
tensors. See `towers.py`. Images of any shape in one piece, filled up with black to whole tokens, whose positions are a text's.

Their configs are of two kinds: K2.5's own one says of its tower what it is of ("vt_hidden_size"). Rows of queries and keys are
pairs of columns and of lines in turn; so llama.cpp's files of a Kimi-VL have them, too, and those of a K2.5 in another order.
"""

from __future__ import annotations

import re
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MAX_SIDE,
    activation_of,
    check_only,
    check_same,
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

_TOKENS = ImageTokens("<|media_pad|>", "<|media_pad|>")  # the templates write what is around it
_PATCHES_OF_SIDE = 512
_OF_TOWER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_POSITIONS = "init_pos_emb_height", "init_pos_emb_width"


def kimi_vl(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "moonvit")
    if not images.flag("pad_input", True):
        raise UnsupportedError(f"{images.where}: images cut to whole tokens (pad_input false) are not supported", ANOTHER)
    tower = _moonvit(config, vision, 1e-5)
    check_same(images, patch_size=tower.patch_size)
    return _vision(tower, images, images.integer("in_token_limit", 4096), _PATCHES_OF_SIDE)


def kimi_k25(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a Kimi K2.5, whose folders' settings are its own code's, or transformers'."""
    vision = vision_section(config)
    own = {key: vision.values[f"vt_{key}"] for key in _OF_TOWER if vision.has(f"vt_{key}")}
    names = {"pos_emb_height": _POSITIONS[0], "pos_emb_width": _POSITIONS[1]}
    own |= {ours: vision.values[key] for key, ours in names.items() if vision.has(key)}
    vision = ConfigReader({**vision.values, **own}, vision.where)
    check_only(vision, merge_type="sd2_tpool", mm_projector_type="patchmerger", projector_hidden_act="gelu")
    eps = config.number("projection_layer_norm_eps", vision.number("projector_ln_eps", 1e-5))
    tower = _moonvit(config, vision, eps)
    if (said := config.integer("projection_hidden_size", tower.hidden_size)) != tower.hidden_size:
        told = f"{config.where}: 'projection_hidden_size' is {said} for a tower's rows of {tower.hidden_size} numbers"
        raise CheckpointError(told, BROKEN)
    images = images.section("media_proc_cfg") if images.has("media_proc_cfg") else images
    check_same(images, patch_size=tower.patch_size, merge_size=tower.merge)
    if images.has("fixed_output_tokens"):
        raise UnsupportedError(f"{images.where}: images of as many tokens each (fixed_output_tokens) are not supported", ANOTHER)
    size = images.section("size")
    if size.has("max_height") and size.values.get("max_width") != size.values["max_height"]:
        raise UnsupportedError(f"{size.where}: images in a frame that is no square are not supported", ANOTHER)
    side = images.integer("patch_limit_on_one_side", size.integer("max_height", _PATCHES_OF_SIDE))
    return _vision(tower, images, images.integer("in_patch_limit", images.integer("max_patches", 16384)), side)


def _moonvit(config: ConfigReader, vision: ConfigReader, eps: float) -> TowerSpec:
    """eps: of the projector's norm."""
    hidden, rows = vision.integer("hidden_size", 1152), {vision.integer(key, 64) for key in _POSITIONS}
    if len(rows) > 1:
        raise UnsupportedError(f"{vision.where}: positions of other than a square are not supported", ANOTHER)
    if (grid := rows.pop()) > MAX_SIDE:
        raise CheckpointError(f"{vision.where}: positions of {grid} x {grid} patches are not believed", BROKEN)
    return TowerSpec(
        patch_size=side_of(vision, "patch_size", 14),
        merge=side_of(vision, "merge_kernel_size", 2),
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 27),
        num_heads=heads_of(vision, "num_attention_heads", hidden, parts=4),
        intermediate_size=vision.integer("intermediate_size", 4304),
        out_size=text_width(config),
        activation=activation_of(vision, "gelu_pytorch_tanh"),
        norm="layer",
        eps=1e-5,
        projector="merger",
        projector_eps=eps,
        patch_bias=True,
        positions=grid**2,
        stretch="bicubic",
        theta=theta_of(vision),
        stored="pairs",
        post_norm=True,
    )


def _vision(tower: TowerSpec, images: ConfigReader, most: int, side: int) -> VisionSpec:
    """most: patches of an image, in all; side: on one side."""
    longest = side * tower.patch_size
    if most * tower.patch_size**2 > MAX_PIXELS or longest > MAX_SIDE:
        told = f"{images.where}: images of {most} patches, of at most {side} on a side, are not believed"
        raise CheckpointError(told, BROKEN)
    rule = SizeRule(
        "padded", tower.cell, longest_side=longest, resample=resample_of(images, 3), tile=tower.patch_size, most_tiles=most
    )
    return VisionSpec(tower, rule, _TOKENS, *colours_of(images, HALVES))


def _names(projector: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    layer = "vision_tower.encoder.blocks.{i}"
    return weights_and_biases({
        "patch": "vision_tower.patch_embed.proj",
        "layers.{i}.attention_norm": f"{layer}.norm0",
        "layers.{i}.qkv": f"{layer}.wqkv",
        "layers.{i}.out": f"{layer}.wo",
        "layers.{i}.mlp_norm": f"{layer}.norm1",
        "layers.{i}.up": f"{layer}.mlp.fc0",
        "layers.{i}.down": f"{layer}.mlp.fc1",
        "post_norm": "vision_tower.encoder.final_layernorm",
        "positions": "vision_tower.patch_embed.pos_emb",
        **projector,
    })  # fmt: skip


KIMI_VL_NAMES = _names({
    "projector.norm": "multi_modal_projector.pre_norm", "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
})  # fmt: skip
KIMI_K25_NAMES = _names({
    "projector.norm": "mm_projector.pre_norm", "projector.up": "mm_projector.proj.0", "projector.down": "mm_projector.proj.2",
})  # fmt: skip
KIMI_UNREAD = re.compile(r"vision_tower\.patch_embed\.pos_emb\.time_weight")
"""Positions of a video's frames."""
