"""Gemma 4 in the GPU's engine on emulated kernels: layers that read what others keep, heads too wide for prefill's kernel,
numbers that layers have of each token, a mixture beside an MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, run, save
from nanovllm_cli.sampling_params import SamplingParams
from test_cuda_engine import PROMPTS, SHAPE, engine_on, kernels_not_rehearsed, launches_of_a_decode_step, tokens
from test_cuda_guesses import FEW_KINDS, SETTINGS
from test_lookup import answers

pytestmark = needs_emulation
VOCAB = SHAPE["vocab_size"]
FEW = {"num_blocks": 6, "max_num_batched_tokens": 13}
COMMON = SHAPE | {"sliding_window": 20, "tie_word_embeddings": True, "final_logit_softcapping": 30.0}
SMALL = COMMON | {
    "num_hidden_layers": 5, "global_head_dim": 272, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
MIXTURE = COMMON | {
    "num_hidden_layers": 2, "global_head_dim": 80, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture(scope="module", params=[SMALL, MIXTURE], ids=["small", "mixture"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores are not scaled, so a random one soon says something else where a rounding differs: not with this seed."""
    model = random_model(Gemma4TextConfig(**request.param), seed=1, dtype=torch.bfloat16)
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Gemma4TextConfig(**SMALL), dtype=torch.bfloat16), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def plain(small: Path) -> list[Any]:
    return answers(engine_on(small, EmulatedDevice(), deterministic=True, **SETTINGS), FEW_KINDS)


def test_greedy_tokens_are_those_of_the_cpu(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    assert tokens(engine, greedy(8)) == tokens(engine_on(folder, None), greedy(8))
    assert device.graphs


def test_a_deterministic_gpu_gives_the_same_to_the_bit(small: Path, plain: list[Any]) -> None:
    """With guesses, and few blocks."""
    device = EmulatedDevice()
    engine = engine_on(small, device, **SETTINGS | {"deterministic": True, "num_speculative_tokens": 4} | FEW)
    assert answers(engine, FEW_KINDS) == plain
    assert engine.stats().used_blocks == 0
    assert device.graphs


def test_forks_and_found_prefixes_give_what_each_gives_alone(small: Path) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=12, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[2], list(range(60, 100))]
    expected = []
    for prompt in prompts:
        (output,) = run(engine_on(small, EmulatedDevice(), deterministic=True), [(prompt, params)])
        expected.append([each.token_ids for each in output.outputs])
    engine = engine_on(small, EmulatedDevice(), deterministic=True)
    for _ in range(2):
        outputs = run(engine, [(prompt, params) for prompt in prompts])
        assert [[each.token_ids for each in output.outputs] for output in outputs] == expected
    assert outputs[2].metrics.num_cached_tokens == 32


def test_launches_of_a_decode_step(small: Path) -> None:
    """Seven a layer with norms on either side, and four more for its numbers of a token, which five make for all layers;
    there are two ropes."""
    assert launches_of_a_decode_step(small) <= 11 * 5 + 5 + 7


def test_no_kernel_is_compiled_late(folder: Path) -> None:
    assert not kernels_not_rehearsed(folder)
