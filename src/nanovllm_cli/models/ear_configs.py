"""What configs of several families that hear say alike, and what their folders call the tensors of Whisper's encoder, which most
of them have. See `ears.py`.

Everything here is bounded: CheckpointError for what is broken, UnsupportedError for what no tower here can be.
"""

from __future__ import annotations

from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW, EarSpec, HearingSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import activation_of, depth_of, heads_of

MAX_BINS, MAX_PIECE = 1 << 10, 1 << 14
"""Of a spectrogram, whatever files say."""


def whole(tower: EarSpec, sounds: ConfigReader, audio: ConfigReader, spec: HearingSpec) -> HearingSpec:
    """Of one that reads pieces of one length, which the feature extractor has, too."""
    if spec.piece > MAX_PIECE or not tower.num_made(spec.piece):
        raise CheckpointError(f"{audio.where}: sounds of {tower.positions} positions are not believed", BROKEN)
    if sounds.has("chunk_length") and (length := sounds.integer("chunk_length") * RATE // HOP) != spec.piece:
        raise CheckpointError(f"{sounds.where}: pieces of {length} frames, and the tower reads {spec.piece}", BROKEN)
    check_settings(sounds, tower)
    return spec


def whisper_shape(
    audio: ConfigReader, hidden: tuple[str, int] | tuple[str], depth: tuple[str, int], heads: tuple[str, int], inner: int
) -> dict[str, Any]:
    """Fields of an EarSpec. hidden, depth, heads: what the config calls them, and what they are where it doesn't say."""
    inner = audio.integer("encoder_ffn_dim", audio.integer("intermediate_size", inner))
    shape = shape_of(audio, audio.integer(*hidden), depth, heads, inner)
    return shape | {"front": "line", "positions": audio.integer("max_source_positions", 1500)}


def shape_of(
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


def check_settings(sounds: ConfigReader, tower: EarSpec) -> None:
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


LAYER: dict[str, str | tuple[str, ...]] = {
    "layers.{i}.attention_norm": "audio_tower.layers.{i}.self_attn_layer_norm",
    "layers.{i}.qkv": tuple(f"audio_tower.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": "audio_tower.layers.{i}.self_attn.out_proj",
    "layers.{i}.mlp_norm": "audio_tower.layers.{i}.final_layer_norm",
    "layers.{i}.up": "audio_tower.layers.{i}.fc1",
    "layers.{i}.down": "audio_tower.layers.{i}.fc2",
}
WHISPER: dict[str, str | tuple[str, ...]] = LAYER | {
    "front0": "audio_tower.conv1",
    "front1": "audio_tower.conv2",
    "positions": "audio_tower.embed_positions",
    "post_norm": "audio_tower.layer_norm",
}
NO_KEY_BIAS = {"layers.{i}.qkv.bias": tuple(f"audio_tower.layers.{{i}}.self_attn.{part}_proj.bias" for part in "qv")}
TWO: dict[str, str | tuple[str, ...]] = {
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}
