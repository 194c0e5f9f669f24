"""Vision towers: an image becomes rows that a decoder reads in the place of tokens. One class for all families (`TowerSpec`), in
plain torch, on the device and in the type of its weights; norms, softmax and rotary angles are computed in float32.

An image is computed alone, so that what comes of it depends on nothing else. Patches lie cell by cell throughout, so that what a
projector joins lies together, and where layers have windows, window by window; no mask is needed.

What towers for images and for sounds share is in `tower_layers.py`. Nothing here reads files or configs (towers.py,
weights/vision.py), or makes an image's size fit (images/).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from nanovllm_cli.models.tower_attention import Windows, attention
from nanovllm_cli.models.tower_fastvit import FastVitTower
from nanovllm_cli.models.tower_layers import ROWS_TOGETHER, Colours, Seeing, Stages, TowerRows
from nanovllm_cli.models.tower_mosaic import laid_apart, laid_out
from nanovllm_cli.models.tower_patches import PatchTower, patch_bytes
from nanovllm_cli.models.tower_pool import pool_numbers
from nanovllm_cli.models.tower_projectors import TABLED_TOGETHER, Grid, Projecting
from nanovllm_cli.models.tower_resampler import WIDENED_TOGETHER
from nanovllm_cli.models.tower_sam import SamTower, beside_numbers
from nanovllm_cli.models.tower_shapes import tower_shapes as tower_shapes
from nanovllm_cli.models.tower_tiles import TilesTower, tile_numbers
from nanovllm_cli.vision_spec import Image, Stretch, TowerSpec

ROWS_KEPT = 17
"""As wide as the hidden size, a patch, at a time: counted where attention is computed, and measured."""
_STRETCHED: dict[Stretch, dict[str, Any]] = {
    "corners": {"mode": "bilinear", "align_corners": True},
    "areas": {"mode": "bilinear", "align_corners": False, "antialias": True},
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "bicubic": {"mode": "bicubic", "align_corners": False},
}


class Tower(Projecting):
    """tensors: by our names (`tower_shapes`), on one device, norms and bounds in float32 and all others in one type."""

    spec: TowerSpec

    def __init__(self, spec: TowerSpec, tensors: Mapping[str, torch.Tensor], colours: Colours) -> None:
        super().__init__(spec, tensors, tower_shapes(spec), colours)

    def stages(self, image: Image) -> Stages:
        """As many as the spec has layers. The image's sides are multiples of the spec's `cell`."""
        spec = self.spec
        grid = self._grid(image)
        x = self._patches(image, grid)
        turns = self._turns(grid, image.num_squares)
        each = Windows(((image.num_squares, len(x) // image.num_squares),), turns)
        everywhere = inside = attention(each, spec.num_heads, spec.head_dim, x, spec.key_heads)
        if spec.window:
            inside = attention(Windows(grid.windows, turns), spec.num_heads, spec.head_dim, x, spec.key_heads)
        deep: list[torch.Tensor] = []
        queried: dict[int, torch.Tensor] = {}
        read: dict[int, torch.Tensor] = {}
        for i in range(spec.num_layers):
            if i:
                yield
            if i in spec.convolves:
                self._convolve(f"layers.{i}", x, grid)
            else:
                self._layer(f"layers.{i}", x, everywhere if i in spec.full else inside)
            if i == spec.shrinks:
                x = self._shrunk(x)
                everywhere = inside = attention(_of_one(x), spec.num_heads, spec.head_dim, x)
            if i + 1 in spec.reads:
                read[i + 1] = x.clone()
            if i in spec.deep:
                name = f"deep.{len(deep)}"
                deep.append(self._two_layers(name, self._norm(f"{name}.norm", self._joined(x), spec.projector_eps)))
            for query, name in zip(spec.queries, spec.query_names, strict=True):
                if query.behind == i:
                    queried[query.before] = self._laid_out(self._queried(name, x, query.corner), image, grid)
        if spec.queries:
            added = tuple(queried[query.before] for query in spec.queries if query.before)
            return TowerRows(queried[0] if 0 in queried else torch.zeros_like(added[0]), added)
        if spec.reads:
            x = torch.cat([read[count] for count in spec.reads], dim=1)
        if spec.pool is not None:
            assert image.mosaic is not None
            return TowerRows(self._pooled(x, image.mosaic))
        if spec.lead:
            x = x.view(image.num_squares, -1, x.shape[1])[:, 1:].reshape(-1, x.shape[1])
        if spec.post_norm:
            x = self._norm("post_norm", x)
        rows = self._projected(x, grid)
        rows = _line_by_line(rows if spec.out_scale == 1.0 else rows * spec.out_scale, grid)
        return TowerRows(self._laid_out(rows, image, grid), tuple(_line_by_line(each, grid) for each in deep))

    def _laid_out(self, rows: torch.Tensor, image: Image, grid: Grid) -> torch.Tensor:
        if image.mosaic is None:
            return rows
        if image.mosaic.apart:
            return laid_apart(rows, image.mosaic, grid.columns, self._tensors["marks.table"])
        return laid_out(rows, image.mosaic, grid.columns, self.spec.squares, self._tensors["line_end.weight"])

    def _grid(self, image: Image) -> Grid:
        cell = self.spec.cell
        assert image.height % cell == image.width % cell == 0
        assert len(image.pixels) == 3 * image.frames * image.height * image.width
        lines, columns = image.height // cell, image.width // cell
        order, sizes = _windows(lines, columns, self.spec.window) if self.spec.window else (None, ())
        windows = tuple((count, cells * self.spec.merge**2) for count, cells in sizes)
        return Grid(lines, columns, order, windows)

    def _turns(self, grid: Grid, squares: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Windows`. Angles are computed in float64, on the host."""
        merge, dim, theta = self.spec.merge, self.spec.head_dim, self.spec.theta
        lines, columns = grid.lines * merge, grid.columns * merge
        if theta is None:
            none = torch.empty(lines * columns + self.spec.lead * squares, 0, device=self._device)
            return none, none
        frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        of_lines, of_columns = frequencies[0::2], frequencies[1::2] if self.spec.dealt else frequencies[0::2]
        first = int(self.spec.lead)
        line = (torch.arange(first, first + lines)[:, None] * of_lines)[:, None].expand(-1, columns, -1)
        column = (torch.arange(first, first + columns)[:, None] * of_columns).expand(lines, -1, -1)
        angles = _cell_by_cell(torch.cat([line, column], dim=-1), merge, grid.order).view(-1, dim // 2)
        if self.spec.lead:
            assert squares == 1
            angles = torch.cat([torch.zeros_like(angles[:1]), angles])
        return angles.cos().to(self._device, torch.float32), angles.sin().to(self._device, torch.float32)

    def _by_cell(self, grid: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """As `_cell_by_cell`; where patches are joined within the tower, squares of 2 x 2 lie together in a cell."""
        if self.spec.shrinks is None:
            return _cell_by_cell(grid, self.spec.merge, order)
        half = self.spec.merge // 2
        sides = grid.shape[0] // (2 * half), half, 2, grid.shape[1] // (2 * half), half, 2
        return grid.reshape(*sides, -1).permute(0, 3, 1, 4, 2, 5, 6).reshape(-1, self.spec.merge**2, grid.shape[-1])

    def _patches(self, image: Image, grid: Grid) -> torch.Tensor:
        """[patches, hidden_size]."""
        spec = self.spec
        side, merge = spec.patch_size, spec.merge
        lines, columns = grid.lines * merge, grid.columns * merge
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        frames = pixels.view(image.frames, lines, side, columns, side, 3)
        patches = frames.permute(1, 3, 5, 0, 2, 4).reshape(lines, columns, -1)
        each = self._by_cell(patches, grid.order).view(-1, 3, image.frames * side * side)
        x = self._patch_rows(each, "patch" if image.frames == 1 else "film")
        if spec.pre_norm and not spec.norm_placed:
            x = self._norm("pre_norm", x)
        if not spec.positions:
            return x
        x = x.view(image.num_squares, -1, spec.hidden_size)
        x += self._by_cell(self._positions(lines // len(x), columns), grid.order).view(-1, spec.hidden_size).to(self._dtype)
        if spec.lead:
            lead = self._tensors["lead.weight"] + self._tensors["positions.weight"][:1]
            x = torch.cat([lead.expand(len(x), 1, -1), x], dim=1)
        x = x.flatten(0, 1)
        return self._norm("pre_norm", x) if spec.norm_placed else x

    def _positions(self, lines: int, columns: int) -> torch.Tensor:
        """[lines, columns, hidden_size] float32, of patches."""
        table = self._tensors["positions.weight"]
        if self.spec.by_axis:
            assert max(lines, columns) <= self.spec.positions
            return table[1, :lines, None].to(torch.float32) + table[0, :columns].to(torch.float32)
        rows = math.isqrt(self.spec.positions)
        table = table[self.spec.lead :].to(torch.float32).view(rows, rows, -1)
        if (rows, rows) == (lines, columns) and self.spec.stretch not in ("tenth", "steps"):
            return table
        if self.spec.stretch in ("nearest", "steps"):
            by_step = self.spec.stretch == "steps"
            line, column = (_nearest(count, rows, by_step=by_step).to(table.device) for count in (lines, columns))
            return table[line][:, column]
        square = table.permute(2, 0, 1)[None]
        if self.spec.stretch == "tenth":
            scales = (lines + 0.1) / rows, (columns + 0.1) / rows
            stretched = functional.interpolate(square, scale_factor=scales, mode="bilinear", align_corners=False)
        else:
            stretched = functional.interpolate(square, (lines, columns), **_STRETCHED[self.spec.stretch])
        return stretched[0].permute(1, 2, 0)

    def _shrunk(self, x: torch.Tensor) -> torch.Tensor:
        """Squares of 2 x 2 patches, which lie together, as one row each."""
        spec = self.spec
        none = torch.empty(len(x), 0, device=self._device)
        attend = attention(Windows(((len(x) // 4, 4),), (none, none)), spec.num_heads, spec.head_dim, x)
        qkv = self._linear("shrink.qkv", self._norm("shrink.attention_norm", x))
        x = x + self._linear("shrink.out", attend(qkv, None))
        mean = x.view(-1, 4, spec.hidden_size).to(torch.float32).mean(dim=1).to(self._dtype)
        return mean + self._two_layers("shrink", self._norm("shrink.norm", x.view(-1, 4 * spec.hidden_size)), "gelu_tanh")

    def _convolve(self, layer: str, x: torch.Tensor, grid: Grid) -> None:
        """A layer that convolves, in place."""
        merge, hidden = self.spec.merge, self.spec.hidden_size
        cells = grid.lines, grid.columns, merge, merge, hidden
        gate, after, values = self._linear(f"{layer}.conv_in", self._norm(f"{layer}.attention_norm", x)).chunk(3, dim=-1)
        plane = (gate * values).view(cells).permute(4, 0, 2, 1, 3).reshape(1, hidden, grid.lines * merge, -1)
        taps = self._tensors[f"{layer}.conv.weight"].to(torch.float32)
        mixed = functional.conv2d(plane.to(torch.float32), taps, padding=self.spec.taps // 2, groups=hidden)
        mixed = mixed.view(hidden, grid.lines, merge, grid.columns, merge).permute(1, 3, 2, 4, 0).reshape(x.shape)
        self._add(layer, x, self._linear(f"{layer}.conv_out", after * mixed.to(x.dtype)))


def tower_of(spec: TowerSpec, tensors: Mapping[str, torch.Tensor], colours: Colours) -> Seeing:
    """A `Tower`, or what its spec says instead."""
    if spec.fastvit is not None:
        return FastVitTower(spec, tensors, colours)
    if spec.projector == "direct":
        return PatchTower(spec, tensors, colours)
    if spec.tiles is not None:
        return TilesTower(spec, tensors, colours)
    return (Tower if spec.sam is None else SamTower)(spec, tensors, colours)


def tower_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a tensor by our name, in a tower that computes in `dtype`."""
    return torch.float32 if "norm." in name or name.endswith(".bounds") else dtype


def work_bytes(spec: TowerSpec, num_pixels: int, dtype: torch.dtype) -> int:
    """About the most that computing an image of so many pixels takes beside the weights."""
    if spec.fastvit is not None:
        return spec.fastvit.most_numbers(num_pixels) * 4
    if spec.projector == "direct":
        return patch_bytes(spec, num_pixels // spec.cell**2)
    if spec.tiles is not None:
        return tile_numbers(spec) * dtype.itemsize
    patches = num_pixels // spec.patch_size**2
    if spec.sam is not None and spec.sam.beside:
        return beside_numbers(spec, patches) * dtype.itemsize
    inner = (4 if spec.gated else 2) * spec.intermediate_size * min(patches, ROWS_TOGETHER)
    if spec.projector == "tabled":
        inner = max(inner, 12 * spec.projector_size * TABLED_TOGETHER // dtype.itemsize)
    numbers = ROWS_KEPT * spec.hidden_size * patches + inner
    if spec.pool is not None:  # what was read of layers is kept, and lies side by side
        numbers = max(numbers, 5 * len(spec.reads) * spec.hidden_size * patches + pool_numbers(spec))
    if spec.resampler is not None:  # its own rows, and attention's keys and values, are kept beside
        size, kept = dtype.itemsize, 4 * spec.hidden_size * patches * dtype.itemsize
        widened = 3 * spec.resampler.between * min(patches, WIDENED_TOGETHER) + spec.out_size * patches
        return max(numbers * size, kept + widened * size, kept + spec.resampler.most_bytes(patches, spec.out_size, size))
    return max(numbers, 0 if spec.sam is None else spec.sam.most_numbers(patches)) * dtype.itemsize


def _cell_by_cell(grid: torch.Tensor, merge: int, order: torch.Tensor | None) -> torch.Tensor:
    """[lines, columns, width] of patches -> [cells, merge^2, width], cells in `order`."""
    lines, columns, width = grid.shape
    cells = grid.reshape(lines // merge, merge, columns // merge, merge, width).transpose(1, 2).reshape(-1, merge**2, width)
    return cells if order is None else cells[order]


def _of_one(x: torch.Tensor) -> Windows:
    none = torch.empty(len(x), 0, device=x.device)
    return Windows(((1, len(x)),), (none, none))


def _nearest(count: int, rows: int, *, by_step: bool = False) -> torch.Tensor:
    """For each of so many patches which of a table's rows, with transformers' rounding."""
    begins = torch.arange(1 / rows, 1.0, 1 / rows)
    places = torch.arange(count) * (1 / torch.tensor(count)) if by_step else torch.arange(count) / count
    return torch.bucketize(places, begins, right=True).clamp(max=rows - 1)


def _line_by_line(rows: torch.Tensor, grid: Grid) -> torch.Tensor:
    if grid.order is None:
        return rows
    out = torch.empty_like(rows)
    out[grid.order] = rows
    return out


def _windows(lines: int, columns: int, side: int) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
    """Cells window by window, the smallest first; and (how many windows, cells in each). At the edges windows are cut."""
    numbers = (np.arange(lines)[:, None] // side * columns + np.arange(columns) // side).flatten()
    _, window, lengths = np.unique(numbers, return_inverse=True, return_counts=True)
    order = np.lexsort((window, lengths[window]))
    sizes, counts = np.unique(lengths, return_counts=True)
    return torch.from_numpy(order), tuple(zip(counts.tolist(), sizes.tolist(), strict=True))
