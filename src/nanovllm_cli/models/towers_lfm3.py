"""How LFM3-VL sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. Images of any shape,
in one piece; most layers convolve, the others have fewer heads of keys than of queries. Its tokens' positions are a text's."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.tower_configs import (
    CLIP,
    check_only,
    depth_of,
    heads_of,
    key_heads_of,
    of_any_area,
    side_of,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

MAX_TAPS = 63
_CONV, _ATTENTION = "conv", "full_attention"
_TOKENS = ImageTokens("<|image_pad|>", "<|image_pad|>")  # the template writes what is around it


def lfm3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "lfm3_vl_vision")
    check_only(vision, hidden_act="silu")
    check_only(config, projector_hidden_act="gelu")
    hidden, depth = vision.integer("hidden_size", 1024), depth_of(vision, "num_hidden_layers", 14)
    heads = heads_of(vision, "num_attention_heads", hidden, parts=4)
    taps = vision.integer("conv_kernel_size", 3)
    if taps % 2 == 0 or taps > MAX_TAPS:
        raise CheckpointError(f"{vision.where}: 'conv_kernel_size' must be odd and at most {MAX_TAPS}, not {taps}", BROKEN)
    tower = TowerSpec(
        patch_size=side_of(vision, "patch_size", 16),
        merge=vision.integer("spatial_merge_size", 2),
        frames=side_of(vision, "temporal_patch_size", 2),
        hidden_size=hidden,
        num_layers=depth,
        num_heads=heads,
        key_heads=key_heads_of(vision, heads),
        convolves=_convolving(vision, depth),
        taps=taps,
        intermediate_size=vision.integer("intermediate_size", 2560),
        out_size=text_width(config),
        activation="silu",
        gated=True,
        bias=False,
        norm="rms",
        eps=vision.number("norm_eps", 1e-5),
        theta=theta_of(vision, 1e6),
        pre_norm=True,
        qk_norm=True,
        projector="merger",
        projector_eps=1e-6,
        projector_size=config.integer("projector_hidden_size", 4096),
        projector_bias=config.flag("projector_bias", True),
    )
    return replace(of_any_area(config, images, tower, _TOKENS, CLIP, (56 * 56, 1280 * 28 * 28)), has_grid=False)


def _convolving(vision: ConfigReader, depth: int) -> tuple[int, ...]:
    types = vision.kinds("layer_types", depth, _CONV, _ATTENTION)
    if types is None:
        types = [_CONV if i < 2 or i % 2 else _ATTENTION for i in range(depth)]
    return tuple(i for i, kind in enumerate(types) if kind == _CONV)


_LAYER = "vision_tower.layers.{i}"
LFM3_NAMES = weights_and_biases({
    "patch": "vision_tower.patchifier",
    "pre_norm": "vision_tower.embedding_norm",
    "layers.{i}.attention_norm": f"{_LAYER}.operator_norm",
    "layers.{i}.conv_in": f"{_LAYER}.conv.in_proj",
    "layers.{i}.conv": f"{_LAYER}.conv.spatial_conv",
    "layers.{i}.conv_out": f"{_LAYER}.conv.out_proj",
    "layers.{i}.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.head_norm": tuple(f"{_LAYER}.self_attn.{part}_layernorm" for part in "qk"),
    "layers.{i}.out": f"{_LAYER}.self_attn.out_proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.ffn_norm",
    "layers.{i}.up": (f"{_LAYER}.feed_forward.w1", f"{_LAYER}.feed_forward.w3"),
    "layers.{i}.down": f"{_LAYER}.feed_forward.w2",
    "projector.norm": "multi_modal_projector.layer_norm",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
})  # fmt: skip
