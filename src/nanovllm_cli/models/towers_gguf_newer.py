"""Towers of Llama 4, Kimis, dots.ocr, Janus and Gemma 4 in GGUF files: metadata -> a folder's config. See `towers_gguf.py`."""

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


def gemma4_from_gguf(given: Given) -> Configs:
    """Its activation is a GELU, of which files say nothing, or that it is one. Nor does one say that tokens of an image see all
    of it: so they do in the larger models, whose rows are standardized."""
    out, _ = given.matrix("mm.input_projection.weight")
    hidden, heads, is_large = given.vision["hidden_size"], given.vision["num_heads"], "v.std_bias" in given.shapes
    vision = {
        **given.vision, "model_type": "gemma4_vision", "num_key_value_heads": heads, "head_dim": hidden // heads,
        "hidden_activation": "gelu_pytorch_tanh", "position_embedding_size": _two_tables(given),
        "rms_norm_eps": given.read.number("clip.vision.attention.layer_norm_epsilon"),
        "pooling_kernel_size": given.integer("projector.scale_factor", 3), "standardize": is_large,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in given.shapes,
    }  # fmt: skip
    text = {"hidden_size": out, "use_bidirectional_attention": "vision" if is_large else None}
    return {"vision_config": vision, "text_config": text}, {}


def gemma4_unified_from_gguf(given: Given) -> Configs:
    """There are no layers. That tokens of an image see all of it no file says, nor, as a rule, into which cells it is divided."""
    out, _ = given.matrix("mm.input_projection.weight")
    vision = {
        "mm_embed_dim": given.integer("embedding_length"), "output_proj_dims": given.integer("embedding_length"),
        "patch_size": given.integer("patch_size"), "pooling_kernel_size": given.integer("projector.scale_factor", 3),
        "mm_posemb_size": _two_tables(given), "rms_norm_eps": given.read.number("clip.vision.attention.layer_norm_epsilon"),
    }  # fmt: skip
    return {"vision_config": vision, "text_config": {"hidden_size": out, "use_bidirectional_attention": "vision"}}, {}


def _two_tables(given: Given) -> int:
    """Rows of each, of lines' and of columns' positions."""
    shape = given.shapes.get("v.position_embd.weight", ())
    if len(shape) != 3:
        raise CheckpointError(f"{given.read.where}: tensor 'v.position_embd.weight' is no two tables: {list(shape)}", BROKEN)
    return shape[1]


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}
