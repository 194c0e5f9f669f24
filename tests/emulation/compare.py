"""Inputs for kernels, and what counts as equal."""

from __future__ import annotations

import torch

GENERATOR = torch.Generator().manual_seed(3)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, others at each call."""
    return (torch.randn(*shape, generator=GENERATOR) * scale).to(dtype)


def gains(width: int, dtype: torch.dtype, offset: float, values: torch.Tensor) -> torch.Tensor:
    """Random ones [width], none of which brings a value * (offset + gain) so near to the middle of two numbers of dtype that what
    a GPU's rsqrt is off by, some 2^-22, could send it to the other."""

    def near(factors: torch.Tensor) -> torch.Tensor:
        exact = values.double()[:, None] * factors
        return ((exact * (1 + 2.0**-20)).to(dtype) != (exact * (1 - 2.0**-20)).to(dtype)).any(0)

    found = random(width, dtype=dtype)
    while (again := near(offset + found.double())).any():
        found = torch.where(again, random(width, dtype=dtype), found)
    return found


def behind_nan(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The same rows as columns of a wider tensor."""
    return torch.cat([torch.full((len(rows), count), torch.nan, dtype=rows.dtype), rows], 1)[:, count:]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||, in float64. NaN anywhere is NaN."""
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def close_to_rounding(got: torch.Tensor, expected: torch.Tensor, sums: float = 1e-5) -> None:
    """Every element is within one rounding of its own type from `expected` (float64), and `sums` of the largest element."""
    steps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0, torch.float8_e4m3fn: 2.0**-4}
    smallest = {torch.bfloat16: 1e-38, torch.float16: 2.0**-25, torch.float32: 0.0, torch.float8_e4m3fn: 2.0**-10}
    allowed = expected.abs() * steps[got.dtype] + smallest[got.dtype] + sums * expected.abs().max()
    wrong = ~((got.double() - expected).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0].tolist()}"
