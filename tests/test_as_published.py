"""Folders and files as others publish them: keys, shapes and spellings that the models of other tests don't have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Mistral3Config,
    ModernBertConfig,
    ModernBertModel,
    NemotronHConfig,
    Qwen3NextConfig,
)

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, PromptTooLongError, UnsupportedError
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert import TINY
from test_models import CASES, NEMOTRON, check_what_it_writes
from test_models_gguf import CASES as FILES
from test_models_gguf import difference, expected_logits, logits_of, prompts, write


@pytest.mark.parametrize("is_other", [True, False])
def test_a_head_of_its_own_counts_whatever_the_config_says(is_other: bool, tmp_path: Path) -> None:
    """As in transformers: it ties where there is no other one."""
    model = random_model(LlamaConfig(**SMALL | {"tie_word_embeddings": False}))
    folder = save(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    if not is_other:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    worker = worker_for(folder, dtype="float32")
    assert worker.spec.tied_head != is_other
    (output,) = run(engine_for(worker), [([5, 6, 7], greedy(6))])
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = theirs(torch.tensor([[5, 6, 7, *output.outputs[0].token_ids]])).logits[0, 2:-1]
    assert list(output.outputs[0].token_ids) == logits.argmax(-1).tolist()


def test_a_model_of_parts_without_a_head_draws_by_its_embedding_unless_told(tmp_path: Path) -> None:
    """Its part for texts does not tell."""
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    told = Mistral3Config(text_config=SMALL | {"model_type": "mistral"}, vision_config=vision | {"patch_size": 4})
    folder = save(random_model(told, auto=AutoModelForImageTextToText), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config.pop("tie_word_embeddings"), config["text_config"]["tie_word_embeddings"]) == (True, False)
    (folder / "config.json").write_text(json.dumps(config))
    worker = worker_for(folder, dtype="float32")
    assert worker.spec.tied_head
    (output,) = run(engine_for(worker), [([5, 6, 7], greedy(6))])
    theirs = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([[5, 6, 7, *output.outputs[0].token_ids]])).logits[0, 2:-1]
    assert list(output.outputs[0].token_ids) == logits.argmax(-1).tolist()


def test_a_context_of_one_token_is_one(tmp_path: Path) -> None:
    """It says nothing of rotary scaling, and needs nothing of it. Without room for an answer no prompt fits."""
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 1})
    worker = worker_for(save(random_model(config), tmp_path), dtype="float32")
    with pytest.raises(PromptTooLongError, match="the context holds 1"):
        engine_for(worker).add("a", [3], greedy())
    metadata = {"general.architecture": "llama"} | {
        f"llama.{key}": value for key, value in {
            "attention.head_count": 2, "embedding_length": 32, "block_count": 1, "feed_forward_length": 40, "context_length": 1,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }.items()
    }  # fmt: skip
    assert spec_from_gguf(metadata, gguf_family(metadata), 99, set(), lambda name: None).max_position == 1


def converted(folder: Path, path: Path) -> Path:
    """To float32, with the bundled model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    with open_checkpoint(folder) as checkpoint:
        convert.write(checkpoint, convert.plan(checkpoint, "gguf", "f32"), path)
    return path


def hidden_rows(path: Path, ids: list[int]) -> torch.Tensor:
    worker = worker_for(path, dtype="float32")
    with torch.inference_mode():
        from test_models import whole_batch

        return worker.model.run(worker.model.prepare(whole_batch([ids])), worker.runner.cache)


