"""Q-Formers (Li et al. 2023) in windows, which make rows of what layers of a tower give (Granite 4 Vision): of each window of
cells, queries see each other and then the window's patches. Norms are behind what they add to.

Each cell of 2 x 2 patches is a query: their mean, or one of them, and what is learned of its place in a window.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_layers import Seeing
from nanovllm_cli.models.tower_products import activated
from nanovllm_cli.vision_spec import TowerSpec

HEAD_DIM = 64
_EPS = 1e-6  # of the norm in front, whatever a config says


class Querying(Seeing):
    """Of a tower."""

    spec: TowerSpec

    def _queried(self, name: str, x: torch.Tensor, corner: int | None) -> torch.Tensor:
        """[patches, hidden_size], cell by cell, of one square after another -> [cells, out_size]."""
        hidden, eps, side = self.spec.hidden_size, self.spec.projector_eps, self.spec.query_side
        windows, patches = math.isqrt(self.spec.positions) // self.spec.merge // side, self.spec.merge**2
        x = self._norm(f"{name}.norm", x, _EPS)
        cells = x.view(-1, windows, side, windows, side, patches, hidden).transpose(2, 3).reshape(-1, side**2, patches, hidden)
        asked = cells.to(torch.float32).mean(dim=2).to(x.dtype) if corner is None else cells[:, :, corner]
        asked = self._norm(f"{name}.in_norm", asked + self._tensors[f"{name}.query.table"], eps)
        seen = (cells + self._tensors[f"{name}.places.table"]).flatten(1, 2)
        x = asked.flatten(0, 1)
        q, k, v = self._linear(f"{name}.qkv", x).chunk(3, dim=-1)
        x = self._norm(f"{name}.out_norm", self._linear(f"{name}.self_out", _attended(q, k, v, len(asked))) + x, eps)
        q = self._linear(f"{name}.cross_q", x)
        k, v = self._linear(f"{name}.cross_kv", seen.flatten(0, 1)).chunk(2, dim=-1)
        x = self._norm(f"{name}.cross_norm", self._linear(f"{name}.cross_out", _attended(q, k, v, len(asked))) + x, eps)
        made = self._linear(f"{name}.down", activated(self._linear(f"{name}.up", x), "gelu", gated=False))
        rows = self._linear(f"{name}.out", self._norm(f"{name}.mlp_norm", made + x, eps))
        return rows.view(-1, windows, windows, side, side, rows.shape[-1]).transpose(2, 3).reshape(rows.shape)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: int) -> torch.Tensor:
    """[windows * n, hidden], windows behind each other."""
    q_, k_, v_ = (each.reshape(windows, -1, each.shape[1] // HEAD_DIM, HEAD_DIM).transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q_, k_, v_).transpose(1, 2).reshape(q.shape)


def query_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """Of what is read here, by our names; see `tower_shapes`. tables: of the cells of a window, and of the patches of each."""
    hidden, inner, cells = spec.hidden_size, spec.projector_size, spec.query_side**2
    shapes: dict[str, tuple[int, ...]] = {}
    for name in spec.query_names:
        for norm in ("norm", "in_norm", "out_norm", "cross_norm", "mlp_norm"):
            shapes |= {f"{name}.{norm}.weight": (hidden,), f"{name}.{norm}.bias": (hidden,)}
        for matrix, out, width in (
            ("qkv", 3 * hidden, hidden), ("self_out", hidden, hidden), ("cross_q", hidden, hidden),
            ("cross_kv", 2 * hidden, hidden), ("cross_out", hidden, hidden), ("up", inner, hidden), ("down", hidden, inner),
            ("out", spec.out_size, hidden),
        ):  # fmt: skip
            shapes |= {f"{name}.{matrix}.weight": (out, width), f"{name}.{matrix}.bias": (out,)}
        shapes |= {f"{name}.query.table": (cells, hidden), f"{name}.places.table": (cells, spec.merge**2, hidden)}
    return shapes
