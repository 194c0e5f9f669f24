"""Vision towers in GGUF files of their own (mmproj-*.gguf, "clip"): metadata -> VisionSpec, and what tensors are called there.

What metadata say is put as a folder's configs have it, and read as these are (towers.py): a family is described once. Shapes of
tensors count for more than metadata do, of which llama.cpp's converters have written several wrong: an MLP's width (Qwen2-VL's is
the decoder's) and an epsilon (all Qwens' towers have 1e-6, their files the decoder's). Keys and names: gguf-py's constants, and
tools/mtmd of llama.cpp, which reads them. Files are untrusted, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.tower import tower_shapes
from nanovllm_cli.models.tower_configs import RESAMPLES, square
from nanovllm_cli.models.tower_videos import with_video
from nanovllm_cli.models.towers import TOWERS
from nanovllm_cli.models.towers_gemma4 import BOUNDS
from nanovllm_cli.models.towers_gguf_deepseek import deepseek_from_gguf, deepseek_names, deepseek_ocr_from_gguf
from nanovllm_cli.models.towers_gguf_newer import (
    dots_ocr_from_gguf,
    gemma4_from_gguf,
    gemma4_unified_from_gguf,
    janus_from_gguf,
    kimi_k25_from_gguf,
    kimi_vl_from_gguf,
    llama4_from_gguf,
)
from nanovllm_cli.vision_spec import Stored, TowerSpec, VisionSpec

_WINDOW = 112  # of Qwen2.5-VL, in pixels: no file says it

Shapes = Mapping[str, tuple[int, ...]]
"""Of a file's tensors, by name, rows first."""
Config = dict[str, Any]


class Given(NamedTuple):
    """A file. vision: what all families' "vision_config" has in common."""

    read: ConfigReader
    shapes: Shapes
    vision: Config

    def integer(self, key: str, *default: int) -> int:
        return self.read.integer(f"clip.vision.{key}", *default)

    def matrix(self, name: str) -> tuple[int, int]:
        """Its rows and columns. CheckpointError where it is none, or empty."""
        shape = self.shapes.get(name)
        if shape is None or len(shape) != 2 or 0 in shape:
            found = "is missing" if shape is None else f"is no matrix: {list(shape)}"
            raise CheckpointError(f"{self.read.where}: tensor {name!r} {found}", BROKEN)
        return shape[0], shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Projector:
    """A family, by the name of what follows the tower. model: of "architectures" in a folder's config; texts: of GGUF files that
    it belongs to. configs: config.json, and the image processor's settings without colours. also: other "architectures" with the
    same projector; which it is, configs says. fused: llama.cpp wants queries, keys and values as one; what is read may be either.
    instead: see `ImageTokens`. stored: see `TowerSpec`, of these files, where folders have it otherwise. videos: whether its
    models all see them alike, if the family does. layers: whether its towers have any."""

    model: str
    texts: tuple[str, ...]
    configs: Callable[[Given], tuple[Config, Config]]
    also: tuple[str, ...] = ()
    fused: bool = False
    instead: str = ""
    stored: Stored | None = None
    videos: bool = True
    layers: bool = True


def projector_of(read: ConfigReader) -> Projector:
    """UnsupportedError for those that nothing here computes."""
    if not read.flag("clip.has_vision_encoder", True):
        raise UnsupportedError(f"{read.where}: nothing in it sees", "--mmproj names a file of what does")
    name = read.text("clip.projector_type", read.text("clip.vision.projector_type", "none"))
    if name not in PROJECTORS:
        raise UnsupportedError(
            f"{read.where}: images by the projector {name[:40]!r} are not supported", f"known: {', '.join(PROJECTORS)}"
        )
    return PROJECTORS[name]


def vision_from_gguf(read: ConfigReader, shapes: Shapes) -> VisionSpec:
    """Raises CheckpointError for a file that is broken, UnsupportedError for what it asks and no tower here can be."""
    projector = projector_of(read)
    given = Given(read, shapes, {})
    inner = _layers(given) if projector.layers else 0
    config, settings = projector.configs(given)
    model = config.setdefault("architectures", [projector.model])[0]
    settings |= {key: read.values.get(f"clip.vision.{key}") for key in ("image_mean", "image_std")}
    family, of_folder = TOWERS[model], ConfigReader(config, read.where)
    spec = family.read(of_folder, ConfigReader(settings, read.where))
    spec = with_video(spec, family.video if projector.videos else None, of_folder, ConfigReader({}, read.where))
    tokens, video = replace(spec.tokens, instead=projector.instead), spec.video
    if video is not None and video.tokens.token == tokens.token:
        video = replace(video, tokens=replace(video.tokens, instead=projector.instead))
    tower = replace(spec.tower, intermediate_size=inner, stored=projector.stored or spec.tower.stored)
    return replace(spec, tower=tower, tokens=tokens, video=video)


