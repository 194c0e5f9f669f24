"""How Perception LM sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. A Perception
Encoder (Bolya et al. 2025), of squares whose patches have learned and rotary positions, each of them and all of an image once;
rows of two layers are averaged over cells of patches (Cho et al. 2025).

A config names one of timm's towers and what it is told beside that. Of these it is the two that Perception LM is published with.
"""

from __future__ import annotations

from typing import NamedTuple

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MOST_TILES,
    check_divides,
    check_only,
    colours_of,
    depth_of,
    resample_of,
    side_of,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec


class _Encoder(NamedTuple):
    """As timm has it, which is told otherwise: width, layers, pixels on a side. lead: see `TowerSpec`; positions begin at 1 then.
    ratio: of an MLP's width to its own."""

    width: int
    layers: int
    side: int
    lead: bool
    ratio: float


_ENCODERS = {
    "vit_pe_core_large_patch14_336": _Encoder(1024, 24, 336, True, 4.0),
    "vit_pe_core_gigantic_patch14_448": _Encoder(1536, 50, 448, False, 8960 / 1536),
}
_HEADS, _PATCH = 16, 14
_ARGUMENTS = {"depth", "embed_dim", "global_pool", "img_size", "init_values", "ref_feat_shape", "use_post_transformer_norm"}
_TOKENS = ImageTokens("<|image|>", "<|image|>", whole_first=True)
_TILED, _ALONE = "thumb+tile", "vanilla"


def perception_lm(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "timm_wrapper")
    encoder = _ENCODERS.get((name := vision.text("architecture")).partition(".")[0])
    if encoder is None:
        told = f"{vision.where}: a tower of the architecture {name[:40]!r} is not supported"
        raise UnsupportedError(told, f"known: {', '.join(sorted(_ENCODERS))}")
    check_only(config, vision_use_cls_token=encoder.lead)
    told_timm, merge = vision.section("model_args"), config.integer("projector_pooling_ratio", 1)
    if unknown := sorted(told_timm.values.keys() - _ARGUMENTS):
        known = ", ".join(sorted(_ARGUMENTS))
        raise UnsupportedError(f"{told_timm.where}: {unknown[0][:40]!r} is not supported", f"known: {known}")
    if told_timm.values.get("global_pool") != "":
        told = f"{told_timm.where}: a tower that makes one row of an image (global_pool) is not supported"
        raise UnsupportedError(told, ANOTHER)
    width, side = told_timm.integer("embed_dim", encoder.width), side_of(told_timm, "img_size", encoder.side)
    check_divides(told_timm, side, _PATCH * merge, f"tokens of {merge} x {merge} patches of {_PATCH}")
    if (trained := side_of(told_timm, "ref_feat_shape", encoder.side // _PATCH)) != side // _PATCH:
        told = f"{told_timm.where}: positions of {trained} lines for images of {side // _PATCH} (ref_feat_shape)"
        raise UnsupportedError(told, ANOTHER)
    if width % (4 * _HEADS):
        raise CheckpointError(f"{told_timm.where}: {_HEADS} heads can't share {width} dimensions evenly", BROKEN)
    tower = TowerSpec(
        patch_size=_PATCH,
        merge=merge,
        hidden_size=width,
        num_layers=depth_of(told_timm, "depth", encoder.layers),
        num_heads=_HEADS,
        intermediate_size=int(width * encoder.ratio),
        out_size=text_width(config),
        activation="gelu",
        norm="layer",
        eps=1e-5,
        projector="averaged",
        projector_eps=0.0,
        projector_size=text_width(config),
        positions=(side // _PATCH) ** 2,
        lead=encoder.lead,
        theta=1e4,
        stored="axes",
        pre_norm=True,
        norm_placed=True,
        post_norm=told_timm.flag("use_post_transformer_norm", True),
        scaled=told_timm.has("init_values"),
    )
    return VisionSpec(tower, _rule(tower, images, side), _TOKENS, *colours_of(images, HALVES))


def _rule(tower: TowerSpec, images: ConfigReader, side: int) -> SizeRule:
    if (said := images.integer("tile_size", side)) != side:
        raise CheckpointError(f"{images.where}: the tower reads squares of {side} x {side} pixels, not {said}", BROKEN)
    resample, kind = resample_of(images, 3), images.text("vision_input_type", _TILED)
    if kind not in (_TILED, _ALONE):
        raise UnsupportedError(f"{images.where}: vision_input_type {kind[:40]!r} is not supported", f"known: {_TILED}, {_ALONE}")
    if kind == _ALONE:
        return SizeRule("square", tower.cell, longest_side=side, resample=resample)
    most = images.integer("max_num_tiles", 36)
    if most > MOST_TILES or most * side**2 > MAX_PIXELS:
        raise CheckpointError(f"{images.where}: {most} pieces of {side} x {side} pixels are not believed", BROKEN)
    return SizeRule("canvas", tower.cell, resample=resample, tile=side, least_tiles=1, most_tiles=most, nearest="growth")


_TOWER = "vision_tower.timm_model"
_LAYER = f"{_TOWER}.blocks.{{i}}"
PERCEPTION_NAMES = weights_and_biases({
    "patch": f"{_TOWER}.patch_embed.proj",
    "pre_norm": f"{_TOWER}.norm_pre",
    "layers.{i}.attention_norm": f"{_LAYER}.norm1",
    "layers.{i}.qkv": f"{_LAYER}.attn.qkv",
    "layers.{i}.out": f"{_LAYER}.attn.proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.norm2",
    "layers.{i}.up": f"{_LAYER}.mlp.fc1",
    "layers.{i}.down": f"{_LAYER}.mlp.fc2",
    "post_norm": f"{_TOWER}.norm",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}) | {
    "lead.weight": (f"{_TOWER}.cls_token",),
    "positions.weight": (f"{_TOWER}.pos_embed",),
    "layers.{i}.attention_scale.weight": (f"{_LAYER}.gamma_1",),
    "layers.{i}.mlp_scale.weight": (f"{_LAYER}.gamma_2",),
}  # fmt: skip
