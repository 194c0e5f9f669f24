"""The statistics of a quality card, against numpy in float64 on random logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanovllm_cli.quantization.quality import Comparison


def compared(p: np.ndarray, q: np.ndarray, targets: np.ndarray, pieces: int = 1) -> Comparison:
    comparison = Comparison()
    for part in np.array_split(np.arange(len(targets)), pieces):
        comparison.add(torch.from_numpy(p[part]), torch.from_numpy(q[part]), torch.from_numpy(targets[part]))
    return comparison


def test_every_statistic_is_numpys() -> None:
    rng = np.random.default_rng(7)
    p = (rng.normal(size=(101, 37)) * 4).astype(np.float32)
    q = (p + rng.normal(size=p.shape)).astype(np.float32)
    targets = rng.integers(0, 37, 101)
    quality = compared(p, q, targets, pieces=3).quality()

    def probabilities(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits.astype(np.float64))
        return weights / weights.sum(1, keepdims=True)

    a, b = probabilities(p), probabilities(q)
    kl = (a * np.log(a / b)).sum(1)
    assert quality.tokens == 101
    assert quality.kl_mean == pytest.approx(kl.mean(), rel=1e-10)
    assert quality.kl_error == pytest.approx(kl.std(ddof=1) / math.sqrt(101), rel=1e-10)
    assert quality.kl_median == pytest.approx(np.sort(kl)[50], rel=1e-10)
    assert quality.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-10)
    assert quality.kl_max == pytest.approx(kl.max(), rel=1e-10)
    assert quality.same_top == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    for perplexity, probability in ((quality.before, a), (quality.after, b)):
        nll = -np.log(probability[np.arange(101), targets])
        assert perplexity.value == pytest.approx(math.exp(nll.mean()), rel=1e-10)
        assert perplexity.error == pytest.approx(math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(101), rel=1e-10)


def test_a_model_compared_with_itself_has_lost_nothing() -> None:
    logits = np.random.default_rng(1).normal(size=(40, 1000)).astype(np.float32) * 30
    quality = compared(logits, logits, np.zeros(40, np.int64)).quality()
    assert (quality.kl_mean, quality.kl_max, quality.same_top) == (0.0, 0.0, 1.0)
    assert quality.before == quality.after


def test_logits_shifted_by_a_constant_are_the_same_distribution() -> None:
    logits = np.random.default_rng(2).normal(size=(20, 50)).astype(np.float32)
    quality = compared(logits, logits + 1000, np.zeros(20, np.int64)).quality()
    assert quality.kl_max < 1e-6


def test_extreme_logits_give_numbers() -> None:
    p = np.full((4, 8), -1e30, np.float32)
    p[:, 0] = 1e30
    quality = compared(p, -p, np.ones(4, np.int64)).quality()
    assert quality.same_top == 0.0
    assert not math.isnan(quality.kl_mean)
    assert math.isfinite(quality.before.value)
