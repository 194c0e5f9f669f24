"""Gates on the CPU, activations, queries that grow, factors, clips, columns: tensors in, checks, addresses to compiled kernels
(cpu_fused.py, cpu_gates.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_fused, cpu_gates

ACTIVATIONS = {
    "silu": cpu_fused.SILU, "gelu_tanh": cpu_fused.GELU_TANH, "gelu": cpu_fused.GELU, "swiglu_oai": cpu_fused.SWIGLU_OAI,
    "relu2_gated": cpu_fused.SQUARED_RELU, "relu_gated": cpu_fused.RELU,
}  # fmt: skip
WITHOUT_GATE = {"relu2": cpu_fused.SQUARED_RELU, "lone_gelu": cpu_fused.GELU, "lone_gelu_tanh": cpu_fused.GELU_TANH}


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
    """x [T, n] itself, times the sigmoids of gate [T, c], which may be columns of a wider tensor; c divides n. See
    `reference.sigmoid_gate`."""
    tokens, width = x.shape
    columns = gate.shape[1]
    assert width % columns == 0, gate.shape
    address, stride = cpu.rows_of(gate, gate.dtype, tokens, columns)
    ints = (cpu.address_of(x, x.dtype, tokens, width), address, tokens, width, stride, width // columns, int(softplus))
    cpu.launch(cpu_gates.sigmoid_gate, 8 * x.numel(), cpu.tags_of(x.dtype, gate.dtype), ints)
    return x


def scale(x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    """See `reference.scale`; x [T, width] is changed in place."""
    ints = (cpu.address_of(x, x.dtype, *x.shape), x.numel())
    cpu.launch(cpu_fused.scale, 16 * x.numel() if cap else x.numel(), cpu.tags_of(x.dtype), ints, (factor, cap))
    return x


def clip(x: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """See `ops.Ops`."""
    tokens, width = x.shape
    address, stride = cpu.rows_of(x, x.dtype, tokens, width)
    cpu.launch(cpu_gates.clip, x.numel(), cpu.tags_of(x.dtype), (address, tokens, width, stride), (least, most))
    return x


def put_columns(x: torch.Tensor, wide: torch.Tensor, first: int) -> None:
    """See `ops.Ops`."""
    tokens, width = x.shape
    target, stride = cpu.rows_of(wide[:, first : first + width], x.dtype, tokens, width)
    source, x_stride = cpu.rows_of(x, x.dtype, tokens, width)
    ints = (source, target, tokens, width, x_stride, stride)
    cpu.launch(cpu_gates.put_columns, x.numel(), cpu.tags_of(x.dtype), ints)


def add_row(x: torch.Tensor, row: torch.Tensor) -> None:
    """See `ops.Ops`."""
    tokens, width = x.shape
    ints = (cpu.address_of(x, x.dtype, tokens, width), cpu.address_of(row, torch.float32, width), tokens, width)
    cpu.launch(cpu_gates.add_row, x.numel(), cpu.tags_of(x.dtype), ints)


def temper(x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int) -> torch.Tensor:
    """See `reference.temper`; x [T, n], which may be columns of a wider tensor, is changed in place."""
    tokens, width = x.shape
    address, stride = cpu.rows_of(x, x.dtype, tokens, width)
    ints = (address, tokens, width, stride, cpu.address_of(positions, torch.int64, tokens), length, offset)
    cpu.launch(cpu_gates.temper, x.numel(), cpu.tags_of(x.dtype), ints, (scale,))
    return x


def xielu(x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
    """See `reference.xielu`; x [T, n] is changed in place."""
    ints = (cpu.address_of(x, x.dtype, *x.shape), x.numel())
    cpu.launch(cpu_gates.xielu, 16 * x.numel(), cpu.tags_of(x.dtype), ints, (positive, negative, slope, edge))
    return x


def best_gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """See `reference.best_gate`."""
    (tokens, width), count = x.shape, logits.shape[1]
    out = cpu.new_tensor((tokens, width), x.dtype)
    ints = (
        cpu.address_of(x, x.dtype, tokens, width), cpu.address_of(logits, torch.float32, tokens, count), out.data_ptr(), tokens,
        width, count,
    )  # fmt: skip
    cpu.launch(cpu_gates.best_gate, tokens * (width + count), cpu.tags_of(x.dtype), ints)
    return out


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See `reference.gated_activation`; of those without a gate x itself is changed."""
    if (kind := WITHOUT_GATE.get(activation)) is not None:
        ints = (cpu.address_of(x, x.dtype, *x.shape), x.numel(), kind)
        cpu.launch(cpu_fused.activation, 8 * x.numel(), cpu.tags_of(x.dtype), ints)
        return x
    width = x.shape[1] // 2
    return gated(x[:, :width], x[:, width:], activation)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """The same of [T, n] each, which may be columns of a wider tensor."""
    tokens, width = gate.shape
    out = cpu.new_tensor((tokens, width), gate.dtype)
    sides = (each for side in (gate, up) for each in cpu.rows_of(side, gate.dtype, tokens, width))
    ints = (*sides, out.data_ptr(), tokens, width, ACTIVATIONS[activation])
    cpu.launch(cpu_fused.gated_activation, 16 * tokens * width, cpu.tags_of(gate.dtype), ints)
    return out
