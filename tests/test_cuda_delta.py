"""The gated delta rule, with a decay a head or a channel, and Mamba-2's, in the GPU's engine on emulated kernels: states survive
chunks, forks, pressure, found prefixes and steps that ran ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BailingHybridConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, run, save
from nanovllm_cli.engine import states
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import CompletionOutput
from nanovllm_cli.sampling_params import SamplingParams
from test_cuda_engine import (
    PROMPTS,
    SHAPE,
    engine_on,
    forks_and_found_prefixes,
    kernels_not_rehearsed,
    launches_of_a_decode_step,
    tokens,
)
from test_models import DELTA, GRANITE_4_H, KIMI, LING_3, prompts
from test_quant_engine import difference, expected_logits, logits_of

pytestmark = needs_emulation
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


MODELS = {
    "delta rule": Qwen3_5TextConfig(**SHAPE | {"num_hidden_layers": 3}, **DELTA, layer_types=LAYERS),
    "state space": GraniteMoeHybridConfig(
        **GRANITE_4_H | SHAPE | {"num_hidden_layers": 3, "mamba_n_heads": 4, "layer_types": ["mamba", "attention", "mamba"]},
    ),
}  # fmt: skip
KIMIS: dict[str, Any] = {
    name: KimiLinearConfig(
        **KIMI | {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")} | {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "layer_types": LAYERS, "linear_head_dim": 16, "linear_num_heads": 4,
        } | changes,
    )
    for name, changes in {
        "on tensor cores": {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24},
        "off them, odd": {"linear_head_dim": 24, "linear_num_heads": 6, "q_lora_rank": 28},
    }.items()
}  # fmt: skip
"""Of decays by channel, latent attention without positions, and experts."""
KIMIS["a Ling"] = BailingHybridConfig(
    **LING_3 | {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")} | {
        "num_hidden_layers": 3, "num_key_value_heads": 4, "layer_types": LAYERS, "head_dim": 16, "kv_lora_rank": 64,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
    },
)  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With seeds whose answers have no near ties: a random model of bfloat16 is soon somewhere else."""
    seed = list(MODELS).index(request.param)
    return save(random_model(MODELS[request.param], seed=seed, dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True, scope="module")
def _short_texts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "FIRST_KEPT", 16)
        patch.setattr(states, "KEPT_EVERY", 32)
        patch.setattr(states, "LATEST_EVERY", 16)
        yield


ASKED = [
    *[(prompt, greedy(20, logprobs=2)) for prompt in (*PROMPTS, list(range(60, 110)))],
    ([9, 8, 7] * 6, greedy(26, logprobs=2, allowed_token_ids=(8, 9))),
    ([9, 8, 7] * 6, SamplingParams(temperature=2.0, seed=3, max_tokens=26, logprobs=2, allowed_token_ids=(6, 7, 8, 9))),
]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[CompletionOutput]:
    """What a deterministic GPU answers to each by itself."""
    engine = engine_on(folder, EmulatedDevice(), deterministic=True)
    return [run(engine, [each], salt=str(i))[0].outputs[0] for i, each in enumerate(ASKED)]


def check_nothing_is_lost(engine: Engine) -> None:
    kept = engine._blocks.states
    assert engine.stats().used_blocks == 0
    assert kept.pool.num_free + kept.pool.num_kept == engine._executor.num_states


