"""FastVLM's tower: convolutions, and attention where little is left of lines and columns (`FastVitSpec`). An image is a stage a
block; what is in front of a block, or behind the last one, is computed with it.

Rows are patches line by line, [lines * columns, width]. Convolutions of each dimension by itself are torch's, in float32; those
that reach no further than a patch are matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_attention import Windows, attention
from nanovllm_cli.models.tower_layers import ROWS_TOGETHER, Colours, Seeing, Stages, TowerRows
from nanovllm_cli.models.tower_products import activated
from nanovllm_cli.vision_spec import Image, TowerSpec

Sides = tuple[int, int]


class FastVitTower(Seeing):
    """tensors: by our names (`fastvit_shapes`)."""

    spec: TowerSpec

    def __init__(self, spec: TowerSpec, tensors: Mapping[str, torch.Tensor], colours: Colours) -> None:
        super().__init__(spec, tensors, fastvit_shapes(spec), colours)
        assert spec.fastvit is not None
        self._fastvit = spec.fastvit
        spreads = [name.removesuffix(".mean") for name in self._tensors if name.endswith("_norm.mean")]
        self._spreads = {name.removesuffix("_norm"): self._with_norm(name) for name in spreads}

    def stages(self, image: Image) -> Stages:
        """A block each. The image's sides are multiples of the spec's `cell`."""
        x, sides = self._stem(image)
        for stage, depth in enumerate(self._fastvit.depths):
            name = f"stages.{stage}"
            if stage:
                yield
                x, sides = self._shrunk(name, x, sides)
            if self._fastvit.attends(stage):
                x = self._convolved(f"{name}.places", x, sides)
            for block in range(depth):
                if block:
                    yield
                x = self._block(f"{name}.blocks.{block}", x, sides, attends=self._fastvit.attends(stage))
        x = activated(self._weighed(self._convolved("final", x, sides)), "gelu", gated=False)
        return TowerRows(self._two_layers("projector", x))

    def _with_norm(self, norm: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A kernel and a bias, with the norm behind them, whose means and variances are not an image's own (Ioffe and Szegedy
        2015)."""
        gain, bias, mean, variance = (self._tensors[f"{norm}.{part}"] for part in ("weight", "bias", "mean", "variance"))
        scale = gain / (variance + self._fastvit.eps).sqrt()
        kernel = self._tensors[f"{norm.removesuffix('_norm')}.weight"].to(torch.float32)
        return kernel * scale.view(-1, 1, 1, 1), bias - mean * scale

    def _stem(self, image: Image) -> tuple[torch.Tensor, Sides]:
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        values = pixels.view(image.height, image.width, 3).permute(2, 0, 1).to(torch.float32) / 255
        values = ((values - self._mean.view(3, 1, 1)) / self._std.view(3, 1, 1)).to(self._dtype)
        kernel, bias = (self._tensors[f"patch.{kind}"].to(torch.float32) for kind in ("weight", "bias"))
        plane = functional.conv2d(values.to(torch.float32)[None], kernel, bias, stride=2, padding=1)
        sides = plane.shape[2], plane.shape[3]
        x = activated(plane[0].flatten(1).T.to(self._dtype).contiguous(), "gelu", gated=False)
        del plane
        x = activated(self._convolved("stem.mix", x, sides, stride=2), "gelu", gated=False)
        return activated(self._linear("stem.out", x), "gelu", gated=False), _half(sides)

    def _shrunk(self, stage: str, x: torch.Tensor, sides: Sides) -> tuple[torch.Tensor, Sides]:
        x = activated(self._convolved(f"{stage}.shrink", x, sides, stride=2), "gelu", gated=False)
        return activated(self._linear(f"{stage}.join", x), "gelu", gated=False), _half(sides)

    def _block(self, name: str, x: torch.Tensor, sides: Sides, *, attends: bool) -> torch.Tensor:
        if attends:
            none = torch.empty(len(x), 0, device=self._device)
            heads = x.shape[1] // self._fastvit.head_dim
            attend = attention(Windows(((1, len(x)),), (none, none)), heads, self._fastvit.head_dim, x)
            qkv = self._linear(f"{name}.qkv", self._norm(f"{name}.attention_norm", x))
            x = x + self._scaled(f"{name}.attention_scale", self._linear(f"{name}.out", attend(qkv, None)))
        else:
            x = self._convolved(f"{name}.mix", x, sides)
        scale = f"{name}.mlp_scale" if attends else f"{name}.scale"
        spread = _by_kernel(x, sides, *self._spreads[f"{name}.spread"])
        for first in range(0, len(x), ROWS_TOGETHER):
            made = self._two_layers(name, spread[first : first + ROWS_TOGETHER])
            x[first : first + ROWS_TOGETHER] += self._scaled(scale, made)
        return x

    def _convolved(self, name: str, x: torch.Tensor, sides: Sides, stride: int = 1) -> torch.Tensor:
        kernel, bias = (self._tensors[f"{name}.{kind}"].to(torch.float32) for kind in ("weight", "bias"))
        return _by_kernel(x, sides, kernel, bias, stride)

    def _weighed(self, x: torch.Tensor) -> torch.Tensor:
        means = x.to(torch.float32).mean(dim=0, keepdim=True).to(self._dtype)
        weights = self._linear("weigh.down", self._linear("weigh.up", means).relu()).to(torch.float32).sigmoid()
        return (x * weights).to(self._dtype)


