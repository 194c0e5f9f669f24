"""RWKV-7, "Goose" (Peng et al. 2025), as flash-linear-attention names it in folders, and llama.cpp in files: states in place of
attention, and an MLP that reads what came of the token before, too. Nothing has positions, so that no length is the longest.

What `families.py` asks of heads in every config is told here of none, and left out of the spec again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all
from nanovllm_cli.models.names import weights_and_biases
from nanovllm_cli.models.states_alone import USUAL_CONTEXT
from nanovllm_cli.state_spec import WkvSpec

MAX_HEAD_DIM = 1 << 10
HEADS_EPS = 64e-5
"""Of the norm of what heads find: what llama.cpp has, whatever a file says, and folders of heads of 64 numbers."""
_NONE = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "attention_bias": False,
         "max_position_embeddings": USUAL_CONTEXT}  # fmt: skip
_NONE_IN_GGUF = {"attention.head_count": 1, "attention.head_count_kv": 1, "attention.key_length": 2, "attention.value_length": 2}
_RANKS = ("decay", "a", "v", "gate")
_GGUF_RANKS = ("decay", "iclr", "value_residual_mix", "gate")


def _usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What trains such models sees so many tokens at once (max_position_embeddings), which bounds nothing."""
    found = {**config, **_NONE, "state_head_dim": config.get("head_dim"), "layer_norm_eps": config.get("norm_eps", 1e-5)}
    hidden, ratio = config.get("hidden_size"), ConfigReader(config, "config.json").number("hidden_ratio", 4)
    if config.get("intermediate_size") is None and type(hidden) is int:
        found["intermediate_size"] = -(-int(hidden * ratio) // 32) * 32
    return found


def _usual_gguf_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    arch = metadata["general.architecture"]
    return {**metadata, **{f"{arch}.{key}": value for key, value in _NONE_IN_GGUF.items()}}


def _with_states(spec: ModelSpec, dim: int, ranks: list[int], eps: float, where: str) -> ModelSpec:
    """CheckpointError for heads that make no whole number, or are larger than is believed."""
    if spec.hidden_size % dim or dim > MAX_HEAD_DIM:
        raise CheckpointError(f"{where}: heads of {dim} numbers can't have {spec.hidden_size} together", BROKEN)
    decay, rate, value, gate = ranks
    first = WkvSpec(spec.hidden_size // dim, dim, decay, rate, 0, gate, is_first=True, eps=eps)
    others = replace(first, value_rank=value, is_first=False)
    return replace(spec, entry=EntrySpec(spec.norm)).with_mixers([first, *[others] * (spec.num_layers - 1)])


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "an RWKV-7", norm_first=True, norm_bias=True)
    if read.has("attn"):
        raise UnsupportedError(f"{read.where}: an RWKV-7 with attention in some of its layers", ANOTHER)
    values = read.values.get("value_dim")
    if values not in (None, spec.hidden_size, [spec.hidden_size] * spec.num_layers):
        raise UnsupportedError(f"{read.where}: an RWKV-7 whose values are wider than its keys", ANOTHER)
    if read.has("state_head_dim"):
        dim = read.integer("state_head_dim")
    else:
        dim = spec.hidden_size // read.integer("num_heads", max(1, spec.hidden_size // 64))
    dim = max(dim, 1)
    ranks = [read.integer(f"{of}_low_rank_dim") for of in _RANKS]
    return _with_states(spec, dim, ranks, dim * spec.norm.eps, read.where)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if (count := read.integer(key("token_shift_count"), 2)) != 2:
        raise UnsupportedError(f"{read.where}: an RWKV-7 of whose two parts {count} see the token before", ANOTHER)
    ranks = [read.integer(key(f"attention.{of}_lora_rank")) for of in _GGUF_RANKS]
    return _with_states(spec, read.integer(key("wkv.head_size")), ranks, HEADS_EPS, read.where)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What is of no meaning is 0, as llama.cpp's converter has it."""
    wkv = spec.blocks[-1].mixer
    assert isinstance(wkv, WkvSpec)
    usual = abs(wkv.eps / HEADS_EPS - 1) < 1e-6
    has_all("rwkv7", usual_eps_of_the_norm_of_heads=usual, head_of_its_own=not spec.tied_head, second_layer=spec.num_layers > 1)
    ranks = dict(zip(_GGUF_RANKS, (wkv.decay_rank, wkv.rate_rank, wkv.value_rank, wkv.gate_rank), strict=True))
    keys: dict[str, GGUFField] = {"attention.head_count": 0, "wkv.head_size": wkv.head_dim, "token_shift_count": 2}
    return keys | {f"attention.{of}_lora_rank": rank for of, rank in ranks.items()} | {"feed_forward_length": _inner(spec)}


def _inner(spec: ModelSpec) -> int:
    assert spec.dense_mlp is not None
    return spec.dense_mlp.intermediate_size


_LAYER, _NARROW = "model.layers.{i}", {"1": "0.weight", "2": "2.weight"}
_HF = {
    **{f"blocks.{{i}}.time_{part}.weight": f"{_LAYER}.attn.{part}_proj.weight" for part in "rkv"},
    "blocks.{i}.time_out.weight": f"{_LAYER}.attn.o_proj.weight",
    **{f"blocks.{{i}}.time_{part}{i}.weight": f"{_LAYER}.attn.{part}_lora.lora.{theirs}"
       for part in "wavg" for i, theirs in _NARROW.items()},
    **{f"blocks.{{i}}.time.share_{part}": f"{_LAYER}.attn.x_{part}" for part in "rwkvag"},
    **{f"blocks.{{i}}.time.{ours}": f"{_LAYER}.attn.{theirs}"
       for ours, theirs in (("decay", "w_lora.lora.2.bias"), ("rate", "a_lora.lora.2.bias"), ("value", "v_lora.lora.2.bias"),
                            ("key_gains", "k_k"), ("rate_gains", "k_a"), ("bonus", "r_k"), ("norm", "g_norm.weight"),
                            ("norm_bias", "g_norm.bias"))},
    "blocks.{i}.channel.share_k": f"{_LAYER}.ffn.x_k",
    "blocks.{i}.up.weight": f"{_LAYER}.ffn.key.weight",
    "blocks.{i}.down.weight": f"{_LAYER}.ffn.value.weight",
}  # fmt: skip
_GGUF = {
    **{f"blocks.{{i}}.time_{ours}.weight": f"blk.{{i}}.time_mix_{theirs}.weight"
       for ours, theirs in (("r", "receptance"), ("k", "key"), ("v", "value"), ("out", "output"))},
    **{f"blocks.{{i}}.time_{part}{i}.weight": f"blk.{{i}}.time_mix_{part}{i}.weight" for part in "wavg" for i in "12"},
    **{f"blocks.{{i}}.time.share_{part}": f"blk.{{i}}.time_mix_lerp_{part}.weight" for part in "rwkvag"},
    **{f"blocks.{{i}}.time.{ours}": f"blk.{{i}}.time_mix_{theirs}"
       for ours, theirs in (("decay", "w0.weight"), ("rate", "a0.weight"), ("value", "v0.weight"), ("key_gains", "k_k.weight"),
                            ("rate_gains", "k_a.weight"), ("bonus", "r_k.weight"), ("norm", "ln.weight"),
                            ("norm_bias", "ln.bias"))},
    "blocks.{i}.channel.share_k": "blk.{i}.channel_mix_lerp_k.weight",
    "blocks.{i}.up.weight": "blk.{i}.channel_mix_key.weight",
    "blocks.{i}.down.weight": "blk.{i}.channel_mix_value.weight",
}  # fmt: skip
RWKV7 = Family(
    "rwkv7",
    layer_norm=True,
    shifted=True,
    ungated={"sqrelu": "relu2"},
    config=_usual_keys,
    metadata=_usual_gguf_keys,
    template="rwkv",
    aside=tuple(f"blk.0.time_mix_v{i}.weight" for i in range(3)),
    defaults={
        "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 24, "hidden_act": "sqrelu", "decay_low_rank_dim": 64,
        "gate_low_rank_dim": 128, "a_low_rank_dim": 64, "v_low_rank_dim": 16,
    },
    hf=_from_hf,
    gguf=_from_gguf,
    hf_names=_HF | {"embedding.weight": "model.embeddings.weight"} | weights_and_biases({
        "blocks.{i}.attention_norm": f"{_LAYER}.attn_norm", "blocks.{i}.mlp_norm": f"{_LAYER}.ffn_norm",
        "entry_norm": "model.layers.0.pre_norm",
    }),
    gguf_names=_GGUF | weights_and_biases({"blocks.{i}.mlp_norm": "blk.{i}.attn_norm_2", "entry_norm": "token_embd_norm"}),
    gguf_activation="relu2",
    gguf_keys=_keys,
)  # fmt: skip
