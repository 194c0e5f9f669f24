"""xielu.cu, emulated: against the formula in float64, and what lies beside its numbers untouched."""

from __future__ import annotations

import math

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.curve_spec import XieluSpec
from nanovllm_cli.kernels.xielu import xielu

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
FACTORS = (0.8, 1.3, 0.5, -1e-6)
# Widths for 16-byte loads and for single elements alone: each other vector would be a compilation more.
SHAPES = [(1, 8), (3, 64), (2, 2056), (1, 1), (4, 17), (7, 301)]


def formula(x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
    x = x.double()
    below = negative * (torch.expm1(torch.minimum(x, torch.tensor(edge, dtype=torch.float64))) - x)
    return torch.where(x > 0, positive * x.square(), below) + slope * x


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_one_rounding_from_float64(dtype: torch.dtype, order: int) -> None:
    for tokens, width in SHAPES:
        x = random(tokens, width, dtype=dtype, scale=4.0)
        expected = formula(x, *FACTORS)
        assert xielu(Emulator(order), x, *FACTORS) is x
        close_to_rounding(x, expected)


def near_zero() -> torch.Tensor:
    return torch.tensor([[-60000.0, -100.0, -5.0, -1.0, -1e-3, -1e-5, -1e-6, -0.0, 0.0, 1e-6, 1e-3, 1.0, 5.0, 150.0, 2.0, 3.0]])


def test_far_from_zero_and_near_it() -> None:
    """An edge that numbers lie on either side of, and a NaN stays."""
    x = near_zero().to(BF16)
    expected = formula(x, 0.7, 2.0, 0.25, -0.5)
    close_to_rounding(xielu(Emulator(), x, 0.7, 2.0, 0.25, -0.5), expected)
    x[0, 3] = torch.nan
    assert xielu(Emulator(), x, *FACTORS).isnan().nonzero().tolist() == [[0, 3]]


def test_an_edge_for_all_is_found() -> None:
    x = near_zero().to(BF16)
    expected = formula(x, *FACTORS)
    with pytest.raises(AssertionError):
        close_to_rounding(xielu(Emulator(bugs=("EDGE",)), x, *FACTORS), expected)


def test_numbers_that_begin_on_no_boundary_of_a_load() -> None:
    memory = torch.ones(12, dtype=BF16)
    assert torch.equal(xielu(Emulator(), memory[1:9], *FACTORS), xielu(Emulator(), torch.ones(8, dtype=BF16), *FACTORS))
    assert memory[[0, 9]].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bugs", [(), ("UNMASKED_TAIL",)])
def test_it_goes_no_further_than_its_numbers(bugs: tuple[str, ...]) -> None:
    memory = torch.ones(301, dtype=BF16)
    xielu(Emulator(bugs=bugs), memory[:33], *FACTORS)
    assert (memory[33:] == 1).all() == (not bugs)
    assert memory[:33].tolist() == pytest.approx([1.3] * 33, rel=2**-8)


def test_what_would_be_misread_is_refused_and_nothing_is_no_launch() -> None:
    for bad in (torch.ones(8, 3, dtype=BF16).T, torch.ones(3, 16, dtype=BF16)[:, :8]):
        with pytest.raises(AssertionError):
            xielu(Emulator(), bad, *FACTORS)
    emulator = Emulator()
    assert xielu(emulator, torch.ones(0, 8, dtype=BF16), *FACTORS).shape == (0, 8)
    assert not emulator.launches


def test_learned_numbers_are_made_positive_as_the_paper_has_it() -> None:
    """By softplus, of large ones too."""
    positive, negative, slope, edge = XieluSpec(0.3, -40.0, 0.5, -1e-6).factors
    assert positive == pytest.approx(math.log(1 + math.exp(0.3)), rel=1e-12)
    assert negative == pytest.approx(0.5 + math.log1p(math.exp(-40.0)), rel=1e-12)
    assert (slope, edge) == (0.5, -1e-6)
    assert XieluSpec(1000.0, 0.0, 0.5, 0.0).factors[0] == 1000.0
