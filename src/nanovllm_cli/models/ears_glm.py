"""How a GLM-ASR hears: its configs -> HearingSpec, and what its folders call a tower's tensors. See `ears.py`.

Whisper's encoder with rotary positions instead of learned ones, of half minutes, each by itself, whose silence it was trained to
see.
"""

from __future__ import annotations

from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import EarSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ear_configs import TWO, shape_of, whole
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import activation_of, check_only, text_width, theta_of, weights_and_biases
from nanovllm_cli.vision_spec import ImageTokens

_TOKENS = ImageTokens("<|pad|>", "<|pad|>")  # the template writes what is around them
_AROUND = "<|begin_of_audio|>", "<|end_of_audio|>"
_TRANSCRIPT = Transcript(
    "Please transcribe this audio into text", "Please transcribe this audio into text. It is {name}.", "question"
)
_JOINED = 4
_MOST = 21  # half minutes: its processor has 655 seconds as the longest sound


def glm_asr(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """Of config.json, and of the feature extractor's settings."""
    audio = config.section("audio_config")
    shape: dict[str, Any] = shape_of(
        audio, audio.integer("hidden_size", 1280), ("num_hidden_layers", 32), ("num_attention_heads", 20),
        audio.integer("intermediate_size", 5120),
    ) | {"activation": activation_of(audio, "gelu")}  # fmt: skip
    hidden, heads, out = shape["hidden_size"], shape["num_heads"], text_width(config)
    if shape["intermediate_size"] != _JOINED * hidden:  # to transformers that is the same number
        raise CheckpointError(f"{audio.where}: {_JOINED} rows of {hidden} don't make {shape['intermediate_size']}", BROKEN)
    check_only(audio, num_key_value_heads=heads, head_dim=hidden // heads)
    turned = _turned(audio, hidden // heads)
    tower = EarSpec(
        **shape,
        front="line",
        positions=0,
        turned=turned,
        theta=theta_of(audio),
        sees_silence=True,
        out_size=out,
        projector="two",
        projector_size=2 * out,
        projector_bias=True,
        projector_activation=activation_of(config, "gelu", "projector_hidden_act"),
        joined=_JOINED,
    )
    piece = 2 * audio.integer("max_position_embeddings", 1500)
    spec = HearingSpec(
        tower, _TOKENS, piece, _AROUND, _TRANSCRIPT, padded=True, framed=True, most=_MOST, spectrogram="apart"
    )
    return whole(tower, sounds, audio, spec)


def _turned(audio: ConfigReader, head_dim: int) -> int:
    """Dimensions of a head, all of whose halves have pairs."""
    share = audio.section("rope_parameters").number("partial_rotary_factor", audio.number("partial_rotary_factor", 0.5))
    turned = int(head_dim * share)
    if not 0 < turned <= head_dim or turned % 2 or head_dim % 2:
        raise CheckpointError(f"{audio.where}: {turned} of {head_dim} dimensions of a head can't turn in pairs", BROKEN)
    if (head_dim - turned) % 2:
        raise UnsupportedError(f"{audio.where}: {turned} of {head_dim} dimensions that turn are not supported", ANOTHER)
    return turned


_LAYER = "audio_tower.layers.{i}"
_MODULES: dict[str, str | tuple[str, ...]] = TWO | {
    "front0": "audio_tower.conv1",
    "front1": "audio_tower.conv2",
    "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.{i}.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": f"{_LAYER}.self_attn.o_proj",
    "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.{i}.up": f"{_LAYER}.mlp.fc1",
    "layers.{i}.down": f"{_LAYER}.mlp.fc2",
    "post_norm": "audio_tower.norm",
}
GLM_ASR_NAMES = weights_and_biases(_MODULES) | {
    "layers.{i}.qkv.bias": tuple(f"{_LAYER}.self_attn.{part}_proj.bias" for part in "qv")
}