def test_greedy_tokens_are_those_of_the_cpu(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    assert tokens(engine, greedy(12)) == tokens(engine_on(folder, None), greedy(12))
    assert device.graphs
    check_nothing_is_lost(engine)


@pytest.mark.parametrize(
    "more",
    [
        {}, {"eager": True}, {"num_blocks": 6, "max_num_batched_tokens": 13}, {"max_num_batched_tokens": 5}, {"num_states": 2},
        {"num_speculative_tokens": 8},
        {"num_speculative_tokens": 4, "num_blocks": 6, "max_num_batched_tokens": 13},
        {"draft_model": "itself", "draft_min_p": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_deterministic_gpu_gives_the_same_to_the_bit(
    more: dict[str, Any], folder: Path, alone: list[CompletionOutput]
) -> None:
    settings = {name: str(folder) if name == "draft_model" else value for name, value in more.items() if name != "num_states"}
    engine = engine_on(folder, EmulatedDevice(), deterministic=True, **settings)
    if "num_states" in more:
        engine = with_states(engine, more["num_states"])
    found = run(engine, ASKED)
    for one, other in zip(found, alone, strict=True):
        assert one.outputs[0].token_ids == other.token_ids
        assert one.outputs[0].logprobs == other.logprobs
    guessed, held = (sum(getattr(one.metrics, f"num_{name}_tokens") for one in found) for name in ("guessed", "held"))
    assert (guessed > held > 10) == bool(engine._config.max_guesses)
    check_nothing_is_lost(engine)


def with_states(engine: Engine, count: int) -> Engine:
    """The same engine with fewer."""
    worker = engine._executor
    worker.num_states = count  # type: ignore[misc]
    return Engine(
        worker, engine._config, vocab_size=engine._vocab_size, max_model_len=engine._max_model_len,
        num_blocks=engine.stats().free_blocks, ahead=engine._ahead, prepare=engine._prepare,
    )  # fmt: skip


def test_forks_and_found_prefixes_give_what_each_gives_alone(folder: Path) -> None:
    check_nothing_is_lost(forks_and_found_prefixes(folder, max_tokens=14))


def test_launches_of_a_decode_step(folder: Path) -> None:
    """Behind attention come its gates; beside the delta rule's projection, one more for what is kept and changed."""
    assert launches_of_a_decode_step(folder) <= 6 * 3 + 6


def test_no_kernel_is_compiled_late(folder: Path) -> None:
    assert not kernels_not_rehearsed(folder)


def test_a_shared_expert_is_weighed_as_on_the_cpu(tmp_path: Path) -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {"num_hidden_layers": 2}
    config = Qwen3_5MoeTextConfig(
        **shape, **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        layer_types=LAYERS[:2],
    )  # fmt: skip
    model = save(random_model(config, dtype=torch.bfloat16), tmp_path)
    assert tokens(engine_on(model, EmulatedDevice()), greedy(8)) == tokens(engine_on(model, None), greedy(8))


@pytest.mark.parametrize("name", KIMIS)
def test_logits_of_a_kimi_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(KIMIS[name], dtype=torch.bfloat16)
    folder, asked = save(model, tmp_path), [ids[:40] for ids in prompts(513)[:6]]
    worker = engine_on(folder, EmulatedDevice(), dtype="float16", max_num_seqs=6)._executor
    assert difference(logits_of(worker, asked), expected_logits(model.float(), asked)) < 5e-3


def test_a_kimi_gives_the_tokens_of_the_cpu_and_the_same_bits_in_any_steps(tmp_path: Path) -> None:
    """In small ones, behind a preemption, and with guesses, of which some hold."""
    folder = save(random_model(KIMIS["on tensor cores"], seed=166, dtype=torch.bfloat16), tmp_path)
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(12)) == tokens(engine_on(folder, None), greedy(12))
    assert device.graphs
    assert {"latent_attention", "gated_delta"} <= {kernel.stem for kernel in device.launcher.launched}
    assert {kernel.stem for kernel in device.launcher.launched - device.launcher.rehearsed} <= {"blocks"}  # which is small
    asked = [([9, 8, 7] * 4, greedy(24, logprobs=2, allowed_token_ids=(8, 9))),
             ([5, 6, 4] * 4, greedy(24, logprobs=2, allowed_token_ids=(4, 5)))]  # fmt: skip
    alone = engine_on(folder, EmulatedDevice(), deterministic=True)
    expected = [run(alone, [each], salt=str(i))[0].outputs[0] for i, each in enumerate(asked)]
    small = {"num_blocks": 4, "max_num_batched_tokens": 13, "num_speculative_tokens": 4}
    engine = engine_on(folder, EmulatedDevice(), deterministic=True, **small)
    found = run(engine, asked)
    assert [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found] == [
        (other.token_ids, other.logprobs) for other in expected]  # fmt: skip
    assert sum(one.metrics.num_guessed_tokens for one in found) > sum(one.metrics.num_held_tokens for one in found) > 0
    assert engine.stats().preemptions
    check_nothing_is_lost(engine)
