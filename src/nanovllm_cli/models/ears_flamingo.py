"""How Audio Flamingo 3 and Music Flamingo hear: their configs -> HearingSpec, and what their folders call a tower's tensors. See
`ears.py`.

Both have Qwen2-Audio's tower, and two layers behind it, and read half minutes, each by itself. Rows of Music Flamingo's turn by
the time at which they are in the sound.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, EarSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ear_configs import NO_KEY_BIAS, TWO, WHISPER, whisper_shape, whole
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import activation_of, text_width, weights_and_biases
from nanovllm_cli.vision_spec import ImageTokens

_TOKENS = ImageTokens("<sound>", "<sound>")
_MUSIC_TOKENS = ImageTokens("<sound>", "<sound>", before="<|sound_bos|>", after="<|sound_eos|>")
_TRANSCRIPT = Transcript("Transcribe the input speech.", "Transcribe the input speech. It is {name}.", "question")
_MOST, _MUSIC_MOST = 20, 40  # half minutes, of what their processors have as the longest sound
_LARGEST = 1e6


def audio_flamingo(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """Of config.json, and of the feature extractor's settings."""
    audio = config.section("audio_config")
    names = (("d_model", "hidden_size", 1280), ("encoder_layers", "num_hidden_layers", 32),
             ("encoder_attention_heads", "num_attention_heads", 20))  # fmt: skip
    hidden, depth, heads = ((first if audio.has(first) else second, usual) for first, second, usual in names)
    out = text_width(config)
    tower = EarSpec(
        **whisper_shape(audio, hidden, depth, heads, 5120),
        out_size=out,
        projector="two",
        projector_size=out,
        projector_bias=config.flag("projector_bias", True),
        projector_activation=activation_of(config, "gelu", "projector_hidden_act"),
        pooled=2,
    )
    spec = HearingSpec(
        tower, _TOKENS, 2 * tower.positions, ("", ""), _TRANSCRIPT, padded=True, framed=True, most=_MOST, spectrogram="apart"
    )
    return whole(tower, sounds, audio, spec)


def music_flamingo(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """As `audio_flamingo`."""
    spec = audio_flamingo(config, sounds)
    rope = config.section("rope_parameters")
    if (kind := rope.text("rope_type", "default")) != "default":
        raise UnsupportedError(f"{config.where}: rotary positions of the type {kind[:40]!r} are not supported", ANOTHER)
    if abs((step := config.number("audio_frame_step", HOP / RATE)) * RATE / HOP - 1) > 1e-6:
        raise UnsupportedError(f"{config.where}: audio_frame_step {step:g} is not supported", f"known: {HOP / RATE:g}")
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.2))
    theta = rope.number("rope_theta", 1200.0)
    timed = int(spec.tower.hidden_size * share)
    if theta != int(theta) or not spec.tower.num_made(spec.piece) <= theta <= _LARGEST:
        raise CheckpointError(f"{config.where}: times on a scale of {theta:g} are not believed", BROKEN)
    if timed < 2 or timed % 2 or 2 * timed > spec.tower.hidden_size:
        raise CheckpointError(f"{config.where}: {timed} of {spec.tower.hidden_size} numbers can't turn by the time twice", BROKEN)
    assert isinstance(spec.tower, EarSpec)
    return replace(spec, tower=replace(spec.tower, timed=timed, theta=theta), tokens=_MUSIC_TOKENS, most=_MUSIC_MOST)


FLAMINGO_NAMES = weights_and_biases(WHISPER | TWO) | NO_KEY_BIAS
