"""What becomes of each weight of a model, before anything is computed: formats, sizes, bits a weight.

Names are those of the output: Hugging Face's for the formats that go into a folder, GGUF's for block types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nanovllm_cli.digest_spec import SharedSpec
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec, PairSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.quant.format import Blocks, Format
from nanovllm_cli.quant.format_names import FORMAT_NAMES, parse_format, unknown_format
from nanovllm_cli.quantization.compressed_tensors import check_writable
from nanovllm_cli.quantization.mixes import MIXES, type_of
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec
from nanovllm_cli.weights.convert_delta import has_own_order
from nanovllm_cli.weights.convert_names import gguf_family_of
from nanovllm_cli.weights.convert_stacked import stack_name
from nanovllm_cli.weights.convert_tensors import quantized_already
from nanovllm_cli.weights.quantized import takes_apart
from nanovllm_cli.weights.stacked import holds_several, stack_of, unstacked
from nanovllm_cli.weights.tensor_names import checkpoint_name, family_of, names_of
from nanovllm_cli.weights.weight_reader import refuse_factors

KEEP = "keep"
ATTENTION = ("attention_gate", "q", "k", "v", "v_before", "qkv", "o")
CONV = ("conv_in", "conv_out")
DELTA = ("delta_qkv", "delta_q", "delta_k", "delta_v", "delta_z", "delta_out")
MAMBA = ("mamba_in", "mamba_out")
LATENT = ("q_a", "q_b", "kv_a")
SCAN = ("scan_in", "scan_out")
WKV = ("time_r", "time_k", "time_v", "time_out")
LOOKS = ("cross_q", "cross_k", "cross_v", "cross_o")
MIXERS = (*ATTENTION, *CONV, *DELTA, *MAMBA, *SCAN, *WKV, *LATENT, *LOOKS)
"""Matrices of a block's mixer. Models have q, k and v or qkv."""
Kind = Literal["hf", "gguf"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user asks for. to: a format, or a mix of GGUF's types. tensor_types: (regular expression, format or "keep"), the
    first that is found in a weight's name counts. head, embedding: a format or "keep"; None for what is usual, which is to keep
    them in a folder, and Q6_K or the mix's own type in GGUF. requantize: whether weights may be quantized already."""

    to: str
    tensor_types: tuple[tuple[str, str], ...] = ()
    head: str | None = None
    embedding: str | None = None
    requantize: bool = False

    @property
    def kind(self) -> Kind:
        """Raises UsageError where `to` means nothing."""
        if self.to.lower() in MIXES:
            return "gguf"
        if self.to.lower().split(":")[0] not in FORMAT_NAMES:
            raise unknown_format(self.to, tuple(dict.fromkeys((*FORMAT_NAMES, *MIXES))))
        return "hf"


class Weight(NamedTuple):
    """A matrix of the model. ours: its slot's name, "blocks.3.q.weight". source, output: what files call it; experts share a
    tensor of a GGUF file. stored_bytes: in the source. dealt: its columns lie in the output as this deals them out
    (`columns_in_turn`): no block of them can be moved."""

    ours: str
    source: str
    output: str
    shape: tuple[int, int]
    stored_bytes: int
    dealt: DeltaSpec | None = None

    @property
    def unit(self) -> str:
        """What it is quantized with: "blocks.3", "blocks.3.experts.7", "embedding", "head"."""
        return self.ours.rpartition(".")[0].rpartition(".")[0] or self.ours.split(".")[0]


class Planned(NamedTuple):
    """A weight and what it becomes; None: it stays as it is. fixed: a --tensor-type says so."""

    weight: Weight
    format: Format | None
    fixed: bool = False

    @property
    def num_bytes(self) -> int:
        rows, width = self.weight.shape
        return self.weight.stored_bytes if self.format is None else math.ceil(rows * self.format.row_bytes(width))


class Row(NamedTuple):
    """A line of the closing table: the weights in one format. before, after: bytes."""

    format: str
    weights: int
    numbers: int
    before: int
    after: int

    @property
    def bits(self) -> float:
        return 8 * self.after / self.numbers


@dataclass(frozen=True, slots=True)
class Plan:
    """items: every matrix, in the model's order. other_bytes: norms, biases and what else is copied. notes: what a user should
    hear."""

    kind: Kind
    to: str
    items: tuple[Planned, ...]
    other_bytes: int
    notes: tuple[str, ...] = ()

    def units(self) -> dict[str, list[Planned]]:
        """What is quantized, in order: the unit's name and its weights that change."""
        return _grouped((item for item in self.items if item.format is not None), lambda item: item.weight.unit)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(item.weight.shape) for item in self.items)

    @property
    def bytes_before(self) -> int:
        own = {item.weight.source: item.weight.stored_bytes for item in self.items}  # a tied head is there once
        return sum(own.values()) + self.other_bytes

    @property
    def bytes_after(self) -> int:
        return sum(item.num_bytes for item in self.items) + self.other_bytes

    @property
    def bits_a_weight(self) -> float:
        """Over all matrices."""
        return 8 * sum(item.num_bytes for item in self.items) / self.num_weights

    def rows(self) -> list[Row]:
        """The weights by what they become."""
        found = _grouped(self.items, lambda item: "as they are" if item.format is None else item.format.name)
        return [
            Row(
                name,
                len(items),
                sum(math.prod(item.weight.shape) for item in items),
                sum(item.weight.stored_bytes for item in items),
                sum(item.num_bytes for item in items),
            )
            for name, items in found.items()
        ]

    def by_output(self) -> dict[str, list[Planned]]:
        """What becomes of each tensor of the output, in the order in which it is written there."""
        return _grouped(self.items, lambda item: item.weight.output)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": self.to,
            "kind": self.kind,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_a_weight": round(self.bits_a_weight, 4),
            "weights": {name: _as_json(items) for name, items in self.by_output().items()},
            "notes": list(self.notes),
        }


