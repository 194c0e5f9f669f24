"""What a pooled vector goes through behind the model, on the host and in float32: dense layers of models that embed, heads of
those that rank (`heads.py`).

    folders     modules that sentence-transformers calls Dense: N_Dense/config.json and N_Dense/model.safetensors
    GGUF        dense_2.weight, dense_2.bias, dense_3.weight, as llama.cpp has them behind gemma-embedding
    either      a matrix of the model's own (`Family.vector_names`, EmbeddingGemma 2)

First come descriptions (`Layer`), by configs and the headers of files, so that a model can be told of without its weights; then
the weights (`Further`). Not covered: layers for each token, and those that add what they are given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import PoolingType
from torch.nn import functional

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import PICKLES
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.safetensors import SafetensorsFile

ACTIVATIONS = {
    "identity": lambda numbers: numbers,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}
TORCH_NAMES = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.SiLU": "silu",
}
"""What configs of sentence-transformers call them."""
_GGUF = ("dense_2", "dense_3")
_DENSE_KEYS = {"in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name"}
_POOLED = "sentence_embedding"
_BROKEN = "the folder is incomplete or damaged: download it again"


class Norm(NamedTuple):
    """LayerNorm, by the names of its tensors."""

    weight: str
    bias: str | None
    eps: float


class Layer(NamedTuple):
    """norm(act(W x + b)). shape: of W, [out, in]. weight, bias: names of tensors, in a `file` of their own, or among the model's.
    unit: what comes in is made of length 1 first."""

    weight: str
    bias: str | None
    shape: tuple[int, int]
    activation: str = "identity"
    norm: Norm | None = None
    file: Path | None = None
    unit: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all its tensors, by their names."""
        out = (self.shape[0],)
        vectors = [self.bias] if self.norm is None else [self.bias, self.norm.weight, self.norm.bias]
        return {self.weight: self.shape, **{name: out for name in vectors if name is not None}}


class DenseLayer(NamedTuple):
    """A layer's numbers, float32: weight [out, in], bias [out], gain and shift [out] of the norm behind it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    eps: float = 0.0
    unit: bool = False

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """[…, in] -> […, out]."""
        if self.unit:
            vector = functional.normalize(vector, dim=-1)
        out = ACTIVATIONS[self.activation](functional.linear(vector, self.weight, self.bias))
        return out if self.gain is None else functional.layer_norm(out, out.shape[-1:], self.gain, self.shift, self.eps)


class Further:
    """All layers, one after the other."""

    def __init__(self, layers: Sequence[DenseLayer]) -> None:
        self.layers = tuple(layers)

    def __call__(self, vector: Sequence[float]) -> tuple[float, ...]:
        """Of a vector, or of several one behind the other."""
        numbers = torch.from_numpy(np.array(vector, np.float32)).view(-1, self.layers[0].weight.shape[1])
        for layer in self.layers:
            numbers = layer(numbers)
        return tuple(numbers.flatten().tolist())


def read_further(checkpoint: Checkpoint, layers: Sequence[Layer]) -> Further | None:
    """The weights of layers that were described; None where there are none. CheckpointError for numbers that are not finite."""
    return Further([_read(checkpoint, layer) for layer in layers]) if layers else None


def check_width(layers: Sequence[Layer], width: int) -> None:
    """Raises CheckpointError where they don't take vectors of `width`, or what the one before them gives."""
    for layer in layers:
        if layer.shape[1] != width:
            told = layer.weight if layer.file is None else layer.file
            raise CheckpointError(f"{told}: a layer for vectors of {layer.shape[1]} numbers, which gets {width}", _BROKEN)
        width = layer.shape[0]


def dense_module(folder: Path, *, unit: bool) -> Layer:
    """A Dense module of sentence-transformers, by its folder. unit: a Normalize module stands before it.

    Raises CheckpointError for what is broken, UnsupportedError for what such a module can't be here.
    """
    path = folder / "config.json"
    config = read_json_file(path, MAX_CONFIG_BYTES)
    rows, columns, bias = config.get("out_features"), config.get("in_features"), config.get("bias", True)
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1 or not isinstance(bias, bool):
        raise CheckpointError(f"{path}: not the config of a dense layer", _BROKEN)
    others = sorted(key for key, value in config.items() if key not in _DENSE_KEYS and value not in (None, False))
    others += [key for key in ("module_input_name", "module_output_name") if config.get(key) not in (None, _POOLED)]
    if others:
        raise UnsupportedError(
            f"{path}: a dense layer with {', '.join(others)[:80]} is not supported", "take a model whose dense layers are plain"
        )
    file = folder / "model.safetensors"
    if not file.is_file():
        raise _no_weights(folder)
    said = config.get("activation_function", "torch.nn.modules.activation.Tanh")  # as the class has it
    layer = Layer("linear.weight", "linear.bias" if bias else None, (rows, columns), activation_of(said, path), None, file, unit)
    with contextlib.closing(SafetensorsFile(file)) as opened:
        check_shapes(layer, {name: entry.shape for name, entry in opened.entries.items()}, file)
        if extra := sorted(opened.entries.keys() - layer.shapes.keys()):
            raise CheckpointError(f"{file}: not part of a dense layer: {', '.join(extra)[:80]}", _BROKEN)
    return layer


