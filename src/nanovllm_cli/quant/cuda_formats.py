"""Which storage keeps which format on a GPU."""

from __future__ import annotations

from functools import cached_property

import torch

from nanovllm_cli.kernels import packed_gemm
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.quant import cuda_scaled
from nanovllm_cli.quant.cuda_blocks import CudaBlocks
from nanovllm_cli.quant.cuda_far import CudaFar, FarMemory
from nanovllm_cli.quant.cuda_packed import CudaPacked
from nanovllm_cli.quant.cuda_scaled import CudaScaled
from nanovllm_cli.quant.cuda_storage import CudaStorage
from nanovllm_cli.quant.dense_cuda import CudaDense
from nanovllm_cli.quant.format import Affine, Blocks, Format, Fp8, Integer, Nf4

META = torch.device("meta")


class CudaFormats:
    """Makes the storages of a GPU. rounds: activations become 8 bits where the format says so and the GPU gains by it."""

    def __init__(self, launcher: Launcher, *, rounds: bool, deterministic: bool) -> None:
        self._launcher = launcher
        self._rounds = rounds
        self._deterministic = deterministic

    def make(
        self, form: Format | None, num_rows: int, width: int, dtype: torch.dtype, far: FarMemory | None = None
    ) -> CudaStorage | CudaFar:
        """An empty weight; form None is the compute type, which dtype names. far: where it is to be, if not on the GPU.
        UnsupportedError for widths and groups that don't fit."""
        if far is None:
            return self._make(form, num_rows, width, dtype, None)
        return CudaFar(self._make(form, num_rows, width, dtype, META), far)

    def _make(
        self, form: Format | None, num_rows: int, width: int, dtype: torch.dtype, place: torch.device | None
    ) -> CudaStorage:
        sizes, device = (num_rows, width, dtype), (self._launcher, self._deterministic)
        match form:
            case None:
                return CudaDense(*sizes, *device, place)
            case Blocks() | Affine():
                return CudaBlocks(form, *sizes, *device, self._rounds, place)
            case Integer() | Fp8() if self._rounds and cuda_scaled.fits(form, num_rows, width, *device):
                return CudaScaled(form, *sizes, *device, place)
            case Integer() | Fp8() | Nf4():
                return CudaPacked(form, *sizes, *device, self._counters, place)
        raise AssertionError(f"a storage for {form.name}")

    @cached_property
    def _counters(self) -> torch.Tensor:
        return packed_gemm.new_counters(self._launcher)
