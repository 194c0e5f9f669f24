"""Whole models in quantized checkpoints: logits and greedy tokens against transformers with the weights that they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MiniMaxM2Config,
    Mistral4Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engines import engine_for, greedy, random_model, run, worker_for
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from quantized_checkpoints import Maker, Tensors, awq, awq_config, fp8, gptq, gptq_config, module, nvfp4, packed, write
from test_models import whole_batch

SIZES = {
    "vocab_size": 263, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
PROMPTS = [[7, 200, 31], list(range(40, 77)), [5]]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_BLOCKS = FP8 | {"weight_block_size": [128, 128]}
FP8_STATIC = FP8 | {"activation_scheme": "static"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

CASES: dict[str, tuple[Any, Maker, dict[str, Any]]] = {
    "fp8 blocks, llama": (LlamaConfig(**SIZES), fp8("block", "weight_scale_inv"), FP8_BLOCKS),
    "fp8 blocks, last ones short": (
        LlamaConfig(**SIZES | {"head_dim": 40, "intermediate_size": 200}), fp8("block", "weight_scale_inv"), FP8_BLOCKS,
    ),
    "fp8 tensors, qwen3": (Qwen3Config(**SIZES), fp8("tensor"), FP8),
    "fp8 static, qwen3": (Qwen3Config(**SIZES), fp8("tensor", static=True), FP8_STATIC),
    "gptq 4, qwen2": (Qwen2Config(**SIZES), gptq(4, 32), gptq_config(4, 32)),
    "gptq 4, in an order, zero points": (
        LlamaConfig(**SIZES), gptq(4, 64, symmetric=False, order=True, version=2), gptq_config(4, 64, False, True, 2),
    ),
    "gptq 3": (LlamaConfig(**SIZES), gptq(3, 128), gptq_config(3, 128)),
    "gptq 2": (LlamaConfig(**SIZES), gptq(2, 32), gptq_config(2, 32)),
    "gptq 8, one group": (LlamaConfig(**SIZES), gptq(8, 0), gptq_config(8, 0)),
    "awq, qwen3, tied": (Qwen3Config(**SIZES | {"tie_word_embeddings": True}), awq(64), awq_config(64)),
    "fp8 blocks, experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), fp8("block", "weight_scale_inv"), FP8_BLOCKS),
    "gptq 4, in an order, experts": (
        Qwen3MoeConfig(**SIZES, **EXPERTS), gptq(4, 64, symmetric=False, order=True, version=2),
        gptq_config(4, 64, False, True, 2),
    ),
    "nvfp4, llama": (LlamaConfig(**SIZES), nvfp4("modelopt"), NVFP4),
    "nvfp4, experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), nvfp4("modelopt"), NVFP4),
    "awq, experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), awq(32), awq_config(32)),
}  # fmt: skip


def build(folder: Path, config: Any, maker: Maker, quantization: dict[str, Any], **extra: torch.Tensor) -> Any:
    """A checkpoint whose linear layers, but the head, are made by `maker`; returns transformers' model with the same weights."""
    reference = random_model(config)
    random = np.random.default_rng(2)
    tensors: Tensors = {}
    for name, parameter in reference.state_dict().items():
        if name.endswith("_proj.weight"):
            made, weight = maker(*parameter.shape, random)
            parameter.copy_(torch.from_numpy(weight))
            tensors |= module(made, name.removesuffix(".weight"))
        elif parameter.dim() == 3:
            tensors |= _experts(name, parameter, maker, random)
        elif not (name.startswith("lm_head") and config.tie_word_embeddings):
            tensors[name] = parameter.detach()
    save_quantized(folder, tensors | extra, config, quantization)
    return reference


def _experts(name: str, parameter: torch.Tensor, maker: Maker, random: np.random.Generator) -> Tensors:
    """Each expert's matrices have tensors of their own; transformers has those of a layer in one."""
    tensors: Tensors = {}
    for e, expert in enumerate(parameter):
        parts = {"gate": expert.chunk(2)[0], "up": expert.chunk(2)[1]} if "gate_up" in name else {"down": expert}
        for part, rows in parts.items():
            made, weight = maker(*rows.shape, random)
            rows.copy_(torch.from_numpy(weight))
            tensors |= module(made, f"{name.rpartition('.')[0]}.{e}.{part}_proj")
    return tensors


def save_quantized(folder: Path, tensors: Tensors, config: Any, quantization: dict[str, Any]) -> Path:
    architecture = type(random_model(config)).__name__
    write(folder, tensors, quantization, {**config.to_dict(), "architectures": [architecture], "dtype": "float32"})
    return folder


def all_logits(worker: Worker) -> list[torch.Tensor]:
    """Of every position of every prompt."""
    with torch.inference_mode():
        hidden = worker.model.run(worker.model.prepare(whole_batch(PROMPTS)), worker.runner.cache)
        return list(worker.model.logits(hidden).float().split([len(ids) for ids in PROMPTS]))


