"""Vision towers in GGUF files of their own (mmproj-*.gguf, "clip"): metadata -> VisionSpec, and what tensors are called there.

What metadata say is put as a folder's configs have it, and read as these are (towers.py): a family is described once. Shapes of
tensors count for more than metadata do, of which llama.cpp's converters have written several wrong: an MLP's width (Qwen2-VL's is
the decoder's) and an epsilon (all Qwens' towers have 1e-6, their files the decoder's). Keys and names: gguf-py's constants, and
tools/mtmd of llama.cpp, which reads them. Files are untrusted, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower import tower_shapes
from nanovllm_cli.models.towers import TOWERS
from nanovllm_cli.vision_spec import TowerSpec, VisionSpec

ARCHITECTURE = "clip"
_WINDOW = 112  # of Qwen2.5-VL, in pixels: no file says it
_FUSED = "v.blk.0.attn_qkv.weight"

Shapes = Mapping[str, tuple[int, ...]]
"""Of a file's tensors, by name, rows first."""


@dataclass(frozen=True, slots=True, eq=False)
class Projector:
    """A family by its name for what follows the tower. model: of "architectures" in a folder's config; texts: of the GGUF files
    that it belongs to. configs: metadata, shapes and what all have in common -> config.json, with its "vision_config", and what it
    adds to the image processor's settings."""

    model: str
    texts: tuple[str, ...]
    configs: Callable[[ConfigReader, Shapes, Mapping[str, Any]], tuple[dict[str, Any], dict[str, Any]]]


def projector_of(read: ConfigReader) -> Projector:
    """UnsupportedError for those that nothing here computes."""
    if not read.flag("clip.has_vision_encoder", True):
        raise UnsupportedError(f"{read.where}: there is nothing in it that sees", "--mmproj names a file of what does")
    name = read.text("clip.projector_type", read.text("clip.vision.projector_type", ""))
    if name not in PROJECTORS:
        raise UnsupportedError(
            f"{read.where}: images by {name[:40] or 'a projector of no name'!r} are not supported", f"known: {', '.join(PROJECTORS)}"
        )
    return PROJECTORS[name]


def vision_from_gguf(read: ConfigReader, shapes: Shapes) -> VisionSpec:
    """Raises CheckpointError for a file that is broken, UnsupportedError for what it asks and no tower here can be."""
    projector = projector_of(read)
    hidden, inner = read.integer("clip.vision.embedding_length"), _inner(read, shapes)
    depth, heads = read.integer("clip.vision.block_count"), read.integer("clip.vision.attention.head_count")
    if depth > MAX_LAYERS:
        raise CheckpointError(f"{read.where} asks for {depth} layers; at most {MAX_LAYERS} are believed", BROKEN)
    common = {
        "patch_size": read.integer("clip.vision.patch_size"), "spatial_merge_size": read.integer("clip.vision.spatial_merge_size", 2),
        "hidden_size": hidden, "depth": depth, "num_hidden_layers": depth, "num_heads": heads, "num_attention_heads": heads,
        "intermediate_size": inner, "hidden_act": _activation(read),
    }  # fmt: skip
    config, settings = projector.configs(read, shapes, common)
    settings |= {key: read.values.get(f"clip.vision.{key}") for key in ("image_mean", "image_std")}
    config = ConfigReader({"architectures": [projector.model], **config}, read.where)
    spec = TOWERS[projector.model].read(config, ConfigReader(settings, read.where))
    return replace(spec, tower=replace(spec.tower, intermediate_size=inner))


