"""What makes of a tower's rows those that a decoder reads: the projectors of a `TowerSpec`, and their tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_pool import Pooling, pool_shapes
from nanovllm_cli.models.tower_products import activated
from nanovllm_cli.models.tower_queries import query_shapes
from nanovllm_cli.models.tower_resampler import resampler_shapes
from nanovllm_cli.vision_spec import TowerSpec

TABLED_TOGETHER = 256
"""Rows, each of which has a weight for every entry of a table."""


class Grid(NamedTuple):
    """Of an image in cells. order [n]: the cells, window by window; None: line by line. windows: (how many, patches in each),
    those of one size together, if the tower has any."""

    lines: int
    columns: int
    order: torch.Tensor | None
    windows: tuple[tuple[int, int], ...]


class Projecting(Pooling):
    """Of a tower."""

    def _projected(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[patches, hidden_size] -> [cells, out_size], or of "lined" and "resampled" as many as `PlacedImage.num_rows`."""
        eps = self.spec.projector_eps
        if self.spec.projector == "resampled":
            return self._resampled(x)
        if self.spec.projector == "lined":
            return self._lined(x, grid)
        if self.spec.projector == "tabled":
            x = self._joined(x)
            return torch.cat([self._tabled(x[i : i + TABLED_TOGETHER]) for i in range(0, len(x), TABLED_TOGETHER)])
        if self.spec.projector == "placed":
            x = self._linear("projector.join", self._joined(self._norm("projector.norm", x, eps)))
            x = self._norm("projector.mid_norm", x + _places(grid, x.shape[1]).to(x), eps)
            return self._norm("projector.after_norm", self._linear("projector.out", activated(x, "gelu", gated=False)), eps)
        if self.spec.projector in ("pooled", "scaled"):
            means = x.view(-1, self.spec.merge**2, x.shape[-1]).to(torch.float32).mean(dim=1)
            if self.spec.projector == "pooled":
                return self._linear("projector.out", self._norm("projector.norm", means, eps))
            means *= self.spec.hidden_size**0.5  # past what float16 holds
            if self.spec.standardized:
                means -= self._tensors["projector.standard_norm.shift"]
                means *= self._tensors["projector.standard_norm.scale"]
            return self._linear("projector.out", functional.rms_norm(means, means.shape[1:], eps=eps).to(self._dtype))
        if self.spec.projector == "joined":
            x = self._joined(x)
            if not self.spec.projector_size:
                return self._linear("projector.out", x)
            x, gated = self._norm("projector.norm", x, eps) if eps else x, self.spec.projector_gated
            return self._two_layers("projector", x, "silu" if gated else "gelu", gated=gated)
        if self.spec.projector == "timed":
            x = self._norm("projector.norm", self._two_layers("projector", self._joined(x)))
            x = self._norm("projector.time_norm", self._two_layers("projector.time", torch.cat([x, x], dim=1)))
            return self._norm("projector.after_norm", self._linear("projector.out", x), eps)
        if self.spec.projector == "averaged":  # before the second matrix, behind which the mean is the same
            x = activated(self._linear("projector.up", x), "gelu", gated=False)
            means = x.view(-1, self.spec.joins, x.shape[1]).to(torch.float32).mean(dim=1)
            return self._linear("projector.down", means.to(self._dtype))
        if self.spec.projector == "shuffled":
            x = activated(self._two_layers("projector", self._joined(x)), "gelu", gated=False)
            return self._linear("projector.out", x)
        if self.spec.projector == "gated":
            x = self._linear("projector.first", self._linear("projector.join", self._joined(x)))
            x = activated(self._norm("projector.norm", x, eps), "gelu", gated=False)
            return self._two_layers("projector", x, "silu", gated=True)
        x = self._joined(self._norm("projector.norm", x, eps))
        if self.spec.projector == "patch_merger":
            x = self._linear("projector.join", x)
        x = self._two_layers("projector", x)
        return self._linear("projector.out", x) if self.spec.merged_size else x

    def _tabled(self, x: torch.Tensor) -> torch.Tensor:
        weights = self._norm("projector.norm", self._linear("projector.up", x), self.spec.projector_eps).to(torch.float32)
        return self._linear("projector.out", weights.softmax(dim=-1).to(self._dtype))

    def _lined(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        first, line_end, last = (self._tensors[f"projector.{name}.weight"] for name in ("begin", "line_end", "end"))
        x = self._linear("projector.join", self._joined(self._norm("projector.norm", x, self.spec.projector_eps)))
        x = self._linear("projector.first", activated(x, self.spec.activation, gated=False))
        lines = torch.cat([x.view(grid.lines, grid.columns, -1), line_end.expand(grid.lines, 1, -1)], dim=1)
        x = torch.cat([first[None], self._linear("projector.out", lines.flatten(0, 1)), last[None]])
        return self._norm("projector.after_norm", x, self.spec.projector_eps)

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.spec.joins * x.shape[-1])


