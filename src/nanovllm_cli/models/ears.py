"""Which families of models hear: what their configs say of it -> HearingSpec, and what their folders call a tower's tensors.

config.json has the tower ("audio_config"; of a Whisper, beside the decoder). How a sound becomes a spectrogram is the same for
all of them, Whisper's, but for Gemma 4 (`ears_gemma4.py`); a feature extractor whose settings say otherwise is refused. Both
files are untrusted: whatever is read is bounded. Keys that a file leaves out have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW, EarSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ears_gemma4 import GEMMA4_EAR_NAMES, gemma4
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    activation_of,
    check_width,
    depth_of,
    heads_of,
    text_width,
    weights_and_biases,
)
from nanovllm_cli.models.whisper import DEFAULTS
from nanovllm_cli.vision_spec import ImageTokens

MAX_BINS, MAX_PIECE = 1 << 10, 1 << 14
"""Of a spectrogram, whatever files say."""
_QWEN3_TOKENS = ImageTokens("<|audio_pad|>", "<|audio_pad|>")  # the template writes what is around them
_QWEN2_TOKENS = ImageTokens("<|AUDIO|>", "<|AUDIO|>")
_QWEN2_AROUND = "<|audio_bos|>", "<|audio_eos|>"
_VOXTRAL_TOKENS = ImageTokens("[AUDIO]", "[AUDIO]")
_WHISPER_TOKENS = ImageTokens("<|startoflm|>", "<|startoflm|>")  # of no use to anybody else, and in all of its vocabularies
# Qwen3-ASR's and Voxtral's as they were trained; others chat, and are asked.
_QWEN3_TRANSCRIPT = Transcript(own="subject", begins_in="language {name}<asr_text>")
_OMNI_TRANSCRIPT = Transcript("Transcribe the audio into text.", "Transcribe the {name} audio into text.", "question")
_VOXTRAL_TRANSCRIPT = Transcript(begins="[TRANSCRIBE]", begins_in="lang:{code}[TRANSCRIBE]")
_QWEN2_TRANSCRIPT = Transcript(
    "Write down what is said, word for word.", "Write down what is said, word for word. It is {name}.", "question"
)

Read = Callable[[ConfigReader, ConfigReader], HearingSpec]
"""Of config.json, and of the feature extractor's settings."""
Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class EarFamily:
    """names: our names of tensors, {i} for a layer -> those in its folders, of which ours has the rows behind each other. What a
    name may begin with is left to who reads them. other_names: where they were called otherwise. section: of config.json, which
    has the tower; None: all of that has."""

    read: Read
    names: Names
    other_names: Names | None = None
    section: str | None = "audio_config"


def ear_family(config: Mapping[str, Any]) -> EarFamily | None:
    """By "architectures", as written in config.json; None where nothing here knows how such a model hears, if it does."""
    names = config.get("architectures")
    return EARS.get(str(names[0])) if isinstance(names, list) and names else None


