"""What quantization did to vectors of texts, to scores of pairs and of labels, as numbers: the quantized model's against the
original's.

    cosine          of a passage's two vectors, u and v of length 1, in float64: 1 - |u - v|² / 2, which is u·v
    nearest         of each passage, the others by the cosine in one model, the earlier first among equals: what a search finds
    before sigmoid  differences of what a reranker's head gives; where it says yes or no, of the logits of the two
    best            of each query the document with the largest score, the first among equals
    label           of each text that of the largest number, the first among equals

Not covered: where vectors come from (`card.py`), which texts (`passages.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm_cli.quantization.quality import Quality

NEAREST = 10
ROWS_AT_ONCE = 256
"""Passages whose cosines to all others are in memory together."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class VectorQuality:
    """passages, tokens: what was compared. cosine_*: of a passage's two vectors. same_nearest: share of passages whose nearest
    other one is the same, 0 to 1. nearest: how many of a passage's nearest are looked at; nearest_kept: the share of them that
    are among them in the other model, too, on average, 0 to 1."""

    passages: int
    tokens: int
    cosine_mean: float
    cosine_p1: float
    cosine_min: float
    same_nearest: float
    nearest: int
    nearest_kept: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.cosine_mean)

    @property
    def loss(self) -> tuple[str, float]:
        """Its name, and what is 0 where nothing was lost."""
        return "1 minus the mean cosine", 1 - self.cosine_mean

    def extent(self, text: str) -> str:
        """What was measured on, for people."""
        return f"{self.passages} passages of {text}, {self.tokens} tokens"

    def figures(self, before: str = "before", after: str = "after") -> list[tuple[str, str]]:
        """Names and values, for people."""
        return [
            ("cosine, mean", f"{self.cosine_mean:.5f}"),
            ("cosine, 1st percentile", f"{self.cosine_p1:.5f}"),
            ("cosine, smallest", f"{self.cosine_min:.5f}"),
            ("same nearest passage", f"{self.same_nearest:.2%}"),
            (f"kept of the {self.nearest} nearest", f"{self.nearest_kept:.2%}"),
        ]


@dataclass(frozen=True, slots=True)
class ScoreQuality:
    """queries; documents of each; tokens: what was compared. margin_*: differences before the sigmoid; score_*: of scores as they
    are given out; without signs. same_best: share of queries whose best document is the same, 0 to 1."""

    queries: int
    documents: int
    tokens: int
    margin_mean: float
    margin_max: float
    score_mean: float
    score_max: float
    same_best: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.margin_mean)

    @property
    def loss(self) -> tuple[str, float]:
        """Its name, and what is 0 where nothing was lost."""
        return "the mean difference of scores", self.score_mean

    def extent(self, text: str) -> str:
        """What was measured on, for people."""
        return f"{self.queries} queries with {self.documents} passages each, of {text}, {self.tokens} tokens"

    def figures(self, before: str = "before", after: str = "after") -> list[tuple[str, str]]:
        """Names and values, for people."""
        return [
            ("difference before the sigmoid, mean", f"{self.margin_mean:.5f}"),
            ("difference before the sigmoid, largest", f"{self.margin_max:.5f}"),
            ("difference of scores, mean", f"{self.score_mean:.5f}"),
            ("difference of scores, largest", f"{self.score_max:.5f}"),
            ("same best passage", f"{self.same_best:.2%}"),
        ]


