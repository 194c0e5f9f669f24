"""Towers for sounds whose layers are conformers' that see blocks of rows, and of which queries make rows (`ShawSpec`: Granite
Speech). See `ear.py`.

To a score belongs what a query says of the distance (Shaw et al. 2018), beside what it says of the key. Halfway up, what the rows
were trained to be read as is added to them. A Q-Former (Li et al. 2023) makes few rows of each window of many: its queries see
each other, then the window, and norms are behind what they add to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.hearing_spec import EarSpec
from nanovllm_cli.models.tower_layers import ROWS_TOGETHER, Matrices, Stages, TowerRows
from nanovllm_cli.models.tower_products import activated

_SHARE = 0.5
"""Of what its MLPs give."""
_WINDOWS_TOGETHER = 256


class Shaw(Matrices):
    """tensors: by our names (`shaw_shapes`), on one device, norms in float32 and all others in one type."""

    def __init__(self, spec: EarSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec.eps, tensors, shaw_shapes(spec), "front")
        assert spec.shaw is not None
        self._spec, self._shaw = spec, spec.shaw

    def stages(self, values: torch.Tensor, heard: int, ordinal: int) -> Stages:
        """Of [frames, bins] in float32. See `Ear.stages`."""
        spec, shaw = self._spec, self._shaw
        rows = spec.num_rows(heard)
        pairs = values[: 2 * rows].reshape(rows, -1).to(self._device, self._dtype)
        x = self._linear("front", pairs)
        kept = [x] if 0 in shaw.kept else []
        for i in range(spec.num_layers):
            if i:
                yield
            x = self._layer(f"layers.{i}", x)
            if i + 1 == spec.num_layers // 2:
                likely = self._linear("classes.up", x).to(torch.float32).softmax(dim=-1)
                x = x + self._linear("classes.down", likely.to(self._dtype))
            if i + 1 in shaw.kept:  # of the one halfway up with what is added, as in transformers
                kept.append(x)
        x = torch.cat([*kept, x], dim=1) if kept else x
        windows = functional.pad(x, (0, 0, 0, -rows % shaw.window)).view(-1, shaw.window, x.shape[1])
        return TowerRows(torch.cat([self._queried(part) for part in _parts(windows, _WINDOWS_TOGETHER)]))

    def _layer(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        x = x + _SHARE * self._mlp(f"{layer}.first", x)
        x = x + self._attention(layer, self._norm(f"{layer}.attention_norm", x))
        x = x + self._convolution(f"{layer}.conv", x)
        x = x + _SHARE * self._mlp(f"{layer}.second", x)
        return self._norm(f"{layer}.norm", x)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        parts = _parts(self._norm(f"{name}.norm", x), ROWS_TOGETHER)
        return torch.cat([self._two_layers(name, part, "silu") for part in parts])

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """The last block may be shorter."""
        size, table = self._shaw.block, self._tensors[f"{layer}.distances.table"].to(torch.float32)
        near = table[self._shaw.farthest - size + 1 : self._shaw.farthest + size]  # [2 * size - 1, dim]
        qkv = self._linear(f"{layer}.qkv", x).to(torch.float32)
        whole = len(x) // size * size
        parts = [(qkv[:whole], size), (qkv[whole:], len(x) - whole)]
        seen = [self._in_blocks(part, length, near) for part, length in parts if len(part)]
        return self._linear(f"{layer}.out", torch.cat(seen).to(self._dtype))

    def _in_blocks(self, qkv: torch.Tensor, length: int, near: torch.Tensor) -> torch.Tensor:
        """[n * length, 3 * hidden] -> [n * length, hidden]."""
        spec = self._spec
        q, k, v = (
            each.view(-1, length, spec.num_heads, spec.head_dim).transpose(1, 2) for each in qkv.chunk(3, dim=1)
        )  # [n, heads, length, dim]
        places = torch.arange(length, device=qkv.device)
        away = places[:, None] - places + self._shaw.block - 1
        made = []
        for first in range(len(q)):  # a block at a time: its scores are as large as it is long, twice
            scores = q[first] @ k[first].transpose(1, 2)
            scores += (q[first] @ near.T).gather(2, away.expand(spec.num_heads, -1, -1))
            made.append((scores * spec.head_dim**-0.5).softmax(dim=-1) @ v[first])
        return torch.stack(made).transpose(1, 2).reshape(-1, spec.hidden_size)

    def _convolution(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Gated by the half of what goes in; a channel sees nothing but itself, before and behind it."""
        parts = _parts(self._norm(f"{name}.norm", x), ROWS_TOGETHER)
        gated = torch.cat([functional.glu(self._linear(f"{name}.up", part), dim=-1) for part in parts])
        size, kernel = self._shaw.kernel, self._tensors[f"{name}.kernel"].to(torch.float32)
        seen = functional.pad(gated, (0, 0, size // 2, size - 1 - size // 2)).to(torch.float32)
        made = seen[: len(x)] * kernel[:, 0]
        for i in range(1, size):
            made.addcmul_(seen[i : i + len(x)], kernel[:, i])
        gain, shift = self._tensors[f"{name}.batch_norm.table"]
        return self._linear(f"{name}.down", functional.silu(made * gain + shift).to(self._dtype))

    def _queried(self, windows: torch.Tensor) -> torch.Tensor:
        """[n, rows, width] -> [n * queries, out_size]."""
        shaw, count = self._shaw, len(windows)
        asked = self._norm("query_norm", self._tensors["query.table"], shaw.query_eps)
        x, seen = asked.repeat(count, 1), windows.flatten(0, 1)
        for layer in (f"asked.{i}" for i in range(shaw.query_layers)):
            q, k, v = self._linear(f"{layer}.qkv", x).chunk(3, dim=1)
            x = self._added(f"{layer}.self", x, self._attended(q, k, v, count))
            q, (k, v) = self._linear(f"{layer}.cross_q", x), self._linear(f"{layer}.cross_kv", seen).chunk(2, dim=1)
            x = self._added(f"{layer}.cross", x, self._attended(q, k, v, count))
            made = self._linear(f"{layer}.down", activated(self._linear(f"{layer}.up", x), "gelu", gated=False))
            x = self._norm(f"{layer}.mlp_norm", made + x, shaw.query_eps)
        return self._linear("projector.out", x)

    def _added(self, name: str, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return self._norm(f"{name}_norm", self._linear(f"{name}_out", seen) + x, self._shaw.query_eps)

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: int) -> torch.Tensor:
        """[windows * n, width], windows behind each other."""
        heads = self._shaw.query_heads
        q_, k_, v_ = (each.reshape(windows, -1, heads, each.shape[1] // heads).transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(q_, k_, v_).transpose(1, 2).reshape(q.shape)


def _parts(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [x[first : first + size] for first in range(0, len(x), size)]


def shaw_shapes(spec: EarSpec) -> dict[str, tuple[int, ...]]:
    """See `ear_shapes`. distances.table: of a key that lies so far behind a query and more, up to as far in front of it.
    batch_norm.table: what is multiplied with, and what is added."""
    shaw, hidden, inner = spec.shaw, spec.hidden_size, spec.intermediate_size
    assert shaw is not None
    width, wide = shaw.query_size, shaw.widened
    shapes: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out: int, width: int, bias: bool = True) -> None:
        shapes.update({f"{name}.weight": (out, width)} | ({f"{name}.bias": (out,)} if bias else {}))

    def norm(name: str, size: int) -> None:
        shapes.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    matrix("front", hidden, 2 * spec.num_bins)
    for layer in (f"layers.{i}" for i in range(spec.num_layers)):
        for mlp in ("first", "second"):
            norm(f"{layer}.{mlp}.norm", hidden)
            matrix(f"{layer}.{mlp}.up", inner, hidden)
            matrix(f"{layer}.{mlp}.down", hidden, inner)
        norm(f"{layer}.attention_norm", hidden)
        matrix(f"{layer}.qkv", 3 * hidden, hidden, bias=False)
        shapes[f"{layer}.distances.table"] = (2 * shaw.farthest + 1, spec.head_dim)
        matrix(f"{layer}.out", hidden, hidden)
        norm(f"{layer}.conv.norm", hidden)
        matrix(f"{layer}.conv.up", 2 * wide, hidden)
        shapes[f"{layer}.conv.kernel"] = (wide, shaw.kernel)
        shapes[f"{layer}.conv.batch_norm.table"] = (2, wide)
        matrix(f"{layer}.conv.down", hidden, wide)
        norm(f"{layer}.norm", hidden)
    matrix("classes.up", shaw.classes, hidden)
    matrix("classes.down", hidden, shaw.classes)
    shapes["query.table"] = (shaw.queries, width)
    norm("query_norm", width)
    seen = hidden * (1 + len(shaw.kept))
    for layer in (f"asked.{i}" for i in range(shaw.query_layers)):
        matrix(f"{layer}.qkv", 3 * width, width)
        matrix(f"{layer}.cross_q", width, width)
        matrix(f"{layer}.cross_kv", 2 * width, seen)
        matrix(f"{layer}.up", shaw.query_inner, width)
        matrix(f"{layer}.down", width, shaw.query_inner)
        for part in ("self", "cross"):
            matrix(f"{layer}.{part}_out", width, width)
            norm(f"{layer}.{part}_norm", width)
        norm(f"{layer}.mlp_norm", width)
    matrix("projector.out", spec.out_size, width)
    return shapes


def most_bytes(spec: EarSpec, frames: int, itemsize: int) -> int:
    """About as many as are held at once while a piece of so many frames is computed, in a type of that size: the convolution's
    rows, twice in float32 and once as they were; or attention's; and what is kept of layers."""
    assert spec.shaw is not None
    rows, hidden = spec.num_rows(frames), spec.hidden_size
    convolved = rows * spec.shaw.widened * (2 * 4 + 2 * itemsize)
    attended = rows * hidden * (5 * 4 + 3 * itemsize) + 6 * 4 * spec.num_heads * spec.shaw.block**2
    inner = min(rows, ROWS_TOGETHER) * spec.intermediate_size * 2 * itemsize
    return max(convolved, attended) + inner + rows * hidden * itemsize * (3 + 2 * len(spec.shaw.kept))