def worst_difference(worker: Worker, reference: Any) -> float:
    """Relative, of all prompts."""
    differences = []
    with torch.inference_mode():
        for ids, rows in zip(PROMPTS, all_logits(worker), strict=True):
            expected = reference(torch.tensor([ids])).logits[0]
            differences.append(float((rows - expected).norm() / expected.norm()))
    return max(differences)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers_with_these_weights(case: str, tmp_path: Path) -> None:
    config, maker, quantization = CASES[case]
    reference = build(tmp_path, config, maker, quantization)
    worker = worker_for(tmp_path, dtype="float32")
    assert worst_difference(worker, reference) < 1e-4
    outputs = run(engine_for(worker), [(ids, greedy(12)) for ids in PROMPTS])
    for ids, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(output.outputs[0].token_ids) == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    "case", ["fp8 blocks, llama", "fp8 static, qwen3", "gptq 4, in an order, zero points", "awq, qwen3, tied"]
)
def test_in_bfloat16_with_rounded_activations_the_model_is_still_itself(case: str, tmp_path: Path) -> None:
    """A random model is far more sensitive than a trained one; another model's logits would be 1.4 away."""
    config, maker, quantization = CASES[case]
    reference = build(tmp_path, config, maker, quantization)
    assert worst_difference(worker_for(tmp_path, dtype="bfloat16"), reference) < 0.3


def test_a_quantized_head(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"vocab_size": 264})
    reference = build(tmp_path, config, gptq(4, 32), gptq_config(4, 32))
    made, weight = gptq(8, 32)(264, 128, np.random.default_rng(3))
    reference.lm_head.weight.data.copy_(torch.from_numpy(weight))
    tensors: Tensors = module(made, "lm_head")
    folder = tmp_path / "head"
    rules = gptq_config(4, 32) | {"lm_head": True, "dynamic": {"+:lm_head": {"bits": 8}}}
    stored = build(folder, config, gptq(4, 32), rules)
    with_head = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != "lm_head.weight"
    } | tensors
    save_quantized(folder, with_head, config, rules)
    assert torch.equal(stored.model.norm.weight, reference.model.norm.weight)
    assert worst_difference(worker_for(folder, dtype="float32"), reference) < 1e-4


def test_biases_of_zeros_that_the_model_does_not_have_are_passed_over(tmp_path: Path) -> None:
    """AutoGPTQ writes them for every layer."""
    name = "model.layers.1.self_attn.o_proj.bias"
    config = LlamaConfig(**SIZES)
    reference = build(tmp_path, config, gptq(4, 32), gptq_config(4, 32), **{name: torch.zeros(128)})
    assert worst_difference(worker_for(tmp_path, dtype="float32"), reference) < 1e-4
    folder = tmp_path / "other"
    build(folder, config, gptq(4, 32), gptq_config(4, 32), **{name: torch.ones(128)})
    with pytest.raises(CheckpointError, match="not part of the model"):
        worker_for(folder, dtype="float32")


