"""GPT-Neo (Black et al. 2021; TinyStories, Eldan and Li 2023) and GPT-J (Wang and Komatsuzaki 2021), between GPT-2 and GPT-NeoX.

GPT-Neo: GPT-2 with matrices as usual, scores that nothing divides, and in every second layer a window. GPT-J: attention and MLP
side by side behind one layer norm, and a part of each head rotated, by pairs that lie side by side. llama.cpp computes neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE_TANH
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import Family, no_file
from nanovllm_cli.models.gpt2 import KEYS, with_usual_width
from nanovllm_cli.models.names import modules, weights_and_biases
from nanovllm_cli.models.rotary import checked_rope

_NEO_KEYS = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
}  # fmt: skip
_NEO_PARTS = {
    "attention_norm": "ln_1", "mlp_norm": "ln_2", **{part: f"attn.attention.{part}_proj" for part in "qkv"},
    "o": "attn.attention.out_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
}  # fmt: skip
_J_PARTS = {
    "attention_norm": "ln_1", **{part: f"attn.{part}_proj" for part in "qkv"}, "o": "attn.out_proj", "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}  # fmt: skip
_WINDOWED = {"global": False, "local": True}
_EVERY_SECOND = [[["global", "local"], 12]]


def _names(parts: Mapping[str, str]) -> dict[str, str]:
    names = weights_and_biases({**modules("blocks.{i}.", "transformer.h.{i}.", parts), "norm": "transformer.ln_f"})
    return {"embedding.weight": "transformer.wte.weight", **names}


def _has_window(read: ConfigReader, layers: int) -> list[bool]:
    """Of each layer, which "attention_layers" names. "attention_types" lists kinds of layers behind each other, and how often
    they come so."""
    named = read.values.get("attention_layers")
    listed = read.values.get("attention_types") if named is None else [[named, 1]]
    listed = _EVERY_SECOND if listed is None else listed
    found: list[bool] = []
    for entry in listed if isinstance(listed, list) else [None]:
        match entry:
            case [list(kinds) | tuple(kinds), int(count)] if 0 < count <= layers and {*map(str, kinds)} <= _WINDOWED.keys():
                found += [_WINDOWED[kind] for kind in kinds] * count
            case _:
                raise CheckpointError(f"{read.where}: 'attention_types' must list pairs of kinds and a count", BROKEN)
    if len(found) != layers:
        raise CheckpointError(f"{read.where}: 'attention_types' has {len(found)} of {layers} layers", BROKEN)
    return found


def _neo_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    window, has_window = read.integer("window_size"), _has_window(read, spec.num_layers)
    spec = spec.each_attention(lambda layer, own: replace(own, window=window if has_window[layer] else None))
    return replace(spec, entry=EntrySpec(None, positions=spec.max_position))


def _j_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    dim, head_dim = read.integer("rotary_dim"), spec.attention.head_dim
    spec = spec.each_rope(lambda rope: checked_rope(replace(rope, dim=dim), head_dim, read))
    return replace(spec, head_bias=True)


GPT_NEO = Family(
    "gpt_neo",
    attention={"rope": None, "out_bias": True, "scale": 1.0},
    layer_norm=True,
    shifted=True,
    qkv_bias=False,
    ungated=LONE_TANH,
    tied_by_default=True,
    outer="transformer.",
    config=lambda config: with_usual_width(config, _NEO_KEYS),
    defaults={
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "window_size": 256, "mlp_bias": True,
    },
    hf_names=_names(_NEO_PARTS) | {"positions.weight": "transformer.wpe.weight"},
    hf=_neo_from_hf,
    gguf_like=no_file("GPT-Neo"),
)  # fmt: skip
GPT_J = Family(
    "gptj",
    order="parallel",
    layer_norm=True,
    shifted=True,
    qkv_bias=False,
    interleaved=True,
    ungated=LONE_TANH,
    outer="transformer.",
    config=lambda config: with_usual_width(config, KEYS),
    defaults={
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "rotary_dim": 64, "mlp_bias": True,
    },
    hf_names=_names(_J_PARTS),
    hf=_j_from_hf,
    gguf_like=no_file("GPT-J"),
)  # fmt: skip