def _layers(given: Given) -> int:
    """How wide an MLP is, and what all families' configs have in common, into `given.vision`."""
    read = given.read
    hidden, depth, heads = (given.integer(key) for key in ("embedding_length", "block_count", "attention.head_count"))
    if depth > MAX_LAYERS:
        raise CheckpointError(f"{read.where} asks for {depth} layers; at most {MAX_LAYERS} are believed", BROKEN)
    inner = given.matrix("v.blk.0.ffn_up.weight")[1 if _is_swapped(given.shapes, hidden) else 0]
    given.vision.update({
        "hidden_size": hidden, "intermediate_size": inner, "depth": depth, "num_hidden_layers": depth, "num_heads": heads,
        "num_attention_heads": heads, "patch_size": given.integer("patch_size"), "hidden_act": _activation(read),
    })  # fmt: skip
    return inner


def names_in_gguf(spec: TowerSpec, shapes: Shapes) -> dict[str, tuple[str, ...]]:
    """Our names (`tower_shapes`) -> those in a file that has these shapes, whose rows lie behind each other in ours. Those of a
    patch's kernel are its frames', and added up."""
    if spec.sam is not None:
        return deepseek_names(spec)
    up, down = ("ffn_down", "ffn_up") if _is_swapped(shapes, spec.hidden_size) else ("ffn_up", "ffn_down")
    layer: dict[str, tuple[str, ...]] = {
        "attention_norm": ("ln1",), "out": ("attn_out",), "mlp_norm": ("ln2",), "down": (down,),
        "qkv": ("attn_qkv",) if "v.blk.0.attn_qkv.weight" in shapes else ("attn_q", "attn_k", "attn_v"),
        "up": ("ffn_gate", up) if spec.gated else (up,), "head_norm": ("attn_q_norm", "attn_k_norm"),
        "after_attention_norm": ("attn_post_norm",), "after_mlp_norm": ("ffn_post_norm",),
        "attention_scale": ("ls1",), "mlp_scale": ("ls2",),
    }  # fmt: skip
    others = _NAMES | _PROJECTOR_NAMES[_projector_kind(spec)]
    modules: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in others.items()}
    if spec.projector == "gated":
        modules["projector.up"] = "mm.gate", "mm.up"
    if spec.shrinks is not None:
        modules |= {f"shrink.{ours}": tuple(f"v.vit_merger.{each}" for each in theirs) for ours, theirs in _SHRINK_NAMES.items()}
    for i in range(spec.num_layers):
        modules |= {f"layers.{i}.{ours}": tuple(f"v.blk.{i}.{each}" for each in theirs) for ours, theirs in layer.items()}
    for place, behind in enumerate(spec.deep):
        modules |= {f"deep.{place}.{ours}": (f"v.deepstack.{behind}.{theirs}",) for ours, theirs in _DEEP_NAMES.items()}
    names = {}
    for ours in tower_shapes(spec):
        module, _, kind = ours.rpartition(".")
        kinds = BOUNDS if kind == "bounds" else (kind,)
        names[ours] = _ALONE.get(ours) or tuple(f"{theirs}.{each}" for theirs in modules[module] for each in kinds)
    if spec.frames:
        names["patch.weight"] += tuple(f"v.patch_embd.weight.{frame}" for frame in range(1, spec.frames))
    return names | ({"film.weight": names["patch.weight"]} if spec.films else {})


def _projector_kind(spec: TowerSpec) -> str:
    """By which its tensors are called there."""
    if spec.projector == "merger" and spec.post_norm:  # of PaddleOCR-VL and MoonViT, and of dots.ocr
        return "dots" if spec.gated else "patch_merger"
    if spec.projector == "joined" and spec.projector_size and (spec.merge, spec.norm, spec.stretch) == (1, "layer", "corners"):
        return "mlp" if spec.lead else "aligner"
    is_mlp = spec.lead and spec.projector != "shuffled"
    return "mlp" if is_mlp else "nearest" if spec.stretch == "nearest" else spec.projector


