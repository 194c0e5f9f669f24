"""Rows of an embedding whose weight is 8-bit codes on a GPU (scaled_rows.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name

VECTOR = 8
THREADS = 256
CODE_NAMES = {torch.int8: "int8_t", torch.float8_e4m3fn: "fp8"}


def scaled_rows(
    launcher: Launcher,
    ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ids [T] int64 of codes [V, width] int8 or e4m3 * scales [G, V] fp32: [T, width] in dtype. G groups: whole rows, or
    128 columns each. tokens, and ids out of range: see `embedding.embedding`."""
    count, (vocab_size, width), groups = ids.shape[0], codes.shape, scales.shape[0]
    span = width if groups == 1 else 128
    assert width % VECTOR == 0, width
    assert -(-width // span) == groups, (width, groups)
    check(ids, launcher, torch.int64, count)
    check(codes, launcher, codes.dtype, vocab_size, width)
    check(scales, launcher, torch.float32, groups, vocab_size)
    if tokens is not None:
        check(tokens, launcher, torch.int64, tokens.shape[0])
    out = torch.empty(count, width, dtype=dtype, device=codes.device)
    if out.numel():
        threads = min(THREADS, -(-width // (VECTOR * WARP)) * WARP)
        num_tokens = 0 if tokens is None else tokens.shape[0]
        args = (
            ids, tokens, codes, scales, out, np.int64(num_tokens), np.int64(vocab_size), np.int32(width),
            np.int32(span),
        )  # fmt: skip
        grid = (count, -(-width // (VECTOR * threads)), 1)
        launcher.launch(variant(codes.dtype, dtype), grid, (threads, 1, 1), args)
    return out


def variant(codes: torch.dtype, dtype: torch.dtype) -> Kernel:
    return Kernel("scaled_rows", "scaled_rows", (("CODE", CODE_NAMES[codes]), ("DTYPE", type_name(dtype))))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(codes, dtype) for codes in CODE_NAMES for dtype in (torch.bfloat16, torch.float16)]
