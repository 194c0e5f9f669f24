"""What a GGUF model sees or hears by, in a file of its own (llama.cpp's mmproj-*.gguf), in the three steps of `vision.py`: what
it says, whether its tensors are there, the tower itself. And whether it is of this model: nothing in either file names the other.

Which tensors these are is in `models/towers_gguf.py`. Block types become plain numbers. What the file may have beside a tower is
left aside: what hears, where nothing here does so, and the embedding of a token, which the model has as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.hearing_spec import AnyEar, HearingSpec, Sense, Senses
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ear import Ear, ear_dtype
from nanovllm_cli.models.ears_gguf import (
    EAR_PROJECTORS,
    ear_label,
    ear_names_in_gguf,
    ear_projector_of,
    hearing_from_gguf,
    hears,
    hears_too,
)
from nanovllm_cli.models.tower import tower_dtype, tower_of
from nanovllm_cli.models.tower_layers import Seeing
from nanovllm_cli.models.towers_gguf import names_in_gguf, projector_of, vision_from_gguf
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.vision_spec import TowerSpec, VisionSpec
from nanovllm_cli.weights.checkpoint import TOWER, Checkpoint, open_checkpoint
from nanovllm_cli.weights.convert_names import pairs_to_halves
from nanovllm_cli.weights.files import some
from nanovllm_cli.weights.hearing import put_together, stored_ear_shapes
from nanovllm_cli.weights.vision import arranged, match_tensors, read_parts, rows_of_parts, stored_shapes
from nanovllm_cli.weights.weight_reader import GGUFReader

ANOTHER_FILE = "--mmproj names the file that belongs to the model: mmproj-….gguf, from where the model is"
_BATCHES = {"v.class_embd", "v.position_embd.weight"}
_ROWS = {"v.class_embd", "v.image_newline", "v.view_seperator"}
"""Each of them one, or a matrix of one."""
_FRONT_BIAS = re.compile(r"front\d\.bias")
_HEARS = re.compile(r"a\.|mm\.a\.")
_UNREAD = re.compile(r"a\..*|mm\.a\..*|v\.token_embd\.img_break|v\.view_seperator")


def open_mmproj(path: str | Path) -> Checkpoint:
    """Raises what `open_checkpoint` raises, and UsageError for a file that is something else."""
    file = open_checkpoint(path, of_tower=True)
    if file.format != "gguf" or (found := file.config.get("general.architecture")) != TOWER:
        file.close()
        what = f"a model of the architecture {str(found)[:40]!r}" if file.format == "gguf" else "a model"
        raise UsageError(f"{path} is {what}, not what one sees by", ANOTHER_FILE)
    return file


def read_mmproj(file: Checkpoint) -> Senses:
    """Raises CheckpointError for a file that is broken, UnsupportedError for what no tower here can be."""
    read, shapes = _metadata(file), _shapes(file)
    vision = None if hears(read) else vision_from_gguf(read, shapes)
    return Senses(vision, hearing_from_gguf(read, shapes) if hears(read) or _hears_as_known(read) else None)


def check_mmproj(file: Checkpoint, senses: Senses) -> None:
    """As `vision.check_tower`."""
    if senses.hearing is not None:
        _compared_ear(file, senses.hearing.tower)
    if senses.vision is not None:
        _compared(file, senses.vision.tower)


def load_mmproj(
    file: Checkpoint, spec: VisionSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Seeing:
    """As `vision.load_tower`."""
    reader, tensors = GGUFReader(file), {}
    for ours, theirs in _compared(file, spec.tower).items():
        parts = read_parts(file, reader, ours, theirs)
        tensors[ours] = _ours(ours, parts, spec.tower).to(device, tower_dtype(ours, dtype)).contiguous()
    return tower_of(spec.tower, tensors, (spec.mean, spec.std))


def load_ear_gguf(file: Checkpoint, spec: HearingSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> Ear:
    """As `hearing.load_ear`."""
    reader, tensors = GGUFReader(file), {}
    for ours, theirs in _compared_ear(file, spec.tower).items():
        parts = read_parts(file, reader, ours, theirs)
        parts = [part.flatten() if _FRONT_BIAS.fullmatch(ours) else part for part in parts]
        tensors[ours] = put_together(ours, parts, spec.tower, of_file=True).to(device, ear_dtype(ours, dtype)).contiguous()
    return Ear(spec.tower, tensors)


def checked_mmproj(path: str | Path, model: Checkpoint, hidden_size: int) -> Senses:
    """Of a file that is whole, and of this model, whose width that is. Raises what the three steps do, and UsageError for another
    model's."""
    with open_mmproj(path) as file:
        senses = read_mmproj(file)
        for sense in senses.all:
            _check_belongs(file, sense, model, hidden_size)
        check_mmproj(file, senses)
    return senses


def with_mmproj(
    config: EngineConfig,
    beside: Path | None,
    model: Checkpoint,
    hidden_size: int,
    control_tokens: Collection[str],
    progress: LoadProgress,
) -> EngineConfig:
    """With what the model is to see by: the file that was named, or the one that was found beside it, if that is its own;
    `progress` hears of that. control_tokens: of its vocabulary. Raises as `checked_mmproj`, for one that was named."""
    if config.mmproj is not None:
        _check_tokens(checked_mmproj(config.mmproj, model, hidden_size), config.mmproj, control_tokens)
    if config.mmproj is not None or beside is None or not config.mmproj_auto:
        return config
    try:
        _check_tokens(checked_mmproj(beside, model, hidden_size), beside, control_tokens)
    except NanovllmError as error:
        progress.note(f"{what_comes_by(beside)} are not read: {error.message}")
        return config
    progress.note(f"with {what_comes_by(beside)} by {beside.name}")
    return replace(config, mmproj=str(beside))


