"""How Ovis2 sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. AIMv2's transformer
(Fini et al. 2024), whose rows weigh the entries of a table, as if they were words (Lu et al. 2024); an image is a `Mosaic` whose
squares lie apart.

How an image is divided is as in transformers, whose folders these are: wide images into lines and tall ones into columns, and
squares are not filled up, both other than in the code that the model was published with.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    activation_of,
    check_divides,
    check_only,
    check_squares,
    check_width,
    colours_of,
    depth_of,
    heads_of,
    pieces_of,
    resample_of,
    side_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_MARKS = "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"
_TOKENS = ImageTokens("<image>", "<IMG_ATOM>", line="\n", marks=_MARKS)


def ovis2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "ovis2_vision")
    check_only(vision, qkv_bias=False, mlp_bias=False, tokenize_function="softmax", num_visual_indicator_tokens=len(_MARKS))
    side, patch = side_of(vision, "image_size", 224), side_of(vision, "patch_size", 14)
    hidden, merge = vision.integer("hidden_size", 1024), vision.integer("hidden_stride", 1)
    entries = vision.integer("vocab_size", 16384)
    check_divides(vision, side, patch * merge, f"tokens of {merge} x {merge} patches of {patch}")
    if entries <= len(_MARKS):
        raise CheckpointError(f"{vision.where}: a table of {entries} entries has none for an image", BROKEN)
    tower = TowerSpec(
        patch_size=patch,
        merge=merge,
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 24),
        num_heads=heads_of(vision, "num_attention_heads", hidden, 8, parts=2),
        intermediate_size=vision.integer("intermediate_size", 2816),
        out_size=config.integer("hidden_size", 1536),
        activation=activation_of(vision, "silu"),
        norm="rms",
        eps=vision.number("rms_norm_eps", 1e-5),
        projector="tabled",
        projector_eps=1e-5,
        projector_size=entries - len(_MARKS),
        marks=len(_MARKS),
        gated=True,
        bias=False,
        patch_bias=True,
        positions=(side // patch) ** 2,
        pre_norm=True,
        post_norm=True,
    )
    check_width(config, tower)
    return VisionSpec(tower, _rule(tower, images, side), _TOKENS, *colours_of(images, CLIP))


def _rule(tower: TowerSpec, images: ConfigReader, side: int) -> SizeRule:
    check_squares(images, side)
    least, most = pieces_of(images, side, 1, 12)
    if not images.does("use_covering_area_grid", True):
        raise UnsupportedError(f"{images.where}: use_covering_area_grid false is not supported", ANOTHER)
    if least > 1 or images.does("do_center_crop", False):
        told = f"min_patches {least}" if least > 1 else "do_center_crop true"
        raise UnsupportedError(f"{images.where}: {told} is not supported", ANOTHER)
    most = most if images.does("crop_to_patches", False) else 1
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1) if rows * columns > 1]
    return SizeRule("mosaic", tower.cell, resample=resample_of(images, 3), tile=side, grids=tuple(grids), nearest="covering")


_TOWER = "vision_tower.transformer"
_LAYER = f"{_TOWER}.encoder.layers.{{i}}"
OVIS2_NAMES = weights_and_biases({
    "patch": f"{_TOWER}.embeddings.patch_embedding",
    "positions": f"{_TOWER}.embeddings.position_embedding",
    "pre_norm": f"{_TOWER}.embeddings.rms_norm",
    "layers.{i}.attention_norm": f"{_LAYER}.rms_norm1",
    "layers.{i}.qkv": tuple(f"{_LAYER}.attention.{part}_proj" for part in "qkv"),
    "layers.{i}.out": f"{_LAYER}.attention.out_proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.rms_norm2",
    "layers.{i}.up": (f"{_LAYER}.ffn.gate_proj", f"{_LAYER}.ffn.up_proj"),
    "layers.{i}.down": f"{_LAYER}.ffn.down_proj",
    "post_norm": f"{_TOWER}.rms_norm",
    "projector.up": "vision_tower.head_linear",
    "projector.norm": "vision_tower.head_norm",
    "projector.out": "visual_embeddings_table",
}) | {"marks.table": ("visual_embeddings_table.weight",)}  # fmt: skip
