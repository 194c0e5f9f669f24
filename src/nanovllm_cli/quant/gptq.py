"""GPTQ: columns of a weight are rounded one after another, and each one's error is made up for by those that come after.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers". With the Hessian H of
the layer's inputs and U the upper triangular factor of its inverse, H^-1 = U^T U, rounding column j of W by e_j costs
(e_j / U_jj)^2 and moves the columns k > j by -(e_j / U_jj) U_jk. The algorithm chooses codes; which numbers they stand for is
the format's. Columns that see most go first; groups lie as they do in the weight, with the scales that have the least error.

Legend: N rows of the weight (outputs), K columns (inputs), G groups. Inside, columns lie contiguous: [K, N], [G, N].
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.quant.format import E4M3_MAX, SCALE_TYPES, Fp8, Integer
from nanovllm_cli.quant.rows import Fp8Rows, IntegerRows
from nanovllm_cli.quant.statistics import output_error

BLOCK = 128
"""Columns that are rounded before what lies behind them is updated."""
DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to all of it; ten times as much until it has a factor."""
MAX_ATTEMPTS = 8
SHARES = tuple(1.0 - 0.02 * i for i in range(21))
"""Of the scale that reaches a group's largest weight: what the search for a better one tries."""


def quantize_gptq(weight: torch.Tensor, hessian: torch.Tensor, form: Integer | Fp8) -> IntegerRows | Fp8Rows:
    """weight [N, K] in the numbers of `form` that change its outputs least, for inputs with `hessian` [K, K].

    Several weights with the same inputs may come as one. Deterministic. No row is worse than rounded to nearest.
    CheckpointError if the Hessian isn't finite, UnsupportedError if the format can't have such rows.
    """
    form.check_width(weight.shape[1])
    weight = weight.float()
    columns = weight.T.contiguous()
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order])
    importance = torch.empty(len(order)).index_copy_(0, order, factor.diagonal() ** -2)
    grid = _Fp8Grid(form, columns) if isinstance(form, Fp8) else _IntegerGrid(form, columns, importance)
    codes = torch.empty(columns.shape, dtype=torch.uint8)
    codes[order] = _round_columns(columns[order], order.tolist(), factor, grid)
    return _better_rows(grid.rows(codes.T.contiguous()), weight, hessian, form)


def _better_rows(
    rows: IntegerRows | Fp8Rows, weight: torch.Tensor, hessian: torch.Tensor, form: Integer | Fp8
) -> IntegerRows | Fp8Rows:
    """Each row as it is, or rounded to nearest where that gives a smaller error."""
    nearest = form.quantize(weight)
    errors = [output_error(form.dequantize(each) - weight, hessian) for each in (rows, nearest)]
    worse = (errors[0] > errors[1])[:, None]
    fields = {
        name: torch.where(worse, getattr(nearest, name), value) for name, value in rows._asdict().items() if value is not None
    }
    return rows._replace(**fields)


