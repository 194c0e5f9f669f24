"""Models with linear attention beside Qwen's: engines whose past is a state, quantized weights, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig, LaraMiniConfig, OlmoHybridConfig

from engines import each_alone, engine_for, greedy, num_parameters, random_model, run, save, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.state_spec import DeltaSpec
from quantizing import quantize
from test_convert import SETTINGS, TINY
from test_convert_families import make_gguf, with_tokenizer
from test_delta import LONG, REPEATING, check_nothing_is_lost
from test_models import KIMI, LARA, OLMO_HYBRID, prompts
from test_quant_engine import difference, expected_logits, logits_of

LONGER = {"max_position_embeddings": 2048}
MODELS = {"lara mini": LaraMiniConfig(**LARA | LONGER), "olmo hybrid": OlmoHybridConfig(**OLMO_HYBRID | LONGER),
          "kimi linear": KimiLinearConfig(**KIMI | LONGER)}
PROMPTS = [[5], LONG[:270], [*LONG[:256], 3], LONG[300:370]]
ASKED = [(ids, greedy(12, logprobs=2)) for ids in PROMPTS]
ASKED += [(LONG[:270], SamplingParams(num_beams=4, max_tokens=12, logprobs=0))]
ASKED += [(ids, greedy(24, allowed_token_ids=(3, 4))) for ids in REPEATING[:2]]
Answers = list[tuple[tuple[int, ...], Any]]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(MODELS[request.param], dtype=torch.bfloat16), tmp_path_factory.mktemp("linear"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Each by itself, by steps that are not recorded."""
    return each_alone(folder, ASKED)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 37},
        {"num_states": 2, "num_blocks": 30},
        {"num_speculative_tokens": 8, "max_num_batched_tokens": 90},
    ],
    ids=str,
)
def test_every_bit_is_the_same_together_in_chunks_preempted_and_behind_guesses(
    settings: dict[str, Any], folder: Path, expected: Answers
) -> None:
    """And behind prefixes that were found: all is asked twice."""
    worker = worker_for(folder, **{name: value for name, value in settings.items() if name == "num_speculative_tokens"})
    worker.num_states = settings.get("num_states", worker.num_states)
    engine = engine_for(worker, **{name: value for name, value in settings.items() if name != "num_states"})
    for _ in range(2):
        outputs = run(engine, ASKED)
        check_nothing_is_lost(engine)
        assert [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs] == expected
    found = [each.metrics.num_cached_tokens for each in outputs]
    assert found[1] >= 256 or "num_states" in settings


WIDE = {"hidden_size": 128, "num_hidden_layers": 2, "linear_value_head_dim": 32}
KIMI_OF_TWO = KIMI | {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 96, "moe_intermediate_size": 64,
                      "linear_head_dim": 32, "linear_num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
                      "v_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
KIMI_DENSE = KIMI_OF_TWO | {"mlp_layer_types": ["dense"] * 2}
OLMO_OF_TWO = OLMO_HYBRID | WIDE | {"intermediate_size": 96, "num_attention_heads": 4}
QUANTIZED = {"lara mini": LaraMiniConfig(**LARA | WIDE), "olmo hybrid": OlmoHybridConfig(**OLMO_OF_TWO),
             "kimi linear": KimiLinearConfig(**KIMI_OF_TWO)}


@pytest.mark.parametrize("case", QUANTIZED)
def test_weights_that_are_rounded_as_they_are_read_are_near_to_the_model(case: str, tmp_path: Path) -> None:
    model, tokens = random_model(with_tokenizer(QUANTIZED[case])), prompts(512)[:4]
    worker = worker_for(save(model, tmp_path), quant="int8-weight-only", dtype="float32")
    found, wanted = logits_of(worker, tokens), expected_logits(model, tokens)
    assert 1e-3 < float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) < 0.05  # some choose other experts


PLACES = {"olmo hybrid": (".linear_attn.", {"q_proj", "k_proj", "v_proj", "g_proj", "o_proj"}),
          "kimi linear": (".0.self_attn.", {"q_proj", "k_proj", "v_proj", "o_proj"})}  # fmt: skip
