"""Hy4 in the GPU's engine on emulated kernels: several residual streams that all halves of layers read and write, sinks and gates
of latent attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, save
from test_cuda_engine import engine_on, kernels_not_rehearsed, launches_of_a_decode_step, tokens
from test_cuda_guesses import FEW_KINDS, SETTINGS
from test_cuda_latent import MODELS
from test_lookup import answers

pytestmark = needs_emulation
NAME = "hy 4, all are seen"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(MODELS[NAME], seed=1, dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def test_a_deterministic_gpu_gives_the_same_to_the_bit(folder: Path) -> None:
    """With guesses, and few blocks."""
    plain = answers(engine_on(folder, EmulatedDevice(), deterministic=True, **SETTINGS), FEW_KINDS)
    few = {"num_blocks": 6, "max_num_batched_tokens": 13}
    engine = engine_on(folder, EmulatedDevice(), **SETTINGS | {"deterministic": True, "num_speculative_tokens": 4} | few)
    assert answers(engine, FEW_KINDS) == plain
    assert engine.stats().used_blocks == 0


def test_launches_of_a_decode_step(folder: Path) -> None:
    """Four a layer more than without streams, two more for gates, and norms that are no part of what joins them."""
    layers = MODELS[NAME].num_hidden_layers
    assert launches_of_a_decode_step(folder) <= 24 * layers + 8


def test_no_kernel_is_compiled_late(folder: Path) -> None:
    assert not kernels_not_rehearsed(folder)


def test_experts_that_are_held_are_recorded_and_give_the_same(folder: Path, tmp_path: Path) -> None:
    """With few rows of each expert and many, and however a step is put together."""
    held = save(random_model(type(MODELS[NAME])(**MODELS[NAME].to_dict() | {"swiglu_limit": 0.4}), seed=1, dtype=torch.bfloat16),
                tmp_path)  # fmt: skip
    device = EmulatedDevice()
    found = tokens(engine_on(held, device), greedy(6))
    assert device.graphs
    assert found == tokens(engine_on(held, None), greedy(6))
    assert found != tokens(engine_on(folder, None), greedy(6))
    assert not kernels_not_rehearsed(held)
    plain = answers(engine_on(held, EmulatedDevice(), deterministic=True, **SETTINGS), FEW_KINDS)
    few = SETTINGS | {"deterministic": True, "num_speculative_tokens": 4, "num_blocks": 6, "max_num_batched_tokens": 13}
    assert answers(engine_on(held, EmulatedDevice(), **few), FEW_KINDS) == plain