class _Grid(Protocol):
    """The numbers that a weight's columns are rounded to."""

    def round(self, column: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [N] and what they stand for, of the weight's column, whose values [N] are now these."""

    def rows(self, codes: torch.Tensor) -> IntegerRows | Fp8Rows:
        """codes [N, K] with their scales."""


def _round_columns(columns: torch.Tensor, order: list[int], factor: torch.Tensor, grid: _Grid) -> torch.Tensor:
    """Codes [K, N]. columns [K, N], in the order of rounding, are overwritten. Errors reach the rest of a block at once, and what
    lies behind it together, by a matmul."""
    width, n = columns.shape
    codes = torch.empty(width, n, dtype=torch.uint8)
    for first in range(0, width, BLOCK):
        end = min(first + BLOCK, width)
        errors = torch.empty(end - first, n)
        for j in range(first, end):
            codes[j], values = grid.round(order[j], columns[j])
            error = torch.sub(columns[j], values, out=errors[j - first]).div_(factor[j, j])
            columns[j + 1 : end].addr_(factor[j, j + 1 : end], error, alpha=-1)
        columns[end:].addmm_(factor[first:end, end:].T, errors, alpha=-1)
    return codes


class _IntegerGrid:
    """Scales and zero points [G, N] of a weight's groups. importance [K]: what an error of a column costs in the end."""

    def __init__(self, form: Integer, columns: torch.Tensor, importance: torch.Tensor) -> None:
        self.form = form
        self.group = form.group or len(columns)
        groups = zip(torch.split(columns, self.group), torch.split(importance, self.group), strict=True)
        self.scales, self.zeros = map(torch.stack, zip(*(_fit(form, *group) for group in groups), strict=True))

    def round(self, column: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = column // self.group
        codes = _codes(self.form, values, self.scales[g], self.zeros[g])
        return codes, (codes - self.zeros[g]) * self.scales[g]

    def rows(self, codes: torch.Tensor) -> IntegerRows:
        scales = self.scales.T.to(SCALE_TYPES[self.form.scales]).contiguous()
        return IntegerRows(codes, scales, self.zeros.T.to(torch.uint8).contiguous() if self.form.zeros else None)


class _Fp8Grid:
    """Scales [G, N] are those of the largest weights: a float's relative error hardly depends on its scale."""

    def __init__(self, form: Fp8, columns: torch.Tensor) -> None:
        self.width = form.block or len(columns)
        self.scales = form.quantize(columns.T).scales.T.contiguous()

    def round(self, column: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.scales[column // self.width]
        codes = (values / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), codes.float() * scales

    def rows(self, codes: torch.Tensor) -> Fp8Rows:
        return Fp8Rows(codes, self.scales.T.contiguous())


def _codes(form: Integer, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    least = 1 if form.bits == 8 and not form.zeros else 0
    return (values / scales).round_().add_(zeros).clamp_(least, form.most)


def _fit(form: Integer, columns: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N] of a group of columns [c, N], as they will be kept: the ones that round with the least squared
    error, where each column's counts by its importance [c]."""
    low, high = columns.amin(0).clamp_(max=0), columns.amax(0).clamp_(min=0)
    reach = (high - low) / form.most if form.zeros else torch.maximum(-low, high) / (127 if form.bits == 8 else form.most / 2)
    best = [torch.full_like(low, math.inf), reach, reach]
    for share in SHARES:
        scales = (reach * share).to(SCALE_TYPES[form.scales]).float()
        scales.masked_fill_(scales == 0, 1.0)
        zeros = (-low * share / scales).round_().clamp_(0, form.most) if form.zeros else torch.full_like(low, form.middle)
        values = (_codes(form, columns, scales, zeros) - zeros) * scales
        error = importance @ (values - columns).square_()
        better = error < best[0]
        best = [torch.where(better, new, old) for new, old in zip((error, scales, zeros), best, strict=True)]
    return best[1], best[2]


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """U of H^-1 = U^T U, of the damped Hessian. With J the reversal of columns and J H J = L L^T, U is (J L J)^-1."""
    diagonal = hessian.diagonal()
    if not torch.isfinite(diagonal).all():
        raise CheckpointError(
            "calibration gave activations that are NaN or infinite",
            "the model's weights are damaged, or the texts are not for it; round to nearest needs no texts",
        )
    mean, damping = float(diagonal.mean()) or 1.0, DAMPING
    for _ in range(MAX_ATTEMPTS):
        damped = hessian.clone()
        # A column that saw nothing has no error to make up for; it is rounded to nearest.
        damped.diagonal().add_(damping * mean).masked_fill_(diagonal <= 0, mean)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            upper = lower.flip(0, 1)
            factor: torch.Tensor = torch.linalg.solve_triangular(upper, torch.eye(len(upper)), upper=True)
            return factor
        damping *= 10
    raise CheckpointError("the Hessian of a layer's inputs has no inverse", "give other texts, or round to nearest")
