"""Families whose folders come with code of their own, which is not run: models that transformers has under another name, in the
form that those folders have, give its logits, as folders and as the GGUF files that are made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    Ernie4_5Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    NemotronHConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    StableLmConfig,
    YoutuConfig,
)

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import UnsupportedError
from test_convert_families import fields, make_gguf, with_tokenizer
from test_models import NEMOTRON, NEMOTRON_EXPERTS, prompts
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


def maincoder(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rotary pairs side by side, norms' gains too."""
    found = {}
    for name, tensor in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj", "_layernorm")) and "self_attn" in name:
            rows = tensor.reshape(-1, 2, config["head_dim"] // 2, *tensor.shape[1:])
            tensor = rows.transpose(1, 2).reshape(tensor.shape).contiguous()
        name = name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")
        found[name.replace(".mlp.", ".feed_forward.")] = tensor
    return found


def shared_whole(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of a Qwen whose gate of what all tokens take is a half: that half."""
    found = {}
    for name, tensor in tensors.items():
        if "shared_expert_gate" not in name:
            is_last = "shared_expert.down" in name
            found[name.replace("shared_expert.", "shared_experts.")] = tensor / 2 if is_last else tensor
    return found


def ling(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    tensors = shared_whole(tensors, config)
    for i in range(config["num_hidden_layers"]):
        place = f"model.layers.{i}.self_attn"
        tensors[f"{place}.query_key_value.weight"] = torch.cat([tensors.pop(f"{place}.{part}_proj.weight") for part in "qkv"])
    renamed = {"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn": "attention"}
    for theirs, name in renamed.items():
        tensors = {key.replace(theirs, name): tensor for key, tensor in tensors.items()}
    return tensors


def plm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """up(x) times ReLU of the same is its square."""
    return {name: tensor for name, tensor in tensors.items() if "gate_proj" not in name}


def guessing(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """With what MiMo guesses by, beside the layers."""
    further = {name.replace("layers.0.", "mtp_layers.0."): each.clone() for name, each in tensors.items() if "layers.0." in name}
    return tensors | further | {"model.mtp_layers.0.input_proj.weight": torch.ones(48, 96)}


def puzzle(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Its layers are in no backbone, and what it guesses by lies beside."""
    return {name.replace("backbone.", "model."): each for name, each in tensors.items()} | {"mtp.norm.weight": torch.ones(48)}


def extended(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    return tensors | {"model.embed_tokens_extend.image_embed.glb_GN": torch.ones(1, 1, 4)}


def adapted(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """With what is for images and for sounds, whose adapters have its matrices inside."""
    found = {re.sub(r"(layers.*_proj)\.weight", r"\1.base_layer.weight", name): each for name, each in tensors.items()}
    inside = [name for name in found if "base_layer" in name]
    adapters = [name.replace("base_layer", part) for name in inside for part in ("lora_A.vision", "lora_B.speech")]
    return extended(found | {name: torch.ones(2, 3) for name in adapters}, config)


def kormo(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    names = {"input_layernorm": "pre_attention_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
    return {".".join(names.get(part, part) for part in name.split(".")): each for name, each in tensors.items()}


def seen(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    further = "vision_tower.blocks.0.mlp.fc1.weight", "siglip2.vision_model.post_layernorm.weight", "merger.ln_q.weight"
    return tensors | {name: torch.ones(3, 4) for name in further}


def inside(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of a model that sees."""
    return {f"language_model.{name}": each for name, each in tensors.items()} | {"vision_tower.patch.weight": torch.ones(3, 4)}


def beside(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of another, whose names have nothing in front."""
    return tensors | {"vision_model.conv1.weight": torch.ones(3, 4), "vit_large_projector.weight": torch.ones(3, 4)}


GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 48 / 20,
           "attention_multiplier": 24**-0.5}  # fmt: skip
SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20}
MOE = SMALL | {
    "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 72,
    "qkv_bias": False,
}  # fmt: skip
LATENT = {key: value for key, value in SMALL.items() if key != "head_dim"} | {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "n_shared_experts": 1, "n_group": 1,
           "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
SMALLER = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
CASES: dict[str, tuple[Any, str, dict[str, Any], Callable[[Tensors, dict[str, Any]], Tensors], str]] = {
    "internlm": (
        LlamaConfig(**SMALL | {"attention_bias": True}), "InternLMForCausalLM",
        {"model_type": "internlm", "bias": True, "attention_bias": None}, same, "llama",
    ),
    "aquila": (LlamaConfig(**SMALL), "AquilaForCausalLM", {"model_type": "aquila"}, same, "llama"),
    "stablelm epoch": (
        StableLmConfig(**SMALL | {"head_dim": 8}, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "StableLMEpochForCausalLM",
        {"model_type": "stablelm_epoch", "norm_eps": 1e-5, "layer_norm_eps": None, "rope_parameters": None, "rope_theta": 1e4,
         "partial_rotary_factor": None, "rope_pct": 0.5}, same, "stablelm",
    ),
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
    "iquest coder": (
        LlamaConfig(**SMALL), "IQuestCoderForCausalLM", {"model_type": "iquestcoder", "clip_qkv": None}, same, "llama",
    ),
    "ernie, by its first name": (
        Ernie4_5Config(**SMALL), "Ernie4_5_ForCausalLM", {"model_type": "ernie4_5"}, same, "ernie4_5",
    ),
    "maincoder": (
        HunYuanDenseV1Config(**SMALL), "MaincoderForCausalLM",
        {"model_type": "maincoder", "intermediate_size": 35, "intermediate_size_mlp": 70, "use_qk_norm": True}, maincoder,
        "maincoder",
    ),
    "openpangu": (
        LlamaConfig(**SMALL | {"attention_bias": True}), "PanguEmbeddedForCausalLM",
        {"model_type": "PanguEmbedded", "bias": True, "attention_bias": None}, same, "pangu-embedded",
    ),
    "xverse": (LlamaConfig(**SMALL | {"head_dim": 8}), "XverseForCausalLM", {"model_type": "xverse"}, same, "xverse"),
    "orion": (
        StableLmConfig(**SMALL | {"head_dim": 8}, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0}),
        "OrionForCausalLM", {"model_type": "orion", "rms_norm_eps": 1e-5, "layer_norm_eps": None, "rope_parameters": None}, same,
        "orion",
    ),
    "deepseek": (
        Qwen2MoeConfig(**MOE | {"mlp_only_layers": [0], "norm_topk_prob": False}), "DeepseekForCausalLM",
        {"model_type": "deepseek", "n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "scoring_func": "softmax", "mlp_only_layers": None}, shared_whole, "deepseek",
    ),
    "ling": (
        Qwen2MoeConfig(**MOE | {"norm_topk_prob": True}), "BailingMoeForCausalLM",
        {"model_type": "bailing_moe", "num_experts": 5, "num_shared_experts": 2, "first_k_dense_replace": 0, "use_bias": False,
         "use_qkv_bias": False, "norm_head": False}, ling, "bailingmoe",
    ),
    "plm": (
        YoutuConfig(**LATENT | {"hidden_act": "relu"}), "PLMForCausalLM", {"model_type": "plm", "hidden_act": "relu2"}, plm, "",
    ),
    "sarvam": (
        DeepseekV3Config(**LATENT | EXPERTS, rope_parameters=YARN | {"rope_type": "yarn"}), "SarvamMLAForCausalLM",
        {"model_type": "sarvam_mla", "head_dim": 48, "rope_parameters": None, "rope_scaling": YARN | {"type": "deepseek_yarn"}},
        same, "",
    ),
    "kimi k2.5": (
        DeepseekV3Config(**LATENT | EXPERTS | {"q_lora_rank": 16}), "KimiK25ForConditionalGeneration",
        {"model_type": "kimi_k25"}, inside, "deepseek2",
    ),
    "step3-vl": (Qwen3Config(**SMALL), "StepVLForConditionalGeneration", {"model_type": "step3_vl"}, beside, "qwen3"),
    "mimo": (
        Qwen2Config(**SMALL | {"head_dim": 8}), "MiMoForCausalLM", {"model_type": "mimo", "num_nextn_predict_layers": 1},
        guessing, "qwen2",
    ),
    "kormo": (LlamaConfig(**SMALL), "KORMoForCausalLM", {"model_type": "kormo"}, kormo, "qwen2"),
    "dots.ocr": (
        Qwen2Config(**SMALL | {"head_dim": 8}), "DotsOCRForCausalLM", {"model_type": "dots_ocr", "vision_config": {}}, seen,
        "qwen2",
    ),
    "youtu-vl": (YoutuConfig(**LATENT), "YoutuVLForConditionalGeneration", {"model_type": "youtu_vl"}, seen, "deepseek2"),
    "janus": (LlamaConfig(**SMALL), "JanusForConditionalGeneration", {"model_type": "janus"}, inside, "llama"),
    "got-ocr 2": (
        Qwen2Config(**SMALL | {"head_dim": 8}), "GotOcr2ForConditionalGeneration", {"model_type": "got_ocr2"}, inside, "qwen2",
    ),
    "granite speech": (
        GraniteConfig(**SMALL, **GRANITE), "GraniteSpeechForConditionalGeneration", {"model_type": "granite_speech"}, inside,
        "granite",
    ),
    "nemotron vl": (
        NemotronHConfig(**NEMOTRON), "NemotronH_Nano_VL_V2", {"model_type": "NemotronH_Nano_VL_V2"}, inside, "nemotron_h",
    ),
    "nemotron puzzle": (
        NemotronHConfig(**NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "ME*E", "moe_latent_size": 28}),
        "NemotronHPuzzleForCausalLM",
        {"model_type": "nemotron_h_puzzle", "layers_block_type": None, "moe_intermediate_size": None, "num_experts_per_tok": None,
         "block_configs": [{"block_type": "mamba"}, {"block_type": "moe", "moe_intermediate_size": 33, "num_experts_per_tok": 3},
                           {"block_type": "attention"}, {"block_type": "moe", **SMALLER}]}, puzzle, "nemotron_h_moe",
    ),
    "phi-4 multimodal": (
        Phi3Config(**SMALL | {"pad_token_id": 0}), "Phi4MMForCausalLM", {"model_type": "phi4mm"}, adapted, "phi3",
    ),
    "phi-4 multimodal, by transformers": (
        Phi3Config(**SMALL | {"pad_token_id": 0}), "Phi4MultimodalForCausalLM", {"model_type": "phi4_multimodal"}, extended,
        "phi3",
    ),
    "minicpm": (GraniteConfig(**SMALL, **GRANITE), "MiniCPMForCausalLM", {"model_type": "minicpm"} | SCALES, same, "minicpm"),
}  # fmt: skip


REFUSED = {
    "internlm2, biases": "GGUF cannot say this of an internlm2 model: a bias behind attention",
    "plm": "GGUF files of plm models are not written",
    "sarvam": "GGUF has no Sarvam with latent attention: llama.cpp knows none",
}


def folder_of(case: str, path: Path, **changes: Any) -> tuple[Any, Path]:
    """transformers' model, and the folder of the other."""
    config, name, values, form, _ = CASES[case]
    reference = random_model(with_tokenizer(config))
    if case == "nemotron puzzle":
        other = random_model(with_tokenizer(type(config)(**config.to_dict() | SMALLER)), seed=1)
        reference.model.layers[-1] = other.model.layers[-1]
    for layer in reference.model.layers:
        if case == "plm":
            layer.mlp.gate_proj.weight.data = layer.mlp.up_proj.weight.data.clone()
        elif hasattr(getattr(layer, "mlp", None), "shared_expert_gate"):
            layer.mlp.shared_expert_gate.weight.data.zero_()
    folder = save(reference, path)
    of_factors = GRANITE if case == "minicpm" else ()
    own = {key: value for key, value in reference.config.to_dict().items() if key not in of_factors}
    own |= {"architectures": [name], **values, **changes}
    if name.endswith("ForConditionalGeneration") or form is inside:
        own |= {"model_type": reference.config.model_type}
        own = {"architectures": [name], **values, "vision_config": {}, "text_config": own}
    (folder / "config.json").write_text(json.dumps(own))
    save_file(form(load_file(folder / "model.safetensors"), own), folder / "model.safetensors")
    return reference, folder


@pytest.mark.parametrize("case", CASES)
def test_a_folder_and_its_file_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    reference, folder = folder_of(case, tmp_path / "folder")
    tokens = prompts(513)[2:6]
    expected = expected_logits(reference, tokens)
    assert difference(logits_of(worker_for(folder), tokens), expected) < 1e-4
    if case in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[case]):
            make_gguf(folder, tmp_path / "made.gguf")
        return
    make_gguf(folder, tmp_path / "made.gguf")
    assert fields(tmp_path / "made.gguf")["general.architecture"] == CASES[case][-1]
    assert difference(logits_of(worker_for(tmp_path / "made.gguf"), tokens), expected) < 1e-4


def plm_file(path: Path, folder: Path) -> Path:
    """As llama.cpp's converter makes it of a folder."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "plm")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.PLM, config["num_hidden_layers"])
    for key, tensor in load_file(folder / "model.safetensors").items():
        name = names.get_name(key, (".weight",)) or "output.weight"  # the table has no head, as a PLM's is its embedding
        writer.add_tensor(name, tensor.numpy())
    for done in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        done()
    return path


def test_a_plms_file(tmp_path: Path) -> None:
    reference, folder = folder_of("plm", tmp_path / "folder")
    tokens = prompts(513)[2:6]
    worker = worker_for(plm_file(tmp_path / "m.gguf", folder))
    assert difference(logits_of(worker, tokens), expected_logits(reference, tokens)) < 1e-4


@pytest.mark.parametrize("key", ["num_experts", "sparse_config"])
def test_other_minicpms_are_refused(key: str, tmp_path: Path) -> None:
    _, folder = folder_of("minicpm", tmp_path, **{key: 4})
    with pytest.raises(UnsupportedError, match=f"a MiniCPM with {key} is not supported"):
        worker_for(folder)