def names_in_gguf(spec: TowerSpec, shapes: Shapes) -> dict[str, tuple[str, ...]]:
    """Our names (`tower_shapes`) -> those in a file that has these shapes, whose rows lie behind each other in ours. Those of a
    patch's kernel are its frames', and added up."""
    up, down = ("ffn_down", "ffn_up") if _is_swapped(shapes, spec.hidden_size) else ("ffn_up", "ffn_down")
    layer: dict[str, tuple[str, ...]] = {
        "attention_norm": ("ln1",), "out": ("attn_out",), "mlp_norm": ("ln2",), "down": (down,),
        "qkv": ("attn_qkv",) if _FUSED in shapes else ("attn_q", "attn_k", "attn_v"),
        "up": ("ffn_gate", up) if spec.gated else (up,),
    }  # fmt: skip
    modules: dict[str, tuple[str, ...]] = {"patch": ("v.patch_embd",), "positions": ("v.position_embd",), "pre_norm": ("v.pre_ln",)}
    modules |= {ours: (theirs,) for ours, theirs in _PROJECTOR_NAMES[spec.projector].items()}
    for i in range(spec.num_layers):
        modules |= {f"layers.{i}.{ours}": tuple(f"v.blk.{i}.{each}" for each in theirs) for ours, theirs in layer.items()}
    for place, behind in enumerate(spec.deep):
        modules |= {f"deep.{place}.{ours}": (f"v.deepstack.{behind}.{theirs}",)
                    for ours, theirs in (("norm", "norm"), ("up", "fc1"), ("down", "fc2"))}  # fmt: skip
    names = {}
    for ours in tower_shapes(spec):
        module, _, kind = ours.rpartition(".")
        names[ours] = tuple(f"{theirs}.{kind}" for theirs in modules[module])
    if spec.frames:
        names["patch.weight"] = ("v.patch_embd.weight", *(f"v.patch_embd.weight.{frame}" for frame in range(1, spec.frames)))
    return names


