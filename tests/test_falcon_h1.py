"""Falcon-H1: engines whose layers have attention and a state space side by side, and folders whose configs have factors of
weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, FalconH1Config, HyperCLOVAXVisionV2Config

from engines import each_alone, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.config import LoraModule
from nanovllm_cli.distributed.heads import own_spec
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import PairSpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.folded import folded
from quantizing import quantize
from test_adapters import trained
from test_convert import SETTINGS, TINY
from test_convert_families import make_gguf, with_tokenizer
from test_delta import LONG, REPEATING, check_nothing_is_lost
from test_models import CASES, FALCON_H1, prompts
from test_quant_engine import difference, expected_logits, logits_of

PROMPTS = [[5], LONG[:300], [*LONG[:256], 3], LONG[300:370]]
ASKED = [(ids, greedy(20, logprobs=2)) for ids in PROMPTS]
ASKED += [(ids, greedy(30, allowed_token_ids=(3, 4))) for ids in REPEATING[:3]]
Answers = list[tuple[tuple[int, ...], Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FalconH1Config(**FALCON_H1 | {"max_position_embeddings": 2048, "num_hidden_layers": 2})
    return save(random_model(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("falcon"))


def answers(folder: Path, num_states: int | None = None, **settings: Any) -> Answers:
    worker = worker_for(folder, **{name: value for name, value in settings.items() if name == "num_speculative_tokens"})
    worker.num_states = num_states or worker.num_states
    engine = engine_for(worker, **settings)
    outputs = run(engine, ASKED)
    check_nothing_is_lost(engine)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Each by itself, by steps that are not recorded."""
    return each_alone(folder, ASKED)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 37},
        {"num_states": 2, "num_blocks": 38},
        {"num_speculative_tokens": 8, "max_num_batched_tokens": 90},
    ],
    ids=str,
)
def test_every_bit_is_the_same_together_in_chunks_preempted_and_behind_guesses(
    settings: dict[str, Any], folder: Path, expected: Answers
) -> None:
    assert answers(folder, **settings) == expected


def test_saved_blocks_have_keys_and_states(folder: Path, expected: Answers, tmp_path: Path) -> None:
    first, second = (engine_for(worker_for(folder)) for _ in range(2))
    run(first, [(PROMPTS[1], greedy(1))])
    assert first.kv_files.save(tmp_path / "kv", "the same", PROMPTS[1]) == 288
    assert second.kv_files.load(tmp_path / "kv", "the same") == 288
    (output,) = run(second, [ASKED[1]])
    assert output.metrics.num_cached_tokens == 288
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == expected[1]


def test_two_processes_share_attention_alone(folder: Path) -> None:
    """Blocks of the cache hold what each has of the heads; states are whole."""
    spec = worker_for(folder).spec
    (one, *_), (two, *_), (whole, *_) = (each.mixers for each in (own_spec(spec, 0, 2), own_spec(spec, 1, 2), spec))
    assert isinstance(one, PairSpec)
    assert isinstance(two, PairSpec)
    assert isinstance(whole, PairSpec)
    assert (one.attention.num_kv_heads, two.attention.num_heads, one.state) == (1, 3, whole.state)


