"""Where two models, or two ways to compute one, part: the first layer, the first token, and the tokenizer.

Both sides read the same tokens. What is compared is the residual stream before every layer, the rows after the last norm, the
logits, and the most likely next token. A side is a checkpoint in some dtype, computed by this engine; or by transformers, layer
by layer as well.

    relative error of a token at a layer      |a - b| / |b|, lengths of vectors
    near tie                                  b's logits of the two choices lie within `tolerance` of the logits' spread

Not covered: which side is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm_cli.config import DTypeName
from nanovllm_cli.errors import UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.logits import ON_CPU, MeasuredModel
from nanovllm_cli.quantization.verify_text import loaded_by_transformers
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader

# Of bf16, with errors that add up over some dozens of layers; and of float32.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-3}


class Trace(NamedTuple):
    """streams: [T, hidden] float32 before each layer, and after the last norm. logits: [T, V]; without a head [T, 0]."""

    streams: list[torch.Tensor]
    logits: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """name: "embedding", "layer 3" (behind it), "layer 27, norm" (behind the last one and its norm), "head" (its logits). mean,
    worst: relative errors of tokens. first_token: whose error is above the tolerance."""

    name: str
    mean: float
    worst: float
    worst_token: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class TopDifference:
    """The first token after which the two choose otherwise, by more than a near tie. a, b: token ids."""

    token: int
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Difference:
    """tokens: compared. same_top: share of tokens with the same most likely next token, None without a head. tokenizer: what
    differs, a line each."""

    tokens: int
    tolerance: float
    layers: list[LayerDifference]
    top: TopDifference | None
    same_top: float | None
    tokenizer: list[str]

    @property
    def first_layer(self) -> LayerDifference | None:
        return next((layer for layer in self.layers if layer.first_token is not None), None)

    @property
    def equal(self) -> bool:
        return self.first_layer is None and self.top is None and not self.tokenizer

    @property
    def same_bits(self) -> bool:
        """Whether no number differs, in no layer."""
        return all(layer.worst == 0 for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal, "same_bits": self.same_bits} | asdict(self)


def trace(path: Path, ids: Sequence[int], dtype: DTypeName, progress: LoadProgress) -> Trace:
    """By this engine. Raises what loading raises; UsageError for token ids that the model doesn't have."""
    with open_checkpoint(path) as checkpoint:
        model = MeasuredModel(checkpoint, len(ids), replace(ON_CPU, dtype=dtype), progress=progress)
        spec = model.model.spec
        _check_ids(ids, spec.vocab_size)
        streams = model.streams(ids)
        logits = model.logits(streams[-1].to(model.dtype)) if spec.has_head else torch.empty(len(ids), 0)
        return Trace(streams, logits, model.dtype)


def context_of(path: Path) -> int:
    """Most tokens of a text, by the model's own limit."""
    with open_checkpoint(path) as checkpoint:
        return read_spec(checkpoint, open_reader(checkpoint)).max_position


def trace_transformers(path: Path, ids: Sequence[int]) -> Trace:
    """By transformers, in float32 on the CPU. Raises what `loaded_by_transformers` raises."""

    def load(library: Any, folder: Path) -> Any:
        library.utils.logging.disable_progress_bar()  # what stderr shows is decided by who calls this
        library.utils.logging.set_verbosity_error()  # a head that is left aside is none
        with open_checkpoint(folder) as checkpoint:
            has_head = read_spec(checkpoint, open_reader(checkpoint)).has_head
        kind = library.AutoModelForCausalLM if has_head else library.AutoModel
        return kind.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True, use_safetensors=True
        )

    model = loaded_by_transformers(path, "", load)
    _check_ids(ids, model.config.vocab_size)
    with torch.inference_mode():
        out = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    logits = out.logits[0].float() if "logits" in out else torch.empty(len(ids), 0)
    return Trace([stream[0].float() for stream in out.hidden_states], logits, torch.float32)


def compare(a: Trace, b: Trace, tokenizer: list[str], tolerance: float | None = None) -> Difference:
    """tolerance: None for what the dtypes allow. UsageError for models of different shapes."""
    shapes = [[tuple(stream.shape) for stream in side.streams] + [tuple(side.logits.shape)] for side in (a, b)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"the two can't be compared layer by layer: {len(shapes[0]) - 2} layers of {shapes[0][0][1]} with {shapes[0][-1][1]} "
            f"tokens, and {len(shapes[1]) - 2} layers of {shapes[1][0][1]} with {shapes[1][-1][1]}",
            "name two forms of one model",
        )
    limit = max(TOLERANCES[a.dtype], TOLERANCES[b.dtype]) if tolerance is None else tolerance
    last = len(a.streams) - 1
    names = ["embedding", *(f"layer {i}" for i in range(last - 1)), f"layer {last - 1}, norm", "head"]
    draws = a.logits.shape[1] > 0
    sides = zip(names, [*a.streams, a.logits], [*b.streams, b.logits], strict=True)
    layers = [_layer_difference(name, ours, theirs, limit) for name, ours, theirs in sides if draws or name != "head"]
    top = _top_difference(a.logits, b.logits, limit) if draws else None
    same = float((a.logits.argmax(-1) == b.logits.argmax(-1)).double().mean()) if draws else None
    return Difference(len(a.logits), limit, layers, top, same, tokenizer)


def _layer_difference(name: str, a: torch.Tensor, b: torch.Tensor, limit: float) -> LayerDifference:
    lengths = b.double().norm(dim=-1).clamp_min(1e-30)
    errors = (a.double() - b.double()).norm(dim=-1) / lengths
    errors = errors.nan_to_num(nan=float("inf"))
    above = (errors > limit).nonzero()
    worst = int(errors.argmax())
    first = int(above[0]) if len(above) else None
    return LayerDifference(name, float(errors.mean()), float(errors[worst]), worst, first)


def _top_difference(a: torch.Tensor, b: torch.Tensor, limit: float) -> TopDifference | None:
    tops = a.argmax(-1), b.argmax(-1)
    rows = torch.arange(b.shape[0])
    gap = (b[rows, tops[1]] - b[rows, tops[0]]) / b.std(-1)
    apart = ((tops[0] != tops[1]) & ~(gap <= limit)).nonzero()
    if not len(apart):
        return None
    token = int(apart[0])
    return TopDifference(token, int(tops[0][token]), int(tops[1][token]))


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if max(ids) >= vocab_size:
        raise UsageError(
            f"the text has token {max(ids)}, and one of the models has {vocab_size} tokens",
            "name two forms of one model",
        )
