"""Matrices of a vision tower, and its activations. On a CPU they are the decoder's, by whose kernels all threads compute: torch,
which has one thread beside them, takes two to four times as long. Elsewhere they are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from nanovllm_cli.kernels import dense, gates

Product = Callable[[torch.Tensor], torch.Tensor]
"""[n, in] -> [n, out]."""


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
}
_OURS = {"gelu": "lone_gelu", "gelu_tanh": "lone_gelu_tanh"}


def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """weight [out, in], of which nothing is needed any more; bias [out], of the same type."""
    if not _is_ours(weight):
        return lambda x: functional.linear(x, weight, bias)
    (rows, width), dtype = weight.shape, weight.dtype
    kept = dense.empty(rows, width, dtype)
    kept.load_rows(0, weight.contiguous())
    return lambda x: kept.matmul(x.contiguous(), bias, dtype)


def activated(x: torch.Tensor, activation: str, *, gated: bool) -> torch.Tensor:
    """act(x), or where it is gated act(first half of the columns) * second half."""
    if gated:
        if _is_ours(x) and activation in ("silu", "gelu", "gelu_tanh"):
            return gates.gated_activation(x, activation)
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up
    if _is_ours(x) and activation in _OURS:
        return gates.gated_activation(x, _OURS[activation])
    return ACTIVATIONS[activation](x)


def _is_ours(like: torch.Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.float32)
