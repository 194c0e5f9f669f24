"""Hyper-connections on the CPU: tensors in, checks, addresses to the compiled kernels (cpu_connections.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_connections

NO_GATED_STREAMS = "gated residual streams (Qwen4-Exp) on a GPU are not supported yet", "add --device cpu"
NO_DIGESTS = "attention to digests of tokens (DeepSeek-V4) on a GPU is not supported yet", "add --device cpu"
"""Errors' words and hints."""


def spread(x: torch.Tensor, count: int) -> torch.Tensor:
    """x [T, width] -> [count, T, width], all alike."""
    tokens, width = x.shape
    streams = cpu.new_tensor((count, tokens, width), x.dtype)
    ints = cpu.address_of(x, x.dtype, tokens, width), count, tokens, width, streams.data_ptr()
    cpu.launch(cpu_connections.spread, streams.numel(), cpu.tags_of(x.dtype), ints)
    return streams


def read_streams(
    streams: torch.Tensor,
    matrix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    least: float,
    most: float,
    rounds: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """streams [S, T, width] -> [T, width] and fp32 [T, S or 0], with rounds [T, S + S * S]; see `reference.read_streams`."""
    (count, tokens, width), f32 = streams.shape, torch.float32
    shares = len(base)
    assert shares in (count, (2 + count if rounds else 2) * count), (shares, count)
    out = cpu.new_tensor((tokens, width), streams.dtype)
    kept = cpu.new_tensor((tokens, shares - count), f32)
    ints = (
        cpu.address_of(streams, streams.dtype, count, tokens, width), count, tokens, width,
        cpu.address_of(matrix, f32, shares, count * width), cpu.address_of(base, f32, shares),
        cpu.address_of(scale, f32, min(3, shares // count)), shares - count, rounds, out.data_ptr(), kept.data_ptr(),
    )  # fmt: skip
    work = (2 * shares + 4) * streams.numel()
    cpu.launch(cpu_connections.read_streams, work, cpu.tags_of(streams.dtype), ints, (eps, least, most))
    return out, kept


def write_streams(streams: torch.Tensor, found: torch.Tensor, weights: torch.Tensor) -> None:
    """streams [S, T, width] += found [T, width] times weights [T, S] fp32, in place; with weights [T, S + S * S] they are mixed
    first, see `reference.write_streams`."""
    count, tokens, width = streams.shape
    mixes = weights.shape[1] != count
    ints = (
        cpu.address_of(streams, streams.dtype, count, tokens, width), count, tokens, width,
        cpu.address_of(found, streams.dtype, tokens, width),
        cpu.address_of(weights, torch.float32, tokens, count + count**2 * mixes),
    )  # fmt: skip
    kernel = cpu_connections.mix_and_write if mixes else cpu_connections.write_streams
    cpu.launch(kernel, (2 + count * mixes) * streams.numel(), cpu.tags_of(streams.dtype), ints)


def norm_streams(streams: torch.Tensor, gains: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """streams [S, T, width] -> [T, S * width]; gains [S * width]; see `reference.norm_streams`."""
    count, tokens, width = streams.shape
    out = cpu.new_tensor((tokens, count * width), streams.dtype)
    ints = (
        cpu.address_of(streams, streams.dtype, count, tokens, width), count, tokens, width,
        cpu.address_of(gains, streams.dtype, count * width), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_connections.norm_streams, 4 * streams.numel(), cpu.tags_of(streams.dtype), ints, (eps, offset))
    return out


def mix_streams(normed: torch.Tensor, gates: torch.Tensor, count: int, weights: torch.Tensor | None) -> torch.Tensor:
    """normed, gates [T, S * width] -> [T, width]; weights [T, S] fp32 are changed in place; see `reference.mix_streams`."""
    tokens, wide = normed.shape
    out = cpu.new_tensor((tokens, wide // count), normed.dtype)
    ints = (
        cpu.address_of(normed, normed.dtype, tokens, wide), cpu.address_of(gates, normed.dtype, tokens, wide), count, tokens,
        wide // count, 0 if weights is None else cpu.address_of(weights, torch.float32, tokens, count), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_connections.mix_streams, 16 * normed.numel(), cpu.tags_of(normed.dtype), ints)
    return out
