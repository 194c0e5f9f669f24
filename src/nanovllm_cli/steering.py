"""Making control vectors: the direction that leads from what a model makes of some texts to what it makes of others (Zou et al.
2023, representation reading), for each layer.

Texts come in pairs. What is compared is the residual stream behind a layer, at a text's last token; a pair's difference is
positive less negative. `weights/control_vector.py` reads what is written here.

    mean    the mean of all differences
    pca     the direction that they have most of, the first principal component without centring, as llama.cpp's generator has it;
            of its two signs the one that the mean of them has

Either way of length 1. Not covered: which texts to choose.

Legend: P pairs, L layers with a direction, H numbers of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.gguf_types import TENSOR_TYPES
from nanovllm_cli.quantization.logits import MeasuredModel
from nanovllm_cli.weights.control_vector import Directions, check_led
from nanovllm_cli.weights.gguf_writer import GGUFPartWriter, GGUFTensor, HeaderBuilder
from nanovllm_cli.weights.writer import OutputFile

Method = Literal["pca", "mean"]
_LEAST = 1e-6
"""Of the stream's own length: a shorter difference is of rounding alone."""


class Pair(NamedTuple):
    """Token ids of two texts that differ in what the direction is to be."""

    positive: list[int]
    negative: list[int]


def check_model(spec: ModelSpec) -> None:
    """Raises UnsupportedError where no direction can be found."""
    check_led(spec)
    if spec.num_layers < 3:
        raise UnsupportedError(f"a model of {spec.num_layers} layers has none between the first and the last to be led behind")


def find_directions(model: MeasuredModel, pairs: Sequence[Pair], method: Method, progress: LoadProgress) -> Directions:
    """Of length 1, [H] float32, by the layers behind which they are to be added: all but the first and the last. Layers at which
    all pairs are alike are left out.

    Raises UsageError where that is all of them, CheckpointError for numbers that are none.
    """
    progress.stage("reading pairs of texts", len(pairs), "texts")
    streams: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in pairs:
        streams.append((_behind_layers(model, pair.positive), _behind_layers(model, pair.negative)))
        progress.advance(1)
    progress.done()
    sizes = torch.stack([positive.norm(dim=-1) for positive, _ in streams]).mean(0)
    differences = torch.stack([positive - negative for positive, negative in streams])  # [P, L, H]
    if not differences.isfinite().all():
        raise CheckpointError("the model makes NaN or infinite numbers of these texts", "take --dtype float32")
    found: Directions = {}
    for i in range(differences.shape[1]):
        direction = _direction(differences[:, i].double(), method, _LEAST * float(sizes[i]))
        if direction is not None:
            found[i + 1] = direction.float()
    if not found:
        raise UsageError("the model makes the same of both texts of every pair", "take pairs that differ at their ends")
    return found


def write_directions(directions: Directions, path: Path, architecture: str, *, replace: bool = False) -> None:
    """A file as llama.cpp has them, whole or not at all. architecture: of the model, for people. Raises OutputError."""
    builder = HeaderBuilder("controlvector")
    builder.add_string("controlvector.model_hint", architecture)
    builder.add_uint32("controlvector.layer_count", len(directions))
    tensors = [GGUFTensor(f"direction.{layer}", tuple(each.shape), TENSOR_TYPES["F32"]) for layer, each in directions.items()]
    with OutputFile(path, replace=replace) as output:
        writer = GGUFPartWriter(output.file, builder.header(), tensors)
        for tensor, direction in zip(tensors, directions.values(), strict=True):
            writer.write(tensor.name, [direction])
        writer.finish()
        output.commit()


def _behind_layers(model: MeasuredModel, ids: list[int]) -> torch.Tensor:
    """[L, H] float32, of the last token."""
    before = model.streams(ids)  # each layer, and behind the last norm
    return torch.stack([stream[-1] for stream in before[2:-1]])


def _direction(differences: torch.Tensor, method: Method, least: float) -> torch.Tensor | None:
    """[H] of [P, H]; None where no difference is as long as the least."""
    mean = differences.mean(0)
    if float(differences.norm(dim=-1).max()) <= least:
        return None
    if method == "mean":
        return None if float(mean.norm()) <= least else mean / mean.norm()
    # As long a vector in the space of pairs: its matrix is [P, P], where that of the numbers would be [H, H].
    _, vectors = torch.linalg.eigh(differences @ differences.T)
    first: torch.Tensor = differences.T @ vectors[:, -1]
    first = first / first.norm()
    return first if float(first @ mean) >= 0 else -first

