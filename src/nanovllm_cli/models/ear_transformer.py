"""Towers for sounds whose layers are those of a vision tower, each row of which sees all of a piece (`EarSpec`). See `ear.py`.

Convolutions are products: what a kernel sees of its input is put behind each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.hearing_spec import HOP, RATE, WAVE, EarSpec
from nanovllm_cli.models.tower_attention import Windows, attention
from nanovllm_cli.models.tower_layers import ROWS_TOGETHER, Layers, Stages, TowerRows, waves
from nanovllm_cli.models.tower_products import activated

_CHUNKS_TOGETHER = 4
"""Whose convolutions are computed at once: what their kernels see is nine times as large as they are."""


class Transformer(Layers):
    """tensors: by our names (`transformer_shapes`), on one device, norms and positions in float32 and all others in one type."""

    spec: EarSpec

    def __init__(self, spec: EarSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, tensors, transformer_shapes(spec), "front0")

    def stages(self, values: torch.Tensor, heard: int, ordinal: int) -> Stages:
        """Of [frames, bins] in float32. See `Ear.stages`."""
        spec = self.spec
        values = values.to(self._device, self._dtype)
        fronts = {"line": self._along_line, "plane": self._over_plane, "wave": self._of_samples}
        x = fronts[spec.front](values)
        x = x if spec.sees_silence else x[: spec.num_rows(heard)].contiguous()
        windows = Windows(((1, len(x)),), _turns(spec, len(x), self._device))
        attend = attention(windows, spec.num_heads, spec.head_dim, x)
        for i in range(spec.num_layers):
            if i:
                yield
            self._layer(f"layers.{i}", x, attend)
        x = x[: spec.num_made(heard) * spec.pooled * spec.joined]
        if spec.pooled > 1:
            x = _together(x, spec.pooled).to(torch.float32).mean(dim=1)
        x = self._norm("post_norm", x)
        if spec.joined > 1:
            x = _together(x, spec.joined).flatten(1)
        if spec.timed:
            x = _timed(spec, x, ordinal, spec.num_made(len(values)))
        if spec.projector == "none":
            return TowerRows(x)
        if spec.projector == "one":
            return TowerRows(self._linear("projector.out", x))
        return TowerRows(self._two_layers("projector", x, spec.projector_activation))

    def _along_line(self, values: torch.Tensor) -> torch.Tensor:
        """[frames, bins] -> [frames / 2, hidden_size]."""
        for i in (0, 1):
            seen = functional.pad(values, (0, 0, 1, 1)).unfold(0, 3, 1 + i).flatten(1)  # a band's frames behind each other
            values = self._activated(f"front{i}", seen)
        if self.spec.turned:
            return values
        learned = self._tensors.get("positions.weight")
        positions = waves(len(values), self.spec.hidden_size).to(self._device) if learned is None else learned[: len(values)]
        return (values + positions).to(self._dtype)

    def _of_samples(self, values: torch.Tensor) -> torch.Tensor:
        """[samples, 1] -> [rows, hidden_size]. The norm is over all of a piece, a group norm of one group."""
        for i, (places, step) in enumerate(WAVE):
            made = self._linear(f"front{i}", values.unfold(0, places, step).flatten(1).contiguous())
            values = activated(made, "gelu", gated=False) if i else self._normed_as_one(made.tanh())
        return values

    def _normed_as_one(self, x: torch.Tensor) -> torch.Tensor:
        gain, bias = (self._tensors[f"front_norm.{kind}"] for kind in ("weight", "bias"))
        whole = x.to(torch.float32)
        return (functional.layer_norm(whole, whole.shape, eps=self.spec.eps) * gain + bias).to(self._dtype)

    def _over_plane(self, values: torch.Tensor) -> torch.Tensor:
        """[frames, bins] -> [rows, hidden_size], chunks behind each other; the last is filled up with zeros."""
        spec = self.spec
        chunks = functional.pad(values, (0, 0, 0, -len(values) % spec.chunk)).view(-1, spec.chunk, spec.num_bins, 1)
        made = []
        for first in range(0, len(chunks), _CHUNKS_TOGETHER):
            planes = chunks[first : first + _CHUNKS_TOGETHER].transpose(1, 2)  # [chunks, bands, frames, channels]
            for i in range(3):
                seen = functional.pad(planes, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2)
                shape = *seen.shape[:3], spec.channels
                planes = self._activated(f"front{i}", seen.flatten(3).flatten(0, 2)).view(shape)
            made.append(planes.permute(0, 2, 3, 1).flatten(2))  # a frame's channels behind each other, the bands of each
        together = torch.cat(made)
        rows = self._linear("front_out", together.flatten(0, 1)).view(*together.shape[:2], -1)
        return (rows + waves(together.shape[1], spec.hidden_size).to(self._device)).to(self._dtype).flatten(0, 1)

    def _activated(self, name: str, seen: torch.Tensor) -> torch.Tensor:
        return activated(self._linear(name, seen.contiguous()), "gelu", gated=False)


def transformer_shapes(spec: EarSpec) -> dict[str, tuple[int, ...]]:
    """See `ear_shapes`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out: int, width: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, width)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str) -> None:
        shapes.update({f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)})

    if spec.front == "wave":
        widths = 1, hidden, 2 * hidden, hidden
        for i, (places, _) in enumerate(WAVE):
            matrix(f"front{i}", widths[i + 1], places * widths[i], bias=i > 0)
        norm("front_norm")
    elif spec.front == "line":
        matrix("front0", hidden, 3 * spec.num_bins)
        matrix("front1", hidden, 3 * hidden)
        if spec.positions:
            shapes["positions.weight"] = (spec.positions, hidden)
    else:
        for i in range(3):
            matrix(f"front{i}", spec.channels, 9 * (spec.channels if i else 1))
        matrix("front_out", hidden, spec.channels * _halved(spec.num_bins, 3), bias=False)
    for i in range(spec.num_layers):
        norm(f"layers.{i}.attention_norm")
        matrix(f"layers.{i}.qkv", 3 * hidden, hidden, not spec.bare)
        matrix(f"layers.{i}.out", hidden, hidden, not spec.bare)
        norm(f"layers.{i}.mlp_norm")
        matrix(f"layers.{i}.up", inner, hidden)
        matrix(f"layers.{i}.down", hidden, inner)
    norm("post_norm")
    joined = spec.joined * hidden
    if spec.projector == "none":
        return shapes
    if spec.projector == "one":
        matrix("projector.out", spec.out_size, joined, spec.projector_bias)
    else:
        matrix("projector.up", spec.projector_size, joined, spec.projector_bias)
        matrix("projector.down", spec.out_size, spec.projector_size, spec.projector_bias)
    return shapes


