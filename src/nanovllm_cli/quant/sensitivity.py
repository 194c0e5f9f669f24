"""Which format each weight gets when their average size is given: by what a format costs each weight's outputs.

The loss of a model grows about linearly with the relative errors of its layers' outputs (Malinovskii et al. 2024, "Pushing the
Limits of Large Language Model Quantization via the Linearity Theorem"), so errors of weights add up. Sizes do too, and what is
best is found by Lagrange's multiplier: among all weights, the step to a larger format that lowers the error most for each bit
comes first (Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers").
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from nanovllm_cli.errors import UsageError
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.statistics import InputStatistics, mean_output_error


class Candidate(NamedTuple):
    """A format that a weight could have. num_bits: of the whole weight. error: what it costs the model, in a unit that all
    weights share."""

    form: Format
    num_bits: float
    error: float


def candidates(weight: torch.Tensor, seen: InputStatistics, formats: Sequence[Format]) -> list[Candidate]:
    """weight [n, K] rounded to nearest in each format that can hold its rows: the mean squared error of its outputs as a share of
    their mean square."""
    n, width = weight.shape
    size = mean_output_error(weight, seen) or 1.0
    found = []
    for form in formats:
        rounded = form.dequantize(form.quantize(weight))
        error = mean_output_error(rounded - weight, seen) / size
        found.append(Candidate(form, 8 * n * form.row_bytes(width), error))
    return found


def allocate(choices: Mapping[str, Sequence[Candidate]], num_bits: float) -> dict[str, Format]:
    """A format for each weight, of num_bits together at most, with little error. Deterministic.

    No choice of the same size or less is better by more than the first step that did not fit would have brought. UsageError if
    even the smallest formats are too large.
    """
    hulls = {name: _hull(candidates) for name, candidates in choices.items()}
    chosen = dict.fromkeys(hulls, 0)
    free = num_bits - sum(hull[0].num_bits for hull in hulls.values())
    if free < 0:
        raise UsageError(
            f"the smallest formats that are allowed take {num_bits - free:.4g} bits, and there is room for {num_bits:.4g}",
            "raise --target-bpw, or keep fewer weights from being quantized",
        )
    steps = [(-_gain(hull, 0), name) for name, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        hull, i = hulls[name], chosen[name]
        needed = hull[i + 1].num_bits - hull[i].num_bits
        if needed > free:
            continue
        free -= needed
        chosen[name] = i + 1
        if i + 2 < len(hull):
            heapq.heappush(steps, (-_gain(hull, i + 1), name))
    return {name: hulls[name][i].form for name, i in chosen.items()}


def _gain(hull: list[Candidate], i: int) -> float:
    """Error less for each bit more, from candidate i to the next."""
    return (hull[i].error - hull[i + 1].error) / (hull[i + 1].num_bits - hull[i].num_bits)


def _hull(found: Sequence[Candidate]) -> list[Candidate]:
    """The lower convex hull, by size: each is better than all smaller ones, and gains shrink from step to step."""
    hull: list[Candidate] = []
    for candidate in sorted(found, key=lambda each: (each.num_bits, each.error)):
        if hull and candidate.error >= hull[-1].error:
            continue
        hull.append(candidate)
        while len(hull) > 2 and _gain(hull, len(hull) - 3) <= _gain(hull, len(hull) - 2):
            del hull[-2]
    return hull
