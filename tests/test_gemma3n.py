"""Gemma 3n: configs that are broken or of another kind, what is left aside, its tables of tokens, and its weights in formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3nTextConfig

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.format_names import parse_format
from quantizing import quantize
from test_convert_families import fields, make_gguf, tensors
from test_llm import write_byte_tokenizer
from test_models import CASES, GEMMA_3N, prompts
from test_models_gguf import CASES as GGUF
from test_models_gguf import Writer, write
from test_quant_engine import difference, expected_logits, logits_of

CONFIG = {"architectures": ["Gemma3nForCausalLM"]}
WIDE = GEMMA_3N | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "hidden_size_per_layer_input": 32,
                   "laurel_rank": 64, "vocab_size": 4096, "vocab_size_per_layer_input": 4000,
                   "num_attention_heads": 4}  # fmt: skip


def spec_of(**changes: Any) -> Any:
    config = CASES["gemma3n"].to_dict() | CONFIG | changes
    return spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_sparsity_pattern": [0.95, 0.0]}, "'activation_sparsity_pattern' must be a list of 4"),
        ({"activation_sparsity_pattern": [0.95, 0.0, 0.0, 1.0]}, "'activation_sparsity_pattern' must be a list of 4"),
        ({"activation_sparsity_pattern": [0.95, 0.0, 0.0, -0.1]}, "'activation_sparsity_pattern' must be a list of 4"),
        ({"activation_sparsity_pattern": ["much", 0.0, 0.0, 0.0]}, "'activation_sparsity_pattern' must be a list of 4"),
        ({"intermediate_size": [70, 70, 70]}, "must be a list of 4 numbers"),
        ({"num_kv_shared_layers": 4}, "reads the keys of a layer like it, and there is none"),
        ({"num_kv_shared_layers": 3}, "reads the keys of a layer like it, and there is none"),
        ({"laurel_rank": 0}, "'laurel_rank' must be"),
    ],
)
def test_a_broken_config_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 1}, "compute with stream 1"),
        ({"altup_num_inputs": 1}, "with 1 streams"),
        ({"altup_num_inputs": 17}, "with 17 streams"),
        ({"altup_correct_scale": False}, "without gains of its corrected stream"),
        ({"hidden_activation": "silu"}, "activation 'silu'"),
        ({"attention_bias": True}, "biases of attention"),
        ({"vocab_size_per_layer_input": 514}, "embeddings of layers for 514 tokens"),
    ],
)
def test_what_no_gemma_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize("scales", [None, [1.0] * 3, [1.0, 1.0, 1.0, math.nan], [1.0, 1.0, 1.0, math.inf], [1, 1, 1, 1]], ids=str)
def test_gates_that_a_file_does_not_tell_of(scales: list[float] | None, tmp_path: Path) -> None:
    arch, config, add = GGUF["gemma3n"]

    def wrong(writer: Writer, config: Any) -> None:
        add(writer, config)
        del writer.kv_data[0]["gemma3n.activation_sparsity_scale"]
        if scales is not None:
            writer.add_array("gemma3n.activation_sparsity_scale", scales)

    with pytest.raises(CheckpointError, match=r"'gemma3n\.activation_sparsity_scale' must be a list of 4 numbers"):
        worker_for(write(tmp_path / "m.gguf", arch, random_model(config), wrong))


def test_the_first_layers_of_many_are_sparse_where_nothing_is_said() -> None:
    """As transformers has it."""
    config = Gemma3nTextConfig(**GEMMA_3N | {"num_hidden_layers": 12, "layer_types": None, "activation_sparsity_pattern": None})
    values = config.to_dict() | CONFIG
    spec = spec_from_hf(values, hf_family(values))
    del values["activation_sparsity_pattern"]
    assert spec_from_hf(values, hf_family(values)) == spec
    assert [mlp.cutoff for mlp in spec.mlps] == [pytest.approx(1.6448536, abs=1e-6)] * 10 + [None] * 2


def test_of_a_model_that_sees_and_hears_the_part_that_writes(tmp_path: Path) -> None:
    """With keys of layers that read those of others, as published folders have them; nobody reads what they hold."""
    folder = save(random_model(CASES["gemma3n"]), tmp_path)
    expected = worker_for(folder)
    tensors = load_file(folder / "model.safetensors")
    for part, shape in (("k_proj.weight", (48, 48)), ("v_proj.weight", (48, 48)), ("k_norm.weight", (24,))):
        tensors |= {f"model.layers.{i}.self_attn.{part}": torch.full(shape, torch.nan) for i in (2, 3)}
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.timm_model.conv_stem.conv", "audio_tower.conformer.0.norm", "embed_vision.embedding")
    tensors |= {f"model.{name}.weight": torch.ones(3, 3) for name in others}
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
              "text_config": CASES["gemma3n"].to_dict(), "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokens = [(ids, greedy(8)) for ids in prompts(513)[:3]]
    wanted, found = (run(engine_for(worker), tokens) for worker in (expected, worker_for(folder)))
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in wanted]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Fewer tokens have numbers of their own than there are; its file has a path of rank 64."""
    model = random_model(Gemma3nTextConfig(**WIDE))
    return model, save(model, tmp_path_factory.mktemp("wide"))


