"""Several residual streams and sparse gates on the CPU: tensors in, checks, addresses to the compiled kernels (cpu_altup.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_altup


def altup_predict(streams: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, factor: float) -> torch.Tensor:
    """See `reference.altup_predict`; streams [S, T, width] are changed in place, the first comes back as a copy [T, width]."""
    count, tokens, width = streams.shape
    first = cpu.new_tensor((tokens, width), streams.dtype)
    ints = (
        cpu.address_of(streams, streams.dtype, count, tokens, width), count, tokens, width,
        cpu.address_of(logits, torch.float32, tokens, count),
        cpu.address_of(coefficients, torch.float32, count * count, count), first.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_altup.altup_predict, (count + 1) * streams.numel(), cpu.tags_of(streams.dtype), ints, (factor,))
    return first


def altup_correct(
    streams: torch.Tensor,
    found: torch.Tensor,
    logits: torch.Tensor,
    coefficients: torch.Tensor,
    gains: torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """See `reference.altup_correct`; streams [S, T, width] are changed in place, the first comes back times gains [width]."""
    count, tokens, width = streams.shape
    first = cpu.new_tensor((tokens, width), streams.dtype)
    ints = (
        cpu.address_of(streams, streams.dtype, count, tokens, width), count, tokens, width,
        cpu.address_of(found, streams.dtype, tokens, width), cpu.address_of(logits, torch.float32, tokens, count),
        cpu.address_of(coefficients, torch.float32, count, count), cpu.address_of(gains, streams.dtype, width), first.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_altup.altup_correct, 4 * streams.numel(), cpu.tags_of(streams.dtype), ints, (factor,))
    return first


def altup_enter(x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """x [T, width] and others [T, N * width] -> streams [1 + N, T, width]; see `reference.altup_match`."""
    tokens, width = x.shape
    parts = others.shape[1] // width
    streams = cpu.new_tensor((1 + parts, tokens, width), x.dtype)
    _match(x, others, parts, streams, 1)
    return streams


def altup_match(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """rows [T, width] themselves, made as large as those of like; see `reference.altup_match`."""
    _match(like, rows, 1, rows, 0)
    return rows


def _match(like: torch.Tensor, rows: torch.Tensor, parts: int, out: torch.Tensor, copies: int) -> None:
    tokens, width = like.shape
    ints = (
        cpu.address_of(like, like.dtype, tokens, width), cpu.address_of(rows, like.dtype, tokens, parts * width), parts, tokens,
        width, out.data_ptr(), copies,
    )  # fmt: skip
    cpu.launch(cpu_altup.altup_match, 4 * rows.numel(), cpu.tags_of(like.dtype), ints)


def sparse_gate(x: torch.Tensor, cutoff: float) -> torch.Tensor:
    """x [T, width] itself, which may be columns of a wider tensor; see `reference.sparse_gate`."""
    tokens, width = x.shape
    address, stride = cpu.rows_of(x, x.dtype, tokens, width)
    cpu.launch(cpu_altup.sparse_gate, 4 * x.numel(), cpu.tags_of(x.dtype), (address, tokens, width, stride), (cutoff,))
    return x
