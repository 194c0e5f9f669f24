"""Towers for sounds whose layers are conformers' (`ConformerSpec`). See `ear.py`.

Attention is computed in blocks as long as a row sees: those of a block see none but its own and those of the block in front. To a
score belongs what a query says of the distance, beside what it says of the key (Dai et al. 2019). Both are in float32, as norms
and the convolution along time are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.hearing_spec import ConformerSpec
from nanovllm_cli.models.tower_layers import Matrices, Stages, TowerRows, waves
from nanovllm_cli.models.tower_products import activated

_ROWS_TOGETHER = 64
"""Of the two convolutions in front, whose kernels see nine times what they are given."""
_LAYER_EPS = 1e-6  # of norms at MLPs and attention, whatever a config says


class Conformer(Matrices):
    """tensors: by our names (`conformer_shapes`), on one device, norms, bounds and scales of queries in float32 and all others in
    one type."""

    def __init__(self, spec: ConformerSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec.eps, tensors, conformer_shapes(spec), "front0")
        self._spec = spec
        self._limit = min(spec.limit, torch.finfo(self._dtype).max)
        self._waves = waves(spec.window, spec.hidden_size).to(self._device, self._dtype)
        query, key = torch.arange(spec.window)[:, None], torch.arange(2 * spec.window)
        away = (query + spec.window - key).to(self._device)  # [W, 2W], of keys in two blocks from queries in the second
        self._seen, self._away = (away >= 0) & (away < spec.window), away.clamp(0, spec.window - 1)

    def stages(self, values: torch.Tensor, heard: int, ordinal: int) -> Stages:
        """Of [frames, bins] in float32. See `Ear.stages`."""
        spec = self._spec
        planes = values[:heard, :, None].to(self._device, self._dtype)
        for i in (0, 1):
            planes = self._halved(f"front{i}", planes)
        x = self._linear("front_out", planes.flatten(1))
        for i in range(spec.num_layers):
            if i:
                yield
            x = self._layer(f"layers.{i}", x)
        made = self._linear("out", x).to(torch.float32)
        normed = functional.rms_norm(made, (spec.made_size,), eps=spec.eps).to(self._dtype)
        return TowerRows(self._linear("projector.out", normed))

    def _halved(self, name: str, planes: torch.Tensor) -> torch.Tensor:
        """[frames, bands, channels] -> half as many of both, of the convolution's channels."""
        seen = functional.pad(planes, (0, 0, 1, 1, 1, 1)).unfold(0, 3, 2).unfold(1, 3, 2)
        gain = self._tensors[f"{name}.norm.weight"]
        made = torch.empty(*seen.shape[:2], len(gain), device=self._device, dtype=self._dtype)
        for first in range(0, len(seen), _ROWS_TOGETHER):
            part = seen[first : first + _ROWS_TOGETHER].flatten(2)
            rows = self._linear(name, part.flatten(0, 1)).to(torch.float32)
            normed = functional.layer_norm(rows, gain.shape, gain, None, self._spec.eps)
            made[first : first + len(part)] = normed.relu_().view(*part.shape[:2], -1)
        return made

    def _layer(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        x = x + self._spec.share * self._mlp(f"{layer}.first", x)
        x = x + self._attention(layer, x)
        x = x + self._convolution(f"{layer}.conv", x)
        x = x + self._spec.share * self._mlp(f"{layer}.second", x)
        return self._limited_norm(f"{layer}.norm", x)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        made = self._two_layers(name, self._limited_norm(f"{name}.norm", x), self._spec.activation)
        return self._limited_norm(f"{name}.after_norm", made)

    def _limited_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._norm(name, x.clamp(-self._limit, self._limit), _LAYER_EPS)

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        heads, dim, block = spec.num_heads, spec.head_dim, spec.window
        qkv = self._linear(f"{layer}.qkv", self._limited_norm(f"{layer}.attention_norm", x)).to(torch.float32)
        # of each, [blocks, heads, block, dim]; what fills up the last block is seen by nothing that counts
        q, k, v = (
            functional.pad(each, (0, 0, 0, -len(x) % block)).view(-1, block, heads, dim).transpose(1, 2)
            for each in qkv.chunk(3, dim=-1)
        )
        q = q * (self._tensors[f"{layer}.query_scale"] * (dim**-0.5 / math.log(2)))
        k = k * (math.log(1 + math.e) / math.log(2))
        k, v = (torch.cat([functional.pad(each, (0, 0) * 3 + (1, 0))[:-1], each], dim=2) for each in (k, v))
        by_distance = self._linear(f"{layer}.distances", self._waves).to(torch.float32).view(block, heads, dim)
        scores = q @ k.transpose(2, 3)
        scores += (q @ by_distance.permute(1, 2, 0)).gather(3, self._away.expand_as(scores))
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores.masked_fill_(~self._seen, -math.inf)
        scores[0, :, :, :block] = -math.inf  # in front of the first row is nothing
        rows = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2).flatten(0, 1)[: len(x)]
        return self._limited_norm(f"{layer}.after_attention_norm", self._linear(f"{layer}.out", rows.to(self._dtype)))

    def _convolution(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Gated by the half of what goes in; a channel sees nothing but itself."""
        gated = functional.glu(self._linear(f"{name}.up", self._norm(f"{name}.norm", x)), dim=-1)
        seen, kernel = functional.pad(gated, (0, 0, self._spec.kernel - 1, 0)).to(torch.float32), self._tensors[f"{name}.kernel"]
        made = sum((seen[i : i + len(x)] * kernel[:, i] for i in range(self._spec.kernel)), torch.zeros((), device=self._device))
        normed = self._norm(f"{name}.between_norm", made.to(self._dtype).clamp(-self._limit, self._limit))
        return self._linear(f"{name}.down", activated(normed, self._spec.activation, gated=False))


def conformer_shapes(spec: ConformerSpec) -> dict[str, tuple[int, ...]]:
    """See `ear_shapes`. bounds: of each part of a matrix, the least and the most that it reads and that it gives."""
    hidden, (first, second) = spec.hidden_size, spec.channels
    shapes: dict[str, tuple[int, ...]] = {
        "front0.weight": (first, 9), "front0.norm.weight": (first,), "front1.weight": (second, 9 * first),
        "front1.norm.weight": (second,), "front_out.weight": (hidden, second * spec.halved_bins),
    }  # fmt: skip

    def bounded(name: str, out: int, width: int, parts: int = 1) -> None:
        shapes[f"{name}.weight"] = (out, width)
        if spec.clipped:
            shapes[f"{name}.bounds"] = (parts, 4)

    for layer in (f"layers.{i}" for i in range(spec.num_layers)):
        for mlp in ("first", "second"):
            bounded(f"{layer}.{mlp}.up", spec.intermediate_size, hidden)
            bounded(f"{layer}.{mlp}.down", hidden, spec.intermediate_size)
        bounded(f"{layer}.qkv", 3 * hidden, hidden, parts=3)
        shapes[f"{layer}.query_scale"] = (spec.head_dim,)
        shapes[f"{layer}.distances.weight"] = (hidden, hidden)
        bounded(f"{layer}.out", hidden, hidden)
        bounded(f"{layer}.conv.up", 2 * hidden, hidden)
        shapes[f"{layer}.conv.kernel"] = (hidden, spec.kernel)
        bounded(f"{layer}.conv.down", hidden, hidden)
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in NORMS}
    return shapes | {
        "out.weight": (spec.made_size, hidden), "out.bias": (spec.made_size,),
        "projector.out.weight": (spec.out_size, spec.made_size),
    }  # fmt: skip


NORMS = (
    "first.norm", "first.after_norm", "attention_norm", "after_attention_norm", "conv.norm", "conv.between_norm", "second.norm",
    "second.after_norm", "norm",
)  # fmt: skip
"""Of a layer, in their order."""


def most_bytes(spec: ConformerSpec, frames: int, itemsize: int) -> int:
    """About as many as are held at once while a piece of so many frames is computed, in a type of that size: the spectrogram, the
    first convolution's rows, twice, and what a part of the second sees; or in a layer attention's, which has 14 numbers in
    float32 for each that it reads."""
    half, bands = -(-frames // 2), -(-spec.num_bins // 2)
    twice = half * bands + (half + 2) * (bands + 2)  # once with zeros around them
    part = _ROWS_TOGETHER * (spec.halved_bins * (9 * spec.channels[0] + 3 * spec.channels[1]) + bands * 12 * spec.channels[0])
    in_front = frames * spec.num_bins * (4 + itemsize) + (twice * spec.channels[0] + part) * itemsize
    return max(in_front, spec.num_rows(frames) * spec.hidden_size * (14 * 4 + 3 * itemsize))
