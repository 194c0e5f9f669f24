"""How a Gemma 4 sees: its configs -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`.

An image is made as large as its budget of tokens allows, and keeps its shape. Colours reach the tower from 0 to 1, which makes
them -1 to 1. In the larger models (26B-A4B, 31B), tokens of an image see all of it in layers with a window, and the tower's rows
are standardized; in the smaller ones (E2B, E4B), its matrices are clipped. 12B sees without layers, by one matrix for 48 x 48
pixels, and tokens of an image see all of it as in the larger ones.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.tower_configs import (
    MAX_PIXELS,
    Three,
    activation_of,
    colours_of,
    depth_of,
    heads_of,
    resample_of,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_MOST_CELL = 1 << 10
"""Pixels on a side of what one matrix reads."""
TOKENS = ImageTokens("<|image|>", "<|image|>", before="<|image>", after="<image|>")
_AS_THEY_ARE: tuple[Three, Three] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def gemma4(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "gemma4_vision")
    hidden = vision.integer("hidden_size", 768)
    heads = heads_of(vision, "num_attention_heads", hidden, 12, parts=4)
    for key, usual, only in (("num_key_value_heads", 12, heads), ("head_dim", 64, hidden // heads)):
        if (said := vision.integer(key, usual)) != only:
            raise UnsupportedError(f"{vision.where}: {key} {said} is not supported", f"{heads} heads of {hidden} have {only}")
    eps = vision.number("rms_norm_eps", 1e-6)
    tower = TowerSpec(
        patch_size=vision.integer("patch_size", 16),
        merge=vision.integer("pooling_kernel_size", 3),
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 16),
        num_heads=heads,
        intermediate_size=vision.integer("intermediate_size", 3072),
        out_size=text_width(config),
        activation=activation_of(vision, "gelu_pytorch_tanh", "hidden_activation"),
        norm="rms",
        eps=eps,
        projector="scaled",
        projector_eps=eps,
        gated=True,
        bias=False,
        positions=vision.integer("position_embedding_size", 10240),
        by_axis=True,
        theta=theta_of(vision, 100.0),
        normed=True,
        clipped=vision.flag("use_clipped_linears", False),
        standardized=vision.flag("standardize", False),
    )
    whole = _sees_whole(config, "")
    longest = tower.positions // tower.merge
    return VisionSpec(tower, _size(images, tower, longest), TOKENS, *_colours(images), whole=whole, whole_in_windows=whole)


def gemma4_unified(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a 12B."""
    vision = vision_section(config, "gemma4_unified_vision")
    hidden = vision.integer("mm_embed_dim", 3840)
    patch, merge = vision.integer("patch_size", 16), vision.integer("pooling_kernel_size", 3)
    for key, made in (("output_proj_dims", hidden), ("model_patch_size", patch * merge)):
        if (said := vision.integer(key, made)) != made:
            raise CheckpointError(f"{vision.where}: {key!r} is {said}, where there are {made}", BROKEN)
    if patch * merge > _MOST_CELL:
        raise CheckpointError(f"{vision.where}: tokens of {patch * merge} x {patch * merge} pixels are not believed", BROKEN)
    tower = TowerSpec(
        patch_size=patch,
        merge=merge,
        hidden_size=hidden,
        num_layers=0,
        num_heads=1,
        intermediate_size=0,
        out_size=text_width(config),
        activation="gelu",
        norm="layer",
        eps=1e-5,
        projector="direct",
        projector_eps=vision.number("rms_norm_eps", 1e-6),
        positions=vision.integer("mm_posemb_size", 1120),
        by_axis=True,
    )
    whole, colours = _sees_whole(config, "vision"), colours_of(images, _AS_THEY_ARE)
    colours = colours if images.flag("do_normalize", False) else _AS_THEY_ARE
    return VisionSpec(tower, _size(images, tower, tower.positions), TOKENS, *colours, whole=whole, whole_in_windows=whole)


def _sees_whole(config: ConfigReader, usual: str) -> bool:
    """Whether tokens of an image see all of it, in layers with a window."""
    text, key = ConfigReader(text_config(config.values), config.where), "use_bidirectional_attention"
    return text.values.get(key, usual) is not None and text.text(key, usual) == "vision"


def _size(images: ConfigReader, tower: TowerSpec, cells: int) -> SizeRule:
    """cells: that a side has at most."""
    for key, side in (("patch_size", tower.patch_size), ("pooling_kernel_size", tower.merge)):
        if (said := images.integer(key, side)) != side:
            raise CheckpointError(f"{images.where}: {key} {said} for a tower of {side}", BROKEN)
    most = images.integer("max_soft_tokens", 280) * tower.cell**2
    longest = cells * tower.cell
    if most > MAX_PIXELS or not longest:
        raise CheckpointError(
            f"{images.where}: images of up to {most} pixels, and {longest} on a side; at most {MAX_PIXELS} are read", BROKEN
        )
    resample = resample_of(images, 3, ("do_resize", "do_rescale"))
    return SizeRule("largest", tower.cell, max_pixels=most, longest_side=longest, resample=resample)


def _colours(images: ConfigReader) -> tuple[Three, Three]:
    """Behind what the settings do, which as a rule is nothing, the tower itself takes off a half and divides by one."""
    mean, std = colours_of(images, _AS_THEY_ARE) if images.flag("do_normalize", False) else _AS_THEY_ARE
    red, green, blue = (each + deviation / 2 for each, deviation in zip(mean, std, strict=True))
    return (red, green, blue), (std[0] / 2, std[1] / 2, std[2] / 2)


_LAYER = "vision_tower.encoder.layers.{i}"
_MATRICES = {
    "qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "out": (f"{_LAYER}.self_attn.o_proj",),
    "up": (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
    "down": (f"{_LAYER}.mlp.down_proj",),
}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
GEMMA4_NAMES: dict[str, tuple[str, ...]] = {
    "patch.weight": ("vision_tower.patch_embedder.input_proj.weight",),
    "positions.weight": ("vision_tower.patch_embedder.position_embedding_table",),
    "layers.{i}.attention_norm.weight": (f"{_LAYER}.input_layernorm.weight",),
    "layers.{i}.head_norm.weight": tuple(f"{_LAYER}.self_attn.{part}_norm.weight" for part in "qk"),
    "layers.{i}.after_attention_norm.weight": (f"{_LAYER}.post_attention_layernorm.weight",),
    "layers.{i}.mlp_norm.weight": (f"{_LAYER}.pre_feedforward_layernorm.weight",),
    "layers.{i}.after_mlp_norm.weight": (f"{_LAYER}.post_feedforward_layernorm.weight",),
    **{f"layers.{{i}}.{ours}.weight": tuple(f"{each}.linear.weight" for each in theirs) for ours, theirs in _MATRICES.items()},
    **{f"layers.{{i}}.{ours}.bounds": tuple(f"{each}.{bound}" for each in theirs for bound in BOUNDS)
       for ours, theirs in _MATRICES.items()},
    "projector.standard_norm.shift": ("vision_tower.std_bias",),
    "projector.standard_norm.scale": ("vision_tower.std_scale",),
    "projector.out.weight": ("embed_vision.embedding_projection.weight",),
}  # fmt: skip
GEMMA4_UNIFIED_NAMES = weights_and_biases({
    "patch_norm": "vision_embedder.patch_ln1",
    "patch": "vision_embedder.patch_dense",
    "pre_norm": "vision_embedder.patch_ln2",
    "post_norm": "vision_embedder.pos_norm",
    "projector.out": "embed_vision.embedding_projection",
}) | {"positions.weight": ("vision_embedder.pos_embedding",)}  # fmt: skip
