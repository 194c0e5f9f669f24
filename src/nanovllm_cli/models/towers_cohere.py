"""How Cohere's models see, Aya Vision and Command A Vision: their configs -> VisionSpec, and what their folders call a tower's
tensors. See `towers.py`. SigLIP in squares of one size; an image is cut into several of them, and all of it is behind these.
"""

from __future__ import annotations

from typing import Literal

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.tower_configs import (
    CLIP,
    SIGLIP_NAMES,
    check_divides,
    check_only,
    check_squares,
    colours_of,
    pieces_of,
    resample_of,
    siglip_shape,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_PART, _BEGIN, _END, _BREAK = "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"
_AYA_TOKENS = ImageTokens(
    "<image>", _PART, before=_BEGIN, after=_END, piece="TILE_{number}", whole="TILE_GLOBAL", alone="TILE_GLOBAL"
)
_COMMAND_TOKENS = ImageTokens(_PART, _PART, before=_BEGIN, after=_BREAK + _END, piece_end=_BREAK)


def aya_vision(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings. Rows of the tower's last layer are taken as they are, and the
    projector has a norm instead. It makes pieces whatever "crop_to_patches" says, as transformers' processor does."""
    check_only(config, vision_feature_layer=-1, vision_feature_select_strategy="full")
    vision = vision_section(config, "siglip_vision_model")
    shape = siglip_shape(config, vision, 1152, 14, inner=4304, layers=26) | {"post_norm": False}
    side, patch = vision.integer("image_size", 384), vision.integer("patch_size", 14)
    tower = TowerSpec(
        patch_size=patch,
        merge=config.integer("downsample_factor", 2),
        positions=(side // patch) ** 2,
        projector="joined",
        projector_eps=config.number("adapter_layer_norm_eps", 1e-6),
        projector_size=_half(config, config.integer("alignment_intermediate_size", text_width(config))),
        projector_gated=True,
        **shape,
    )
    rule = _rule(vision, images, tower, side, "shape")
    return VisionSpec(tower, rule, _AYA_TOKENS, *colours_of(images, CLIP))


def command_a_vision(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a Command A Vision."""
    vision = vision_section(config, "siglip_vision_model")
    side, patch = vision.integer("image_size", 512), vision.integer("patch_size", 16)
    tower = TowerSpec(
        patch_size=patch,
        merge=config.integer("downsample_factor", 2),
        positions=(side // patch) ** 2,
        projector="joined",
        projector_eps=0.0,
        projector_size=_half(config, config.integer("alignment_intermediate_size", 36864)),
        projector_gated=True,
        **siglip_shape(config, vision, 1152, 12, inner=3072, layers=27),
    )
    rule = _rule(vision, images, tower, side, "size")
    tokens = side // tower.cell
    if (said := images.integer("patch_size", tokens)) != tokens:
        raise CheckpointError(f"{images.where}: 'patch_size' is {said} for pieces of {tokens} x {tokens} tokens", BROKEN)
    if not images.does("crop_to_patches", True):
        rule = SizeRule("canvas", rule.multiple, resample=rule.resample, tile=side, least_tiles=1, most_tiles=1)
    return VisionSpec(tower, rule, _COMMAND_TOKENS, *colours_of(images, CLIP))


def _half(config: ConfigReader, inner: int) -> int:
    """Of what the projector's first layer makes, one half gates the other."""
    if inner % 2:
        raise CheckpointError(f"{config.where}: 'alignment_intermediate_size' must be even, not {inner}", BROKEN)
    return inner // 2


def _rule(
    vision: ConfigReader, images: ConfigReader, tower: TowerSpec, side: int, nearest: Literal["shape", "size"]
) -> SizeRule:
    check_divides(vision, side, tower.cell, f"tokens of {tower.cell} x {tower.cell}")
    check_squares(images, side)
    least, most = pieces_of(images, side, 1, 12)
    return SizeRule(
        "canvas", tower.cell, resample=resample_of(images, 3), tile=side, least_tiles=least if nearest == "shape" else 1,
        most_tiles=most, nearest=nearest,
    )  # fmt: skip


_PROJECTOR = {"projector.up": "multi_modal_projector.linear_1", "projector.down": "multi_modal_projector.linear_2"}
COMMAND_A_NAMES = weights_and_biases(SIGLIP_NAMES | _PROJECTOR)
AYA_NAMES = weights_and_biases(SIGLIP_NAMES | _PROJECTOR | {"projector.norm": "multi_modal_projector.layernorm"})
