"""Families whose folders come with code of their own, which is not run: models that transformers has under another name, in the
form that those folders have, give its logits, as folders and as the GGUF files that are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, LlamaConfig

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import UnsupportedError
from test_convert_families import fields, make_gguf, with_tokenizer
from test_models import prompts
from test_quant_engine import difference, expected_logits, logits_of

Tensors = dict[str, torch.Tensor]
INTERNLM2 = {
    "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip


def internlm2(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of each key-value head its queries, its key and its value behind each other."""
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            place = f"model.layers.{i}"
            if f"{place}.self_attn.q_proj.{kind}" not in tensors:
                continue
            q, k, v = (tensors.pop(f"{place}.self_attn.{part}_proj.{kind}") for part in "qkv")
            shape = (keys, -1, k.shape[0] // keys, *k.shape[1:])
            whole = torch.cat([q.reshape(shape), k.reshape(shape), v.reshape(shape)], 1)
            assert whole.shape[1] == heads // keys + 2
            tensors[f"{place}.attention.wqkv.{kind}"] = whole.reshape(-1, *k.shape[1:]).contiguous()
    for theirs, name in INTERNLM2.items():
        tensors = {key.replace(theirs, name): tensor for key, tensor in tensors.items()}
    return tensors


def same(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    return tensors


GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 48 / 20,
           "attention_multiplier": 24**-0.5}  # fmt: skip
SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20}
CASES: dict[str, tuple[Any, str, dict[str, Any], Callable[[Tensors, dict[str, Any]], Tensors], str]] = {
    "internlm2": (
        LlamaConfig(**SMALL | {"head_dim": 8}), "InternLM2ForCausalLM", {"model_type": "internlm2", "bias": False}, internlm2,
        "internlm2",
    ),
    "internlm2, biases": (
        LlamaConfig(**SMALL | {"head_dim": 8, "attention_bias": True}), "InternLM2ForCausalLM",
        {"model_type": "internlm2", "bias": True}, internlm2, "internlm2",
    ),
    "internlm3": (
        LlamaConfig(**SMALL), "InternLM3ForCausalLM", {"model_type": "internlm3", "bias": False, "qkv_bias": False}, same,
        "llama",
    ),
    "minicpm": (GraniteConfig(**SMALL, **GRANITE), "MiniCPMForCausalLM", {"model_type": "minicpm"} | SCALES, same, "minicpm"),
}  # fmt: skip


def folder_of(case: str, path: Path, **changes: Any) -> tuple[Any, Path]:
    """transformers' model, and the folder of the other."""
    config, name, values, form, _ = CASES[case]
    reference = random_model(with_tokenizer(config))
    folder = save(reference, path)
    own = {key: value for key, value in reference.config.to_dict().items() if key not in GRANITE}
    own |= {"architectures": [name], **values, **changes}
    (folder / "config.json").write_text(json.dumps(own))
    save_file(form(load_file(folder / "model.safetensors"), own), folder / "model.safetensors")
    return reference, folder


@pytest.mark.parametrize("case", CASES)
def test_a_folder_and_its_file_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    reference, folder = folder_of(case, tmp_path / "folder")
    tokens = prompts(513)[2:6]
    expected = expected_logits(reference, tokens)
    assert difference(logits_of(worker_for(folder), tokens), expected) < 1e-4
    if "biases" in case:
        with pytest.raises(UnsupportedError, match="GGUF cannot say this of an internlm2 model: a bias behind attention"):
            make_gguf(folder, tmp_path / "made.gguf")
        return
    make_gguf(folder, tmp_path / "made.gguf")
    assert fields(tmp_path / "made.gguf")["general.architecture"] == CASES[case][-1]
    assert difference(logits_of(worker_for(tmp_path / "made.gguf"), tokens), expected) < 1e-4


@pytest.mark.parametrize("key", ["num_experts", "sparse_config"])
def test_other_minicpms_are_refused(key: str, tmp_path: Path) -> None:
    _, folder = folder_of("minicpm", tmp_path, **{key: 4})
    with pytest.raises(UnsupportedError, match=f"a MiniCPM with {key} is not supported"):
        worker_for(folder)
