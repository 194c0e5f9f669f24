"""What compressed convolutional attention and its routers do beside matmuls, on the CPU: tensors in, checks, addresses to
compiled kernels (cpu_compressed.py), tensors out (see cpu.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_compressed


def rescale(x: torch.Tensor, shift: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """x [T, n] itself, changed in place to `compressed_rules.rescaled`."""
    tokens, width = x.shape
    ints = (
        *cpu.rows_of(x, x.dtype, tokens, width), cpu.address_of(shift, torch.float32, width),
        cpu.address_of(gains, torch.float32, width), tokens, width,
    )  # fmt: skip
    cpu.launch(cpu_compressed.rescale, x.numel(), cpu.tags_of(x.dtype), ints)
    return x


def with_open_gates(x: torch.Tensor, channels: int) -> torch.Tensor:
    """See `compressed_rules.with_open_gates`."""
    tokens = x.shape[0]
    out = cpu.new_tensor((tokens, 3 * channels), x.dtype)
    ints = (*cpu.rows_of(x, x.dtype, tokens, x.shape[1]), out.data_ptr(), tokens, channels)
    cpu.launch(cpu_compressed.open_gates, out.numel(), cpu.tags_of(x.dtype), ints)
    return out


def of_the_best(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `compressed_rules.of_the_best`."""
    tokens, count = logits.shape
    out = cpu.new_tensor((tokens, count - 1), torch.float32)
    ints = (
        cpu.address_of(logits, torch.float32, tokens, count), cpu.address_of(bias, torch.float32, count), out.data_ptr(), tokens,
        count,
    )  # fmt: skip
    cpu.launch(cpu_compressed.of_the_best, 32 * logits.numel(), "", ints)
    return out


def met_heads(
    projected: torch.Tensor,
    convolved: torch.Tensor,
    bias: torch.Tensor,
    before: torch.Tensor,
    gains: torch.Tensor,
    head_dim: int,
    num_keys: int,
    least: float,
) -> torch.Tensor:
    """See `compressed_rules.met_heads`."""
    (tokens, every), dtype = projected.shape, projected.dtype
    heads = every // head_dim - 2 * num_keys
    width = (heads + num_keys) * head_dim
    assert width + num_keys * head_dim // 2 <= before.shape[1], before.shape
    out = cpu.new_tensor((tokens, every), dtype)
    ints = (
        cpu.address_of(projected, dtype, tokens, every), cpu.address_of(convolved, dtype, tokens, width),
        cpu.address_of(bias, dtype, width), *cpu.rows_of(before, dtype, tokens, before.shape[1]),
        cpu.address_of(gains, torch.float32, num_keys), out.data_ptr(), tokens, heads, num_keys, head_dim,
    )  # fmt: skip
    cpu.launch(cpu_compressed.met_heads, 8 * out.numel(), cpu.tags_of(dtype), ints, (least,))
    return out
