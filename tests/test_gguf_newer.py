"""GGUF files of architectures that llama.cpp has learnt lately and the gguf package does not know: against transformers in fp32,
names, keys and numbers written down here as llama.cpp's converter makes them.

What our own files of them give was held against llama.cpp's logits once, of llama-cpp-python 0.3.36: they differ by less than
1e-5 of their norm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import BailingHybridConfig, HrmTextConfig, HYV4Config

from engines import random_model, save, worker_for
from gguf_anew import add, written_anew
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert_families import fields, make_gguf, same, tensors, with_tokenizer
from test_latent import EVEN
from test_models import CASES as TEXTS
from test_models import HRM, INDEXER, LATENT_EXPERTS, LING_3, prompts
from test_quant_engine import difference, expected_logits, logits_of

Arrays = dict[str, np.ndarray]


def write(path: Path, arch: str, keys: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """keys: without the architecture."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add(writer, f"{arch}.{key}", value)
    for name, numbers in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers_of(model: Any) -> Arrays:
    """Of a model of transformers, by its own names."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def check_written(model: Any, expected: Path, folder: Path) -> list[str]:
    """That what we make of its folder has the same tensors, and all these keys; what got lost."""
    notes = make_gguf(save(model, folder / "folder"), folder / "made.gguf")
    found, wanted = tensors(folder / "made.gguf"), tensors(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name].size != wanted[name].size] == []
    assert [name for name in wanted if not np.allclose(found[name].reshape(-1), wanted[name].reshape(-1), rtol=1e-6)] == []
    keys = fields(folder / "made.gguf")
    for key, value in fields(expected).items():
        if not key.startswith("GGUF."):
            assert keys[key] == pytest.approx(value), key
    same(folder / "folder", folder / "made.gguf")
    return notes


HRM_PARTS = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "gate")}, "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}  # fmt: skip
HRM_CASES = ("hrm, twice three and one", "hrm, three times one and one, tied")


def hrm_file(path: Path, model: Any, **changes: Any) -> Path:
    config = model.config
    arrays: Arrays = {}
    for name, numbers in numbers_of(model).items():
        if (place := re.fullmatch(r"model\.([LH])_module\.layers\.(\d+)\.(.+)\.weight", name)) is not None:
            layer = int(place[2]) + config.num_layers_per_stack * (place[1] == "H")
            arrays[f"blk.{layer}.{HRM_PARTS[place[3]]}.weight"] = numbers
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            rest = {"model.z_L_init": "hrm.z_l_init", "model.embed_tokens.weight": "token_embd.weight",
                    "lm_head.weight": "output.weight"}  # fmt: skip
            arrays[rest[name]] = numbers
    keys = {
        "block_count": config.num_layers_per_stack * config.H_cycles * (config.L_cycles + 1),
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim, "embedding_scale": float(config.embedding_scale),
        "hrm.layers_per_stack": config.num_layers_per_stack, "hrm.h_cycles": config.H_cycles, "hrm.l_cycles": config.L_cycles,
    }  # fmt: skip
    if config.rope_parameters["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_parameters["factor"])}
    return write(path, "hrm_text", keys | changes, arrays)


@pytest.mark.parametrize("case", HRM_CASES)
def test_an_hrm_is_equal_to_transformers(case: str, tmp_path: Path) -> None:
    """Also where the file says that tokens of prompts see each other, which llama.cpp reads from left to right as well."""
    model, tokens = random_model(TEXTS[case]), prompts(513)
    expected = expected_logits(model, tokens)
    plain = logits_of(worker_for(hrm_file(tmp_path / "m.gguf", model)), tokens)
    assert difference(plain, expected) < 1e-4
    prefixed = hrm_file(tmp_path / "prefixed.gguf", model, **{"hrm.prefix_lm": True})
    assert plain.equal(logits_of(worker_for(prefixed), tokens))


@pytest.mark.parametrize("case", HRM_CASES)
def test_a_folder_of_an_hrm_becomes_that_file(case: str, tmp_path: Path) -> None:
    model = random_model(with_tokenizer(TEXTS[case]))
    notes = check_written(model, hrm_file(tmp_path / "expected.gguf", model), tmp_path)
    assert notes == ["config.json: prefix_lm"]


def test_another_scale_and_more_passes_of_an_hrms_file_count(tmp_path: Path) -> None:
    """Its weights are in it once, however often they are gone through."""
    model, tokens = random_model(HrmTextConfig(**HRM)), prompts(513)[2:4]
    other = random_model(HrmTextConfig(**HRM | {"H_cycles": 3, "L_cycles": 1, "embedding_scale": 7.5}))
    keys = {"block_count": 12, "hrm.h_cycles": 3, "hrm.l_cycles": 1, "embedding_scale": 7.5}
    found = logits_of(worker_for(hrm_file(tmp_path / "m.gguf", model, **keys)), tokens)
    assert difference(found, expected_logits(other, tokens)) < 1e-4
    none = {key: 0.0 if key == "embedding_scale" else value for key, value in keys.items()}
    assert worker_for(hrm_file(tmp_path / "none.gguf", model, **none)).spec.embedding_scale == 1.0


@pytest.mark.parametrize(("keys", "message"), [
    ({"block_count": 4}, "asks for 4 layers, which are not 2 times 3 and one passes through 2"),
    ({"hrm.layers_per_stack": 1, "block_count": 8}, "16 not part of the model"),
    ({"hrm.h_cycles": 129, "block_count": 2 * 129 * 4}, "at most 1024 layers are believed"),
    ({"hrm.l_cycles": 0, "block_count": 4}, "hrm.l_cycles"),
    ({"hrm.h_cycles": "2"}, "hrm.h_cycles"),
])  # fmt: skip
def test_files_of_an_hrm_that_can_not_be_followed(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = hrm_file(tmp_path / "m.gguf", random_model(HrmTextConfig(**HRM)), **keys)
    with pytest.raises(CheckpointError, match=message):
        worker_for(path)


def test_a_file_of_an_hrm_without_its_numbers(tmp_path: Path) -> None:
    path = hrm_file(tmp_path / "m.gguf", random_model(HrmTextConfig(**HRM)))
    with pytest.raises(NanovllmError, match="layers_per_stack"):
        worker_for(written_anew(path, tmp_path / "less.gguf", {"hrm_text.hrm.layers_per_stack": None}))


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_qkv.weight"])
def test_gates_of_an_hrms_file_beside_what_they_do_not_go_with_are_refused(name: str, tmp_path: Path) -> None:
    with open_checkpoint(hrm_file(tmp_path / "m.gguf", random_model(HrmTextConfig(**HRM)))) as file:
        family, names = gguf_family(file.config), {*file.names(), name}
        with pytest.raises(UnsupportedError, match="hrm_text: gates of what heads find beside biases, or q, k and v"):
            spec_from_gguf(file.config, family, 513, names, lambda name: None)


LATENT_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "self_attn.o_proj": "attn_output", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def latent_arrays(model: Any, place: str, part: str, numbers: np.ndarray) -> Arrays | None:
    """What files have of a layer's part where attention is latent and experts are DeepSeek-V3's; None of any other. place: what
    names of the layer begin with."""
    config = model.config
    if part == "self_attn.kv_b_proj.weight":
        heads = numbers.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return {f"{place}attn_k_b.weight": keys.swapaxes(1, 2), f"{place}attn_v_b.weight": values}
    if part == "mlp.experts.gate_up_proj":
        gate, up = np.split(numbers, 2, axis=1)
        return {f"{place}ffn_gate_exps.weight": gate, f"{place}ffn_up_exps.weight": up}
    if part == "mlp.experts.down_proj":
        return {f"{place}ffn_down_exps.weight": numbers}
    if part == "mlp.gate.e_score_correction_bias":
        return {f"{place}exp_probs_b.bias": numbers}
    ours = LATENT_PARTS.get(part.removesuffix(".weight"))
    return None if ours is None else {f"{place}{ours}.weight": numbers}


def latent_keys(config: Any) -> dict[str, Any]:
    """What their files say."""
    keys = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": config.kv_lora_rank, "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim, "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok, "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts, "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2,
        "leading_dense_block_count": list(config.mlp_layer_types).index("sparse"),
    }  # fmt: skip
    return keys | ({} if config.q_lora_rank is None else {"attention.q_lora_rank": config.q_lora_rank})


LING_PARTS = {
    "self_attn.forget_gate.f_proj.weight": "ssm_f_a.weight", "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight", "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
}  # fmt: skip
LING = BailingHybridConfig(**LING_3)
LINGS = {
    "groups": LING,
    "queries by another rank": BailingHybridConfig(**LING_3 | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "q_lora_rank": 16,
        "norm_topk_prob": False, "short_conv_kernel_size": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
        "kda_lower_bound": -5.0,
    }),
}  # fmt: skip


def ling_file(path: Path, model: Any, further: Mapping[str, np.ndarray] | None = None, **changes: Any) -> Path:
    config = model.config
    linear = [kind == "linear_attention" for kind in config.layer_types]
    arrays: Arrays = {}
    for name, numbers in numbers_of(model).items():
        if name in OUTER:
            arrays[OUTER[name]] = numbers
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        place = f"blk.{layer}."
        if part == "self_attn.g_proj.weight":
            arrays[f"{place}{'ssm_g_a' if linear[int(layer)] else 'attn_gate'}.weight"] = numbers
        elif part == "self_attn.conv1d.weight":
            for which, taps in zip("qkv", np.split(numbers, 3), strict=True):
                arrays[f"{place}ssm_conv1d_{which}.weight"] = taps.reshape(1, len(taps), 1, -1)
        elif part == "self_attn.forget_gate.A_log":
            arrays[f"{place}ssm_a"] = np.exp(numbers).reshape(-1, 1)
        elif part in LING_PARTS:
            arrays[f"{place}{LING_PARTS[part]}"] = numbers
        else:
            found = latent_arrays(model, place, part, numbers)
            assert found is not None, name
            arrays |= found
    keys = latent_keys(config) | {
        "attention.head_count_kv": [0 if own else 1 for own in linear], "ssm.conv_kernel": config.short_conv_kernel_size,
        "kda.head_dim": config.linear_head_dim, "kda.safe_gate": True, "kda.gate_lower_bound": config.kda_lower_bound,
        "expert_shared_feed_forward_length": config.moe_intermediate_size, "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }  # fmt: skip
    return write(path, "bailingmoe3", keys | changes, arrays | dict(further or {}))


@pytest.mark.parametrize("case", LINGS)
def test_a_ling_3_is_equal_to_transformers(case: str, tmp_path: Path) -> None:
    model, tokens = random_model(LINGS[case]), prompts(513)
    found = logits_of(worker_for(ling_file(tmp_path / "m.gguf", model)), tokens)
    assert difference(found, expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("case", LINGS)
def test_a_folder_of_a_ling_3_becomes_that_file(case: str, tmp_path: Path) -> None:
    model = random_model(with_tokenizer(LINGS[case]))
    assert check_written(model, ling_file(tmp_path / "expected.gguf", model), tmp_path) == []


def test_a_layer_of_a_ling_3_that_guesses_is_left_aside(tmp_path: Path) -> None:
    model, tokens = random_model(LING), prompts(513)[3:5]
    plain = ling_file(tmp_path / "m.gguf", model)
    place, keys = f"blk.{LING.num_hidden_layers}.", {"block_count": LING.num_hidden_layers + 1, "nextn_predict_layers": 1}
    further = {f"{place}{name}.weight": np.ones(48, np.float32)
               for name in ("nextn.enorm", "nextn.hnorm", "layer_output_norm", "attn_norm", "ffn_norm")}  # fmt: skip
    further[f"{place}nextn.eh_proj.weight"] = np.ones((48, 96), np.float32)
    heads = [0 if kind == "linear_attention" else 1 for kind in LING.layer_types]
    whole = ling_file(tmp_path / "n.gguf", model, further, **keys, **{"attention.head_count_kv": [*heads, 1]})
    assert logits_of(worker_for(plain), tokens).equal(logits_of(worker_for(whole), tokens))


def test_activations_of_a_ling_3_may_be_held(tmp_path: Path) -> None:
    """By lists of layers, or by a number for all; a folder may say the same. Held at 0, they are not."""
    model = random_model(with_tokenizer(LING))
    folder, tokens = save(model, tmp_path / "folder"), prompts(513)[3:5]
    limits = {"expert_swiglu_limit_list": [0.2, 0.3, 0.0, 0.1, 0.2],
              "share_expert_swiglu_limit_list": [0.1, None, 0.2, 0.1, 0.3, 1.0]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | limits))
    assert make_gguf(folder, tmp_path / "made.gguf") == []
    keys = fields(tmp_path / "made.gguf")
    assert keys["bailingmoe3.swiglu_clamp_exp"] == pytest.approx([0.0, 0.3, 0.0, 0.1, 0.2])  # the first has no experts
    assert keys["bailingmoe3.swiglu_clamp_shexp"] == pytest.approx([0.1, 0.0, 0.2, 0.1, 0.3])
    same(folder, tmp_path / "made.gguf")
    free = expected_logits(model, tokens)
    assert difference(logits_of(worker_for(folder), tokens), free) > 0.1
    one, each = (
        ling_file(tmp_path / f"{name}.gguf", model, swiglu_clamp_exp=value) for name, value in (("one", 0.3), ("each", [0.3] * 5))
    )
    found = logits_of(worker_for(one), tokens)
    assert found.equal(logits_of(worker_for(each), tokens))
    assert difference(found, free) > 0.1


@pytest.mark.parametrize(("keys", "kind", "message"), [
    ({"kda.safe_gate": False}, UnsupportedError, "a Ling whose decays have no floor"),
    ({"kda.gate_lower_bound": 0.5}, CheckpointError, "'bailingmoe3.kda.gate_lower_bound' of 0.5, not from -100 to below 0"),
    ({"rope.dimension_sections": [1, 1, 1, 0]}, UnsupportedError, "a Ling that sees"),
    ({"attention.head_count_kv": 1}, CheckpointError, "must be a list of layers' heads, some of them 0"),
    ({"attention.head_count_kv": [0, 1, 0, 1]}, CheckpointError, "must be a list of 5 layers' heads"),
    ({"swiglu_clamp_exp": [0.5]}, CheckpointError, "'bailingmoe3.swiglu_clamp_exp' must be a list of 5 numbers"),
    ({"expert_gating_func": 1}, UnsupportedError, "experts that are not weighed by a sigmoid"),
    ({"kda.head_dim": 13}, UnsupportedError, "heads of 13 numbers"),
])  # fmt: skip
def test_files_of_a_ling_3_that_can_not_be_followed(
    keys: dict[str, Any], kind: type[NanovllmError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        worker_for(ling_file(tmp_path / "m.gguf", random_model(LING), **keys))


@pytest.mark.parametrize(("changes", "message"), [
    ({"kda_safe_gate": False}, "no floor of its decays"), ({"layer_types": ["full_attention"] * 5}, "no linear layers"),
    ({"first_k_dense_replace": 5}, "no experts"),
])  # fmt: skip
def test_lings_that_no_file_can_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(BailingHybridConfig(**LING_3 | changes))), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=message):
        make_gguf(folder, tmp_path / "made.gguf")


@pytest.mark.parametrize(("changes", "message"), [
    ({"no_kda_lora": False}, "'no_kda_lora' is false"),
    ({"gated_attention_proj_granularity_type": "element_wise"}, "gates that are 'element_wise'"),
])  # fmt: skip
def test_published_lings_that_can_not_be_followed(changes: dict[str, Any], message: str) -> None:
    """By the name that is published."""
    config = LING.to_dict() | {"architectures": ["BailingMoeV3ForCausalLM"]}
    assert spec_from_hf(config, hf_family(config)).architecture == "bailing_hybrid"
    with pytest.raises(UnsupportedError, match=message):
        spec_from_hf(config | changes, hf_family(config))


HY4_PARTS = {
    "self_attn.sinks": "attn_sinks", "self_attn.gate_proj": "attn_gate",
    **{f"self_attn.indexer.{theirs}": f"indexer.{ours}" for theirs, ours in (
        ("wq_b", "attn_q_b"), ("wk", "attn_k"), ("k_norm", "k_norm"), ("weights_proj", "proj"))},
    **{f"{half}_hc.{table}": f"hc_{half}_{table}" for half in ("attn", "ffn") for table in ("fn", "base", "scale")},
}  # fmt: skip
HY4_ROTATE = {"self_attn.q_b_proj": "num_attention_heads", "self_attn.indexer.wq_b": "index_n_heads",
              **dict.fromkeys(("self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk", "self_attn.indexer.k_norm"))}  # fmt: skip
"""Of how many heads they are, whose last numbers rotate; None: of one."""
HY4_OWN = EVEN | {name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"} | INDEXER
HY4S = {
    "a layer goes by another": TEXTS["hy 4, a layer goes by another"],
    "three streams, held, two groups": HYV4Config(**HY4_OWN | {
        "hc_mult": 3, "hc_eps": 1e-3, "hc_magnitude": 1.5, "swiglu_limit": 0.4, "n_routed_experts": 6, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "norm_topk_prob": False,
    }),
}  # fmt: skip


def side_by_side(numbers: np.ndarray, heads: int, rotary: int) -> np.ndarray:
    """Rows of heads whose last ones rotate: of pairs that are apart, as transformers has them."""
    rows = numbers.reshape(heads, -1, *numbers.shape[1:]).copy()
    pairs = rows[:, -rotary:].copy()
    rows[:, -rotary::2], rows[:, -rotary + 1 :: 2] = pairs[:, : rotary // 2], pairs[:, rotary // 2 :]
    return rows.reshape(numbers.shape)


def hy4_file(path: Path, model: Any, **changes: Any) -> Path:
    """changes: a key that is None is left out, and without an indexer's most, what belongs to it."""
    config = model.config
    is_sparse = changes.get("attention.indexer.top_k", 1) is not None
    arrays: Arrays = {}
    for name, numbers in numbers_of(model).items():
        if name in OUTER or name.startswith("model.hc_head."):
            arrays[OUTER.get(name) or f"output_hc_{name.rpartition('_')[2]}.weight"] = numbers
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        place, kind = f"blk.{layer}.", part.rpartition(".")[2]
        stem = part.removesuffix(f".{kind}") if kind in ("weight", "bias") else part
        if stem in HY4_ROTATE:
            heads = HY4_ROTATE[stem]
            numbers = side_by_side(numbers, 1 if heads is None else getattr(config, heads), config.qk_rope_head_dim)
        if stem in HY4_PARTS:
            if is_sparse or ".indexer." not in stem:
                arrays[f"{place}{HY4_PARTS[stem]}.{'bias' if kind == 'bias' else 'weight'}"] = numbers
        else:
            found = latent_arrays(model, place, part, numbers)
            assert found is not None, name
            arrays |= found
    keys = latent_keys(config) | {
        "attention.head_count_kv": 1, "hyper_connection.count": config.hc_mult, "hyper_connection.epsilon": config.hc_eps,
        "hyper_connection.magnitude": float(config.hc_magnitude), "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim, "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types], "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }  # fmt: skip
    keys |= {"swiglu_clamp_exp": [float(config.swiglu_limit)] * config.num_hidden_layers}
    return write(path, "hy_v4", {key: value for key, value in (keys | changes).items() if value is not None}, arrays)


