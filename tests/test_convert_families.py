"""Folders of every family made into GGUF files: tensor by tensor and key by key what the gguf package's names and llama.cpp's
rules make of the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoModelForImageTextToText, ExaoneConfig, Gemma3Config

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert import SETTINGS, TINY
from test_models import CASES as TEXTS
from test_models import SEEING, prompts
from test_models_gguf import CASES, write
from test_quant_engine import difference, logits_of

WRITTEN = [case for case in CASES if case not in ("mistral", "jamba, as llama.cpp's converter has it")]


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def with_tokenizer(config: Any) -> Any:
    """The same model with a row for each of the bundled tokenizer's tokens."""
    values = config.to_dict()
    own = values.get("text_config", values)
    own |= {key: 4096 for key in ("vocab_size", "vocab_size_per_layer_input") if key in own}
    return type(config)(**values)


def make_gguf(folder: Path, path: Path) -> list[str]:
    """What got lost."""
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    with open_checkpoint(folder) as checkpoint:
        made = convert.plan(checkpoint, "gguf", outtype="f32")
        convert.write(checkpoint, made, path)
    return made.notes


@pytest.mark.parametrize("case", WRITTEN)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(case: str, tmp_path: Path) -> None:
    arch, config, add = CASES[case]
    reference = random_model(with_tokenizer(config))
    expected = write(tmp_path / "expected.gguf", arch, reference, add)
    make_gguf(save(reference, tmp_path / "folder"), tmp_path / "made.gguf")
    found, wanted = tensors(tmp_path / "made.gguf"), tensors(expected)
    assert found.keys() == wanted.keys()
    exponentials = {name for name in wanted if name.endswith(".ssm_a")}
    assert [name for name in wanted.keys() - exponentials if not np.array_equal(found[name], wanted[name])] == []
    assert all(np.allclose(found[name], wanted[name], rtol=1e-6) for name in exponentials)
    keys = fields(tmp_path / "made.gguf")
    for key, value in fields(expected).items():
        if not key.startswith("GGUF."):
            assert keys[key] == pytest.approx(value), key


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_windows_in_other_layers_than_usual_are_said(case: str, tmp_path: Path) -> None:
    arch, config, _ = CASES[case]
    kinds = ["full_attention", *["sliding_attention"] * (config.num_hidden_layers - 1)]
    folder = save(random_model(with_tokenizer(type(config)(**config.to_dict() | {"layer_types": kinds}))), tmp_path / "folder")
    make_gguf(folder, tmp_path / "made.gguf")
    assert fields(tmp_path / "made.gguf")[f"{arch}.attention.sliding_window_pattern"] == [k != kinds[0] for k in kinds]
    same(folder, tmp_path / "made.gguf")


def same(folder: Path, path: Path) -> None:
    """Logits of both forms."""
    assert difference(*(logits_of(worker_for(each), prompts(512)) for each in (folder, path))) < 1e-4


def test_of_a_model_that_sees_the_part_that_writes_is_apart(tmp_path: Path) -> None:
    config = SEEING["gemma3"].to_dict()
    config["text_config"]["query_pre_attn_scalar"] = SMALL["head_dim"]
    folder = save(random_model(with_tokenizer(Gemma3Config(**config)), auto=AutoModelForImageTextToText), tmp_path / "folder")
    notes = make_gguf(folder, tmp_path / "made.gguf")
    assert not any("sees" in note and "head" not in note for note in notes)
    assert not any("vision" in name for name in tensors(tmp_path / "made.gguf"))
    same(folder, tmp_path / "made.gguf")


def test_granite_4_becomes_a_granite_to_llama_cpp(tmp_path: Path) -> None:
    """Its gate and up, one tensor of the folder, are two of the file."""
    folder = save(random_model(with_tokenizer(TEXTS["granite 4, all attention"])), tmp_path / "folder")
    make_gguf(folder, tmp_path / "made.gguf")
    assert fields(tmp_path / "made.gguf")["general.architecture"] == "granite"
    same(folder, tmp_path / "made.gguf")


