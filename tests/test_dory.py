"""Dory: GGUF files as llama.cpp's converter makes them, published folders, answers in pieces and on an emulated GPU, and what is
refused. That folders give transformers' logits, test_models.py tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DoryConfig

from emulation.emulator import needs_emulation
from engines import greedy, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.passes_spec import LoopSpec
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_convert_families import fields, make_gguf, tensors, with_tokenizer
from test_cuda_engine import (
    SHAPE,
    depend_on_the_request_alone,
    engine_on,
    kernels_not_rehearsed,
    recorded_tokens,
    tokens,
)
from test_models import DORY, check_what_it_writes, prompts
from test_quant_engine import difference, logits_of

CONFIG = DoryConfig(**DORY)


@pytest.fixture(scope="module")
def reference() -> Any:
    return random_model(with_tokenizer(DoryConfig(**DORY)), seed=3)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("dory"))


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    make_gguf(folder, path := folder.parent / "dory.gguf")
    return path


def as_published(folder: Path, target: Path) -> Path:
    """As NVIDIA has them: attention and MLP are layers of their own."""
    halves = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        place = name.split(".")
        if place[:2] == ["backbone", "layers"]:
            layer, part = 2 * int(place[2]), place[3]
            if part.startswith("lambda"):
                name = f"backbone.layers.{layer + int(part[-1]) - 1}.{'attn' if part == 'lambda_1' else 'mlp'}_alpha"
            else:
                name = ".".join(["backbone.layers", str(layer + (part == "mlp")), "mixer", *place[4:]])
        halves[name] = tensor
    target.mkdir()
    save_file(halves, target / "model.safetensors")
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_published_folder_is_read_as_one_that_transformers_saved(folder: Path, reference: Any, tmp_path: Path) -> None:
    published = as_published(folder, tmp_path / "published")
    names = set(load_file(published / "model.safetensors"))
    assert {"backbone.layers.9.mlp_alpha", "backbone.layers.8.mixer.sqk", "backbone.layers.8.attn_alpha"} < names
    check_what_it_writes(reference, published)


def test_a_config_that_means_both_halves_by_a_layer(folder: Path, tmp_path: Path) -> None:
    """As it is before transformers writes it."""
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()), hf_family({"architectures": ["DoryForCausalLM"]}))
    whole = DORY | {"architectures": ["DoryForCausalLM"], "vocab_size": spec.vocab_size}
    assert spec_from_hf(whole, hf_family(whole)) == spec
    assert spec.passes == LoopSpec(2, 6, 3, 10)
    assert [block.mixer is None for block in spec.blocks] == [False, True] * 5


def test_what_a_config_leaves_out_is_what_transformers_has() -> None:
    config = {"architectures": ["DoryForCausalLM"]}
    usual = spec_from_hf(DoryConfig().to_dict() | config, hf_family(config))
    assert spec_from_hf(config | {"dtype": "float32"}, hf_family(config)) == usual
    assert usual.passes == LoopSpec(16, 56, 2, 72)


# ---- the engine ----


def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(folder: Path) -> None:
    check_chunks_and_prefixes(worker_for(folder, deterministic=True), prompts(4000))


def test_guesses_and_few_blocks_change_nothing(folder: Path) -> None:
    check_guesses_and_few_blocks(folder, "auto")


def test_a_layer_has_a_cache_for_each_time_that_it_is_computed(folder: Path) -> None:
    worker = worker_for(folder)
    assert len(worker.model.blocks) == 10
    kept = [layer[0].data_ptr() for layer in worker.runner.cache.layers if len(layer)]
    assert len(set(kept)) == len(kept) == 9


def test_in_fewer_bits(folder: Path) -> None:
    asked = prompts(500)
    wanted = logits_of(worker_for(folder), asked)
    for settings, most in (({"dtype": "bfloat16"}, 0.06), ({"quant": "int8"}, 0.12)):
        assert difference(logits_of(worker_for(folder, **settings), asked), wanted) < most


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SHAPE | {key: value for key, value in DORY.items() if key not in SHAPE} | {
        "num_hidden_layers": 3, "n_output_layers": 1, "n_recurrent_loops": 2, "layer_types": DORY["layer_types"][:3],
    }  # fmt: skip
    return save(random_model(DoryConfig(**shape), seed=2, dtype=torch.bfloat16), tmp_path_factory.mktemp("bf16"))


@needs_emulation
def test_a_gpus_tokens_are_those_of_the_cpu_and_steps_are_recorded(bf16: Path) -> None:
    assert recorded_tokens(bf16) == tokens(engine_on(bf16, None), greedy(6))
    depend_on_the_request_alone(bf16)


@needs_emulation
def test_no_kernel_is_compiled_late(bf16: Path) -> None:
    assert not kernels_not_rehearsed(bf16)


# ---- GGUF ----


def test_a_file_says_what_llama_cpps_converter_writes(folder: Path, made: Path) -> None:
    """Names, shapes and numbers as they were published; keys as its conversion/dory.py has them."""
    keys, found = fields(made), tensors(made)
    wanted = {
        "block_count": 10, "input_layer_count": 2, "recurrent_layer_count": 4, "output_layer_count": 4, "recurrent_loop_count": 3,
        "layer_pattern": "S-*-S-S-*-", "recurrent_kv_cache_mode": "per_loop", "attention.sliding_window": 20,
        "feed_forward_length": 70, "attention.key_length": 24, "rope.dimension_count": 24,
        "rope.profile": [2, 1, 1, 1, 2, 1, 2, 1, 1, 1],
    }  # fmt: skip
    assert {key: keys[f"dory.{key}"] for key in wanted} == wanted
    numbers = {"rope.freq_base": 1e7, "rope.freq_base_2": 1e4, "init_std": 1.0, "alpha_init": 0.4, "gate_init": 48**0.5}
    for key, value in numbers.items():
        assert keys[f"dory.{key}"] == pytest.approx(value)
    own = load_file(folder / "model.safetensors")
    pairs = {
        "blk.0.dory_alpha": "layers.0.lambda_1", "blk.1.dory_alpha": "layers.0.lambda_2",
        "blk.2.dory_sqk": "layers.1.self_attn.sqk",
        "blk.2.dory_s_gate": "layers.1.self_attn.s_gate", "blk.3.dory_suv_gate": "layers.1.mlp.suv_gate",
        "blk.3.dory_suv_up": "layers.1.mlp.suv_up", "blk.4.attn_gate": "layers.2.self_attn.g_proj.weight",
        "blk.4.attn_q": "layers.2.self_attn.q_proj.weight", "blk.5.ffn_down": "layers.2.mlp.down_proj.weight",
    }  # fmt: skip
    for ours, theirs in pairs.items():
        assert np.array_equal(found[f"{ours}.weight"], own[f"backbone.{theirs}"].numpy()), ours
    assert np.array_equal(found["dory_logit_scale.weight"], own["lm_head.logit_scale"].numpy())
    assert len(found) == len(own)


def test_a_file_gives_the_logits_of_the_folder(folder: Path, made: Path) -> None:
    asked = prompts(500)
    assert difference(logits_of(worker_for(made), asked), logits_of(worker_for(folder), asked)) < 1e-5


def rewritten(path: Path, target: Path, **keys: Any) -> Path:
    """The same file with other values of keys, None to leave one out."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "dory")
    for field in reader.fields.values():
        name = field.name.removeprefix("dory.")
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = keys.get(name, field.contents())
        if value is not None:
            kind, *inner = field.types
            writer.add_key_value(field.name, value, kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({"recurrent_loop_count": 1}, {"n_recurrent_loops": 1}),
        ({"init_std": 1.25}, {"initializer_range": 1.25}),
        ({"alpha_init": 0.2}, {"ngpt_alpha_init": 0.2}),
        ({"input_layer_count": 4, "recurrent_layer_count": 2}, {"n_input_layers": 2, "n_recurrent_layers": 1}),
        ({"layer_pattern": "*-*-S-S-*-"}, {"layer_types": ["full_attention", *DORY["layer_types"][1:]], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e7},
        }}),
        ({"attention.sliding_window": 9}, {"sliding_window": 9}),
        ({"rope.freq_base_2": 500.0}, {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e7},
        }}),
    ],
    ids=str,
)  # fmt: skip
def test_keys_of_a_file_mean_what_the_config_says(
    keys: dict[str, Any], changes: dict[str, Any], reference: Any, made: Path, tmp_path: Path
) -> None:
    """The first layer's positions stay those of windows where its window goes: a profile says them."""
    keys = keys | ({"rope.profile": [1, 1, 1, 1, 2, 1, 2, 1, 1, 1]} if "layer_pattern" in keys else {})
    other = random_model(with_tokenizer(DoryConfig(**DORY | changes)), seed=3)
    other.load_state_dict(reference.state_dict())
    asked = prompts(500)
    found, before = (logits_of(worker_for(path), asked) for path in (rewritten(made, tmp_path / "m.gguf", **keys), made))
    with torch.inference_mode():
        wanted = torch.cat([other(torch.tensor([ids])).logits[0] for ids in asked])
    assert difference(found, wanted) < 1e-4
    assert difference(found, before) > 1e-3


