"""Models of state spaces alone: engines without attention, whose blocks hold nothing, and contexts that nothing bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2Config

from engines import each_alone, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.memory import MOST_EMPTY, size_cache
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, UnsupportedError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights.tensor_classes import class_of
from test_delta import LONG, REPEATING, check_nothing_is_lost
from test_models import CASES, MAMBA2
from test_quant_engine import difference, expected_logits, logits_of

PROMPTS = [[5], LONG[:300], [*LONG[:256], 3], LONG[300:370]]
ASKED = [(ids, greedy(20, logprobs=2)) for ids in PROMPTS]
ASKED += [(ids, greedy(30, allowed_token_ids=(3, 4))) for ids in REPEATING[:3]]
WIDE = {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 33, "num_hidden_layers": 2}
"""So wide that a decode step's products take memory of their own."""
Answers = list[tuple[tuple[int, ...], Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Mamba2Config(**MAMBA2 | WIDE), dtype=torch.bfloat16), tmp_path_factory.mktemp("mamba2"))


def answers(folder: Path, num_states: int | None = None, **settings: Any) -> Answers:
    drafts = {name: settings[name] for name in ("num_speculative_tokens", "draft_model") if name in settings}
    worker = worker_for(folder, **drafts)
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
    [{"max_num_batched_tokens": 37}, {"num_states": 2}, {"num_blocks": 25},
     {"num_speculative_tokens": 8, "max_num_batched_tokens": 90}],
    ids=str,
)  # fmt: skip
def test_every_bit_is_the_same_together_in_chunks_preempted_and_behind_guesses(
    settings: dict[str, Any], folder: Path, expected: Answers
) -> None:
    assert answers(folder, **settings) == expected


def test_memory_is_free_again_when_no_view_is_left() -> None:
    """As a norm of groups gives its rows: as a view of what it computed."""
    pool = cpu.MemoryPool()
    view = pool.empty((4, 6), torch.bfloat16).view(3, 8)
    other = pool.empty((4, 6), torch.bfloat16)
    assert view.data_ptr() != other.data_ptr()
    place = view.data_ptr()
    del view
    assert pool.empty((2, 3), torch.float32).data_ptr() == place
    assert pool.num_bytes == 2 * 64


def test_it_drafts_for_itself(folder: Path, expected: Answers) -> None:
    assert answers(folder, draft_model=str(folder), num_speculative_tokens=3) == expected


def test_a_saved_session_is_its_state_alone(folder: Path, expected: Answers, tmp_path: Path) -> None:
    first, second = (engine_for(worker_for(folder)) for _ in range(2))
    run(first, [(PROMPTS[1], greedy(1))])
    assert first.kv_files.save(tmp_path / "kv", "the same", PROMPTS[1]) == 288
    assert second.kv_files.load(tmp_path / "kv", "the same") == 288
    (output,) = run(second, [ASKED[1]])
    assert output.metrics.num_cached_tokens == 288
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == expected[1]
    data = bytearray((tmp_path / "kv").read_bytes())
    data[-60] ^= 1
    (tmp_path / "kv").write_bytes(data)
    assert engine_for(worker_for(folder)).kv_files.load(tmp_path / "kv", "the same") == 0


def test_blocks_that_hold_nothing_are_bounded_by_no_memory() -> None:
    """By hand: 1,000,000 tokens are 62,500 blocks of 16; past MOST_EMPTY no more than one sequence needs."""
    config = EngineConfig(max_num_seqs=2, kv_cache_bytes=5000)
    assert size_cache(config, 1_000_000, 0, 1 << 40, 100) == (125_000, 1_000_000, 12, 0)
    assert size_cache(EngineConfig(max_num_seqs=9), 1_000_000, 0, 10_000, 100)[0] == MOST_EMPTY
    claimed = size_cache(EngineConfig(max_num_seqs=1), 2**31 - 1, 0, 300, 100)
    assert claimed[:2] == (MOST_EMPTY, 16 * MOST_EMPTY), "a file may say anything"
    assert size_cache(EngineConfig(max_num_seqs=1, max_model_len=5_000_000), 5_000_000, 0, 300, 100) == (312_500, 5_000_000, 3, 0)
    assert size_cache(EngineConfig(), 1000, 0, 100, 100).num_states == 1
    with pytest.raises(DoesNotFitError, match="the state of a sequence 1 KiB"):
        size_cache(EngineConfig(), 1000, 0, 1023, 1024)


def test_a_context_is_as_long_as_somebody_asks(folder: Path) -> None:
    assert worker_for(folder, num_blocks=None).max_model_len == 1 << 20
    assert worker_for(folder, num_blocks=None, max_model_len=(1 << 20) + 1).max_model_len == (1 << 20) + 1
    assert worker_for(folder, num_blocks=None, max_model_len=100).max_model_len == 100


