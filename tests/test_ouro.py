"""Ouro: folders and GGUF files against transformers' Llama and norms, called as often as the published code calls them; answers
in steps and on an emulated GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from emulation.emulator import needs_emulation
from engines import SMALL, greedy, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.passes_spec import PassesSpec
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_convert_families import fields, make_gguf, same, tensors
from test_cuda_engine import SHAPE, engine_on, kernels_not_rehearsed, recorded_tokens, tokens
from test_models import prompts
from test_quant_engine import difference, logits_of

SIZES = SMALL | {"vocab_size": 4096, "num_hidden_layers": 3}
AFTER = ("input_layernorm_2", "post_attention_layernorm_2")


def made(folder: Path, model: Any, **changes: Any) -> Path:
    """A Llama's folder with the norms that an Ouro has besides, and its gate."""
    save(model, folder)
    found, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    width, dtype = model.config.hidden_size, model.dtype
    for i in range(model.config.num_hidden_layers):
        for norm in AFTER:
            gains = 1 + 0.3 * torch.randn(width, generator=generator)
            found[f"model.layers.{i}.{norm}.weight"] = gains.to(dtype)
    found["model.early_exit_gate.weight"] = torch.randn(1, width, generator=generator).to(dtype)
    found["model.early_exit_gate.bias"] = torch.ones(1, dtype=dtype)
    save_file(found, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["OuroForCausalLM"], "model_type": "ouro", "total_ut_steps": 4, "early_exit_threshold": 1.0} | changes
    (folder / "config.json").write_text(json.dumps(said | own))
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("ouro") / "folder", model)


def expected(model: Any, folder: Path, ids: list[int], times: int = 4) -> torch.Tensor:
    """What attention and MLP find is normed before it joins; each time ends with the model's norm."""
    found, stack = load_file(folder / "model.safetensors"), model.model

    def normed(x: torch.Tensor, i: int, norm: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], found[f"model.layers.{i}.{norm}.weight"], model.config.rms_norm_eps)

    with torch.no_grad():
        x = stack.embed_tokens(torch.tensor([ids]))
        angles = stack.rotary_emb(x, torch.arange(len(ids))[None])
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        for _ in range(times):
            for i, layer in enumerate(stack.layers):
                seen = layer.self_attn(layer.input_layernorm(x), position_embeddings=angles, attention_mask=mask)[0]
                x = x + normed(seen, i, AFTER[0])
                x = x + normed(layer.mlp(layer.post_attention_layernorm(x)), i, AFTER[1])
            x = stack.norm(x)
        return model.lm_head(x)[0]


def test_logits_of_the_folder_and_of_its_file(model: Any, folder: Path, tmp_path: Path) -> None:
    asked = prompts(4096)
    wanted = torch.cat([expected(model, folder, ids) for ids in asked])
    assert difference(logits_of(worker_for(folder), asked), wanted) < 1e-4
    make_gguf(folder, tmp_path / "made.gguf")
    keys, names = fields(tmp_path / "made.gguf"), tensors(tmp_path / "made.gguf").keys()
    assert (keys["general.architecture"], keys["ouro.block_count"], keys["ouro.num_loops"]) == ("ouro", 3, 4)
    assert keys["ouro.skip_loop_final_norm"] is False
    assert {"blk.2.post_attention_norm.weight", "blk.2.post_ffw_norm.weight"} < names
    assert not any("gate" in name and "ffn" not in name for name in names)
    same(folder, tmp_path / "made.gguf")


def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(folder: Path) -> None:
    check_chunks_and_prefixes(worker_for(folder, deterministic=True), prompts(4000))
    check_guesses_and_few_blocks(folder, "auto")


@needs_emulation
def test_a_gpus_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    small = random_model(LlamaConfig(**SHAPE | {"num_hidden_layers": 2}), seed=2, dtype=torch.bfloat16)
    folder = made(tmp_path / "m", small, total_ut_steps=2)
    assert recorded_tokens(folder) == tokens(engine_on(folder, None), greedy(6))
    assert not kernels_not_rehearsed(folder)


def test_a_config_that_says_nothing_is_the_smaller_one() -> None:
    config = {"architectures": ["OuroForCausalLM"]}
    spec = spec_from_hf(config, hf_family(config))
    assert isinstance(spec.passes, PassesSpec)
    assert (len(spec.passes.runs), spec.num_layers, spec.hidden_size, spec.passes.between) == (4, 24, 2048, "norm")


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ({"early_exit_threshold": 0.5}, UnsupportedError, "an Ouro whose tokens leave loops early"),
        ({"early_exit_step": 2}, UnsupportedError, "an Ouro whose tokens leave loops early"),
        ({"total_ut_steps": 0}, CheckpointError, "'total_ut_steps'"),
        ({"total_ut_steps": 10**6}, CheckpointError, "passes through 24 layers"),
        ({"attention_bias": True}, UnsupportedError, "an Ouro whose 'attention_bias' is true"),
    ],
)
def test_configs_of_others(said: dict[str, Any], kind: type[Exception], message: str) -> None:
    config = {"architectures": ["OuroForCausalLM"]} | said
    with pytest.raises(kind, match=message):
        spec_from_hf(config, hf_family(config))
