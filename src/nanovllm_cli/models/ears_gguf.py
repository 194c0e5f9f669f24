"""Towers for sounds in GGUF files of their own (mmproj-*.gguf, "clip"): metadata -> HearingSpec, and what tensors are called.

As for images (`towers_gguf.py`), what metadata say is put as a folder's config has it, and read as that is (ears.py). Keys and
names: gguf-py's constants, and tools/mtmd of llama.cpp, which reads them. Files are untrusted, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import AnyEar, ConformerSpec, EarSpec, HearingSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ear import ear_shapes
from nanovllm_cli.models.ear_conformer import NORMS
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.models.towers_gemma4 import BOUNDS

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class EarProjector:
    """A family, by the name of what follows the tower. model: of "architectures" in a folder's config; seeing: of a file that one
    sees by, too, if another. texts: of GGUF files that it belongs to. audio: of what metadata and shapes say, the section of a
    config that is the family's own. names: of its modules, beside those of layers, which are in `layer`. whole: what a config
    has beside that section."""

    model: str
    texts: tuple[str, ...]
    audio: Callable[[ConfigReader, Shapes], Config]
    names: Mapping[str, str]
    layer: Mapping[str, tuple[str, ...]]
    seeing: str = ""
    whole: Callable[[ConfigReader, Shapes], Config] | None = None


def hears(read: ConfigReader) -> bool:
    """Whether a file is of what hears, and sees nothing."""
    return hears_too(read) and not read.flag("clip.has_vision_encoder", False)


def hears_too(read: ConfigReader) -> bool:
    """Whether a file is of what hears, whether or not it sees."""
    return read.flag("clip.has_audio_encoder", False)


def ear_label(read: ConfigReader) -> str:
    """What follows the tower, by its name: some name it once, for what sees and for what hears."""
    own, of_all = read.text("clip.audio.projector_type", "none"), read.text("clip.projector_type", "none")
    return of_all if of_all != "none" and (own == "none" or hears(read)) else own


def ear_projector_of(read: ConfigReader) -> EarProjector:
    """UnsupportedError for those that nothing here computes."""
    name = ear_label(read)
    if name not in EAR_PROJECTORS:
        raise UnsupportedError(
            f"{read.where}: sounds by the projector {name[:40]!r} are not supported", f"known: {', '.join(EAR_PROJECTORS)}"
        )
    return EAR_PROJECTORS[name]


def hearing_from_gguf(read: ConfigReader, shapes: Shapes) -> HearingSpec:
    """Raises CheckpointError for a file that is broken, UnsupportedError for what it asks and no tower here can be."""
    projector = ear_projector_of(read)
    model = projector.model if hears(read) else projector.seeing or projector.model
    keys = {
        "d_model": "embedding_length", "encoder_layers": "block_count", "encoder_attention_heads": "attention.head_count",
        "encoder_ffn_dim": "feed_forward_length", "num_mel_bins": "num_mel_bins",
    }  # fmt: skip
    audio: Config = {ours: read.integer(f"clip.audio.{theirs}") for ours, theirs in keys.items()}
    out = read.integer("clip.audio.projection_dim")
    config = {
        "architectures": [model], "text_config": {"hidden_size": out, "model_type": projector.texts[0]},
        "audio_config": audio | projector.audio(read, shapes),
    }  # fmt: skip
    settings = {"feature_size": audio["num_mel_bins"]}
    if projector.whole is not None:
        config, settings = config | projector.whole(read, shapes), {}
    spec = EARS[model].read(ConfigReader(config, read.where), ConfigReader(settings, read.where))
    tower = spec.tower
    if isinstance(tower, ConformerSpec):  # of which llama.cpp's converter once wrote another epsilon than it has
        return spec
    return replace(spec, tower=replace(tower, eps=read.number("clip.audio.attention.layer_norm_epsilon", tower.eps)))


def ear_names_in_gguf(spec: AnyEar, projector: EarProjector) -> dict[str, tuple[str, ...]]:
    """Our names (`ear_shapes`) -> those in a file, whose rows lie behind each other in ours."""
    modules: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in projector.names.items()}
    for i in range(spec.num_layers):
        layer = projector.layer.items()
        modules |= {f"layers.{i}.{ours}": tuple(f"a.blk.{i}.{each}" for each in theirs) for ours, theirs in layer}
    if isinstance(spec, EarSpec) and spec.shaw is not None:
        modules |= {f"asked.{i}.{ours}": tuple(f"a.proj_blk.{i}.{each}" for each in theirs) for i in range(spec.shaw.query_layers)
                    for ours, theirs in _ASKED.items()}  # fmt: skip
    found = {}
    for ours in ear_shapes(spec):
        module, _, kind = ours.rpartition(".")
        if ours in modules:
            module, kind = ours, "weight"
        theirs = modules[module]
        if ours.endswith(".qkv.bias") and not spec.key_bias:
            theirs = theirs[0], theirs[2]
        if kind == "table":  # alone, or of what is multiplied with and added
            found[ours] = (*(f"{theirs[0]}.{each}" for each in ("weight", "bias")),) if "batch_norm" in module else theirs
            continue
        found[ours] = tuple(f"{each}.{last}" for each in theirs for last in (BOUNDS if kind == "bounds" else (kind,)))
    return found


def _rows(read: ConfigReader, shapes: Shapes, name: str) -> int:
    shape = shapes.get(name)
    if not shape or 0 in shape:
        raise CheckpointError(f"{read.where}: tensor {name!r} is missing, or empty", BROKEN)
    return shape[0]


def _whisper(read: ConfigReader, shapes: Shapes) -> Config:
    return {"max_source_positions": _rows(read, shapes, "a.position_embd.weight")}


def _voxtral(read: ConfigReader, shapes: Shapes) -> Config:
    hidden, inner, joined = (
        read.integer(f"clip.audio.{key}") for key in ("embedding_length", "feed_forward_length", "projector.stack_factor")
    )
    if inner != hidden * joined:
        raise CheckpointError(f"{read.where}: {joined} rows of {hidden} are joined to {inner}", BROKEN)
    layers, heads = (read.integer(f"clip.audio.{key}") for key in ("block_count", "attention.head_count"))
    return _whisper(read, shapes) | {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


def _qwen3(read: ConfigReader, shapes: Shapes) -> Config:
    """Into which chunks and windows sounds are divided no file says."""
    out = read.integer("clip.audio.projection_dim")
    return {"downsample_hidden_size": _rows(read, shapes, "a.conv2d.1.weight"), "output_dim": out}


def _omni2_5(read: ConfigReader, shapes: Shapes) -> Config:
    """Into which windows sounds are divided no file says."""
    return {"output_dim": read.integer("clip.audio.projection_dim")}


def _flamingo(read: ConfigReader, shapes: Shapes) -> Config:
    """Without times by which rows turn: llama.cpp has none of them."""
    if _rows(read, shapes, "mm.a.mlp.1.weight") != read.integer("clip.audio.projection_dim"):
        raise CheckpointError(f"{read.where}: what is between the projector's layers is not as wide as a model's rows", BROKEN)
    return _whisper(read, shapes)


def _gemma4(read: ConfigReader, shapes: Shapes) -> Config:
    """How many rows one sees, and what scores reach up to, no file says: as all have it."""
    hidden, inner, layers, heads = (
        read.integer(f"clip.audio.{key}")
        for key in ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
    )
    if inner != 4 * hidden:
        raise CheckpointError(f"{read.where}: rows of {hidden} become {inner} in its MLPs, not {4 * hidden}", BROKEN)
    kernel = shapes.get("a.blk.0.conv_dw.weight", ())
    if len(kernel) != 2:
        raise CheckpointError(f"{read.where}: tensor 'a.blk.0.conv_dw.weight' is no matrix: {list(kernel)}", BROKEN)
    return {
        "model_type": "gemma4_audio", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "subsampling_conv_channels": [_rows(read, shapes, f"a.conv1d.{i}.weight") for i in (0, 1)],
        "conv_kernel_size": kernel[1], "output_proj_dims": _rows(read, shapes, "a.pre_encode.out.weight"),
        "use_clipped_linears": "a.blk.0.ffn_up.input_min" in shapes,
    }  # fmt: skip


def _granite(read: ConfigReader, shapes: Shapes) -> Config:
    """How many layers queries have, and how wide they are, tensors say; how small a number their norms add, no file. llama.cpp
    keeps the rows of a layer halfway up before something is added to them, as transformers does not."""
    out, hidden = read.integer("clip.audio.projection_dim"), read.integer("clip.audio.embedding_length")
    inner, kept = read.integer("clip.audio.feed_forward_length"), read.values.get("clip.audio.feature_layer") or []
    channels, width = _rows(read, shapes, "a.blk.0.conv_pw2.bias"), _rows(read, shapes, "a.proj_norm.weight")
    wide = _rows(read, shapes, "a.blk.0.conv_dw.weight")
    if inner % hidden or wide % hidden or channels != hidden:
        raise CheckpointError(f"{read.where}: layers of {inner} and {wide} channels for rows of {hidden}", BROKEN)
    encoder = {
        "input_dim": read.integer("clip.audio.num_mel_bins"), "hidden_dim": hidden, "feedforward_mult": inner // hidden,
        "num_layers": read.integer("clip.audio.block_count"), "num_heads": read.integer("clip.audio.attention.head_count"),
        "output_dim": _rows(read, shapes, "a.enc_ctc_out.weight"), "context_size": read.integer("clip.audio.chunk_size"),
        "max_pos_emb": read.integer("clip.audio.max_pos_emb"), "conv_expansion_factor": wide // hidden,
        "conv_kernel_size": read.integer("clip.audio.conv_kernel_size"), "cat_hidden_layers": kept,
    }  # fmt: skip
    depth = sum(name.startswith("a.proj_blk.") and name.endswith(".ffn_up.weight") for name in shapes)
    asked = {
        "hidden_size": width, "num_hidden_layers": depth, "intermediate_size": _rows(read, shapes, "a.proj_blk.0.ffn_up.weight"),
        "num_attention_heads": read.integer("clip.audio.projector.head_count"), "cross_attention_frequency": 1,
        "encoder_hidden_size": hidden * (1 + len(kept) if isinstance(kept, list) else 1),
    }  # fmt: skip
    return {
        "text_config": {"hidden_size": out, "model_type": "granite"}, "encoder_config": encoder, "projector_config": asked,
        "has_lora_adapter": False, "window_size": read.integer("clip.audio.projector.window_size"),
        "downsample_rate": read.integer("clip.audio.projector.downsample_rate"),
    }  # fmt: skip


_NAMES = {"front0": "a.conv1d.1", "front1": "a.conv1d.2", "positions": "a.position_embd", "post_norm": "a.post_ln"}
_LAYER = {
    "attention_norm": ("ln1",), "qkv": ("attn_q", "attn_k", "attn_v"), "out": ("attn_out",), "mlp_norm": ("ln2",),
    "up": ("ffn_up",), "down": ("ffn_down",),
}  # fmt: skip
_ONE = _NAMES | {"projector.out": "mm.a.fc"}
_TWO = _NAMES | {"projector.up": "mm.a.mlp.1", "projector.down": "mm.a.mlp.2"}
_CONFORMER = {
    "front0": "a.conv1d.0", "front0.norm": "a.conv1d.0.norm", "front1": "a.conv1d.1", "front1.norm": "a.conv1d.1.norm",
    "front_out": "a.input_projection", "out": "a.pre_encode.out", "projector.out": "mm.a.input_projection",
}  # fmt: skip
_CONFORMER_NORMS = (
    "ffn_norm", "ffn_post_norm", "attn_pre_norm", "attn_post_norm", "conv_norm", "norm_conv", "ffn_norm_1", "ffn_post_norm_1",
    "ln2",
)  # fmt: skip
_CONFORMER_LAYER = {
    **{ours: (theirs,) for ours, theirs in zip(NORMS, _CONFORMER_NORMS, strict=True)},
    "first.up": ("ffn_up",), "first.down": ("ffn_down",), "second.up": ("ffn_up_1",), "second.down": ("ffn_down_1",),
    "qkv": ("attn_q", "attn_k", "attn_v"), "query_scale": ("per_dim_scale",), "distances": ("attn_k_rel",),
    "out": ("attn_out",), "conv.up": ("conv_pw1",), "conv.kernel": ("conv_dw",), "conv.down": ("conv_pw2",),
}  # fmt: skip
_SHAW = {
    "front": "a.input_projection", "classes.up": "a.enc_ctc_out", "classes.down": "a.enc_ctc_out_mid", "query": "a.proj_query",
    "query_norm": "a.proj_norm", "projector.out": "a.proj_linear",
}  # fmt: skip
_SHAW_LAYER = {
    "first.norm": ("ffn_norm",), "first.up": ("ffn_up",), "first.down": ("ffn_down",), "second.norm": ("ffn_norm_1",),
    "second.up": ("ffn_up_1",), "second.down": ("ffn_down_1",), "attention_norm": ("ln1",),
    "qkv": ("attn_q", "attn_k", "attn_v"), "out": ("attn_out",), "distances": ("attn_rel_pos_emb",), "conv.norm": ("norm_conv",),
    "conv.up": ("conv_pw1",), "conv.kernel": ("conv_dw",), "conv.batch_norm": ("conv_norm",), "conv.down": ("conv_pw2",),
    "norm": ("ln2",),
}  # fmt: skip
_ASKED = {
    "qkv": ("self_attn_q", "self_attn_k", "self_attn_v"), "self_out": ("self_attn_out",), "self_norm": ("self_attn_norm",),
    "cross_q": ("cross_attn_q",), "cross_kv": ("cross_attn_k", "cross_attn_v"), "cross_out": ("cross_attn_out",),
    "cross_norm": ("cross_attn_norm",), "up": ("ffn_up",), "down": ("ffn_down",), "mlp_norm": ("ffn_norm",),
}  # fmt: skip
EAR_PROJECTORS = {
    "gemma4a": EarProjector("Gemma4ForConditionalGeneration", ("gemma4",), _gemma4, _CONFORMER, _CONFORMER_LAYER),
    "voxtral": EarProjector("VoxtralForConditionalGeneration", ("llama",), _voxtral, _TWO, _LAYER),
    "granite_speech": EarProjector(
        "GraniteSpeechForConditionalGeneration", ("granite", "granitehybrid"), lambda read, shapes: {}, _SHAW, _SHAW_LAYER,
        whole=_granite,
    ),
    "musicflamingo": EarProjector("AudioFlamingo3ForConditionalGeneration", ("qwen2",), _flamingo, _TWO, _LAYER),
    "qwen2a": EarProjector("Qwen2AudioForConditionalGeneration", ("qwen2",), _whisper, _ONE, _LAYER),
    "qwen2.5o": EarProjector("Qwen2_5OmniModel", ("qwen2vl",), _omni2_5, _ONE, _LAYER),
    "qwen3a": EarProjector(
        "Qwen3ASRForConditionalGeneration", ("qwen3vl", "qwen3vlmoe"), _qwen3,
        _TWO | {"front_out": "a.conv_out", **{f"front{i}": f"a.conv2d.{i + 1}" for i in range(3)}}, _LAYER,
        "Qwen3OmniMoeForConditionalGeneration",
    ),
}  # fmt: skip
