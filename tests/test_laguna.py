"""Laguna's GGUF files, as llama.cpp's converter writes them; this program reads them, and writes none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LagunaConfig

from engines import SMALL, random_model, save, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import MoESpec
from test_cli_driver import nanovllm
from test_convert_families import make_gguf, with_tokenizer
from test_llm import write_byte_tokenizer
from test_models import CASES, LAGUNA, ORIGINAL, prompts
from test_quant_engine import difference, expected_logits, logits_of

HEADS = [4, 6, 6, 6]
CONFIG = LagunaConfig(
    **SMALL | {"num_hidden_layers": 4}, **LAGUNA, num_attention_heads_per_layer=HEADS, sliding_window=20,
    layer_types=["full_attention", *["sliding_attention"] * 3],
    rope_parameters={
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0,
                           "original_max_position_embeddings": ORIGINAL},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
    },
)  # fmt: skip
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output", "self_attn.g_proj": "attn_gate", "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip


def write(path: Path, model: Any, heads: Any = HEADS) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, "laguna")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(20)
    writer.add_rope_freq_base(1e4)
    writer.add_float32("laguna.rope.freq_base_swa", 1e3)
    writer.add_rope_dimension_count(config.head_dim // 2)
    writer.add_uint32("laguna.rope.dimension_count_swa", config.head_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(1)
    writer.add_tokenizer_model("gpt2")
    outer = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    for name, tensor in model.state_dict().items():
        data = tensor.float().contiguous()
        if name in outer:
            writer.add_tensor(f"{outer[name]}.weight", data.numpy())
            continue
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if inner == "mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), data.chunk(2, dim=1), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", half.contiguous().numpy())
        elif inner == "mlp.experts.down_proj":
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight", data.numpy())
        elif inner.endswith("e_score_correction_bias"):
            writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", data.numpy())
        else:
            writer.add_tensor(f"blk.{layer}.{PARTS[inner.removesuffix('.weight')]}.weight", data.numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


@pytest.fixture(scope="module")
def model() -> Any:
    found = random_model(CONFIG)
    with torch.no_grad():  # or no expert would be chosen by it
        for layer in found.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, 5))
    return found


def test_a_file_gives_the_logits_that_transformers_gives(model: Any, tmp_path: Path) -> None:
    tokens = prompts(512)
    expected = expected_logits(model, tokens)
    assert difference(logits_of(worker_for(write(tmp_path / "m.gguf", model)), tokens), expected) < 1e-4
    assert difference(logits_of(worker_for(save(model, tmp_path / "folder")), tokens), expected) < 1e-4


@pytest.mark.parametrize(
    ("keys", "changes"),
    [({"expert_weights_norm": False}, {"norm_topk": False}), ({"expert_weights_norm": None}, {"norm_topk": False}),
     ({"rope.dimension_count_swa": None}, {"dim": CONFIG.head_dim // 2})],
    ids=str,
)  # fmt: skip
def test_weights_and_rotary_dims_that_a_file_says(
    keys: dict[str, Any], changes: dict[str, Any], model: Any, tmp_path: Path
) -> None:
    """llama.cpp's rules: weights as they are and one count for all layers, unless a file says otherwise."""
    base = write(tmp_path / "m.gguf", model)
    named = {f"laguna.{key}": value for key, value in keys.items()}
    usual, found = (worker_for(path).spec for path in (base, written_anew(base, tmp_path / "changed.gguf", named)))
    if "dim" in changes:
        wanted = usual.each_rope(lambda rope: replace(rope, **changes))
    else:
        wanted = usual.with_mlps(MoESpec, **changes)
    assert usual != found == wanted


@pytest.mark.parametrize("heads", [[4, 6], [4, 6, 5, 4], [4, 6, 6, 0]])
def test_heads_that_are_none(heads: list[int], model: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a Laguna's heads must be a list of 4 layers' numbers"):
        worker_for(write(tmp_path / "m.gguf", model, heads))


def test_files_are_not_written(tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(CASES["laguna, 2 of 5 and shared"])), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match="GGUF files of laguna models are not written"):
        make_gguf(folder, tmp_path / "m.gguf")


def test_what_files_of_a_mellum_cannot_say(tmp_path: Path) -> None:
    """llama.cpp turns all layers by one base, and has experts in each."""
    folder = save(random_model(with_tokenizer(CASES["mellum, 2 of 5"])), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match="no one rotary base for all layers, no experts in all layers"):
        make_gguf(folder, tmp_path / "m.gguf")


def test_show_says_how_layers_differ(tmp_path: Path) -> None:
    folder = save(random_model(CASES["laguna, 2 of 5 and shared"]), tmp_path / "m")
    write_byte_tokenizer(folder)
    text = nanovllm(tmp_path, "models", "show", str(folder)).out
    assert "4 to 6 heads over 2 of keys and values, 24 dims a head" in text
    assert "theta 10,000, yarn x4 from 32; theta 1,000\n" in text
