"""Towers for sounds: a spectrogram becomes rows that a decoder reads in the place of tokens, on the device and in the type of the
tower's weights. Three kinds: transformers (`ear_transformer.py`), conformers (`ear_conformer.py`), and conformers in blocks with
queries behind them (`ear_shaw.py`).

A piece of a sound is computed alone, so that what comes of it depends on nothing else.

Nothing here reads files or configs (ears.py, weights/hearing.py), or makes spectrograms (sounds/).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nanovllm_cli.hearing_spec import AnyEar, ConformerSpec
from nanovllm_cli.models import ear_conformer, ear_shaw, ear_transformer
from nanovllm_cli.models.ear_conformer import Conformer, conformer_shapes
from nanovllm_cli.models.ear_shaw import Shaw, shaw_shapes
from nanovllm_cli.models.ear_transformer import Transformer, transformer_shapes
from nanovllm_cli.models.tower_layers import Stages, TowerRows, next_stage
from nanovllm_cli.vision_spec import Sound


class Ear:
    """tensors: by our names (`ear_shapes`), on one device, each of the type that `ear_dtype` has for it."""

    def __init__(self, spec: AnyEar, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tower: Conformer | Shaw | Transformer
        if isinstance(spec, ConformerSpec):
            self._tower = Conformer(spec, tensors)
        else:
            self._tower = Transformer(spec, tensors) if spec.shaw is None else Shaw(spec, tensors)

    def __call__(self, sound: Sound) -> TowerRows:
        stages = self.stages(sound)
        while (made := next_stage(stages)) is None:
            pass
        return made

    def stages(self, sound: Sound) -> Stages:
        """The same a layer at a time: as many steps as the spec has layers, the last of which returns the rows."""
        values = torch.frombuffer(bytearray(sound.values), dtype=torch.float32).view(sound.frames, sound.bins)
        return self._tower.stages(values, sound.heard, sound.ordinal)


def ear_shapes(spec: AnyEar) -> dict[str, tuple[int, ...]]:
    """What a tower is made of, by our names. Matrices are [out, in]; those of convolutions have a channel's places behind each
    other. layers.{i}.qkv: rows of q, k and v behind each other."""
    if isinstance(spec, ConformerSpec):
        return conformer_shapes(spec)
    return transformer_shapes(spec) if spec.shaw is None else shaw_shapes(spec)


def ear_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a tensor by our name, in a tower that computes in `dtype`."""
    is_exact = "norm." in name or name == "positions.weight" or name.endswith((".bounds", ".query_scale"))
    return torch.float32 if is_exact else dtype


def work_bytes(spec: AnyEar, frames: int, dtype: torch.dtype) -> int:
    """About the most that computing a piece of so many frames takes beside the weights."""
    if isinstance(spec, ConformerSpec):
        return ear_conformer.most_bytes(spec, frames, dtype.itemsize)
    if spec.shaw is not None:
        return ear_shaw.most_bytes(spec, frames, dtype.itemsize)
    return ear_transformer.most_numbers(spec, frames) * dtype.itemsize
