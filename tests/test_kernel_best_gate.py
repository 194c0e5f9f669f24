"""best_gate.cu, emulated: against the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels.best_gate import best_gate, variant

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
# Widths for 16-byte loads and for single elements alone: each other vector would be a compilation more.
SHAPES = [(1, 8, 1), (3, 64, 16), (2, 2056, 128), (4, 17, 5), (7, 301, 33)]


def formula(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return x.double() / (1 + (-logits.double().amax(1, keepdim=True)).exp())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_one_rounding_from_float64(dtype: torch.dtype, order: int) -> None:
    for tokens, width, count in SHAPES:
        x, logits = random(tokens, width, dtype=dtype), random(tokens, count, scale=4.0)
        before = x.clone()
        close_to_rounding(best_gate(Emulator(order), x, logits), formula(x, logits))
        assert torch.equal(x, before)


def test_logits_far_from_zero() -> None:
    logits = torch.tensor([[-1e30, -1e31], [-100.0, -200.0], [100.0, -1.0], [torch.nan, 5.0], [5.0, torch.nan], [-torch.inf] * 2])
    found = best_gate(Emulator(), torch.full((6, 8), 3.0, dtype=BF16), logits)
    assert found[:, 0].isnan().tolist() == [False, False, False, True, True, False]
    assert found[[0, 5]].abs().max() == 0
    assert found[1].max() < 1e-30
    assert (found[2] == 3).all()


@pytest.mark.parametrize("bug", [None, "ONE_LANE", "UNMASKED_TAIL"])
def test_planted_bugs_are_found(bug: str | None) -> None:
    """Rows of 17 in a warp of 32, with room behind the last."""
    wrong = []
    for order in ORDERS:
        logits, memory, out = random(4, 33, scale=4.0), random(4 * 17 + 64, dtype=BF16), torch.zeros(4 * 17 + 64, dtype=BF16)
        expected = formula(memory[: 4 * 17].view(4, 17), logits)
        emulator = Emulator(order, bugs=() if bug is None else (bug,))
        emulator.launch(variant(BF16, 1), (4, 1, 1), (32, 1, 1), (memory, logits, out, np.int32(17), np.int32(33)))
        found, behind = out[: 4 * 17].view(4, 17), out[4 * 17 :]
        wrong.append(bool(((found.double() - expected).abs() > 0.02 * expected.abs() + 1e-3).any()) or bool(behind.any()))
    assert any(wrong) == (bug is not None)


def test_what_would_be_misread_is_refused_and_nothing_is_no_launch() -> None:
    x, logits = torch.ones(3, 8, dtype=BF16), torch.ones(3, 5)
    for bad in ((x.T, logits), (x, logits.double()), (x, logits[:2]), (x, logits[:, :0])):
        with pytest.raises(AssertionError):
            best_gate(Emulator(), *bad)
    emulator = Emulator()
    assert best_gate(emulator, x[:0], logits[:0]).shape == (0, 8)
    assert not emulator.launches
