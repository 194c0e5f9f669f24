"""What a model is, by its config and the headers of its files: no weight is read.

The same for a model on this machine and for one of which only the headers are here (`weights/hub_headers.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.vision_spec import VisionSpec
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.convert_names import shortest, tensor_shapes
from nanovllm_cli.weights.folder_config import quantization_of
from nanovllm_cli.weights.hearing import read_hearing
from nanovllm_cli.weights.loader import hf_spec, read_spec
from nanovllm_cli.weights.mlx_names import is_quantized_by_mlx
from nanovllm_cli.weights.pooling import Embedding, embedding_of, use_of
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.stacked import unstacked
from nanovllm_cli.weights.tensor_classes import CLASSES, class_of
from nanovllm_cli.weights.tensor_names import left_aside, mtp_names_of, names_of
from nanovllm_cli.weights.vision import read_vision
from nanovllm_cli.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class TensorClass:
    """The tensors of one part of a model. numbers: as the model sees them, whatever they are packed into. types: how many
    numbers are stored as what (for weights that are several tensors each, how many of the file's own)."""

    name: str
    count: int
    numbers: int
    num_bytes: int
    types: Mapping[str, int]

    @property
    def bits(self) -> float:
        return 8 * self.num_bytes / max(1, self.numbers)


@dataclass(frozen=True, slots=True)
class Facts:
    """stored: what its matrices are mostly stored as, in the format's own words ("BF16", "Q4_K", "gptq"). predicts_further:
    whether it has a layer that can guess (`--mtp`), which nothing else here counts. embedding: how it makes vectors of texts.
    vision: of one that reads images, hearing: of one that hears, whose towers nothing else here counts."""

    spec: ModelSpec
    classes: tuple[TensorClass, ...]
    stored: str
    predicts_further: bool = False
    embedding: Embedding = field(default_factory=Embedding)
    vision: VisionSpec | None = None
    hearing: HearingSpec | None = None

    @property
    def num_parameters(self) -> int:
        return sum(each.numbers for each in self.classes)

    @property
    def num_active(self) -> int:
        """Those that a token is computed with: all but those of the experts that it does not take."""
        return self.num_parameters - self.spec.num_idle

    @property
    def disk_bytes(self) -> int:
        """Of tables that stay in their files, of which a token takes a few rows."""
        return sum(each.num_bytes for each in self.classes if each.name == "n-grams")

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as they are stored."""
        return sum(each.num_bytes for each in self.classes)


def facts_of(checkpoint: Checkpoint, *, headers_only: bool = False) -> Facts:
    """headers_only: its weights are not there. Raises what `open_reader` and `read_spec` raise, so what can't run is refused."""
    reader = reader_of(checkpoint, headers_only=headers_only)
    embedding = embedding_of(checkpoint)
    checkpoint = unstacked(checkpoint)
    if reader is not None:
        spec = read_spec(checkpoint, reader)
        weights = [(name, math.prod(reader.shape(name)), reader.num_bytes(name), _type(reader, checkpoint, name))
                   for name in sorted(reader.names() - left_aside(checkpoint, reader.names()))]  # fmt: skip
        classes = _classes(weights)
    else:
        spec = hf_spec(checkpoint)
        names = set(checkpoint.names())
        infos = [checkpoint.info(name) for name in sorted(names - left_aside(checkpoint, names))]
        stored = _classes((i.name, math.prod(i.shape), i.num_bytes, i.dtype_name) for i in infos)
        numbers = parameters(spec, names_of(checkpoint))
        classes = [TensorClass(each.name, each.count, numbers.get(each.name, each.numbers), each.num_bytes, each.types)
                   for each in stored]  # fmt: skip
    embedding, predicts_further = use_of(embedding, spec), mtp_names_of(checkpoint) is not None
    senses = read_vision(checkpoint), read_hearing(checkpoint)
    return Facts(spec, tuple(classes), _stored(checkpoint, classes), predicts_further, embedding, *senses)


def reader_of(checkpoint: Checkpoint, *, headers_only: bool = False) -> WeightReader | None:
    """None where a checkpoint that others quantized has no weights here: some of its readers, if not MLX's, look into tensors."""
    quantized = quantization_of(checkpoint.config) is not None and not is_quantized_by_mlx(checkpoint)
    return None if headers_only and checkpoint.format == "hf" and quantized else open_reader(checkpoint)


def parameters(spec: ModelSpec, names: Mapping[str, str]) -> dict[str, int]:
    """How many numbers each part of a model has, norms and biases included with what they belong to. names: see `names_of`."""
    found = dict.fromkeys(CLASSES, 0)
    for name, shape in tensor_shapes(spec, names).items():
        found[class_of(name)] += math.prod(shape)
    return found


def _classes(weights: Iterable[tuple[str, int, int, str]]) -> list[TensorClass]:
    """Of (name, numbers, bytes, type), in the order of CLASSES."""
    rows: dict[str, list[tuple[int, int, str]]] = {name: [] for name in CLASSES}
    for name, numbers, num_bytes, kind in weights:
        rows[class_of(name)].append((numbers, num_bytes, kind))
    found = []
    for name, entries in rows.items():
        types: Counter[str] = Counter()
        for numbers, _, kind in entries:
            types[kind] += numbers
        if entries:
            by_size = dict(types.most_common())
            found.append(TensorClass(name, len(entries), sum(e[0] for e in entries), sum(e[1] for e in entries), by_size))
    return found


def _type(reader: WeightReader, checkpoint: Checkpoint, name: str) -> str:
    form = reader.format(name)
    if form is None:
        return reader.stored_as(name) or checkpoint.info(name).dtype_name
    return form.name.upper() if checkpoint.format == "gguf" else form.name


def _stored(checkpoint: Checkpoint, classes: list[TensorClass]) -> str:
    settings = quantization_of(checkpoint.config)
    if checkpoint.format == "hf" and isinstance(settings, Mapping):
        return str(settings.get("quant_method") or "quantized")[:40]
    totals: Counter[str] = Counter()
    for each in classes:
        totals.update(each.types)
    return max(totals, key=lambda kind: totals[kind], default="")


def rope_words(spec: ModelSpec) -> str:
    """How positions are told, in a few words: each way that some layers have."""
    ropes = dict.fromkeys(_in_words(attention.rope) for attention in spec.attentions if attention.rope is not None)
    return "; ".join(ropes) or ("none, positions are learned" if spec.entry is not None and spec.entry.positions else "none")


def _in_words(rope: RopeSpec) -> str:
    words = f"theta {rope.theta:,.0f}"
    if rope.scaling != "none":
        words += f", {rope.scaling}"
        words += f" x{rope.factor:g} from {rope.original_len:,}" if rope.factor != 1.0 else ""
    return words


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says about sampling, in its own names."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens",
             "no_repeat_ngram_size", "length_penalty", "do_sample")  # fmt: skip
    found = {name: config[name] for name in names if isinstance(config.get(name), int | float)}
    return {name: shortest(value) if isinstance(value, float) else value for name, value in found.items()}
