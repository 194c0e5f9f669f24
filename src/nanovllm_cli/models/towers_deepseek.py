"""How DeepSeek-OCRs see: their configs -> VisionSpec, and what their folders call a tower's tensors. See `towers.py`. SAM, and
behind it in the second a Qwen2 whose queries look at what that makes, in the first a CLIP that reads it as its patches
(`SamSpec`); a page is cut into squares, and all of it is behind them.

Configs of the second are of two kinds, as transformers has them ("DeepseekOcr2ForConditionalGeneration"), and as the model was
published first, with code of its own ("DeepseekOCR2ForCausalLM"), which is not run; tensors have the same names in both. The
first has the latter kind alone ("DeepseekOCRForCausalLM"). Where a page lies in its grey square is as in transformers, up to a
pixel beside where that code puts it.
"""

from __future__ import annotations

import math
import re
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    activation_of,
    check_divides,
    check_only,
    colours_of,
    depth_of,
    heads_of,
    layers_of,
    pieces_of,
    resample_of,
    side_of,
    text_width,
    theta_of,
    weights_and_biases,
)
from nanovllm_cli.sam_spec import SamSpec
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_ASKED = "<|grounding|>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"
_TOKENS = ImageTokens("<image>", "<image>", line="\n", asked=_ASKED)
_MERGE = 4  # neither config says it: two convolutions that halve
_FIXED = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
          "rope_theta": 1e6}  # fmt: skip
"""Of what is behind SAM, where folders have code of their own."""
_SAM_KEYS = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""Of those folders -> transformers'."""
_SAM_ALSO = "global_attn_indexes", "downsample_channels", "patch_size", "window_size", "output_channels", "mlp_dim"
_CLIP = "clip-l-14-224"


def deepseek_ocr2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings. Pages are cut whatever "crop_to_patches" says, as transformers'
    processor does."""
    vision = config.section("vision_config")
    sam, behind = vision.section("sam_config"), vision.section("encoder_config")
    if behind.flag("use_sliding_window", False):
        raise UnsupportedError(f"{behind.where}: windows of what looks at images are not supported", ANOTHER)
    patch, side, hidden = side_of(sam, "patch_size", 16), side_of(sam, "image_size", 1024), behind.integer("hidden_size", 4096)
    heads = heads_of(behind, "num_attention_heads", hidden, 32, parts=2)
    key_heads = behind.integer("num_key_value_heads", heads)
    if heads % key_heads:
        raise CheckpointError(f"{behind.where}: {heads} heads can't share {key_heads} of keys", BROKEN)
    inner = math.floor(sam.integer("hidden_size", 768) * sam.number("mlp_ratio", 4.0))
    tower = TowerSpec(
        patch_size=patch,
        merge=_MERGE,
        hidden_size=hidden,
        num_layers=depth_of(behind, "num_hidden_layers", 32),
        num_heads=heads,
        key_heads=key_heads,
        intermediate_size=behind.integer("intermediate_size", 22016),
        out_size=text_width(config),
        activation=activation_of(behind, "silu"),
        norm="rms",
        eps=behind.number("rms_norm_eps", 1e-6),
        projector="joined",
        projector_eps=0.0,
        gated=True,
        theta=theta_of(behind),
        sam=sam_of(sam, _middle(sam, hidden), (side // patch) ** 2, inner),
    )
    return VisionSpec(tower, _rule(tower, images, side), _TOKENS, *colours_of(images, HALVES))


def deepseek_ocr2_code(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a folder with code of its own, whose settings of images are in that code."""
    vision = config.section("vision_config")
    width = vision.section("width")
    sam = _sam_values(width.section("sam_vit_b"), "global_attn_indexes")
    behind = {**_FIXED, "hidden_size": width.section("qwen2-0-5b").integer("dim", 896)}
    values = {**config.values, "vision_config": {"sam_config": sam, "encoder_config": behind}}
    return deepseek_ocr2(ConfigReader(values, config.where), ConfigReader({}, images.where))


