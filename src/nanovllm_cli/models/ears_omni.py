"""How a Qwen2.5-Omni hears: its configs -> HearingSpec, and what its folders call a tower's tensors. See `ears.py`.

Whisper's encoder, whose rows see two seconds each. Sounds of a video are not read, so that a sound's tokens have a text's
positions (TMRoPE).
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, EarSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ear_configs import MAX_PIECE, NO_KEY_BIAS, WHISPER, check_settings, whisper_shape
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import check_width, weights_and_biases
from nanovllm_cli.vision_spec import ImageTokens

OMNI_TRANSCRIPT = Transcript("Transcribe the audio into text.", "Transcribe the {name} audio into text.", "question")
_TOKENS = ImageTokens("<|AUDIO|>", "<|AUDIO|>")  # the template writes what is around them
_AROUND = "<|audio_bos|>", "<|audio_eos|>"
_SECONDS = 300  # that feature extractors of such folders cut sounds off at


def omni2_5(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """Of config.json, and of the feature extractor's settings."""
    audio = config.section("audio_config")
    shape = whisper_shape(audio, ("d_model", 1280), ("encoder_layers", 32), ("encoder_attention_heads", 20), 5120)
    piece, positions = 2 * audio.integer("n_window", 100), shape.pop("positions")
    tower = EarSpec(
        **shape, positions=0, out_size=audio.integer("output_dim", 3584), projector="one", projector_bias=True, pooled=2
    )
    check_width(config, tower)
    if tower.hidden_size < 4:
        raise CheckpointError(f"{audio.where}: rows of {tower.hidden_size} are too short for positions", BROKEN)
    if piece > min(MAX_PIECE, 2 * positions):
        raise CheckpointError(f"{audio.where}: windows of {piece} frames are more than {positions} positions", BROKEN)
    if piece % 4:  # of which rows of two windows would be one
        raise UnsupportedError(f"{audio.where}: windows of {piece // 2} rows, an odd number, are not supported", ANOTHER)
    check_settings(sounds, tower)
    most = sounds.integer("chunk_length", _SECONDS) * RATE // HOP // piece
    if not 0 < most <= MAX_PIECE:
        raise CheckpointError(f"{sounds.where}: sounds of {most} windows are not believed", BROKEN)
    return HearingSpec(tower, _TOKENS, piece, _AROUND, OMNI_TRANSCRIPT, framed=True, most=most)


OMNI2_5_EAR_NAMES = weights_and_biases(
    WHISPER | {"post_norm": "audio_tower.ln_post", "projector.out": "audio_tower.proj"}
) | NO_KEY_BIAS
