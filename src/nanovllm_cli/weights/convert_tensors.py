"""Tensors on their way from one checkpoint to another: in which type each arrives, and its slices, one after the other.

A slice is a few MiB, so that a conversion holds no tensor whole but the reader's mapped pages, which are let go.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bert import GGUF_ENTRY
from nanovllm_cli.models.gemma4 import PER_LAYER_GGUF_NAMES
from nanovllm_cli.quant.gguf_encode import encode
from nanovllm_cli.quant.gguf_types import FILE_TYPES, TENSOR_TYPES
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo
from nanovllm_cli.weights.gguf_writer import GGUFTensor
from nanovllm_cli.weights.safetensors import DTYPES
from nanovllm_cli.weights.stacked import stack_of
from nanovllm_cli.weights.tables import COUNTS
from nanovllm_cli.weights.weight_reader import SLICE_BYTES
from nanovllm_cli.weights.writer import TensorOut

PLAIN_TYPES = ("f32", "f16", "bf16")
BLOCK_TYPES = (
    "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "q3_k", "q2_k", "q2_0", "q1_0", "tq2_0", "tq1_0",
    "mxfp4",
)  # fmt: skip
"""What can be written, under llama.cpp's names for --outtype."""

# Where rows do not divide into blocks of 64 to 256: as llama.cpp's quantizer does, a type with blocks of 32; for Q1_0, which it
# has none for, the smallest.
NARROW = {
    "Q1_0": "Q4_0", "Q2_0": "Q4_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0",
    "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip

_FILE_TYPES = {
    "F32": "ALL_F32", "Q2_K": "MOSTLY_Q2_K", "Q3_K": "MOSTLY_Q3_K_S", "Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S",
    "MXFP4": "MOSTLY_MXFP4_MOE",
}  # fmt: skip

_TERNARY = ("tq1_0", "tq2_0")
_VOCABULARY = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
_BESIDE = (".altup_router.weight", ".laurel_l.weight", ".laurel_r.weight")

_IN_FLOAT32 = (
    "_norm.weight", ".shortconv.conv.weight", ".ssm_conv1d.weight", ".ssm_conv1d_q.weight", ".ssm_conv1d_k.weight",
    ".ssm_conv1d_v.weight", ".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_ba.weight",
    ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".bias", ".ssm_a", ".ssm_d", "position_embd.weight",
    "_compressor_ape.weight", "hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight",
    "token_types.weight", ".altup_correct_coef.weight", ".altup_predict_coef.weight",
    ".time_mix_w1.weight", ".time_mix_w2.weight", ".time_mix_lerp_fused.weight",
)  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16"}

Reorder = Callable[[torch.Tensor], torch.Tensor]
Negate = Callable[[torch.Tensor], torch.Tensor]


class Step(NamedTuple):
    """A tensor of the output. `source`: its name in the input, None for one that the output's format asks for (`value`).

    `before` and `after` are names of types. `reorder` takes slices of a multiple of `rows_together` rows. `added` goes to each
    number. `mirrors`: rows of a head, those of whose second half are negated; 0: none are. `skips`: first rows of the input
    that are left out. `repeats`: so often the first row comes again behind the last. `parts`: the tensor is what these give one
    after the other, of the input's tensors (a layer's experts).
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    before: str
    before_bytes: int
    after: str
    reorder: Reorder | None = None
    rows_together: int = 1
    value: torch.Tensor | None = None
    added: float = 0.0
    mirrors: int = 0
    skips: int = 0
    repeats: int = 0
    parts: tuple[Step, ...] = ()

    @classmethod
    def of(cls, info: TensorInfo, after: str, name: str | None = None) -> Step:
        """Of a tensor of the input, which gets that type and name."""
        return cls(info.name if name is None else name, info.name, info.shape, info.dtype_name, info.num_bytes, after)

    @classmethod
    def made(cls, name: str, value: torch.Tensor) -> Step:
        """Of a tensor that the input does not have, float32."""
        return cls(name, None, tuple(value.shape), "-", 0, "F32", value=value)

    @property
    def num_bytes(self) -> int:
        """Of the output."""
        return (self.gguf() if self.after in TENSOR_TYPES else self.safetensors()).num_bytes

    @property
    def copied(self) -> bool:
        return self.before == self.after and not self.added and not self.skips

    def gguf(self) -> GGUFTensor:
        return GGUFTensor(self.name, self.shape, TENSOR_TYPES[self.after])

    def safetensors(self) -> TensorOut:
        return TensorOut(self.name, self.shape, dtype_of(self.after))


def as_many_rows(step: Step, spec: ModelSpec) -> Step:
    """A table of positions begins with the first token's in GGUF files, and what layers have of tokens is there of all."""
    if spec.per_layer_rows and step.name == PER_LAYER_GGUF_NAMES["per_layer_embedding.weight"]:
        return step._replace(shape=(spec.vocab_size, *step.shape[1:]), repeats=spec.vocab_size - step.shape[0])
    if spec.entry is None or step.name != GGUF_ENTRY["positions.weight"]:
        return step
    skips = spec.entry.first_position
    return step._replace(shape=(step.shape[0] - skips, *step.shape[1:]), skips=skips)


def slices(checkpoint: Checkpoint, step: Step) -> Iterator[torch.Tensor]:
    """The tensor as it is written: in its type, or for block types as their bytes. Raises CheckpointError for values that the
    type cannot hold (NaN in blocks, numbers past float16's)."""
    if step.value is not None:
        yield step.value
        return
    if step.parts:
        for part in step.parts:
            yield from slices(checkpoint, part)
        return
    assert step.source is not None
    if step.repeats:
        yield from with_repeats(slices(checkpoint, step._replace(repeats=0)), step.repeats)
        return
    for rows in _rows(checkpoint, step):
        reordered = rows if step.reorder is None else step.reorder(rows)
        if step.mirrors:
            reordered = mirrored(reordered, step.mirrors)
        if step.added:
            reordered = reordered.float() + step.added
        as_stored = step.copied and (is_blocks(step.after) or reordered.dtype == dtype_of(step.after))
        yield reordered if as_stored else _as_type(reordered, step)  # with an adapter in it, it comes wider than it was stored
        checkpoint.release(stack_of(checkpoint, step.source))


def mirrored(rows: torch.Tensor, head_dim: int, negate: Negate = torch.neg) -> torch.Tensor:
    """Rows of whole heads, [heads * head_dim, ...], those of the second halves negated: what turns backwards turns forwards then,
    and has the same products."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return torch.stack([halves[:, 0], negate(halves[:, 1])], 1).reshape(rows.shape)


def with_repeats(slices: Iterable[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """And the first row so many times behind them."""
    first: torch.Tensor | None = None
    for rows in slices:
        first = rows[:1].clone() if first is None else first
        yield rows
    assert first is not None, "a table has rows"
    yield first.expand(count, *first.shape[1:]).contiguous()


def _rows(checkpoint: Checkpoint, step: Step) -> Iterator[torch.Tensor]:
    """Slices of the input along its rows: stored bytes where block types are copied, else numbers."""
    assert step.source is not None
    if step.copied and is_blocks(step.before):
        raw = checkpoint.raw(step.source)
        first_dims = step.shape[:-1]
        rows = raw.view(*first_dims[:1], -1) if len(first_dims) > 1 else raw
        count = _step_rows(step, rows.shape[0])
        yield from (rows[first : first + count] for first in range(0, rows.shape[0], count))
    elif len(checkpoint.info(step.source).shape) < 2:
        yield checkpoint.tensor(step.source)
    else:
        num_rows = checkpoint.info(step.source).shape[0]
        count = _step_rows(step, num_rows)
        for first in range(step.skips, num_rows, count):
            yield checkpoint.tensor(step.source, rows=(first, min(first + count, num_rows)))


def _step_rows(step: Step, num_rows: int) -> int:
    size = max(4 * math.prod(step.shape), 1)
    count = max(1, SLICE_BYTES * max(num_rows, 1) // size)
    return max(count // step.rows_together, 1) * step.rows_together


def _as_type(rows: torch.Tensor, step: Step) -> torch.Tensor:
    if step.after in COUNTS:
        return rows.to(dtype_of(step.after))
    if step.after in _FLOATS:
        converted = rows.to(dtype_of(step.after))
        if bool((converted.isinf() & ~rows.isinf()).any()):
            raise CheckpointError(f"tensor {step.source!r} has values that {step.after} cannot hold", "take a wider type")
        return converted
    values = rows.float()
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"tensor {step.source!r} has values that are NaN or infinite", "the file is damaged; get it again"
        )
    try:
        return encode(step.after, values.reshape(-1, step.shape[-1])) if values.numel() else values.to(torch.uint8)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor {step.source!r}: {error.message}", error.hint) from error


def gguf_type(name: str, shape: tuple[int, ...], before: str, outtype: str) -> str:
    """The GGUF type of a tensor, by llama.cpp's rules: vectors, norms and taps in float32, and what
    decides of states and of experts; matrices in `outtype`, embedding and
    head in float16 where that is a ternary type, and all in another type where their rows do not divide into its blocks. auto
    keeps what the input has."""
    if before in COUNTS:
        return "I32"
    if before not in _FLOATS and not is_blocks(before):
        raise UnsupportedError(
            f"tensor {name!r} holds {before}, which has no counterpart in GGUF", "take the original, unquantized model"
        )
    if len(shape) < 2 or in_float32(name):
        return "F32"
    if outtype == "auto":
        return "F32" if before == "F64" else before
    wide = outtype in _TERNARY and (name in _VOCABULARY or name.endswith(_BESIDE))
    wanted = "F16" if wide else outtype.upper()
    for kind in (wanted, NARROW.get(wanted, "F16"), "F16"):
        if shape[-1] % _block_len(kind) == 0:
            return kind
    raise AssertionError("F16 takes any width")


def in_float32(name: str) -> bool:
    """Whether a GGUF file has a tensor in float32 whatever its matrices are in. Biases of experts are, and tables of heads."""
    return name.endswith(_IN_FLOAT32)


def safetensors_type(before: str, outtype: str) -> str:
    """The type that a tensor of a folder gets: floats become `outtype`, whole numbers stay. Blocks come out as the float32
    that they stand for, which loses nothing, unless `outtype` says less. Raises as `dtype_of`."""
    kept = "F32" if is_blocks(before) else before
    dtype_of(kept)
    return kept if outtype == "auto" or kept not in _FLOATS else outtype.upper()


def dtype_of(kind: str) -> torch.dtype:
    """Of a type of a folder's. Raises UnsupportedError for those that torch has no whole bytes for."""
    dtype = DTYPES[kind][1] if kind in DTYPES else None
    if dtype is None:
        raise UnsupportedError(f"the type {kind} cannot be written", "leave the model as it is")
    return dtype


def narrowed_vectors(checkpoint: Checkpoint, names: list[str]) -> str | None:
    """The 16-bit type that all matrices of a GGUF file have, if its float32 vectors came from it: then they go back.

    llama.cpp's converter widens vectors; going back loses nothing where every value is one of the narrow type.
    """
    kept = {name for name in names if len(checkpoint.info(name).shape) < 2 or in_float32(name)}
    kinds = {checkpoint.info(name).dtype_name for name in names if name not in kept}
    if len(kinds) != 1 or not kinds <= {"F16", "BF16"}:
        return None
    kind = kinds.pop()
    for name in names:
        if name in kept and checkpoint.info(name).dtype_name == "F32":
            values = checkpoint.tensor(name)
            if not torch.equal(values.to(dtype_of(kind)).float(), values):
                return None
    return kind


def quantized_already(model: str, weight: str, kind: str) -> UsageError:
    return UsageError(
        f"{model} is quantized already: {weight} is {kind}", "take the original; --allow-requantize adds one loss to the other"
    )


def is_blocks(kind: str) -> bool:
    """Whether a type of GGUF's rounds blocks of numbers together."""
    return kind in TENSOR_TYPES and _block_len(kind) > 1


def _block_len(kind: str) -> int:
    return TENSOR_TYPES[kind].block_len


def check_outtype(outtype: str, target: str) -> None:
    """Raises UsageError for a type that cannot be written there, with those that can."""
    known = ["auto", *PLAIN_TYPES, *(BLOCK_TYPES if target == "gguf" else ())]
    if outtype in known:
        return
    if target != "gguf" and outtype in BLOCK_TYPES:
        raise UsageError(f"{outtype} is a type of GGUF files", "add --to gguf, or take one of " + ", ".join(known))
    near = difflib.get_close_matches(outtype, known, n=1)
    raise UsageError(
        f"{outtype!r} is no type that can be written",
        f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}",
    )


def main_type(steps: list[Step]) -> str:
    sizes: Counter[str] = Counter()
    for step in steps:
        sizes[step.after] += step.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "F32"


def file_type(kind: str) -> int:
    """general.file_type of a file most of which has this type."""
    return FILE_TYPES.get(_FILE_TYPES.get(kind, f"MOSTLY_{kind}"), FILE_TYPES["GUESSED"])
