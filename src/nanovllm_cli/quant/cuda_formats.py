"""Which storage keeps which format on a GPU."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.quant import cuda_scaled
from nanovllm_cli.quant.block_layout import TYPES
from nanovllm_cli.quant.cuda_blocks import CudaBlocks
from nanovllm_cli.quant.cuda_scaled import CudaScaled
from nanovllm_cli.quant.cuda_storage import CudaStorage
from nanovllm_cli.quant.dense_cuda import CudaDense, CudaDequantized
from nanovllm_cli.quant.format import Blocks, Format, Fp8, Integer


def make_storage(
    form: Format | None, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, *, rounds: bool, deterministic: bool
) -> CudaStorage:
    """An empty weight; form None is the compute type, which dtype names. rounds: activations become 8 bits where the format says
    so and the GPU gains by it.

    UnsupportedError for widths and groups that don't fit.
    """
    if form is None:
        return CudaDense(num_rows, width, dtype, launcher, deterministic)
    form.check_width(width)
    if isinstance(form, Blocks) and form.type in TYPES:
        return CudaBlocks(form, num_rows, width, dtype, launcher, deterministic, rounds)
    if isinstance(form, Integer | Fp8) and rounds and cuda_scaled.fits(form, num_rows, width, launcher, deterministic):
        return CudaScaled(form, num_rows, width, dtype, launcher, deterministic)
    return CudaDequantized(form, num_rows, width, dtype, launcher, deterministic)
