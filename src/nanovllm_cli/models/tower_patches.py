"""A tower without layers, as a Gemma 4 12B has it: a cell's pixels become a row by one matrix, get their place, and are
projected. Norms are in front of the matrix, behind it, and behind the places; what is projected has one more, without a gain."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.models.tower_layers import Colours, Seeing, Stages, TowerRows
from nanovllm_cli.models.tower_projectors import Shapes
from nanovllm_cli.vision_spec import Image, TowerSpec

_PIXELS_KEPT, _ROWS_KEPT = 4, 10
"""Times that a cell's pixels are there in float32, or once and a row so often: measured."""


class PatchTower(Seeing):
    """tensors: by our names (`patch_shapes`)."""

    spec: TowerSpec

    def __init__(self, spec: TowerSpec, tensors: Mapping[str, torch.Tensor], colours: Colours) -> None:
        super().__init__(spec, tensors, patch_shapes(spec), colours)

    def stages(self, image: Image) -> Stages:
        """One. The image's sides are multiples of the spec's `cell`, of which no side has more than there are positions."""
        yield from ()
        side, spec = self.spec.cell, self.spec
        lines, columns = image.height // side, image.width // side
        assert max(lines, columns) <= spec.positions
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        cells = pixels.view(lines, side, columns, side, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, side**2)
        values = ((cells.to(torch.float32) / 255 - self._mean) / self._std).flatten(1)
        x = self._norm("pre_norm", self._linear("patch", self._norm("patch_norm", values)))
        of_columns, of_lines = self._tensors["positions.weight"].to(torch.float32)
        places = (of_lines[:lines, None] + of_columns[:columns]).flatten(0, 1)
        x = self._norm("post_norm", x.to(torch.float32) + places).to(torch.float32)
        normed = functional.rms_norm(x, x.shape[1:], eps=spec.projector_eps)
        return TowerRows(self._linear("projector.out", normed.to(self._dtype)))


def patch_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """What it is made of, by our names; see `tower_shapes`."""
    shapes, numbers = Shapes(spec), 3 * spec.cell**2
    shapes.norm("patch_norm", numbers)
    shapes.matrix("patch", spec.hidden_size, numbers)
    shapes.norm("pre_norm")
    shapes["positions.weight"] = (2, spec.positions, spec.hidden_size)
    shapes.norm("post_norm")
    shapes.matrix("projector.out", spec.out_size, spec.hidden_size, bias=False)
    return shapes


def patch_bytes(spec: TowerSpec, cells: int) -> int:
    """About the most that an image of so many cells takes beside the weights."""
    pixels, rows = 3 * spec.cell**2, max(spec.hidden_size, spec.out_size)
    return cells * 4 * max(_PIXELS_KEPT * pixels, pixels + _ROWS_KEPT * rows)