"""Where what reads and makes states is, and what of it is quantized."""


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("case", PLACES)
def test_a_quantized_folder_is_near_to_the_model(case: str, algorithm: str, tmp_path: Path) -> None:
    """Of q, k and v apart, and an OLMo's layer that norms what it adds. AWQ is for models without experts."""
    config = QUANTIZED[case] if (case, algorithm) != ("kimi linear", "awq") else KimiLinearConfig(**KIMI_DENSE)
    model, tokens = random_model(with_tokenizer(config)), prompts(512)[:4]
    source = save(model, tmp_path / "source")
    for name in SETTINGS:
        shutil.copy(TINY / name, source / name)
    quantize("int8:group=32", tmp_path / "made", source, algorithm=algorithm, num_samples=4)
    worker = worker_for(tmp_path / "made", dtype="float32", activations="exact")
    found, wanted = logits_of(worker, tokens), expected_logits(model, tokens)
    assert 1e-3 < float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) < 0.05
    names = {name.split(".")[-2] for name, tensor in load_file(tmp_path / "made" / "model.safetensors").items()
             if PLACES[case][0] in name and tensor.dtype in (torch.int8, torch.int32)}  # fmt: skip
    assert names == PLACES[case][1]


def test_a_quantized_file_of_a_kimi_is_that_of_the_converted_model(tmp_path: Path) -> None:
    """What decays are made of stays as it is."""
    folder = save(random_model(with_tokenizer(QUANTIZED["kimi linear"])), tmp_path / "folder")
    make_gguf(folder, tmp_path / "whole.gguf")
    quantize("q8_0", tmp_path / "found.gguf", folder)
    quantize("q8_0", tmp_path / "wanted.gguf", tmp_path / "whole.gguf")
    readers = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("found", "wanted"))
    found, wanted = ({each.name: each for each in reader.tensors} for reader in readers)
    assert found.keys() == wanted.keys()
    assert [name for name in found if not np.array_equal(found[name].data, wanted[name].data)] == []
    kinds = {name.removeprefix("blk.0."): each.tensor_type.name for name, each in found.items() if name.startswith("blk.0.")}
    assert {kinds[f"attn_{part}.weight"] for part in ("q", "k", "v", "output")} == {"Q8_0"}
    assert {kind for name, kind in kinds.items() if name.startswith("ssm")} == {"F32"}


def test_ones_among_the_dims_of_a_file_may_be_there(tmp_path: Path) -> None:
    """llama.cpp's converter writes them; what quantizes leaves the last out."""
    make_gguf(save(random_model(with_tokenizer(MODELS["kimi linear"])), tmp_path / "folder"), tmp_path / "found.gguf")

    tensors = {each.name: np.array(each.data) for each in gguf.GGUFReader(tmp_path / "found.gguf").tensors}
    wider = {name: numbers[None] for name, numbers in tensors.items() if "ssm_conv1d" in name}
    wider |= {name: numbers[None, None] for name, numbers in tensors.items() if name.endswith("ssm_a")}
    assert {len(numbers.shape) for numbers in wider.values()} == {4}
    written_anew(tmp_path / "found.gguf", tmp_path / "wider.gguf", tensors=wider)
    assert torch.equal(*(logits_of(worker_for(tmp_path / f"{name}.gguf"), prompts(512)) for name in ("found", "wider")))


def test_a_file_of_a_kimi_must_tell_its_layers_apart(tmp_path: Path) -> None:
    make_gguf(save(random_model(with_tokenizer(MODELS["kimi linear"])), tmp_path / "folder"), tmp_path / "made.gguf")
    key = "kimi-linear.attention.head_count_kv"
    for name, value, message in (
        ("nothing", None, "must be a list of layers' heads"), ("no attention", [0] * 5, "a list of 5 layers' heads, alike or 0"),
        ("too few", [0, 0, 0, 1], "a list of 5 layers' heads"),
    ):  # fmt: skip
        path = written_anew(tmp_path / "made.gguf", tmp_path / f"{name}.gguf", keys={key: value})
        with pytest.raises(CheckpointError, match=message):
            worker_for(path)