def _qwen2(given: Given) -> tuple[Config, Config]:
    out, _ = given.matrix("mm.2.weight")
    return _qwen(given, {"embed_dim": given.vision["hidden_size"], "hidden_size": out})


def _qwen2_5(given: Given) -> tuple[Config, Config]:
    every = given.integer("n_wa_pattern")
    full = list(range(every - 1, given.vision["depth"], every))
    return _qwen(given, {"window_size": given.integer("window_size", _WINDOW), "fullatt_block_indexes": full})


def _exaone(given: Given) -> tuple[Config, Config]:
    config, settings = _qwen2_5(given)
    config["vision_config"]["num_key_value_heads"] = given.integer("attention.head_count_kv")
    return config, settings


def _qwen3(given: Given) -> tuple[Config, Config]:
    key, depth = "clip.vision.is_deepstack_layers", given.vision["depth"]
    is_deep = given.read.values.get(key, [f"v.deepstack.{i}.fc1.weight" in given.shapes for i in range(depth)])
    if not isinstance(is_deep, list) or len(is_deep) > depth or {*map(type, is_deep)} - {bool}:
        raise CheckpointError(f"{given.read.where}: {key!r} must say true or false of each of {depth} layers", BROKEN)
    positions, _ = given.matrix("v.position_embd.weight")
    deep = [i for i, each in enumerate(is_deep) if each]
    return _qwen(given, {"num_position_embeddings": positions, "deepstack_visual_indexes": deep})


def _qwen(given: Given, own: Config) -> tuple[Config, Config]:
    out, _ = given.matrix("mm.2.weight")
    vision = {**given.vision, "out_hidden_size": out, "spatial_merge_size": given.integer("spatial_merge_size", 2), **own}
    return {"vision_config": vision, "text_config": {"hidden_size": out}}, _pixels(given)


def _gemma3(given: Given) -> tuple[Config, Config]:
    side, cell = given.integer("image_size"), given.integer("projector.scale_factor", 4) * given.vision["patch_size"]
    if side % cell:
        told = f"images of {side} x {side} pixels don't divide into tokens of {cell} x {cell}"
        raise CheckpointError(f"{given.read.where}: {told}", BROKEN)
    _, out = given.matrix("mm.input_projection.weight")
    vision = {**given.vision, "image_size": side, "layer_norm_eps": _eps(given), "model_type": "siglip_vision_model"}
    return {"vision_config": vision, "text_config": {"hidden_size": out}, "mm_tokens_per_image": (side // cell) ** 2}, {}


def _pixtral(given: Given) -> tuple[Config, Config]:
    act = given.vision["hidden_act"]
    vision = {**given.vision, "image_size": given.integer("image_size"), "model_type": "pixtral",
              "hidden_act": "gelu" if act == "gelu_pytorch_tanh" else act}  # fmt: skip
    out, _ = given.matrix("mm.2.weight")
    config: Config = {"vision_config": vision, "text_config": {"hidden_size": out, "rms_norm_eps": _eps(given)}}
    if "mm.patch_merger.weight" in given.shapes:
        return {**config, "spatial_merge_size": given.integer("spatial_merge_size")}, {}
    own = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full",
           "multimodal_projector_bias": "mm.1.bias" in given.shapes}  # fmt: skip
    return {**config, **own, "architectures": ["LlavaForConditionalGeneration"]}, {}


def _lighton(given: Given) -> tuple[Config, Config]:
    """The projector's epsilon is the decoder's, which all of them have alike and no file says."""
    config, settings = _pixtral(given)
    config["text_config"]["rms_norm_eps"] = 1e-6
    return config, settings


def _glm(given: Given) -> tuple[Config, Config]:
    out, _ = given.matrix("mm.model.fc.weight")
    vision = {**given.vision, "out_hidden_size": out, "spatial_merge_size": given.integer("spatial_merge_size", 2),
              "rms_norm_eps": _eps(given)}  # fmt: skip
    model = "Glm4vForConditionalGeneration"
    if "v.blk.0.attn_q_norm.weight" in given.shapes:
        model, vision["attention_bias"] = "GlmOcrForConditionalGeneration", "v.blk.0.attn_qkv.bias" in given.shapes
    else:
        vision |= {"intermediate_size": given.matrix("mm.gate.weight")[0], "image_size": _side(given)}
    least, most = (2 * bound if type(bound) is int else bound for bound in _pixels(given).values())  # counted in two frames
    settings = {"size": {"shortest_edge": least, "longest_edge": most}}
    return {"architectures": [model], "vision_config": vision, "text_config": {"hidden_size": out}}, settings


def _paddleocr(given: Given) -> tuple[Config, Config]:
    out, _ = given.matrix("mm.2.weight")
    vision = {**given.vision, "image_size": _side(given), "layer_norm_eps": _eps(given),
              "spatial_merge_size": given.integer("spatial_merge_size", 2)}  # fmt: skip
    return {"vision_config": vision, "text_config": {"hidden_size": out}}, _pixels(given)


def _hunyuan(given: Given) -> tuple[Config, Config]:
    """Its GELUs are the exact ones, which files don't say."""
    out, _ = given.matrix("mm.model.fc.weight")
    act = given.vision["hidden_act"]
    vision = {**given.vision, "max_image_size": _side(given), "spatial_merge_size": given.integer("spatial_merge_size", 2),
              "rms_norm_eps": _eps(given), "hidden_act": "gelu" if act == "gelu_pytorch_tanh" else act}  # fmt: skip
    return {"vision_config": vision, "text_config": {"hidden_size": out}}, _pixels(given)


def _side(given: Given) -> int:
    """Of a square image with as many patches as the table of positions has rows; "image_size" is another."""
    rows, _ = given.matrix("v.position_embd.weight")
    return math.isqrt(square(given.read, rows, "v.position_embd.weight")) * given.integer("patch_size")


def _pixels(given: Given) -> Config:
    return {f"{bound}_pixels": given.read.values.get(f"clip.vision.image_{bound}_pixels") for bound in ("min", "max")}


def _idefics3(given: Given) -> tuple[Config, Config]:
    side, longest = given.integer("image_size"), given.read.values.get("clip.vision.preproc_image_size")
    out, _ = given.matrix("mm.model.fc.weight")
    config = {
        "vision_config": {**given.vision, "image_size": side, "layer_norm_eps": _eps(given)},
        "text_config": {"hidden_size": out}, "scale_factor": given.integer("projector.scale_factor"),
    }  # fmt: skip
    return config, {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest}}


