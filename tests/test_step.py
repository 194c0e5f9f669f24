"""Step 3.5 and 3.7 against transformers: folders as it saves them and as they are published, and files as llama.cpp's converter
writes them, both with a layer behind the model's own that guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights.convert_rope import llama3_divisors
from test_models import prompts
from test_quant_engine import difference, expected_logits, logits_of

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING, SLIDING, FULL]
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
          "high_freq_factor": 32.0}  # fmt: skip
LIMITS = {"swiglu_limits": [0.0, 0.0, None, 0.5], "swiglu_limits_shared": [0.4, 0.0, 0.7, 0.6]}
SHAPE = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings",
                                     "bos_token_id", "eos_token_id", "tie_word_embeddings")}  # fmt: skip
TEXT: dict[str, Any] = SHAPE | LIMITS | {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "moe_intermediate_size": 36,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "share_expert_dim": 40, "sliding_window": 20, "layer_types": KINDS,
    "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", *["sparse"] * 3], "moe_router_scaling_factor": 3.0,
    "rope_theta": [1e4, 1e3, 1e3, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5], "rope_scaling": LLAMA3, "pad_token_id": 2,
}  # fmt: skip
PUBLISHED: dict[str, Any] = SHAPE | {key: [*each, 0.0] for key, each in LIMITS.items()} | {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_attention_groups": 2, "rms_norm_eps": 1e-5, "moe_intermediate_size": 36, "moe_num_experts": 5, "moe_top_k": 2,
    "share_expert_dim": 40, "sliding_window": 20, "layer_types": [*KINDS, SLIDING], "moe_layers_enum": "1,2,3",
    "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 24},
    "moe_router_scaling_factor": 3.0, "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True,
    "use_head_wise_attn_gate": True, "rope_theta": [1e4, 1e3, 1e3, 1e4, 1e3], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": LLAMA3, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    sees = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return random_model(Step3p7Config(text_config=TEXT, vision_config=sees), auto=AutoModelForImageTextToText)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("step"))


def texts(folder: Path) -> dict[str, torch.Tensor]:
    """What writes, and a layer that guesses."""
    found = {name: each for name, each in load_file(folder / "model.safetensors").items() if not name.startswith("vi")}
    return found | {name.replace(".2.", ".4."): each.clone() for name, each in found.items() if ".layers.2." in name}


@pytest.fixture
def published(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "published"
    path.mkdir()
    save_file(texts(folder), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(PUBLISHED))
    return path


def write(path: Path, folder: Path, model: Any, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "step35")
    found: dict[str, Any] = {
        "block_count": 5, "context_length": 512, "embedding_length": 48, "feed_forward_length": 70, "attention.key_length": 24,
        "attention.value_length": 24, "attention.head_count": [4, 6, 6, 4, 6], "attention.head_count_kv": [2] * 5,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 20, "vocab_size": SMALL["vocab_size"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in [*KINDS, SLIDING]], "rope.freq_base": 1e4,
        "rope.freq_base_swa": 1e3, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 36,
        "expert_shared_feed_forward_length": 40, "expert_weights_scale": 3.0, "expert_weights_norm": True,
        "expert_gating_func": 2, "leading_dense_block_count": 1, "swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.5, 0.0],
        "swiglu_clamp_shexp": [0.4, 0.0, 0.7, 0.6, 0.0], "nextn_predict_layers": 1,
    }  # fmt: skip
    for key, value in (found | keys).items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}[type(value)]
        add(f"step35.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STEP35, 5)
    for key, tensor in texts(folder).items():
        name = names.get_name(key + (".bias" if key.endswith("router_bias") else ""), (".weight", ".bias"))
        assert name is not None, key
        writer.add_tensor(name, (tensor + 1 if key.endswith("norm.weight") else tensor).numpy())
    rope = worker_for(folder).spec.attention.rope
    assert rope is not None
    writer.add_tensor("rope_freqs.weight", torch.tensor([*llama3_divisors(rope), *[1.0] * 6]).numpy())
    for part in ("eh_proj", "enorm", "hnorm"):
        writer.add_tensor(f"blk.4.nextn.{part}.weight", torch.ones(*([48, 96] if part == "eh_proj" else [48])).numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


def test_folders_and_files_give_the_logits_of_transformers(reference: Any, folder: Path, published: Path, tmp_path: Path) -> None:
    tokens = prompts(512)[2:6]
    expected = expected_logits(reference, tokens)
    for path in (folder, published, write(tmp_path / "m.gguf", folder, reference)):
        assert difference(logits_of(worker_for(path, dtype="float32"), tokens), expected) < 1e-4, path


def test_activations_are_held(folder: Path, published: Path) -> None:
    """Or the above would show nothing."""
    config = json.loads((published / "config.json").read_text())
    for key in LIMITS:
        without = {name: value for name, value in config.items() if name != key}
        (published / "config.json").write_text(json.dumps(without))
        workers = [worker_for(path, dtype="float32") for path in (folder, published)]
        assert difference(*(logits_of(each, prompts(512)[3:5]) for each in workers)) > 1e-2, key


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"use_head_wise_attn_gate": False}, UnsupportedError, "a Step whose 'use_head_wise_attn_gate' is false"),
        ({"moe_router_activation": "softmax"}, UnsupportedError, "experts that are weighed by 'softmax'"),
        ({"attention_other_setting": {"num_attention_groups": 1}}, UnsupportedError, "another 'num_attention_groups' in layers"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, CheckpointError, "5 heads don't share 2 of keys"),
        ({"moe_layers_enum": "1,two"}, CheckpointError, "'moe_layers_enum' must be a list of layers"),
        ({"swiglu_limits": [1.0]}, CheckpointError, "'swiglu_limits' must be a list of 4 numbers"),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = PUBLISHED | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))
