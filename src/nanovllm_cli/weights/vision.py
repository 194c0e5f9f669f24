"""From a folder to a vision tower: what the model sees by, whether its tensors are there, and the tower itself.

Three steps, so that a model is told of by its configs and a broken file by its headers, while weights are read when the first
image comes: `read_vision`, `check_tower`, `load_tower`. Folders call a tower's tensors by several prefixes, as transformers'
versions did. Towers that others quantized become plain numbers. Not covered: GGUF files, whose towers are files of their own.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.tower import Tower, tower_dtype, tower_shapes
from nanovllm_cli.models.towers import tower_family
from nanovllm_cli.vision_spec import TowerSpec, VisionSpec
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import folder_of, some
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file
from nanovllm_cli.weights.loader import MISSHAPEN, OTHER_MODEL
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.weight_reader import WeightReader

_ROOT = re.compile(r"(?:model\.)?(visual|vision_tower|multi_modal_projector)\.(?:vision_model\.)?")
_UNREAD = re.compile(r".*\.(?:inv_freq|position_ids)|vision_tower\.head\..*")
"""Numbers that follow from the config, and SigLIP's head, which makes one vector of an image."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def read_vision(checkpoint: Checkpoint) -> VisionSpec | None:
    """What a model sees by. None where it is of a kind that doesn't see, or its folder lacks all of the tower's tensors, or it is
    a GGUF file.

    Raises CheckpointError for configs that are broken, UnsupportedError for what they ask and no tower here can be.
    """
    family = tower_family(checkpoint.config) if checkpoint.format == "hf" else None
    if family is None or checkpoint.config.get("vision_config") is None:
        return None
    if not any(_ROOT.match(name) for name in checkpoint.names()):
        return None
    return family.read(ConfigReader(checkpoint.config, "config.json"), _image_settings(folder_of(checkpoint.path)))


def vision_bytes(spec: VisionSpec, dtype: torch.dtype) -> int:
    """What the tower's weights take."""
    shapes = tower_shapes(spec.tower)
    return sum(math.prod(shape) * tower_dtype(name, dtype).itemsize for name, shape in shapes.items())


def check_tower(checkpoint: Checkpoint, spec: VisionSpec) -> None:
    """Compares names and shapes with those of the spec's tower, by headers alone. All differences are one CheckpointError."""
    _compared(checkpoint, spec.tower, open_reader(checkpoint))


def load_tower(checkpoint: Checkpoint, spec: VisionSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tower:
    """The tower with its weights, to compute in `dtype`. CheckpointError names missing, extra and misshapen tensors, and those
    with NaN."""
    reader = open_reader(checkpoint)
    parts = _compared(checkpoint, spec.tower, reader)
    tensors = {}
    for ours, theirs in parts.items():
        whole = torch.cat([_read(reader, name) for name in theirs])
        tensors[ours] = _arranged(ours, whole, spec.tower).to(device, tower_dtype(ours, dtype)).contiguous()
    return Tower(spec.tower, tensors, spec.mean, spec.std)


def _image_settings(folder: Path) -> ConfigReader:
    """Of the image processor, as transformers finds them; empty where the folder has none."""
    whole, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    if whole.is_file():
        section = ConfigReader(read_json_file(whole, MAX_CONFIG_BYTES), whole.name)
        if section.has("image_processor"):
            return section.section("image_processor")
    return ConfigReader(read_json_file(own, MAX_CONFIG_BYTES) if own.is_file() else {}, own.name)


def _compared(checkpoint: Checkpoint, spec: TowerSpec, reader: WeightReader) -> dict[str, list[str]]:
    """Our names -> the folder's tensors, whose rows lie behind each other in ours."""
    family = tower_family(checkpoint.config)
    assert family is not None
    there: dict[str, str] = {}
    extra = []
    for name in sorted(reader.names()):
        if _ROOT.match(name) and not _UNREAD.fullmatch(plain := _ROOT.sub(r"\1.", name, count=1)):
            if plain in there:
                extra.append(name)
            else:
                there[plain] = name
    parts: dict[str, list[str]] = {}
    missing, misshapen = [], []
    for ours, shape in tower_shapes(spec).items():
        layer = _LAYER.search(ours)
        pattern = family.names[_LAYER.sub("{i}", ours)]
        plain_names = [each.replace("{i}", layer[0]) if layer else each for each in pattern]
        wanted = _stored_shape(ours, (shape[0] // len(plain_names), *shape[1:]), spec)
        for plain in plain_names:
            if plain not in there:
                missing.append(plain)
            elif (found := reader.shape(there[plain])) != wanted:
                misshapen.append(f"{there[plain]} (expected {list(wanted)}, found {list(found)})")
        parts[ours] = plain_names
    extra += [there[plain] for plain in there.keys() - {plain for names in parts.values() for plain in names}]
    problems = [("missing", missing), ("not part of it", extra), (MISSHAPEN, misshapen)]
    lines = [f"{len(names)} {what}: {some(sorted(names))}" for what, names in problems if names]
    if lines:
        raise CheckpointError(f"{checkpoint.path}: tensors don't match the vision tower: {'; '.join(lines)}", OTHER_MODEL)
    return {ours: [there[plain] for plain in names] for ours, names in parts.items()}


def _stored_shape(ours: str, shape: tuple[int, ...], spec: TowerSpec) -> tuple[int, ...]:
    """Of a tensor in the file, by its shape as one of ours."""
    if ours == "patch.weight":
        side = (spec.patch_size, spec.patch_size)
        return (shape[0], 3, spec.frames, *side) if spec.frames else (shape[0], 3, *side)
    return shape[::-1] if ours == "projector.out.weight" else shape


def _arranged(ours: str, stored: torch.Tensor, spec: TowerSpec) -> torch.Tensor:
    """As `tower_shapes` has it."""
    if ours == "patch.weight":
        kernel = stored.to(torch.float32).sum(dim=2) if spec.frames else stored  # all frames show the same
        return kernel.flatten(1)
    if ours == "projector.out.weight":
        return stored.T
    if ours == "projector.norm.weight" and spec.projector == "pooled":
        return stored.to(torch.float32) + 1
    if ours == "projector.join.weight":  # a dimension's patches are behind each other there
        return stored.view(len(stored), spec.hidden_size, spec.merge**2).transpose(1, 2).flatten(1)
    return stored


def _read(reader: WeightReader, name: str) -> torch.Tensor:
    form = reader.format(name)
    parts = []
    for rows, _ in reader.slices(name):
        if isinstance(rows, torch.Tensor):
            parts.append(rows.clone())  # nothing holds the file
        else:
            assert form is not None
            parts.append(form.dequantize(rows))
    return torch.cat(parts)
