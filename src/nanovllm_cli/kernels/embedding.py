"""Rows of the embedding on a GPU (embedding.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256


def embedding(
    launcher: Launcher, ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [T, width] of weight [V, width], times scale, rounded once; see `reference.embedding`.

    ids [T] int64; with tokens [n] int64 they are indices into it, and it has the ids. Outside its range, either is a row of
    zeros: -1 is padding.
    """
    count, (vocab_size, width) = ids.shape[0], weight.shape
    check(ids, launcher, torch.int64, count)
    check(weight, launcher, weight.dtype, vocab_size, width)
    if tokens is not None:
        check(tokens, launcher, torch.int64, tokens.shape[0])
    out = torch.empty((count, width), dtype=weight.dtype, device=weight.device)
    if out.numel():
        vector = widest(width, weight.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        num_tokens = 0 if tokens is None else tokens.shape[0]
        args = (
            ids, tokens, weight, out, np.int64(num_tokens), np.int64(vocab_size), np.int32(width), np.float32(scale)
        )  # fmt: skip
        launcher.launch(variant(weight.dtype, vector), (count, -(-width // (vector * threads)), 1), (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("embedding", "embedding", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
