"""Hyper-connections on a GPU (connection.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS, WIDE_THREADS = 256, 512
MOST_ELEMENTS = 4
"""Of a load: as many fp32 of the matrix come in one."""


def spread(launcher: Launcher, x: torch.Tensor, count: int) -> torch.Tensor:
    """x [T, width] -> [count, T, width], all alike."""
    tokens, width = x.shape
    check(x, launcher, x.dtype, tokens, width)
    streams = torch.empty((count, tokens, width), dtype=x.dtype, device=x.device)
    _by_columns(launcher, "spread", (x, streams), streams)
    return streams


def read_streams(
    launcher: Launcher,
    streams: torch.Tensor,
    matrix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    least: float,
    most: float,
    rounds: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """streams [S, T, width] -> [T, width] and fp32 [T, S or 0]; see `reference.read_streams`."""
    assert not rounds, "no GPU gets such a model"
    (count, tokens, width), f32 = streams.shape, torch.float32
    shares = len(base)
    assert shares in (count, 2 * count), (shares, count)
    check(streams, launcher, streams.dtype, count, tokens, width)
    check(matrix, launcher, f32, shares, count * width)
    check(base, launcher, f32, shares)
    check(scale, launcher, f32, shares // count)
    out = torch.empty_like(streams[0])
    kept = torch.empty(tokens, shares - count, dtype=f32, device=streams.device)
    if tokens:
        vector = _elements(streams)
        threads = min(WIDE_THREADS, -(-width // (vector * WARP)) * WARP)
        kernel = variant("read_streams", streams.dtype, vector, count, shares - count)
        numbers = np.int32(tokens), np.int32(width), np.float32(eps), np.float32(least), np.float32(most)
        launcher.launch(kernel, (tokens, 1, 1), (threads, 1, 1), (streams, matrix, base, scale, out, kept, *numbers))
    return out, kept


def write_streams(launcher: Launcher, streams: torch.Tensor, found: torch.Tensor, weights: torch.Tensor) -> None:
    """streams [S, T, width] += found [T, width] times weights [T, S] fp32, in place."""
    count, tokens, width = streams.shape
    check(streams, launcher, streams.dtype, count, tokens, width)
    check(found, launcher, streams.dtype, tokens, width)
    check(weights, launcher, torch.float32, tokens, count)
    _by_columns(launcher, "write_streams", (streams, found, weights), streams)


def _by_columns(launcher: Launcher, name: str, tensors: tuple[torch.Tensor, ...], streams: torch.Tensor) -> None:
    count, tokens, width = streams.shape
    if tokens:
        vector = _elements(streams)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        kernel = variant(name, streams.dtype, vector, count, count)
        launcher.launch(kernel, grid, (threads, 1, 1), (*tensors, np.int32(tokens), np.int32(width)))


def _elements(streams: torch.Tensor) -> int:
    return min(MOST_ELEMENTS, widest(streams.shape[2], streams.dtype))


def variant(name: str, dtype: torch.dtype, vector: int, count: int, writes: int) -> Kernel:
    constants = (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("STREAMS", count), ("WRITES", writes))
    return Kernel("connection", name, constants)


def variants() -> list[Kernel]:
    """What the compile gate builds: of four streams, as models have them."""
    kinds = [(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (4, 1)]
    uses = [("spread", 4), ("read_streams", 4), ("read_streams", 0), ("write_streams", 4)]
    return [variant(name, *kind, 4, writes) for kind in kinds for name, writes in uses]