def test_a_profile_gives_each_layer_its_base(made: Path, tmp_path: Path) -> None:
    other = rewritten(made, tmp_path / "m.gguf", **{"rope.profile": [1, 1, 2, 1, 2, 1, 1, 1, 2, 1]})
    thetas = [own.rope and own.rope.theta for own in worker_for(other).spec.attentions]
    assert thetas == [1e7, *[1e4] * 6, 1e7, 1e4]


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"recurrent_kv_cache_mode": "last_loop"}, UnsupportedError, "recurrent_kv_cache_mode 'last_loop'"),
        ({"layer_pattern": "S-*-S-S-*"}, CheckpointError, "'dory.layer_pattern' must have 10 of S [*] -"),
        ({"layer_pattern": "S-*-S-S-*x"}, CheckpointError, "'dory.layer_pattern' must have 10"),
        ({"rope.profile": [1, 2]}, CheckpointError, "'dory.rope.profile' must be a list of 10 layers' 1 or 2"),
        ({"rope.profile": [0, 1, 1, 1, 2, 1, 2, 1, 1, 1]}, CheckpointError, "'dory.rope.profile' must be a list"),
        ({"output_layer_count": 5}, CheckpointError, "2 [+] 4 [+] 5 layers of 10"),
        ({"recurrent_loop_count": 400}, CheckpointError, "400 times 4 layers beside 6; at most 1024 are believed"),
        ({"recurrent_loop_count": 0}, CheckpointError, "'dory.recurrent_loop_count' must be a whole number"),
        ({"rope.dimension_count": 12}, UnsupportedError, "of a part of its heads"),
        ({"init_std": 0.0}, CheckpointError, "'dory.init_std' must be a number"),
        ({"gate_init": None}, CheckpointError, "has no 'dory.gate_init'"),
    ],
    ids=str,
)
def test_files_that_can_not_be_followed(
    keys: dict[str, Any], kind: type[NanovllmError], said: str, made: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        worker_for(rewritten(made, tmp_path / "m.gguf", **keys))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tie_word_embeddings": True}, "no head of its own"),
        ({"layer_types": ["full_attention"] * 5}, "no layers with windows"),
        ({"n_input_layers": 0, "n_recurrent_layers": 3}, "no layers in front between and behind"),
        ({"rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e7},
        }}, "no plain positions of two bases"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_file_can_not_say_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = random_model(with_tokenizer(DoryConfig(**DORY | changes)))
    with pytest.raises(UnsupportedError, match=said):
        make_gguf(save(model, tmp_path / "folder"), tmp_path / "m.gguf")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"attention_bias": True}, UnsupportedError, "a Dory whose 'attention_bias' is true"),
        ({"mlp_bias": True}, UnsupportedError, "a Dory whose 'mlp_bias' is true"),
        ({"hidden_act": "gelu"}, UnsupportedError, "activation 'gelu' in a Dory"),
        ({"recurrent_kv_cache_mode": "last_loop"}, UnsupportedError, "recurrent_kv_cache_mode 'last_loop'"),
        ({"n_recurrent_loops": 0}, CheckpointError, "'n_recurrent_loops' must be a whole number"),
        ({"n_recurrent_loops": 1000}, CheckpointError, "1000 times 4 layers beside 6"),
        ({"n_output_layers": 12, "n_recurrent_layers": 4}, CheckpointError, "2 [+] 4 [+] 12 layers of 10"),
        ({"n_input_layers": 20, "n_recurrent_layers": None}, CheckpointError, "20 [+] 0 [+] 4 layers of 10"),
        ({"layer_types": ["mlp"] * 10}, CheckpointError, "layers of 10, '----------'"),
        ({"layer_types": ["mlp"] * 9}, CheckpointError, "'layer_types' must be a list of 10 layers' kinds"),
        ({"layer_types": [*["mlp"] * 9, "mamba"]}, CheckpointError, "'layer_types' must be a list of 10 layers' kinds"),
        ({"layer_types": [*["mlp"] * 9, ["mlp"]]}, CheckpointError, "'layer_types' must be a list of 10 layers' kinds"),
        ({"layer_types": "mlp"}, CheckpointError, "'layer_types' must be a list of 10 layers' kinds"),
        ({"num_hidden_layers": 1 << 30}, CheckpointError, "at most 1024 are believed"),
        ({"num_hidden_layers": "ten"}, CheckpointError, "'num_hidden_layers' must be a whole number"),
        ({"initializer_range": 0}, CheckpointError, "'initializer_range' must be a number"),
        ({"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 2.0, "original_max_position_embeddings": 64},
        }}, UnsupportedError, "positions of a Dory that make its heads grow"),
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = CONFIG.to_dict() | {"architectures": ["DoryForCausalLM"]} | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


def test_layers_are_gone_through_in_order() -> None:
    loops = LoopSpec(1, 3, 3, 4)
    assert loops.order == (0, 1, 2, 1, 2, 1, 2, 3)
    assert loops.joints == {1, 3, 5}
