"""RWKV-7 models: folders and files against formulas in float64, and engines whose past is their states."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import forked
from engines import each_alone, engine_for, greedy, run, worker_for
from nanovllm_cli.config import Lora
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.outline import shapes_of
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.state_spec import WkvSpec
from nanovllm_cli.text.world import escaped
from nanovllm_cli.weights.convert import open_source, plan, write
from nanovllm_cli.weights.convert_names import differences
from rwkvs import Shape, Weights, config_of, gguf_tensors, logits, random_weights, save_folder, write_gguf
from test_quant_engine import difference, logits_of
from test_states_alone import ASKED, PROMPTS, Answers, answers
from test_world import END, TOKENS, folder_of

SHAPE = Shape(vocab=513, inner=256, hidden=128, head_dim=32, decay=12, rate=10, value=8, gate=18)
SMALL = Shape()
TEXTS = [[1, 2, 3, 4, 5, 6, 7], [5], [9, 8, 7] * 25]


@pytest.fixture(scope="module")
def small() -> Weights:
    return random_weights(SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("rwkv7"), SHAPE, random_weights(SHAPE), torch.bfloat16)


# ---- numbers ----


def test_a_folders_logits_are_those_of_the_formulas(small: Weights, tmp_path: Path) -> None:
    expected = logits(SMALL, small, TEXTS)
    folder = save_folder(tmp_path, SMALL, small)
    assert difference(logits_of(worker_for(folder), TEXTS), expected) < 1e-5
    assert difference(logits_of(worker_for(folder, dtype="bfloat16"), TEXTS), expected) < 0.06


def test_heads_of_other_sizes_have_another_eps(tmp_path: Path) -> None:
    """Folders' norm of heads has as many times the eps of the others as a head has numbers."""
    shape = Shape(hidden=120, head_dim=24, layers=2)
    weights = random_weights(shape, 1)
    for name in weights:
        if name.endswith("v_proj.weight"):
            weights[name] *= 0.02  # so that eps counts
    worker = worker_for(save_folder(tmp_path, shape, weights))
    assert difference(logits_of(worker, TEXTS), logits(shape, weights, TEXTS)) < 1e-5
    (first, second) = worker.spec.mixers
    assert isinstance(first, WkvSpec)
    assert (first.heads, first.head_dim, first.eps, first.is_first) == (5, 24, pytest.approx(24 * 2e-5), True)
    assert second == dataclasses.replace(first, is_first=False, value_rank=7)


def test_a_files_logits_are_those_of_the_formulas(small: Weights, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", SMALL, small)
    assert difference(logits_of(worker_for(path), TEXTS), logits(SMALL, small, TEXTS)) < 1e-5


def test_shares_are_read_as_the_first_folders_had_them(small: Weights, tmp_path: Path) -> None:
    """One tensor of all six, by rows, as fla's first models were saved."""
    older = dict(small)
    for i in range(SMALL.layers):
        at = f"model.layers.{i}.attn.x_"
        older[f"{at}x"] = torch.cat([older.pop(at + part).flatten()[None] for part in "rwkvag"])
    folder = save_folder(tmp_path, SMALL, older)
    assert difference(logits_of(worker_for(folder), TEXTS), logits(SMALL, small, TEXTS)) < 1e-5
    older["model.layers.1.attn.x_x"] = older["model.layers.1.attn.x_x"][:5].contiguous()
    save_file(older, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.attn\.x_a"):
        worker_for(folder)


def test_names_for_every_tensor(small: Weights) -> None:
    spec = spec_from_hf(config_of(SMALL), hf_family(config_of(SMALL)))
    assert sum(np.prod(shape) for shape in shapes_of(spec).values()) == sum(each.numel() for each in small.values())
    assert counted(spec) == sum(each.numel() for name, each in small.items() if "norm" not in name)


def counted(spec: ModelSpec) -> int:
    """By what bench and plan count with: 1-D numbers of a first layer's value have none; the MLP's share is not counted."""
    outer = 2 * spec.vocab_size * spec.hidden_size
    return outer + sum(block.num_weights(spec.hidden_size) for block in spec.blocks) + spec.num_layers * spec.hidden_size


# ---- engines ----


@pytest.fixture(scope="module")
def alone(folder: Path) -> Answers:
    """Each by itself, by steps that are not recorded."""
    return each_alone(folder, ASKED)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 37}, {"num_states": 2}, {"num_blocks": 25},
     {"num_speculative_tokens": 8, "max_num_batched_tokens": 90}, {"num_speculative_tokens": 3, "draft_model": ""}],
    ids=str,
)  # fmt: skip
def test_every_bit_is_the_same_together_in_chunks_preempted_and_behind_guesses(
    settings: dict[str, Any], folder: Path, alone: Answers
) -> None:
    if "draft_model" in settings:
        settings = settings | {"draft_model": str(folder)}
    assert answers(folder, **settings) == alone