class Shapes(dict[str, tuple[int, ...]]):
    """Of a tower's tensors, which has biases and norms as its spec says unless they are told otherwise."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self._spec = spec

    def matrix(self, name: str, out: int, width: int, bias: bool | None = None) -> None:
        self[f"{name}.weight"] = (out, width)
        if self._spec.bias if bias is None else bias:
            self[f"{name}.bias"] = (out,)

    def norm(self, name: str, width: int | None = None, kind: str | None = None) -> None:
        self[f"{name}.weight"] = size = (self._spec.hidden_size if width is None else width,)
        if (kind or self._spec.norm) == "layer":
            self[f"{name}.bias"] = size


def projector_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """Of what is read here, by our names; see `tower_shapes`."""
    hidden, joined = spec.hidden_size, spec.joins * spec.hidden_size * max(1, len(spec.reads))
    shapes = Shapes(spec)
    matrix, norm = shapes.matrix, shapes.norm
    if spec.projector == "pooled":
        norm("projector.norm", kind="rms")
        matrix("projector.out", spec.out_size, hidden, bias=False)
        return shapes
    if spec.projector == "scaled":
        if spec.standardized:
            shapes |= dict.fromkeys(("projector.standard_norm.shift", "projector.standard_norm.scale"), (hidden,))
        matrix("projector.out", spec.out_size, hidden, bias=False)
        return shapes
    if spec.projector == "resampled":
        return resampler_shapes(spec)
    if spec.projector == "attended":
        return pool_shapes(spec)
    if spec.projector == "queried":
        return query_shapes(spec)
    if spec.projector == "tabled":
        matrix("projector.up", spec.projector_size, joined, bias=False)
        norm("projector.norm", spec.projector_size, kind="layer")
        matrix("projector.out", spec.out_size, spec.projector_size, bias=False)
        return shapes | {"marks.table": (spec.marks, spec.out_size)}
    if spec.projector == "placed":
        norm("projector.norm")
        matrix("projector.join", spec.out_size, joined, bias=False)
        norm("projector.mid_norm", spec.out_size)
        matrix("projector.out", spec.out_size, spec.out_size, bias=False)
        norm("projector.after_norm", spec.out_size)
        return shapes
    if spec.projector == "joined":
        if not spec.projector_size:
            matrix("projector.out", spec.out_size, joined, spec.projector_bias)
            return shapes
        if spec.projector_eps:
            norm("projector.norm", joined, kind="layer")
        bias = spec.bias or spec.projector_bias
        matrix("projector.up", (1 + spec.projector_gated) * spec.projector_size, joined, bias)
        matrix("projector.down", spec.out_size, spec.projector_size, bias)
        return shapes
    if spec.projector == "timed":
        for name, its_norm, width in (("projector", "norm", joined), ("projector.time", "time_norm", 2 * joined)):
            matrix(f"{name}.up", joined, width)
            matrix(f"{name}.down", joined, joined)
            norm(f"projector.{its_norm}", joined, kind="layer")
        matrix("projector.out", spec.out_size, joined)
        norm("projector.after_norm", spec.out_size, kind="rms")
        return shapes
    if spec.projector == "averaged":
        matrix("projector.up", spec.projector_size, hidden)
        matrix("projector.down", spec.out_size, spec.projector_size)
        return shapes
    if spec.projector == "shuffled":
        matrix("projector.up", spec.projector_size, joined, bias=False)
        matrix("projector.down", spec.projector_size, spec.projector_size, bias=False)
        matrix("projector.out", spec.out_size, spec.projector_size, bias=False)
        return shapes
    if spec.projector == "gated":
        matrix("projector.join", spec.out_size, joined, bias=True)
        matrix("projector.first", spec.out_size, spec.out_size, bias=False)
        norm("projector.norm", spec.out_size, kind="layer")
        matrix("projector.up", 2 * spec.projector_size, spec.out_size, bias=False)
        matrix("projector.down", spec.out_size, spec.projector_size, bias=False)
        return shapes
    if spec.projector == "lined":
        norm("projector.norm", kind="rms")
        matrix("projector.join", 2 * hidden, joined)
        matrix("projector.first", 4 * hidden, 2 * hidden)
        shapes["projector.line_end.weight"] = (4 * hidden,)
        matrix("projector.out", spec.out_size, 4 * hidden)
        shapes |= dict.fromkeys(("projector.begin.weight", "projector.end.weight"), (spec.out_size,))
        norm("projector.after_norm", spec.out_size, kind="rms")
        return shapes
    if spec.projector == "merger" and spec.projector_size:
        norm("projector.norm", kind="layer")
        matrix("projector.up", spec.projector_size, joined, spec.projector_bias)
        matrix("projector.down", spec.out_size, spec.projector_size, spec.projector_bias)
        return shapes
    norm("projector.norm")
    if spec.projector == "patch_merger":
        matrix("projector.join", hidden, joined, bias=False)
        matrix("projector.up", spec.out_size, hidden)
        matrix("projector.down", spec.out_size, spec.out_size)
        return shapes
    matrix("projector.up", joined, joined)
    matrix("projector.down", spec.merged_size or spec.out_size, joined)
    if spec.merged_size:
        matrix("projector.out", spec.out_size, spec.merged_size)
    return shapes


def _places(grid: Grid, width: int) -> torch.Tensor:
    """[cells, width] float64: sines and cosines of a cell's column, then of its line."""
    turns = 1e4 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = [torch.arange(count)[:, None] * turns for count in (grid.columns, grid.lines)]
    column, line = (torch.cat([each.sin(), each.cos()], dim=1) for each in angles)
    return torch.cat([column.expand(grid.lines, -1, -1), line[:, None].expand(-1, grid.columns, -1)], dim=2).flatten(0, 1)
