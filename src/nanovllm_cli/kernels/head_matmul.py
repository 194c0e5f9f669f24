"""Products with a matrix of each head, on a GPU (head_matmul.cu; of many tokens the vendor's library).

Legend: T tokens, H heads, N rows and K columns of a head's matrix.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, mma_capability, type_name, widest

MOST_FEW = 64
"""Tokens up to which our kernel reads each matrix once. Estimated: beyond, it reads as much of x as of the matrices."""
WARPS = 4
OUTPUTS = 16
"""Of a team of warps, as head_matmul.cu has it."""
UNIT = 128
"""Columns that a warp has under way at once."""
TILE = 16
MOST_TILES = 4


class CudaHeadMatrices:
    """See `ops.HeadMatrices`. A deterministic GPU has one way for any number of tokens."""

    def __init__(
        self, launcher: Launcher, deterministic: bool, num_heads: int, num_rows: int, width: int, dtype: torch.dtype
    ) -> None:
        self._launcher = launcher
        self._deterministic = deterministic
        self.num_heads, self.num_rows, self.width, self.dtype = num_heads, num_rows, width, dtype
        try:
            self._weight = torch.zeros(num_heads, num_rows, width, dtype=dtype, device=launcher.device)
        except torch.OutOfMemoryError:
            raise DoesNotFitError(
                "the matrices of latent attention do not fit the GPU", "round the other weights (--quant), or take --device cpu"
            ) from None

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def load(self, head: int, rows: torch.Tensor) -> None:
        assert rows.shape == (self.num_rows, self.width), rows.shape
        self._weight[head].copy_(rows)

    def products(self, x: torch.Tensor, x_at: int, x_step: int) -> torch.Tensor:
        """[T, H * N]: of each head its matrix times columns x_at + head * x_step … of x [T, …]."""
        out = torch.empty(x.shape[0], self.num_heads * self.num_rows, dtype=self.dtype, device=x.device)
        self.products_into(x, x_at, x_step, out, 0, self.num_rows)
        return out

    def products_into(self, x: torch.Tensor, x_at: int, x_step: int, out: torch.Tensor, out_at: int, out_step: int) -> None:
        """The same, to columns out_at + head * out_step … of out [T, …]."""
        tokens, last = x.shape[0], self.num_heads - 1
        check(x, self._launcher, self.dtype, tokens, x.shape[1])
        check(out, self._launcher, self.dtype, tokens, out.shape[1])
        assert x_at + last * x_step + self.width <= x.shape[1], x.shape
        assert out_at + last * out_step + self.num_rows <= out.shape[1], out.shape
        if not tokens:
            return
        if tokens <= MOST_FEW or self._deterministic:
            head_matmul(self._launcher, x, x_at, x_step, self._weight, out, out_at, out_step)
            return
        source = _heads_of(x, x_at, x_step, self.num_heads, self.width)
        target = _heads_of(out, out_at, out_step, self.num_heads, self.num_rows)
        compute = _on_gpu if x.is_cuda else _on_host
        # Attention reads what the kernel ahead of this one put in the cache.
        self._launcher.torch_op(lambda: compute(source, self._weight, target), barrier=True)


def _heads_of(rows: torch.Tensor, at: int, step: int, heads: int, width: int) -> torch.Tensor:
    """[H, T, width], of some columns of rows."""
    shape, strides = (heads, rows.shape[0], width), (step, rows.stride(0), 1)
    return rows.as_strided(shape, strides, rows.storage_offset() + at)


def _on_gpu(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(x, weight.transpose(1, 2), out=out)


def _on_host(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same in float32 and rounded once, for kernels that run without a GPU."""
    out.copy_(x.float() @ weight.float().transpose(1, 2))


def head_matmul(
    launcher: Launcher,
    x: torch.Tensor,
    x_at: int,
    x_step: int,
    weight: torch.Tensor,
    out: torch.Tensor,
    out_at: int,
    out_step: int,
) -> None:
    """See `CudaHeadMatrices.products_into`; weight [H, N, K]. A token has the same bits at every T."""
    (heads, num_rows, width), tokens, dtype = weight.shape, x.shape[0], x.dtype
    product.check_tensor_cores(launcher, dtype)
    check(weight, launcher, dtype, heads, num_rows, width)
    vector = min(widest(size, dtype) for size in (width, x_at, x_step, x.shape[1]) if size)
    pairs = not any(size % 2 for size in (num_rows, out_at, out_step, out.shape[1]))
    tiles = tiles_of(tokens)
    kernel = variant(dtype, vector, parts_of(width), tiles, pairs)
    teams = WARPS // parts_of(width)
    grid = (-(-num_rows // (teams * OUTPUTS)), heads, -(-tokens // (tiles * TILE)))
    sizes = (tokens, num_rows, width, x.shape[1], x_step, out.shape[1], out_step)
    source, target = x.view(-1)[x_at:], out.view(-1)[out_at:]
    launcher.launch(kernel, grid, (WARPS * WARP, 1, 1), (source, weight, target, *map(np.int32, sizes)))


def parts_of(width: int) -> int:
    """Warps that share a row of a matrix: as many as have a unit of it, so that all is under way at once."""
    parts = 1
    while parts < WARPS and parts * UNIT < width:
        parts *= 2
    return parts


def tiles_of(tokens: int) -> int:
    """Tiles of 16 tokens that share what is read of a matrix."""
    tiles = 1
    while tiles < MOST_TILES and tiles * TILE < tokens:
        tiles *= 2
    return tiles


def variant(dtype: torch.dtype, vector: int, parts: int, tiles: int, pairs: bool) -> Kernel:
    """pairs: all places and sizes of results are even."""
    constants = (
        ("DTYPE", type_name(dtype)), ("VECTOR", vector), ("PARTS", parts), ("TILES", tiles), ("PAIRS", int(pairs))
    )  # fmt: skip
    return Kernel("head_matmul", "head_matmul", constants, mma_capability(dtype))


def variants() -> list[Kernel]:
    """What the compile gate builds: keys of 128 and 192 dims, what makes values of 256 and 512 kept numbers, and odd ones."""
    kernels = []
    for dtype in (torch.bfloat16, torch.float16):
        kernels += [variant(dtype, 8, parts, tiles, True) for parts in (1, 2, 4) for tiles in (1, 2, 4)]
        kernels += [variant(dtype, vector, parts, tiles, False) for vector, parts, tiles in ((2, 1, 4), (1, 4, 1))]
    return kernels