def test_a_file_has_numbers_of_all_tokens(wide: tuple[Any, Path], tmp_path: Path) -> None:
    """Those that have none in a folder have the first one's, which transformers takes for them; in block types as well."""
    model, folder = wide
    make_gguf(folder, tmp_path / "made.gguf")
    ids = [[4095, 17, 3999, 4000, 0, 4050, 9]]
    expected = expected_logits(model, ids)
    assert difference(logits_of(worker_for(tmp_path / "made.gguf"), ids), expected) < 1e-4
    table = tensors(tmp_path / "made.gguf")["per_layer_token_embd.weight"]
    assert len(table) == 4096
    assert (table[4000:] == table[0]).all()
    quantize("q8_0", tmp_path / "q8_0.gguf", folder)
    table = tensors(tmp_path / "q8_0.gguf")["per_layer_token_embd.weight"]
    assert len(table) == 4096
    assert (table[4000:] == table[0]).all()
    names = {name: tensor.dtype.name for name, tensor in tensors(tmp_path / "q8_0.gguf").items()}
    assert {names[f"blk.0.{part}.weight"] for part in ("attn_q", "ffn_down", "inp_gate", "proj")} == {"uint8"}
    kept = ("altup_proj", "altup_unembd_proj", "per_layer_model_proj", "blk.0.altup_router", "blk.0.laurel_l", "blk.0.laurel_r")
    assert {names[f"{part}.weight"] for part in kept} == {"float32"}
    assert fields(tmp_path / "q8_0.gguf")["gemma3n.activation_sparsity_scale"][2:] == [-math.inf] * 2


def test_keys_that_nobody_reads_go_into_a_file(wide: tuple[Any, Path], tmp_path: Path) -> None:
    """llama.cpp asks for them. It writes no rank of the path beside attention, which is 64 for it."""
    folder = save(wide[0], tmp_path / "folder")
    stored = load_file(folder / "model.safetensors")
    stored |= {f"model.layers.{i}.self_attn.k_norm.weight": torch.full((32,), 2.0) for i in (2, 3)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    make_gguf(folder, tmp_path / "made.gguf")
    assert tensors(tmp_path / "made.gguf")["blk.3.attn_k_norm.weight"].tolist() == [2.0] * 32
    assert worker_for(tmp_path / "made.gguf").spec.attentions[3].reads == 1
    narrow = save(random_model(Gemma3nTextConfig(**WIDE | {"laurel_rank": 32})), tmp_path / "narrow")
    with pytest.raises(UnsupportedError, match="a path of rank 64, not 32"):
        make_gguf(narrow, tmp_path / "narrow.gguf")


@pytest.mark.parametrize(("form", "most"), [("int8-weight-only", 0.02), ("int4-weight-only:group=32", 0.05), ("q4_0", 0.15)])
def test_weights_in_formats(form: str, most: float, tmp_path: Path) -> None:
    """But for routers, what makes streams of one, and the path beside attention: they stay as they are, and are plain here."""
    config = Gemma3nTextConfig(**WIDE | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]})
    model = random_model(config)
    folder, wanted = save(model, tmp_path), parse_format(form)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "altup" not in name and "laurel" not in name:
            outer = "embed" in name or "per_layer_model" in name
            own = Integer(8) if outer and wanted.row_bytes(1024) < 1024 else wanted
            parameter.data = own.dequantize(own.quantize(parameter.data))
    found = logits_of(worker_for(folder, quant=form), prompts(4000))
    assert difference(found, expected_logits(model, prompts(4000))) < most


def test_it_is_not_calibrated(wide: tuple[Any, Path], tmp_path: Path) -> None:
    folder = save(wide[0], tmp_path / "folder")
    write_byte_tokenizer(folder)
    with pytest.raises(UnsupportedError, match="a gemma3n model is not calibrated yet: it has several streams"):
        quantize("int4-weight-only:group=32", tmp_path / "out", folder, algorithm="gptq", num_samples=1)
    assert not (tmp_path / "out").exists()