# ---- GGUF ----


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_modernberts_file_says_its_activation(activation: str, tmp_path: Path) -> None:
    """Granite's multilingual ones have a SiLU; llama.cpp writes the key since then."""
    vocabulary = len(json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"])
    config: Any = ModernBertConfig(
        vocab_size=vocabulary + 16, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        hidden_activation=activation, local_attention=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, max_position_embeddings=300,
    )  # fmt: skip

    class Auto:
        @staticmethod
        def from_config(config: Any, **settings: Any) -> Any:
            return ModernBertModel._from_config(config, **settings)

    model = random_model(config, auto=Auto)
    folder = save(model, tmp_path / "folder")
    path = converted(folder, tmp_path / "m.gguf")
    ids = list(range(3, 43))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).last_hidden_state[0]
    for each in (folder, path):
        assert difference(hidden_rows(each, ids), wanted) < 1e-4
    with open_checkpoint(path) as file:
        assert file.config.get("modern-bert.hidden_activation", "gelu") == activation
    other = {"gelu": "silu", "silu": "gelu"}[activation]
    anew = written_anew(path, tmp_path / "anew.gguf", {"modern-bert.hidden_activation": other})
    assert difference(hidden_rows(anew, ids), wanted) > 1e-2
    for name, is_same in (("geglu", activation == "gelu"), ("swiglu", activation == "silu"), (None, activation == "gelu")):
        anew = written_anew(path, tmp_path / "anew.gguf", {"modern-bert.hidden_activation": name})
        assert (difference(hidden_rows(anew, ids), wanted) < 1e-4) == is_same
    with pytest.raises(UnsupportedError, match="activation 'relu' is not supported"):
        worker_for(written_anew(path, tmp_path / "anew.gguf", {"modern-bert.hidden_activation": "relu"}))


def test_queries_of_a_mistral_large_grow(tmp_path: Path) -> None:
    """It is of the architecture deepseek2 there, and a Mistral Small 4 of its own."""
    config: Any = CASES["mistral4, 3 of 5 and shared"]
    reference = random_model(config)
    path = converted(with_room(save(reference, tmp_path / "folder")), tmp_path / "m.gguf")
    with open_checkpoint(path) as file:
        length, scale = (file.config[f"mistral4.attention.temperature_{key}"] for key in ("length", "scale"))
    anew = written_anew(path, tmp_path / "anew.gguf", {"mistral4.expert_gating_func": 1}, arch="deepseek2")
    tokens = [list(range(2, 2 + 2 * length)), list(range(7, 27))]
    wanted = logits_of(worker_for(path, dtype="float32"), tokens)
    assert difference(logits_of(worker_for(anew, dtype="float32"), tokens), wanted) < 1e-5
    flat = written_anew(anew, tmp_path / "flat.gguf", {"deepseek2.attention.temperature_scale": None})
    assert scale > 0
    assert difference(logits_of(worker_for(flat, dtype="float32"), tokens), wanted) > 1e-3


def with_room(folder: Path) -> Path:
    """The same model with as many tokens as the bundled tokenizer has."""
    count = len(json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]) + 16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": count}))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            more = torch.randn(count - len(tensors[name]), tensors[name].shape[1], generator=torch.Generator().manual_seed(5))
            tensors[name] = torch.cat([tensors[name], more])
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", ["granite", "llama", "qwen3"])
def test_heads_by_layer_that_are_alike(case: str, tmp_path: Path) -> None:
    """As llama.cpp's converter has them of Granites without states."""
    arch, config, add = FILES[case]
    reference = random_model(config)
    path = write(tmp_path / "m.gguf", arch, reference, add)
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    anew = written_anew(path, tmp_path / "anew.gguf", {f"{arch}.attention.head_count_kv": [heads] * layers})
    tokens = prompts(config.vocab_size)[:3]
    assert difference(logits_of(worker_for(anew), tokens), expected_logits(reference, tokens)) < 1e-4
    for wrong in ([heads] * (layers - 1), [heads] * (layers - 1) + [1], [0] * layers):
        with pytest.raises(CheckpointError, match="head_count_kv"):
            worker_for(written_anew(path, tmp_path / "anew.gguf", {f"{arch}.attention.head_count_kv": wrong}))


def test_an_ernies_biases_of_one_row(tmp_path: Path) -> None:
    """As its folders have them, and llama.cpp's converter writes them."""
    case = "ernie 4.5, 2 of 5 and shared"
    reference = random_model(CASES[case])
    path = converted(with_room(save(reference, tmp_path / "folder")), tmp_path / "m.gguf")
    file = gguf.GGUFReader(path)
    biases = {tensor.name: tensor.data[None] for tensor in file.tensors if tensor.name.endswith("exp_probs_b.bias")}
    assert biases
    anew = written_anew(path, tmp_path / "anew.gguf", tensors=biases)
    tokens = [[5, 6, 7, 8], [9, 10]]
    both = (logits_of(worker_for(each, dtype="float32"), tokens) for each in (path, anew))
    assert torch.equal(*both)


