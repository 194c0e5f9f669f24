"""Gemma 3n in the GPU's engine on emulated kernels: several residual streams, few gates, layers that read what others keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3nTextConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, save
from test_cuda_engine import SHAPE, engine_on, kernels_not_rehearsed, launches_of_a_decode_step, tokens
from test_cuda_guesses import FEW_KINDS, SETTINGS
from test_lookup import answers

pytestmark = needs_emulation
CONFIG = SHAPE | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 400, "num_kv_shared_layers": 2,
    "laurel_rank": 8, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Roundings tell soon in a random one of scores that are not scaled: not with this seed."""
    return save(random_model(Gemma3nTextConfig(**CONFIG), seed=2, dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def test_greedy_tokens_are_those_of_the_cpu(folder: Path) -> None:
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(8)) == tokens(engine_on(folder, None), greedy(8))
    assert device.graphs


def test_a_deterministic_gpu_gives_the_same_to_the_bit(folder: Path) -> None:
    """With guesses, and few blocks."""
    plain = answers(engine_on(folder, EmulatedDevice(), deterministic=True, **SETTINGS), FEW_KINDS)
    few = {"num_blocks": 6, "max_num_batched_tokens": 13}
    engine = engine_on(folder, EmulatedDevice(), **SETTINGS | {"deterministic": True, "num_speculative_tokens": 4} | few)
    assert answers(engine, FEW_KINDS) == plain
    assert engine.stats().used_blocks == 0


def test_launches_of_a_decode_step(folder: Path) -> None:
    """Eleven a layer as Gemma 4 has them, and sixteen more: a norm, a router and a kernel to predict, the same to correct, two
    matrices beside attention, norms that are no part of a matmul, and what joins three streams. Two have a kernel for their
    gates. Streams take two launches to begin, and nine to end."""
    assert launches_of_a_decode_step(folder) <= 27 * 4 + 2 + 5 + 7 + 11


def test_no_kernel_is_compiled_late(folder: Path) -> None:
    assert not kernels_not_rehearsed(folder)
