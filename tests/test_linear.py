"""Models with linear attention beside Qwen's: engines whose past is a state, quantized weights, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LaraMiniConfig, OlmoHybridConfig

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from quantizing import quantize
from test_convert import SETTINGS, TINY
from test_convert_families import with_tokenizer
from test_delta import LONG, REPEATING, check_nothing_is_lost
from test_models import LARA, OLMO_HYBRID, prompts
from test_quant_engine import difference, expected_logits, logits_of

LONGER = {"max_position_embeddings": 2048}
MODELS = {"lara mini": LaraMiniConfig(**LARA | LONGER), "olmo hybrid": OlmoHybridConfig(**OLMO_HYBRID | LONGER)}
PROMPTS = [[5], LONG[:270], [*LONG[:256], 3], LONG[300:370]]
ASKED = [(ids, greedy(12, logprobs=2)) for ids in PROMPTS]
ASKED += [(ids, greedy(24, allowed_token_ids=(3, 4))) for ids in REPEATING[:2]]
Answers = list[tuple[tuple[int, ...], Any]]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(MODELS[request.param], dtype=torch.bfloat16), tmp_path_factory.mktemp("linear"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Each by itself, by steps that are not recorded."""
    worker = worker_for(folder)
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    found = [run(engine_for(worker, enable_prefix_caching=False), [each])[0].outputs[0] for each in ASKED]
    return [(each.token_ids, each.logprobs) for each in found]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 37},
        {"num_states": 2, "num_blocks": 30},
        {"num_speculative_tokens": 8, "max_num_batched_tokens": 90},
    ],
    ids=str,
)
def test_every_bit_is_the_same_together_in_chunks_preempted_and_behind_guesses(
    settings: dict[str, Any], folder: Path, expected: Answers
) -> None:
    """And behind prefixes that were found: all is asked twice."""
    worker = worker_for(folder, **{name: value for name, value in settings.items() if name == "num_speculative_tokens"})
    worker.num_states = settings.get("num_states", worker.num_states)
    engine = engine_for(worker, **{name: value for name, value in settings.items() if name != "num_states"})
    for _ in range(2):
        outputs = run(engine, ASKED)
        check_nothing_is_lost(engine)
        assert [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs] == expected
    found = [each.metrics.num_cached_tokens for each in outputs]
    assert found[1] >= 256 or "num_states" in settings


WIDE = {"hidden_size": 128, "num_hidden_layers": 2, "linear_value_head_dim": 32}
OLMO_OF_TWO = OLMO_HYBRID | WIDE | {"intermediate_size": 96, "num_attention_heads": 4}
QUANTIZED = {"lara mini": LaraMiniConfig(**LARA | WIDE), "olmo hybrid": OlmoHybridConfig(**OLMO_OF_TWO)}


@pytest.mark.parametrize("case", QUANTIZED)
def test_weights_that_are_rounded_as_they_are_read_are_near_to_the_model(case: str, tmp_path: Path) -> None:
    model, tokens = random_model(with_tokenizer(QUANTIZED[case])), prompts(512)[:4]
    worker = worker_for(save(model, tmp_path), quant="int8-weight-only", dtype="float32")
    found, wanted = logits_of(worker, tokens), expected_logits(model, tokens)
    assert 1e-3 < float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) < 0.05  # some choose other experts


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_a_quantized_folder_is_near_to_the_model(algorithm: str, tmp_path: Path) -> None:
    """Of q, k and v and z apart, and one layer that norms what it adds."""
    model, tokens = random_model(with_tokenizer(QUANTIZED["olmo hybrid"])), prompts(512)[:4]
    source = save(model, tmp_path / "source")
    for name in SETTINGS:
        shutil.copy(TINY / name, source / name)
    quantize("int8:group=32", tmp_path / "made", source, algorithm=algorithm, num_samples=4)
    worker = worker_for(tmp_path / "made", dtype="float32", activations="exact")
    found, wanted = logits_of(worker, tokens), expected_logits(model, tokens)
    assert 1e-3 < float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) < 0.05
    names = {name.split(".")[-2] for name, tensor in load_file(tmp_path / "made" / "model.safetensors").items()
             if ".linear_attn." in name and tensor.dtype in (torch.int8, torch.int32)}  # fmt: skip
    assert names == {"q_proj", "k_proj", "v_proj", "g_proj", "o_proj"}


def test_an_olmo_hybrid_is_read_as_it_is_published(tmp_path: Path) -> None:
    """transformers saves another name of a norm, and taps that are divided evenly."""
    model = random_model(MODELS["olmo hybrid"])
    saved = save(model, tmp_path / "saved")
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.3.post_attention_layernorm.weight"] = tensors.pop("model.layers.3.feedforward_layer_norm.weight")
    for i in range(3):
        place = f"model.layers.{i}.linear_attn"
        whole = model.state_dict()[f"{place}.conv1d.weight"]
        assert [len(tensors[f"{place}.{part}_conv1d.weight"]) for part in "qkv"] == [48, 48, 48]
        for part, rows in zip("qkv", torch.split(whole, [32, 32, 80]), strict=True):
            tensors[f"{place}.{part}_conv1d.weight"] = rows.clone()
    published = tmp_path / "published"
    shutil.copytree(saved, published)
    save_file(tensors, published / "model.safetensors")
    tokens = prompts(513)
    found = [logits_of(worker_for(each), tokens) for each in (saved, published)]
    assert torch.equal(*found)
    assert difference(found[0], expected_logits(model, tokens)) < 1e-4
    tensors["model.layers.1.linear_attn.k_conv1d.weight"] = tensors["model.layers.1.linear_attn.k_conv1d.weight"][1:].clone()
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_conv1d.weight \(expected \[32, 4\], found \[31, 4\]\)"):
        worker_for(published)


def test_a_folder_whose_matrices_lie_together_is_not_quantized(tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(MODELS["lara mini"])), tmp_path / "lara")
    with pytest.raises(UnsupportedError, match="holds several matrices in one tensor"):
        quantize("int8", tmp_path / "made", folder)
