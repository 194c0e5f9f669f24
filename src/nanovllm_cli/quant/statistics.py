"""What calibration knows about the inputs of a linear layer, and what an error of its weights costs there.

Legend: T tokens seen, K columns of the weight (inputs), S rows of the sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class InputStatistics(NamedTuple):
    """Of the inputs x [T, K] that a linear layer saw. hessian [K, K] float32: x.T @ x / T, of which the squared error of the
    outputs has twice as its second derivative. mean_abs [K] float32: mean |x|. sample [S, K] float32: some rows of x, evenly
    spread over them."""

    hessian: torch.Tensor
    mean_abs: torch.Tensor
    sample: torch.Tensor


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Mean squared error [n] of each output when its weights are off by `difference` [n, K]: the diagonal of D H D^T."""
    return (difference @ hessian).mul_(difference).sum(-1)


def mean_output_error(difference: torch.Tensor, seen: InputStatistics) -> float:
    """Mean squared error of a token's outputs, all of them together, when the weight is off by `difference` [n, K]. By the
    Hessian, or from the sample where that has fewer rows than the Hessian."""
    if len(seen.sample) < len(seen.hessian):
        return float((seen.sample @ difference.T).square_().sum()) / len(seen.sample)
    return float(output_error(difference, seen.hessian).sum())
