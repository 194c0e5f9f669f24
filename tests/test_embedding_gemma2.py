"""EmbeddingGemma 2's texts: vectors of folders and of GGUF files against transformers' model. No llama.cpp was at hand that knows
it: names, keys and numbers of files are those that its source asks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.models.embedding_gemma2.configuration_embedding_gemma2 import (
    EmbeddingGemma2Config,
    EmbeddingGemma2TextConfig,
)

from embedders import body, write_pooling, write_tokenizer
from engines import random_model, worker_for
from gguf_anew import written_anew
from nanovllm_cli import LLM
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from test_convert import converted
from test_convert_families import fields, tensors
from test_dense_modules import write_chain, write_dense
from test_embedding_models import pooled

SIZES = {
    "vocab_size": 4100, "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 24, "global_head_dim": 40, "num_global_key_value_heads": 1,
    "max_position_embeddings": 512, "sliding_window": 5, "sliding_window_pattern": 2, "hidden_size_per_layer_input": 16,
    "embedding_dim": 30, "eos_token_id": 4089, "bos_token_id": 4087,
}  # fmt: skip
TEXTS = ("Once upon a time there was a cat that sat on a mat and slept the whole day long.", "a", "Two cats, and a dog")
PARTS = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}, "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "ple_block.per_layer_input_gate": "inp_gate",
    "ple_block.per_layer_projection": "proj", "ple_block.post_per_layer_input_norm": "post_norm",
}  # fmt: skip
OUTER = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
    "embedding_projection.weight": "output.weight",
    "ple.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "ple.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}  # fmt: skip
KEYS = {
    "block_count": 4, "context_length": 512, "embedding_length": 48, "embedding_length_out": 30, "feed_forward_length": 70,
    "attention.head_count": 6, "attention.head_count_kv": [2, 1, 2, 1], "attention.key_length": 40,
    "attention.value_length": 40, "attention.key_length_swa": 24, "attention.value_length_swa": 24,
    "attention.sliding_window": 10, "attention.sliding_window_pattern": [True, False, True, False], "attention.causal": False,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-6), "embedding_length_per_layer_input": 16, "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4, "rope.dimension_count": 40, "rope.dimension_count_swa": 24, "pooling_type": 1,
}  # fmt: skip
"""A file's window is of both sides together."""


def config(**changes: Any) -> EmbeddingGemma2TextConfig:
    return EmbeddingGemma2TextConfig(**SIZES | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model") / "m"
    found = body(config(), folder)
    write_tokenizer(folder)
    write_pooling(folder, "mean")
    return found, folder


@pytest.fixture(scope="module")
def file(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    assert converted(model[1], path, "gguf").notes == []
    return path


def check_vectors(path: Path, model: Any, tolerance: float = 2e-4, pooling: str = "mean") -> None:
    with LLM(path, config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm, torch.no_grad():
        for text in TEXTS:
            rows = model(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0]
            wanted, found = pooled(rows, pooling), torch.tensor(llm.embed([text])[0])
            assert found.shape == (30,)
            assert float((found - wanted).norm() / wanted.norm()) < tolerance


def test_vectors_of_a_folder_are_those_of_transformers(model: tuple[Any, Path]) -> None:
    """What each token of which would go through a matrix goes through it behind the mean."""
    check_vectors(model[1], model[0])
    assert not worker_for(model[1]).spec.has_head


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_by_another_pooling(pooling: str, model: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model[1], tmp_path / "m"))
    write_pooling(folder, pooling)
    check_vectors(folder, model[0], pooling=pooling)


def test_a_folder_becomes_a_file(model: tuple[Any, Path], file: Path) -> None:
    wanted = {}
    for name, numbers in model[0].state_dict().items():
        if name in OUTER:
            wanted[OUTER[name]] = numbers.numpy()
            continue
        _, layer, part = name.split(".", 2)
        ours = "layer_output_scale" if part == "layer_scalar" else PARTS[part.removesuffix(".weight")]
        wanted[f"blk.{layer}.{ours}.weight"] = numbers.numpy()
    found, keys = tensors(file), fields(file)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
    assert keys["general.architecture"] == "gemma-embedding2"
    assert {key: keys[f"gemma-embedding2.{key}"] for key in KEYS} == KEYS
    check_vectors(file, model[0])


def test_a_window_of_a_file_is_of_both_sides(model: tuple[Any, Path], file: Path, tmp_path: Path) -> None:
    other = AutoModel.from_config(config(sliding_window=2)).eval()
    other.load_state_dict(model[0].state_dict())
    check_vectors(written_anew(file, tmp_path / "m.gguf", {"gemma-embedding2.attention.sliding_window": 4}), other)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "BF16"])
