"""Towers of Llama 4, Kimis, dots.ocr and Janus in GGUF files: metadata -> a folder's config. See `towers_gguf.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import BROKEN
from nanovllm_cli.models.tower_configs import square

if TYPE_CHECKING:
    from nanovllm_cli.models.towers_gguf import Given

Configs = tuple[dict[str, Any], dict[str, Any]]
"""config.json, and the image processor's settings without colours."""


def llama4_from_gguf(given: Given) -> Configs:
    """Its GELUs are the exact ones, which files don't say; nor do they say into how many tiles an image is cut."""
    (between, _), (out, wide) = given.matrix("mm.model.mlp.2.weight"), given.matrix("mm.model.fc.weight")
    inner, _ = given.matrix("mm.model.mlp.1.weight")
    eps = given.read.number("clip.vision.attention.layer_norm_epsilon")
    vision = {
        **given.vision, "image_size": given.integer("image_size"), "hidden_act": "gelu", "projector_input_dim": inner,
        "pixel_shuffle_ratio": 1 / given.integer("projector.scale_factor", 2), "projector_output_dim": between,
        "vision_output_dim": wide, "norm_eps": 1e-5 if math.isclose(eps, 1e-5, rel_tol=1e-6) else eps,
    }  # fmt: skip
    return {"vision_config": vision, "text_config": {"hidden_size": out}}, {"size": _square(given.integer("image_size"))}


def kimi_vl_from_gguf(given: Given) -> Configs:
    """How many patches an image may have no file says."""
    rows, _ = given.matrix("v.position_embd.weight")
    return _kimi(given, math.isqrt(square(given.read, rows, "v.position_embd.weight"))), {}


def kimi_k25_from_gguf(given: Given) -> Configs:
    """Its positions are a square of rows, and its epsilon is that of the projector's norm."""
    table = given.shapes.get("v.position_embd.weight", ())
    if len(table) != 3 or table[0] != table[1]:
        told = f"{given.read.where}: tensor 'v.position_embd.weight' is no square of positions: {list(table)}"
        raise CheckpointError(told, BROKEN)
    config = _kimi(given, table[0])
    config["vision_config"]["projector_ln_eps"] = given.read.number("clip.vision.attention.layer_norm_epsilon", 1e-5)
    pixels = given.read.values.get("clip.vision.image_max_pixels")
    most = {} if pixels is None else {"max_patches": given.integer("image_max_pixels") // given.vision["patch_size"] ** 2}
    return config, most


def _kimi(given: Given, side: int) -> dict[str, Any]:
    """side: patches on a side of the square that learned positions are of."""
    out, _ = given.matrix("mm.2.weight")
    merge = given.integer("projector.scale_factor", 2)
    vision = {**given.vision, "init_pos_emb_height": side, "init_pos_emb_width": side, "merge_kernel_size": merge}
    return {"vision_config": vision, "text_config": {"hidden_size": out}}


def dots_ocr_from_gguf(given: Given) -> Configs:
    out, _ = given.matrix("mm.2.weight")
    vision = {
        **given.vision, "embed_dim": given.vision["hidden_size"], "hidden_size": out,
        "spatial_merge_size": given.integer("projector.scale_factor", 2),
        "rms_norm_eps": given.read.number("clip.vision.attention.layer_norm_epsilon"),
    }  # fmt: skip
    pixels = {f"{bound}_pixels": given.read.values.get(f"clip.vision.image_{bound}_pixels") for bound in ("min", "max")}
    return {"vision_config": vision, "hidden_size": out}, pixels


def janus_from_gguf(given: Given) -> Configs:
    """Its GELUs are the exact ones, which files don't say; nor do they say how thin an image may become."""
    out, _ = given.matrix("mm.1.weight")
    act, side = given.vision["hidden_act"], given.integer("image_size")
    vision = {**given.vision, "image_size": side, "projection_dim": out,
              "layer_norm_eps": given.read.number("clip.vision.attention.layer_norm_epsilon"),
              "hidden_act": "gelu" if act == "gelu_pytorch_tanh" else act}  # fmt: skip
    return {"vision_config": vision, "text_config": {"model_type": "llama", "hidden_size": out}}, {"size": _square(side)}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}
