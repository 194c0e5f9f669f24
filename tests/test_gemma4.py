"""Gemma 4 in engines on a CPU: layers that read what others keep, and numbers that layers have of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.attention.kv_cache import block_bytes
from nanovllm_cli.batch import Batch
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.sampling_params import SamplingParams
from test_conv import PROMPTS, SETTINGS, answers
from test_models import CASES, GEMMA_4, prompts, whole_batch
from test_quant_engine import difference, expected_logits, logits_of

KINDS = ("gemma4, keys of other layers", "gemma4, 2 of 5 beside")
BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(CASES[request.param], dtype=BF16), tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """Each by itself, without a cache of prefixes."""
    return [answers(folder, greedy(40), [ids], enable_prefix_caching=False)[0] for ids in PROMPTS]


@pytest.mark.parametrize("case", SETTINGS)
def test_answers_do_not_depend_on_what_else_runs(case: str, folder: Path, alone: list[list[list[int]]]) -> None:
    assert answers(folder, greedy(40), **SETTINGS[case]) == alone


def test_prefixes_are_found(folder: Path, alone: list[list[list[int]]]) -> None:
    engine = engine_for(worker_for(folder))
    for _ in range(2):
        outputs = run(engine, [(ids, greedy(40)) for ids in PROMPTS])
        assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == alone
    assert [output.metrics.num_cached_tokens for output in outputs] == [(len(ids) - 1) // 16 * 16 for ids in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 24, "max_num_batched_tokens": 20}])
def test_forks_draw_what_each_would_draw_alone(settings: dict[str, Any], folder: Path) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=24, ignore_eos=True)
    expected = [answers(folder, params, [ids], enable_prefix_caching=False)[0] for ids in PROMPTS[:4]]
    assert answers(folder, params, PROMPTS[:4], **settings) == expected


# ---- layers that read what others keep ----


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(CASES[KINDS[0]]), tmp_path_factory.mktemp("sharing"))


def test_layers_without_keys_take_no_memory(sharing: Path) -> None:
    """Of six layers the first three have some: two with a window, and one with larger heads."""
    worker = worker_for(sharing)
    dims = 24 + 32 + 40 + 48 + 24 + 32  # of keys, and of values, which are filled up
    assert block_bytes(worker.spec.mixers, worker.model.backend) == 2 * 16 * dims * 4
    layers = worker.runner.cache.layers
    assert [[mine is other for other in layers].index(True) for mine in layers] == [0, 1, 2, 2, 2, 1]


def test_what_layers_have_of_each_token_is_not_read_whole(sharing: Path) -> None:
    """Nor is it multiplied with; nor do a prompt's tokens need the layers that keep nothing."""
    worker = worker_for(sharing)
    model = worker.model
    assert model.per_layer is not None
    assert worker.read_bytes == worker.weight_bytes - model.per_layer.embedding.weight.num_bytes
    work = ModelWork.of(worker.spec, worker.read_bytes, (torch.float32,) * 2)
    matrices = [linear.weight for block in model.blocks for linear in
                (block.mixer.qkv, block.mixer.out, block.mlp.gate_up, block.mlp.down, block.per_layer.gate, block.per_layer.out)]
    sizes = [weight.num_rows * weight.width for weight in matrices]
    assert work.linear_flops == 2 * (sum(sizes) + 48 * 6 * 12)
    assert work.prompt_share == pytest.approx(sum(sizes[:14]) / sum(sizes), rel=0.02), "of the last that keeps, the mixer"


def test_only_rows_that_are_asked_for_go_on_where_nothing_is_kept(sharing: Path) -> None:
    """Their logits are those that they have among all others'."""
    worker = worker_for(sharing)
    seen: list[int] = []
    for block in worker.model.blocks:
        norm = block.attention_norm
        block.attention_norm = lambda x, residual, norm=norm: (seen.append(len(residual)), norm(x, residual))[1]  # type: ignore[assignment]
    batch = whole_batch(prompts(513)[2:6])
    rows = torch.tensor([0, 3, 4, 5, 16, 47, 87, 100, 150])
    with torch.inference_mode():
        cache = worker.runner.cache
        every = worker.model.logits(worker.model.run(worker.model.prepare(batch), cache))
        assert seen == [batch.num_tokens] * 6
        seen.clear()
        asked = Batch(**{name: getattr(batch, name) for name in Batch.__dataclass_fields__} | {"logit_rows": rows})
        some = worker.model.logits(worker.model.run(worker.model.prepare(asked), cache))
        assert seen == [batch.num_tokens] * 3 + [len(rows)] * 3
        seen.clear()
        nothing = Batch(**{name: getattr(batch, name) for name in Batch.__dataclass_fields__} | {"logit_rows": rows[:0]})
        assert len(worker.model.normed(worker.model.run(worker.model.prepare(nothing), cache))) == 0
        assert seen == [batch.num_tokens] * 3
    assert torch.equal(some, every[rows])