def test_steps_are_recorded(folder: Path) -> None:
    worker = worker_for(folder)
    run(engine_for(worker), [(PROMPTS[0], greedy(9))])
    assert worker.runner.graphs._recordable  # type: ignore[attr-defined]
    assert len(worker.runner.graphs._graphs) == 1  # type: ignore[attr-defined]


def test_a_prefix_is_found_behind_its_state(folder: Path, alone: Answers) -> None:
    engine = engine_for(worker_for(folder))
    run(engine, [ASKED[1]])
    (output,) = run(engine, [ASKED[1]])
    assert output.metrics.num_cached_tokens == 288
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == alone[1]


def test_a_saved_session_is_its_state_alone(folder: Path, alone: Answers, tmp_path: Path) -> None:
    first, second = (engine_for(worker_for(folder)) for _ in range(2))
    run(first, [(PROMPTS[1], greedy(1))])
    assert first.kv_files.save(tmp_path / "kv", "the same", PROMPTS[1]) == 288
    assert second.kv_files.load(tmp_path / "kv", "the same") == 288
    (output,) = run(second, [ASKED[1]])
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == alone[1]


def test_nothing_bounds_a_context(folder: Path) -> None:
    """What it was trained with (max_position_embeddings) does not."""
    assert worker_for(folder, num_blocks=None).max_model_len == 1 << 20
    assert worker_for(folder, num_blocks=None, max_model_len=(1 << 20) + 1).max_model_len == (1 << 20) + 1


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8", "q8_0"])
def test_large_matrices_are_quantized_and_narrow_ones_not(quant: str, folder: Path, alone: Answers) -> None:
    worker = worker_for(folder, quant=quant)
    mixer = worker.model.blocks[1].mixer
    plain = {type(each.weight).__name__ for both in mixer.narrow.values() for each in both}  # type: ignore[union-attr]
    large = {type(each.weight).__name__ for each in (mixer.r, mixer.k, mixer.v, mixer.out)}  # type: ignore[union-attr]
    assert plain == {"DenseStorage"}
    assert not large & plain
    assert run(engine_for(worker), [(PROMPTS[2], greedy(4))])[0].outputs[0].token_ids


# ---- other forms ----


def with_vocabulary(folder: Path) -> Path:
    return folder_of(folder, bos_token=END, eos_token="\n\n")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shape, Weights, Path]:
    """With a vocabulary, and heads of 64 numbers."""
    shape = Shape(vocab=280, layers=2, hidden=128, head_dim=64, inner=256, decay=32, rate=32, value=64, gate=32)
    weights = random_weights(shape, 3)
    return shape, weights, with_vocabulary(save_folder(tmp_path_factory.mktemp("named"), shape, weights, norm_eps=1e-5))