def deepseek_ocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json; settings of images are in the folder's code, but for how many squares a page is cut into, which is as much
    as that can be told ("min_patches", "max_patches")."""
    check_only(config, tile_tag="2D", use_mla=False)
    check_only(config.section("projector_config"), projector_type="linear")
    vision = config.section("vision_config")
    width = vision.section("width")
    clip, said = width.section(_CLIP), width.section("sam_vit_b")
    sam = ConfigReader(_sam_values(said, *_SAM_ALSO), said.where)
    patch, side, hidden = side_of(sam, "patch_size", 16), side_of(vision, "image_size", 1024), clip.integer("width", 1024)
    check_divides(vision, side, 8 * _MERGE * patch, f"eighths of tokens of {_MERGE} x {_MERGE} patches of {patch}")
    inner = 4 * sam.integer("hidden_size", 768)
    tower = TowerSpec(
        patch_size=patch,
        merge=_MERGE,
        hidden_size=hidden,
        num_layers=depth_of(clip, "layers", 24),
        num_heads=heads_of(clip, "heads", hidden, 16, parts=1),
        intermediate_size=4 * hidden,
        out_size=text_width(config),
        activation="quick_gelu",
        norm="layer",
        eps=1e-5,
        projector="joined",
        projector_eps=0.0,
        positions=(side_of(clip, "image_size", 224) // side_of(clip, "patch_size", 14)) ** 2,
        sam=sam_of(sam, _middle(sam, hidden), (side // patch) ** 2, inner, queried=False)._replace(beside=True),
    )
    tile = side // 8 * 5
    least, most = pieces_of(images, tile, 2, 9)
    rule = SizeRule("pages", tower.cell, longest_side=side, resample=resample_of(images, 3), tile=tile, least_tiles=least,
                    most_tiles=most, in_lines=True, smaller=(tile, side // 2))  # fmt: skip
    return VisionSpec(tower, rule, _TOKENS, *colours_of(images, HALVES))


def _sam_values(said: ConfigReader, *also: str) -> dict[str, Any]:
    """As transformers' configs have them. also: keys that are the same there."""
    sam = {theirs: said.values[ours] for ours, theirs in _SAM_KEYS.items() if said.has(ours)}
    return sam | {key: said.values[key] for key in also if said.has(key)}


def _middle(sam: ConfigReader, out: int) -> int:
    middle = sam.values.get("downsample_channels") or [512, out]
    if not isinstance(middle, list) or len(middle) != 2 or middle[1] != out or type(middle[0]) is not int or middle[0] < 1:
        raise CheckpointError(f"{sam.where}: 'downsample_channels' must be two numbers, the second of them {out}", BROKEN)
    return middle[0]


def sam_of(sam: ConfigReader, middle: int, positions: int, inner: int, *, queried: bool = True) -> SamSpec:
    """inner: "mlp_dim" of a config that does not say it."""
    check_only(sam, hidden_act="gelu", qkv_bias=True, use_abs_pos=True, use_rel_pos=True, num_channels=3)
    hidden, depth = sam.integer("hidden_size", 768), depth_of(sam, "num_hidden_layers", 12)
    spec = SamSpec(
        hidden, depth, heads_of(sam, "num_attention_heads", hidden, 12, parts=1), sam.integer("mlp_dim", inner),
        sam.number("layer_norm_eps", 1e-6), sam.integer("window_size", 14),
        layers_of(sam, "global_attn_indexes", (2, 5, 8, 11), depth), positions, sam.integer("output_channels", 256), middle,
    )  # fmt: skip
    return spec if queried else spec._replace(queries=None)