@pytest.mark.parametrize("kind", ["folder", "q8_0", "q4_k"])
def test_quantized_it_has_the_factors_in_its_weights(kind: str, tmp_path: Path) -> None:
    """A folder, whose config has ones then, to transformers as well; and blocks of a file."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "mamba_d_ssm": 96, "mamba_d_head": 16, "num_hidden_layers": 2}
    model = random_model(with_tokenizer(FalconH1Config(**FALCON_H1 | wide)))
    source, tokens = save(model, tmp_path / "source"), prompts(512)[:4]
    for name in SETTINGS:
        shutil.copy(TINY / name, source / name)
    made = tmp_path / ("made" if kind == "folder" else "made.gguf")
    quantize("int8" if kind == "folder" else kind, made, source)
    limit = {"folder": 0.05, "q8_0": 0.05, "q4_k": 0.4}[kind]
    assert 0 < difference(logits_of(worker_for(made, dtype="float32"), tokens), expected_logits(model, tokens)) < limit
    if kind == "folder":
        config = json.loads((made / "config.json").read_text())
        assert (config["key_multiplier"], config["ssm_multipliers"], config["lm_head_multiplier"]) == (1.0, [1.0] * 5, 1.0)


def test_factors_are_applied_once(folder: Path) -> None:
    """However often a checkpoint is looked at, and to any of its rows; what they are not for stays as it is."""
    values = FALCON_H1["ssm_multipliers"]
    with open_checkpoint(folder) as checkpoint:
        once = folded(checkpoint)
        assert folded(once) is once
        name = "model.layers.1.mamba.in_proj.weight"
        whole = checkpoint.tensor(name).float()
        assert torch.equal(once.tensor(name, (59, 62)), once.tensor(name)[59:62])
        of_rows = {0: values[0], 60: values[1], 119: values[1], 120: values[2], 152: values[3], -1: values[4]}
        for row, factor in of_rows.items():
            assert torch.equal(once.tensor(name)[row], (whole[row] * torch.tensor(1.2 * factor)).bfloat16()), row
        assert torch.equal(once.tensor("model.layers.1.self_attn.k_proj.weight"),
                           (checkpoint.tensor("model.layers.1.self_attn.k_proj.weight").float() * (1.3 * 0.6)).bfloat16())
        untouched = "model.layers.0.feed_forward.up_proj.weight"
        assert torch.equal(once.tensor(untouched), checkpoint.tensor(untouched))


def test_factors_are_applied_to_weights_by_bare_names(tmp_path: Path) -> None:
    model = random_model(CASES["falcon h1"])
    tensors = load_file(save(model, tmp_path) / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert difference(logits_of(worker_for(tmp_path), prompts(512)), expected_logits(model, prompts(512))) < 1e-4


def test_factors_are_applied_inside_of_a_model_that_sees(tmp_path: Path) -> None:
    sees = {"model_type": "qwen2_5_vl", "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40,
            "out_hidden_size": 48, "patch_size": 4}  # fmt: skip
    text: Any = CASES["hyperclova x"].to_dict()
    config = HyperCLOVAXVisionV2Config(text_config=text, vision_config=sees, image_token_id=512, video_token_id=511)
    model = random_model(config, auto=AutoModelForImageTextToText)
    assert text["residual_multiplier"] != 1
    assert difference(logits_of(worker_for(save(model, tmp_path)), prompts(500)), expected_logits(model, prompts(500))) < 1e-4


def test_a_config_without_factors_is_read_as_it_is(tmp_path: Path) -> None:
    config = FalconH1Config(**{name: value for name, value in FALCON_H1.items() if "multiplier" not in name})
    model = random_model(config)
    with open_checkpoint(save(model, tmp_path)) as checkpoint:
        assert folded(checkpoint) is checkpoint
    assert difference(logits_of(worker_for(tmp_path), prompts(512)), expected_logits(model, prompts(512))) < 1e-4


def test_a_file_can_not_say_factors_of_a_tied_head(tmp_path: Path) -> None:
    case = CASES["falcon h1, a norm of groups, no bias, tied"]
    model = random_model(with_tokenizer(type(case)(**case.to_dict() | {"mamba_conv_bias": True})))
    with pytest.raises(UnsupportedError, match="GGUF cannot say this of a falcon_h1 model: embedding_scale, logit_scale"):
        make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "biases of attention": ({"attention_bias": True}, UnsupportedError, r"biases \(attention_bias\)"),
    "biases of states": ({"mamba_proj_bias": True}, UnsupportedError, r"biases \(mamba_proj_bias\)"),
    "a norm before the gate": ({"mamba_rms_norm": True}, UnsupportedError, "a norm before their gate"),
    "another activation": ({"hidden_act": "gelu"}, UnsupportedError, "a state space behind 'gelu'"),
    "time steps in bounds": ({"time_step_limit": [0.1, 2.0]}, UnsupportedError, "bounded"),
    "nothing left": ({"key_multiplier": 0}, CheckpointError, "'key_multiplier' is 0"),
    "no number": ({"ssm_out_multiplier": "1"}, CheckpointError, "'ssm_out_multiplier' must be a number"),
    "four of five": ({"ssm_multipliers": [1.0] * 4}, CheckpointError, "must be a list of 5 numbers"),
    "heads that don't make it": ({"mamba_d_head": 11}, CheckpointError, "can't have 6 heads of 11"),
    "groups that don't": ({"mamba_n_groups": 4}, CheckpointError, "can't share 4 groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_by_name(case: str) -> None:
    changes, kind, message = REFUSED[case]
    config = FalconH1Config(**FALCON_H1).to_dict() | {"architectures": ["FalconH1ForCausalLM"]} | changes
    with pytest.raises(kind, match=message):
        spec_from_hf(config, hf_family(config))


def test_quantized_folders_with_factors_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="quantized weights that its config has factors of"):
        worker_for(tmp_path / "copy")


def test_adapters_whose_products_have_other_factors_are_refused(tmp_path: Path) -> None:
    """Of a folder, for the file that was made of it; and those that requests choose, which are added behind the factors."""
    config = with_tokenizer(CASES["falcon h1"])
    folder = save(random_model(config), tmp_path / "folder")
    make_gguf(folder, tmp_path / "made.gguf")
    trained(config, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(UnsupportedError, match="an adapter of a falcon_h1 model whose weights have its config's factors here"):
        worker_for(tmp_path / "made.gguf", lora=[str(tmp_path / "adapter")])
    with pytest.raises(UnsupportedError, match="requests can't choose adapters of a model whose config has factors"):
        worker_for(folder, lora_modules=[LoraModule("one", str(tmp_path / "adapter"))])
