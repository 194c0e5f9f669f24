"""How models see that cut images into pieces: their configs -> VisionSpec, and what their folders call a tower's tensors. See
`towers.py`. SmolVLM and Idefics3 read squares of one size; LFM2-VL reads what has any shape, and positions are stretched to it.
"""

from __future__ import annotations

import math

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MAX_SIDE,
    MOST_TILES,
    SIGLIP_NAMES,
    check_divides,
    check_only,
    check_same,
    colours_of,
    resample_of,
    siglip_shape,
    square,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_IDEFICS3_KINDS = ("smolvlm_vision", "idefics3_vision", "idefics3")
AROUND = "<fake_token_around_image>"
_ALL = f"{AROUND}<global-img>"
_IDEFICS3_TOKENS = ImageTokens(
    "<image>", "<image>", after=AROUND, piece=f"{AROUND}<row_{{row}}_col_{{column}}>", pieces_end="\n", whole=f"\n{_ALL}",
    alone=_ALL,
)  # fmt: skip
_LFM2_TOKENS = ImageTokens(
    "<image>", "<image>", before="<|image_start|>", after="<|image_end|>", piece="<|img_row_{row}_col_{column}|>",
    whole="<|img_thumbnail|>",
)  # fmt: skip


def idefics3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings; of a SmolVLM, too."""
    vision = vision_section(config)
    if (said := vision.text("model_type", _IDEFICS3_KINDS[0])) not in _IDEFICS3_KINDS:
        raise UnsupportedError(
            f"{vision.where}: a tower of the kind {said[:40]!r} is not supported", f"known: {', '.join(_IDEFICS3_KINDS)}"
        )
    side, patch, merge = vision.integer("image_size", 224), vision.integer("patch_size", 32), config.integer("scale_factor", 2)
    check_divides(vision, side, patch * merge, f"tokens of {merge} x {merge} patches of {patch}")
    tower = TowerSpec(
        patch_size=patch,
        merge=merge,
        projector="joined",
        projector_eps=0.0,
        positions=(side // patch) ** 2,
        **siglip_shape(config, vision, 1152, 16),
    )
    for key in ("size", "max_image_size"):
        size = images.section(key)
        if not size.has("longest_edge") and (size.has("height") or size.has("width")):
            raise UnsupportedError(f"{images.where}: a {key!r} without longest_edge is not supported", ANOTHER)
    tile = images.section("max_image_size").integer("longest_edge", side)
    longest = images.section("size").integer("longest_edge", 4 * tile)
    if tile != side:
        raise CheckpointError(f"{images.where}: the tower reads pieces of {side} x {side} pixels, not {tile} x {tile}", BROKEN)
    if not tile <= longest <= min(MAX_SIDE, tile * math.isqrt(MOST_TILES)):
        raise CheckpointError(f"{images.where}: images {longest} pixels long in pieces of {tile} are not believed", BROKEN)
    most = 0 if images.does("do_image_splitting", True) else 1
    rule = SizeRule("tiles", tower.cell, longest_side=longest, resample=resample_of(images, 1), tile=tile, most_tiles=most)
    return VisionSpec(tower, rule, _IDEFICS3_TOKENS, *colours_of(images, HALVES))


def lfm2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "siglip2_vision_model")
    has_norm = config.flag("projector_use_layernorm", True)
    tower = TowerSpec(
        patch_size=vision.integer("patch_size", 16),
        merge=config.integer("downsample_factor", 2),
        projector="joined",
        projector_eps=1e-5 if has_norm else 0.0,
        projector_size=config.integer("projector_hidden_size", 2560),
        positions=square(vision, vision.integer("num_patches", 256), "num_patches"),
        stretch="areas",
        **siglip_shape(config, vision),
    )
    check_only(config, projector_hidden_act="gelu", projector_bias=True, vision_feature_layer=-1)
    for key in ("use_thumbnail", "use_image_special_tokens"):
        if not images.does(key, True):
            raise UnsupportedError(f"{images.where}: {key} false is not supported", ANOTHER)
    return VisionSpec(tower, _grid(tower, images), _LFM2_TOKENS, *colours_of(images, HALVES))


def _grid(tower: TowerSpec, images: ConfigReader) -> SizeRule:
    check_same(images, encoder_patch_size=tower.patch_size, downsample_factor=tower.merge)
    tile = images.integer("tile_size", 512)
    least, most = images.integer("min_tiles", 2), images.integer("max_tiles", 10)
    fewest, more = images.integer("min_image_tokens", 64) * tower.cell**2, images.integer("max_image_tokens", 256) * tower.cell**2
    are_few = least <= most <= MOST_TILES and most * tile**2 <= MAX_PIXELS
    if tile % tower.cell or not are_few or not fewest <= more <= MAX_PIXELS:
        raise CheckpointError(
            f"{images.where}: {least} to {most} pieces of {tile} x {tile} pixels, or {fewest} to {more} pixels in one, "
            f"don't divide into tokens of {tower.cell} x {tower.cell}", BROKEN,
        )  # fmt: skip
    return SizeRule(
        "grid", tower.cell, min_pixels=fewest, max_pixels=more, resample=resample_of(images, 2), tile=tile, least_tiles=least,
        most_tiles=most if images.does("do_image_splitting", True) else 0,
        tolerance=images.number("max_pixels_tolerance", 2.0),
    )  # fmt: skip


_IDEFICS3_MODULES: dict[str, str | tuple[str, ...]] = SIGLIP_NAMES | {"projector.out": "connector.modality_projection.proj"}
IDEFICS3_NAMES = {
    ours: tuple(each.replace("vision_tower.", "vision_model.") for each in theirs)
    for ours, theirs in weights_and_biases(_IDEFICS3_MODULES).items()
}
LFM2_NAMES = weights_and_biases(SIGLIP_NAMES | {
    "projector.norm": "multi_modal_projector.layer_norm",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
})  # fmt: skip
