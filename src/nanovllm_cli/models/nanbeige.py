"""Nanbeige 4.2: a Llama whose layers are gone through several times, one after the other, with the model's last norm in between
(`PassesSpec`). Ouro (ByteDance; Zhu et al. 2025): the same, with norms of what attention and MLP find as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import LLAMA, MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER, GGUFField, check_usual, has_none
from nanovllm_cli.models.names import SANDWICH_GGUF_NAMES
from nanovllm_cli.passes_spec import LoopSpec, PassesSpec, Run


def _looped(spec: ModelSpec, read: ConfigReader, times: str, skips: str, usual: int = 1) -> ModelSpec:
    """times, skips: the keys that say how often, `usual` where it is not there, and that nothing is normed in between."""
    loops, count = read.integer(times, usual), spec.num_layers
    if loops * count > MAX_LAYERS:
        what = f"{loops} passes through {count} layers; at most {MAX_LAYERS} layers are believed"
        raise CheckpointError(f"{read.where} asks for {what}", BROKEN)
    runs, skipped = (Run(0, count, slow=True),) * loops, read.flag(skips, False)
    return spec if loops == 1 else replace(spec, passes=PassesSpec(runs, "nothing" if skipped else "norm"))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _looped(spec, read, "num_loops", "skip_loop_final_norm")


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _looped(spec, read, key("num_loops"), key("skip_loop_final_norm"))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """llama.cpp asks for no biases but those of queries, keys and values."""
    dense, passes = spec.dense_mlp, spec.passes
    assert not isinstance(passes, LoopSpec)
    of_mlps = dense is not None and dense.bias
    has_none(f"a {spec.architecture} model", a_bias_behind_attention=spec.attention.out_bias, biases_of_mlps=of_mlps)
    loops = 1 if passes is None else len(passes.runs)
    return {"num_loops": loops, "skip_loop_final_norm": passes is not None and passes.between == "nothing"}


NANBEIGE = replace(LLAMA, name="nanbeige", hf=_from_hf, gguf=_from_gguf, gguf_keys=_keys)


def _ouro_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Its gate, which could end a token's loops, says nothing at the threshold that is published."""
    check_usual(read, "an Ouro", attention_bias=False)
    if read.has("early_exit_step") or read.number("early_exit_threshold", 1.0, positive=False) < 1:
        raise UnsupportedError(f"{read.where}: an Ouro whose tokens leave loops early", ANOTHER)
    return _looped(spec, read, "total_ut_steps", "skip_loop_final_norm", usual=4)


def _ouro_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_none("an Ouro", windows=any(attention.window is not None for attention in spec.attentions))
    return _keys(spec)


_NORMS = {"after_attention": "input_layernorm_2", "after_mlp": "post_attention_layernorm_2"}
OURO = replace(
    NANBEIGE,
    name="ouro",
    order="sandwich",
    qkv_bias=False,
    has_window=True,
    window_switch="use_sliding_window",
    aside=("model.early_exit_gate.",),
    config=lambda config: {**config, "mlp_bias": False},
    defaults={"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
              "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 65536, "rope_theta": 1e6},
    hf_names={f"blocks.{{i}}.{ours}_norm.weight": f"model.layers.{{i}}.{theirs}.weight" for ours, theirs in _NORMS.items()},
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=_ouro_from_hf,
    gguf_keys=_ouro_keys,
)  # fmt: skip
