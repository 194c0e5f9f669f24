"""Which families of models see: what their configs say of it -> VisionSpec, and what their folders call a tower's tensors.

Two files say it. config.json has the tower ("vision_config"); what an image is made into before is in the image processor's
settings, preprocessor_config.json or a section of processor_config.json. Keys that a file leaves out have transformers' defaults,
or, of images, those of the published models. Both files are untrusted: whatever is read is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MAX_SIDE,
    SIGLIP_NAMES,
    Three,
    activation_of,
    check_width,
    colours_of,
    depth_of,
    heads_of,
    layers_of,
    resample_of,
    siglip_shape,
    square,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_gemma4 import GEMMA4_NAMES, gemma4
from nanovllm_cli.models.towers_tiled import IDEFICS3_NAMES, LFM2_NAMES, idefics3, lfm2
from nanovllm_cli.vision_spec import ImageTokens, SizeRule, TowerSpec, VisionSpec

_CLIP: tuple[Three, Three] = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_QWEN_TOKENS = ImageTokens("<|image_pad|>", "<|image_pad|>")  # the template writes what is around it
_GEMMA_TOKENS = ImageTokens(
    "<start_of_image>", "<image_soft_token>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"
)
_MISTRAL_TOKENS = ImageTokens("[IMG]", "[IMG]", line_end="[IMG_BREAK]", last_end="[IMG_END]")

Read = Callable[[ConfigReader, ConfigReader], VisionSpec]
"""Of config.json, and of the image processor's settings."""


@dataclass(frozen=True, slots=True, eq=False)
class TowerFamily:
    """names: our names of tensors, {i} for a layer -> those in its folders, of which ours has the rows behind each other. What a
    name may begin with is left to who reads them."""

    read: Read
    names: Mapping[str, tuple[str, ...]]


def tower_family(config: Mapping[str, Any]) -> TowerFamily | None:
    """By "architectures", as written in config.json; None where nothing here knows how such a model sees, if it does."""
    names = config.get("architectures")
    return TOWERS.get(str(names[0])) if isinstance(names, list) and names else None


def _qwen2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config)
    hidden = vision.integer("embed_dim", 1280)
    inner = int(hidden * vision.number("mlp_ratio", 4))
    shape = _qwen_shape(vision, "quick_gelu", hidden, patch=14)
    out = vision.integer("hidden_size", 3584)
    tower = TowerSpec(**shape, intermediate_size=inner, out_size=out, norm="layer")
    return _qwen(config, images, tower, _CLIP, (56 * 56, 16384 * 28 * 28))


def _qwen2_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
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
    return _qwen(config, images, tower, _CLIP, (56 * 56, 16384 * 28 * 28))