@pytest.mark.parametrize("case", HY4S)
def test_a_hy4_is_equal_to_transformers(case: str, tmp_path: Path) -> None:
    model, tokens = random_model(HY4S[case]), prompts(500)
    found = logits_of(worker_for(hy4_file(tmp_path / "m.gguf", model)), tokens)
    assert difference(found, expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize("case", HY4S)
def test_a_folder_of_a_hy4_becomes_that_file(case: str, tmp_path: Path) -> None:
    """But that layers without experts have no limit there, which llama.cpp reads of none."""
    model = random_model(with_tokenizer(HY4S[case]))
    limits = [0.0 if kind == "dense" else float(model.config.swiglu_limit) for kind in model.config.mlp_layer_types]
    expected = hy4_file(tmp_path / "expected.gguf", model, swiglu_clamp_exp=limits)
    assert check_written(model, expected, tmp_path) == []


def test_a_hy4_that_sees_all_is_one_without_what_chooses(tmp_path: Path) -> None:
    """It is the same where as many are chosen as there are; and without a limit, as with one that nothing comes to."""
    model, tokens = random_model(HYV4Config(**HY4_OWN | {"index_topk": 4096, "swiglu_limit": 1e4})), prompts(500)
    keys = {"attention.indexer.top_k": None, "swiglu_clamp_exp": None}
    worker = worker_for(hy4_file(tmp_path / "m.gguf", model, **keys))
    assert all(attention.indexer is None for attention in worker.spec.attentions)
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize(("keys", "kind", "message"), [
    ({"hyper_connection.count": 1}, UnsupportedError, "1 residual streams"),
    ({"hyper_connection.magnitude": None}, CheckpointError, "hyper_connection.magnitude"),
    ({"attention.indexer.types": [False, True, True]}, CheckpointError, "the first layer goes by what one in front"),
    ({"attention.q_lora_rank": None}, UnsupportedError, "queries are made of the hidden state"),
    ({"swiglu_clamp_exp": [1.0]}, CheckpointError, "'hy_v4.swiglu_clamp_exp' must be a list of 3 numbers"),
])  # fmt: skip
def test_files_of_a_hy4_that_can_not_be_followed(
    keys: dict[str, Any], kind: type[NanovllmError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        worker_for(hy4_file(tmp_path / "m.gguf", random_model(HY4S["a layer goes by another"]), **keys))


@pytest.mark.parametrize(("changes", "message"), [
    ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "no experts in all layers behind the first"),
    ({"tie_word_embeddings": True}, "no head of its own"), ({"mlp_layer_types": ["dense"] * 3}, "no experts"),
])  # fmt: skip
def test_hy4s_that_no_file_can_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(HYV4Config(**HY4_OWN | changes))), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=message):
        make_gguf(folder, tmp_path / "made.gguf")
