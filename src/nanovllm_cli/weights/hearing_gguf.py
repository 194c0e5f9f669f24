"""What a GGUF model hears by, in a file of its own (llama.cpp's mmproj-*.gguf), in the steps of `hearing.py`; `mmproj.py` opens
it and sees whether it is this model's. What the file may have beside that, to see by, is left aside.
"""

from __future__ import annotations

import re

import torch

from nanovllm_cli.hearing_spec import AnyEar, HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ear import Ear, ear_dtype
from nanovllm_cli.models.ears_gguf import ear_names_in_gguf, ear_projector_of, hearing_from_gguf, hears
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.hearing import put_together, stored_ear_shapes
from nanovllm_cli.weights.vision import bounds_of, match_tensors, read_whole
from nanovllm_cli.weights.weight_reader import GGUFReader

_FRONT_BIAS = re.compile(r"front\d\.bias")
_OURS = re.compile(r"a\.|mm\.a\.")


def read_ear(file: Checkpoint) -> HearingSpec:
    """Raises CheckpointError for a file that is broken, UnsupportedError for what no tower here can be."""
    return hearing_from_gguf(_metadata(file), _shapes(file))


def compared_ear(file: Checkpoint, spec: AnyEar) -> dict[str, tuple[str, ...]]:
    """Our names -> the file's. Raises as `match_tensors`."""
    names = ear_names_in_gguf(spec, ear_projector_of(_metadata(file)))
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, (rows, *others) in stored_ear_shapes(spec, of_file=True).items():
        ones = (1,) * (1 if spec.front == "line" else 2) if _FRONT_BIAS.fullmatch(ours) else ()  # a row for each channel there
        wanted |= dict.fromkeys(names[ours], (rows // len(names[ours]), *others, *ones))
    sees = not hears(_metadata(file))
    there = {name: shape for name, shape in _shapes(file).items() if not sees or _OURS.match(name)}
    shapes = {name: (name, shape) for name, shape in there.items() if spec.positions or name != "a.position_embd.weight"}
    match_tensors(file.path, wanted, shapes)
    return names


def load_ear_gguf(file: Checkpoint, spec: HearingSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> Ear:
    """As `hearing.load_ear`."""
    reader, tensors = GGUFReader(file), {}
    for ours, theirs in compared_ear(file, spec.tower).items():
        is_bound = ours.endswith(".bounds")
        parts = [bounds_of(file, theirs)] if is_bound else [read_whole(reader, name) for name in theirs]
        parts = [part.flatten() if _FRONT_BIAS.fullmatch(ours) else part for part in parts]
        tensors[ours] = put_together(ours, parts, spec.tower, of_file=True).to(device, ear_dtype(ours, dtype)).contiguous()
    return Ear(spec.tower, tensors)


def _metadata(file: Checkpoint) -> ConfigReader:
    return ConfigReader(file.config, str(file.path))


def _shapes(file: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: file.info(name).shape for name in file.names()}