def test_codestral_mamba_has_another_prefix(folder: Path, tmp_path: Path) -> None:
    """As mistralai has published it."""
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    found, wanted = (logits_of(worker_for(each), PROMPTS[:1]) for each in (tmp_path, folder))
    assert difference(found, wanted) == 0


def test_a_mamba_is_read_by_the_names_that_it_first_had(tmp_path: Path) -> None:
    """As state-spaces had them: another name of the embedding, and the head once more."""
    reference = random_model(CASES["mamba"])
    folder = save(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("backbone.embeddings.weight")
    tensors |= {"backbone.embedding.weight": embedding, "lm_head.weight": embedding.clone()}
    save_file(tensors, folder / "model.safetensors")
    assert difference(logits_of(worker_for(folder), PROMPTS[3:]), expected_logits(reference, PROMPTS[3:])) < 1e-4
    save_file(tensors | {"backbone.embedding.weight": torch.ones(())}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"backbone\.embeddings\.weight \(expected .*found \[\]"):
        worker_for(folder)


@pytest.mark.parametrize(
    ("case", "values", "lacking"),
    [("mamba", {"use_conv_bias": False}, "biases of convolutions"), ("mamba", {"expand": 3}, "inner width of twice the outer"),
     ("jamba", {"mamba_conv_bias": False}, "biases of convolutions"), ("jamba", {"mamba_expand": 1}, "inner width of twice the"),
     ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}, "state spaces")],
)  # fmt: skip
def test_what_llama_cpp_takes_for_granted_is_refused_where_it_is_not(case: str, values: dict[str, Any], lacking: str) -> None:
    reference = CASES[case]
    config = reference.to_dict() | {"architectures": [type(reference).__name__.replace("Config", "ForCausalLM")]} | values
    family = hf_family(config)
    assert family.gguf_keys is not None
    with pytest.raises(UnsupportedError, match=f"GGUF cannot say this of a {case} model: that it has no {lacking}"):
        family.gguf_keys(spec_from_hf(config, family))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mamba: biases": ({"use_bias": True}, UnsupportedError, r"biases of its projections \(use_bias\)"),
    "mamba: a gelu": ({"hidden_act": "gelu"}, UnsupportedError, "a state space behind 'gelu'"),
    "mamba: a wide step": ({"time_step_rank": 97}, CheckpointError, "can't have 96 channels, states of 16, steps of 97 numbers"),
    "mamba: one tap": ({"conv_kernel": 1}, CheckpointError, "and 1 taps"),
    "mamba: states of a number": ({"state_size": 1}, CheckpointError, "states of 1"),
    "falcon mamba: no eps": ({"mixer_rms_eps": -1.0}, CheckpointError, "'mixer_rms_eps' must be"),
    "jamba: biases": ({"mamba_proj_bias": True}, UnsupportedError, r"biases of its projections \(mamba_proj_bias\)"),
    "jamba: no attention": ({"attn_layer_period": 9, "attn_layer_offset": 5}, UnsupportedError, "no layer has attention"),
    "jamba: an offset": ({"attn_layer_offset": 3}, CheckpointError, "'attn_layer_offset' must be less than the period, 3"),
    "jamba: no period": ({"expert_layer_period": 0}, CheckpointError, "'expert_layer_period' must be a whole number"),
    "biases": ({"use_bias": True}, UnsupportedError, "a Mamba with biases of its projections"),
    "a gelu": ({"hidden_act": "gelu"}, UnsupportedError, "a state space behind 'gelu'"),
    "bounded steps": ({"time_step_limit": [0.0, 0.5]}, UnsupportedError, "time steps of a state space that are bounded"),
    "heads that don't fit": ({"num_heads": 5}, CheckpointError, "5 heads of 16, for 96 numbers"),
    "groups that don't divide": ({"n_groups": 4}, CheckpointError, "6 heads of a state space can't share 4 groups"),
    "a state of nothing": ({"state_size": 0}, CheckpointError, "'state_size' must be a whole number of at least 1"),
    "one tap": ({"conv_kernel": 1}, CheckpointError, "and 1 taps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_mean_nothing_or_more(case: str) -> None:
    values, kind, message = REFUSED[case]
    name = case.split(":")[0] if ":" in case else "mamba2"
    reference = CASES[name]
    config = reference.to_dict() | {"architectures": [type(reference).__name__.replace("Config", "ForCausalLM")]} | values
    with pytest.raises(kind, match=message):
        spec_from_hf(config, hf_family(config))


def test_what_a_state_space_has_counts_with_attention_whatever_holds_it() -> None:
    names = ("model.layers.0.mamba.in_proj.weight", "model.layers.0.mamba.conv1d.weight", "backbone.layers.0.mixer.dt_proj.bias",
             "blk.0.ssm_conv1d.weight", "model.layers.3.mamba.A_log")  # fmt: skip
    assert {class_of(name) for name in names} == {"attention"}
    assert class_of("model.layers.0.mamba.dt_layernorm.weight") == "norms"
