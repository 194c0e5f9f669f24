"""Latent attention on the CPU: tensors in, checks, addresses to compiled kernels (cpu_latent.py), tensors out (see cpu.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_latent
from nanovllm_cli.kernels.cpu import address_of, launch, new_tensor, tags_of
from nanovllm_cli.kernels.simd import TILE_COLUMNS


class CpuHeadMatrices:
    """A matrix [num_rows, width] for each head, packed as in cpu_matmul; width even in bf16."""

    def __init__(self, num_heads: int, num_rows: int, width: int, dtype: torch.dtype) -> None:
        assert cpu.recordable(width, dtype), width
        self.num_heads, self.num_rows, self.width, self.dtype = num_heads, num_rows, width, dtype
        self._rows_kept = -(-num_rows // TILE_COLUMNS) * TILE_COLUMNS
        self._packed = cpu.zeros(cpu.packed_size(num_heads * self._rows_kept, width, dtype), dtype, huge_pages=True)

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes

    def load(self, head: int, rows: torch.Tensor) -> None:
        """See `ops.HeadMatrices`."""
        assert rows.shape == (self.num_rows, self.width), rows.shape
        cpu.pack_rows(self._packed, head * self._rows_kept, rows.to(self.dtype).contiguous())

    def products(self, x: torch.Tensor, x_at: int, x_step: int) -> torch.Tensor:
        """[T, heads * num_rows]: of each head its matrix times columns x_at + head * x_step … of x [T, …]."""
        out = new_tensor((x.shape[0], self.num_heads * self.num_rows), self.dtype)
        self.products_into(x, x_at, x_step, out, 0, self.num_rows)
        return out

    def products_into(self, x: torch.Tensor, x_at: int, x_step: int, out: torch.Tensor, out_at: int, out_step: int) -> None:
        """The same, to columns out_at + head * out_step … of out [T, …]."""
        tokens, size = x.shape[0], self.dtype.itemsize
        assert x_at + (self.num_heads - 1) * x_step + self.width <= x.shape[1], x.shape
        assert out_at + (self.num_heads - 1) * out_step + self.num_rows <= out.shape[1], out.shape
        source, target = (address_of(each, self.dtype, tokens, each.shape[1]) for each in (x, out))
        ints = (
            source + x_at * size, tokens, x.shape[1] * size, x_step * size, self._packed.data_ptr(), self.num_heads,
            self.num_rows, self.width * size // 4, target + out_at * size, out.shape[1], out_step,
        )  # fmt: skip
        launch(cpu_latent.head_products, tokens * self.num_heads * self.num_rows * self.width, tags_of(self.dtype), ints)


def latent_rows(
    q: torch.Tensor, kept: torch.Tensor, norm: torch.Tensor, eps: float, offset: float, heads: int, key_dim: int
) -> torch.Tensor:
    """q [T, heads * (key_dim + rotary)], kept [T, rank + rotary], norm [rank] -> [T, (heads + 1) * (rotary + rank)], without what
    queries become: see `cpu_latent.latent_rows`."""
    tokens, rank = q.shape[0], norm.shape[0]
    rotary = kept.shape[1] - rank
    out = new_tensor((tokens, (heads + 1) * (rotary + rank)), q.dtype)
    ints = (
        address_of(q, q.dtype, tokens, heads * (key_dim + rotary)), address_of(kept, q.dtype, tokens, rank + rotary),
        address_of(norm, q.dtype, rank), tokens, heads, key_dim, rotary, rank, out.data_ptr(),
    )  # fmt: skip
    launch(cpu_latent.latent_rows, tokens * (heads * rotary + 4 * rank), tags_of(q.dtype), ints, (eps, offset))
    return out
