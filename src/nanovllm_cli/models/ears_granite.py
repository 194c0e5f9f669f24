"""How a Granite Speech hears: its configs -> HearingSpec, and what its folders call a tower's tensors. See `ears.py`.

A sound is one piece, as convolutions along time reach over its blocks. Not covered: those whose decoder has a LoRA adapter for
sounds (3.2, 3.3): what such a one writes of a sound without it is of no use.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW, EarSpec, HearingSpec, ShawSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ear_configs import MAX_BINS
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import check_only, depth_of, heads_of, text_width, weights_and_biases
from nanovllm_cli.vision_spec import ImageTokens

_TOKENS = ImageTokens("<|audio|>", "<|audio|>")
_ASKED = "can you transcribe the speech into a written format?"
_TRANSCRIPT = Transcript(_ASKED, f"{_ASKED} It is {{name}}.", "question")
_SECONDS = 300
_MAX = 1 << 14
"""Of blocks, distances, kernels, classes and windows, whatever files say."""


def granite_speech(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    """Of config.json, and of the feature extractor's settings."""
    audio, asked = config.section("encoder_config"), config.section("projector_config")
    if config.flag("has_lora_adapter", True):
        told = f"{config.where}: sounds are not read by a model whose decoder has a LoRA adapter for them"
        raise UnsupportedError(told, "granite-speech:1b has none, and hears")
    hidden = audio.integer("hidden_dim", 1024)
    heads = heads_of(audio, "num_heads", hidden, 8, parts=1)
    if (dim := audio.values.get("dim_head")) not in (None, hidden // heads):
        told = f"{audio.where}: {heads} heads of {str(dim)[:20]} dimensions in rows of {hidden} are not supported"
        raise UnsupportedError(told, ANOTHER)
    bands = audio.integer("input_dim", 160)
    if bands % 2 or bands > 2 * MAX_BINS:
        raise CheckpointError(f"{audio.where}: two spectrograms' frames of {bands} bands together are not believed", BROKEN)
    layers = depth_of(audio, "num_layers", 10)
    tower = EarSpec(
        num_bins=bands // 2,
        front="pairs",
        positions=0,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=hidden * _bounded(audio, "feedforward_mult", 4),
        out_size=text_width(config),
        activation="silu",
        key_bias=True,
        projector="queries",
        shaw=_shaw(config, audio, asked, layers),
    )
    if layers < 2:
        raise UnsupportedError(f"{audio.where}: a tower of one layer is not supported", ANOTHER)
    _check_settings(sounds, tower)
    piece = _SECONDS * RATE // HOP
    return HearingSpec(tower, _TOKENS, piece, ("", ""), _TRANSCRIPT, most=1, spectrogram="pairs")


def _shaw(config: ConfigReader, audio: ConfigReader, asked: ConfigReader, layers: int) -> ShawSpec:
    check_only(asked, model_type="blip_2_qformer", hidden_act="gelu", use_qformer_text_input=False)
    window, rate = _bounded(config, "window_size", 15), _bounded(config, "downsample_rate", 5)
    if window % rate:
        raise CheckpointError(f"{config.where}: {rate} rows of {window} don't become one evenly", BROKEN)
    block, farthest = _bounded(audio, "context_size", 200), _bounded(audio, "max_pos_emb", 512)
    if block > farthest:
        raise CheckpointError(f"{audio.where}: blocks of {block} rows, and distances up to {farthest}", BROKEN)
    kept, width = _kept(audio, layers), asked.integer("hidden_size", 768)
    seen = audio.integer("hidden_dim", 1024) * (1 + len(kept))
    if (said := asked.integer("encoder_hidden_size", 1408)) != seen:
        raise CheckpointError(f"{asked.where}: queries see rows of {said} numbers, and the tower's have {seen}", BROKEN)
    depth = depth_of(asked, "num_hidden_layers", 12)
    if (every := asked.integer("cross_attention_frequency", 2)) != 1 and depth > 1:
        raise UnsupportedError(f"{asked.where}: queries that see a window in one of {every} layers are not supported", ANOTHER)
    return ShawSpec(
        block=block,
        farthest=farthest,
        kernel=_bounded(audio, "conv_kernel_size", 15),
        widened=audio.integer("hidden_dim", 1024) * _bounded(audio, "conv_expansion_factor", 2),
        classes=_bounded(audio, "output_dim", 42),
        kept=kept,
        window=window,
        queries=window // rate,
        query_size=width,
        query_layers=depth,
        query_heads=heads_of(asked, "num_attention_heads", width, 12, parts=1),
        query_inner=asked.integer("intermediate_size", 3072),
        query_eps=asked.number("layer_norm_eps", 1e-12),
    )


def _kept(audio: ConfigReader, layers: int) -> tuple[int, ...]:
    """Layers, in order, whose rows queries see beside the last one's; 0: what layers begin with."""
    said = audio.values.get("cat_hidden_layers") or []
    if not isinstance(said, list) or len(said) > layers:
        raise CheckpointError(f"{audio.where}: 'cat_hidden_layers' must be a list of layers", BROKEN)
    kept = [ConfigReader({"cat_hidden_layers": each}, audio.where).integer("cat_hidden_layers", least=0) for each in said]
    if sorted(set(kept)) != kept or any(each >= layers for each in kept):
        raise CheckpointError(f"{audio.where}: 'cat_hidden_layers' must be in order, each once, and below {layers}", BROKEN)
    return tuple(kept)


def _bounded(read: ConfigReader, key: str, usual: int) -> int:
    if (number := read.integer(key, usual)) > _MAX:
        raise CheckpointError(f"{read.where}: {key} {number} is not believed", BROKEN)
    return number


def _check_settings(sounds: ConfigReader, tower: EarSpec) -> None:
    assert tower.shaw is not None
    shaw = tower.shaw
    told = {**sounds.values, **sounds.section("melspec_kwargs").values}
    read = ConfigReader(told, sounds.where)
    known = {"n_mels": tower.num_bins, "sampling_rate": RATE, "sample_rate": RATE, "hop_length": HOP, "n_fft": 512,
             "win_length": WINDOW, "projector_window_size": shaw.window,
             "projector_downsample_rate": shaw.window // shaw.queries}  # fmt: skip
    for key, made in known.items():
        if (said := read.integer(key, made)) != made:
            raise UnsupportedError(f"{sounds.where}: {key} {said} is not supported", f"known: {made}")


_LAYER, _ASK = "encoder.layers.{i}", "projector.qformer.encoder.layer.{i}"
_BATCH = tuple(f"{_LAYER}.conv.batch_norm.{each}" for each in ("weight", "bias", "running_mean", "running_var"))
_MODULES: dict[str, str | tuple[str, ...]] = {
    "front": "encoder.input_linear",
    **{f"layers.{{i}}.{ours}.{part}": f"{_LAYER}.{theirs}.{name}" for ours, theirs in (("first", "ff1"), ("second", "ff2"))
       for part, name in (("norm", "pre_norm"), ("up", "up_proj"), ("down", "down_proj"))},
    "layers.{i}.attention_norm": f"{_LAYER}.attn.pre_norm",
    "layers.{i}.qkv": (f"{_LAYER}.attn.to_q", f"{_LAYER}.attn.to_kv"),
    "layers.{i}.out": f"{_LAYER}.attn.to_out",
    "layers.{i}.conv.norm": f"{_LAYER}.conv.norm",
    "layers.{i}.conv.up": f"{_LAYER}.conv.up_conv",
    "layers.{i}.conv.down": f"{_LAYER}.conv.down_conv",
    "layers.{i}.norm": f"{_LAYER}.post_norm",
    "classes.up": "encoder.out",
    "classes.down": "encoder.out_mid",
    "query_norm": "projector.qformer.layernorm",
    "asked.{i}.qkv": tuple(f"{_ASK}.attention.attention.{each}" for each in ("query", "key", "value")),
    "asked.{i}.self_out": f"{_ASK}.attention.output.dense",
    "asked.{i}.self_norm": f"{_ASK}.attention.output.LayerNorm",
    "asked.{i}.cross_q": f"{_ASK}.crossattention.attention.query",
    "asked.{i}.cross_kv": tuple(f"{_ASK}.crossattention.attention.{each}" for each in ("key", "value")),
    "asked.{i}.cross_out": f"{_ASK}.crossattention.output.dense",
    "asked.{i}.cross_norm": f"{_ASK}.crossattention.output.LayerNorm",
    "asked.{i}.up": f"{_ASK}.intermediate_query.dense",
    "asked.{i}.down": f"{_ASK}.output_query.dense",
    "asked.{i}.mlp_norm": f"{_ASK}.output_query.LayerNorm",
    "projector.out": "projector.linear",
}  # fmt: skip
GRANITE_SPEECH_NAMES = weights_and_biases(_MODULES) | {
    "layers.{i}.distances.table": (f"{_LAYER}.attn.rel_pos_emb.weight",),
    "layers.{i}.conv.kernel": (f"{_LAYER}.conv.depth_conv.conv.weight",),
    "layers.{i}.conv.batch_norm.table": _BATCH,
    "query.table": ("projector.query",),
}