def _rule(tower: TowerSpec, images: ConfigReader, side: int) -> SizeRule:
    """Squares have as many cells as there are queries."""
    assert tower.sam is not None
    assert tower.sam.queries is not None
    small, large = (math.isqrt(count) * tower.cell for count in tower.sam.queries)
    size = images.section("size")
    tile, made = images.integer("tile_size", small), {size.integer(key, large) for key in ("height", "width")}
    if (tile, side, made) != (small, large, {large}):
        told = f"the tower reads squares of {small} and {large} pixels, not of {tile} and {sorted({side, *made})}"
        raise CheckpointError(f"{images.where}: {told}", BROKEN)
    if (grey := images.values.get("background_color", [127, 127, 127])) != [127, 127, 127]:
        raise UnsupportedError(f"{images.where}: background_color {str(grey)[:40]} is not supported", "known: [127, 127, 127]")
    least, most = pieces_of(images, tile, 2, 6)
    return SizeRule("pages", tower.cell, longest_side=large, resample=resample_of(images, 3), tile=tile, least_tiles=least,
                    most_tiles=most)  # fmt: skip


_SAM, _BEHIND, _CLIP_LAYER = "sam_model.blocks.{i}", "qwen2_model.model.model.layers.{i}", "vision_model.transformer.layers.{i}"
_OF_BOTH = weights_and_biases({
    "patch": "sam_model.patch_embed.proj",
    "sam.{i}.attention_norm": f"{_SAM}.norm1",
    "sam.{i}.qkv": f"{_SAM}.attn.qkv",
    "sam.{i}.out": f"{_SAM}.attn.proj",
    "sam.{i}.mlp_norm": f"{_SAM}.norm2",
    "sam.{i}.up": f"{_SAM}.mlp.lin1",
    "sam.{i}.down": f"{_SAM}.mlp.lin2",
    "neck.first": "sam_model.neck.0",
    "neck.first_norm": "sam_model.neck.1",
    "neck.second": "sam_model.neck.2",
    "neck.second_norm": "sam_model.neck.3",
    "shrink.first": "sam_model.net_2",
    "shrink.second": "sam_model.net_3",
    "projector.out": "projector.layers",
}) | {
    "positions.weight": ("sam_model.pos_embed",),
    "sam.{i}.by_line": (f"{_SAM}.attn.rel_pos_h",),
    "sam.{i}.by_column": (f"{_SAM}.attn.rel_pos_w",),
    "separator.weight": ("view_seperator",),
}  # fmt: skip
DEEPSEEK_OCR_NAMES = _OF_BOTH | weights_and_biases({
    "pre_norm": "vision_model.pre_layrnorm",
    "layers.{i}.attention_norm": f"{_CLIP_LAYER}.layer_norm1",
    "layers.{i}.qkv": f"{_CLIP_LAYER}.self_attn.qkv_proj",
    "layers.{i}.out": f"{_CLIP_LAYER}.self_attn.out_proj",
    "layers.{i}.mlp_norm": f"{_CLIP_LAYER}.layer_norm2",
    "layers.{i}.up": f"{_CLIP_LAYER}.mlp.fc1",
    "layers.{i}.down": f"{_CLIP_LAYER}.mlp.fc2",
}) | {
    "behind.lead": ("vision_model.embeddings.class_embedding",),
    "behind.positions": ("vision_model.embeddings.position_embedding.weight",),
    "line_end.weight": ("image_newline",),
}  # fmt: skip
DEEPSEEK_OCR_UNREAD = re.compile(r"vision_model\.embeddings\.patch_embedding\.weight")
"""Its patches are SAM's rows."""
DEEPSEEK_OCR2_NAMES = _OF_BOTH | weights_and_biases({
    "layers.{i}.attention_norm": f"{_BEHIND}.input_layernorm",
    "layers.{i}.qkv": tuple(f"{_BEHIND}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": f"{_BEHIND}.self_attn.o_proj",
    "layers.{i}.mlp_norm": f"{_BEHIND}.post_attention_layernorm",
    "layers.{i}.up": (f"{_BEHIND}.mlp.gate_proj", f"{_BEHIND}.mlp.up_proj"),
    "layers.{i}.down": f"{_BEHIND}.mlp.down_proj",
    "post_norm": "qwen2_model.model.model.norm",
}) | {
    "queries.small": ("qwen2_model.query_768.weight",),
    "queries.large": ("qwen2_model.query_1024.weight",),
}  # fmt: skip
