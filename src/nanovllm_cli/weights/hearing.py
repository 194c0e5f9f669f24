"""From a folder to a tower for sounds, in the three steps of `vision.py`: what the model hears by, whether its tensors are there,
the tower itself. Not covered: GGUF files, whose towers are files of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch.nn import functional

from nanovllm_cli.hearing_spec import WAVE, AnyEar, EarSpec, HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ear import Ear, ear_dtype, ear_shapes
from nanovllm_cli.models.ear_transformer import turned_apart
from nanovllm_cli.models.ears import EarFamily, ear_family
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import folder_of
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.vision import compared, read_parts, settings_of
from nanovllm_cli.weights.weight_reader import WeightReader

_UNREAD = r"(?!.*(?:audio_bos_eos_token\.weight|\.attention_dists|\.num_batches_tracked)$)"
"""Rows of what stands around a sound, which a Qwen2.5-Omni has beside its tower, and its template writes; what follows from a
config, and how often a Granite Speech was trained."""
_FRONT = "front0.weight", "front1.weight", "front2.weight"


def read_hearing(checkpoint: Checkpoint) -> HearingSpec | None:
    """What a model hears by. None where it is of a kind that doesn't hear, or its folder lacks all of the tower's tensors, or it
    is a GGUF file.

    Raises CheckpointError for configs that are broken, UnsupportedError for what they ask and no tower here can be.
    """
    family = ear_family(checkpoint.config) if checkpoint.format == "hf" else None
    if family is None or (family.section is not None and checkpoint.config.get(family.section) is None):
        return None
    if not any(_root_of(family).match(name) for name in checkpoint.names()):
        return None
    settings = settings_of(folder_of(checkpoint.path), "feature_extractor")
    return family.read(ConfigReader(checkpoint.config, "config.json"), settings)


def hearing_bytes(spec: HearingSpec, dtype: torch.dtype) -> int:
    """What the tower's weights take."""
    return sum(math.prod(shape) * ear_dtype(name, dtype).itemsize for name, shape in ear_shapes(spec.tower).items())


def ear_parts(checkpoint: Checkpoint, spec: HearingSpec) -> dict[str, list[str]]:
    """Our names -> the folder's tensors, whose rows lie behind each other in ours, compared by headers alone. All differences are
    one CheckpointError."""
    return _compared(checkpoint, spec.tower, open_reader(checkpoint))


def load_ear(checkpoint: Checkpoint, spec: HearingSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> Ear:
    """The tower with its weights, to compute in `dtype`. Raises as `ear_parts`."""
    reader, tensors = open_reader(checkpoint), {}
    for ours, theirs in _compared(checkpoint, spec.tower, reader).items():
        parts = read_parts(checkpoint, reader, ours, theirs)
        tensors[ours] = put_together(ours, parts, spec.tower).to(device, ear_dtype(ours, dtype)).contiguous()
    for ours, shape in ear_shapes(spec.tower).items():
        if _is_absent(ours, spec.tower):  # a bias of a norm that has none: without one a norm would not be centered
            tensors[ours] = torch.zeros(shape, dtype=ear_dtype(ours, dtype), device=device)
    return Ear(spec.tower, tensors)


def _compared(checkpoint: Checkpoint, spec: AnyEar, reader: WeightReader) -> dict[str, list[str]]:
    family = ear_family(checkpoint.config)
    assert family is not None
    root = _root_of(family)
    plain = {name: root.sub(r"\1.", name, count=1) for name in reader.names() if root.match(name)}
    first = family.other_names
    is_first = first is not None and any(own.startswith("audio_tower.proj") for own in plain.values())
    names: Mapping[str, tuple[str, ...]] = first if is_first and first is not None else family.names
    return compared(checkpoint.path, reader, plain, names, stored_ear_shapes(spec))


def _root_of(family: EarFamily) -> re.Pattern[str]:
    return re.compile(rf"{_UNREAD}(?:model\.|thinker\.)?({'|'.join(family.roots)})\.")


def stored_ear_shapes(spec: AnyEar, *, of_file: bool = False) -> dict[str, tuple[int, ...]]:
    """Of what folders have for each of ours, or GGUF files, all that lies behind each other in it taken together."""
    shapes = {name: shape for name, shape in ear_shapes(spec).items() if not _is_absent(name, spec)}
    for name, (rows, *others) in list(shapes.items()):
        if name in _FRONT:
            wave = (WAVE[_FRONT.index(name)][0],)
            places = wave if spec.front == "wave" else (3,) if spec.front == "line" else (3, 3)
            shapes[name] = (rows, others[0] // math.prod(places), *places)
        elif name.endswith(".bounds"):
            shapes[name] = (rows * others[0],)
        elif name.endswith(".kernel") and not of_file:
            shapes[name] = (rows, 1, *others)
        elif name.endswith(".batch_norm.table"):
            shapes[name] = ((2 if of_file else 4) * others[0],)
        elif name.endswith((".conv.up.weight", ".conv.down.weight")) and spec.front == "pairs" and not of_file:
            shapes[name] = (rows, *others, 1)
        elif name == "query.table":
            shapes[name] = (1, rows, *others)
        elif name.endswith(".qkv.bias") and not spec.key_bias:
            shapes[name] = (rows // 3 * 2,)
    return shapes


def _is_absent(name: str, spec: AnyEar) -> bool:
    return isinstance(spec, EarSpec) and spec.bare and name.endswith("_norm.bias") and name != "front_norm.bias"


def put_together(ours: str, parts: list[torch.Tensor], spec: AnyEar, *, of_file: bool = False) -> torch.Tensor:
    """As `ear_shapes` has it."""
    if ours.endswith(".qkv.bias") and not spec.key_bias:
        parts = [parts[0], torch.zeros_like(parts[0]), parts[1]]
    if ".qkv." in ours and isinstance(spec, EarSpec) and spec.turned:
        parts = [turned_apart(parts[0], spec), turned_apart(parts[1], spec), parts[2]]
    whole = torch.cat(parts)
    if ours.endswith(".query_scale") and not of_file:
        return functional.softplus(whole.to(torch.float32))
    if ours.endswith(".bounds"):
        return whole.view(-1, 4)
    if ours.endswith(".batch_norm.table"):
        return whole.view(2, -1) if of_file else _folded(*parts)
    if ours == "query.table" or (ours.endswith((".conv.up.weight", ".conv.down.weight")) and whole.dim() == 3):
        return whole.view(ear_shapes(spec)[ours])
    return whole.flatten(1) if ours in _FRONT or ours.endswith(".kernel") else whole


def _folded(gain: torch.Tensor, shift: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """[2, n]: what a batch norm multiplies with, and adds."""
    gain, shift, mean, variance = (each.to(torch.float32) for each in (gain, shift, mean, variance))
    scale = gain / torch.sqrt(variance + 1e-5)
    return torch.stack([scale, shift - mean * scale])
