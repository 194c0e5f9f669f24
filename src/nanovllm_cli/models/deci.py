"""DeciLM: a Llama whose layers a search has made to differ: in how many queries share a key, in how wide their MLPs are, and in
whether they have attention and an MLP at all (Llama Nemotron 51B, Super 49B and Ultra 253B; DeciLM 7B)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import LLAMA
from nanovllm_cli.models.family import ANOTHER, GGUFField

MULTIPLE = 256
"""Of which an MLP's width is one, where a config has it as a factor."""
_CONFIG = "config.json"
_OTHERS = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")
"""What layers may have instead, if one of these is given and is not false."""


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What it says by layer is null where others say it of all: something that holds until the layers are read."""
    if (kinds := config.get("num_key_value_heads_per_layer")) is not None:
        first = kinds[0] if isinstance(kinds, list) and kinds else None
        return {**config, "num_key_value_heads": config.get("num_key_value_heads") or first}
    if not isinstance(config.get("block_configs"), list):
        return config
    heads = config.get("num_attention_heads")
    return {**config, "num_key_value_heads": heads, "intermediate_size": config.get("intermediate_size") or MULTIPLE}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if "num_key_value_heads_per_layer" in read.values:
        counts = read.integers("num_key_value_heads_per_layer", spec.num_layers)
        mlp = spec.dense_mlp
        return with_sizes(spec, counts, [0 if mlp is None else mlp.intermediate_size] * spec.num_layers, read)
    listed = read.values.get("block_configs")
    if listed is None:
        return spec
    if not isinstance(listed, list) or len(listed) != spec.num_layers:
        raise CheckpointError(f"{read.where}: 'block_configs' must be a list of {spec.num_layers} layers", BROKEN)
    layers = [ConfigReader(each, f"{read.where}: block_configs[{i}]") for i, each in enumerate(map(_object, listed))]
    heads = spec.attention.num_heads
    counts = [_num_keys(layer.section("attention"), heads) for layer in layers]
    return with_sizes(spec, counts, [_width(layer.section("ffn"), spec.hidden_size) for layer in layers], read)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{_CONFIG}: each of 'block_configs' must be an object", BROKEN)
    return value


def _is_there(read: ConfigReader) -> bool:
    for name in _OTHERS:
        if read.values.get(name) not in (None, False):
            raise UnsupportedError(f"{read.where}: {name!r} is not supported", ANOTHER)
    return not read.flag("no_op", False)


def _num_keys(read: ConfigReader, heads: int) -> int:
    if not _is_there(read) or not read.has("n_heads_in_group"):
        return 0
    group = read.integer("n_heads_in_group")
    if heads % group:
        raise CheckpointError(f"{read.where}: {heads} heads don't make groups of {group}", BROKEN)
    return heads // group


def _width(read: ConfigReader, hidden_size: int) -> int:
    if not _is_there(read) or not (read.has("ffn_mult") or read.has("intermediate_size")):
        return 0
    if read.has("intermediate_size"):
        return read.integer("intermediate_size")
    return -(-int(2 * read.number("ffn_mult") * hidden_size / 3) // MULTIPLE) * MULTIPLE


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    names = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
    heads, counts, widths = (of_layers(read, key(name), spec.num_layers) for name in names)
    if any(each and not count for each, count in zip(heads, counts, strict=True)):
        raise UnsupportedError(f"{read.where}: a matrix in place of attention is not supported", ANOTHER)
    return with_sizes(spec, counts, widths, read)


def of_layers(read: ConfigReader, name: str, layers: int, least: int = 0) -> list[int]:
    """A number for each, or one for all of them."""
    listed = read.values.get(name)
    if not isinstance(listed, list | tuple):
        return [read.integer(name)] * layers
    if len(listed) < layers:
        raise CheckpointError(f"{read.where}: {name!r} must have a number for each of {layers} layers", BROKEN)
    return [ConfigReader({name: each}, read.where).integer(name, least=least) for each in listed[:layers]]


def with_sizes(
    spec: ModelSpec, key_counts: list[int], widths: list[int], read: ConfigReader, heads: list[int] | None = None
) -> ModelSpec:
    """The same with these key heads and widths of MLPs of each layer, 0 where it has none. heads: of queries, where those differ
    as well."""
    if not any(key_counts):
        raise UnsupportedError(f"{read.where}: no layer has attention", ANOTHER)
    heads = heads or [spec.attention.num_heads] * spec.num_layers
    for own, count in zip(heads, key_counts, strict=True):
        if count and own % count:
            raise CheckpointError(f"{read.where}: {own} heads don't share {count} of keys", BROKEN)
    attention, mlp = replace(spec.attention, keys_are_values=False), spec.mlps[0]
    assert isinstance(mlp, MLPSpec)
    return replace(spec, blocks=tuple(
        BlockSpec(
            replace(attention, num_heads=own, num_kv_heads=count) if count else None,
            replace(mlp, intermediate_size=width) if width else None,
        )
        for own, count, width in zip(heads, key_counts, widths, strict=True)
    ))  # fmt: skip


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    attentions = [mixer if isinstance(mixer, AttentionSpec) else None for mixer in spec.mixers]
    widths = [block.mlp.intermediate_size if isinstance(block.mlp, MLPSpec) else 0 for block in spec.blocks]
    return {
        "attention.head_count": [0 if each is None else each.num_heads for each in attentions],
        "attention.head_count_kv": [0 if each is None else each.num_kv_heads for each in attentions],
        "feed_forward_length": widths,
    }


DECI = replace(
    LLAMA, name="deci", gguf_name="deci", varied=True, config=_usual_keys, hf=_from_hf, gguf=_from_gguf, gguf_keys=_keys,
)  # fmt: skip
