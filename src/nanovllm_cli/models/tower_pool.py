"""Attention that makes one row of 2 x 2 patches, whose mean looks at them (Molmo 2): see `PoolSpec`, and `Mosaic` for how patches
of squares that overlap lie."""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_resampler import Resampling
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.vision_spec import TowerSpec

POOLED_TOGETHER = 512
"""Cells of 2 x 2 patches, whose keys and values are several times as wide."""


class Pooling(Resampling):
    """Of a tower."""

    def _pooled(self, x: torch.Tensor, mosaic: Mosaic) -> torch.Tensor:
        """[squares * patches, width], line by line in each -> a row of zeros for each mark, and [out_size] for each cell."""
        cells = torch.cat([_cells(each) for each in _planes(mosaic)]).to(x.device)
        parts = [self._pool_rows(x, cells[first : first + POOLED_TOGETHER]) for first in range(0, len(cells), POOLED_TOGETHER)]
        rows = torch.cat(parts)
        out = torch.zeros(len(rows) + mosaic.num_marks, rows.shape[1], dtype=rows.dtype, device=rows.device)
        is_row = torch.ones(len(out), dtype=torch.bool)
        is_row[[mark.place for mark in mosaic.marks(mosaic.height)]] = False
        out[is_row.to(out.device)] = rows
        return out

    def _pool_rows(self, x: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """cells [n, 4]: which of the rows x, -1: none."""
        spec = self.spec.pool
        assert spec is not None
        is_there = cells >= 0
        seen = x[cells.clamp(min=0)] * is_there[..., None].to(x.dtype)
        mean = (seen.to(torch.float32).sum(dim=1) / is_there.sum(dim=1, keepdim=True)).to(x.dtype)
        q = self._linear("pool.q", mean).view(len(cells), 1, -1, spec.head_dim)
        keys = self._linear("pool.kv", seen.flatten(0, 1)).view(len(cells), 4, 2, -1, spec.head_dim)
        q, k, v = (each.transpose(1, 2) for each in (q, *keys.unbind(2)))
        is_seen = is_there[:, None, None]
        found = functional.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=spec.key_heads != spec.num_heads)
        made = self._linear("pool.out", found.reshape(len(cells), -1))
        return self._two_layers("projector", made, "silu", gated=True)


def pool_numbers(spec: TowerSpec) -> int:
    """About the most that there are at once beside the rows that are read."""
    own = spec.pool
    assert own is not None
    read = 12 * spec.hidden_size * len(spec.reads) + 8 * (own.num_heads + own.key_heads) * own.head_dim
    return POOLED_TOGETHER * (read + 3 * spec.projector_size + spec.out_size)


def pool_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """Of what is read here, by our names; see `tower_shapes`."""
    own, width = spec.pool, spec.hidden_size * len(spec.reads)
    assert own is not None
    heads, keys = own.num_heads * own.head_dim, own.key_heads * own.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name, out, read in (("q", heads, width), ("kv", 2 * keys, width), ("out", own.width, heads)):
        shapes |= {f"pool.{name}.weight": (out, read)} | ({f"pool.{name}.bias": (out,)} if spec.projector_bias else {})
    return shapes | {
        "projector.up.weight": (2 * spec.projector_size, own.width),
        "projector.down.weight": (spec.out_size, spec.projector_size),
    }


def _planes(mosaic: Mosaic) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of patches, by line and column: of the first square, and of the others without what is another's, too."""
    side, margin, rows, columns = mosaic.height, mosaic.margin, mosaic.rows, mosaic.columns
    numbers = torch.arange(mosaic.num_squares * side**2)
    squares = numbers[side**2 :].view(rows, columns, side, side)
    lines = []
    for i in range(rows):
        tall = _inner(i, rows, side, margin)
        lines.append(torch.cat([squares[i, j, tall, _inner(j, columns, side, margin)] for j in range(columns)], dim=1))
    return numbers[: side**2].view(side, side), torch.cat(lines)


def _inner(place: int, count: int, side: int, margin: int) -> slice:
    """Of the lines of a square, or its columns, those that stand for the image: margins only at its edges."""
    return slice(margin if place else 0, side - (margin if place < count - 1 else 0))


def _cells(plane: torch.Tensor) -> torch.Tensor:
    """[lines, columns] -> [cells, 4], -1 beyond the plane's lower and right edge."""
    short = [side % 2 for side in plane.shape]
    filled = functional.pad(plane, (0, short[1], 0, short[0]), value=-1)
    lines, columns = (side // 2 for side in filled.shape)
    return filled.view(lines, 2, columns, 2).transpose(1, 2).reshape(-1, 4)