def test_one_expert_is_none(tmp_path: Path) -> None:
    """As the first files of Hunyuan's dense models say it."""
    arch, config, add = FILES["hunyuan"]
    reference = random_model(config)
    path = write(tmp_path / "m.gguf", arch, reference, add)
    tokens = prompts(config.vocab_size)[:2]
    anew = written_anew(path, tmp_path / "anew.gguf", {f"{arch}.expert_count": 1})
    assert difference(logits_of(worker_for(anew), tokens), expected_logits(reference, tokens)) < 1e-4
    with pytest.raises(UnsupportedError, match="hunyuan-dense with experts"):
        worker_for(written_anew(path, tmp_path / "anew.gguf", {f"{arch}.expert_count": 2}))


# ---- folders ----


def test_an_ax_k1_has_norms_that_nothing_reads_and_no_bias_that_chooses(tmp_path: Path) -> None:
    """Norms behind MLPs of dense layers; transformers takes the bias for zeros."""
    config = CASES["a.x k1, 3 of 5 and shared"]
    reference = random_model(config)
    for name, each in reference.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            each.zero_()
    folder = save(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert "model.layers.0.post_mlp_layernorm.weight" not in tensors
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.full((config.hidden_size,), 7.0)
    save_file(tensors, folder / "model.safetensors")
    check_what_it_writes(reference, folder)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(("new", "old", "is_good"), [
    ({"rope_type": "default", "rope_theta": 1e4}, YARN, False),
    ({"rope_type": "default", "rope_theta": 1e4}, {}, True),
    ({"rope_type": "default", "rope_theta": 1e4}, None, True),
    ({}, YARN, True),
    (None, YARN, True),
    (YARN | {"rope_theta": 1e4}, YARN, True),
    (YARN | {"rope_theta": 1e4}, {"type": "yarn", "factor": 4.0}, True),
    (YARN | {"rope_theta": 1e4}, YARN | {"factor": 2.0}, False),
    ({"rope_type": "default", "mrope_section": [4, 4, 4]}, {"type": "mrope", "mrope_section": [4, 4, 4]}, True),
])  # fmt: skip
def test_rotary_positions_that_are_said_twice(new: Any, old: Any, is_good: bool) -> None:
    """Somebody put what model cards say into a folder that transformers 5 had saved."""
    config = LlamaConfig(**SMALL).to_dict() | {"architectures": ["LlamaForCausalLM"], "rope_parameters": new, "rope_scaling": old}
    if is_good:
        rope = spec_from_hf(config, hf_family(config)).attention.rope
        assert rope is not None
        assert (rope.scaling == "yarn") == (YARN in (new, old) or (new or {}).get("rope_type") == "yarn")
        return
    with pytest.raises(UnsupportedError, match="'rope_parameters' and 'rope_scaling'") as caught:
        spec_from_hf(config, hf_family(config))
    assert "take rope_scaling out" in str(caught.value.hint)


def fp8(tensors: dict[str, torch.Tensor], blocks: bool) -> dict[str, torch.Tensor]:
    """Their layers' matrices, as codes with scales of 128 x 128 or of all."""
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(("_proj.weight", "_qkvz.weight")):
            continue
        rows, columns = tensor.shape
        side = 128 if blocks else max(rows, columns)
        grid = torch.zeros(-(-rows // side), -(-columns // side))
        codes = tensor.clone()
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                block = codes[i * side : (i + 1) * side, j * side : (j + 1) * side]
                grid[i, j] = block.abs().max() / 448
                block /= grid[i, j]
        stored[name] = codes.to(torch.float8_e4m3fn)
        if blocks:
            stored[f"{name}_scale_inv"] = grid
        else:
            stored[f"{name}_scale"] = grid[0, 0]
            stored[name.replace(".weight", ".input_scale")] = torch.tensor(0.02)
    return stored


@pytest.mark.parametrize("how", ["beside", "inside", "neither"])
def test_nvidias_first_folders_say_beside_their_config_how_they_are_quantized(how: str, tmp_path: Path) -> None:
    folder = save(random_model(LlamaConfig(**SMALL)), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(fp8(tensors, False), folder / "model.safetensors")
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    config = json.loads((folder / "config.json").read_text())
    if how == "inside":
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said | {"quant_method": "modelopt"}}))
    else:
        said = said if how == "beside" else {"quant_algo": None}
        told = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": said}
        (folder / "hf_quant_config.json").write_text(json.dumps(told))
    if how == "neither":
        with pytest.raises(CheckpointError, match="not part of the model"):
            worker_for(folder)
        return
    spec, names = worker_for(folder, dtype="float32"), list(tensors)
    assert len(names) > 10
    assert spec.model is not None


def test_a_qwen3_nexts_joined_matrix_in_blocks(tmp_path: Path) -> None:
    """Codes and scales are taken apart by the same heads."""
    config: Any = Qwen3NextConfig(
        **SMALL | {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    folder = save(random_model(config), tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    assert any("in_proj_qkvz" in name for name in tensors)
    stored = fp8(tensors, True)
    plain = {}
    for name, tensor in tensors.items():
        scale = stored.get(f"{name}_scale_inv")
        if scale is None:
            plain[name] = tensor
            continue
        spread = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        plain[name] = stored[name].float() * spread
    same = save(random_model(config), tmp_path / "plain")
    save_file(plain, same / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    quantized = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": quantized}))
    tokens = [[5, 6, 7, 8, 9], [10, 11]]
    found, wanted = (logits_of(worker_for(each, dtype="float32"), tokens) for each in (folder, same))
    assert difference(found, wanted) < 0.06  # inputs are rounded to eight bits, too
    name = next(each for each in stored if each.endswith("in_proj_qkvz.weight_scale_inv"))
    save_file(stored | {name: torch.ones(5, 1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has the shape \[5, 1\], expected \[12, 1\]") as caught:
        worker_for(folder)
    assert name in caught.value.message


@pytest.mark.parametrize("key", ["head_dim", "attention_head_dim", None])
def test_heads_of_a_nemotron(key: str | None, tmp_path: Path) -> None:
    """Which need not share the hidden size; 128 where nothing is said."""
    config: Any = NemotronHConfig(**NEMOTRON | {"head_dim": 128})
    model = random_model(config)
    folder = save(model, tmp_path)
    told = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "head_dim" not in name}
    told |= {"mamba_head_dim": config.mamba_head_dim}
    (folder / "config.json").write_text(json.dumps(told | ({} if key is None else {key: 128})))
    check_what_it_writes(model, folder)


def test_a_llama_4_without_experts(tmp_path: Path) -> None:
    """Llama Guard 4."""
    config: Any = CASES["llama4, 1 of 5 and shared in every second layer, chunks"]
    own = type(config)(**config.to_dict() | {"moe_layers": [], "interleave_moe_layer_step": 1})
    model = random_model(own)
    folder = save(model, tmp_path)
    assert not any("expert" in name for name in load_file(folder / "model.safetensors"))
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"num_local_experts": 0, "interleave_moe_layer_step": 0}))
    check_what_it_writes(model, folder)


def test_the_first_config_of_dots() -> None:
    """It said of the router what it meant of groups."""
    config = CASES["dots1, 3 of 8 in two of four groups"].to_dict() | {"architectures": ["Dots1ForCausalLM"]}
    wanted = spec_from_hf(config, hf_family(config))
    found = spec_from_hf(config | {"scoring_func": "noaux_tc"}, hf_family(config))
    assert found == wanted
    with pytest.raises(UnsupportedError, match="'softmax'"):
        spec_from_hf(config | {"scoring_func": "softmax"}, hf_family(config))


def test_nothing_is_changed_by_writing_a_file_anew(tmp_path: Path) -> None:
    arch, config, add = FILES["llama"]
    path = write(tmp_path / "m.gguf", arch, random_model(config), add)
    anew = written_anew(path, tmp_path / "anew.gguf")
    both = [{tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(each).tensors} for each in (path, anew)]
    assert both[0].keys() == both[1].keys()
    assert all(np.array_equal(both[0][name], both[1][name]) for name in both[0])
