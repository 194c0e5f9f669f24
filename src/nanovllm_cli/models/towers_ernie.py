"""How ERNIE 4.5 VL sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. A Qwen2-VL's
layers, of an image that is one moment, and a projector that reads two of these side by side (Baidu 2025).

Its folders' template may write another marker than transformers' (`_PUBLISHED`). Not covered: videos, whose frames have the time
written into their pixels.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.tower_configs import (
    CLIP,
    activation_of,
    check_only,
    depth_of,
    heads_of,
    of_any_area,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_PLACEHOLDER|>")  # the template writes what is around it
_PUBLISHED = replace(_TOKENS, marker="<|image@placeholder|>")
_PIXELS = 56 * 56, 28 * 28 * 6177


def ernie4_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of transformers' config, or of a published one, which is in one piece, names the token that stands for images and has
    sizes of joining beside those of texts."""
    vision = vision_section(config)
    is_published = config.has("im_patch_id")
    hidden = vision.integer("hidden_size", 1280)
    merge = vision.integer("spatial_merge_size", 2)
    check_only(vision, temporal_merge_size=2)
    check_only(config, spatial_conv_size=merge, temporal_conv_size=2, use_temporal_conv=True)
    tower = TowerSpec(
        patch_size=vision.integer("patch_size", 14),
        merge=merge,
        hidden_size=hidden,
        num_layers=depth_of(vision, "depth", 32),
        num_heads=heads_of(vision, "num_heads", hidden, parts=4),
        intermediate_size=vision.integer("intermediate_size", int(hidden * vision.number("mlp_ratio", 4))),
        out_size=text_width(config),
        activation=activation_of(vision, "quick_gelu"),
        norm="layer",
        eps=vision.number("rms_norm_eps", 1e-6),
        projector="timed",
        projector_eps=ConfigReader(text_config(config.values), config.where).number("rms_norm_eps", 1e-5),
        theta=theta_of(vision),
        post_norm=True,
    )
    return of_any_area(config, images, tower, _PUBLISHED if is_published else _TOKENS, CLIP, _PIXELS)


_BLOCK, _JOINED = "vision_model.blocks.{i}", "resampler_model"
ERNIE_NAMES = weights_and_biases({
    "patch": "vision_model.patch_embed.proj",
    "layers.{i}.attention_norm": f"{_BLOCK}.norm1",
    "layers.{i}.qkv": f"{_BLOCK}.attn.qkv",
    "layers.{i}.out": f"{_BLOCK}.attn.proj",
    "layers.{i}.mlp_norm": f"{_BLOCK}.norm2",
    "layers.{i}.up": f"{_BLOCK}.mlp.fc1",
    "layers.{i}.down": f"{_BLOCK}.mlp.fc2",
    "post_norm": "vision_model.ln",
    "projector.up": f"{_JOINED}.spatial_linear.0",
    "projector.down": f"{_JOINED}.spatial_linear.2",
    "projector.norm": f"{_JOINED}.spatial_linear.3",
    "projector.time.up": f"{_JOINED}.temporal_linear.0",
    "projector.time.down": f"{_JOINED}.temporal_linear.2",
    "projector.time_norm": f"{_JOINED}.temporal_linear.3",
    "projector.out": f"{_JOINED}.mlp",
    "projector.after_norm": f"{_JOINED}.after_norm",
})  # fmt: skip
