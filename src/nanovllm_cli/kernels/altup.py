"""Several residual streams, of which layers compute with the first, on a GPU (altup.cu, altup_match.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import MAX_THREADS, WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256


def altup_predict(
    launcher: Launcher, streams: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, factor: float
) -> torch.Tensor:
    """See `reference.altup_predict`; streams [S, T, width] are changed in place, the first comes back as a copy [T, width]."""
    count, tokens, width = streams.shape
    check(streams, launcher, streams.dtype, count, tokens, width)
    check(logits, launcher, torch.float32, tokens, count)
    check(coefficients, launcher, torch.float32, count * count, count)
    first = torch.empty_like(streams[0])
    _launch(launcher, "altup_predict", streams, (logits, coefficients, first), factor)
    return first


def altup_correct(
    launcher: Launcher,
    streams: torch.Tensor,
    found: torch.Tensor,
    logits: torch.Tensor,
    coefficients: torch.Tensor,
    gains: torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """See `reference.altup_correct`; streams [S, T, width] are changed in place, the first comes back times gains [width]."""
    count, tokens, width = streams.shape
    check(streams, launcher, streams.dtype, count, tokens, width)
    check(found, launcher, streams.dtype, tokens, width)
    check(logits, launcher, torch.float32, tokens, count)
    check(coefficients, launcher, torch.float32, count, count)
    check(gains, launcher, streams.dtype, width)
    first = torch.empty_like(found)
    _launch(launcher, "altup_correct", streams, (found, logits, coefficients, gains, first), factor)
    return first


def _launch(launcher: Launcher, name: str, streams: torch.Tensor, others: tuple[torch.Tensor, ...], factor: float) -> None:
    count, tokens, width = streams.shape
    if streams.numel():
        vector = widest(width, streams.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        numbers = np.int32(tokens), np.int32(width), np.float32(factor)
        launcher.launch(variant(name, streams.dtype, vector, count), grid, (threads, 1, 1), (streams, *others, *numbers))


def altup_enter(launcher: Launcher, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """x [T, width] and others [T, N * width] -> streams [1 + N, T, width]; see `reference.altup_match`."""
    tokens, width = x.shape
    parts = others.shape[1] // width
    streams = torch.empty((1 + parts, tokens, width), dtype=x.dtype, device=x.device)
    _match(launcher, x, others, parts, streams, 1)
    return streams


def altup_match(launcher: Launcher, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """rows [T, width] themselves, made as large as those of like; see `reference.altup_match`."""
    _match(launcher, like, rows, 1, rows, 0)
    return rows


def _match(launcher: Launcher, like: torch.Tensor, rows: torch.Tensor, parts: int, out: torch.Tensor, copies: int) -> None:
    tokens, width = like.shape
    check(like, launcher, like.dtype, tokens, width)
    check(rows, launcher, like.dtype, tokens, parts * width)
    if like.numel():
        vector = widest(width, like.dtype)
        threads = min(MAX_THREADS, -(-width // (vector * WARP)) * WARP)
        kernel = match_variant(like.dtype, vector, copies)
        launcher.launch(kernel, (tokens, copies + parts, 1), (threads, 1, 1), (like, rows, out, np.int32(width)))


def variant(name: str, dtype: torch.dtype, vector: int, count: int) -> Kernel:
    return Kernel("altup", name, (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("STREAMS", count)))


def match_variant(dtype: torch.dtype, vector: int, copies: int) -> Kernel:
    return Kernel("altup_match", "altup_match", (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("COPIES", copies)))


def variants() -> list[Kernel]:
    """What the compile gate builds: of four streams, as models have them."""
    kinds = [(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
    found = [variant(name, *kind, 4) for name in ("altup_predict", "altup_correct") for kind in kinds]
    return found + [match_variant(*kind, copies) for kind in kinds for copies in (0, 1)]
