"""Convolutions in the GPU's engine on emulated kernels: what lies in a sequence's blocks of them survives guesses that did not
hold, forks, pressure and steps that ran ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, save
from test_cuda_engine import (
    PROMPTS,
    SHAPE,
    engine_on,
    forks_and_found_prefixes,
    kernels_not_rehearsed,
    launches_of_a_decode_step,
    tokens,
)
from test_cuda_guesses import FEW_KINDS, SETTINGS
from test_lookup import answers

pytestmark = needs_emulation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Lfm2Config(**SHAPE | {"num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"])
    return save(random_model(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    return answers(engine_on(folder, EmulatedDevice(), deterministic=True, **SETTINGS), FEW_KINDS)


@pytest.mark.parametrize(
    "more",
    [
        {"num_speculative_tokens": 8},
        {"num_speculative_tokens": 4, "num_blocks": 6, "max_num_batched_tokens": 13},
        {"draft_model": "itself", "draft_min_p": 0.0},
        {"num_blocks": 6, "max_num_batched_tokens": 13},
    ],
    ids=["guesses", "guesses, few blocks", "drafts", "few blocks"],
)
def test_a_deterministic_gpu_gives_the_same_to_the_bit(more: dict[str, Any], folder: Path, plain: list[Any]) -> None:
    more |= {"draft_model": str(folder)} if "draft_model" in more else {}
    device = EmulatedDevice()
    engine = engine_on(folder, device, **SETTINGS | {"deterministic": True} | more)
    assert answers(engine, FEW_KINDS) == plain
    assert engine.stats().used_blocks == 0
    assert device.graphs


def test_forks_and_found_prefixes_give_what_each_gives_alone(folder: Path) -> None:
    forks_and_found_prefixes(folder, max_tokens=14)


def test_a_decode_step_has_no_more_launches_than_one_of_attention(folder: Path) -> None:
    assert launches_of_a_decode_step(folder) <= 5 * 3 + 6


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 16}], ids=str)
def test_no_kernel_is_compiled_late(settings: dict[str, Any], folder: Path) -> None:
    assert not kernels_not_rehearsed(folder, **settings)


def test_other_block_sizes(folder: Path) -> None:
    def answered(**settings: Any) -> list[tuple[int, ...]]:
        return tokens(engine_on(folder, EmulatedDevice(), deterministic=True, **settings), greedy(20), PROMPTS[:3])

    assert answered(block_size=32, num_blocks=32) == answered()
