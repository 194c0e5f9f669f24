"""What towers for images (`tower.py`) and for sounds (`ear.py`) have in common: the layers of a transformer that sees all of its
rows, and how they are computed one after another.

On a CPU the matrices and attention are the decoder's (`tower_products.py`, `tower_attention.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_attention import Attend, HeadNorms
from nanovllm_cli.models.tower_products import Product, activated, product
from nanovllm_cli.vision_spec import Image, TowerSpec

ROWS_TOGETHER = 8192
"""Of an MLP, whose inner rows are several times as wide: more of them at once only take memory."""
_SLOWEST = 1e4  # sines and cosines of positions go down to so many positions a turn, in radians


class TowerRows(NamedTuple):
    """rows [n, out_size], for cells of an image line by line. deep: the same for each of the spec's `deep`."""

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


Stages = Generator[None, None, TowerRows]
Colours = tuple[tuple[float, float, float], tuple[float, float, float]]
"""mean and std of an image's: see `VisionSpec`."""


def next_stage(stages: Stages) -> TowerRows | None:
    """None where more are to come."""
    try:
        next(stages)
    except StopIteration as end:
        made: TowerRows = end.value
        return made
    return None


class LayersSpec(Protocol):
    """What the layers of a spec are; see `TowerSpec`."""

    @property
    def activation(self) -> str: ...

    @property
    def gated(self) -> bool: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def normed(self) -> bool: ...

    @property
    def eps(self) -> float: ...


class Matrices:
    """tensors: by our names, of these shapes, on one device; norms and bounds in float32 and all others in the type of the matrix
    that is called `first`."""

    def __init__(
        self, eps: float, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], first: str
    ) -> None:
        self._eps = eps
        matrices = _matrices(shapes)
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in matrices}
        self._products = {name: _products(name, tensors) for name in matrices}
        self._dtype, self._device = tensors[f"{first}.weight"].dtype, tensors[f"{first}.weight"].device

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        products, bounds = self._products[name]
        if bounds is None:
            return products[0](x)
        parts = [
            part(x.clamp(low, high)).clamp_(least, most)
            for part, (low, high, least, most) in zip(products, bounds, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _two_layers(self, name: str, x: torch.Tensor, activation: str = "gelu", *, gated: bool = False) -> torch.Tensor:
        return self._linear(f"{name}.down", activated(self._linear(f"{name}.up", x), activation, gated=gated))

    def _norm(self, name: str, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        """A layer norm is one that has a bias. eps: the spec's, if not given."""
        gain, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        x, eps = x.to(torch.float32), self._eps if eps is None else eps
        if bias is None:
            return functional.rms_norm(x, gain.shape, gain, eps).to(self._dtype)
        return functional.layer_norm(x, gain.shape, gain, bias, eps).to(self._dtype)


class Layers(Matrices):
    """tensors, shapes, first: see `Matrices`."""

    def __init__(
        self, spec: LayersSpec, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], first: str
    ) -> None:
        super().__init__(spec.eps, tensors, shapes, first)
        self.spec = spec

    def _layer(self, layer: str, x: torch.Tensor, attend: Attend) -> None:
        """Adds to x, in place."""
        qkv = self._linear(f"{layer}.qkv", self._norm(f"{layer}.attention_norm", x))
        self._add(layer, x, self._linear(f"{layer}.out", attend(qkv, self._head_norms(layer))))

    def _add(self, layer: str, x: torch.Tensor, seen: torch.Tensor) -> None:
        """What patches saw of each other, and what the layer's MLP makes of it."""
        x += self._scaled(f"{layer}.attention_scale", self._normed(f"{layer}.after_attention_norm", seen))
        made = self._mlp(layer, self._norm(f"{layer}.mlp_norm", x))
        x += self._scaled(f"{layer}.mlp_scale", self._normed(f"{layer}.after_mlp_norm", made))

    def _head_norms(self, layer: str) -> HeadNorms | None:
        if not (self.spec.qk_norm or self.spec.normed):
            return None
        return HeadNorms(self._tensors[f"{layer}.head_norm.weight"].view(2, -1), self.spec.eps, of_all=self.spec.normed)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        made = []
        for first in range(0, len(x), ROWS_TOGETHER):
            rows = x[first : first + ROWS_TOGETHER]
            made.append(self._two_layers(name, rows, self.spec.activation, gated=self.spec.gated))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._norm(name, x) if self.spec.normed else x

    def _scaled(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gain = self._tensors.get(f"{name}.weight")
        return x if gain is None else x * gain


class Seeing(Layers, ABC):
    """Of an image, a stage after another. tensors, shapes: see `Matrices`."""

    def __init__(
        self, spec: TowerSpec, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], colours: Colours
    ) -> None:
        super().__init__(spec, tensors, shapes, "patch")
        self._mean, self._std = (torch.tensor(each, device=self._device).view(3, 1) for each in colours)

    def __call__(self, image: Image) -> TowerRows:
        """Of all stages."""
        stages = self.stages(image)
        while (made := next_stage(stages)) is None:
            pass
        return made

    @abstractmethod
    def stages(self, image: Image) -> Stages:
        """A layer at a time, the last of which returns the rows."""

    def _patch_rows(self, patches: torch.Tensor, name: str = "patch") -> torch.Tensor:
        """[patches, 3, pixels] of bytes -> [patches, hidden_size]."""
        values = (patches.to(torch.float32) / 255 - self._mean) / self._std
        return self._linear(name, values.flatten(1).to(self._dtype))


def _products(name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Product], list[list[float]] | None]:
    """Of a matrix, or of each of its parts that have bounds of their own, which are [parts, 4]."""
    weight, bias, bounds = (tensors.get(f"{name}.{kind}") for kind in ("weight", "bias", "bounds"))
    assert weight is not None
    if bounds is None:
        return [product(weight, bias)], None
    return [product(part, None) for part in weight.chunk(len(bounds))], bounds.tolist()


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """By name: what has a weight of two dimensions, but for tables of positions."""
    return {name.removesuffix(".weight") for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2 and name not in ("positions.weight", "lead.weight")}  # fmt: skip


def waves(count: int, width: int) -> torch.Tensor:
    """[count, width] float32: sines, then cosines (Vaswani et al. 2017)."""
    half = width // 2
    turns = torch.exp(-math.log(_SLOWEST) / (half - 1) * torch.arange(half, dtype=torch.float64))
    angles = torch.arange(count)[:, None] * turns
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(torch.float32)
