"""Which families of models hear: what their configs say of it -> HearingSpec, and what their folders call a tower's tensors.

config.json has the tower ("audio_config"; of a Whisper, beside the decoder). How a sound becomes a spectrogram is the same for
all of them, Whisper's, but for Gemma 4 (`ears_gemma4.py`); a feature extractor whose settings say otherwise is refused. Both
files are untrusted: whatever is read is bounded. Keys that a file leaves out have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.hearing_spec import RATE, EarSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ear_configs import (
    LAYER,
    MAX_PIECE,
    NO_KEY_BIAS,
    TWO,
    WHISPER,
    check_settings,
    shape_of,
    whisper_shape,
    whole,
)
from nanovllm_cli.models.ears_flamingo import FLAMINGO_NAMES, audio_flamingo, music_flamingo
from nanovllm_cli.models.ears_gemma4 import GEMMA4_EAR_NAMES, gemma4
from nanovllm_cli.models.ears_glm import GLM_ASR_NAMES, glm_asr
from nanovllm_cli.models.ears_granite import GRANITE_SPEECH_NAMES, granite_speech
from nanovllm_cli.models.ears_moonshine import MOONSHINE_EAR_NAMES, moonshine
from nanovllm_cli.models.ears_omni import OMNI2_5_EAR_NAMES, OMNI_TRANSCRIPT, omni2_5
from nanovllm_cli.models.tower_configs import (
    activation_of,
    check_width,
    text_width,
    weights_and_biases,
)
from nanovllm_cli.models.whisper import DEFAULTS
from nanovllm_cli.vision_spec import ImageTokens

_QWEN3_TOKENS = ImageTokens("<|audio_pad|>", "<|audio_pad|>")  # the template writes what is around them
_QWEN2_TOKENS = ImageTokens("<|AUDIO|>", "<|AUDIO|>")
_QWEN2_AROUND = "<|audio_bos|>", "<|audio_eos|>"
_VOXTRAL_TOKENS = ImageTokens("[AUDIO]", "[AUDIO]")
_WHISPER_TOKENS = ImageTokens("<|startoflm|>", "<|startoflm|>")  # of no use to anybody else, and in all of its vocabularies
# Qwen3-ASR's and Voxtral's as they were trained; others chat, and are asked.
_QWEN3_TRANSCRIPT = Transcript(own="subject", begins_in="language {name}<asr_text>")
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
    name may begin with is left to who reads them. other_names: where they were called otherwise. section: of the config, that is
    the tower's; None: all of that is. roots: modules that are its own."""

    read: Read
    names: Names
    other_names: Names | None = None
    section: str | None = "audio_config"
    roots: tuple[str, ...] = ("audio_tower", "multi_modal_projector", "embed_audio")


def ear_family(config: Mapping[str, Any]) -> EarFamily | None:
    """By "architectures", as written in config.json; None where nothing here knows how such a model hears, if it does."""
    names = config.get("architectures")
    return EARS.get(str(names[0])) if isinstance(names, list) and names else None


