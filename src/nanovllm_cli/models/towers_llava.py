"""How LLaVAs see: their configs -> VisionSpec, and what their folders call a tower's tensors. See `towers.py`. CLIP or SigLIP, as
they were before LLaVAs: squares of one size. LLaVA 1.5 reads one of them, LLaVA-NeXT (1.6) and LLaVA-OneVision a `Mosaic`.

Several images in one prompt are each read as if they were alone. Videos are not read (OneVision pools their frames).
"""

from __future__ import annotations

import re
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    HALVES,
    MAX_PIXELS,
    MOST_TILES,
    SIGLIP_NAMES,
    check_only,
    colours_of,
    positions_of,
    resample_of,
    siglip_shape,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"
_TOKENS = ImageTokens("<image>", "<image>", line="\n")
NEXT_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ONEVISION_SIDES = range(384, 2304 + 1, 384)
_ASPECT = re.compile(r"anyres_max_([1-9]\d{0,2})")


def llava(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings; of one with CLIP's tower, or SigLIP's."""
    config, tower, side = _tower(config, _CLIP, {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"})
    rule = clip_rule(images, tower.patch_size, side, by_shorter=tower.lead)
    return VisionSpec(tower, rule, _TOKENS, *colours_of(images, CLIP if tower.lead else HALVES))


def clip_rule(images: ConfigReader, cell: int, side: int, *, by_shorter: bool = True) -> SizeRule:
    """Of images of this side. by_shorter: where settings say nothing, the shorter one becomes that long, and the middle is it."""
    if images.values.get("do_pad") is True:
        raise UnsupportedError(f"{images.where}: images that are filled up to squares (do_pad) are not supported", ANOTHER)
    said = images.values.get("size")
    by_shorter = by_shorter if not isinstance(said, dict) else said.get("shortest_edge") is not None
    if by_shorter and not images.does("do_center_crop", True):
        raise UnsupportedError(f"{images.where}: images of any shape (do_center_crop false) are not supported", ANOTHER)
    check_side(images, side)
    if by_shorter:
        return SizeRule("middle", cell, resample=resample_of(images, 3), tile=side)
    return SizeRule("square", cell, longest_side=side, resample=resample_of(images, 3))


def llava_next(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a LLaVA-NeXT."""
    config, tower, side = _tower(
        config, _CLIP, {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}, squares=MOST_TILES
    )
    return VisionSpec(tower, mosaic_rule(config, images, tower, side), _TOKENS, *colours_of(images, CLIP))


def llava_onevision(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a LLaVA-OneVision."""
    aspect = config.text("vision_aspect_ratio", "anyres_max_9")
    found = _ASPECT.fullmatch(aspect)
    if found is None:
        raise UnsupportedError(f"{config.where}: vision_aspect_ratio {aspect[:40]!r} is not supported", "known: anyres_max_9")
    usual = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    config, tower, side = _tower(config, _SIGLIP, usual, squares=int(found[1]))
    grids = [[height, width] for height in _ONEVISION_SIDES for width in _ONEVISION_SIDES]
    return VisionSpec(tower, mosaic_rule(config, images, tower, side, grids), _TOKENS, *colours_of(images, CLIP))


def _tower(config: ConfigReader, kind: str, usual: dict[str, Any], squares: int = 0) -> tuple[ConfigReader, TowerSpec, int]:
    """The config with what it leaves out, the tower, and an image's side. kind: of towers that say nothing."""
    config = ConfigReader({**usual, **config.values}, config.where)
    vision = vision_section(config)
    if (said := vision.text("model_type", kind)) not in (_CLIP, _SIGLIP):
        told = f"{vision.where}: a tower of the kind {said[:40]!r} is not supported"
        raise UnsupportedError(told, f"known: {_CLIP}, {_SIGLIP}, pixtral")
    is_clip = said == _CLIP
    check_only(config, projector_hidden_act="gelu", multimodal_projector_bias=True,
               vision_feature_select_strategy="default" if is_clip else "full")  # fmt: skip
    if is_clip:
        filled = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, **vision.values}
        vision = ConfigReader(filled, vision.where)
        shape = siglip_shape(config, vision, 1024, 16, inner=4096, layers=24)
        shape |= {"lead": True, "pre_norm": True, "norm_placed": True}
    else:
        shape = siglip_shape(config, vision, 1152, 16, inner=4304, layers=26)
    side, patch = vision.integer("image_size", 336 if is_clip else 384), vision.integer("patch_size", 14)
    shape |= {"num_layers": _read_behind(config, shape["num_layers"]), "post_norm": False}
    tower = TowerSpec(
        patch_size=patch,
        merge=1,
        positions=positions_of(vision, side, patch),
        projector="joined",
        projector_eps=0.0,
        projector_size=text_width(config),
        squares=squares,
        **shape | {"patch_bias": not is_clip},
    )
    return config, tower, side


def _read_behind(config: ConfigReader, depth: int) -> int:
    """How many of the tower's layers are computed."""
    said = config.values["vision_feature_layer"]
    layers = said if isinstance(said, list) else [said]
    if len(layers) != 1:
        raise UnsupportedError(f"{config.where}: rows of {len(layers)} layers (vision_feature_layer)", "known: those of one")
    (layer,) = layers
    if type(layer) is not int or not 0 < (count := layer if layer >= 0 else depth + 1 + layer) <= depth:
        raise CheckpointError(f"{config.where}: 'vision_feature_layer' is {str(layer)[:40]} in a tower of {depth} layers", BROKEN)
    return count


def check_side(images: ConfigReader, side: int) -> None:
    """An image's, in whatever way settings say it."""
    for key in ("size", "crop_size"):
        said = images.values.get(key)
        numbers = list(said.values()) if isinstance(said, dict) else [] if said is None else [said]
        if wrong := [each for each in numbers if each is not None and each != side]:
            raise CheckpointError(f"{images.where}: the tower reads {side} x {side} pixels, not {str(wrong[0])[:40]}", BROKEN)


def mosaic_rule(
    config: ConfigReader, images: ConfigReader, tower: TowerSpec, side: int, usual: list[list[int]] = NEXT_GRIDS
) -> SizeRule:
    """side: of a square. usual: heights and widths of files that say nothing."""
    check_side(images, side)
    own, others = (each.values.get("image_grid_pinpoints") for each in (images, config))
    sizes = own if own is not None else others if others is not None else usual
    if own is not None and others is not None and own != others:
        raise CheckpointError(f"{images.where}: 'image_grid_pinpoints' are not those of config.json", BROKEN)
    if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_TILES:
        raise CheckpointError(f"{images.where}: 'image_grid_pinpoints' must be a list of heights and widths", BROKEN)
    grids = []
    for size in sizes:
        if not isinstance(size, list) or len(size) != 2 or any(type(each) is not int or each < 1 or each % side for each in size):
            raise CheckpointError(
                f"{images.where}: an image of {str(size)[:40]} pixels doesn't divide into squares of {side} x {side}", BROKEN
            )
        grids.append((size[0] // side, size[1] // side))
    if any((1 + rows * columns) * side**2 > MAX_PIXELS or rows * columns > MOST_TILES for rows, columns in grids):
        raise CheckpointError(f"{images.where}: images of more than {MAX_PIXELS >> 20} million pixels are not believed", BROKEN)
    return SizeRule("mosaic", tower.cell, resample=resample_of(images, 3), tile=side, grids=tuple(grids))


LLAVA_UNREAD = re.compile(r"vision_tower\.(?:encoder\.layers\.(\d+)|post_layernorm)\..*")
"""Of which layers behind the one that is read are never computed."""
LLAVA_NAMES = weights_and_biases(SIGLIP_NAMES | {
    "pre_norm": "vision_tower.pre_layrnorm",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}) | {"lead.weight": ("vision_tower.embeddings.class_embedding",), "line_end.weight": ("image_newline",)}  # fmt: skip
