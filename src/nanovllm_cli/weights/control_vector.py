"""Control vectors as llama.cpp's files have them (Zou et al. 2023): what is added to the residual stream behind layers of a
model, to lead it into a direction.

A GGUF file has a tensor direction.N [hidden size] F32 for each layer that it has one for, counted from 0 as the model's are; the
first has none. Other tensors in it are left aside. Metadata are not asked: a file may say what model it was made from
(controlvector.model_hint), by a name that nobody is held to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from nanovllm_cli.config import ControlVector
from nanovllm_cli.errors import CheckpointError, ModelNotFoundError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.weights.files import some
from nanovllm_cli.weights.gguf import GGUFFile
from nanovllm_cli.weights.json_file import reading
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN

LESS = "give them a smaller scale"
Directions = dict[int, torch.Tensor]
_PREFIX = "direction."
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")
_OTHER = "it was made from another model"
_MADE = "nanovllm control-vector makes these files, and llama.cpp's cvector-generator"


def check_led(spec: ModelSpec) -> None:
    """Raises UnsupportedError for a model that has not one residual stream, gone through once."""
    if spec.streams is not None:
        what = f"a {spec.architecture} model has several residual streams, and a control vector is for one"
        raise UnsupportedError(what, "leave it out")
    if spec.cross is not None:
        does = "writes down what is said" if spec.encoder is None else "answers what its encoder reads"
        raise UnsupportedError(f"a {spec.architecture} model {does}, and is not led", "leave it out")
    if spec.passes is not None:
        what = f"layers of a {spec.architecture} model run several times, and a control vector is for one pass"
        raise UnsupportedError(what, "leave it out")


def read_directions(
    vectors: Iterable[ControlVector], layers: tuple[int, int] | None, hidden_size: int, num_layers: int
) -> Directions:
    """Sums of all files' directions times their scales, [hidden_size] fp32, by the layers behind which they are added.

    layers: the first and the last that get theirs; None: all. hidden_size, num_layers: of the model.

    Raises ModelNotFoundError (no such file), AccessRefusedError, CheckpointError (broken, NaN, or too large to add),
    UnsupportedError (no control vector, or one for another model), UsageError (no layer of these has a direction).
    """
    sums: Directions = {}
    for vector in vectors:
        for layer, direction in _directions(Path(vector.path), hidden_size, num_layers).items():
            before = sums.get(layer)
            sums[layer] = direction * vector.scale if before is None else before + direction * vector.scale
    for layer, total in sums.items():
        if not total.isfinite().all():
            raise CheckpointError(f"what control vectors add behind layer {layer} is too large for float32", LESS)
    first, last = layers or (1, num_layers)
    chosen = {layer: sums[layer] for layer in sorted(sums) if first <= layer <= last}
    if sums and not chosen:
        told = some([str(layer) for layer in sorted(sums)])
        raise UsageError(f"no control vector has a direction for layers {first} to {last}", f"there are some for {told}")
    return chosen


def _directions(path: Path, hidden_size: int, num_layers: int) -> Directions:
    """Of one file, as it has them."""
    with reading(path):
        if not path.exists():
            raise ModelNotFoundError(f"no control vector {path}: no such file", "it is a .gguf file on this machine")
    file = GGUFFile(path)
    try:
        named = {name: name.removeprefix(_PREFIX) for name in file.entries if name.startswith(_PREFIX)}
        if not named:
            others = f", but {some(list(file.entries))}" if file.entries else ""
            raise UnsupportedError(f"{path}: no control vector: it has no direction.1, direction.2, …{others}", _MADE)
        return {
            _layer(path, name, number, num_layers): _values(file, name, hidden_size) for name, number in named.items()
        }
    finally:
        file.close()


def _layer(path: Path, name: str, number: str, num_layers: int) -> int:
    if _LAYER.fullmatch(number) is None:
        raise CheckpointError(f"{path}: tensor {name!r} names no layer", DOWNLOAD_AGAIN)
    layer = int(number)
    if layer == 0:
        raise CheckpointError(f"{path}: tensor {name!r}: nothing is added behind layer 0", "the first one is direction.1")
    if layer >= num_layers:
        raise UnsupportedError(f"{path}: {name} is for a layer {layer}, and the model's last one is {num_layers - 1}", _OTHER)
    return layer


def _values(file: GGUFFile, name: str, hidden_size: int) -> torch.Tensor:
    entry = file.entries[name]
    if len(entry.shape) != 1:
        raise CheckpointError(f"{file.path}: tensor {name!r} is {list(entry.shape)}, not a row of numbers", DOWNLOAD_AGAIN)
    if entry.dtype_name != "F32":
        raise UnsupportedError(f"{file.path}: tensor {name!r} holds {entry.dtype_name}, not F32", _MADE)
    if entry.shape[0] != hidden_size:
        told = f"{entry.shape[0]} numbers, and the model's hidden size is {hidden_size}"
        raise UnsupportedError(f"{file.path}: {name} has {told}", _OTHER)
    values = file.tensor(name).clone()
    if not values.isfinite().all():
        raise CheckpointError(f"{file.path}: tensor {name!r} has values that are NaN or infinite", DOWNLOAD_AGAIN)
    return values
