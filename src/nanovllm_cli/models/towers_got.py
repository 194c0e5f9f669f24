"""How GOT-OCR 2 sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. SAM alone
(`SamSpec`), of whose patches 4 x 4 are a token; a page is made one square, whatever its shape. PP-Chart2Table is one of these.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    check_divides,
    check_squares,
    colours_of,
    resample_of,
    side_of,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_deepseek import sam_of
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<imgpad>", "<imgpad>")
_MERGE = 4  # no config says it: two convolutions that halve
_KINDS = "got_ocr2_vision", "pp_chart2table_vision"


def got_ocr2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config)
    if (kind := vision.text("model_type", _KINDS[0])) not in _KINDS:
        raise UnsupportedError(f"{vision.where}: a tower of the kind {kind[:40]!r} is not supported", f"known: {_KINDS[0]}")
    side, patch, width = side_of(vision, "image_size", 1024), side_of(vision, "patch_size", 16), text_width(config)
    check_divides(vision, side, patch * _MERGE, f"tokens of {_MERGE} x {_MERGE} patches of {patch}")
    sam = sam_of(vision, 2 * vision.integer("output_channels", 256), (side // patch) ** 2, 3072, queried=False)
    tower = TowerSpec(
        patch_size=patch,
        merge=_MERGE,
        hidden_size=width,
        num_layers=0,
        num_heads=1,
        intermediate_size=sam.intermediate_size,
        out_size=width,
        activation="gelu",
        norm="layer",
        eps=sam.eps,
        projector="joined",
        projector_eps=0.0,
        sam=sam,
    )
    check_squares(images, side, "images")
    if images.does("crop_to_patches", False):
        raise UnsupportedError(f"{images.where}: pages that are cut (crop_to_patches true) are not supported", ANOTHER)
    rule = SizeRule("square", tower.cell, longest_side=side, resample=resample_of(images, 3))
    tokens = replace(_TOKENS, often=(side // tower.cell) ** 2)
    return VisionSpec(tower, rule, tokens, *colours_of(images, CLIP))


_LAYER, _NECK = "vision_tower.layers.{i}", "vision_tower.neck"
GOT_NAMES = weights_and_biases({
    "patch": "vision_tower.patch_embed.projection",
    "sam.{i}.attention_norm": f"{_LAYER}.layer_norm1",
    "sam.{i}.qkv": f"{_LAYER}.attn.qkv",
    "sam.{i}.out": f"{_LAYER}.attn.proj",
    "sam.{i}.mlp_norm": f"{_LAYER}.layer_norm2",
    "sam.{i}.up": f"{_LAYER}.mlp.lin1",
    "sam.{i}.down": f"{_LAYER}.mlp.lin2",
    "neck.first": f"{_NECK}.conv1",
    "neck.first_norm": f"{_NECK}.layer_norm1",
    "neck.second": f"{_NECK}.conv2",
    "neck.second_norm": f"{_NECK}.layer_norm2",
    "shrink.first": "multi_modal_projector.conv_upsampler1",
    "shrink.second": "multi_modal_projector.conv_upsampler2",
    "projector.out": "multi_modal_projector.multimodal_projector",
}) | {
    "positions.weight": ("vision_tower.pos_embed",),
    "sam.{i}.by_line": (f"{_LAYER}.attn.rel_pos_h",),
    "sam.{i}.by_column": (f"{_LAYER}.attn.rel_pos_w",),
}  # fmt: skip