def matrix_of(checkpoint: Checkpoint, name: str | None) -> tuple[Layer, ...]:
    """The layer that this tensor is, without a bias; none for None. CheckpointError where it is missing."""
    if name is None:
        return ()
    shape = shapes_of(checkpoint, [name]).get(name)
    if shape is None or len(shape) != 2:
        told = "is missing" if shape is None else f"is {list(shape)}, no matrix"
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} {told}", DOWNLOAD_AGAIN)
    return (Layer(name, None, (shape[0], shape[1])),)


def gguf_dense(checkpoint: Checkpoint) -> tuple[Layer, ...]:
    """The dense layers of a GGUF file, as its tensors have them. CheckpointError where its metadata say otherwise."""
    names, layers = set(checkpoint.names()), []
    arch = checkpoint.config.get("general.architecture")
    for part in _GGUF:
        sizes = [checkpoint.config.get(f"{arch}.{part}_feat_{side}") for side in ("out", "in")]
        if f"{part}.weight" not in names:
            if any(sizes):
                raise CheckpointError(f"{checkpoint.path}: tensor '{part}.weight' is missing", DOWNLOAD_AGAIN)
            continue
        shape = checkpoint.info(f"{part}.weight").shape
        if len(shape) != 2 or any(said not in (None, there) for said, there in zip(sizes, shape, strict=True)):
            raise CheckpointError(f"{checkpoint.path}: {part}.weight is {list(shape)}, its keys say {sizes}", DOWNLOAD_AGAIN)
        layer = Layer(f"{part}.weight", f"{part}.bias" if f"{part}.bias" in names else None, (shape[0], shape[1]))
        check_shapes(layer, shapes_of(checkpoint, layer.shapes), checkpoint.path)
        layers.append(layer)
    return tuple(layers)


def gguf_dense_tensors(checkpoint: Checkpoint) -> set[str]:
    """Names that belong to them, if they are there: of models that pool."""
    arch = checkpoint.config.get("general.architecture")
    pools = checkpoint.format == "gguf" and checkpoint.config.get(f"{arch}.pooling_type", PoolingType.NONE) != PoolingType.NONE
    return {f"{part}.{name}" for part in _GGUF for name in ("weight", "bias")} if pools else set()


def gguf_sayable(layers: Sequence[Layer]) -> bool:
    """Whether a GGUF file can have them: two at most, of which only the first has a bias."""
    plain = all(layer.activation == "identity" and layer.norm is None and not layer.unit for layer in layers)
    return plain and len(layers) <= len(_GGUF) and all(layer.bias is None for layer in layers[1:])


def as_gguf(further: Further) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Of layers that a GGUF file can have: tensors by name, and sizes by their keys without the architecture."""
    tensors: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for part, layer in zip(_GGUF, further.layers, strict=False):
        tensors |= {f"{part}.weight": layer.weight} | ({} if layer.bias is None else {f"{part}.bias": layer.bias})
        sizes |= {f"{part}_feat_{side}": size for side, size in zip(("out", "in"), layer.weight.shape, strict=True)}
    return tensors, sizes


def activation_of(said: object, path: Path) -> str:
    """By the name of torch's class."""
    if not isinstance(said, str) or said not in TORCH_NAMES:
        known = ", ".join(name.rpartition(".")[2] for name in TORCH_NAMES)
        raise UnsupportedError(f"{path}: the activation {str(said)[:80]} is not supported", f"known: {known}")
    return TORCH_NAMES[said]


def shapes_of(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Of those that are there."""
    there = set(checkpoint.names())
    return {name: checkpoint.info(name).shape for name in names if name in there}


def check_shapes(layer: Layer, there: Mapping[str, tuple[int, ...]], path: Path) -> None:
    for name, wanted in layer.shapes.items():
        if (found := there.get(name)) != wanted:
            told = "is missing" if found is None else f"is {list(found)}, and should be {list(wanted)}"
            raise CheckpointError(f"{path}: {name} {told}", _BROKEN)


def _no_weights(folder: Path) -> UnsupportedError | CheckpointError:
    if folder.is_dir() and any(entry.suffix in PICKLES for entry in folder.iterdir()):
        return UnsupportedError(
            f"{folder}: pickled weights, which can run any code when they are read, are never opened",
            f"take a copy that has {folder.name}/model.safetensors",
        )
    return CheckpointError(f"{folder / 'model.safetensors'}: no such file", _BROKEN)


def _read(checkpoint: Checkpoint, layer: Layer) -> DenseLayer:
    with contextlib.ExitStack() as stack:
        source: Any = checkpoint
        if layer.file is not None:
            source = stack.enter_context(contextlib.closing(SafetensorsFile(layer.file)))
        where = layer.file or checkpoint.path

        def numbers(name: str | None) -> torch.Tensor | None:
            if name is None:
                return None
            stored: torch.Tensor = source.tensor(name)
            if not stored.is_floating_point():
                raise CheckpointError(f"{where}: {name} holds {str(stored.dtype).removeprefix('torch.')}, no numbers", _BROKEN)
            found = stored.to(torch.float32, copy=True)
            if not math.isfinite(float(found.sum())) and not bool(found.isfinite().all()):
                raise CheckpointError(f"{where}: {name} has NaN or infinity in it", _BROKEN)
            return found

        weight, bias = numbers(layer.weight), numbers(layer.bias)
        assert weight is not None
        norm = layer.norm
        if norm is None:
            return DenseLayer(weight, bias, layer.activation, unit=layer.unit)
        return DenseLayer(weight, bias, layer.activation, numbers(norm.weight), numbers(norm.bias), norm.eps, layer.unit)
