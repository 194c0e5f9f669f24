"""How a Moonshine hears (Jeffries et al. 2024): samples as they are become rows by three convolutions, 41.7 a second, and layers
of a transformer read these, whose positions turn a share of each head. See `ears.py`, and `moonshine.py` for its decoder."""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import RATE, EarSpec, HearingSpec, Transcript
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.moonshine import LONGEST, MAX_POSITIONS, with_defaults
from nanovllm_cli.models.rotary import rope_from_hf
from nanovllm_cli.models.tower_configs import activation_of, check_only, depth_of, heads_of, weights_and_biases
from nanovllm_cli.vision_spec import ImageTokens

TOKENS = ImageTokens("<s>", "<s>")
"""What a text begins with, in all of its vocabularies."""


def moonshine(config: ConfigReader, sounds: ConfigReader) -> HearingSpec:
    read = ConfigReader(with_defaults(config.values), config.where)
    hidden = read.integer("hidden_size")
    heads = heads_of(read, "encoder_num_attention_heads", hidden, parts=1)
    if read.integer("encoder_num_key_value_heads", heads) != heads or read.flag("attention_bias", False):
        told = "a Moonshine with fewer heads of keys than of queries, or with biases in attention"
        raise UnsupportedError(f"{read.where}: {told}", ANOTHER)
    rope = rope_from_hf(read, hidden // heads, read.integer("max_position_embeddings"))
    if rope.scaling != "none":
        raise UnsupportedError(f"{read.where}: an encoder whose rotary positions are scaled ({rope.scaling})", ANOTHER)
    if hidden // heads % 2:
        raise UnsupportedError(f"{read.where}: heads of {hidden // heads} numbers", ANOTHER)
    if (text_len := read.integer("max_position_embeddings")) > MAX_POSITIONS:
        raise CheckpointError(f"{read.where}: texts of {text_len} positions; at most {MAX_POSITIONS} are believed", BROKEN)
    check_only(sounds, feature_size=1, sampling_rate=RATE, padding_value=0.0, padding_side="right", do_normalize=False)
    tower = EarSpec(
        num_bins=1, front="wave", positions=0, hidden_size=hidden, num_layers=depth_of(read, "encoder_num_hidden_layers", 6),
        num_heads=heads, intermediate_size=read.integer("intermediate_size"), out_size=hidden,
        activation=activation_of(read, "gelu", "encoder_hidden_act"), projector="none", key_bias=True, turned=rope.dim,
        theta=rope.theta, bare=True,
    )  # fmt: skip
    return HearingSpec(tower, TOKENS, LONGEST, ("", ""), Transcript(), leads=True, text_len=text_len)


MOONSHINE_EAR_NAMES = weights_and_biases({
    "front0": "encoder.conv1",
    "front1": "encoder.conv2",
    "front2": "encoder.conv3",
    "front_norm": "encoder.groupnorm",
    "layers.{i}.attention_norm": "encoder.layers.{i}.input_layernorm",
    "layers.{i}.qkv": tuple(f"encoder.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": "encoder.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "encoder.layers.{i}.post_attention_layernorm",
    "layers.{i}.up": "encoder.layers.{i}.mlp.fc1",
    "layers.{i}.down": "encoder.layers.{i}.mlp.fc2",
    "post_norm": "encoder.layer_norm",
})  # fmt: skip
