"""Cohere 2 with experts: what its configs may say in two ways, what files of it cannot say, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Cohere2MoeConfig

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert_experts import changed
from test_convert_families import make_gguf, with_tokenizer
from test_models import CASES

AVERAGED, BY_SOFTMAX = "command a+, 2 of 5 and shared", "command a+, 2 of 5 by a softmax"


def spec_of(config: dict[str, Any]) -> ModelSpec:
    config = config | {"architectures": ["Cohere2MoeForCausalLM"]}
    return spec_from_hf(config, hf_family(config))


def test_layers_may_be_counted_in_place_of_listed() -> None:
    """As transformers makes lists of it: those without experts have a pattern of their own."""
    counted = {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2, "sliding_window_pattern": 3}
    listed = Cohere2MoeConfig(**SMALL | {"num_hidden_layers": 8}, num_experts=5, **counted).to_dict()
    unlisted = {key: value for key, value in listed.items() if key not in ("layer_types", "mlp_layer_types")}
    assert spec_of(unlisted | counted) == spec_of(listed)
    windows = [attention.window is not None for attention in spec_of(listed).attentions]
    assert windows == [kind == "sliding_attention" for kind in listed["layer_types"]]
    assert [isinstance(block.mlp, MLPSpec) for block in spec_of(listed).blocks] == [True] * 3 + [False] * 5


REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "another function": ({"expert_selection_fn": "relu"}, UnsupportedError, "experts that are weighed by 'relu'"),
    "another way to join": ({"shared_expert_combination_strategy": "max"}, UnsupportedError, "experts that are joined by 'max'"),
    "no window": ({"sliding_window": None}, UnsupportedError, "without a window"),
    "a part of heads": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, UnsupportedError,
        "whose heads turn in part",
    ),
    "kinds of another number of layers": ({"mlp_layer_types": ["sparse"] * 3}, CheckpointError, "must be a list of 4 of dense"),
    "another kind": ({"mlp_layer_types": ["dense", "x", "sparse", "sparse"]}, CheckpointError, "must be a list of 4 of dense"),
    "no list of kinds": ({"mlp_layer_types": {"dense": 1}}, CheckpointError, "must be a list of 4 of dense, sparse"),
    "more layers than are believed": ({"num_hidden_layers": 1 << 30}, CheckpointError, "at most 1024 are believed"),
    "more of them without experts": (
        {"mlp_layer_types": None, "layer_types": None, "first_k_dense_replace": 1 << 30}, CheckpointError, "at most 1024 are bel",
    ),
    "more without experts than there are": (
        {"mlp_layer_types": None, "layer_types": None, "first_k_dense_replace": 5}, CheckpointError,
        "'layer_types' must be a list of 4 kinds",
    ),
    "a pattern of none": ({"sliding_window_pattern": 0}, CheckpointError, "'sliding_window_pattern' must be a whole number"),
    "more experts a token than there are": ({"num_experts_per_tok": 6}, CheckpointError, "can't take 6 of 5 experts"),
    "sizes that are none": ({"prefix_dense_intermediate_size": "x"}, CheckpointError, "'prefix_dense_intermediate_size' must be"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_configs_of_others_are_refused(what: str) -> None:
    values, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        spec_of(CASES[AVERAGED].to_dict() | values)


UNSAYABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "sums": (AVERAGED, {"shared_expert_combination_strategy": "sum"}, "cohere2_moe model: averaged"),
    "biases": (BY_SOFTMAX, {"attention_bias": True}, "blk.0.attn_output.bias"),
    "an MLP behind experts": (BY_SOFTMAX, {"mlp_layer_types": ["sparse", "dense"]}, "experts in all layers behind the first"),
    "no experts": (BY_SOFTMAX, {"mlp_layer_types": ["dense", "dense"]}, "that it has no experts"),
    "no positions in a first layer": (AVERAGED, {"prefix_dense_sliding_window_pattern": 3}, "cohere2_moe model: rope"),
}


@pytest.mark.parametrize("what", UNSAYABLE)
def test_what_a_file_can_not_say_is_refused(what: str, tmp_path: Path) -> None:
    case, values, message = UNSAYABLE[what]
    folder = save(random_model(with_tokenizer(changed(CASES[case], **values))), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=message):
        make_gguf(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], set[str]]:
    folder = tmp_path_factory.mktemp("cohere")
    make_gguf(save(random_model(with_tokenizer(CASES[AVERAGED])), folder / "folder"), folder / "m.gguf")
    with open_checkpoint(folder / "m.gguf") as checkpoint:
        return dict(checkpoint.config), set(checkpoint.names())


def from_file(metadata: tuple[dict[str, Any], set[str]], **values: Any) -> ModelSpec:
    said, names = metadata
    said = {key: value for key, value in (said | {f"cohere2moe.{k}": v for k, v in values.items()}).items() if value is not None}
    return spec_from_gguf(said, gguf_family(said), 4096, names, lambda name: None)


def test_what_a_file_leaves_out_is_what_llama_cpp_takes(metadata: tuple[dict[str, Any], set[str]]) -> None:
    """Sigmoids as they are, a first layer in four without a window, layer norms where the other's number is 0."""
    found = from_file(metadata, expert_gating_func=None, expert_weights_norm=None, **{"attention.sliding_window_pattern": None})
    mixture = found.mixture
    assert mixture is not None
    assert (mixture.scoring, mixture.norm_topk, mixture.averaged) == ("sigmoid", False, True)
    assert [(a.window, a.rope is not None) for a in found.attentions] == [(None, True), *[(20, True)] * 3]
    root = "attention.layer_norm_rms_epsilon"
    eps = found.norm.eps
    assert from_file(metadata, **{root: 0.0}).norm == found.norm == NormSpec(eps, centered=True)
    assert from_file(metadata, **{root: 1e-3}).norm == NormSpec(1e-3)


def test_a_file_may_have_a_layer_more_that_predicts_further_tokens(metadata: tuple[dict[str, Any], set[str]]) -> None:
    assert from_file(metadata, block_count=5, nextn_predict_layers=1) == from_file(metadata)


@pytest.mark.parametrize("function", [3, 4])
def test_files_with_another_function_are_refused(function: int, metadata: tuple[dict[str, Any], set[str]]) -> None:
    with pytest.raises(UnsupportedError, match="experts that are not weighed by a softmax or a sigmoid"):
        from_file(metadata, expert_gating_func=function)


def test_without_experts_that_all_take_there_is_nothing_to_halve() -> None:
    both = (spec_of(CASES[AVERAGED].to_dict() | {"num_shared_experts": count}).mixture for count in (0, 2))
    assert [mixture is not None and mixture.averaged for mixture in both] == [False, True]


def test_a_layer_that_predicts_further_tokens_is_left_aside(tmp_path: Path) -> None:
    """As llama.cpp's converter expects them behind the others."""
    folder = save(random_model(CASES[BY_SOFTMAX]), tmp_path)
    before = worker_for(folder).spec
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    further = {f"model.layers.2.{name}.weight": torch.ones(48) for name in ("enorm", "hnorm", "input_layernorm")}
    save_file(tensors | further, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert worker_for(folder).spec == before
