"""Matmuls of many rows on a GPU: the vendor's library, through torch."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import Launcher, check


def matmul(
    launcher: Launcher,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N]; residual, out_dtype: see `product.After`. A row's bits may depend on M."""
    rows, width = x.shape
    outputs, dtype = weight.shape[0], x.dtype
    check(x, launcher, dtype, rows, width)
    check(weight, launcher, dtype, outputs, width)
    out = product.output_for(launcher, rows, outputs, dtype, bias, residual=residual, out_dtype=out_dtype)
    compute = _on_gpu if x.is_cuda else _on_host
    launcher.torch_op(lambda: compute(x, weight.t(), bias, residual, out))
    return out


def _on_gpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """weight [k, n]."""
    if residual is not None:
        residual.addmm_(x, weight)
        if bias is not None:
            residual.add_(bias)
    elif out.dtype != x.dtype:
        torch.mm(x, weight, out_dtype=out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, x, weight, out=out)
    else:
        torch.mm(x, weight, out=out)


def _on_host(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """The same in float32 and rounded once, for kernels that run without a GPU."""
    total = x.float() @ weight.float()
    for term in (bias, residual):
        total = total if term is None else total + term.float()
    out.copy_(total)
