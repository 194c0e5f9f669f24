"""A Perceiver, whose queries look at all that a tower made of an image (Idefics 2): see `ResamplerSpec`. No matrix of scores is
made."""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_queries import Querying
from nanovllm_cli.vision_spec import TowerSpec

WIDENED_TOGETHER = 512
"""Rows that become as wide as queries, by inner rows that are several times as wide."""
_RATIO = 4


class Resampling(Querying):
    """Of a tower."""

    def _resampled(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, hidden_size] -> [queries, out_size]."""
        spec = self.spec.resampler
        assert spec is not None
        parts = [x[first : first + WIDENED_TOGETHER] for first in range(0, len(x), WIDENED_TOGETHER)]
        x = torch.cat([self._two_layers("projector", part, "silu", gated=True) for part in parts])
        rows = self._tensors["resampler.queries.table"]
        for i in range(spec.num_layers):
            name = f"resampler.{i}"
            asked = self._norm(f"{name}.query_norm", rows, spec.eps)
            q = self._linear(f"{name}.q", asked)
            seen = torch.cat([self._norm(f"{name}.norm", x, spec.eps), asked])
            k, v = self._linear(f"{name}.kv", seen).chunk(2, dim=-1)
            q, k, v = (each.view(len(each), -1, spec.head_dim).transpose(0, 1)[None] for each in (q, k, v))
            found = functional.scaled_dot_product_attention(q, k, v, enable_gqa=spec.key_heads != spec.num_heads)
            rows = rows + self._linear(f"{name}.out", found[0].transpose(0, 1).reshape(len(rows), -1))
            rows = rows + self._two_layers(name, self._norm(f"{name}.mlp_norm", rows, spec.eps), "silu", gated=True)
        return self._norm("resampler.norm", rows, spec.eps)


def resampler_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """Of what is read here, by our names; see `tower_shapes`."""
    own, width = spec.resampler, spec.out_size
    assert own is not None
    heads, keys = own.num_heads * own.head_dim, own.key_heads * own.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "projector.up.weight": (2 * own.between, spec.hidden_size), "projector.down.weight": (width, own.between),
        "resampler.queries.table": (own.queries, width), "resampler.norm.weight": (width,),
    }  # fmt: skip
    for i in range(own.num_layers):
        name = f"resampler.{i}"
        shapes |= dict.fromkeys((f"{name}.{each}norm.weight" for each in ("", "query_", "mlp_")), (width,))
        shapes |= {f"{name}.q.weight": (heads, width), f"{name}.kv.weight": (2 * keys, width)}
        shapes |= {f"{name}.out.weight": (width, heads)}
        shapes |= {f"{name}.up.weight": (2 * _RATIO * width, width), f"{name}.down.weight": (width, _RATIO * width)}
    return shapes