def test_the_last_matrix_of_a_file_may_be_of_blocks(kind: str, tmp_path: Path) -> None:
    wide = config(hidden_size=64)
    model = body(wide, tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    write_pooling(tmp_path / "m", "mean")
    converted(tmp_path / "m", tmp_path / "m.gguf", "gguf")
    file, writer = gguf.GGUFReader(tmp_path / "m.gguf"), gguf.GGUFWriter(tmp_path / "q.gguf", "gemma-embedding2")
    for key, field in file.fields.items():
        if isinstance(value := field.contents(), list):
            writer.add_array(key, value)
        elif not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, value, field.types[0])
    type_ = gguf.GGMLQuantizationType[kind]
    for tensor in file.tensors:
        rounded = tensor.name == "output.weight"
        data = gguf.quants.quantize(np.array(tensor.data), type_) if rounded else np.array(tensor.data)
        writer.add_tensor(tensor.name, data, raw_dtype=type_ if rounded else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    blocks = gguf.quants.quantize(model.embedding_projection.weight.detach().numpy(), type_)
    model.embedding_projection.weight.data = torch.from_numpy(gguf.quants.dequantize(blocks, type_))
    check_vectors(tmp_path / "q.gguf", model)


def test_of_one_that_sees_and_hears_the_part_that_reads(tmp_path: Path) -> None:
    """As it is published: a part of a whole, with others beside it."""
    whole = EmbeddingGemma2Config(text_config=config().to_dict(), vision_config=None, audio_config=None)
    model = random_model(whole, auto=AutoModel)
    model.save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    write_pooling(tmp_path / "m", "mean")
    own = load_file(tmp_path / "m" / "model.safetensors")
    assert all(name.startswith("language_model.") for name in own)
    beside = {f"{part}.weight": torch.zeros(3) for part in ("vision_tower.norm", "embed_vision.projection", "audio_tower.norm")}
    save_file(own | beside, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    check_vectors(tmp_path / "m", model.language_model)
    notes = converted(tmp_path / "m", tmp_path / "m.gguf", "gguf").notes
    assert [note for note in notes if "vision_tower.norm.weight" in note and "embedding_projection" not in note]
    check_vectors(tmp_path / "m.gguf", model.language_model)


@pytest.mark.parametrize("sizes", [{}, {"num_hidden_layers": 7, "sliding_window_pattern": 3}])
def test_what_a_config_leaves_out_is_as_transformers_has_it(sizes: dict[str, Any]) -> None:
    little = {"architectures": ["EmbeddingGemma2TextModel"], "model_type": "embedding_gemma2_text"}
    whole = EmbeddingGemma2TextConfig(**sizes).to_dict()
    assert spec_from_hf(little | sizes, hf_family(little)) == spec_from_hf(whole | little, hf_family(little))


@pytest.mark.parametrize(("changes", "kind", "said"), [
    ({"attention_bias": True}, UnsupportedError, "biases of attention"),
    ({"hidden_activation": "relu"}, UnsupportedError, "activation 'relu'"),
    ({"sliding_window": 0}, CheckpointError, "sliding_window"),
    ({"per_layer_config": {"1": {"head_dim": 39}}}, NanovllmError, "39"),
])  # fmt: skip
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    whole = config().to_dict() | {"architectures": ["EmbeddingGemma2TextModel"]} | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(whole, hf_family(whole))


@pytest.mark.parametrize(("keys", "drop", "said"), [
    ({}, ["output.weight"], "tensor 'output.weight' is missing"),
    ({"attention.shared_kv_layers": 2}, [], "an EmbeddingGemma 2 with 'attention.shared_kv_layers'"),
    ({"expert_count": 2}, [], "experts"),
    ({"embedding_length_per_layer_input": 8}, [], r"blk\.0\.inp_gate\.weight \(expected \[8, 48\]"),
])  # fmt: skip
def test_files_that_can_not_be_followed(keys: dict[str, Any], drop: list[str], said: str, file: Path, tmp_path: Path) -> None:
    changed = {f"gemma-embedding2.{key}": value for key, value in keys.items()}
    path = written_anew(file, tmp_path / "m.gguf", changed, drop)
    with pytest.raises(NanovllmError, match=said):
        LLM(path, config=EngineConfig(threads=2, num_blocks=64))


def test_dense_modules_behind_it_have_no_place_in_a_file(model: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model[1], tmp_path / "m"))
    write_dense(folder / "2_Dense", (20, 30))
    write_chain(folder, "Pooling", "2_Dense")
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=64)) as llm:
        assert len(llm.embed(["a"])[0]) == 20
    with pytest.raises(UnsupportedError, match="GGUF has no place for its dense layers"):
        converted(folder, tmp_path / "m.gguf", "gguf")


def test_a_folder_without_its_matrix(model: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model[1], tmp_path / "m"))
    own = load_file(folder / "model.safetensors")
    save_file({name: own[name] for name in own if "embedding_projection" not in name}, folder / "model.safetensors")
    assert "embedding_dim" in json.loads((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"'embedding_projection\.weight' is missing"):
        LLM(folder, config=EngineConfig(threads=2, num_blocks=64))
