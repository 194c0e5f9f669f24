"""The quality card of a model that embeds or ranks: both models read the same passages or pairs, one model in memory at a time.

Pooling, and what a vector goes through behind it, are of each model's own files, as they are when it is used.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.config import DTypeName
from nanovllm_cli.errors import UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.logits import MeasuredModel
from nanovllm_cli.quantization.passages import DOCUMENTS, Reading
from nanovllm_cli.quantization.vector_quality import ScoreQuality, VectorQuality, score_quality, vector_quality
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.further import read_further
from nanovllm_cli.weights.pooling import embedding_of, use_of


def measure_vectors(
    original: Checkpoint,
    other: Checkpoint,
    reading: Reading,
    progress: LoadProgress,
    *,
    dtype: DTypeName = "auto",
    threads: int | None = None,
) -> VectorQuality | ScoreQuality:
    """dtype: of both; auto is the original's own. Raises what loading raises, DoesNotFitError, and UsageError for models whose
    vectors can't be compared."""
    before, dtype = _vectors(original, reading, progress, "reading the text", dtype, threads)
    after, _ = _vectors(other, reading, progress, "comparing", dtype, threads)
    if before.shape != after.shape:
        raise UsageError(
            f"one model makes {before.shape[1]} numbers of a text and the other {after.shape[1]}", "name two forms of one model"
        )
    scoring = reading.scoring
    if scoring is None:
        return vector_quality(before, after, reading.num_tokens)
    margins = [np.array([scoring.margin(row) for row in rows.tolist()]).reshape(-1, DOCUMENTS) for rows in (before, after)]
    return score_quality(margins[0], margins[1], scoring.of_margin, reading.num_tokens)


def _vectors(
    checkpoint: Checkpoint, reading: Reading, progress: LoadProgress, stage: str, dtype: DTypeName, threads: int | None
) -> tuple[torch.Tensor, DTypeName]:
    """[texts, width] float64: what each text's pooled vector becomes; and what was computed in. The model's memory is free again
    when this is left."""
    model = MeasuredModel(checkpoint, max(map(len, reading.ids)), dtype=dtype, threads=threads, progress=progress)
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