@pytest.mark.parametrize("outtype", ["auto", "q8_0"])
def test_a_file_is_written_as_llama_cpp_asks_for_it(outtype: str, named: tuple[Shape, Weights, Path], tmp_path: Path) -> None:
    """Once held against llama-cpp-python 0.3.36, which opens such a file: logits of prefill and decode differ from ours by 1.1e-6
    of their norm. Here names, shapes and types are those that it asks for."""
    shape, weights, folder = named
    with open_source(folder) as source:
        made = plan(source, "gguf", outtype)
        assert made.notes == []
        write(source, made, tmp_path / "m.gguf")
    theirs = gguf_tensors(shape, weights)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {each.name: [*each.shape] for each in reader.tensors} == {
        name: [*reversed(each.shape)] for name, each in theirs.items()
    }
    for each in reader.tensors:
        small = len(each.shape) < 2 or "lerp" in each.name or each.name.endswith(("_w1.weight", "_w2.weight"))
        assert each.tensor_type.name == ("F32" if outtype == "auto" or small else "Q8_0"), each.name
        if each.tensor_type.name == "F32":
            assert np.array_equal(each.data, theirs[each.name].reshape(each.data.shape)), each.name
    worker = worker_for(tmp_path / "m.gguf", dtype="float32")
    assert differences(worker.spec, worker_for(folder).spec) == []
    error = difference(logits_of(worker, TEXTS), logits(shape, weights, TEXTS, eps=1e-5))
    assert error < (1e-5 if outtype == "auto" else 0.05)


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    """llama.cpp's eps of the norm of heads is one for all models."""
    shape = SMALL._replace(vocab=280)
    folder = with_vocabulary(save_folder(tmp_path / "a", shape, random_weights(shape), norm_eps=1e-5))
    with open_source(folder) as source, pytest.raises(UnsupportedError, match="no usual eps of the norm of heads"):
        plan(source, "gguf")


def test_folders_are_not_made_of_files(named: tuple[Shape, Weights, Path], tmp_path: Path) -> None:
    shape, weights, _ = named
    tokens = ["<s>", *map(escaped, TOKENS), *[f"[PAD{i}]" for i in range(275, 280)]]
    path = write_gguf(tmp_path / "m.gguf", shape, weights, tokens)
    with open_source(path) as source, pytest.raises(UnsupportedError, match="folders of rwkv7 models are not made of GGUF"):
        plan(source, "hf")


