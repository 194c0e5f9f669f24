"""clip.cu, emulated: against torch's clamp, and what lies beside its numbers untouched."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.clip import clip

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
# Widths for 16-byte loads and for single elements alone: each other vector would be a compilation more.
WIDTHS = (8, 64, 2056, 1, 17, 301)
LIMIT = 0.7
"""Which neither type has: what is beyond becomes what lies next to it."""


def spoiled(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])[: min(4, x.numel())]
    return x


def clamped(x: torch.Tensor) -> torch.Tensor:
    limit = torch.tensor(LIMIT, dtype=x.dtype).double()
    return x.double().clamp(-limit, limit).to(x.dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_equal_to_torch(dtype: torch.dtype, order: int) -> None:
    for width in WIDTHS:
        x = spoiled(random(7, width, dtype=dtype))
        expected = clamped(x)
        assert clip(Emulator(order), x, -LIMIT, LIMIT) is x
        assert torch.equal(x.nan_to_num(9.0), expected.nan_to_num(9.0))
        assert x.isnan().sum() == 1
        positive = x.relu()
        assert torch.equal(clip(Emulator(order), x, 0.0, float("inf")).nan_to_num(9.0), positive.nan_to_num(9.0))


@pytest.mark.parametrize(("first", "width", "whole"), [(0, 64, 136), (8, 16, 40), (3, 17, 40)])
def test_it_may_be_columns_of_a_wider_tensor(first: int, width: int, whole: int) -> None:
    wide = random(7, whole, dtype=BF16)
    expected = wide.clone()
    expected[:, first : first + width] = clamped(wide[:, first : first + width])
    assert not torch.equal(expected, wide)
    clip(Emulator(), wide[:, first : first + width], -LIMIT, LIMIT)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("bug", ["UNMASKED_TAIL", "NAN"])
def test_planted_bugs_are_found(bug: str) -> None:
    wide = spoiled(random(7, 40, dtype=BF16))
    expected = wide.clone()
    expected[:, :17] = clamped(wide[:, :17])
    clip(Emulator(bugs=(bug,)), wide[:, :17], -LIMIT, LIMIT)
    assert not torch.equal(wide.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_rows_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    stride = 2**31 + 8
    try:
        memory = cpu.zeros(2 * stride + 8, BF16)
    except OSError:
        pytest.skip("no address space of 8 GiB")
    memory[-8:] = 2.0
    clip(Emulator(bugs=bugs, only_block=2), memory.as_strided((3, 8), (stride, 1)), -1.0, 1.0)
    assert (memory[-8:] == 1.0).all() == (not bugs)


def test_what_would_be_misread_is_refused_and_nothing_is_no_launch() -> None:
    for bad, limit in ((torch.ones(8, 7, dtype=BF16).T, 1.0), (torch.ones(7, 8, dtype=BF16), 0.0)):
        with pytest.raises(AssertionError):
            clip(Emulator(), bad, -limit, limit)
    emulator = Emulator()
    assert clip(emulator, torch.ones(0, 8, dtype=BF16), -1.0, 1.0).shape == (0, 8)
    assert not emulator.launches
