"""Mamba's first rule on a CPU: the kernels against formulas in float64, and engines whose past is such a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JambaConfig

from emulation.compare import close_to_rounding, random
from engines import each_alone, random_model, save
from nanovllm_cli.kernels import cpu, scan, state_rules
from scans import CASES, Case, Kept, check, check_repeated, check_same_bits
from test_models import JAMBA
from test_states_alone import ASKED, Answers, answers

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_formula(case: Case, dtype: torch.dtype) -> None:
    cpu.set_num_threads(3 if dtype == BF16 else 1)
    check(case, dtype)


@pytest.mark.parametrize("channels", [96, 31])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(channels: int) -> None:
    check_same_bits(channels, 83)


def test_a_step_that_failed_between_the_kernels_is_repeated() -> None:
    check_repeated()


def test_a_state_that_is_not_there_gives_no_numbers() -> None:
    kept = Kept(CASES[0], BF16)
    args, _ = kept.step([5, 37, 1])
    kept.lens = [5, 37, 1]
    kept.states.stamps.zero_()
    args, _ = kept.step([1, 1, 1])
    assert kept.run(**args).isnan().all()
    assert kept.mixed.isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rank", "size"), [(5, 16), (33, 3)])
def test_parts_are_normed_each_by_itself(rank: int, size: int, dtype: torch.dtype) -> None:
    x, gains = random(7, rank + 2 * size), random(rank + 2 * size)
    for own in (None, gains):
        found = scan.scan_parts(x, rank, own, 1e-5, dtype)
        expected = state_rules.scan_parts(x.double(), rank, own, 1e-5)
        assert [each.dtype for each in found] == [dtype, FP32]
        for got, wanted in zip(found, expected, strict=True):
            close_to_rounding(got, wanted)


# ---- engines ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So wide that a decode step's products take memory of their own; with experts."""
    wide = {"hidden_size": 96, "num_experts": 3, "expert_layer_period": 3, "expert_layer_offset": 2}
    return save(random_model(JambaConfig(**JAMBA | wide), dtype=BF16), tmp_path_factory.mktemp("jamba"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Answers:
    """Each by itself, by steps that are not recorded."""
    return each_alone(folder, ASKED)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 37}, {"num_states": 2}, {"num_blocks": 25},
     {"num_speculative_tokens": 8, "max_num_batched_tokens": 90}, {"num_speculative_tokens": 3, "draft_model": ""}],
    ids=str,
)  # fmt: skip
def test_every_bit_is_the_same_together_in_chunks_preempted_and_behind_guesses(
    settings: dict[str, Any], folder: Path, alone: Answers
) -> None:
    drafts = {"draft_model": str(folder)} if "draft_model" in settings else {}
    assert answers(folder, **settings | drafts) == alone
