"""How Granite Docling sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. SigLIP, whose
image is cut into squares; some of its layers are added behind the decoder's first ones. Its rows are multiplied as the decoder's
embeddings are. The model that is published as granite-docling-258M is an Idefics3.

Not covered: the finer of its two connectors, with four times as many tokens, and what tells which pages need it.
"""

from __future__ import annotations

import math

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    MAX_PIXELS,
    MOST_TILES,
    SIGLIP_NAMES,
    check_divides,
    check_squares,
    check_width,
    colours_of,
    deep_of,
    resample_of,
    side_of,
    siglip_shape,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_tiled import AROUND
from nanovllm_cli.size_spec import Dense, SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_LINES = 16
"""Of pieces at most, and columns: more have no tokens."""
_TOKENS = ImageTokens(
    "<image>", "<image>", after=AROUND, piece=f"{AROUND}<row_{{row}}_col_{{column}}>", pieces_end="\n",
    whole=f"\n{AROUND}<global-img>", alone=f"{AROUND}<row_1_col_1>", alone_end="\n",
)  # fmt: skip


def docling(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "granite_docling_vision")
    side, patch = side_of(vision, "image_size", 512), side_of(vision, "patch_size", 16)
    merge, out = vision.integer("scale_factor", 4), vision.integer("out_hidden_size", 1024)
    check_divides(vision, side, patch * merge, f"tokens of {merge} x {merge} patches of {patch}")
    if out % 4:
        raise CheckpointError(f"{vision.where}: 'out_hidden_size' must be a multiple of 4, not {out}", BROKEN)
    if images.flag("fine_route", False):
        raise UnsupportedError(f"{images.where}: fine_route true is not supported", ANOTHER)
    shape = siglip_shape(config, vision) | {"out_size": out}
    text = ConfigReader(text_config(config.values), config.where)
    tower = TowerSpec(
        patch_size=patch,
        merge=merge,
        projector="placed",
        projector_eps=1e-5,
        positions=(side // patch) ** 2,
        deep=deep_of(vision, (3, 7, 10), shape["num_layers"]),
        out_scale=text.number("embedding_multiplier", 12.0),
        **shape,
    )
    check_width(config, tower)
    return VisionSpec(tower, _rule(tower, images, side), _TOKENS, *colours_of(images, CLIP))


def _rule(tower: TowerSpec, images: ConfigReader, side: int) -> SizeRule:
    check_squares(images, side)
    least, most = images.integer("min_patches", 1), images.integer("max_patches", 32)
    is_cut = images.does("crop_to_patches", True) and most > 1
    least, most = (least, most) if is_cut else (1, 1)
    dense = _dense(images, most) if is_cut else None
    tiles = most if dense is None else max(most, dense.tiles)
    if not least <= min(most, tiles if dense is None else dense.tiles) or tiles > MOST_TILES or tiles * side**2 > MAX_PIXELS:
        raise CheckpointError(f"{images.where}: {least} to {tiles} pieces of {side} x {side} pixels are not believed", BROKEN)
    return SizeRule(
        "canvas", tower.cell, resample=resample_of(images, 3), tile=side, least_tiles=least, most_tiles=most, most_lines=_LINES,
        dense=dense,
    )  # fmt: skip


def _dense(images: ConfigReader, most: int) -> Dense | None:
    tiles = images.integer("dense_max_patches", 0, least=0)
    scale, least, widest = (
        images.number(f"dense_{key}", 0.0, positive=False) for key in ("max_scale", "min_aspect", "max_aspect")
    )
    if not tiles or (scale <= 0 and least <= 0):
        return None
    return Dense(tiles, scale if scale > 0 else math.inf, max(least, 0.0), widest if widest > 0 else math.inf)


_CONNECTOR = "vision_model.connector"
_MODULES: dict[str, str | tuple[str, ...]] = SIGLIP_NAMES | {
    "projector.norm": f"{_CONNECTOR}.ln_in",
    "projector.join": f"{_CONNECTOR}.coarse.projection",
    "projector.mid_norm": f"{_CONNECTOR}.ln_mid",
    "projector.out": f"{_CONNECTOR}.mlp_fc2",
    "projector.after_norm": f"{_CONNECTOR}.ln_out",
    **{f"deep.{{i}}.{ours}": f"{_CONNECTOR}.coarse.deepstack_mergers.{{i}}.{theirs}"
       for ours, theirs in (("norm", "layer_norm"), ("up", "linear_1"), ("down", "linear_2"))},
}  # fmt: skip
DOCLING_NAMES = {
    ours: tuple(each.replace("vision_tower.", "vision_model.") for each in theirs)
    for ours, theirs in weights_and_biases(_MODULES).items()
}