def _qwen2(read: ConfigReader, shapes: Shapes, common: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    out = _rows(read, shapes, "mm.2.weight")
    return _qwen({**common, "embed_dim": common["hidden_size"], "hidden_size": out}, out), _pixels(read)


def _qwen2_5(read: ConfigReader, shapes: Shapes, common: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    out, every = _rows(read, shapes, "mm.2.weight"), read.integer("clip.vision.n_wa_pattern")
    windows = {"window_size": read.integer("clip.vision.window_size", _WINDOW),
               "fullatt_block_indexes": list(range(every - 1, common["depth"], every))}  # fmt: skip
    return _qwen({**common, **windows}, out), _pixels(read)


def _qwen3(read: ConfigReader, shapes: Shapes, common: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    key, depth = "clip.vision.is_deepstack_layers", common["depth"]
    is_deep = read.values.get(key, [f"v.deepstack.{i}.fc1.weight" in shapes for i in range(depth)])
    if not isinstance(is_deep, list) or len(is_deep) > depth or {*map(type, is_deep)} - {bool}:
        raise CheckpointError(f"{read.where}: {key!r} must say true or false of each of {depth} layers", BROKEN)
    more = {"num_position_embeddings": _rows(read, shapes, "v.position_embd.weight"),
            "deepstack_visual_indexes": [i for i, deep in enumerate(is_deep) if deep]}  # fmt: skip
    return _qwen({**common, **more}, _rows(read, shapes, "mm.2.weight")), _pixels(read)


def _qwen(vision: dict[str, Any], out: int) -> dict[str, Any]:
    return {"vision_config": {**vision, "out_hidden_size": out}, "text_config": {"hidden_size": out}}


def _pixels(read: ConfigReader) -> dict[str, Any]:
    return {f"{bound}_pixels": read.values.get(f"clip.vision.image_{bound}_pixels") for bound in ("min", "max")}


def _gemma3(read: ConfigReader, shapes: Shapes, common: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    side, cell = read.integer("clip.vision.image_size"), read.integer("clip.vision.projector.scale_factor", 4) * common["patch_size"]
    if side % cell:
        raise CheckpointError(f"{read.where}: images of {side} x {side} pixels don't divide into tokens of {cell} x {cell}", BROKEN)
    eps = read.number("clip.vision.attention.layer_norm_epsilon")
    out = _shape(read, shapes, "mm.input_projection.weight")[1]
    vision = {**common, "image_size": side, "layer_norm_eps": eps, "model_type": "siglip_vision_model"}
    return {"vision_config": vision, "text_config": {"hidden_size": out}, "mm_tokens_per_image": (side // cell) ** 2}, {}


def _pixtral(read: ConfigReader, shapes: Shapes, common: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if "mm.patch_merger.weight" not in shapes:
        raise UnsupportedError(f"{read.where}: Pixtral's images, a token for each patch, are not supported", ANOTHER)
    exact = "gelu" if common["hidden_act"] == "gelu_pytorch_tanh" else common["hidden_act"]
    vision = {**common, "image_size": read.integer("clip.vision.image_size"), "hidden_act": exact, "model_type": "pixtral"}
    text = {"hidden_size": _rows(read, shapes, "mm.2.weight"),
            "rms_norm_eps": read.number("clip.vision.attention.layer_norm_epsilon")}  # fmt: skip
    merge = read.integer("clip.vision.spatial_merge_size")
    return {"vision_config": vision, "text_config": text, "spatial_merge_size": merge}, {}


PROJECTORS = {
    "qwen2vl_merger": Projector("Qwen2VLForConditionalGeneration", ("qwen2vl",), _qwen2),
    "qwen2.5vl_merger": Projector("Qwen2_5_VLForConditionalGeneration", ("qwen2vl",), _qwen2_5),
    "qwen3vl_merger": Projector(
        "Qwen3VLForConditionalGeneration", ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), _qwen3
    ),
    "gemma3": Projector("Gemma3ForConditionalGeneration", ("gemma3",), _gemma3),
    "pixtral": Projector("Mistral3ForConditionalGeneration", ("mistral3", "llama"), _pixtral),
}
_PROJECTOR_NAMES = {
    "merger": {"projector.norm": "v.post_ln", "projector.up": "mm.0", "projector.down": "mm.2"},
    "pooled": {"post_norm": "v.post_ln", "projector.norm": "mm.soft_emb_norm", "projector.out": "mm.input_projection"},
    "patch_merger": {
        "projector.norm": "mm.input_norm", "projector.join": "mm.patch_merger", "projector.up": "mm.1", "projector.down": "mm.2",
    },
}  # fmt: skip


def _activation(read: ConfigReader) -> str:
    """As config.json calls it."""
    gelu, silu = read.flag("clip.use_gelu", False), read.flag("clip.use_silu", False)
    if gelu and silu:
        raise CheckpointError(f"{read.where}: both 'clip.use_gelu' and 'clip.use_silu'", BROKEN)
    return "gelu_pytorch_tanh" if gelu else "silu" if silu else "quick_gelu"


def _inner(read: ConfigReader, shapes: Shapes) -> int:
    """Rows inside of an MLP."""
    rows, columns = _shape(read, shapes, "v.blk.0.ffn_up.weight")
    return columns if _is_swapped(shapes, read.integer("clip.vision.embedding_length")) else rows


def _is_swapped(shapes: Shapes, hidden: int) -> bool:
    """Whether the two matrices of an MLP have each other's names, as in files of 2025's first months."""
    rows, columns = shapes.get("v.blk.0.ffn_up.weight", (0, hidden))
    return rows == hidden != columns


def _rows(read: ConfigReader, shapes: Shapes, name: str) -> int:
    return _shape(read, shapes, name)[0]


def _shape(read: ConfigReader, shapes: Shapes, name: str) -> tuple[int, int]:
    """Of a matrix that is not empty."""
    shape = shapes.get(name)
    if shape is None or len(shape) != 2 or 0 in shape:
        found = "is not in it" if shape is None else f"is no matrix: {list(shape)}"
        raise CheckpointError(f"{read.where}: tensor {name!r} {found}", BROKEN)
    return shape[0], shape[1]