UNSAYABLE: dict[str, tuple[dict[str, Any], str]] = {
    "queries by another rank": ({"q_lora_rank": 16}, "no queries made at once"),
    "groups": ({"num_local_experts": 8, "n_group": 4, "topk_group": 2}, "no single group of experts"),
    "weights as they are": ({"norm_topk_prob": False}, "no weights that are 1 together"),
    "other heads": ({"linear_num_heads": 5}, "no heads of states as of attention"),
}


@pytest.mark.parametrize("case", UNSAYABLE)
def test_what_llama_cpp_takes_for_granted_of_a_kimi(case: str, tmp_path: Path) -> None:
    changes, message = UNSAYABLE[case]
    folder = save(random_model(with_tokenizer(KimiLinearConfig(**KIMI | changes))), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=f"GGUF cannot say this of a kimi_linear model: that it has {message}"):
        make_gguf(folder, tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()


PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
    "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.446,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "model_max_length": 1048576, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "intermediate_size": 9216, "moe_intermediate_size": 1024, "vocab_size": 163840,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
}  # fmt: skip


def test_a_kimi_described_as_it_is_published() -> None:
    """By its lists of layers, of which the first is 1, as transformers reads them."""
    spec = spec_from_hf(PUBLISHED, hf_family(PUBLISHED))
    theirs = KimiLinearConfig(**{name: value for name, value in PUBLISHED.items() if name not in ("head_dim", "rope_scaling")})
    kinds = ["linear_attention" if isinstance(mixer, DeltaSpec) else "full_attention" for mixer in spec.mixers]
    assert kinds == theirs.layer_types
    assert [isinstance(block.mlp, MoESpec) for block in spec.blocks] == [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert spec.max_position == theirs.max_position_embeddings == 1 << 20
    assert spec.attention.rope is None
    same = {**theirs.to_dict(), "architectures": PUBLISHED["architectures"]}
    assert spec_from_hf(same, hf_family(same)).blocks == spec.blocks
    assert 48e9 < num_parameters(spec) < 50e9


def test_an_olmo_hybrid_is_read_as_it_is_published(tmp_path: Path) -> None:
    """transformers saves another name of a norm, and taps that are divided evenly."""
    model = random_model(MODELS["olmo hybrid"])
    saved = save(model, tmp_path / "saved")
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.3.post_attention_layernorm.weight"] = tensors.pop("model.layers.3.feedforward_layer_norm.weight")
    for i in range(3):
        place = f"model.layers.{i}.linear_attn"
        whole = model.state_dict()[f"{place}.conv1d.weight"]
        assert [len(tensors[f"{place}.{part}_conv1d.weight"]) for part in "qkv"] == [48, 48, 48]
        for part, rows in zip("qkv", torch.split(whole, [32, 32, 80]), strict=True):
            tensors[f"{place}.{part}_conv1d.weight"] = rows.clone()
    published = tmp_path / "published"
    shutil.copytree(saved, published)
    save_file(tensors, published / "model.safetensors")
    tokens = prompts(513)
    found = [logits_of(worker_for(each), tokens) for each in (saved, published)]
    assert torch.equal(*found)
    assert difference(found[0], expected_logits(model, tokens)) < 1e-4
    tensors["model.layers.1.linear_attn.k_conv1d.weight"] = tensors["model.layers.1.linear_attn.k_conv1d.weight"][1:].clone()
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_conv1d.weight \(expected \[32, 4\], found \[31, 4\]\)"):
        worker_for(published)


def test_a_folder_whose_matrices_lie_together_is_not_quantized(tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(MODELS["lara mini"])), tmp_path / "lara")
    with pytest.raises(UnsupportedError, match="holds several matrices in one tensor"):
        quantize("int8", tmp_path / "made", folder)
