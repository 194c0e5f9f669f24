"""Families whose layers have other parts than Llama's, quantized: by every algorithm that can, from folders and GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Phi3Config,
)

import test_quant_engine as quant_engine
from engines import random_model, save, worker_for
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.llm import LLM
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.json_file import read_json_file
from quantizing import plan_of, quantize
from test_convert import SETTINGS, TINY
from test_convert_families import with_tokenizer
from test_models import CASES, VISION, prompts
from test_models_gguf import Add, gemma3, nothing, write
from test_quant_engine import logits_of

SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, tuple[Any, Add]] = {
    "gemma3": (
        Gemma3TextConfig(**SIZES, tie_word_embeddings=True, sliding_window=40, query_pre_attn_scalar=16, rope_parameters=ROPES),
        gemma3,
    ),
    "phi3": (Phi3Config(**SIZES), nothing),
}
TOKENS = prompts(4090)


def difference(path: Path, other: Path) -> float:
    """Of the logits of two forms."""
    return quant_engine.difference(*(logits_of(worker_for(each, dtype="float32"), TOKENS) for each in (path, other)))


def saved(model: Any, folder: Path) -> Path:
    """With the bundled model's tokenizer."""
    save(model, folder)
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    return folder


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(random_model(CONFIGS[request.param][0]), tmp_path / "original")


@pytest.mark.parametrize(("folder", "algorithm"), [("gemma3", "rtn"), ("gemma3", "gptq"), ("gemma3", "awq"), ("phi3", "gptq")],
                         indirect=["folder"])  # fmt: skip
def test_a_folder_of_eight_bits_answers_as_its_original(folder: Path, algorithm: str, tmp_path: Path) -> None:
    """AWQ moves scales into norms that add 1 to their gains; GPTQ walks through blocks whose outputs are normalised."""
    quantize("int8", tmp_path / "out", folder, algorithm=algorithm)
    assert 0 < difference(tmp_path / "out", folder) < 0.1


@pytest.mark.parametrize("case", CONFIGS)
def test_a_gguf_file_of_eight_bits_answers_as_its_original(case: str, tmp_path: Path) -> None:
    config, add = CONFIGS[case]
    original = write(tmp_path / "m.gguf", case, random_model(config), add)
    quantize("q8_0", tmp_path / "q.gguf", original)
    assert 0 < difference(tmp_path / "q.gguf", original) < 0.1


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_quantized_while_loading(folder: Path) -> None:
    with LLM(folder, config=EngineConfig(threads=1, num_blocks=64, quant="int8")) as llm:
        assert llm.generate("abc")[0].outputs[0].text


def test_columns_of_several_matrices_as_one_are_not_scaled(tmp_path: Path) -> None:
    folder = saved(random_model(CONFIGS["phi3"][0]), tmp_path / "original")
    with pytest.raises(UnsupportedError, match=r"awq of model\.layers\.0\.self_attn\.qkv_proj\.weight, which is several"):
        quantize("int8", tmp_path / "out", folder, algorithm="awq")
    assert not (tmp_path / "out").exists()


def test_what_stands_in_for_q_k_and_v_is_typed_as_llama_cpp_does(tmp_path: Path) -> None:
    """As attn_v, in llama-quant.cpp."""
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16)
    config = Phi3Config(**SIZES | heads | {"hidden_size": 256, "intermediate_size": 256})
    path = write(tmp_path / "m.gguf", "phi3", random_model(config), nothing)
    for mix, heads_type, others in (
        ("q3_k_m", "Q5_K", "Q3_K"), ("q4_k_m", "Q4_K", "Q4_K"), ("q5_k_m", "Q5_K", "Q5_K"), ("q4_k_s", "Q5_K", "Q4_K"),
    ):  # fmt: skip
        types = {item.weight.output: item.format.type for item in plan_of(mix, path).items}  # type: ignore[union-attr]
        assert (types["blk.1.attn_qkv.weight"], types["blk.1.ffn_up.weight"]) == (heads_type, others)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_a_folder_becomes_a_gguf_file_of_eight_bits(folder: Path, tmp_path: Path) -> None:
    quantize("q8_0", tmp_path / "q.gguf", folder)
    assert 0 < difference(tmp_path / "q.gguf", folder) < 0.1


def test_awq_for_a_gguf_file_moves_scales_into_gains_that_have_1_more(tmp_path: Path) -> None:
    folder = saved(random_model(CONFIGS["gemma3"][0]), tmp_path / "original")
    quantize("q8_0", tmp_path / "q.gguf", folder, algorithm="awq")
    assert 0 < difference(tmp_path / "q.gguf", folder) < 0.1


def test_a_format_that_needs_a_file_that_is_not_written_is_refused_before_any_work(tmp_path: Path) -> None:
    folder = saved(random_model(with_tokenizer(CASES["laguna, 2 of 5 and shared"])), tmp_path / "original")
    with pytest.raises(UnsupportedError, match="GGUF files of laguna models are not written"):
        plan_of("q4_k_m", folder)


def test_what_sees_stays_as_it_is(tmp_path: Path) -> None:
    config = Gemma3Config(
        text_config=CONFIGS["gemma3"][0].to_dict(), vision_config=VISION, mm_tokens_per_image=4, image_token_index=4095
    )
    original = saved(random_model(config, auto=AutoModelForImageTextToText), tmp_path / "original")
    quantize("int8", tmp_path / "out", original)
    assert 0 < difference(tmp_path / "out", original) < 0.1
    ignored = read_json_file(tmp_path / "out" / "config.json", 1 << 20)["quantization_config"]["ignore"]
    with open_checkpoint(tmp_path / "out") as quantized, open_checkpoint(original) as before:
        seeing = [name for name in before.names() if "vision" in name]
        assert seeing
        for name in seeing:
            assert torch.equal(quantized.tensor(name), before.tensor(name))
        matrices = {name.removesuffix(".weight") for name in seeing if before.tensor(name).dim() == 2}
    assert matrices < set(ignored), "another engine does not look for their codes"
