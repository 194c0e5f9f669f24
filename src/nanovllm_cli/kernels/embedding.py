"""Rows of the embedding on a GPU (embedding.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Arg, Kernel, Launcher, check, type_name, widest

THREADS = 256
GROUP = 128
"""Columns of a scale, where a row has several."""


def embedding(
    launcher: Launcher, ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [T, width] of weight [V, width], times scale, rounded once; see `reference.embedding`.

    ids [T] int64; with tokens [n] int64 they are indices into it, and it has the ids. Outside its range, either is a row of
    zeros: -1 is padding.
    """
    return _rows(launcher, ids, tokens, weight, None, scale, weight.dtype)


def scaled_rows(
    launcher: Launcher,
    ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ids [T] int64 of codes [V, width] int8 or e4m3 * scales [G, V] fp32: [T, width] in dtype. G groups: whole rows, or
    128 columns each. tokens, and ids out of range: see `embedding`."""
    return _rows(launcher, ids, tokens, codes, scales, 1.0, dtype)


def id_args(launcher: Launcher, ids: torch.Tensor, tokens: torch.Tensor | None) -> tuple[Arg, ...]:
    """What row_by_id.cuh takes, for `embedding` and the like of other formats."""
    check(ids, launcher, torch.int64, ids.shape[0])
    if tokens is not None:
        check(tokens, launcher, torch.int64, tokens.shape[0])
    return ids, tokens, np.int64(0 if tokens is None else tokens.shape[0])


def _rows(
    launcher: Launcher,
    ids: torch.Tensor,
    tokens: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    count, (vocab_size, width) = ids.shape[0], weight.shape
    span, vector = width, widest(width, dtype)
    check(weight, launcher, weight.dtype, vocab_size, width)
    if scales is not None:
        groups = scales.shape[0]
        span = width if groups == 1 else GROUP
        assert -(-width // span) == groups, (width, groups)
        check(scales, launcher, torch.float32, groups, vocab_size)
    args = id_args(launcher, ids, tokens)
    out = torch.empty((count, width), dtype=dtype, device=weight.device)
    if out.numel():
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        args += (
            weight, scales, out, np.int64(vocab_size), np.int32(width), np.int32(span), np.float32(scale)
        )  # fmt: skip
        grid = (count, -(-width // (vector * threads)), 1)
        launcher.launch(variant(weight.dtype, dtype, vector), grid, (threads, 1, 1), args)
    return out


def variant(code: torch.dtype, dtype: torch.dtype, vector: int) -> Kernel:
    constants = (("CODE", type_name(code)), ("DTYPE", type_name(dtype)), ("VECTOR", vector))
    return Kernel("embedding", "embedding", constants)


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    types = (torch.bfloat16, torch.float16)
    plain = [variant(dtype, dtype, vector) for dtype in types for vector in (8, 1)]
    return plain + [variant(code, dtype, 8) for code in (torch.int8, torch.float8_e4m3fn) for dtype in types]