@pytest.mark.parametrize("to", ["q8_0", "q4_k_m", "int8"])
def test_quantized_models_are_written(to: str, named: tuple[Shape, Weights, Path], tmp_path: Path) -> None:
    """Narrow matrices as they are."""
    output = tmp_path / ("q.gguf" if to != "int8" else "q")
    result = forked.run(
        [sys.executable, "-m", "nanovllm_cli", "quantize", str(named[2]), "--to", to, "-o", str(output), "--no-verify"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    worker = worker_for(output, dtype="float32")
    error = difference(logits_of(worker, TEXTS), logits(named[0], named[1], TEXTS, eps=1e-5))
    assert 1e-4 < error < {"q4_k_m": 0.4}.get(to, 0.05)


def test_layers_that_read_the_firsts_values_are_not_calibrated(named: tuple[Shape, Weights, Path], tmp_path: Path) -> None:
    words = ["--to", "int4", "--algorithm", "gptq", "-o", str(tmp_path / "q")]
    command = [sys.executable, "-m", "nanovllm_cli", "quantize", str(named[2]), *words]
    result = forked.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "a rwkv7 model is not calibrated yet: layers read the first's values" in result.stderr


def test_an_adapter_changes_what_it_says(named: tuple[Shape, Weights, Path], tmp_path: Path) -> None:
    """Of any matrix, narrow ones too, by the names that a folder has."""
    shape, weights, folder = named
    changed, sides, generator = dict(weights), {}, torch.Generator().manual_seed(5)
    for name in ("model.layers.1.attn.r_proj", "model.layers.0.attn.w_lora.lora.0", "model.layers.1.ffn.value"):
        rows, width = weights[f"{name}.weight"].shape
        a, b = torch.randn(4, width, generator=generator) * 0.1, torch.randn(rows, 4, generator=generator) * 0.1
        sides |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        changed[f"{name}.weight"] = weights[f"{name}.weight"] + 2 * b @ a
    save_file(sides, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["r_proj", "value"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    worker = worker_for(folder, lora=(Lora(str(tmp_path)),))
    expected = logits(shape, changed, TEXTS, eps=1e-5)
    assert difference(logits_of(worker, TEXTS), expected) < 1e-5
    assert difference(logits(shape, weights, TEXTS, eps=1e-5), expected) > 0.01


# ---- what is refused ----

REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "attention": ({"attn": {"layers": [1]}}, UnsupportedError, "attention in some of its layers"),
    "wide values": ({"value_dim": 192}, UnsupportedError, "values are wider than its keys"),
    "no first norm": ({"norm_first": False}, UnsupportedError, "an RWKV-7 whose 'norm_first' is false"),
    "no biases": ({"norm_bias": False}, UnsupportedError, "an RWKV-7 whose 'norm_bias' is false"),
    "a gelu": ({"hidden_act": "gelu"}, UnsupportedError, "activation 'gelu' is not supported"),
    "heads": ({"head_dim": 36}, CheckpointError, "heads of 36 numbers can't have 96 together"),
    "huge heads": ({"head_dim": 2048, "hidden_size": 4096}, CheckpointError, "heads of 2048 numbers"),
    "no rank": ({"a_low_rank_dim": 0}, CheckpointError, "'a_low_rank_dim' must be a whole number of at least 1"),
    "no eps": ({"norm_eps": 0.0}, CheckpointError, "'layer_norm_eps' must be"),
    "an inner width without end": (
        {"intermediate_size": None, "hidden_ratio": float("inf")}, CheckpointError, "'hidden_ratio' must be a number",
    ),
    "an inner width that is none": (
        {"intermediate_size": None, "hidden_ratio": float("nan")}, CheckpointError, "'hidden_ratio' must be a number",
    ),
    "a huge inner width": ({"intermediate_size": None, "hidden_ratio": 1e17}, CheckpointError, "'intermediate_size' must be"),
    "no heads": ({"head_dim": -3}, CheckpointError, "'state_head_dim' must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_mean_nothing_or_more(case: str) -> None:
    values, kind, message = REFUSED[case]
    config = config_of(SMALL, **values)
    with pytest.raises(kind, match=message):
        spec_from_hf(config, hf_family(config))


def test_what_a_config_leaves_out() -> None:
    """fla's defaults: an MLP of four times the width, up to a multiple of 32; heads by their number."""
    config = config_of(SMALL, intermediate_size=None, hidden_ratio=3.3, head_dim=None, num_heads=4)
    spec = spec_from_hf(config, hf_family(config))
    assert spec.dense_mlp is not None
    assert spec.dense_mlp.intermediate_size == 320  # of 316.8
    (first, *_) = spec.mixers
    assert isinstance(first, WkvSpec)
    assert (first.heads, first.head_dim) == (4, 24)


def test_files_that_mean_something_else(small: Weights, tmp_path: Path) -> None:
    whole = gguf_tensors(SMALL, small)
    path = write_gguf(tmp_path / "a.gguf", SMALL._replace(head_dim=7), small)
    with pytest.raises(CheckpointError, match="heads of 7 numbers can't have 96 together"):
        worker_for(path)
    with pytest.raises(CheckpointError, match="of the wrong shape"):
        worker_for(write_gguf(tmp_path / "b.gguf", SMALL._replace(decay=13), small))
    assert "blk.0.time_mix_v1.weight" in whole  # which the first layer has, and nothing reads


def test_a_folder_without_a_layers_values_is_incomplete(small: Weights, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, SMALL, small)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.attn.v_lora.lora.2.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.attn\.v_lora\.lora\.2\.bias"):
        worker_for(folder)


