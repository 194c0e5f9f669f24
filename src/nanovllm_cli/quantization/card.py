"""The quality card: the quantized model against the original, on text that it was not calibrated with.

    measure                     both read the same tokens; see quality.py for the numbers
    measure_vectors             of models that embed or rank both read the same passages or pairs; see vector_quality.py
    as_json, as_markdown        what is kept beside the weights

One model is in memory at a time: of the original only the hidden rows behind its last norm stay, [T, hidden], and its head, which
makes the same logits of them again when the other model has read the text. Pooling, and what a vector goes through behind it, are
of each model's own files, as they are when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from nanovllm_cli.config import DTypeName, EngineConfig
from nanovllm_cli.errors import DoesNotFitError, UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.logits import ON_CPU, MeasuredModel
from nanovllm_cli.quantization.passages import DOCUMENTS, Reading
from nanovllm_cli.quantization.plan import Plan
from nanovllm_cli.quantization.quality import Comparison, Quality
from nanovllm_cli.quantization.texts import WINDOW, NamedText, windows
from nanovllm_cli.quantization.vector_quality import (
    AnyQuality,
    Pooled,
    class_quality,
    score_quality,
    vector_quality,
)
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.further import read_further
from nanovllm_cli.weights.pooling import embedding_of, use_of

LOGIT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Card:
    """original: what the user called the model. algorithm: how numbers were chosen. text: what it was measured on. window:
    tokens of it that were read at once, at most."""

    original: str
    plan: Plan
    algorithm: str
    text: str
    quality: AnyQuality
    window: int

    def as_json(self) -> dict[str, Any]:
        return {
            "original": self.original,
            "format": self.plan.to,
            "algorithm": self.algorithm,
            "bits_a_weight": round(self.plan.bits_a_weight, 4),
            "bytes_before": self.plan.bytes_before,
            "bytes_after": self.plan.bytes_after,
            "text": self.text,
            "quality": asdict(self.quality),
        }

    def as_markdown(self) -> str:
        """A section of a model card."""
        quality, plan = self.quality, self.plan
        cut = f", in windows of {self.window}" if isinstance(quality, Quality) else ""
        table = "\n".join(f"| {name} | {value} |" for name, value in quality.figures())
        return (
            f"## Quantized with nanovllm\n\n"
            f"{self.original} in {plan.to}, by {self.algorithm}: {plan.bits_a_weight:.2f} bits a weight, "
            f"{plan.bytes_after / 1e6:.1f} MB instead of {plan.bytes_before / 1e6:.1f} MB.\n\n"
            f"| against the original | |\n|---|---|\n{table}\n\n"
            f"Measured on {quality.extent(self.text)}{cut}.\n"
        )


def windows_of(
    tokenizer: Tokenizer, text: NamedText, num_tokens: int, vocab_size: int, *, size: int = WINDOW
) -> list[list[int]]:
    """The text's first tokens, num_tokens at most, in pieces of at most `size`. UsageError for a text that is too short to
    measure anything."""
    found: list[list[int]] = []
    left = num_tokens
    for window in windows(tokenizer, text, vocab_size, size=size):
        if left < 2:
            break
        found.append(window[:left])
        left -= len(window)
    if sum(len(window) - 1 for window in found) < 2:
        raise UsageError(f"{text.name} is too short for a quality card", "give a longer --verify-text, or --no-verify")
    return found


def measure(
    original: Checkpoint,
    quantized: Checkpoint,
    windows: Sequence[Sequence[int]],
    progress: LoadProgress,
    *,
    first: int = 0,
    config: EngineConfig = ON_CPU,
) -> Quality:
    """first: the token of a window behind which predictions begin to be compared. config: of both; the dtype auto is the
    original's own. Raises what loading raises, and DoesNotFitError."""
    longest = max(map(len, windows))
    before = MeasuredModel(original, longest, config, progress=progress)
    total = sum(map(len, windows))
    kept_bytes = (total - len(windows) * (1 + first)) * before.model.spec.hidden_size * before.dtype.itemsize
    if kept_bytes > (free := before.free_bytes()):
        raise DoesNotFitError(
            f"what is kept of {total:,} tokens takes {kept_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free",
            "take less text",
        )
    progress.stage("reading the text", total, "tokens")
    kept = []
    for part in parts(windows, before.at_once):
        kept.append(before.scored(part, first))
        progress.advance(sum(map(len, part)))
    before.forget_layers()
    after = MeasuredModel(quantized, longest, replace(config, dtype=before.dtype_name), progress=progress)
    comparison = Comparison()
    progress.stage("comparing", total, "tokens")
    for part, wanted in zip(parts(windows, before.at_once), kept, strict=True):
        found = after.scored(part, first)
        targets = torch.tensor([token for window in part for token in window[first + 1 :]])
        for at in range(0, len(targets), LOGIT_ROWS):
            rows = slice(at, at + LOGIT_ROWS)
            comparison.add(before.logits(wanted[rows]), after.logits(found[rows]), targets[rows])
        progress.advance(sum(map(len, part)))
    progress.done()
    return comparison.quality()


def parts(windows: Sequence[Sequence[int]], at_once: int) -> Iterator[Sequence[Sequence[int]]]:
    """So many at a time."""
    for i in range(0, len(windows), at_once):
        yield windows[i : i + at_once]


def measure_vectors(
    original: Checkpoint,
    other: Checkpoint,
    reading: Reading,
    progress: LoadProgress,
    config: EngineConfig = ON_CPU,
) -> Pooled:
    """config: of both; the dtype auto is the original's own. Raises what loading raises, DoesNotFitError, and UsageError for
    models whose vectors can't be compared."""
    before, dtype = _vectors(original, reading, progress, "reading the text", config)
    after, _ = _vectors(other, reading, progress, "comparing", replace(config, dtype=dtype))
    if before.shape != after.shape:
        raise UsageError(
            f"one model makes {before.shape[1]} numbers of a text and the other {after.shape[1]}", "name two forms of one model"
        )
    scoring = reading.scoring
    if scoring is None and reading.classes is not None:
        classes = reading.classes
        return class_quality(before.numpy(), after.numpy(), lambda numbers: classes.of(numbers).probs, reading.num_tokens)
    if scoring is None:
        return vector_quality(before, after, reading.num_tokens)
    margins = [np.array([scoring.margin(row) for row in rows.tolist()]).reshape(-1, DOCUMENTS) for rows in (before, after)]
    return score_quality(margins[0], margins[1], scoring.of_margin, reading.num_tokens)


def _vectors(
    checkpoint: Checkpoint, reading: Reading, progress: LoadProgress, stage: str, config: EngineConfig
) -> tuple[torch.Tensor, DTypeName]:
    """[texts, width] float64: what each text's pooled vector becomes; and what was computed in. The model's memory is free again
    when this is left."""
    model = MeasuredModel(checkpoint, max(map(len, reading.ids)), config, progress=progress)
    embedding = use_of(embedding_of(checkpoint), model.model.spec)
    further = read_further(checkpoint, embedding.layers)
    found = []
    progress.stage(stage, reading.num_tokens, "tokens")
    for first in range(0, len(reading.ids), model.at_once):
        part = slice(first, first + model.at_once)
        texts = reading.ids[part]
        rows = model.pooled(texts, reading.seconds[part], embedding.pooling or "mean")
        found.append(rows if further is None else torch.tensor([further(row) for row in rows.tolist()], dtype=torch.float64))
        progress.advance(sum(map(len, texts)))
    progress.done()
    return torch.cat(found), model.dtype_name
