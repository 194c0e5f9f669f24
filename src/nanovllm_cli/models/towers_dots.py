"""How dots.ocr sees, and HyperCLOVA X Vision 2: their configs -> VisionSpec, and what their folders call a tower's tensors. See
`towers.py`. The first has a tower of its own, the second Qwen2.5-VL's with one matrix more behind it; both have a text's
positions.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.tower_configs import (
    CLIP,
    check_only,
    depth_of,
    heads_of,
    of_any_area,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_qwen import QWEN2_5_NAMES, qwen2_5
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<|imgpad|>", "<|imgpad|>")  # the template writes what is around it


def dots_ocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "dots_vit")
    check_only(vision, post_norm=True, use_bias=False, temporal_patch_size=1)
    hidden, merge = vision.integer("embed_dim", 1536), vision.integer("spatial_merge_size", 2)
    tower = TowerSpec(
        patch_size=vision.integer("patch_size", 14),
        merge=merge,
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 42),
        num_heads=heads_of(vision, "num_attention_heads", hidden, 12, parts=4),
        intermediate_size=vision.integer("intermediate_size", 4224),
        out_size=vision.integer("hidden_size", 1536),
        activation="silu",
        gated=True,
        bias=False,
        patch_bias=True,
        norm="rms",
        eps=vision.number("rms_norm_eps", 1e-5),
        theta=1e4,
        pre_norm=True,
        post_norm=True,
        projector="merger",
        projector_eps=1e-6,
        projector_size=hidden * merge**2,
        projector_bias=True,
    )
    return replace(of_any_area(config, images, tower, _TOKENS, CLIP, (3136, 11289600)), has_grid=False)


def hyperclovax(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a HyperCLOVA X Vision 2."""
    vision = vision_section(config)
    merged = vision.integer("out_hidden_size", 3584)
    values = {**config.values, "vision_config": {**vision.values, "out_hidden_size": text_width(config)}}
    spec = qwen2_5(ConfigReader(values, config.where), images)
    return replace(spec, tower=replace(spec.tower, merged_size=merged), has_grid=False)


_LAYER = "vision_tower.blocks.{i}"
DOTS_OCR_NAMES = weights_and_biases({
    "patch": "vision_tower.patch_embed.patchifier.proj",
    "pre_norm": "vision_tower.patch_embed.patchifier.norm",
    "layers.{i}.attention_norm": f"{_LAYER}.norm1",
    "layers.{i}.qkv": f"{_LAYER}.attn.qkv",
    "layers.{i}.out": f"{_LAYER}.attn.proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.norm2",
    "layers.{i}.up": (f"{_LAYER}.mlp.fc1", f"{_LAYER}.mlp.fc3"),
    "layers.{i}.down": f"{_LAYER}.mlp.fc2",
    "post_norm": "vision_tower.post_trunk_norm",
    "projector.norm": "vision_tower.merger.ln_q",
    "projector.up": "vision_tower.merger.mlp.0",
    "projector.down": "vision_tower.merger.mlp.2",
})  # fmt: skip
HYPERCLOVAX_NAMES = {
    ours: tuple(each.replace("visual.", "vision_model.") for each in theirs) for ours, theirs in QWEN2_5_NAMES.items()
} | weights_and_biases({"projector.out": "projector"})
