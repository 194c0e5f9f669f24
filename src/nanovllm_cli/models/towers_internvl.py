"""How InternVLs (2.5 to 3.5) and Qianfan-OCR see: their configs -> VisionSpec, and what their folders call a tower's tensors. See
`towers.py`. Squares of one size, with a class token; an image is cut into those that are nearest to its shape.

Folders are of two kinds: as transformers has them ("InternVLForConditionalGeneration"), and as they were published first, with
code of their own ("InternVLChatModel"), which is not run; their configs are put as the others have it. A Qianfan-OCR's have
configs of the one kind and tensors of the other.
"""

from __future__ import annotations

import re
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    activation_of,
    check_divides,
    check_only,
    check_squares,
    colours_of,
    depth_of,
    heads_of,
    pieces_of,
    resample_of,
    side_of,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_TOKENS = ImageTokens("<IMG_CONTEXT>", "<IMG_CONTEXT>", before="<img>", after="</img>", line="\n")


_QIANFAN_TOKENS = replace(_TOKENS, marker="<image>")


def internvl(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "internvl_vision")
    side, patch = side_of(vision, "image_size", 448), side_of(vision, "patch_size", 14)
    hidden, merge = vision.integer("hidden_size", 1024), _merge(config)
    check_divides(vision, side, patch * merge, f"tokens of {merge} x {merge} patches of {patch}")
    check_only(vision, use_qk_norm=False, use_absolute_position_embeddings=True, use_mean_pooling=True)
    check_only(config, projector_hidden_act="gelu", vision_feature_layer=-1, vision_feature_select_strategy="default")
    if (norm := vision.text("norm_type", "layer_norm")) not in ("layer_norm", "rms_norm"):
        raise UnsupportedError(f"{vision.where}: norm_type {norm[:40]!r} is not supported", "known: layer_norm, rms_norm")
    width = text_width(config)
    tower = TowerSpec(
        patch_size=patch,
        merge=merge,
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 24),
        num_heads=heads_of(vision, "num_attention_heads", hidden, parts=2),
        intermediate_size=vision.integer("intermediate_size", 4096),
        out_size=width,
        activation=activation_of(vision, "gelu"),
        norm="layer" if norm == "layer_norm" else "rms",
        eps=vision.number("layer_norm_eps", 1e-6),
        projector="joined",
        projector_eps=1e-5,
        projector_size=width,
        qkv_bias=vision.flag("attention_bias", False),
        patch_bias=True,
        positions=(side // patch) ** 2,
        stretch="bicubic",
        lead=True,
        scaled=True,
    )
    return VisionSpec(tower, _rule(tower, images, side), _TOKENS, *colours_of(images, CLIP))


def qianfan_ocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """An InternVL of another name, with a template of its own, whose attention has biases unless its config says otherwise."""
    vision = vision_section(config, "qianfan_ocr_vision")
    own = {"model_type": "internvl_vision", "attention_bias": vision.flag("attention_bias", True)}
    values = {**config.values, "vision_config": {**vision.values, **own}}
    return replace(internvl(ConfigReader(values, config.where), images), tokens=_QIANFAN_TOKENS)