def test_rows_that_are_asked_for_are_runs_of_tokens() -> None:
    batch = whole_batch([[5] * 20, [6] * 3, [7] * 40])
    rows = torch.tensor([2, 3, 4, 19, 20, 22, 60, 61, 62])
    asked = Batch(**{name: getattr(batch, name) for name in Batch.__dataclass_fields__} | {"logit_rows": rows}).asked()
    assert asked.query_starts.tolist() == [0, 3, 4, 5, 6, 9]
    assert asked.kv_lens.tolist() == [5, 20, 1, 3, 40]
    assert asked.positions.tolist() == [2, 3, 4, 19, 0, 2, 37, 38, 39]
    assert asked.block_tables.tolist() == [batch.block_tables[i].tolist() for i in (0, 0, 1, 1, 2)]
    assert asked.logit_rows.tolist() == list(range(9))


def test_probabilities_of_a_prompt_are_those_of_one_piece(sharing: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    found = []
    for settings in ({}, {"max_num_batched_tokens": 9}):
        engine = engine_for(worker_for(sharing), **settings)
        outputs = run(engine, [(ids, params) for ids in PROMPTS])
        found.append([output.prompt_logprobs for output in outputs])
    assert found[0] == found[1]


# ---- configs ----

BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "nobody to read from": (KINDS[0], {"num_kv_shared_layers": 5}, "layer 1 reads the keys of a layer like it, and there"),
    "all read": (KINDS[0], {"num_kv_shared_layers": 6}, "layer 0 reads the keys of a layer like it"),
    "heads of another size": (KINDS[0], {"per_layer_config": {"1": {"head_dim": 40}, "5": {"head_dim": 48}}}, "heads are others"),
    "heads that can't be shared": (
        KINDS[1], {"per_layer_config": {"3": {"head_dim": 40, "num_key_value_heads": 4}}}, "layer 3 can't have",
    ),
    "a list of layers": (KINDS[0], {"per_layer_config": [1]}, "'per_layer_config' must be an object"),
    "no rope": (KINDS[0], {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "says nothing of full_attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_config_is_told(case: str) -> None:
    kind, changes, message = BROKEN[case]
    config = CASES[kind].to_dict() | {"architectures": ["Gemma4ForCausalLM"]} | changes
    with pytest.raises(CheckpointError, match=message):
        spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "both directions"),
        ({"hidden_activation": "silu"}, "activation 'silu'"),
        ({"attention_bias": True}, "biases of attention"),
        ({"vocab_size_per_layer_input": 99}, "embeddings of layers for 99 tokens"),
    ],
)
def test_what_no_gemma_has_is_refused(changes: dict[str, Any], message: str) -> None:
    config = CASES[KINDS[0]].to_dict() | {"architectures": ["Gemma4ForCausalLM"]} | changes
    with pytest.raises(UnsupportedError, match=message):
        spec_from_hf(config, hf_family(config))


def test_a_published_config_says_it_otherwise() -> None:
    """What transformers writes now as "per_layer_config" has keys of its own there."""
    config = CASES["gemma4, keys are values"].to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    spec = spec_from_hf(config, hf_family(config))
    del config["per_layer_config"]
    assert spec_from_hf(config | {"global_head_dim": 40, "num_global_key_value_heads": 1}, hf_family(config)) == spec
    seeing = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": config | {"global_head_dim": 40,
              "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}}  # fmt: skip
    assert spec_from_hf(seeing, hf_family(seeing)) == spec


def test_numbers_of_layers_may_begin_with_zeros(tmp_path: Path) -> None:
    """Transformers makes all of one length in "per_layer_config"; those of ten layers and more were not found by them."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    sizes = GEMMA_4 | {"num_hidden_layers": 12, "layer_types": kinds, "hidden_size_per_layer_input": 0}
    model = random_model(Gemma4TextConfig(**sizes))
    folder = save(model, tmp_path)
    assert '"05"' in (folder / "config.json").read_text()
    worker = worker_for(folder)
    assert [worker.spec.attentions[layer].head_dim for layer in (4, 5, 11)] == [24, 40, 40]
    tokens = prompts(513)[2:4]
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-4