def _lfm2(given: Given) -> tuple[Config, Config]:
    """Into how many pieces an image is cut, and which, no file says; "image_size" means nothing. Few say how it is resized."""
    positions, _ = given.matrix("v.position_embd.weight")
    (inner, _), (out, _) = given.matrix("mm.1.weight"), given.matrix("mm.2.weight")
    config = {
        "vision_config": {**given.vision, "num_patches": positions, "layer_norm_eps": _eps(given)},
        "text_config": {"hidden_size": out}, "projector_hidden_size": inner,
        "downsample_factor": given.integer("projector.scale_factor"),
        "projector_use_layernorm": "mm.input_norm.weight" in given.shapes,
    }  # fmt: skip
    numbers = {name: number for number, name in RESAMPLES.items()}
    if (by := given.read.text("clip.vision.image_resize_algo", "bilinear")) not in numbers:
        told = f"{given.read.where}: images resized by {by[:40]!r} are not supported"
        raise UnsupportedError(told, f"known: {', '.join(numbers)}")
    return config, {"resample": numbers[by]}


def _minicpm(given: Given) -> tuple[Config, Config]:
    """Into how many pieces an image is cut no file says, nor that images are numbered. "image_size" is a piece's."""
    out, _ = given.matrix("mm.down.weight")
    merge, key = given.integer("projector.scale_factor", 4), "clip.vision.wa_layer_indexes"
    if merge not in (2, 4):
        raise CheckpointError(f"{given.read.where}: a MiniCPM-V's tokens of {merge} x {merge} patches", BROKEN)
    layers = given.read.values.get(key, [6])
    if not isinstance(layers, list) or len(layers) != 1:
        raise CheckpointError(f"{given.read.where}: {key!r} must be a list of one layer", BROKEN)
    mode = "16x" if merge == 4 else "4x"
    config = {
        "vision_config": {**given.vision, "image_size": _side(given), "layer_norm_eps": _eps(given)}, "downsample_mode": mode,
        "text_config": {"hidden_size": out}, "insert_layer_id": layers[0],
    }  # fmt: skip
    return config, {"scale_resolution": given.integer("image_size"), "downsample_mode": mode}


