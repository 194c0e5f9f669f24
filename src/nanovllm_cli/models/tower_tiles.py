"""Llama 3.2's tower: all tiles of an image at once, whose rows see each other (`TilesSpec`). There are always the rows of as many
tiles as there may be, as those of an image see what the others have.

Rows of an image lie in front, tile by tile, and behind them all others: those don't see each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from nanovllm_cli.models.tower_attention import Windows, attention
from nanovllm_cli.models.tower_layers import ROWS_TOGETHER, Colours, Seeing, Stages, TowerRows
from nanovllm_cli.models.tower_projectors import Shapes
from nanovllm_cli.vision_spec import Image, TowerSpec

_TABLES = "before.table", "positions.table", "behind.table"
_GATES = "before.gate", "positions.gate", "behind.gate"


class TilesTower(Seeing):
    """tensors: by our names (`tiles_shapes`); gates are tanhs already."""

    spec: TowerSpec

    def __init__(self, spec: TowerSpec, tensors: Mapping[str, torch.Tensor], colours: Colours) -> None:
        super().__init__(spec, tensors, tiles_shapes(spec), colours)
        assert spec.tiles is not None
        self._tiles = spec.tiles

    def stages(self, image: Image) -> Stages:
        """As many as the spec has layers. The image is of whole tiles, in a grid that there is."""
        spec, tiles = self.spec, self._tiles
        side = math.isqrt(spec.positions)
        grid = image.height // (side * spec.patch_size), image.width // (side * spec.patch_size)
        table = 1 + tiles.grids.index(grid)
        every = self._tile_rows(image, grid, table)
        of_one, num_filled, count = spec.positions + 1, every.shape[1], math.prod(grid)
        is_seen = torch.zeros(every.shape[:2], dtype=torch.bool, device=self._device)
        is_seen[:count, :of_one] = True
        order = torch.cat([each.flatten().nonzero()[:, 0] for each in (is_seen, ~is_seen)])
        seen = count * of_one
        x = every.flatten(0, 1)[order]
        none = torch.empty(len(x), 0, device=self._device)
        windows = Windows(((1, len(x)),), (none, none), len(x) - seen)
        attend, num_local = attention(windows, spec.num_heads, spec.head_dim, x), spec.num_layers - tiles.num_global
        read: list[torch.Tensor] = []
        for i in range(num_local):
            if i:
                yield
            self._layer(f"layers.{i}", x, attend)
            read += [x[:seen].clone()] if i in tiles.reads else []
        x = self._norm("post_norm", x)
        x += (self._tensors["behind.table"][table] * self._tensors["behind.gate"])[order // num_filled]
        for i in range(tiles.num_global):
            yield
            self._layer(f"globals.{i}", x, attend)
        rows = torch.cat([x[:seen], *([torch.stack(read, dim=-1).flatten(1)] if read else [])], dim=1)
        return TowerRows(self._linear("projector.out", rows))

    def _tile_rows(self, image: Image, grid: tuple[int, int], table: int) -> torch.Tensor:
        """[tiles, rows of one, hidden_size], in front of the first layer."""
        spec, tiles, tensors = self.spec, self._tiles, self._tensors
        (lines, columns), side, patch = grid, math.isqrt(spec.positions), spec.patch_size
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        patches = pixels.view(lines, side, patch, columns, side, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
        of_one = spec.positions + 1
        x = torch.zeros(tiles.most, tiles.filled(of_one), spec.hidden_size, dtype=self._dtype, device=self._device)
        x[: lines * columns, 1:of_one] = self._patch_rows(patches.reshape(-1, 3, patch**2)).view(lines * columns, -1, x.shape[2])
        x[:, 1:of_one] += (tensors["before.table"][table] * tensors["before.gate"])[:, None]
        x[:, 0] = tensors["lead.weight"]
        gate = tensors["positions.gate"]
        x[:, :of_one] += (1 - gate) * tensors["positions.weight"]
        x[:, :of_one] += gate * tensors["positions.table"][table]
        x[:, :of_one] = self._norm("pre_norm", x[:, :of_one])
        return x


def tiles_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """Of its tensors, by our names."""
    tiles, hidden, inner = spec.tiles, spec.hidden_size, spec.intermediate_size
    assert tiles is not None
    shapes, of_one, tables = Shapes(spec), spec.positions + 1, 1 + len(tiles.grids)
    shapes.matrix("patch", hidden, 3 * spec.patch_size**2, bias=False)
    shapes |= {"lead.weight": (1, hidden), "positions.weight": (of_one, hidden)}
    shapes |= dict.fromkeys(_TABLES, (tables, tiles.most, hidden))
    shapes["positions.table"] = (tables, tiles.most, of_one, hidden)
    shapes |= dict.fromkeys(_GATES, (1,))
    shapes.norm("pre_norm")
    num_local = spec.num_layers - tiles.num_global
    for layer in (*(f"layers.{i}" for i in range(num_local)), *(f"globals.{i}" for i in range(tiles.num_global))):
        shapes.norm(f"{layer}.attention_norm")
        shapes.matrix(f"{layer}.qkv", 3 * hidden, hidden, bias=False)
        shapes.matrix(f"{layer}.out", hidden, hidden, bias=False)
        shapes.norm(f"{layer}.mlp_norm")
        shapes.matrix(f"{layer}.up", inner, hidden)
        shapes.matrix(f"{layer}.down", hidden, inner)
    for i in range(tiles.num_global):
        shapes |= dict.fromkeys((f"globals.{i}.attention_scale.weight", f"globals.{i}.mlp_scale.weight"), (1,))
    shapes.norm("post_norm")
    shapes.matrix("projector.out", spec.out_size, hidden * (1 + len(tiles.reads)), bias=True)
    return shapes


def tiles_stored(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """The same as folders have it."""
    shapes = tiles_shapes(spec)
    shapes |= {name: (shapes[name][0], math.prod(shapes[name][1:])) for name in _TABLES}
    side = (spec.patch_size, spec.patch_size)
    return shapes | {"patch.weight": (spec.hidden_size, 3, *side), "lead.weight": (spec.hidden_size,)}


def tiles_arranged(ours: str, stored: torch.Tensor, spec: TowerSpec) -> torch.Tensor:
    """As `tiles_shapes` has it."""
    if ours.endswith((".gate", "_scale.weight")):
        return stored.to(torch.float32).tanh()
    return stored.reshape(tiles_shapes(spec)[ours])


def tile_numbers(spec: TowerSpec) -> int:
    """About the most that there are at once, of any image."""
    assert spec.tiles is not None
    rows = spec.tiles.most * spec.tiles.filled(spec.positions + 1)
    inner = 2 * spec.intermediate_size * min(rows, ROWS_TOGETHER)
    return (_ROWS_KEPT + 2 * len(spec.tiles.reads)) * spec.hidden_size * rows + inner


_ROWS_KEPT = 12
"""As wide as the hidden size, of each row, at a time: as it is read, its norm, queries, keys and values twice, and what comes of
them."""
