"""What a model's tensors are called, and their shapes: the slots of a `Decoder` that no memory is taken for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from nanovllm_cli.attention.backend import AttentionBackend
from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.layers.kit import Kit, Share
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.mtp import MTP
from nanovllm_cli.quant.storage import WeightStorage

Shapes = dict[str, tuple[int, ...]]


class _Weight:
    """Of a `WeightStorage` as much as slots ask for."""

    def __init__(self, parts: Mapping[str, int], width: int, share: Share | None) -> None:
        self.num_rows, self.width = sum(parts.values()), width

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        """Of numbers that no checkpoint has."""


class _Nowhere:
    """Of `Ops` as much as building asks for: where tensors are, and what holds nothing."""

    device = torch.device("meta")

    def angles(self, *_: Any) -> None: ...

    def head_matrices(self, *_: Any) -> None: ...

    def mixture(self, *_: Any) -> None: ...


_KIT = Kit(
    torch.float32,
    cast(Callable[[dict[str, int], int, Share | None], WeightStorage], _Weight),
    cast(Ops, _Nowhere()),
    cast(AttentionBackend, None),
)


def shapes_of(spec: ModelSpec) -> Shapes:
    """Every tensor of a checkpoint of such a model, by our names. A tied head has none of its own."""
    return _shapes(Decoder(spec, _KIT).slots())


def matrices_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Of these the ones that may have a format: not taps, say, which are as flat."""
    found: dict[str, tuple[int, int]] = {}

    def make(parts: dict[str, int], width: int, share: Share | None) -> WeightStorage:
        found.update({name: (num_rows, width) for name, num_rows in parts.items()})
        return _KIT.make(parts, width, share)

    Decoder(spec, _KIT._replace(make=make))
    return found


def mtp_shapes_of(spec: ModelSpec) -> Shapes:
    """The same of a layer that predicts further tokens. spec: `mtp_spec` of the model's."""
    return _shapes(MTP(spec, _KIT, Decoder(spec, _KIT)).slots())


def _shapes(slots: Slots) -> Shapes:
    return {name: slot.shape for name, slot in slots.items()}
