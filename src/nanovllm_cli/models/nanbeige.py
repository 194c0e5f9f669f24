"""Nanbeige 4.2: a Llama whose layers are gone through several times, one after the other, with the model's last norm in between
(`PassesSpec`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import LLAMA, MAX_LAYERS
from nanovllm_cli.models.family import GGUFField, has_none
from nanovllm_cli.passes_spec import LoopSpec, PassesSpec, Run


def _looped(spec: ModelSpec, read: ConfigReader, times: str, skips: str) -> ModelSpec:
    """times, skips: the keys that say how often, and that nothing is normed in between."""
    loops, count = read.integer(times, 1), spec.num_layers
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
    has_none("a Nanbeige", a_bias_behind_attention=spec.attention.out_bias, biases_of_mlps=dense is not None and dense.bias)
    loops = 1 if passes is None else len(passes.runs)
    return {"num_loops": loops, "skip_loop_final_norm": passes is not None and passes.between == "nothing"}


NANBEIGE = replace(LLAMA, name="nanbeige", hf=_from_hf, gguf=_from_gguf, gguf_keys=_keys)
