"""How Qwens see (Omnis do by the towers of others), and EXAONE 4.5, whose tower is Qwen2.5-VL's: their configs -> VisionSpec, and
what their folders call a tower's tensors. See `towers.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.tower_configs import (
    CLIP,
    HALVES,
    activation_of,
    deep_of,
    depth_of,
    heads_of,
    key_heads_of,
    layers_of,
    of_any_area,
    square,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<|image_pad|>", "<|image_pad|>")  # the template writes what is around it
_OMNI_TOKENS = ImageTokens("<|IMAGE|>", "<|IMAGE|>")


def qwen2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config)
    hidden = vision.integer("embed_dim", 1280)
    inner = int(hidden * vision.number("mlp_ratio", 4))
    shape = _qwen_shape(vision, "quick_gelu", hidden, patch=14)
    out = vision.integer("hidden_size", 3584)
    tower = TowerSpec(**shape, intermediate_size=inner, out_size=out, norm="layer")
    return of_any_area(config, images, tower, _TOKENS, CLIP, (56 * 56, 16384 * 28 * 28))


def qwen2_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config)
    shape = _qwen_shape(vision, "silu", vision.integer("hidden_size", 3584), patch=14)
    side = shape["patch_size"] * shape["merge"]
    tower = TowerSpec(
        **shape,
        intermediate_size=vision.integer("intermediate_size", 3420),
        out_size=vision.integer("out_hidden_size", 3584),
        norm="rms",
        gated=True,
        window=vision.integer("window_size", 112, least=side) // side,
        full=layers_of(vision, "fullatt_block_indexes", (7, 15, 23, 31), shape["num_layers"]),
    )
    return of_any_area(config, images, tower, _TOKENS, CLIP, (56 * 56, 16384 * 28 * 28))


def omni2_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    return replace(qwen2_5(config, images), tokens=_OMNI_TOKENS)


def exaone4_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Heads of queries share those of keys; positions of an image's tokens are a text's."""
    vision = vision_section(config, "exaone4_5_vision")
    spec = qwen2_5(config, images)
    tower = replace(spec.tower, key_heads=key_heads_of(vision, spec.tower.num_heads))
    return replace(spec, tower=tower, has_grid=False)


def qwen3_vl(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    return _qwen3(config, images, has_deep=True)


def qwen3_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same tower; of the list of layers that its configs have still, an empty one, nothing is read."""
    return _qwen3(config, images, has_deep=False)


def _qwen3(config: ConfigReader, images: ConfigReader, *, has_deep: bool) -> VisionSpec:
    vision = vision_section(config)
    shape = _qwen_shape(vision, "gelu_pytorch_tanh", vision.integer("hidden_size", 1152), patch=16)
    tower = TowerSpec(
        **shape,
        intermediate_size=vision.integer("intermediate_size", 4304),
        out_size=vision.integer("out_hidden_size", 3584),
        norm="layer",
        patch_bias=True,
        positions=square(vision, vision.integer("num_position_embeddings", 2304)),
        deep=deep_of(vision, (8, 16, 24), shape["num_layers"]) if has_deep else (),
    )
    return of_any_area(config, images, tower, _TOKENS, HALVES, (1 << 16, 1 << 24))


def _qwen_shape(vision: ConfigReader, activation: str, hidden: int, patch: int) -> dict[str, Any]:
    """What they have in common, as arguments of a TowerSpec. activation, patch: of a config that says nothing."""
    return {
        "patch_size": vision.integer("patch_size", patch),
        "merge": vision.integer("spatial_merge_size", 2),
        "frames": vision.integer("temporal_patch_size", 2),
        "hidden_size": hidden,
        "num_layers": depth_of(vision, "depth", 27 if patch == 16 else 32),
        "num_heads": heads_of(vision, "num_heads", hidden, parts=4),
        "activation": activation_of(vision, activation),
        "eps": 1e-6,
        "projector": "merger",
        "projector_eps": 1e-6,
        "theta": theta_of(vision),
    }


_QWEN_NAMES: dict[str, str | tuple[str, ...]] = {
    "patch": "visual.patch_embed.proj",
    "layers.{i}.attention_norm": "visual.blocks.{i}.norm1",
    "layers.{i}.qkv": "visual.blocks.{i}.attn.qkv",
    "layers.{i}.out": "visual.blocks.{i}.attn.proj",
    "layers.{i}.mlp_norm": "visual.blocks.{i}.norm2",
}
_QWEN2_MERGER: dict[str, str | tuple[str, ...]] = {
    "projector.norm": "visual.merger.ln_q",
    "projector.up": "visual.merger.mlp.0",
    "projector.down": "visual.merger.mlp.2",
}
QWEN2_NAMES = weights_and_biases({
    **_QWEN_NAMES,
    **_QWEN2_MERGER,
    "layers.{i}.up": "visual.blocks.{i}.mlp.fc1",
    "layers.{i}.down": "visual.blocks.{i}.mlp.fc2",
})  # fmt: skip
QWEN2_5_NAMES = weights_and_biases({
    **_QWEN_NAMES,
    **_QWEN2_MERGER,
    "layers.{i}.up": ("visual.blocks.{i}.mlp.gate_proj", "visual.blocks.{i}.mlp.up_proj"),
    "layers.{i}.down": "visual.blocks.{i}.mlp.down_proj",
})  # fmt: skip
OMNI2_5_NAMES = QWEN2_5_NAMES | weights_and_biases(
    {"layers.{i}.qkv": tuple(f"visual.blocks.{{i}}.attn.{part}" for part in "qkv")}
)
QWEN3_NAMES = weights_and_biases({
    **_QWEN_NAMES,
    "positions": "visual.pos_embed",
    "layers.{i}.up": "visual.blocks.{i}.mlp.linear_fc1",
    "layers.{i}.down": "visual.blocks.{i}.mlp.linear_fc2",
    "projector.norm": "visual.merger.norm",
    "projector.up": "visual.merger.linear_fc1",
    "projector.down": "visual.merger.linear_fc2",
    "deep.{i}.norm": "visual.deepstack_merger_list.{i}.norm",
    "deep.{i}.up": "visual.deepstack_merger_list.{i}.linear_fc1",
    "deep.{i}.down": "visual.deepstack_merger_list.{i}.linear_fc2",
})  # fmt: skip
OMNI3_NAMES = QWEN3_NAMES | weights_and_biases({
    **_QWEN2_MERGER,
    "deep.{i}.norm": "visual.merger_list.{i}.ln_q",
    "deep.{i}.up": "visual.merger_list.{i}.mlp.0",
    "deep.{i}.down": "visual.merger_list.{i}.mlp.2",
})  # fmt: skip