def _voxtral(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    audio = config.section("audio_config")
    shape = _whisper_shape(audio, ("hidden_size", 1280), ("num_hidden_layers", 32), ("num_attention_heads", 20), 5120)
    out = text_width(config)
    if shape["intermediate_size"] % shape["hidden_size"]:
        raise CheckpointError(f"{audio.where}: rows of {shape['hidden_size']} don't make {shape['intermediate_size']}", BROKEN)
    joined = shape["intermediate_size"] // shape["hidden_size"]  # to transformers that is the same number
    tower = EarSpec(
        **shape,
        out_size=out,
        projector="two",
        projector_size=out,
        projector_activation=activation_of(config, "gelu", "projector_hidden_act"),
        joined=joined,
    )
    spec = HearingSpec(tower, _VOXTRAL_TOKENS, 2 * tower.positions, ("[BEGIN_AUDIO]", ""), _VOXTRAL_TRANSCRIPT, padded=True)
    return _whole(tower, sounds, audio, spec)


def _whisper(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    audio = ConfigReader({**DEFAULTS, **{key: value for key, value in config.values.items() if value is not None}}, config.where)
    shape = _whisper_shape(audio, ("d_model",), ("encoder_layers", 4), ("encoder_attention_heads", 6), 1536)
    tower = EarSpec(**shape, out_size=shape["hidden_size"], projector="none")
    spec = HearingSpec(tower, _WHISPER_TOKENS, 2 * tower.positions, ("", ""), Transcript(), padded=True, leads=True)
    return _whole(tower, sounds, audio, spec)


def _qwen2_audio(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    audio = config.section("audio_config")
    shape = _whisper_shape(audio, ("d_model", 1280), ("encoder_layers", 32), ("encoder_attention_heads", 20), 5120)
    tower = EarSpec(**shape, out_size=text_width(config), projector="one", projector_bias=True, pooled=2)
    spec = HearingSpec(
        tower, _QWEN2_TOKENS, 2 * tower.positions, _QWEN2_AROUND, _QWEN2_TRANSCRIPT, padded=True, framed=True, most=1
    )
    return _whole(tower, sounds, audio, spec)


def _qwen3_asr(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    least = sounds.integer("min_length", 8000, least=0)
    if least > RATE:
        raise CheckpointError(f"{sounds.where}: sounds of at least {least} samples are not believed", BROKEN)
    return replace(_qwen3(config, sounds, (1024, 24, 16, 4096)), transcript=_QWEN3_TRANSCRIPT, least=least)


def _qwen3_omni(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """Whose feature extractor knows of no least length."""
    return _qwen3(config, sounds, (1280, 32, 20, 5120))


def _qwen3(config: ConfigReader, sounds: ConfigReader, shape: tuple[int, int, int, int]) -> HearingSpec:
    """shape: width, layers, heads and rows of the MLPs of a config that says nothing. It is asked as one that chats."""
    audio = config.section("audio_config")
    hidden = audio.integer("d_model", shape[0])
    half, window = audio.integer("n_window", 50), audio.integer("n_window_infer", 800)
    chunk = 2 * half
    if window % chunk or not chunk <= window <= MAX_PIECE:
        raise CheckpointError(f"{audio.where}: windows of {window} frames don't divide into chunks of {chunk}", BROKEN)
    tower = EarSpec(
        **_shape(
            audio, hidden, ("encoder_layers", shape[1]), ("encoder_attention_heads", shape[2]),
            audio.integer("encoder_ffn_dim", shape[3]),
        ),
        front="plane",
        positions=0,
        chunk=chunk,
        channels=audio.integer("downsample_hidden_size", 480),
        key_bias=True,
        out_size=audio.integer("output_dim", 3584),
        projector="two",
        projector_size=hidden,
        projector_bias=True,
        projector_activation=activation_of(audio, "gelu", "activation_function"),
    )
    check_width(config, tower)
    if hidden % 2 or hidden < 4:
        raise CheckpointError(f"{audio.where}: 'd_model' must be even, not {hidden}", BROKEN)
    if (said := sounds.integer("n_window", half, least=0)) not in (0, half):
        raise CheckpointError(f"{sounds.where}: 'n_window' is {said}, and the tower's {half}", BROKEN)
    _check_settings(sounds, tower)
    return HearingSpec(tower, _QWEN3_TOKENS, window, ("<|audio_start|>", "<|audio_end|>"), _OMNI_TRANSCRIPT)


def _whole(tower: EarSpec, sounds: ConfigReader, audio: ConfigReader, spec: HearingSpec) -> HearingSpec:
    """Of one that reads pieces of one length, which the feature extractor has, too."""
    if spec.piece > MAX_PIECE or not tower.num_made(spec.piece):
        raise CheckpointError(f"{audio.where}: sounds of {tower.positions} positions are not believed", BROKEN)
    if sounds.has("chunk_length") and (length := sounds.integer("chunk_length") * RATE // HOP) != spec.piece:
        raise CheckpointError(f"{sounds.where}: pieces of {length} frames, and the tower reads {spec.piece}", BROKEN)
    _check_settings(sounds, tower)
    return spec


def _whisper_shape(
    audio: ConfigReader, hidden: tuple[str, int] | tuple[str], depth: tuple[str, int], heads: tuple[str, int], inner: int
) -> dict[str, Any]:
    """Fields of an EarSpec. hidden, depth, heads: what the config calls them, and what they are where it doesn't say."""
    inner = audio.integer("encoder_ffn_dim", audio.integer("intermediate_size", inner))
    shape = _shape(audio, audio.integer(*hidden), depth, heads, inner)
    return shape | {"front": "line", "positions": audio.integer("max_source_positions", 1500)}


def _shape(
    audio: ConfigReader, hidden: int, depth: tuple[str, int], heads: tuple[str, int], inner: int
) -> dict[str, Any]:
    bins = audio.integer("num_mel_bins", 128)
    if bins > MAX_BINS:
        raise CheckpointError(f"{audio.where}: spectrograms of {bins} bands are not believed", BROKEN)
    if audio.flag("scale_embedding", False):
        raise UnsupportedError(f"{audio.where}: scale_embedding true is not supported", ANOTHER)
    return {
        "num_bins": bins,
        "hidden_size": hidden,
        "num_layers": depth_of(audio, *depth),
        "num_heads": heads_of(audio, heads[0], hidden, heads[1], parts=2),
        "intermediate_size": inner,
        "activation": activation_of(audio, "gelu", "activation_function"),
    }


def _check_settings(sounds: ConfigReader, tower: EarSpec) -> None:
    known = {"feature_size": tower.num_bins, "sampling_rate": RATE, "hop_length": HOP, "n_fft": WINDOW}
    for key, made in known.items():
        if (said := sounds.integer(key, made)) != made:
            raise UnsupportedError(f"{sounds.where}: {key} {said} is not supported", f"known: {made}")
    for key in ("dither", "padding_value"):
        if number := sounds.number(key, 0.0, positive=False):
            raise UnsupportedError(f"{sounds.where}: {key} {number:g} is not supported", "known: 0")
    if (side := sounds.text("padding_side", "right")) != "right":
        raise UnsupportedError(f"{sounds.where}: padding_side {side[:40]!r} is not supported", "known: right")
    if sounds.flag("do_normalize", False):
        raise UnsupportedError(f"{sounds.where}: do_normalize true is not supported", ANOTHER)


_LAYER: dict[str, str | tuple[str, ...]] = {
    "layers.{i}.attention_norm": "audio_tower.layers.{i}.self_attn_layer_norm",
    "layers.{i}.qkv": tuple(f"audio_tower.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": "audio_tower.layers.{i}.self_attn.out_proj",
    "layers.{i}.mlp_norm": "audio_tower.layers.{i}.final_layer_norm",
    "layers.{i}.up": "audio_tower.layers.{i}.fc1",
    "layers.{i}.down": "audio_tower.layers.{i}.fc2",
}
_WHISPER: dict[str, str | tuple[str, ...]] = _LAYER | {
    "front0": "audio_tower.conv1",
    "front1": "audio_tower.conv2",
    "positions": "audio_tower.embed_positions",
    "post_norm": "audio_tower.layer_norm",
}
_NO_KEY_BIAS = {"layers.{i}.qkv.bias": tuple(f"audio_tower.layers.{{i}}.self_attn.{part}_proj.bias" for part in "qv")}
_TWO: dict[str, str | tuple[str, ...]] = {
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}
_QWEN3: dict[str, str | tuple[str, ...]] = _LAYER | {
    **{f"front{i}": f"audio_tower.conv2d{i + 1}" for i in range(3)},
    "front_out": "audio_tower.conv_out",
    "post_norm": "audio_tower.ln_post",
}
WHISPER_NAMES = {
    ours: tuple(each.replace("audio_tower.", "encoder.") for each in theirs)
    for ours, theirs in {**weights_and_biases(_WHISPER), **_NO_KEY_BIAS}.items()
}
VOXTRAL_NAMES = weights_and_biases(_WHISPER | _TWO) | _NO_KEY_BIAS
QWEN2_NAMES = weights_and_biases(_WHISPER | {"projector.out": "multi_modal_projector.linear"}) | _NO_KEY_BIAS
QWEN3_NAMES = weights_and_biases(_QWEN3 | _TWO)
QWEN3_FIRST_NAMES = weights_and_biases(
    _QWEN3 | {"projector.up": "audio_tower.proj1", "projector.down": "audio_tower.proj2"}
)
_OMNI3 = EarFamily(_qwen3_omni, QWEN3_FIRST_NAMES)
EARS: dict[str, EarFamily] = {
    "Gemma4ForConditionalGeneration": EarFamily(gemma4, GEMMA4_EAR_NAMES),
    "Qwen2AudioForConditionalGeneration": EarFamily(_qwen2_audio, QWEN2_NAMES),
    "Qwen3ASRForConditionalGeneration": EarFamily(_qwen3_asr, QWEN3_NAMES, QWEN3_FIRST_NAMES),
    "Qwen3OmniMoeForConditionalGeneration": _OMNI3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _OMNI3,
    "VoxtralForConditionalGeneration": EarFamily(_voxtral, VOXTRAL_NAMES),
    "WhisperForConditionalGeneration": EarFamily(_whisper, WHISPER_NAMES, section=None),
}
