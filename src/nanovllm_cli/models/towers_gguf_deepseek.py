"""DeepSeek-OCR 2's tower in a GGUF file of its own: metadata -> a folder's config, and what tensors are called there. See
`towers_gguf.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.tower_sam import sam_shapes
from nanovllm_cli.vision_spec import TowerSpec

if TYPE_CHECKING:
    from nanovllm_cli.models.towers_gguf import Given

_SAM_NAMES = {
    "patch": "v.sam.patch_embd", "positions": "v.sam.pos_embd", "neck.first": "v.sam.neck.0", "neck.first_norm": "v.sam.neck.1",
    "neck.second": "v.sam.neck.2", "neck.second_norm": "v.sam.neck.3", "shrink.first": "v.sam.net_2",
    "shrink.second": "v.sam.net_3", "post_norm": "v.post_ln", "projector.out": "mm.model.fc",
    "queries.small": "v.resample_query_768", "queries.large": "v.resample_query_1024",
}  # fmt: skip
_SAM_LAYER_NAMES = {
    "attention_norm": "pre_ln", "qkv": "attn.qkv", "out": "attn.out", "mlp_norm": "post_ln", "up": "mlp.lin1", "down": "mlp.lin2",
    "by_line": "attn.pos_h", "by_column": "attn.pos_w",
}  # fmt: skip
_QUERY_LAYER_NAMES = {
    "attention_norm": ("ln1",), "qkv": ("attn_q", "attn_k", "attn_v"), "out": ("attn_out",), "mlp_norm": ("ln2",),
    "up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip


def deepseek_from_gguf(given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """What its files don't say, and llama.cpp doesn't ask them, is as in what is published: patches, sizes, bases, epsilons,
    and which layers see all of an image."""
    if given.vision["patch_size"] != 16:
        raise UnsupportedError(f"{given.read.where}: a DeepSeek-OCR 2 with patches of {given.vision['patch_size']}", "known: 16")
    (inner, _), (out, _) = given.matrix("v.sam.blk.0.mlp.lin1.weight"), given.matrix("mm.model.fc.weight")
    kernels = [given.shapes.get(f"v.sam.{name}.weight", (0,)) for name in ("neck.0", "net_2")]
    hidden, heads = given.vision["hidden_size"], given.vision["num_heads"]
    sam = {
        "hidden_size": given.integer("sam.embedding_length"), "num_hidden_layers": given.integer("sam.block_count"),
        "num_attention_heads": given.integer("sam.head_count"), "window_size": given.integer("window_size", 14),
        "mlp_dim": inner, "output_channels": kernels[0][0], "downsample_channels": [kernels[1][0], hidden],
    }  # fmt: skip
    behind = {key: given.vision[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    behind |= {"num_key_value_heads": given.integer("attention.head_count_kv", heads), "rope_theta": 1e6}
    tiles = {f"{bound}_patches": given.read.values.get(f"clip.vision.preproc_{bound}_tiles") for bound in ("min", "max")}
    return {"vision_config": {"sam_config": sam, "encoder_config": behind}, "text_config": {"hidden_size": out}}, tiles


def deepseek_names(spec: TowerSpec) -> dict[str, tuple[str, ...]]:
    assert spec.sam is not None
    modules: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in _SAM_NAMES.items()}
    for i in range(spec.sam.num_layers):
        modules |= {f"sam.{i}.{ours}": (f"v.sam.blk.{i}.{theirs}",) for ours, theirs in _SAM_LAYER_NAMES.items()}
    for i in range(spec.num_layers):
        modules |= {f"layers.{i}.{ours}": tuple(f"v.blk.{i}.{each}" for each in theirs)
                    for ours, theirs in _QUERY_LAYER_NAMES.items()}  # fmt: skip
    names = {}
    for ours in sam_shapes(spec):
        module, _, kind = ours.rpartition(".")
        if kind in ("weight", "bias") and ours != "separator.weight":
            names[ours] = tuple(f"{theirs}.{kind}" for theirs in modules[module])
        else:
            names[ours] = ("v.view_seperator",) if ours == "separator.weight" else (f"{modules[ours][0]}.weight",)
    return names