def _qwen3_vl(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    return _qwen3(config, images, has_deep=True)


def _qwen3_5(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same tower; of the list of layers that its configs have still, an empty one, nothing is read."""
    return _qwen3(config, images, has_deep=False)


def _qwen3(config: ConfigReader, images: ConfigReader, *, has_deep: bool) -> VisionSpec:
    vision = vision_section(config)
    shape = _qwen_shape(vision, "gelu_pytorch_tanh", vision.integer("hidden_size", 1152), patch=16)
    deep = layers_of(vision, "deepstack_visual_indexes", (8, 16, 24), shape["num_layers"]) if has_deep else ()
    if list(deep) != sorted(set(deep)):
        raise CheckpointError(f"{vision.where}: 'deepstack_visual_indexes' must be in order, and each once", BROKEN)
    tower = TowerSpec(
        **shape,
        intermediate_size=vision.integer("intermediate_size", 4304),
        out_size=vision.integer("out_hidden_size", 3584),
        norm="layer",
        patch_bias=True,
        positions=square(vision, vision.integer("num_position_embeddings", 2304)),
        deep=deep,
    )
    return _qwen(config, images, tower, HALVES, (1 << 16, 1 << 24))


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


def _qwen(
    config: ConfigReader, images: ConfigReader, tower: TowerSpec, colours: tuple[Three, Three], pixels: tuple[int, int]
) -> VisionSpec:
    """colours: mean and deviation; pixels: the fewest and the most, all of settings that say nothing."""
    check_width(config, tower)
    size = images.section("size")
    least, most = (
        images.integer(f"{bound}_pixels", size.integer(edge, size.integer(f"{bound}_pixels", usual)))
        for bound, edge, usual in (("min", "shortest_edge", pixels[0]), ("max", "longest_edge", pixels[1]))
    )
    if not least <= most <= MAX_PIXELS:
        raise CheckpointError(
            f"{images.where}: images of {least} to {most} pixels; the second must be the larger, and at most {MAX_PIXELS}", BROKEN
        )
    rule = SizeRule("area", tower.cell, min_pixels=least, max_pixels=most, resample=resample_of(images, 3))
    return VisionSpec(tower, rule, _QWEN_TOKENS, *colours_of(images, colours), has_grid=True)


def _gemma3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config, "siglip_vision_model")
    side, patch = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    cells = math.isqrt(square(config, config.integer("mm_tokens_per_image", 256), "mm_tokens_per_image"))
    if side > MAX_SIDE or side % (patch * cells):
        raise CheckpointError(
            f"{vision.where}: images of {side} x {side} pixels in patches of {patch} don't make {cells} x {cells} tokens", BROKEN
        )
    shape = siglip_shape(config, vision)
    tower = TowerSpec(
        patch_size=patch,
        merge=side // patch // cells,
        projector="pooled",
        projector_eps=shape["eps"],
        positions=(side // patch) ** 2,
        **shape,
    )
    size = images.section("size")
    made = {size.integer(key, side) for key in ("height", "width")}
    if made != {side}:
        raise CheckpointError(f"{images.where}: the tower reads images of {side} x {side} pixels, not {sorted(made)}", BROKEN)
    if images.flag("do_pan_and_scan", False):
        raise UnsupportedError(f"{images.where}: images that are also read in parts (do_pan_and_scan) are not supported", ANOTHER)
    rule = SizeRule("square", side, longest_side=side, resample=resample_of(images, 2))
    return VisionSpec(tower, rule, _GEMMA_TOKENS, *colours_of(images, HALVES), whole=True)


def _mistral3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config, "pixtral")
    hidden = vision.integer("hidden_size", 1024)
    for key, only in (("projector_hidden_act", "gelu"), ("multimodal_projector_bias", False), ("vision_feature_layer", -1)):
        if (said := config.values.get(key, only)) not in (only, [only]):
            raise UnsupportedError(f"{config.where}: {key} {str(said)[:40]!r} is not supported", f"known: {only}")
    text = ConfigReader(text_config(config.values), config.where)
    tower = TowerSpec(
        patch_size=vision.integer("patch_size", 14),
        merge=config.integer("spatial_merge_size", 2),
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 24),
        num_heads=heads_of(vision, "num_attention_heads", hidden, parts=4),
        intermediate_size=vision.integer("intermediate_size", 4096),
        out_size=text_width(config),
        activation=activation_of(vision, "gelu"),
        norm="rms",
        eps=1e-5,
        projector="patch_merger",
        projector_eps=text.number("rms_norm_eps", 1e-5),
        frames=0,
        gated=True,
        bias=False,
        theta=theta_of(vision),
        dealt=True,
        pre_norm=True,
    )
    longest = images.section("size").integer("longest_edge", vision.integer("image_size", 1540))
    if not tower.cell <= longest <= MAX_SIDE:
        raise CheckpointError(
            f"{images.where}: 'longest_edge' must be from {tower.cell} to {MAX_SIDE} pixels, not {longest}", BROKEN
        )
    rule = SizeRule("longest", tower.cell, longest_side=longest, resample=resample_of(images, 3))
    return VisionSpec(tower, rule, _MISTRAL_TOKENS, *colours_of(images, _CLIP))


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
GEMMA3_NAMES = weights_and_biases(SIGLIP_NAMES | {"projector.norm": "multi_modal_projector.mm_soft_emb_norm"}) | {
    "projector.out.weight": ("multi_modal_projector.mm_input_projection_weight",)
}
MISTRAL3_NAMES = weights_and_biases({
    "patch": "vision_tower.patch_conv",
    "pre_norm": "vision_tower.ln_pre",
    "layers.{i}.attention_norm": "vision_tower.transformer.layers.{i}.attention_norm",
    "layers.{i}.qkv": tuple(f"vision_tower.transformer.layers.{{i}}.attention.{part}_proj" for part in "qkv"),
    "layers.{i}.out": "vision_tower.transformer.layers.{i}.attention.o_proj",
    "layers.{i}.mlp_norm": "vision_tower.transformer.layers.{i}.ffn_norm",
    "layers.{i}.up": tuple(f"vision_tower.transformer.layers.{{i}}.feed_forward.{part}_proj" for part in ("gate", "up")),
    "layers.{i}.down": "vision_tower.transformer.layers.{i}.feed_forward.down_proj",
    "projector.norm": "multi_modal_projector.norm",
    "projector.join": "multi_modal_projector.patch_merger.merging_layer",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
})  # fmt: skip

_QWEN3_VL, _QWEN3_5 = TowerFamily(_qwen3_vl, QWEN3_NAMES), TowerFamily(_qwen3_5, QWEN3_NAMES)
_IDEFICS3 = TowerFamily(idefics3, IDEFICS3_NAMES)
TOWERS: dict[str, TowerFamily] = {
    "Gemma3ForConditionalGeneration": TowerFamily(_gemma3, GEMMA3_NAMES),
    "Gemma4ForConditionalGeneration": TowerFamily(gemma4, GEMMA4_NAMES),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "Lfm2VlForConditionalGeneration": TowerFamily(lfm2, LFM2_NAMES),
    "Mistral3ForConditionalGeneration": TowerFamily(_mistral3, MISTRAL3_NAMES),
    "Qwen2VLForConditionalGeneration": TowerFamily(_qwen2, QWEN2_NAMES),
    "Qwen2_5_VLForConditionalGeneration": TowerFamily(_qwen2_5, QWEN2_5_NAMES),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}
