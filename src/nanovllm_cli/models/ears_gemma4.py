"""How a Gemma 4 hears (E2B, E4B): its configs -> HearingSpec, and what its folders call a tower's tensors. See `ears.py`.

Spectrograms are of pieces of half a minute, which is all that such a model was trained to hear at once. Not covered: 12B, which
hears without a tower.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, ConformerSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import activation_of, check_only, depth_of, heads_of, text_width
from nanovllm_cli.models.towers_gemma4 import BOUNDS
from nanovllm_cli.vision_spec import ImageTokens

TOKENS = ImageTokens("<|audio|>", "<|audio|>", before="<|audio>", after="<audio|>")
_SECONDS = 30
_MAX_BINS, _MAX_WINDOW = 1 << 10, 1 << 10
_HIDDEN = -1e4  # softmax makes 0 of all scores below
_ASKED = "Transcribe the speech in this recording{}. Write nothing but what is said, without line breaks, and numbers as digits."
_TRANSCRIPT = Transcript(_ASKED.format(""), _ASKED.format(" in {name} into {name} text"), "question")


def gemma4(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """Of config.json, and of the feature extractor's settings."""
    audio = config.section("audio_config")
    check_only(audio, model_type="gemma4_audio", attention_context_right=0)
    hidden = audio.integer("hidden_size", 1024)
    if hidden % 2 or hidden < 4:
        raise CheckpointError(f"{audio.where}: 'hidden_size' must be even, not {hidden}", BROKEN)
    if audio.number("attention_invalid_logits_value", -1e9, positive=False) > _HIDDEN:
        raise UnsupportedError(f"{audio.where}: scores of what is not seen must be below {_HIDDEN:g}", ANOTHER)
    tower = ConformerSpec(
        num_bins=_bins(sounds),
        channels=_channels(audio),
        hidden_size=hidden,
        num_layers=depth_of(audio, "num_hidden_layers", 12),
        num_heads=heads_of(audio, "num_attention_heads", hidden, 8, parts=1),
        window=_window(audio),
        softcap=audio.number("attention_logit_cap", 50.0),
        kernel=audio.integer("conv_kernel_size", 5),
        share=audio.number("residual_weight", 0.5),
        activation=activation_of(audio, "silu"),
        made_size=audio.integer("output_proj_dims", 1536),
        out_size=text_width(config),
        clipped=audio.flag("use_clipped_linears", True),
        limit=audio.number("gradient_clipping", 1e10),
        eps=audio.number("rms_norm_eps", 1e-6),
    )
    if tower.kernel > _MAX_WINDOW:
        raise CheckpointError(f"{audio.where}: convolutions over {tower.kernel} rows are not believed", BROKEN)
    if tower.halved_bins != (given := tower.channels[0] // 4):  # so transformers has it
        told = f"{tower.num_bins} bands become {tower.halved_bins}, and a matrix reads {given}"
        raise CheckpointError(f"{audio.where}: {told}", BROKEN)
    around = TOKENS.before, TOKENS.after
    return HearingSpec(tower, TOKENS, _SECONDS * RATE // HOP - 1, around, _TRANSCRIPT, spectrogram="universal")


def _bins(sounds: ConfigReader) -> int:
    """And what else a spectrogram must be."""
    numbers: dict[str, float] = {
        "sampling_rate": RATE, "frame_length": 2 * HOP, "frame_length_ms": 20, "hop_length": HOP, "hop_length_ms": 10,
        "fft_length": 512, "min_frequency": 0, "max_frequency": RATE / 2, "preemphasis": 0, "dither": 0,
        "input_scale_factor": 1, "mel_floor": 1e-3,
    }  # fmt: skip
    for key, made in numbers.items():
        if abs((said := sounds.number(key, made, positive=False)) - made) > 1e-6:
            raise UnsupportedError(f"{sounds.where}: {key} {said:g} is not supported", f"known: {made:g}")
    check_only(sounds, fft_overdrive=False, per_bin_mean=None, per_bin_stddev=None)
    if (bins := sounds.integer("feature_size", 128)) > _MAX_BINS:
        raise CheckpointError(f"{sounds.where}: spectrograms of {bins} bands are not believed", BROKEN)
    return bins


def _channels(audio: ConfigReader) -> tuple[int, int]:
    said = audio.values.get("subsampling_conv_channels", [128, 32])
    if not isinstance(said, list | tuple) or len(said) != 2:
        raise CheckpointError(f"{audio.where}: 'subsampling_conv_channels' must be a list of two numbers", BROKEN)
    first, second = (ConfigReader({"subsampling_conv_channels": each}, audio.where).integer("subsampling_conv_channels")
                     for each in said)  # fmt: skip
    return first, second


def _window(audio: ConfigReader) -> int:
    """Distances are counted from the middle of a chunk and what it sees; here, from the row itself, which is the same where
    chunks are as long as a row sees."""
    window, chunk = audio.integer("attention_context_left", 13, least=2) - 1, audio.integer("attention_chunk_size", 12)
    if window > _MAX_WINDOW:
        raise CheckpointError(f"{audio.where}: attention to {window} rows is not believed", BROKEN)
    if chunk not in (window, window + 1):
        raise UnsupportedError(f"{audio.where}: chunks of {chunk} rows are not supported", f"known: {window}, for such a context")
    return window


_LAYER = "audio_tower.layers.{i}"
_MATRICES: dict[str, tuple[str, ...]] = {
    "first.up": ("feed_forward1.ffw_layer_1",), "first.down": ("feed_forward1.ffw_layer_2",),
    "qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"), "out": ("self_attn.post",),
    "conv.up": ("lconv1d.linear_start",), "conv.down": ("lconv1d.linear_end",),
    "second.up": ("feed_forward2.ffw_layer_1",), "second.down": ("feed_forward2.ffw_layer_2",),
}  # fmt: skip
_NORMS = {
    "first.norm": "feed_forward1.pre_layer_norm", "first.after_norm": "feed_forward1.post_layer_norm",
    "attention_norm": "norm_pre_attn", "after_attention_norm": "norm_post_attn",
    "conv.norm": "lconv1d.pre_layer_norm", "conv.between_norm": "lconv1d.conv_norm",
    "second.norm": "feed_forward2.pre_layer_norm", "second.after_norm": "feed_forward2.post_layer_norm", "norm": "norm_out",
}  # fmt: skip
_FRONT = "audio_tower.subsample_conv_projection"
_OTHERS = {
    **{f"front{i}.weight": f"{_FRONT}.layer{i}.conv.weight" for i in (0, 1)},
    **{f"front{i}.norm.weight": f"{_FRONT}.layer{i}.norm.weight" for i in (0, 1)},
    "front_out.weight": f"{_FRONT}.input_proj_linear.weight",
    "layers.{i}.query_scale": f"{_LAYER}.self_attn.per_dim_scale",
    "layers.{i}.distances.weight": f"{_LAYER}.self_attn.relative_k_proj.weight",
    "layers.{i}.conv.kernel": f"{_LAYER}.lconv1d.depthwise_conv1d.weight",
    **{f"layers.{{i}}.{ours}.weight": f"{_LAYER}.{theirs}.weight" for ours, theirs in _NORMS.items()},
    "out.weight": "audio_tower.output_proj.weight",
    "out.bias": "audio_tower.output_proj.bias",
    "projector.out.weight": "embed_audio.embedding_projection.weight",
}
GEMMA4_EAR_NAMES: dict[str, tuple[str, ...]] = {
    **{ours: (theirs,) for ours, theirs in _OTHERS.items()},
    **{f"layers.{{i}}.{ours}.weight": tuple(f"{_LAYER}.{each}.linear.weight" for each in theirs)
       for ours, theirs in _MATRICES.items()},
    **{f"layers.{{i}}.{ours}.bounds": tuple(f"{_LAYER}.{each}.{bound}" for each in theirs for bound in BOUNDS)
       for ours, theirs in _MATRICES.items()},
}  # fmt: skip