def fastvit_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """What it is made of, by our names; see `tower_shapes`."""
    fastvit, shapes = spec.fastvit, dict[str, tuple[int, ...]]()
    assert fastvit is not None

    def matrix(name: str, out: int, width: int, *, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, width)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def kernel(name: str, out: int, side: int, colours: int = 1) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, colours, side, side), (out,)

    width = fastvit.widths[0]
    kernel("patch", width, 3, 3)
    kernel("stem.mix", width, 3)
    matrix("stem.out", width, width)
    for i, width in enumerate(fastvit.widths):
        if i:
            kernel(f"stages.{i}.shrink", width, 7)
            matrix(f"stages.{i}.join", width, width)
        if fastvit.attends(i):
            kernel(f"stages.{i}.places", width, 7)
        for j in range(fastvit.depths[i]):
            name = f"stages.{i}.blocks.{j}"
            if fastvit.attends(i):
                shapes |= dict.fromkeys((f"{name}.attention_norm.weight", f"{name}.attention_norm.bias"), (width,))
                matrix(f"{name}.qkv", 3 * width, width, bias=False)
                matrix(f"{name}.out", width, width)
                shapes[f"{name}.attention_scale.weight"] = (width,)
            else:
                kernel(f"{name}.mix", width, 3)
            shapes[f"{name}.spread.weight"] = (width, 1, 7, 7)
            parts = (f"{name}.spread_norm.{part}" for part in ("weight", "bias", "mean", "variance"))
            shapes |= dict.fromkeys(parts, (width,))
            matrix(f"{name}.up", fastvit.ratio * width, width)
            matrix(f"{name}.down", width, fastvit.ratio * width)
            shapes[f"{name}.mlp_scale.weight" if fastvit.attends(i) else f"{name}.scale.weight"] = (width,)
    out = spec.hidden_size
    kernel("final", out, 3)
    matrix("weigh.up", out // 16, out)
    matrix("weigh.down", out, out // 16)
    matrix("projector.up", spec.projector_size, out)
    matrix("projector.down", spec.out_size, spec.projector_size)
    return shapes


def fastvit_stored(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """The same as folders have it, where matrices are kernels that reach no further than a patch."""
    shapes = fastvit_shapes(spec)
    own = [name for name, shape in shapes.items() if len(shape) == 2 and name.startswith("projector.")]
    own += [name for name in shapes if ".blocks." in name and name.endswith((".qkv.weight", ".out.weight"))]
    shapes |= {name: (*shape, 1, 1) for name, shape in shapes.items() if len(shape) == 2 and name not in own}
    return shapes | {name: (*shape, 1, 1) for name, shape in shapes.items() if name.endswith("scale.weight")}


def _by_kernel(x: torch.Tensor, sides: Sides, kernel: torch.Tensor, bias: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """Each of the kernel's dimensions by itself, or by so many of x as there are more of them; beyond the image are zeros."""
    plane = x.view(1, *sides, -1).permute(0, 3, 1, 2).to(torch.float32)
    made = functional.conv2d(plane, kernel, bias, stride, kernel.shape[2] // 2, groups=x.shape[1])
    return made[0].flatten(1).T.to(x.dtype).contiguous()


def _half(sides: Sides) -> Sides:
    return sides[0] // 2, sides[1] // 2