def _voxtral(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    audio = config.section("audio_config")
    shape = whisper_shape(audio, ("hidden_size", 1280), ("num_hidden_layers", 32), ("num_attention_heads", 20), 5120)
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
    return whole(tower, sounds, audio, spec)


def _whisper(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    audio = ConfigReader({**DEFAULTS, **{key: value for key, value in config.values.items() if value is not None}}, config.where)
    shape = whisper_shape(audio, ("d_model",), ("encoder_layers", 4), ("encoder_attention_heads", 6), 1536)
    tower = EarSpec(**shape, out_size=shape["hidden_size"], projector="none")
    decoder = config.integer("decoder_layers", 4), config.integer("decoder_attention_heads", 6)
    spec = HearingSpec(
        tower, _WHISPER_TOKENS, 2 * tower.positions, ("", ""), Transcript(), padded=True, leads=True, decoder=decoder
    )
    return whole(tower, sounds, audio, spec)


def _qwen2_audio(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    audio = config.section("audio_config")
    shape = whisper_shape(audio, ("d_model", 1280), ("encoder_layers", 32), ("encoder_attention_heads", 20), 5120)
    tower = EarSpec(**shape, out_size=text_width(config), projector="one", projector_bias=True, pooled=2)
    spec = HearingSpec(
        tower, _QWEN2_TOKENS, 2 * tower.positions, _QWEN2_AROUND, _QWEN2_TRANSCRIPT, padded=True, framed=True, most=1
    )
    return whole(tower, sounds, audio, spec)


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
        **shape_of(
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
    check_settings(sounds, tower)
    return HearingSpec(tower, _QWEN3_TOKENS, window, ("<|audio_start|>", "<|audio_end|>"), OMNI_TRANSCRIPT)


_QWEN3: dict[str, str | tuple[str, ...]] = LAYER | {
    **{f"front{i}": f"audio_tower.conv2d{i + 1}" for i in range(3)},
    "front_out": "audio_tower.conv_out",
    "post_norm": "audio_tower.ln_post",
}
WHISPER_NAMES = {
    ours: tuple(each.replace("audio_tower.", "encoder.") for each in theirs)
    for ours, theirs in {**weights_and_biases(WHISPER), **NO_KEY_BIAS}.items()
}
VOXTRAL_NAMES = weights_and_biases(WHISPER | TWO) | NO_KEY_BIAS
QWEN2_NAMES = weights_and_biases(WHISPER | {"projector.out": "multi_modal_projector.linear"}) | NO_KEY_BIAS
QWEN3_NAMES = weights_and_biases(_QWEN3 | TWO)
QWEN3_FIRST_NAMES = weights_and_biases(
    _QWEN3 | {"projector.up": "audio_tower.proj1", "projector.down": "audio_tower.proj2"}
)
_GRANITE = EarFamily(granite_speech, GRANITE_SPEECH_NAMES, section="encoder_config", roots=("encoder", "projector"))
_OMNI2_5 = EarFamily(omni2_5, OMNI2_5_EAR_NAMES)
_OMNI3 = EarFamily(_qwen3_omni, QWEN3_FIRST_NAMES)
EARS: dict[str, EarFamily] = {
    "AudioFlamingo3ForConditionalGeneration": EarFamily(audio_flamingo, FLAMINGO_NAMES),
    "Gemma4ForConditionalGeneration": EarFamily(gemma4, GEMMA4_EAR_NAMES),
    "GlmAsrForConditionalGeneration": EarFamily(glm_asr, GLM_ASR_NAMES),
    "GraniteSpeechForConditionalGeneration": _GRANITE,
    "GraniteSpeechPlusForConditionalGeneration": _GRANITE,
    "MoonshineForConditionalGeneration": EarFamily(moonshine, MOONSHINE_EAR_NAMES, section=None, roots=("encoder",)),
    "MusicFlamingoForConditionalGeneration": EarFamily(music_flamingo, FLAMINGO_NAMES),
    "Qwen2_5OmniForConditionalGeneration": _OMNI2_5,
    "Qwen2_5OmniModel": _OMNI2_5,
    "Qwen2_5OmniThinkerForConditionalGeneration": _OMNI2_5,
    "Qwen2AudioForConditionalGeneration": EarFamily(_qwen2_audio, QWEN2_NAMES),
    "Qwen3ASRForConditionalGeneration": EarFamily(_qwen3_asr, QWEN3_NAMES, QWEN3_FIRST_NAMES),
    "Qwen3OmniMoeForConditionalGeneration": _OMNI3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _OMNI3,
    "VoxtralForConditionalGeneration": EarFamily(_voxtral, VOXTRAL_NAMES),
    "WhisperForConditionalGeneration": EarFamily(_whisper, WHISPER_NAMES, section=None, roots=("encoder",)),
}
