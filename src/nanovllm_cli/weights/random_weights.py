"""A checkpoint without files: weights of a given shape, made up when they are asked for.

Every tensor is a stretch of one pool of normal numbers, so that a model of any size takes the memory of the pool besides its own,
and a slice of a tensor is the same however the rest is cut. Matrices and biases have a standard deviation of 0.02, as
transformers initialises them; norms and other factors lie around 1. The same seed gives the same model on every machine.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.mtp import mtp_spec
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo, as_bytes
from nanovllm_cli.weights.convert_names import mtp_shapes, tensor_shapes
from nanovllm_cli.weights.tensor_names import mtp_names

STD = 0.02
AROUND_ONE = ("norm", ".ln_", "layer_scalar", "router.scale", "expert_scale")
MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Of a config: how many layers behind the model's own predict further tokens."""
POOL = (1 << 24) + 127
"""Numbers in the pool; a tensor begins anywhere among them."""
BF16_BYTES = 2


class RandomCheckpoint(Checkpoint):
    """A Checkpoint for any config.json that is supported. device: where tensors are made. path: what it calls itself. Raises what
    reading a config raises."""

    format = "hf"
    has_numbers = False
    apart = True

    def __init__(
        self, config: Mapping[str, Any], device: torch.device | str = "cpu", seed: int = 0, path: Path = Path("random weights")
    ) -> None:
        self.path = path
        self.config = dict(config)
        self.generation_config = {}
        family = hf_family(config)
        spec = spec_from_hf(config, family)
        self._shapes = tensor_shapes(spec, family.names("hf"))
        if any(config.get(key) for key in MTP_LAYERS) and (table := mtp_names(self)):
            self._shapes |= mtp_shapes(mtp_spec(spec), table)
        pool = _pool(seed)
        self._matrices = (pool * STD).to(torch.bfloat16).to(device)
        self._norms = (1 + 0.1 * pool[: 1 << 16]).to(torch.bfloat16).to(device)

    def names(self) -> list[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        shape = self._shapes[name]
        return TensorInfo(name, shape, "BF16", math.prod(shape) * BF16_BYTES)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        first, last = rows or (0, shape[0])
        count = math.prod((last - first, *shape[1:]))
        source = self._norms if any(mark in name for mark in AROUND_ONE) else self._matrices
        begin = (zlib.crc32(name.encode()) + first * math.prod(shape[1:])) % len(source)
        parts = []
        while count > 0:  # around the end of the pool, where the slice passes it
            parts.append(source[begin : begin + count])
            count -= len(parts[-1])
            begin = 0
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values.view(last - first, *shape[1:])

    def raw(self, name: str) -> torch.Tensor:
        return as_bytes(self.tensor(name))


@functools.cache
def _pool(seed: int) -> torch.Tensor:
    return torch.randn(POOL, generator=torch.Generator().manual_seed(seed))
