"""DeepSeek-OCRs' towers in a GGUF file of their own: metadata -> a folder's config, and what tensors are called there. See
`towers_gguf.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.tower_sam import sam_shapes
from nanovllm_cli.vision_spec import TowerSpec

if TYPE_CHECKING:
    from nanovllm_cli.models.towers_gguf import Given

_SAM_NAMES = {
    "patch": "v.sam.patch_embd", "neck.first": "v.sam.neck.0", "neck.first_norm": "v.sam.neck.1",
    "neck.second": "v.sam.neck.2", "neck.second_norm": "v.sam.neck.3", "shrink.first": "v.sam.net_2",
    "shrink.second": "v.sam.net_3", "pre_norm": "v.pre_ln", "post_norm": "v.post_ln", "projector.out": "mm.model.fc",
}  # fmt: skip
_ALONE = {
    "positions.weight": "v.sam.pos_embd.weight", "queries.small": "v.resample_query_768.weight",
    "queries.large": "v.resample_query_1024.weight", "separator.weight": "v.view_seperator", "line_end.weight": "v.image_newline",
    "behind.lead": "v.class_embd", "behind.positions": "v.position_embd.weight",
}  # fmt: skip
_SAM_LAYER_NAMES = {
    "attention_norm": "pre_ln", "qkv": "attn.qkv", "out": "attn.out", "mlp_norm": "post_ln", "up": "mlp.lin1", "down": "mlp.lin2",
    "by_line": "attn.pos_h", "by_column": "attn.pos_w",
}  # fmt: skip
_QUERY_LAYER_NAMES = {
    "attention_norm": ("ln1",), "qkv": ("attn_q", "attn_k", "attn_v"), "out": ("attn_out",), "mlp_norm": ("ln2",),
    "up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip


_CLIP_LAYER_NAMES = {
    "attention_norm": ("ln1",), "qkv": ("attn_qkv",), "out": ("attn_out",), "mlp_norm": ("ln2",), "up": ("ffn_up",),
    "down": ("ffn_down",),
}  # fmt: skip


def deepseek_ocr_from_gguf(given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `deepseek_from_gguf`. What files say of sizes is of a CLIP's own patches, which are not read."""
    (out, _), (rows, _) = given.matrix("mm.model.fc.weight"), given.matrix("v.position_embd.weight")
    patch, table = (given.shapes.get(f"v.sam.{name}.weight", ()) for name in ("patch_embd", "pos_embd"))
    if len(table) != 4 or patch[2:] != (16, 16):
        told = f"a DeepSeek-OCR with patches of {list(patch)[2:]} and positions of {list(table)}"
        raise UnsupportedError(f"{given.read.where}: {told}", "known: patches of 16 x 16, and a square of positions")
    grid = math.isqrt(rows - 1)
    clip = {"width": given.vision["hidden_size"], "layers": given.vision["num_hidden_layers"],
            "heads": given.vision["num_heads"], "image_size": grid, "patch_size": 1}  # fmt: skip
    sam = _sam(given)
    own = {"width": sam.pop("hidden_size"), "layers": sam.pop("num_hidden_layers"), "heads": sam.pop("num_attention_heads")}
    vision = {"image_size": 16 * table[1], "width": {"clip-l-14-224": clip, "sam_vit_b": {**sam, **own}}}
    return {"vision_config": vision, "hidden_size": out}, _tiles(given)


def deepseek_from_gguf(given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """What its files don't say, and llama.cpp doesn't ask them, is as in what is published: patches, sizes, bases, epsilons,
    and which layers see all of an image."""
    if given.vision["patch_size"] != 16:
        raise UnsupportedError(f"{given.read.where}: a DeepSeek-OCR 2 with patches of {given.vision['patch_size']}", "known: 16")
    (out, _), heads = given.matrix("mm.model.fc.weight"), given.vision["num_heads"]
    behind = {key: given.vision[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    behind |= {"num_key_value_heads": given.integer("attention.head_count_kv", heads), "rope_theta": 1e6}
    config = {"vision_config": {"sam_config": _sam(given), "encoder_config": behind}, "text_config": {"hidden_size": out}}
    return config, _tiles(given)


def _sam(given: Given) -> dict[str, Any]:
    inner, _ = given.matrix("v.sam.blk.0.mlp.lin1.weight")
    kernels = [given.shapes.get(f"v.sam.{name}.weight", (0,)) for name in ("neck.0", "net_2")]
    return {
        "hidden_size": given.integer("sam.embedding_length"), "num_hidden_layers": given.integer("sam.block_count"),
        "num_attention_heads": given.integer("sam.head_count"), "window_size": given.integer("window_size", 14),
        "mlp_dim": inner, "output_channels": kernels[0][0], "downsample_channels": [kernels[1][0], given.vision["hidden_size"]],
    }  # fmt: skip


def _tiles(given: Given) -> dict[str, Any]:
    return {f"{bound}_patches": given.read.values.get(f"clip.vision.preproc_{bound}_tiles") for bound in ("min", "max")}


def deepseek_names(spec: TowerSpec) -> dict[str, tuple[str, ...]]:
    assert spec.sam is not None
    modules: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _SAM_NAMES.items()}
    for i in range(spec.sam.num_layers):
        modules |= {f"sam.{i}.{ours}": (f"v.sam.blk.{i}.{theirs}",) for ours, theirs in _SAM_LAYER_NAMES.items()}
    of_layer = _CLIP_LAYER_NAMES if spec.sam.beside else _QUERY_LAYER_NAMES
    for i in range(spec.num_layers):
        modules |= {f"layers.{i}.{ours}": tuple(f"v.blk.{i}.{each}" for each in theirs) for ours, theirs in of_layer.items()}
    names: dict[str, tuple[str, ...]] = {}
    for ours in sam_shapes(spec):
        module, _, kind = ours.rpartition(".")
        if ours in _ALONE:
            names[ours] = (_ALONE[ours],)
        elif kind in ("weight", "bias"):
            names[ours] = tuple(f"{theirs}.{kind}" for theirs in modules[module])
        else:
            names[ours] = (f"{modules[ours][0]}.weight",)
    return names
