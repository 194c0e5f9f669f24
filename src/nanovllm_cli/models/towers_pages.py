"""How GLMs (4.1V to 4.6V, GLM-OCR) and PaddleOCR-VL see: their configs -> VisionSpec, and what their folders call a tower's
tensors. See `towers.py`."""

from __future__ import annotations

from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    SIGLIP_NAMES,
    activation_of,
    depth_of,
    heads_of,
    of_any_area,
    positions_of,
    siglip_shape,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_GLM_TOKENS = ImageTokens("<|image|>", "<|image|>")  # the templates write what is around them
_PADDLE_TOKENS = ImageTokens("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_PLACEHOLDER|>")


def glm4v(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Its MLPs are as wide as the decoder, and the projector's as "intermediate_size"."""
    vision = vision_section(config)
    if vision.flag("attention_bias", False):
        raise UnsupportedError(f"{vision.where}: attention_bias true is not supported", ANOTHER)
    out = vision.integer("out_hidden_size", 4096)
    tower = TowerSpec(
        **_glm_shape(vision, 1536, 12),
        intermediate_size=out,
        out_size=out,
        projector_size=vision.integer("intermediate_size", 13696),
        bias=False,
        positions=positions_of(vision, vision.integer("image_size", 336), vision.integer("patch_size", 14)),
        stretch="bicubic",
        pre_norm=True,
    )
    return _of_glm(config, images, tower)


def glm_ocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config)
    out = vision.integer("out_hidden_size", 1536)
    tower = TowerSpec(
        **_glm_shape(vision, 1024, 16),
        intermediate_size=vision.integer("intermediate_size", 4096),
        out_size=out,
        projector_size=3 * out,
        bias=vision.flag("attention_bias", True),
        qk_norm=True,
    )
    return _of_glm(config, images, tower)


def _glm_shape(vision: ConfigReader, hidden: int, heads: int) -> dict[str, Any]:
    """What they have in common, as arguments of a TowerSpec. hidden, heads: of a config that says nothing."""
    hidden = vision.integer("hidden_size", hidden)
    activation = activation_of(vision, "silu")
    if activation != "silu":
        raise UnsupportedError(f"{vision.where}: hidden_act {activation!r} is not supported", "known: silu")
    return {
        "patch_size": vision.integer("patch_size", 14),
        "merge": vision.integer("spatial_merge_size", 2),
        "frames": vision.integer("temporal_patch_size", 2),
        "hidden_size": hidden,
        "num_layers": depth_of(vision, "depth", 24),
        "num_heads": heads_of(vision, "num_heads", hidden, heads, parts=4),
        "activation": activation,
        "gated": True,
        "norm": "rms",
        "eps": vision.number("rms_norm_eps", 1e-5),
        "patch_bias": True,
        "post_norm": True,
        "projector": "gated",
        "projector_eps": 1e-5,
        "theta": theta_of(vision),
    }


def _of_glm(config: ConfigReader, images: ConfigReader, tower: TowerSpec) -> VisionSpec:
    """An image is read as a video of so many frames, and its pixels are counted in all of them."""
    pixels = 112 * 112, 28 * 28 * 15000
    unread = ("min_pixels", "max_pixels")  # by its processor in transformers, which has "size" alone
    images = ConfigReader({key: value for key, value in images.values.items() if key not in unread}, images.where)
    return of_any_area(config, images, tower, _GLM_TOKENS, CLIP, pixels, small="floor", frames=tower.frames)


def paddleocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config)
    tower = TowerSpec(
        patch_size=vision.integer("patch_size", 14),
        merge=vision.integer("spatial_merge_size", 2),
        projector="merger",
        projector_eps=1e-5,
        positions=positions_of(vision, vision.integer("image_size", 384), vision.integer("patch_size", 14)),
        stretch="bilinear",
        theta=theta_of(vision),
        **siglip_shape(config, vision, 1152, 16, inner=4304, layers=27, parts=4),
    )
    return of_any_area(config, images, tower, _PADDLE_TOKENS, CLIP, (384 * 384, 1536 * 1536), small="round")


_GLM: dict[str, str | tuple[str, ...]] = {
    "patch": "visual.patch_embed.proj",
    "layers.{i}.attention_norm": "visual.blocks.{i}.norm1",
    "layers.{i}.qkv": "visual.blocks.{i}.attn.qkv",
    "layers.{i}.out": "visual.blocks.{i}.attn.proj",
    "layers.{i}.mlp_norm": "visual.blocks.{i}.norm2",
    "layers.{i}.up": ("visual.blocks.{i}.mlp.gate_proj", "visual.blocks.{i}.mlp.up_proj"),
    "layers.{i}.down": "visual.blocks.{i}.mlp.down_proj",
    "post_norm": "visual.post_layernorm",
    "projector.join": "visual.downsample",
    "projector.first": "visual.merger.proj",
    "projector.norm": "visual.merger.post_projection_norm",
    "projector.up": ("visual.merger.gate_proj", "visual.merger.up_proj"),
    "projector.down": "visual.merger.down_proj",
}
GLM4V_NAMES = weights_and_biases(
    _GLM | {"pre_norm": "visual.post_conv_layernorm", "positions": "visual.embeddings.position_embedding"}
)
GLM_OCR_NAMES = weights_and_biases(
    _GLM | {"layers.{i}.head_norm": ("visual.blocks.{i}.attn.q_norm", "visual.blocks.{i}.attn.k_norm")}
)
PADDLEOCR_NAMES = {
    ours: tuple(each.replace("vision_tower.", "visual.") for each in theirs)
    for ours, theirs in weights_and_biases(SIGLIP_NAMES | {
        "projector.norm": "projector.pre_norm", "projector.up": "projector.linear_1", "projector.down": "projector.linear_2",
    }).items()
}  # fmt: skip