def most_numbers(spec: EarSpec, frames: int) -> int:
    """About as many as are held at once while a piece of so many frames is computed."""
    rows = spec.num_rows(frames)
    seen = 3 * spec.hidden_size * frames
    if spec.front == "wave":
        seen = (2 + 7 * spec.hidden_size // 64) * frames
    elif spec.front == "plane":
        seen = _CHUNKS_TOGETHER * 12 * spec.channels * spec.chunk * spec.num_bins // 8 + frames * spec.num_bins
    return max(2 * seen, 17 * spec.hidden_size * rows + 2 * spec.intermediate_size * min(rows, ROWS_TOGETHER))


def _turns(spec: EarSpec, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Windows`: of dimensions that don't turn, which are the last of either half of a head, by nothing."""
    angles = torch.zeros(rows, spec.head_dim // 2 if spec.turned else 0)
    if spec.turned:
        speeds = spec.theta ** -(torch.arange(0, spec.turned, 2) / spec.turned)
        angles[:, : spec.turned // 2] = torch.arange(rows)[:, None] * speeds
    return angles.cos().to(device), angles.sin().to(device)


def _timed(spec: EarSpec, x: torch.Tensor, ordinal: int, whole: int) -> torch.Tensor:
    """whole: rows of a piece. In float32, step by step as transformers has it, as angles are of thousands of turns."""
    speeds = spec.theta ** -(torch.arange(0, spec.timed, 2, dtype=torch.float32) / spec.timed)
    rows, step, turn = torch.arange(len(x), dtype=torch.float32), 4 * HOP / RATE, 2 * math.pi
    of_piece = (torch.tensor(float(ordinal)) / spec.theta * speeds).expand(len(x), -1)
    of_row = (rows / spec.theta * turn)[:, None] * speeds
    times = ordinal * whole * step + rows * step
    angles = torch.cat([of_piece, of_row], dim=1) * (-times * turn)[:, None]
    cos, sin = (each.to(x.device, torch.float64) for each in (angles.cos(), angles.sin()))
    even, odd = x[:, : 2 * spec.timed].to(torch.float64).view(len(x), -1, 2).unbind(2)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=2).flatten(1)
    return torch.cat([turned.to(x.dtype), x[:, 2 * spec.timed :]], dim=1)


def turned_apart(part: torch.Tensor, spec: EarSpec) -> torch.Tensor:
    """Rows of queries, or keys: of each head those that turn are its first, halves behind each other, to begin with; afterwards
    they begin either half of it. Or pairs are, of one whose matrices are `bare`."""
    heads = part.view(spec.num_heads, spec.head_dim, *part.shape[1:])
    turning, still = heads[:, : spec.turned], heads[:, spec.turned :].chunk(2, dim=1)
    turned = (turning[:, ::2], turning[:, 1::2]) if spec.bare else turning.chunk(2, dim=1)
    return torch.cat([turned[0], still[0], turned[1], still[1]], dim=1).view(part.shape)


def _together(x: torch.Tensor, count: int) -> torch.Tensor:
    """[n, width] -> [n / count, count, width]; what is left over goes."""
    return x[: len(x) // count * count].view(-1, count, x.shape[-1])


def _halved(length: int, times: int) -> int:
    return length if not times else _halved(-(-length // 2), times - 1)