@dataclass(frozen=True, slots=True)
class ClassQuality:
    """texts, or tokens, where each has a label; labels; tokens: what was compared. number_*: differences of what the head gives;
    score_*: of scores as they are given out; without signs. same_label: share of texts whose likeliest label is the same, 0 to 1.
    """

    texts: int
    labels: int
    tokens: int
    number_mean: float
    number_max: float
    score_mean: float
    score_max: float
    same_label: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.number_mean)

    @property
    def loss(self) -> tuple[str, float]:
        """Its name, and what is 0 where nothing was lost."""
        return "the mean difference of scores", self.score_mean

    def extent(self, text: str) -> str:
        """What was measured on, for people."""
        if self.texts == self.tokens:
            return f"{self.labels} labels of each of {self.tokens} tokens of {text}"
        return f"{self.labels} labels of {self.texts} passages of {text}, {self.tokens} tokens"

    def figures(self, before: str = "before", after: str = "after") -> list[tuple[str, str]]:
        """Names and values, for people."""
        return [
            ("difference of the head's numbers, mean", f"{self.number_mean:.5f}"),
            ("difference of the head's numbers, largest", f"{self.number_max:.5f}"),
            ("difference of scores, mean", f"{self.score_mean:.5f}"),
            ("difference of scores, largest", f"{self.score_max:.5f}"),
            ("same likeliest label", f"{self.same_label:.2%}"),
        ]


Pooled = VectorQuality | ScoreQuality | ClassQuality
AnyQuality = Quality | Pooled


def vector_quality(before: torch.Tensor, after: torch.Tensor, tokens: int) -> VectorQuality:
    """Vectors [N, width] of the same passages, three at least, float64; neither need be of length 1."""
    u, v = (_unit(vectors.numpy()) for vectors in (before, after))
    cosines = 1 - np.square(u - v).sum(1) / 2
    count = min(NEAREST, (len(u) - 1) // 2)  # of fewer passages ten would be all of them
    one, other = _nearest(u, count), _nearest(v, count)
    kept = (one[:, :, None] == other[:, None, :]).any(2)
    return VectorQuality(
        passages=len(u),
        tokens=tokens,
        cosine_mean=float(cosines.mean()),
        cosine_p1=float(np.quantile(cosines, 0.01)),
        cosine_min=float(cosines.min()),
        same_nearest=float((one[:, 0] == other[:, 0]).mean()),
        nearest=count,
        nearest_kept=float(kept.mean()),
    )


def score_quality(before: Numbers, after: Numbers, score: Callable[[float], float], tokens: int) -> ScoreQuality:
    """Numbers before the sigmoid [queries, documents] of the same pairs. score: what is given out for one."""
    margins = np.abs(before - after)
    scores = np.abs(np.vectorize(score)(before) - np.vectorize(score)(after))
    return ScoreQuality(
        queries=before.shape[0],
        documents=before.shape[1],
        tokens=tokens,
        margin_mean=float(margins.mean()),
        margin_max=float(margins.max()),
        score_mean=float(scores.mean()),
        score_max=float(scores.max()),
        same_best=float((before.argmax(1) == after.argmax(1)).mean()),
    )


def class_quality(
    before: Numbers, after: Numbers, shares: Callable[[Sequence[float]], Sequence[float]], tokens: int
) -> ClassQuality:
    """Numbers of labels [texts, labels] of the same texts. shares: the scores that are given out for those of a text."""
    numbers = np.abs(before - after)
    scores = np.abs(np.array([shares(row) for row in before.tolist()]) - np.array([shares(row) for row in after.tolist()]))
    return ClassQuality(
        texts=before.shape[0],
        labels=before.shape[1],
        tokens=tokens,
        number_mean=float(numbers.mean()),
        number_max=float(numbers.max()),
        score_mean=float(scores.mean()),
        score_max=float(scores.max()),
        same_label=float((before.argmax(1) == after.argmax(1)).mean()),
    )


def _unit(vectors: Numbers) -> Numbers:
    """Of length 1; a vector of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def _nearest(vectors: Numbers, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[N, count]: the places of each one's nearest others, the nearest first."""
    found = []
    for first in range(0, len(vectors), ROWS_AT_ONCE):
        cosines = vectors[first : first + ROWS_AT_ONCE] @ vectors.T
        own = np.arange(len(cosines))
        cosines[own, first + own] = -np.inf
        found.append(np.argsort(-cosines, axis=1, kind="stable")[:, :count])
    return np.concatenate(found)
