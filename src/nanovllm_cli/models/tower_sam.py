"""SAM's encoder, which is GOT-OCR 2's tower, and in DeepSeek-OCRs' has a transformer behind it: in the second's queries read what
it made of an image, the first's is a CLIP, whose rows lie beside those that it reads (`SamSpec`). An image is a stage a layer,
those of SAM's first.

How far patches lie apart is added to scores as products: a query is longer by what it makes of each line's and column's distance,
a key by ones at its own. So no matrix of scores is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_attention import HeadNorms, Windows, attention
from nanovllm_cli.models.tower_layers import ROWS_TOGETHER, Colours, Seeing, Stages, TowerRows
from nanovllm_cli.vision_spec import Image, TowerSpec


class SamTower(Seeing):
    """tensors: by our names (`sam_shapes`)."""

    spec: TowerSpec

    def __init__(self, spec: TowerSpec, tensors: Mapping[str, torch.Tensor], colours: Colours) -> None:
        super().__init__(spec, tensors, sam_shapes(spec), colours)
        assert spec.sam is not None
        self._sam = spec.sam

    def stages(self, image: Image) -> Stages:
        """SAM's first. The image is a square, and has as many of the spec's cells as there are queries, if any are; or of a line
        of squares, or of such below each other, where rows are read `beside` each other."""
        side = min(image.width, image.height) // self.spec.patch_size
        squares = self._patches(image, side)
        for i in range(self._sam.num_layers):
            if i:
                yield
            for x in squares:
                self._sam_layer(i, x, side)
        seen = torch.cat([self._shrunk(x, side) for x in squares])
        del squares
        if self._sam.beside:
            yield
            return (yield from self._beside(seen, image))
        if self._sam.queries is None:
            return TowerRows(self._linear("projector.out", seen))
        yield
        queries = self._tensors["queries.small" if len(seen) == self._sam.queries[0] else "queries.large"]
        assert len(queries) == len(seen)
        x = torch.cat([seen, queries])
        attend = _Queries(self.spec, len(seen), x)
        for i in range(self.spec.num_layers):
            if i:
                yield
            self._layer(f"layers.{i}", x, attend)
        rows = self._linear("projector.out", self._norm("post_norm", x[len(seen) :]))
        if len(seen) == self._sam.queries[1]:
            rows = torch.cat([rows, self._tensors["separator.weight"][None]])
        return TowerRows(rows)

    def _beside(self, seen: torch.Tensor, image: Image) -> Stages:
        """seen [squares * cells, hidden_size], which a CLIP reads as its patches."""
        side, hidden = min(image.width, image.height) // self.spec.cell, self.spec.hidden_size
        squares = seen.view(-1, side**2, hidden)
        table = self._tensors["behind.positions"]
        lead = (self._tensors["behind.lead"] + table[0]).expand(len(squares), 1, hidden)
        x = torch.cat([lead, squares + self._stretched(table[1:], side)], dim=1).flatten(0, 1)
        x = self._norm("pre_norm", x)
        none = torch.empty(len(x), 0, device=self._device)
        windows = Windows(((len(squares), side**2 + 1),), (none, none))
        attend = attention(windows, self.spec.num_heads, self.spec.head_dim, x)
        for i in range(self.spec.num_layers):
            if i:
                yield
            self._layer(f"layers.{i}", x, attend)
        made = x.view(len(squares), -1, hidden)[:, 1:]
        rows = self._linear("projector.out", torch.cat([made, squares], dim=-1).flatten(0, 1))
        down, across = image.height // self.spec.cell, image.width // self.spec.cell
        lines = rows.view(-1, across // side, side, side, rows.shape[-1]).transpose(1, 2).reshape(down, across, -1)
        lines = torch.cat([lines, self._tensors["line_end.weight"].expand(down, 1, -1)], dim=1).flatten(0, 1)
        return TowerRows(torch.cat([lines, self._tensors["separator.weight"][None]]) if down == across else lines)

    def _patches(self, image: Image, side: int) -> torch.Tensor:
        """[squares, patches, width of SAM], line by line."""
        patch = self.spec.patch_size
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        across = image.width // patch // side
        pixels = pixels.view(-1, side, patch, across, side, patch, 3).permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 1)
        x = torch.stack([self._patch_rows(square.reshape(-1, 3, patch**2)) for square in pixels])
        return x.add_(self._stretched(self._tensors["positions.weight"], side))

    def _stretched(self, table: torch.Tensor, side: int) -> torch.Tensor:
        """Positions of a square, for one of another side."""
        rows = math.isqrt(len(table))
        if rows == side:
            return table
        square = table.view(rows, rows, -1).permute(2, 0, 1)[None].to(torch.float32)
        square = functional.interpolate(square, (side, side), mode="bicubic", align_corners=False, antialias=True)
        return square[0].permute(1, 2, 0).reshape(side**2, -1).to(self._dtype)

    def _sam_layer(self, i: int, x: torch.Tensor, side: int) -> None:
        """Adds to x, in place."""
        name, eps = f"sam.{i}", self._sam.eps
        normed = self._norm(f"{name}.attention_norm", x, eps)
        window = side if i in self._sam.full else self._sam.window
        squares = _in_squares(normed, side, window)
        q, k, v = self._linear(f"{name}.qkv", squares.flatten(0, 1)).view(*squares.shape[:2], 3, self._sam.num_heads, -1).permute(
            2, 0, 3, 1, 4
        )
        q, k = self._with_distances(name, q, k, window)
        wide = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))  # as wide as keys: else torch makes a matrix of scores
        seen = functional.scaled_dot_product_attention(q, k, wide, scale=1.0)[..., : v.shape[-1]]
        seen = self._linear(f"{name}.out", seen.transpose(1, 2).reshape(-1, self._sam.hidden_size))
        x += _line_by_line(seen.view(squares.shape), side, window)
        x += self._two_layers(name, self._norm(f"{name}.mlp_norm", x, eps))

    def _with_distances(self, name: str, q: torch.Tensor, k: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of patches of squares of side x side, [squares, heads, patches, dim]: scaled, and with what stands for distances."""
        place = torch.arange(side, device=q.device)
        apart = place[:, None] - place + side - 1
        lines, columns = (_of_distances(self._tensors[f"{name}.{axis}"], side)[apart] for axis in ("by_line", "by_column"))
        grid = q.reshape(*q.shape[:2], side, side, -1)
        by_line = torch.einsum("bhlcd,lkd->bhlck", grid, lines.to(q.dtype)).flatten(2, 3)
        by_column = torch.einsum("bhlcd,ckd->bhlck", grid, columns.to(q.dtype)).flatten(2, 3)
        ones = torch.eye(side, dtype=q.dtype, device=q.device)
        own = torch.cat([ones.repeat_interleave(side, 0), ones.repeat(side, 1)], dim=1).expand(*k.shape[:3], -1)
        return torch.cat([q * self._sam.head_dim**-0.5, by_line, by_column], dim=-1), torch.cat([k, own], dim=-1)

    def _shrunk(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """[patches, width of SAM] -> [cells, hidden_size]."""
        plane = self._convolved("neck.first", x.T.reshape(1, -1, side, side))
        plane = self._convolved("neck.second", self._plane_norm("neck.first_norm", plane), padding=1)
        plane = self._convolved("shrink.first", self._plane_norm("neck.second_norm", plane), padding=1, stride=2)
        return self._convolved("shrink.second", plane, padding=1, stride=2)[0].flatten(1).T.contiguous()

    def _convolved(self, name: str, plane: torch.Tensor, padding: int = 0, stride: int = 1) -> torch.Tensor:
        return functional.conv2d(plane, self._tensors[f"{name}.weight"], padding=padding, stride=stride)

    def _plane_norm(self, name: str, plane: torch.Tensor) -> torch.Tensor:
        return self._norm(name, plane.permute(0, 2, 3, 1), _NECK_EPS).permute(0, 3, 1, 2)


_NECK_EPS = 1e-6
_KEPT_BEHIND = 17
"""Rows of what is behind SAM, a cell, at a time; see `ROWS_KEPT` of tower.py."""


class _Queries:
    """See `Attend`: the first rows see each other, those behind them also all before themselves. Positions are one behind the
    other, and halves of a head turn as in any decoder."""

    def __init__(self, spec: TowerSpec, num_seen: int, like: torch.Tensor) -> None:
        count = len(like)
        self._shape = spec.num_heads, spec.key_heads or spec.num_heads, spec.head_dim
        self._mask = torch.ones(count, count, dtype=torch.bool, device=like.device).tril()
        self._mask[:num_seen, :num_seen] = True
        assert spec.theta is not None
        turns = spec.theta ** -(torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
        angles = torch.arange(count)[:, None, None] * turns
        self._cos, self._sin = (each.to(like.device, torch.float32) for each in (angles.cos(), angles.sin()))

    def __call__(self, qkv: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        assert norms is None
        heads, key_heads, dim = self._shape
        q, k, v = qkv.view(len(qkv), -1, dim).tensor_split([heads, heads + key_heads], dim=1)
        q, k, v = (each.to(qkv.dtype).transpose(0, 1)[None] for each in (self._turned(q), self._turned(k), v))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=key_heads != heads)
        return seen[0].transpose(0, 1).reshape(len(qkv), -1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.to(torch.float32).chunk(2, dim=-1)
        return torch.cat([first * self._cos - second * self._sin, second * self._cos + first * self._sin], dim=-1)


def sam_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """What it is made of, by our names; see `tower_shapes`."""
    sam, hidden, inner = spec.sam, spec.hidden_size, spec.intermediate_size
    assert sam is not None
    shapes: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out: int, width: int, *, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, width)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, width: int) -> None:
        shapes.update(dict.fromkeys((f"{name}.weight", f"{name}.bias"), (width,)))

    matrix("patch", sam.hidden_size, 3 * spec.patch_size**2)
    shapes["positions.weight"] = (sam.positions, sam.hidden_size)
    for i in range(sam.num_layers):
        side = math.isqrt(sam.positions) if i in sam.full else sam.window
        norm(f"sam.{i}.attention_norm", sam.hidden_size)
        matrix(f"sam.{i}.qkv", 3 * sam.hidden_size, sam.hidden_size)
        matrix(f"sam.{i}.out", sam.hidden_size, sam.hidden_size)
        shapes |= dict.fromkeys((f"sam.{i}.by_line", f"sam.{i}.by_column"), (2 * side - 1, sam.head_dim))
        norm(f"sam.{i}.mlp_norm", sam.hidden_size)
        matrix(f"sam.{i}.up", sam.intermediate_size, sam.hidden_size)
        matrix(f"sam.{i}.down", sam.hidden_size, sam.intermediate_size)
    shapes["neck.first.weight"] = (sam.neck, sam.hidden_size, 1, 1)
    norm("neck.first_norm", sam.neck)
    shapes["neck.second.weight"] = (sam.neck, sam.neck, 3, 3)
    norm("neck.second_norm", sam.neck)
    shapes |= {"shrink.first.weight": (sam.middle, sam.neck, 3, 3), "shrink.second.weight": (hidden, sam.middle, 3, 3)}
    matrix("projector.out", spec.out_size, 2 * hidden if sam.beside else hidden)
    if sam.beside:
        shapes |= {"behind.lead": (hidden,), "behind.positions": (spec.positions + 1, hidden)}
        norm("pre_norm", hidden)
        for i in range(spec.num_layers):
            norm(f"layers.{i}.attention_norm", hidden)
            matrix(f"layers.{i}.qkv", spec.qkv_rows, hidden)
            matrix(f"layers.{i}.out", hidden, hidden)
            norm(f"layers.{i}.mlp_norm", hidden)
            matrix(f"layers.{i}.up", inner, hidden)
            matrix(f"layers.{i}.down", hidden, inner)
        return shapes | dict.fromkeys(("line_end.weight", "separator.weight"), (spec.out_size,))
    if sam.queries is None:
        return shapes
    for i in range(spec.num_layers):
        shapes[f"layers.{i}.attention_norm.weight"] = shapes[f"layers.{i}.mlp_norm.weight"] = (hidden,)
        matrix(f"layers.{i}.qkv", spec.qkv_rows, hidden)
        matrix(f"layers.{i}.out", hidden, hidden, bias=False)
        matrix(f"layers.{i}.up", 2 * inner, hidden, bias=False)
        matrix(f"layers.{i}.down", hidden, inner, bias=False)
    shapes["post_norm.weight"] = (hidden,)
    shapes |= {f"queries.{kind}": (count, hidden) for kind, count in zip(("small", "large"), sam.queries, strict=True)}
    shapes["separator.weight"] = (spec.out_size,)
    return shapes


def sam_stored(spec: TowerSpec, *, of_file: bool = False) -> dict[str, tuple[int, ...]]:
    """The same as folders have it, or GGUF files."""
    sam = spec.sam
    assert sam is not None
    side = math.isqrt(sam.positions)
    shapes = sam_shapes(spec) | {
        "patch.weight": (sam.hidden_size, 3, spec.patch_size, spec.patch_size),
        "positions.weight": (1, side, side, sam.hidden_size),
    }
    return shapes | {"separator.weight": (1, spec.out_size)} if of_file and sam.queries is not None else shapes


def beside_numbers(spec: TowerSpec, patches: int) -> int:
    """About the most that there are at once of an image of so many patches, in squares no larger than SAM's positions."""
    sam = spec.sam
    assert sam is not None
    cells = patches // spec.merge**2
    first = 2 * sam.hidden_size * patches + sam.most_numbers(min(patches, sam.positions))
    behind = _KEPT_BEHIND * spec.hidden_size * cells + 2 * spec.intermediate_size * min(cells, ROWS_TOGETHER)
    return max(first, behind)


def _in_squares(rows: torch.Tensor, side: int, window: int) -> torch.Tensor:
    """[side^2, width] -> [squares, window^2, width], of which those at the edges are filled up with zeros."""
    more, width = -side % window, rows.shape[1]
    plane = functional.pad(rows.view(side, side, width), (0, 0, 0, more, 0, more))
    count = len(plane) // window
    return plane.view(count, window, count, window, width).transpose(1, 2).reshape(-1, window**2, width)


def _line_by_line(squares: torch.Tensor, side: int, window: int) -> torch.Tensor:
    """And back."""
    width, count = squares.shape[-1], -(-side // window)
    plane = squares.view(count, count, window, window, width).transpose(1, 2).reshape(count * window, count * window, width)
    return plane[:side, :side].reshape(side**2, width)


def _of_distances(table: torch.Tensor, side: int) -> torch.Tensor:
    """[2 * side - 1, dim]: of a table of other distances, between its rows."""
    if len(table) == 2 * side - 1:
        return table
    made = functional.interpolate(table.T[None].to(torch.float32), 2 * side - 1, mode="linear")
    return made[0].T