def test_of_an_exaone_nothing_gets_lost(tmp_path: Path) -> None:
    """Nor its layers' number, which its publisher's folders have by another name."""
    folder = save(random_model(with_tokenizer(ExaoneConfig(**SMALL))), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config["num_layers"] = config.pop("num_hidden_layers", SMALL["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config))
    assert make_gguf(folder, tmp_path / "made.gguf") == []
    assert fields(tmp_path / "made.gguf")["general.architecture"] == "exaone"
    same(folder, tmp_path / "made.gguf")


@pytest.mark.parametrize(
    ("case", "arch"),
    [("qwen2.5-vl", "qwen2vl"), ("qwen3-vl", "qwen3vl"), ("qwen3.5", "qwen35"), ("qwen3-vl, 2 of 5 experts", "qwen3vlmoe"),
     ("qwen3.5 moe", "qwen35moe")],
)  # fmt: skip
def test_a_qwen_that_sees_becomes_one_that_does_by_another_file(case: str, arch: str, tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(SEEING[case]), auto=AutoModelForImageTextToText), tmp_path / "folder")
    notes = make_gguf(folder, tmp_path / "made.gguf")
    assert not any("sees" in note for note in notes)
    assert fields(tmp_path / "made.gguf")["general.architecture"] == arch
    same(folder, tmp_path / "made.gguf")


@pytest.mark.parametrize("case", ["mistral3", "pixtral"])
def test_a_mistral_that_sees_becomes_a_llama_by_a_file(case: str, tmp_path: Path) -> None:
    """What it sees by is left out where the tokenizer lacks the token behind an image's lines."""
    folder = save(random_model(with_tokenizer(SEEING[case]), auto=AutoModelForImageTextToText), tmp_path / "folder")
    notes = make_gguf(folder, tmp_path / "made.gguf")
    assert [note for note in notes if "sees" in note and "[IMG_BREAK]" in note]
    assert fields(tmp_path / "made.gguf")["general.architecture"] == "llama"
    same(folder, tmp_path / "made.gguf")


@pytest.mark.parametrize(
    "case",
    ["flex olmo, 2 of 5, weights of those alone", "helium", "lfm3", "vaultgemma", "nanochat", "flint, 2 of 5 and shared",
     "zaya, 1 of 5 or none", "zamba2, two shared", "kolibri, 2 of 5 and shared", "lara mini, 3 of 5 and shared", "olmo hybrid",
     "gpt-neo", "gpt-j", "opt"],
)
def test_what_llama_cpp_has_no_architecture_for_is_refused(case: str, tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(TEXTS[case])), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=r"GGUF has no .*: llama\.cpp knows none") as caught:
        make_gguf(folder, tmp_path / "made.gguf")
    assert caught.value.hint == "keep the model as a folder"
    assert not (tmp_path / "made.gguf").exists()


def test_what_a_file_can_not_say_is_refused(tmp_path: Path) -> None:
    """The scale of scores follows from the layers in a Gemma file."""
    _, config, _ = CASES["gemma3"]
    odd = type(config)(**config.to_dict() | {"query_pre_attn_scalar": 17})
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a gemma3 model: scale"):
        make_gguf(save(random_model(with_tokenizer(odd)), tmp_path / "odd"), tmp_path / "made.gguf")
    silent = save(random_model(with_tokenizer(TEXTS["granite 4, no positions"])), tmp_path / "silent")
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a granite model: no positions"):
        make_gguf(silent, tmp_path / "made.gguf")
    states = save(random_model(with_tokenizer(TEXTS["granite 4 h, no bias, positions, three taps"])), tmp_path / "states")
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a granitehybrid model: conv_bias"):
        make_gguf(states, tmp_path / "made.gguf")
    scales = save(random_model(with_tokenizer(TEXTS["gpt2, other scales"])), tmp_path / "scales")
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a gpt2 model: scale"):
        make_gguf(scales, tmp_path / "made.gguf")


@pytest.mark.parametrize(
    ("case", "changes", "lacking"),
    [("pythia", {"attention_bias": False}, "biases"), ("stablelm", {"tie_word_embeddings": True}, "head of its own"),
     ("minicpm3", {"q_lora_rank": None}, "low rank of queries"),
     ("phi", {"tie_word_embeddings": True}, "head of its own"), ("starcoder2", {"use_bias": False}, "bias behind attention"),
     ("olmo, biases, tied", {"head_dim": 8}, "output without a bias"),
     ("olmo, clipped", {"head_dim": 16}, "heads as wide as the model")],
)  # fmt: skip
def test_what_llama_cpp_takes_for_granted_is_there_or_refused(
    case: str, changes: dict[str, Any], lacking: str, tmp_path: Path
) -> None:
    config = with_tokenizer(TEXTS[case])
    folder = save(random_model(type(config)(**config.to_dict() | changes)), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=f"that it has no {lacking}"):
        make_gguf(folder, tmp_path / "made.gguf")


HOMELESS = {
    "arcee": ({"attention_bias": True}, "arcee model: blk.0.attn_output.bias"),
    "arcee, biases, tied": ({"attention_bias": False}, "arcee model: blk.0.ffn_down.bias, blk.0.ffn_up.bias"),
    "qwen3": ({"attention_bias": True}, "qwen3 model: blk.0.attn_output.bias"),
    "gemma": ({"attention_bias": True}, "gemma model: blk.0.attn_output.bias"),
    "gemma2, caps, window in every other layer": ({"attention_bias": True}, "gemma2 model: blk.0.attn_output.bias"),
    "gemma3, ropes of two bases": ({"attention_bias": True}, "gemma3 model: blk.0.attn_output.bias"),
    "command r": ({"attention_bias": True}, "cohere model: blk.0.attn_output.bias"),
    "command r7b": ({"attention_bias": True}, "cohere2 model: blk.0.attn_output.bias"),
    "ernie 4.5, biases": ({}, "ernie4_5 model: blk.0.ffn_down.bias, blk.0.ffn_gate.bias"),
    "seed-oss": ({"attention_out_bias": True}, "seed_oss model: blk.0.attn_output.bias"),
    "seed-oss, other biases": ({"attention_out_bias": False, "mlp_bias": True}, "seed_oss model: blk.0.ffn_down.bias"),
    "smollm3": ({"attention_bias": True}, "smollm3 model: blk.0.attn_output.bias"),
    "hunyuan, another base": ({"attention_bias": True}, "hunyuan_v1_dense model: blk.0.attn_output.bias"),
    "olmo2, group 1": ({"attention_bias": True}, "olmo2 model: blk.0.attn_output.bias"),
    "olmo3": ({"attention_bias": True}, "olmo3 model: blk.0.attn_output.bias"),
    "jais 2": ({"mlp_bias": False}, "jais2 model: that it has no biases of MLPs"),
}


@pytest.mark.parametrize("case", HOMELESS)
def test_biases_that_llama_cpp_has_no_place_for_are_refused_and_those_that_it_asks_for_are_there(
    case: str, tmp_path: Path
) -> None:
    """llama.cpp says of such files that they have a wrong number of tensors, or that one was not found."""
    changes, words = HOMELESS[case]
    config = with_tokenizer(TEXTS[case])
    folder = save(random_model(type(config)(**config.to_dict() | changes)), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=f"GGUF cannot say this of a {words}"):
        make_gguf(folder, tmp_path / "made.gguf")


def test_folders_are_not_made_of_other_families_files(tmp_path: Path) -> None:
    arch, config, add = CASES["granite"]
    path = write(tmp_path / "m.gguf", arch, random_model(config), add)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match="folders of granite models are not made"):
        convert.plan(checkpoint, "hf")
