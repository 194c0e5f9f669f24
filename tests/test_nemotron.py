"""Nemotron-H: engines whose layers are a state space of several groups, attention, an MLP or experts, each by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig

from engines import each_alone, engine_for, greedy, num_parameters, random_model, run, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.quantization.mixes import type_of
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_delta import LONG, REPEATING, check_nothing_is_lost
from test_models import CASES, NEMOTRON, NEMOTRON_EXPERTS
from test_models_gguf import CASES as FILES
from test_models_gguf import nemotron, write

EXPERTS = CASES["nemotron h, 3 of 5 and shared"]
PROMPTS = [[5], LONG[:300], [*LONG[:256], 3], LONG[300:370]]
ASKED = [(ids, greedy(20, logprobs=2)) for ids in PROMPTS]
ASKED += [(ids, greedy(30, allowed_token_ids=(3, 4))) for ids in REPEATING[:3]]
Answers = list[tuple[tuple[int, ...], Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = NemotronHConfig(**NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "ME-M*MEE", "n_groups": 2,
                                                            "max_position_embeddings": 2048})  # fmt: skip
    return save(random_model(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("nemotron"))


def answers(folder: Path, num_states: int | None = None, **settings: Any) -> Answers:
    worker = worker_for(folder, **{name: value for name, value in settings.items() if name == "num_speculative_tokens"})
    worker.num_states = num_states or worker.num_states
    engine = engine_for(worker, **settings)
    outputs = run(engine, ASKED)
    check_nothing_is_lost(engine)
    if "num_speculative_tokens" in settings:
        guessed, held = (sum(getattr(each.metrics, f"num_{kind}_tokens") for each in outputs) for kind in ("guessed", "held"))
        assert 20 < held < guessed
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Each by itself, by steps that are not recorded."""
    return each_alone(folder, ASKED)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 37}, {"num_states": 2}, {"num_speculative_tokens": 8, "max_num_batched_tokens": 90}], ids=str,
)
def test_every_bit_is_the_same_together_in_chunks_and_behind_guesses(
    settings: dict[str, Any], folder: Path, expected: Answers
) -> None:
    assert answers(folder, **settings) == expected


def test_saved_blocks_have_states_of_groups(folder: Path, expected: Answers, tmp_path: Path) -> None:
    first, second = (engine_for(worker_for(folder)) for _ in range(2))
    run(first, [(PROMPTS[1], greedy(1))])
    assert first.kv_files.save(tmp_path / "kv", "the same", PROMPTS[1]) == 288
    assert second.kv_files.load(tmp_path / "kv", "the same") == 288
    (output,) = run(second, [ASKED[1]])
    assert output.metrics.num_cached_tokens == 288
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == expected[1]


def test_a_cache_is_what_layers_with_a_mixer_keep(folder: Path) -> None:
    worker = worker_for(folder)
    assert [len(layer) > 0 for layer in worker.runner.cache.layers] == [letter in "M*" for letter in "ME-M*MEE"]


def test_what_guesses_further_tokens_is_left_aside(tmp_path: Path) -> None:
    """As Nemotron 3's folders have it."""
    folder = save(random_model(EXPERTS), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.eh_proj.weight": torch.ones(48, 96)}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert facts_of(checkpoint).num_parameters == num_parameters(worker_for(folder).spec)


@pytest.mark.parametrize(("letters", "names"), [("mamba", "ME-M*MEE"), ("linear_attention", None)])
def test_layers_are_said_by_letters_or_by_words(letters: str, names: str | None, folder: Path, tmp_path: Path) -> None:
    """As the first folders, and as transformers 5 has them; its first words are others'."""
    config = json.loads((folder / "config.json").read_text())
    if names is None:
        words = [letters if kind == "linear_attention" else kind for kind in config["layers_block_type"]]
        config["layers_block_type"] = ["attention" if kind == "full_attention" else kind for kind in words]
    else:
        del config["layers_block_type"]
        config |= {"hybrid_override_pattern": names, "num_hidden_layers": 8}
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert worker_for(tmp_path).spec == worker_for(folder).spec


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no list": ({"feed_forward_length": 70}, CheckpointError, "'nemotron_h.feed_forward_length' must be a list of 10 numbers"),
    "too few": ({"attention.head_count_kv": [0, 2]}, CheckpointError, "head_count_kv' must be a list of 10 numbers"),
    "below 0": ({"feed_forward_length": [0, 70] * 4 + [0, -1]}, CheckpointError, "must be a whole number of at least 0"),
    "of two sizes": ({"feed_forward_length": [0, 70] * 4 + [0, 71]}, UnsupportedError, "that differ in their heads or MLPs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_mean_nothing_or_more(case: str, tmp_path: Path) -> None:
    keys, kind, message = REFUSED[case]

    def wrong(writer: gguf.GGUFWriter, config: Any) -> None:
        nemotron(writer, config)
        for key, value in keys.items():
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"nemotron_h.{key}", value)

    arch, config, _ = FILES["nemotron h"]
    with pytest.raises(kind, match=message):
        worker_for(write(tmp_path / "m.gguf", arch, random_model(config), wrong))


def spec_of(pattern: str, **more: Any) -> ModelSpec:
    config = NemotronHConfig(**NEMOTRON | more | {"hybrid_override_pattern": pattern}).to_dict()
    config |= {"architectures": ["NemotronHForCausalLM"]}
    return spec_from_hf(config, hf_family(config))


def test_mixes_count_mlps_of_a_model_without_experts() -> None:
    """By hand: of 16 layers the first eighth, the last and each third between. An MLP's number is how many are before it; where
    there are experts it is the layer's. Of attention those that have it are counted."""
    spec = spec_of("M-M-M-M*-M-M-M*-")
    dense = [i for i in range(16) if spec.blocks[i].mlp and type_of("q4_k_m", f"blocks.{i}.down.weight", 256, spec) == "Q6_K"]
    assert dense == [1, 3, 10]  # the first, second and fifth of the MLPs
    values = [type_of("q4_k_m", f"blocks.{i}.v.weight", 256, spec) for i in (7, 14)]
    assert values == ["Q4_K", "Q6_K"]
    mixed = spec_of("MEMEMEME*EMEME*E", **NEMOTRON_EXPERTS)
    found = [i for i in range(1, 16, 2) if type_of("q4_k_m", f"blocks.{i}.experts.0.down.weight", 256, mixed) == "Q6_K"]
    assert found == [1, 7, 13, 15]

