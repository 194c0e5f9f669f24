"""How MiniCPM-V 4.6 and 4.7 and MiniCPM-OCR see: their configs -> VisionSpec, and what their folders call a tower's tensors. See
`towers.py`. SigLIP, within which each four patches become one, behind one of its layers, if a config says so; a large image is
cut into pieces of its own shape, which follow all of it. Positions of its tokens are a text's, but for 4.7's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from nanovllm_cli.canvas_spec import Markers
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MOST_TILES,
    SIGLIP_NAMES,
    check_only,
    check_same,
    colours_of,
    positions_of,
    resample_of,
    siglip_shape,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_MERGES = {"16x": 4, "4x": 2}
_GROWS: dict[str, Literal["always", "never", "letters"]] = {"always": "always", "never": "never", "adaptive": "letters"}
_TINY = 84  # pixels on a side, which a small image is made whatever files say
_NUMBER = "<image_id>{number}</image_id>"


def minicpm(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    return _minicpm(config, images, "minicpmv4_6_vision", "16x")


def minicpm_ocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    return _minicpm(config, images, "minicpm_ocr_vision", "4x")


def minicpm_4_7(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Positions of an image's tokens, and of those between its pieces, are places on a canvas."""
    spec = _minicpm(config, images, "minicpmv4_7_vision", "16x")
    markers = Markers(*(config.integer(f"{name}_id", least=0) for name in Markers._fields))
    if len({*markers}) < len(markers):
        raise CheckpointError(f"{config.where}: tokens around images that are the same: {list(markers)}", BROKEN)
    return replace(spec, has_grid=True, markers=markers)


def _minicpm(config: ConfigReader, images: ConfigReader, kind: str, mode: str) -> VisionSpec:
    """kind: of its tower. mode: of a config that says nothing."""
    vision = vision_section(config, kind)
    check_only(vision, window_kernel_size=[2, 2])
    check_only(config, drop_vision_last_layer=False, merge_kernel_size=[2, 2], merger_times=1)
    mode = config.text("downsample_mode", mode)
    if mode not in _MERGES:
        raise UnsupportedError(f"{config.where}: downsample_mode {mode[:40]!r} is not supported", f"known: {', '.join(_MERGES)}")
    if (said := images.text("downsample_mode", mode)) != mode:
        raise CheckpointError(f"{images.where}: 'downsample_mode' is {said[:40]!r}, and the tower's {mode!r}", BROKEN)
    shape = siglip_shape(config, vision)
    side, patch = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    check_same(images, patch_size=patch)
    tower = TowerSpec(
        patch_size=patch,
        merge=_MERGES[mode],
        positions=positions_of(vision, side, patch),
        stretch="nearest",
        shrinks=_place(config, shape) if mode == "16x" else None,
        projector="joined",
        projector_eps=1e-6,
        projector_size=4 * shape["hidden_size"],
        **shape,
    )
    before = _NUMBER if images.does("use_image_id", True) else ""
    tokens = ImageTokens(
        "<|image_pad|>", "<|image_pad|>", before=before, after="</image>", alone="<image>", whole="<image>", whole_first=True,
        piece="<slice>", piece_end="</slice>", pieces_end="\n",
    )  # fmt: skip
    return VisionSpec(tower, _rule(tower, images), tokens, *colours_of(images, HALVES))


def _place(config: ConfigReader, shape: dict[str, Any]) -> int:
    place, depth = config.integer("insert_layer_id", 6, least=0), shape["num_layers"]
    if place >= depth:
        raise CheckpointError(f"{config.where}: 'insert_layer_id' is {place} in a tower of {depth} layers", BROKEN)
    return place


def _rule(tower: TowerSpec, images: ConfigReader) -> SizeRule:
    tile, most = images.integer("scale_resolution", 448), images.integer("max_slice_nums", 9)
    if tile < tower.cell or most > MOST_TILES or most * tile**2 > MAX_PIXELS:
        raise CheckpointError(
            f"{images.where}: {most} pieces of about {tile} x {tile} pixels, in tokens of {tower.cell} x {tower.cell}, are not "
            "believed", BROKEN,
        )  # fmt: skip
    most = most if images.does("slice_mode", True) else 1
    if (small := images.text("small_image_upsize", "always")) not in _GROWS:
        told = f"{images.where}: small_image_upsize {small[:40]!r} is not supported"
        raise UnsupportedError(told, f"known: {', '.join(_GROWS)}")
    if small == "adaptive" and tile < _TINY:
        raise CheckpointError(f"{images.where}: pieces of {tile} x {tile} pixels, and small images of {_TINY}", BROKEN)
    by = resample_of(images, 3)
    return SizeRule("slices", tower.cell, resample=by, tile=tile, most_tiles=most, grows=_GROWS[small])


_SHRINK = "vision_tower.vit_merger"
MINICPM_NAMES = weights_and_biases(SIGLIP_NAMES | {
    "shrink.attention_norm": f"{_SHRINK}.layer_norm1",
    "shrink.qkv": tuple(f"{_SHRINK}.self_attn.{part}_proj" for part in "qkv"),
    "shrink.out": f"{_SHRINK}.self_attn.out_proj",
    "shrink.norm": f"{_SHRINK}.pre_norm",
    "shrink.up": f"{_SHRINK}.linear_1",
    "shrink.down": f"{_SHRINK}.linear_2",
    "projector.norm": "merger.mlp.0.pre_norm",
    "projector.up": "merger.mlp.0.linear_1",
    "projector.down": "merger.mlp.0.linear_2",
})  # fmt: skip