def internvl_chat(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a folder with code of its own. What its config leaves out is as that code has it."""
    said = config.section("vision_config")
    check_only(config, ps_version="v2", select_layer=-1, pad2square=False)
    usual = {"hidden_size": 3200, "num_hidden_layers": 48, "num_attention_heads": 25, "intermediate_size": 12800,
             "image_size": 224, "norm_type": "rms_norm"}  # fmt: skip
    kept = ("num_channels", "patch_size", "hidden_act", "layer_norm_eps", *usual)
    vision = usual | {key: said.values[key] for key in kept if said.has(key)}
    vision |= {"attention_bias": said.flag("qkv_bias", False), "use_qk_norm": said.flag("qk_normalization", True)}
    if (side := config.integer("force_image_size", vision["image_size"])) != vision["image_size"]:
        raise UnsupportedError(f"{config.where}: positions for another image_size than force_image_size, {side}", ANOTHER)
    least, most = config.integer("min_dynamic_patch", 1), config.integer("max_dynamic_patch", 6)
    if not config.flag("dynamic_image_size", False):
        least = most = 1
    if most > 1 and not config.flag("use_thumbnail", False):
        raise UnsupportedError(f"{config.where}: pieces of an image without all of it (use_thumbnail) are not supported", ANOTHER)
    values = {"architectures": config.values["architectures"], "text_config": config.values.get("text_config"),
              "vision_config": vision, "downsample_ratio": config.number("downsample_ratio", 0.5)}  # fmt: skip
    colours = {key: images.values[key] for key in _IMAGENET if images.has(key)}
    settings = {"min_patches": least, "max_patches": most} | _IMAGENET | colours
    return internvl(ConfigReader(values, config.where), ConfigReader(settings, images.where))


def _rule(tower: TowerSpec, images: ConfigReader, side: int) -> SizeRule:
    """Pieces are made whatever "crop_to_patches" says, as transformers' processor does."""
    check_squares(images, side)
    least, most = pieces_of(images, side, 1, 12)
    return SizeRule("canvas", tower.cell, resample=resample_of(images, 3), tile=side, least_tiles=least, most_tiles=most)


def _merge(config: ConfigReader) -> int:
    """Of a share of a side's patches, which are joined."""
    share = config.number("downsample_ratio", 0.5)
    merge = round(1 / share) if 1 / 16 <= share <= 1 else 0
    if merge * share != 1:
        raise CheckpointError(f"{config.where}: 'downsample_ratio' must be one whole number's part, not {share}", BROKEN)
    return merge


_CHAT_LAYER = "vision_model.encoder.layers.{i}"
INTERNVL_CHAT_NAMES = weights_and_biases({
    "patch": "vision_model.embeddings.patch_embedding",
    "layers.{i}.attention_norm": f"{_CHAT_LAYER}.norm1",
    "layers.{i}.qkv": f"{_CHAT_LAYER}.attn.qkv",
    "layers.{i}.out": f"{_CHAT_LAYER}.attn.proj",
    "layers.{i}.mlp_norm": f"{_CHAT_LAYER}.norm2",
    "layers.{i}.up": f"{_CHAT_LAYER}.mlp.fc1",
    "layers.{i}.down": f"{_CHAT_LAYER}.mlp.fc2",
    "projector.norm": "mlp1.0",
    "projector.up": "mlp1.1",
    "projector.down": "mlp1.3",
}) | {
    "lead.weight": ("vision_model.embeddings.class_embedding",),
    "positions.weight": ("vision_model.embeddings.position_embedding",),
    "layers.{i}.attention_scale.weight": (f"{_CHAT_LAYER}.ls1",),
    "layers.{i}.mlp_scale.weight": (f"{_CHAT_LAYER}.ls2",),
}  # fmt: skip
INTERNVL_UNREAD = re.compile(r"vision_tower\.embeddings\.mask_token")
"""What stood for hidden patches in training, where a config has use_mask_token."""
_LAYER = "vision_tower.encoder.layer.{i}"
INTERNVL_NAMES = weights_and_biases({
    "patch": "vision_tower.embeddings.patch_embeddings.projection",
    "layers.{i}.attention_norm": f"{_LAYER}.layernorm_before",
    "layers.{i}.qkv": tuple(f"{_LAYER}.attention.{part}_proj" for part in "qkv"),
    "layers.{i}.out": f"{_LAYER}.attention.projection_layer",
    "layers.{i}.mlp_norm": f"{_LAYER}.layernorm_after",
    "layers.{i}.up": f"{_LAYER}.mlp.fc1",
    "layers.{i}.down": f"{_LAYER}.mlp.fc2",
    "projector.norm": "multi_modal_projector.layer_norm",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}) | {
    "lead.weight": ("vision_tower.embeddings.cls_token",),
    "positions.weight": ("vision_tower.embeddings.position_embeddings",),
    "layers.{i}.attention_scale.weight": (f"{_LAYER}.lambda_1",),
    "layers.{i}.mlp_scale.weight": (f"{_LAYER}.lambda_2",),
}  # fmt: skip