def _internvl(given: Given) -> tuple[Config, Config]:
    """Older files don't say into how many pieces an image is cut."""
    out, _ = given.matrix("mm.model.mlp.3.weight")
    act = given.vision["hidden_act"]
    vision = {
        **given.vision, "image_size": given.integer("image_size"), "layer_norm_eps": _eps(given),
        "hidden_act": "gelu" if act == "gelu_pytorch_tanh" else act,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in given.shapes else "rms_norm",
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in given.shapes,
        "attention_bias": bool({"v.blk.0.attn_q.bias", "v.blk.0.attn_qkv.bias"} & given.shapes.keys()),
    }  # fmt: skip
    config = {
        "vision_config": vision, "text_config": {"hidden_size": out},
        "downsample_ratio": 1 / given.integer("projector.scale_factor", 2),
    }  # fmt: skip
    return config, {f"{bound}_patches": given.read.values.get(f"clip.vision.preproc_{bound}_tiles") for bound in ("min", "max")}


PROJECTORS = {
    "qwen2vl_merger": Projector("Qwen2VLForConditionalGeneration", ("qwen2vl",), _qwen2),
    "qwen2.5vl_merger": Projector("Qwen2_5_VLForConditionalGeneration", ("qwen2vl",), _qwen2_5),
    "qwen2.5o": Projector("Qwen2_5OmniModel", ("qwen2vl",), _qwen2_5),
    "qwen3vl_merger": Projector(
        "Qwen3VLForConditionalGeneration", ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), _qwen3, fused=True,
        also=("Qwen3_5ForConditionalGeneration",),
    ),
    "exaone4_5": Projector("Exaone4_5_ForConditionalGeneration", ("exaone4",), _exaone, fused=True),
    "gemma3": Projector("Gemma3ForConditionalGeneration", ("gemma3",), _gemma3, instead="<pad>"),  # as transformers does
    "gemma4v": Projector("Gemma4ForConditionalGeneration", ("gemma4",), gemma4_from_gguf),
    "gemma4uv": Projector("Gemma4UnifiedForConditionalGeneration", ("gemma4",), gemma4_unified_from_gguf, layers=False),
    "pixtral": Projector(
        "Mistral3ForConditionalGeneration", ("mistral3", "llama"), _pixtral, also=("LlavaForConditionalGeneration",)
    ),
    "lightonocr": Projector(
        "LightOnOCRForConditionalGeneration", ("qwen3",), _lighton, also=("LightOnOcrForConditionalGeneration",)
    ),
    "glm4v": Projector(
        "Glm4vForConditionalGeneration", ("glm4", "glm4moe"), _glm, fused=True, videos=False,
        also=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration", "GlmOcrForConditionalGeneration"),
    ),
    "deepseekocr": Projector("DeepseekOCRForCausalLM", ("deepseek2-ocr",), deepseek_ocr_from_gguf, fused=True),
    "deepseekocr2": Projector(
        "DeepseekOcr2ForConditionalGeneration", ("deepseek2-ocr",), deepseek_from_gguf, also=("DeepseekOCR2ForCausalLM",)
    ),
    "dots_ocr": Projector("DotsOCRForCausalLM", ("qwen2",), dots_ocr_from_gguf, fused=True),
    "janus_pro": Projector("JanusForConditionalGeneration", ("llama",), janus_from_gguf),
    "kimivl": Projector("KimiVLForConditionalGeneration", ("deepseek2",), kimi_vl_from_gguf),
    "kimik25": Projector(
        "KimiK25ForConditionalGeneration", ("deepseek2",), kimi_k25_from_gguf, also=("Kimi_K25ForConditionalGeneration",),
        fused=True, stored="axes",
    ),
    "llama4": Projector("Llama4ForConditionalGeneration", ("llama4",), llama4_from_gguf),
    "paddleocr": Projector("PaddleOCRVLForConditionalGeneration", ("paddleocr",), _paddleocr),
    "hunyuanvl": Projector("HunYuanVLForConditionalGeneration", ("hunyuan_vl",), _hunyuan),
    "idefics3": Projector("SmolVLMForConditionalGeneration", ("llama",), _idefics3),
    "lfm2": Projector("Lfm2VlForConditionalGeneration", ("lfm2", "lfm2moe"), _lfm2),
    "minicpmv4_6": Projector(
        "MiniCPMV4_6ForConditionalGeneration", ("qwen35", "qwen35moe"), _minicpm, also=("MiniCPMOcrForConditionalGeneration",)
    ),
    "internvl": Projector(
        "InternVLForConditionalGeneration", ("qwen2", "qwen3", "qwen3moe", "llama", "internlm2", "gpt-oss"), _internvl,
        also=("InternVLChatModel", "QianfanOCRForConditionalGeneration"),
    ),
}  # fmt: skip
_NAMES = {
    "patch": "v.patch_embd", "film": "v.patch_embd", "positions": "v.position_embd",
    "pre_norm": "v.pre_ln", "post_norm": "v.post_ln",
}  # fmt: skip
_ALONE = {
    "projector.standard_norm.shift": ("v.std_bias",), "projector.standard_norm.scale": ("v.std_scale",),
    "lead.weight": ("v.class_embd",), "projector.line_end.weight": ("v.image_newline",),
    "projector.begin.weight": ("mm.image_begin",), "projector.end.weight": ("mm.image_end",),
}  # fmt: skip
_SHRINK_NAMES = {
    "attention_norm": ("ln1",), "qkv": ("attn_q", "attn_k", "attn_v"), "out": ("attn_out",), "norm": ("ds_ln",),
    "up": ("ds_ffn_up",), "down": ("ds_ffn_down",),
}  # fmt: skip
_DEEP_NAMES = {"norm": "norm", "up": "fc1", "down": "fc2"}
_PROJECTOR_NAMES = {
    "merger": {"projector.norm": "v.post_ln", "projector.up": "mm.0", "projector.down": "mm.2"},
    "scaled": {"projector.out": "mm.input_projection"},
    "direct": {
        "patch_norm": "v.patch_norm.1", "pre_norm": "v.patch_norm.2", "post_norm": "v.patch_norm.3",
        "projector.out": "mm.input_projection",
    },
    "pooled": {"projector.norm": "mm.soft_emb_norm", "projector.out": "mm.input_projection"},
    "patch_merger": {
        "projector.norm": "mm.input_norm", "projector.join": "mm.patch_merger", "projector.up": "mm.1", "projector.down": "mm.2",
    },
    "gated": {
        "pre_norm": "v.norm_embd", "projector.join": "mm.patch_merger", "projector.first": "mm.model.fc",
        "projector.norm": "mm.post_norm", "projector.down": "mm.down",
    },
    "lined": {
        "projector.norm": "mm.pre_norm", "projector.join": "mm.0", "projector.first": "mm.2", "projector.out": "mm.model.fc",
        "projector.after_norm": "mm.post_norm",
    },
    "nearest": {"projector.norm": "mm.input_norm", "projector.up": "mm.up", "projector.down": "mm.down"},
    "joined": {
        "projector.norm": "mm.input_norm", "projector.up": "mm.1", "projector.down": "mm.2", "projector.out": "mm.model.fc",
    },
    "dots": {
        "post_norm": "mm.post_norm", "projector.norm": "mm.input_norm", "projector.up": "mm.0", "projector.down": "mm.2",
    },
    "aligner": {"projector.up": "mm.0", "projector.down": "mm.1"},
    "shuffled": {
        "projector.up": "mm.model.mlp.1", "projector.down": "mm.model.mlp.2", "projector.out": "mm.model.fc",
    },
    "mlp": {f"projector.{ours}": f"mm.model.mlp.{place}" for ours, place in (("norm", 0), ("up", 1), ("down", 3))},
}  # fmt: skip


def _activation(read: ConfigReader) -> str:
    """As config.json calls it."""
    gelu, silu = read.flag("clip.use_gelu", False), read.flag("clip.use_silu", False)
    if gelu and silu:
        raise CheckpointError(f"{read.where}: 'clip.use_gelu' and 'clip.use_silu' contradict each other", BROKEN)
    return "gelu_pytorch_tanh" if gelu else "silu" if silu else "quick_gelu"


def _eps(given: Given) -> float:
    return given.read.number("clip.vision.attention.layer_norm_epsilon")


def _is_swapped(shapes: Shapes, hidden: int) -> bool:
    """Whether the two matrices of an MLP have each other's names, as in files of 2025's first months."""
    up = shapes.get("v.blk.0.ffn_up.weight", ())
    return len(up) == 2 and up[0] == hidden != up[1]

