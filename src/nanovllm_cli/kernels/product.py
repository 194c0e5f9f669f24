"""What the wrappers of a GPU's matmul kernels have in common: the rows that go in, what is added to the product, where it goes.

Legend: M rows of x, K columns (inputs), N rows of the weight.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.activation import has_gate
from nanovllm_cli.kernels.kernel import Launcher, check, mma_capability
from nanovllm_cli.kernels.ops import Hidden, Normed


class After(TypedDict, total=False):
    """What becomes of a product y [M, N]. residual [M, N]: y is added to it in place, and it is what is returned. out_dtype: of
    what is returned, x's type (None) or float32."""

    residual: torch.Tensor | None
    out_dtype: torch.dtype | None


class AfterFew(After, total=False):
    """activation: the weight's rows and the bias are a gate's and then as many of up, and what is returned [M, N / 2] is
    act(gate) * up (`reference.gated_activation`). Of one without a gate it is act(y) [M, N]. Not with a residual."""

    activation: str | None


class Input(NamedTuple):
    """rows [M, K], to be normalised on their way in where there is a gain [K]."""

    rows: torch.Tensor
    gain: torch.Tensor | None
    eps: float
    offset: float


def checked_input(launcher: Launcher, x: Hidden) -> Input:
    rows, gain, eps, offset = x if isinstance(x, Normed) else (x, None, 0.0, 0.0)
    count, width = rows.shape
    check(rows, launcher, rows.dtype, count, width)
    if gain is not None:
        check(gain, launcher, rows.dtype, width)
    return Input(rows, gain, eps, offset)


def check_tensor_cores(launcher: Launcher, dtype: torch.dtype) -> None:
    """UnsupportedError where they do not multiply 16-bit numbers of this type."""
    if launcher.capability < mma_capability(dtype):
        raise UnsupportedError("this GPU's tensor cores have no bfloat16", "use --dtype float16")


def output_for(
    launcher: Launcher,
    rows: int,
    num_rows: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Where a product [rows, num_rows] goes: see `AfterFew`. dtype: x's. bias [num_rows], and the residual, are checked."""
    assert out_dtype in (None, dtype, torch.float32), out_dtype
    assert residual is None or (activation is None and out_dtype in (None, dtype)), out_dtype
    assert not has_gate(activation) or num_rows % 2 == 0, num_rows
    if bias is not None:
        check(bias, launcher, dtype, num_rows)
    outputs = num_rows // 2 if has_gate(activation) else num_rows
    if residual is not None:
        return check(residual, launcher, dtype, rows, outputs)
    return torch.empty(rows, outputs, dtype=out_dtype or dtype, device=launcher.device)
