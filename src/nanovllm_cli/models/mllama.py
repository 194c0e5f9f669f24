"""Llama 3.2 that sees (architecture `mllama`, 11B and 90B; Llama Team 2024): a Llama 3.1 between whose layers lie others, which
have no attention to what came before, but look at images (`LookSpec`). What they look at is made by a tower (`towers_mllama.py`).

A text alone passes by those layers. Of the eight tokens behind the vocabulary, one of which stands for an image, there is an
embedding and no logit. llama.cpp has no such model.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.cross_spec import LookSpec
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import LLAMA
from nanovllm_cli.models.family import ANOTHER, no_file

_USUAL = range(3, 40, 5)
"""Layers that look at an image: transformers' MllamaTextConfig."""
_TOKENS_OF_IMAGES = 8
_LAYER = "model.layers.{i}"


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    looking = _looking(spec, read)
    free = [layer for layer in range(spec.num_layers) if layer not in looking]
    if len(free) < max(1, len(looking)):
        told = f"{read.where}: {len(looking)} of {spec.num_layers} layers look at images, which more than half can't"
        raise UnsupportedError(told, ANOTHER)
    attention, blocks = replace(spec.attention, rope=None), list(spec.blocks)
    for layer in sorted(looking):
        keeper = min(free, key=lambda each: (abs(each - layer), each))  # one each
        free.remove(keeper)
        blocks[layer] = BlockSpec(None, blocks[layer].mlp, looks=LookSpec(attention, keeper))
    vocab_size = spec.vocab_size + _TOKENS_OF_IMAGES
    return replace(spec, blocks=tuple(blocks), vocab_size=vocab_size, head_rows=spec.vocab_size)


def _looking(spec: ModelSpec, read: ConfigReader) -> set[int]:
    said = read.values.get("cross_attention_layers")
    if said is None:
        return {layer for layer in _USUAL if layer < spec.num_layers}
    if not isinstance(said, list) or not all(type(each) is int and 0 <= each < spec.num_layers for each in said):
        raise CheckpointError(f"{read.where}: 'cross_attention_layers' must be a list of layers, of {spec.num_layers}", BROKEN)
    if len(said) != len(set(said)):
        raise CheckpointError(f"{read.where}: 'cross_attention_layers' names a layer twice", BROKEN)
    return set(said)


MLLAMA = replace(
    LLAMA,
    name="mllama",
    hf=_from_hf,
    gguf_like=no_file("Llama that sees"),
    hf_names={
        **{f"blocks.{{i}}.cross_{part}.weight": f"{_LAYER}.cross_attn.{part}_proj.weight" for part in "qkvo"},
        **{f"blocks.{{i}}.cross_{part}_norm.weight": f"{_LAYER}.cross_attn.{part}_norm.weight" for part in "qk"},
        "blocks.{i}.attention_factor": f"{_LAYER}.cross_attn_attn_gate",
        "blocks.{i}.mlp_factor": f"{_LAYER}.cross_attn_mlp_gate",
    },
    defaults={"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
              "rope_theta": 5e5},
)  # fmt: skip
