"""HRM-Text (Sapient): two stacks of layers that are gone through by turns, the fast one several times for each time of the slow
one (`PassesSpec`). Norms have no weights, and what heads find has gates. Its prompts are read from left to right, as transformers
reads them unless it is told which tokens see each other. So are those of a GGUF file that says that all of a prompt's do
(`hrm.prefix_lm`), as llama.cpp did when it learnt the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import Family, GGUFField, check_usual
from nanovllm_cli.passes_spec import PassesSpec, Run

_DEVIATION = 0.02
"""Of weights at first, whose inverse embeddings are multiplied with where nothing else is said."""


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With both stacks' layers counted once: its number counts them as often as they are gone through, where it says how many a
    stack has."""
    count = config.get("num_layers_per_stack", config.get("num_hidden_layers"))
    whole = 2 * count if type(count) is int else count
    return {**config, "num_layers_per_stack": count, "num_hidden_layers": whole, "num_key_value_heads": None}


def _in_turns(spec: ModelSpec, count: int, slow: int, fast: int, scale: float, where: str) -> ModelSpec:
    """The same of two stacks of so many layers. slow, fast: how often the second is gone through, and the first for each time."""
    if count * slow * (fast + 1) > MAX_LAYERS:
        what = f"{slow} times {fast} and one passes through {count} layers; at most {MAX_LAYERS} layers are believed"
        raise CheckpointError(f"{where} asks for {what}", BROKEN)
    runs = (*[Run(0, count, slow=False)] * fast, Run(count, 2 * count, slow=True))
    return replace(spec, passes=PassesSpec(runs * slow), embedding_scale=scale, norm=replace(spec.norm, gains=False))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "an HRM", attention_bias=False, mlp_bias=False)
    count, slow, fast = (read.integer(key) for key in ("num_layers_per_stack", "H_cycles", "L_cycles"))
    scale = read.number("embedding_scale", 1.0 / read.number("initializer_range", _DEVIATION))
    return _in_turns(spec, count, slow, fast, scale, read.where)


_NUMBERS = ("layers_per_stack", "h_cycles", "l_cycles")


def _metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """With both stacks' layers counted once, as its blocks are; a file counts them as often as they are gone through."""
    read = ConfigReader(metadata, "GGUF metadata")
    count, slow, fast = (read.integer(f"hrm_text.hrm.{name}") for name in _NUMBERS)
    if (told := read.integer("hrm_text.block_count")) != count * slow * (fast + 1):
        what = f"{told} layers, which are not {slow} times {fast} and one passes through {count}"
        raise CheckpointError(f"{read.where} asks for {what}", BROKEN)
    return {**metadata, "hrm_text.block_count": 2 * count}


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    count, slow, fast = (read.integer(key(f"hrm.{name}")) for name in _NUMBERS)
    scale = read.number(key("embedding_scale"), 0.0, positive=False) or 1.0  # llama.cpp has 0 for none
    return _in_turns(spec, count, slow, fast, scale, read.where)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    assert isinstance(spec.passes, PassesSpec)
    runs, count = spec.passes.runs, spec.num_layers // 2
    slow = sum(run.slow for run in runs)
    numbers = (count, slow, len(runs) // slow - 1)
    return {
        "block_count": len(spec.passes.order), "embedding_scale": spec.embedding_scale,
        **{f"hrm.{name}": number for name, number in zip(_NUMBERS, numbers, strict=True)},
    }  # fmt: skip


_LAYER = "model.layers.{i}"
HRM_TEXT = Family(
    "hrm_text",
    attention={"gated": True, "gate_apart": True},
    config=_config,
    defaults={"vocab_size": 151808, "hidden_size": 1536, "intermediate_size": 4096, "num_layers_per_stack": 16,
              "num_attention_heads": 12, "max_position_embeddings": 2048, "head_dim": 128, "H_cycles": 2, "L_cycles": 3},
    hf_names={
        "passes.first_fast": "model.z_L_init",
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.gate_proj.weight",
    },
    hf=_from_hf,
    metadata=_metadata,
    gguf_names={"passes.first_fast": "hrm.z_l_init", "blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight"},
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