def what_comes_by(path: Path) -> str:
    """images, sounds, or both; images where a file can't say."""
    try:
        with open_mmproj(path) as file:
            read = _metadata(file)
            return "sounds" if hears(read) else "images and sounds" if _hears_as_known(read) else "images"
    except NanovllmError:
        return "images"


def _check_belongs(file: Checkpoint, spec: Sense, model: Checkpoint, hidden_size: int) -> None:
    if model.format != "gguf":
        raise UsageError(f"{model.path} is no GGUF model, and brings along what it sees by, if it does", "leave --mmproj out")
    architecture = str(model.config.get("general.architecture"))[:40]
    known = (ear_projector_of if isinstance(spec, HearingSpec) else projector_of)(_metadata(file)).texts
    if architecture not in known:
        raise UsageError(f"{file.path} is of models of the kind {' or '.join(known)}, not of {architecture}", ANOTHER_FILE)
    if spec.tower.out_size != hidden_size:
        raise UsageError(f"{file.path} makes rows of {spec.tower.out_size} numbers for a model of {hidden_size}", ANOTHER_FILE)
    deep, own = model.config.get(f"{architecture}.n_deepstack_layers"), len(getattr(spec.tower, "deep", ()))
    if deep is not None and deep != own:
        raise UsageError(f"{file.path} adds rows behind {own} layers of a model, not {deep}", ANOTHER_FILE)


def _check_tokens(senses: Senses, path: str | Path, control_tokens: Collection[str]) -> None:
    """UsageError where a vocabulary lacks what images, or sounds, are made of."""
    every = [sense.tokens for sense in senses.all]
    needed = {token for each in every for token in (each.instead or each.token, each.line_end, each.last_end)} - {""}
    if missing := needed.difference(control_tokens):
        raise UsageError(f"{path} is of models with the tokens {some(sorted(missing))}, which this one lacks", ANOTHER_FILE)


def _hears_as_known(read: ConfigReader) -> bool:
    """Whether a file that one sees by is also one that something here hears by."""
    return hears_too(read) and ear_label(read) in EAR_PROJECTORS


def _metadata(file: Checkpoint) -> ConfigReader:
    return ConfigReader(file.config, str(file.path))


def _shapes(file: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: file.info(name).shape for name in file.names()}


def _compared(file: Checkpoint, spec: TowerSpec) -> dict[str, tuple[str, ...]]:
    """Our names -> the file's."""
    shapes = _shapes(file)
    names = names_in_gguf(spec, shapes)
    if spec.lead:
        shapes |= {name: _of_a_batch(shapes[name]) for name in _BATCHES & shapes.keys()}
    if spec.sam is not None and spec.sam.beside:
        shapes |= {name: (math.prod(shapes[name]),) for name in _ROWS & shapes.keys()}
        shapes.pop("v.patch_embd.weight", None)  # whose patches are SAM's rows
    wanted: dict[str, tuple[int, ...]] = {}
    stored = stored_shapes(_of_one_frame(spec), of_file=True)
    for ours, (rows, *others) in stored.items():
        count, is_kernel = len(names[ours]), ours in ("patch.weight", "film.weight")
        each = [rows] * count if is_kernel else rows_of_parts(ours, count, stored)
        wanted |= {name: (own, *others) for name, own in zip(names[ours], each, strict=True)}
    there = {name: (name, shape) for name, shape in shapes.items() if name in wanted or not _UNREAD.fullmatch(name)}
    match_tensors(file.path, wanted, there)
    return names


def _compared_ear(file: Checkpoint, spec: AnyEar) -> dict[str, tuple[str, ...]]:
    """The same of what hears. What the file may have beside it, to see by, is left aside."""
    names = ear_names_in_gguf(spec, ear_projector_of(_metadata(file)))
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, (rows, *others) in stored_ear_shapes(spec, of_file=True).items():
        ones = (1,) * (1 if spec.front == "line" else 2) if _FRONT_BIAS.fullmatch(ours) else ()  # a row for each channel there
        wanted |= dict.fromkeys(names[ours], (rows // len(names[ours]), *others, *ones))
    sees = not hears(_metadata(file))
    there = {name: shape for name, shape in _shapes(file).items() if not sees or _HEARS.match(name)}
    shapes = {name: (name, shape) for name, shape in there.items() if spec.positions or name != "a.position_embd.weight"}
    match_tensors(file.path, wanted, shapes)
    return names


def _of_a_batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the batch of one that some files have it in."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return (1, *shape) if len(shape) == 1 else shape


def _ours(ours: str, parts: list[torch.Tensor], spec: TowerSpec) -> torch.Tensor:
    """As `tower_shapes` has it."""
    if spec.projector == "direct":  # as it is there
        return torch.cat(parts)
    if ours == "patch.weight":  # all frames show the same
        return arranged(ours, torch.stack([each.to(torch.float32) for each in parts]).sum(0), _of_one_frame(spec))
    if ours == "film.weight":
        return torch.stack(parts, dim=2).flatten(1)
    whole = torch.cat(parts)
    if ours.endswith(".qkv.weight") and spec.dealt:
        both = 2 * spec.hidden_size
        return torch.cat([pairs_to_halves(whole[:both], spec.head_dim, spec.head_dim), whole[both:]])
    return whole if ours == "projector.norm.weight" else arranged(ours, whole, spec)


def _of_one_frame(spec: TowerSpec) -> TowerSpec:
    """The same, whose patches have a kernel of one frame: so have all of these files', whatever folders have."""
    return replace(spec, frames=0)
