"""Tables that stay in their files (`NGramSpec`): how they are divided there, and views of them that nothing is read of.

They are tens of GiB, of which a token takes a few rows: they are neither copied nor rounded, and what they hold is not looked
through while a model is loaded.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.kernels.ngrams import TABLE_DTYPES
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.state_spec import DeltaSpec, NGramSpec
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.safetensors import DTYPES
from nanovllm_cli.weights.tensor_names import names_of

COUNTS = "I32", "I64"
STAYS = "blocks.{i}.shards.{e}.weight"
"""Our names of tables that stay."""


def as_divided(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The same with such tables divided as a folder has them, where all parts are there."""
    if not any(isinstance(mixer, DeltaSpec) and mixer.ngrams is not None for mixer in spec.mixers):
        return spec
    pattern = re.escape(names_of(checkpoint)[STAYS]).replace(r"\{i\}", r"(\d{1,6})").replace(r"\{e\}", r"(\d{1,6})")
    counts: dict[int, dict[int, int]] = {}
    for name in checkpoint.names():
        if (found := re.fullmatch(pattern, name)) is not None and (shape := checkpoint.info(name).shape):
            counts.setdefault(int(found[1]), {})[int(found[2])] = shape[0]
    mixers = (
        replace(mixer, ngrams=_divided(mixer.ngrams, counts.get(i, {})))
        if isinstance(mixer, DeltaSpec) and mixer.ngrams is not None else mixer
        for i, mixer in enumerate(spec.mixers)
    )  # fmt: skip
    return spec.with_mixers(mixers)


def _divided(ngrams: NGramSpec, counts: dict[int, int]) -> NGramSpec:
    """counts: rows of parts, by number. What does not fit stays as it was, so that what is missing is told."""
    rows = tuple(counts[i] for i in range(len(counts))) if set(counts) == set(range(len(counts))) else ()
    fits = bool(rows) and 0 not in rows and sum(rows) == sum(ngrams.shards)
    return replace(ngrams, shards=rows) if fits else ngrams


def view_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The tensor as it lies in the mapped file. UnsupportedError for other numbers than the kernels read, CheckpointError where
    they do not lie at a multiple of their size."""
    info = checkpoint.info(name)
    dtype = DTYPES[info.dtype_name][1] if info.dtype_name in DTYPES else None
    if dtype is None or dtype not in TABLE_DTYPES:
        raise UnsupportedError(f"{checkpoint.path}: a table of n-grams in {info.dtype_name}", "known: BF16, F32")
    raw = checkpoint.raw(name)
    if raw.data_ptr() % dtype.itemsize:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} lies at an odd place in its file", DOWNLOAD_AGAIN)
    return raw.view(dtype).view(info.shape)


def counts_in(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of whole numbers; CheckpointError for one of others."""
    if (kind := checkpoint.info(name).dtype_name) not in COUNTS:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} holds {kind}, expected {' or '.join(COUNTS)}", DOWNLOAD_AGAIN)
    return checkpoint.tensor(name)
