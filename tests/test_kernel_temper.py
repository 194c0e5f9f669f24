"""temper.cu, emulated: against the formula in float64, and what lies beside its numbers untouched."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.temper import temper

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
# Widths for 16-byte loads and for single elements alone: each other vector would be a compilation more.
WIDTHS = (8, 64, 2056, 1, 17, 301)
POSITIONS = torch.tensor([0, 15, 16, 31, 32, 47, 1 << 20])


def formula(x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int) -> torch.Tensor:
    steps = torch.div(positions + offset, length, rounding_mode="floor").double()
    return x.double() * (1 + scale * torch.log1p(steps))[:, None]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("offset", [0, 1])
def test_one_rounding_from_float64(offset: int, dtype: torch.dtype, order: int) -> None:
    for width in WIDTHS:
        x = random(7, width, dtype=dtype)
        expected, before = formula(x, POSITIONS, 16, 0.3, offset), x.clone()
        assert temper(Emulator(order), x, POSITIONS, 16, 0.3, offset) is x
        close_to_rounding(x, expected)
        assert torch.equal(x[: 2 - offset], before[: 2 - offset]), "to the bit in front of the first step"


@pytest.mark.parametrize(("first", "width", "whole"), [(0, 64, 136), (8, 16, 40), (3, 17, 40)])
def test_it_may_be_columns_of_a_wider_tensor(first: int, width: int, whole: int) -> None:
    wide = random(7, whole, dtype=BF16)
    expected = wide.double()
    expected[:, first : first + width] = formula(wide[:, first : first + width], POSITIONS, 16, 0.5, 0)
    temper(Emulator(), wide[:, first : first + width], POSITIONS, 16, 0.5, 0)
    close_to_rounding(wide, expected)


@pytest.mark.parametrize("bug", ["UNMASKED_TAIL", "ROUNDS"])
def test_planted_bugs_are_found(bug: str) -> None:
    wide = random(7, 40, dtype=BF16)
    expected = wide.double()
    expected[:, :17] = formula(wide[:, :17], POSITIONS, 16, 0.5, 0)
    temper(Emulator(bugs=(bug,)), wide[:, :17], POSITIONS, 16, 0.5, 0)
    with pytest.raises(AssertionError):
        close_to_rounding(wide, expected)


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_rows_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    stride = 2**31 + 8
    try:
        memory = cpu.zeros(2 * stride + 8, BF16)
    except OSError:
        pytest.skip("no address space of 8 GiB")
    memory[-8:] = 1.0
    positions = torch.full((3,), 40)
    temper(Emulator(bugs=bugs, only_block=2), memory.as_strided((3, 8), (stride, 1)), positions, 16, 1.0, 0)
    assert (memory[-8:] != 1.0).all() == (not bugs)


def test_what_would_be_misread_is_refused_and_nothing_is_no_launch() -> None:
    x = torch.ones(7, 8, dtype=BF16)
    for bad, positions in ((torch.ones(8, 7, dtype=BF16).T, POSITIONS), (x, POSITIONS.int()), (x, POSITIONS[:6])):
        with pytest.raises(AssertionError):
            temper(Emulator(), bad, positions, 16, 0.5, 0)
    emulator = Emulator()
    assert temper(emulator, torch.ones(0, 8, dtype=BF16), POSITIONS[:0], 16, 0.5, 0).shape == (0, 8)
    assert not emulator.launches
