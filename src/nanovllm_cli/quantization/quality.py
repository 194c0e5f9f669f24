"""What quantization did to a model, as numbers: its next-token distributions against the original's, row by row of logits.

For a row with distributions p (original) and q (quantized), both softmax of logits, in float64:

    KL          sum over the vocabulary of p (log p - log q), in nats
    same top-1  whether both have their largest logit at the same token; the lowest id among equals
    perplexity  exp of the mean of -log p(next token); its standard error by the delta method, perplexity * error of the mean

Not covered: where logits come from (`logits.py`), which text (`card.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ROWS_AT_ONCE = 16
"""Rows that are worked on in float64 together: with 150,000 words they take 20 MB an array."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}"

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value) and math.isfinite(self.error)


@dataclass(frozen=True, slots=True)
class Quality:
    """tokens: rows that were compared. kl_*: nats. same_top: share of rows, 0 to 1."""

    tokens: int
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    before: Perplexity
    after: Perplexity

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.kl_mean) and self.before.is_finite and self.after.is_finite

    @property
    def loss(self) -> tuple[str, float]:
        """Its name, and what is 0 where nothing was lost."""
        return "the mean KL divergence", self.kl_mean

    def extent(self, text: str) -> str:
        """What was measured on, for people."""
        return f"{self.tokens} tokens of {text}"

    def figures(self, before: str = "before", after: str = "after") -> list[tuple[str, str]]:
        """Names and values, for people. before, after: what the models are called."""
        return [
            ("KL divergence, mean", f"{self.kl_mean:.5f} ± {self.kl_error:.5f} nats"),
            ("KL divergence, median", f"{self.kl_median:.5f}"),
            ("KL divergence, 99th percentile", f"{self.kl_p99:.5f}"),
            ("KL divergence, largest", f"{self.kl_max:.5f}"),
            ("same most likely token", f"{self.same_top:.2%}"),
            (f"perplexity {before}", str(self.before)),
            (f"perplexity {after}", str(self.after)),
        ]


class Likelihood:
    """Collects rows of logits of one model, and what a text went on with."""

    def __init__(self) -> None:
        self._nll: list[torch.Tensor] = []
        self.tokens = 0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [R, V], and the token that follows each row, [R] int64. Exponentials are of float32, which a token's probability
        is as exact as; their sum, and all that follows, is of float64."""
        top = logits.amax(-1, keepdim=True)
        sums = (logits - top).exp_().sum(-1, dtype=torch.float64)
        chosen = (logits.gather(-1, targets.unsqueeze(-1)).double() - top.double()).squeeze(-1)
        self._nll.append(sums.log() - chosen)
        self.tokens += len(targets)

    def perplexity(self) -> Perplexity:
        """Of at least two rows."""
        return _perplexity(torch.cat(self._nll).numpy())


class Comparison:
    """Collects rows of logits of two models that read the same text."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []
        self._nll: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def add(self, original: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [R, V] of both, and the token that follows each row, [R] int64."""
        for first in range(0, targets.shape[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            next_ids = targets[rows].unsqueeze(-1)
            p = torch.log_softmax(original[rows].double(), -1)
            q = torch.log_softmax(quantized[rows].double(), -1)
            self._same.append(original[rows].argmax(-1) == quantized[rows].argmax(-1))
            self._nll[0].append(-p.gather(-1, next_ids).squeeze(-1))
            self._nll[1].append(-q.gather(-1, next_ids).squeeze(-1))
            self._kl.append((p.exp() * (p - q)).sum(-1))

    def quality(self) -> Quality:
        """Of at least two rows."""
        kl = torch.cat(self._kl).numpy()
        return Quality(
            tokens=len(kl),
            kl_mean=float(kl.mean()),
            kl_error=_error_of_mean(kl),
            kl_median=float(np.median(kl)),
            kl_p99=float(np.quantile(kl, 0.99)),
            kl_max=float(kl.max()),
            same_top=float(torch.cat(self._same).double().mean()),
            before=_perplexity(torch.cat(self._nll[0]).numpy()),
            after=_perplexity(torch.cat(self._nll[1]).numpy()),
        )


def _perplexity(nll: np.ndarray[Any, np.dtype[np.float64]]) -> Perplexity:
    value = math.exp(min(nll.mean(), 700.0))  # past that a float64 has no room
    return Perplexity(value, value * _error_of_mean(nll))


def _error_of_mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))