def integers(layout: str) -> Maker:
    """compressed-tensors without its library: what transformers, which has it, reads."""

    def make(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        bits = 8 if layout == "int-quantized" else 4
        groups = 1 if bits == 8 else columns // 32
        codes = random.integers(0, 1 << bits, (rows, columns))
        scales = random.uniform(0.5, 2, (rows, groups)).astype(np.float32) / (1 << bits) / columns**0.5 * 4
        middle = 1 << (bits - 1)
        made: Tensors = {"weight_scale": torch.from_numpy(scales)}
        if bits == 8:
            made["weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        else:
            made["weight_packed"] = torch.from_numpy(packed(codes.T, bits).T.copy())
            made["weight_shape"] = torch.tensor([rows, columns])
        return made, (codes - middle) * np.repeat(scales.astype(np.float64), columns // groups, 1)

    return make


def compressed(layout: str) -> tuple[Maker, dict[str, Any]]:
    weights: dict[str, dict[str, Any]] = {
        "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    quantization = {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights[layout] | {"symmetric": True, "dynamic": False}}},
    }  # fmt: skip
    return fp8("row") if layout == "float-quantized" else integers(layout), quantization


@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized", "float-quantized"])
def test_compressed_tensors_as_transformers_loads_them(layout: str, tmp_path: Path) -> None:
    for library in ("compressed_tensors", "accelerate"):
        pytest.importorskip(library, reason="not installed (pip install -e '.[peers]')")
    maker, quantization = compressed(layout)
    if layout == "int-quantized":  # without inputs of int8, transformers takes the weight for a packed one
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
        quantization["config_groups"]["group_0"]["input_activations"] = inputs
    build(tmp_path, LlamaConfig(**SIZES), maker, quantization)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        loaded(torch.tensor([[1]]))  # unpacks the weights
    exact = random_model(LlamaConfig(**SIZES))  # transformers rounds inputs, in float32 we don't
    exact.load_state_dict({name: tensor for name, tensor in loaded.state_dict().items() if name in exact.state_dict()})
    assert worst_difference(worker_for(tmp_path, dtype="float32"), exact) < 1e-4


def test_fp8_blocks_as_transformers_loads_them(tmp_path: Path) -> None:
    """Whole blocks only: of short ones transformers takes other rows than DeepSeek's own kernel."""
    pytest.importorskip("accelerate", reason="not installed (pip install -e '.[peers]')")
    skipped = {"modules_to_not_convert": ["lm_head"]}
    build(tmp_path, LlamaConfig(**SIZES), fp8("block", "weight_scale_inv"), FP8_BLOCKS | skipped)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert worst_difference(worker_for(tmp_path, dtype="float32"), loaded) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_as_transformers_writes_them(bits: int, tmp_path: Path) -> None:
    for library in ("bitsandbytes", "accelerate"):
        pytest.importorskip(library, reason="not installed (pip install -e '.[peers]')")
    from transformers import BitsAndBytesConfig

    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    random_model(Qwen2Config(**SIZES)).save_pretrained(plain)
    settings = (
        BitsAndBytesConfig(load_in_8bit=True)
        if bits == 8
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    )
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(quantized)
    assert "quantization_config" in json.loads((quantized / "config.json").read_text())
    exact = model.dequantize(torch.float32).eval()  # its own kernels round activations
    assert worst_difference(worker_for(quantized, dtype="float32"), exact) < 1e-3


@pytest.mark.parametrize("form", ["a scale for each half", "one an expert"])
def test_mistral_small_4_as_it_is_published(form: str, tmp_path: Path) -> None:
    """In fp8 by tensors, activations too, with what a layer's experts have of each in one tensor."""
    config = Mistral4Config(
        **{name: value for name, value in SIZES.items() if name != "head_dim"} | {"pad_token_id": 0, "num_key_value_heads": 4},
        q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=48,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
                         "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    )  # fmt: skip
    reference = build(tmp_path, config, fp8("tensor", "weight_scale_inv", static=True), FP8_STATIC)
    tensors = {name.replace("input_scale", "activation_scale"): tensor
               for name, tensor in load_file(tmp_path / "model.safetensors").items()}  # fmt: skip
    for i in range(config.num_hidden_layers):
        place = f"model.layers.{i}.mlp.experts"
        own = {part: [{kind: tensors.pop(f"{place}.{e}.{part}_proj.{kind}")
                       for kind in ("weight", "weight_scale_inv", "activation_scale")} for e in range(3)]
               for part in ("gate", "up", "down")}  # fmt: skip
        if form == "one an expert":
            halves = reference.model.layers[i].mlp.experts.gate_up_proj.data
            for e, (gate, up) in enumerate(zip(own["gate"], own["up"], strict=True)):
                halves[e, 48:] *= gate["weight_scale_inv"] / up["weight_scale_inv"]
        codes = [torch.cat([gate["weight"], up["weight"]]) for gate, up in zip(own["gate"], own["up"], strict=True)]
        scales = [torch.stack([each["weight_scale_inv"] for each in own[part]]) for part in ("gate", "up")]
        tensors |= {
            f"{place}.gate_up_proj": torch.stack(codes),
            f"{place}.gate_up_proj_scale_inv": scales[0].flatten() if form == "one an expert" else torch.stack(scales, 1),
            f"{place}.down_proj": torch.stack([each["weight"] for each in own["down"]]),
            f"{place}.down_proj_scale_inv": torch.stack([each["weight_scale_inv"] for each in own["down"]])[..., None],
            **{f"{place}.{part}_proj_activation_scale": torch.full((3,), 0.02) for part in ("gate_up", "down")},
        }
    save_file(tensors, tmp_path / "model.safetensors")
    worker = worker_for(tmp_path, dtype="float32")
    assert {form.name for form in worker.formats if form is not None} == {"fp8"}
    assert worst_difference(worker, reference) < 1e-4


def test_minimax_m2_as_it_is_published(tmp_path: Path) -> None:
    """In fp8 by blocks, under Mixtral's names, with a config that says what of a head is rotated by dims, and much that is not
    read."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    shape = SIZES | {"intermediate_size": 128, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": rope}
    config = MiniMaxM2Config(**shape)
    reference = build(tmp_path, config, fp8("block", "weight_scale_inv"), FP8_BLOCKS)
    whole = json.loads((tmp_path / "config.json").read_text())
    parts = {f"{part}_proj": theirs for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
    pattern = "|".join([r"\.mlp\.", *parts])
    names = {".mlp.": ".block_sparse_moe."} | parts
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(pattern, lambda found: names[found[0]], name): tensor for name, tensor in tensors.items()}
    values = {key: value for key, value in whole.items() if "rope" not in key}
    published = {
        "rotary_dim": 32, "rope_theta": 5000000, "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
        "use_routing_bias": True, "attn_type_list": [1, 1], "num_mtp_modules": 3, "use_mtp": True, "mtp_transformer_layers": 1,
        "shared_intermediate_size": 0,
    }  # fmt: skip
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values | published))
    worker = worker_for(tmp_path, dtype="float32")
    assert worker.spec == spec_from_hf(whole, hf_family(whole))
    assert {form.name for form in worker.formats if form is not None} == {"fp8:block=128"}
    assert worst_difference(worker, reference) < 1e-4
