"""MiMo-V2 as it is published, and files as llama.cpp's converter writes them, both with layers behind the model's own that guess,
against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MiMoV2FlashConfig

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from test_models import MIMO, prompts
from test_quant_engine import difference, expected_logits, logits_of

PATTERN = [0, 1, 1, 0]
SHAPE = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings",
                                     "num_attention_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings")}  # fmt: skip
PUBLISHED: dict[str, Any] = SHAPE | {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_hidden_layers": 4, "num_key_value_heads": 3,
    "v_head_dim": 10, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 6, "swa_head_dim": 24, "swa_v_head_dim": 10,
    "hybrid_layer_pattern": PATTERN, "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5, "sliding_window": 19,
    "sliding_window_size": 19, "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
    "attention_value_scale": 0.5, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "n_routed_experts": 5, "n_shared_experts": None, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    own = {"num_hidden_layers": 4, "num_key_value_heads": 3, "attention_value_scale": 0.5}
    return random_model(MiMoV2FlashConfig(**SMALL | own, **MIMO))


@pytest.fixture(scope="module")
def published(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(reference, tmp_path_factory.mktemp("mimo"))
    tensors = load_file(folder / "model.safetensors")
    further = {name.replace("layers.2.", "mtp.layers.0."): each.clone() for name, each in tensors.items() if "layers.2." in name}
    save_file(tensors | further, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    return folder


def write(path: Path, folder: Path, *, fused: bool = False, **keys: Any) -> Path:
    """fused: as of MiMo-V2.5, whose q, k and v are one tensor."""
    writer = gguf.GGUFWriter(path, "mimo2")
    found: dict[str, Any] = {
        "block_count": 5, "context_length": 512, "embedding_length": 48, "feed_forward_length": 70, "attention.key_length": 24,
        "attention.value_length": 10, "attention.head_count": 6, "attention.head_count_kv": [3, 6, 6, 3, 6],
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 20, "vocab_size": SMALL["vocab_size"],
        "attention.sliding_window_pattern": [*PATTERN, 1], "attention.value_scale": 0.5, "rope.dimension_count": 8,
        "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "expert_count": 5, "expert_used_count": 2,
        "expert_feed_forward_length": 36, "expert_gating_func": 2, "nextn_predict_layers": 1,
    }  # fmt: skip
    for key, value in (found | keys).items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"mimo2.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MIMO2, 5)
    tensors = {key.replace("mtp.layers.0.", "layers.4."): each for key, each in load_file(folder / "model.safetensors").items()}
    for i in range(5):
        place = f"model.layers.{i}."
        if fused:
            parts = [tensors.pop(f"{place}self_attn.{part}_proj.weight") for part in "qkv"]
            writer.add_tensor(f"blk.{i}.attn_qkv.weight", torch.cat(parts).numpy())
        for part in ("gate", "up", "down"):
            experts = [name for e in range(5) if (name := f"{place}mlp.experts.{e}.{part}_proj.weight") in tensors]
            if experts:
                tensors[f"{place}mlp.experts.{part}_proj.weight"] = torch.stack([tensors.pop(name) for name in experts])
    for key, tensor in tensors.items():
        key = key.replace("_correction_bias", "_correction.bias").replace("sink_bias", "sink_bias.weight")
        name = names.get_name(key, (".weight", ".bias"))
        assert name is not None, key
        writer.add_tensor(name, tensor.numpy())
    for part in ("eh_proj", "enorm", "hnorm"):
        writer.add_tensor(f"blk.4.nextn.{part}.weight", torch.ones(*([48, 96] if part == "eh_proj" else [48])).numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


def test_folders_and_files_give_the_logits_of_transformers(reference: Any, published: Path, tmp_path: Path) -> None:
    tokens = prompts(512)[2:6]
    expected = expected_logits(reference, tokens)
    files = [write(tmp_path / f"{fused}.gguf", published, fused=fused) for fused in (False, True)]
    for path in (published, *files):
        assert difference(logits_of(worker_for(path, dtype="float32"), tokens), expected) < 1e-4, path


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"swa_head_dim": 16}, UnsupportedError, "another 'swa_head_dim' than of layers without a window"),
        ({"swa_num_key_value_heads": 4}, CheckpointError, "6 heads don't share 4 of keys"),
        ({"v_head_dim": 32, "swa_v_head_dim": 32}, UnsupportedError, "values of 32 numbers, which are wider than keys"),
        ({"hybrid_layer_pattern": [0, 1]}, CheckpointError, "'hybrid_layer_pattern' must be a list of 4 layers' 0 or 1"),
        ({"add_full_attention_sink_bias": True}, UnsupportedError, "'add_full_attention_sink_bias' is true"),
        ({"n_shared_experts": 1}, UnsupportedError, "experts that every token takes"),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = PUBLISHED | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


def test_a_kind_of_layers_whose_share_of_rotary_dims_is_left_out_has_the_usual_one(tmp_path: Path) -> None:
    bases = {"full_attention": 5e6, "sliding_attention": 500.0}
    sections = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    config = MiMoV2FlashConfig(**SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 3}, **MIMO, rope_parameters=sections)
    model, tokens = random_model(config), prompts(512)
    assert difference(logits_of(worker_for(save(model, tmp_path)), tokens), expected_logits(model, tokens)) < 1e-4
