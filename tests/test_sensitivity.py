"""Formats under an average size: against trying everything, and against errors worked out in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import UsageError
from nanovllm_cli.quant.format import Format, Integer
from nanovllm_cli.quant.sensitivity import Candidate, allocate, candidates
from nanovllm_cli.quant.statistics import InputStatistics

FORMS: list[Format] = [Integer(2, 32), Integer(3, 32), Integer(4, 32), Integer(8, 0)]


def random_choices(seed: int, weights: int = 5) -> dict[str, list[Candidate]]:
    random = np.random.default_rng(seed)
    choices = {}
    for i in range(weights):
        numbers = int(random.integers(1, 20)) * 1000
        scale = float(random.lognormal(0, 1.5))
        choices[f"w{i}"] = [
            Candidate(form, numbers * bits, scale * float(random.uniform(0.5, 2)) * 4.0**-bits)
            for form, bits in zip(FORMS, (2.5, 3.5, 4.5, 8.1), strict=True)
        ]
        random.shuffle(choices[f"w{i}"])  # type: ignore[arg-type]
    return choices


def total(choices: dict[str, list[Candidate]], chosen: dict[str, Format]) -> tuple[float, float]:
    """Bits, error."""
    picked = [next(c for c in found if c.form == chosen[name]) for name, found in choices.items()]
    return sum(each.num_bits for each in picked), sum(each.error for each in picked)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_of_the_same_size_is_better(seed: int) -> None:
    """Where the greedy choice stands on the hull, no choice of its size or less has a smaller error: tried, all of them."""
    choices = random_choices(seed)
    everything = [
        (sum(each.num_bits for each in picked), sum(each.error for each in picked))
        for picked in itertools.product(*choices.values())
    ]
    smallest, largest = min(bits for bits, _ in everything), max(bits for bits, _ in everything)
    first_step = max(error for _, error in everything)
    for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        budget = smallest + share * (largest - smallest)
        bits, error = total(choices, allocate(choices, budget))
        best = min(found for size, found in everything if size <= budget)
        assert bits <= budget
        assert best <= error <= best + 0.25 * (first_step - best)
    # what the multiplier finds is optimal for the size it has
    exact = 0
    for budget in np.linspace(smallest, largest, 40):
        bits, error = total(choices, allocate(choices, float(budget)))
        exact += error <= min(found for size, found in everything if size <= bits) * (1 + 1e-9)
    assert exact >= 20


def test_equal_weights_are_taken_in_order_whatever_order_they_come_in() -> None:
    same = random_choices(0, 1)["w0"]
    names = ["b", "a", "d", "c"]
    room = 4 * min(c.num_bits for c in same) * 1.25
    first = allocate(dict.fromkeys(names, same), room)
    assert first == allocate(dict.fromkeys(sorted(names), same), room)
    assert len(set(first.values())) == 2


def test_a_small_step_does_not_hide_the_large_one_behind_it() -> None:
    """By hand: 20 bits more for "a" are worth 1.0, 0.05 a bit, though the first 10 are worth 0.01 a bit; 15 for "b", 0.033."""
    a = [Candidate(FORMS[i], bits, error) for i, (bits, error) in enumerate(((10.0, 1.0), (20.0, 0.9), (30.0, 0.0)))]
    b = [Candidate(FORMS[i], bits, error) for i, (bits, error) in enumerate(((10.0, 1.0), (25.0, 0.5)))]
    wanted = {54.9: (2, 0), 40.0: (2, 0), 39.9: (0, 1), 35.0: (0, 1), 34.9: (0, 0), 55.0: (2, 1)}
    for room, (for_a, for_b) in wanted.items():
        assert allocate({"a": a, "b": b}, room) == {"a": FORMS[for_a], "b": FORMS[for_b]}, room


def test_a_format_that_is_larger_and_worse_is_never_chosen() -> None:
    good, bad = Candidate(FORMS[2], 400.0, 0.1), Candidate(FORMS[3], 800.0, 0.2)
    assert allocate({"w": [bad, good]}, 1e9) == {"w": good.form}


def test_too_little_room_is_refused() -> None:
    choices = random_choices(1)
    least = sum(min(each.num_bits for each in found) for found in choices.values())
    assert len(allocate(choices, least)) == 5
    with pytest.raises(UsageError, match="smallest formats"):
        allocate(choices, least - 1)


def test_errors_are_those_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(700, 64, generator=generator) * torch.rand(64, generator=generator) * 3
    weight = torch.randn(9, 64, generator=generator)
    exact = InputStatistics(inputs.T @ inputs / 700, inputs.abs().mean(0), inputs[::2])
    sampled = exact._replace(sample=inputs[::23])
    x, w = inputs.double().numpy(), weight.double().numpy()
    for form, by_hessian, by_sample in zip(
        FORMS, candidates(weight, exact, FORMS), candidates(weight, sampled, FORMS), strict=True
    ):
        off = form.dequantize(form.quantize(weight)).double().numpy() - w
        expected = np.square(x @ off.T).sum() / np.square(x @ w.T).sum()
        assert by_hessian.error == pytest.approx(expected, rel=1e-4)
        assert by_sample.error == pytest.approx(expected, rel=0.5)
        assert by_hessian.num_bits == pytest.approx(8 * 9 * form.row_bytes(64))