def _grouped(items: Iterable[Planned], key: Callable[[Planned], str]) -> dict[str, list[Planned]]:
    found: dict[str, list[Planned]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _as_json(items: list[Planned]) -> dict[str, Any]:
    """Of those that become one tensor."""
    (rows, width), form = items[0].weight.shape, items[0].format
    return {
        "shape": [len(items), rows, width] if len(items) > 1 else [rows, width],
        "format": None if form is None else form.name,
        "bytes": sum(item.num_bytes for item in items),
    }


def make_plan(original: Original, choices: Choices) -> Plan:
    """UsageError for choices that mean nothing here, UnsupportedError for formats that a weight or the output can't have."""
    kind, reader = choices.kind, original.reader
    if kind == "hf" and original.checkpoint.format != "hf":
        raise UnsupportedError(
            f"{original.name} is a GGUF file, and {choices.to} goes into a Hugging Face folder",
            "make a folder of it first: nanovllm convert MODEL --to hf",
        )
    if kind == "gguf" and original.checkpoint.format != "gguf":
        gguf_family_of(family_of(original.checkpoint), original.spec)
    elif kind == "hf" and (holds_several(original.checkpoint) or takes_apart(reader)):
        raise UnsupportedError(
            f"{original.name} holds several matrices in one tensor, and such a folder is not written yet",
            "run it with --quant instead",
        )
    patterns = [(_compiled(pattern), _format(form, kind)) for pattern, form in choices.tensor_types]
    used = set()
    notes: list[str] = []
    items = []
    for weight in _weights(original, kind, choices):
        found = next((i for i, (pattern, _) in enumerate(patterns) if pattern.search(weight.output)), None)
        form = _usual(weight, original.spec, choices, kind, notes) if found is None else patterns[found][1]
        used.add(found)
        if form is not None:
            form.check_width(weight.shape[1])
        items.append(Planned(weight, form, found is not None))
    for i, (pattern, _) in enumerate(patterns):
        if i not in used:
            names = ", ".join(item.weight.output for item in items if item.weight.unit in ("blocks.0", "embedding"))
            raise UsageError(
                f"--tensor-type {pattern.pattern!r}: no weight is left that it fits", f"weights are called {names}"
            )
    if all(item.format is None for item in items):
        if patterns or not notes:
            raise UsageError("nothing would be quantized", "leave out the --tensor-type that keeps everything")
        raise UsageError(f"nothing would be quantized: {notes[0]}", "leave the model as it is, or take another format")
    before = {stored for item in items if item.format is not None and (stored := reader.stored_as(item.weight.source))}
    if before:
        notes.append(f"weights were {', '.join(sorted(before))} already; what that lost is in none of the figures here")
    if kind == "hf":
        _check_kept(items, original)
        notes += _split_weights(items)
    planned = {item.weight.source for item in items}
    others = sum(reader.num_bytes(name) for name in reader.names() if name not in planned)
    return Plan(kind, choices.to, tuple(items), others, tuple(dict.fromkeys(notes)))


def _check_kept(items: list[Planned], original: Original) -> None:
    """UnsupportedError for weights of a quantized original that would stay in its own format: config.json could not say so."""
    for weight, form, _ in items:
        stored = original.reader.stored_as(weight.source)
        if form is None and stored is not None:
            raise UnsupportedError(
                f"{weight.output} is {stored} in {original.name}, and can't stay so in a folder of another format",
                "name a format for it: --head, or --tensor-type REGEX=FORMAT",
            )


def _split_weights(items: list[Planned]) -> list[str]:
    """A line where weights differ that vLLM keeps as one."""
    formats = {item.weight.ours: item.format for item in items}
    units = {item.weight.unit for item in items if item.weight.unit.startswith("blocks.")}
    return [
        f"vLLM keeps {', '.join(parts)} of a layer as one weight, and won't load them in several formats"
        for parts in (("q", "k", "v"), ("gate", "up"))
        if any(len({formats[name] for part in parts if (name := f"{unit}.{part}.weight") in formats}) > 1 for unit in units)
    ]


def _weights(original: Original, kind: Kind, choices: Choices) -> Iterator[Weight]:
    """All matrices that the model multiplies with or looks up, in its order. A tied head counts where it is to differ."""
    checkpoint, reader, spec = original.checkpoint, original.reader, original.spec
    there = names_of(checkpoint)
    if choices.requantize:
        refuse_factors(checkpoint)
    called = _names_in_output(original, kind)
    more = ("per_layer_gate", "per_layer_out") if spec.per_layer_width else ()
    halves = [("", spec.blocks), *([] if spec.encoder is None else [("encoder.", spec.encoder.blocks)])]
    names = [f"{half}blocks.{i}.{part}.weight" for half, blocks in halves for i, block in enumerate(blocks)
             for part in (*_parts(block, kind), *more)]  # fmt: skip
    outer = ["embedding.weight", *(["per_layer_embedding.weight"] if spec.num_by_token and kind == "gguf" else [])]
    for ours in (*outer, *names, "head.weight"):
        source = checkpoint_name(ours, there)
        if ours == "head.weight" and spec.tied_head:
            if choices.head in (None, KEEP):
                continue
            if not spec.has_head:
                raise UsageError(f"--head has no meaning: {original.name} is an embedding model, which has none", "leave it out")
            source = checkpoint_name("embedding.weight", there)
        if source not in reader.names():
            raise CheckpointError(f"{checkpoint.path}: tensor {source!r} is missing", "get the model again")
        shape = reader.shape(source)
        if len(shape) != 2:
            raise CheckpointError(f"{checkpoint.path}: tensor {source!r} is not a matrix: its shape is {list(shape)}")
        stored = reader.stored_as(source)
        if stored is not None and not choices.requantize:
            raise quantized_already(original.name, source, stored)
        dealt = _dealt(ours, original) if kind != checkpoint.format else None
        yield Weight(ours, source, called(ours), (shape[0], shape[1]), reader.num_bytes(source), dealt)


def _dealt(ours: str, original: Original) -> DeltaSpec | None:
    if not ours.endswith(".delta_out.weight"):
        return None
    mixer, family = original.spec.blocks[int(ours.split(".")[1])].mixer, family_of(original.checkpoint)
    return mixer if isinstance(mixer, DeltaSpec) and has_own_order(mixer, family) else None


def _names_in_output(original: Original, kind: Kind) -> Callable[[str], str]:
    """Our name of a weight -> the tensor of the output that it goes into, in GGUF with the other experts of its layer."""
    checkpoint = original.checkpoint
    there = names_of(checkpoint)
    if kind == "hf":
        return lambda ours: checkpoint_name(ours, there)
    if checkpoint.format == "gguf":
        parts = unstacked(checkpoint)
        return lambda ours: stack_of(parts, checkpoint_name(ours, there))
    family = gguf_family_of(family_of(checkpoint), original.spec)
    names = family.names("gguf")
    return lambda ours: stack_name(checkpoint_name(ours, names), family)


def _parts(block: BlockSpec, kind: Kind) -> Iterator[str]:
    """The linear layers of a block. What is small, and much depends on, stays as it is: routers, a convolution's taps, what
    decides how much of a state is kept, and what is taken apart by head (loader.PLAIN); in a folder a shared expert and what
    makes fewer numbers for experts do, too."""
    mlp = block.mlp.expert if isinstance(block.mlp, MoESpec) else block.mlp
    mixer: tuple[str, ...]
    read = block.mixer.attention if isinstance(block.mixer, PairSpec) else block.mixer
    match read:
        case None:
            mixer = () if block.looks is None else LOOKS
        case ConvSpec():
            mixer = CONV
        case ScanSpec():
            mixer = SCAN
        case WkvSpec():
            mixer = WKV
        case DeltaSpec():
            lacking = {"delta_qkv"} if read.apart else {"delta_q", "delta_k", "delta_v"}
            lacking |= {"delta_z"} if read.channel_rank else set()
            mixer = MAMBA if read.mamba else tuple(part for part in DELTA if part not in lacking)
        case AttentionSpec(latent=LatentSpec() as latent):
            mixer = (*(("q",) if latent.query_rank is None else ("q_a", "q_b")), "kv_a", "o")
            mixer = ("attention_gate", *mixer) if read.gated and not read.gates_in_queries else mixer
        case AttentionSpec(shared=SharedSpec()):
            mixer = ("q_a", "q_b", "k", "o")
        case _:
            only_keys = read.keys_are_values or read.values is not None
            kept = () if read.reads is not None else ("k",) if only_keys else ("k", "v")
            mixer = ("qkv", "o") if read.fused_qkv else ("q", *kept, "o")
            mixer = ("attention_gate", *mixer) if read.gate_apart else mixer
            mixer = mixer if read.convolved is None else ("q", "k", "v_before", "v", "o")
    if isinstance(block.mixer, PairSpec):
        if (ahead := block.mixer.ahead) is not None:
            mixer = (*mixer, "gate_up", "down", "ahead_out") if ahead.uses else ("ahead_out",)
        mixer = (*mixer, *MAMBA)
    mixer = (*mixer, *LOOKS) if block.cross is not None else mixer
    present = (*mixer, *(() if mlp is None else (*mlp.parts, "down")))
    yield from (part for part in present if part in MIXERS or mlp is block.mlp)
    if isinstance(read, AttentionSpec) and read.values is not None:
        yield from (f"values.experts.{e}.up" for e in range(read.values.num_experts))
    if isinstance(block.mlp, MoESpec):
        if kind == "gguf" and block.mlp.latent_size is not None:
            yield from ("latent_in", "latent_out")
        if kind == "gguf" and block.mlp.shared is not None:
            yield from (f"shared.{part}" for part in present if part not in MIXERS)
        yield from (f"experts.{e}.{part}" for e in range(block.mlp.num_experts) for part in present if part not in MIXERS)


def _usual(weight: Weight, spec: ModelSpec, choices: Choices, kind: Kind, notes: list[str]) -> Format | None:
    part = weight.unit
    said = {"head": choices.head, "embedding": choices.embedding}.get(part)
    if said is not None:
        form = _format(said, kind)
        if form is not None and kind == "hf" and part == "embedding":
            raise UnsupportedError(
                "nothing that loads such a folder looks up rows of a quantized embedding",
                "keep it, or write GGUF (--to q8_0, q4_k_m, …)",
            )
        return form
    if kind == "hf":
        return None if part in ("head", "embedding") else _format(choices.to, kind)
    mix = choices.to.lower()
    found = type_of(mix, weight.ours, weight.shape[1], spec)
    if found is None:
        notes.append(f"{weight.output} stays as it is: no type has rows of {weight.shape[1]}")
        return None
    wanted = type_of(mix, weight.ours, 256, spec)
    if found != wanted:
        notes.append(f"{weight.output} becomes {found}: {wanted} has no rows of {weight.shape[1]}")
    return Blocks(found)


def _format(spec: str, kind: Kind) -> Format | None:
    if spec.strip().lower() == KEEP:
        return None
    form = parse_format(spec)
    if kind == "hf":
        check_writable(form)
    elif not isinstance(form, Blocks):
        raise UsageError(f"{form.name} has no place in a GGUF file", f"its types: {', '.join(MIXES)}")
    return form


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as failure:
        raise UsageError(f"--tensor-type {pattern[:80]!r} is not a regular expression: {failure}") from failure
