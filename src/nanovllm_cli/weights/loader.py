"""From a checkpoint to a Decoder: which family, which tensor goes where, and a comparison of both as sets.

Tensors come in slices of a few megabytes and their file pages are let go at once, so that loading holds the model once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.assistant import assistant_spec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.mtp import MTP
from nanovllm_cli.models.names import HF_IGNORED, MTP_SHARED
from nanovllm_cli.models.registry import may_be_tied
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.quant.format import Format, Integer
from nanovllm_cli.quant.rows import take_rows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.convert_names import tensor_shapes
from nanovllm_cli.weights.files import some
from nanovllm_cli.weights.heads import classifies
from nanovllm_cli.weights.pooling import lacks_head, stores_head
from nanovllm_cli.weights.stacked import unstacked
from nanovllm_cli.weights.tables import STAYS, as_divided, counts_in, view_of
from nanovllm_cli.weights.tensor_names import checkpoint_name, family_of, left_aside, names_of, of_that_layer
from nanovllm_cli.weights.weight_reader import WeightReader

MISSHAPEN = "of the wrong shape"
OTHER_MODEL = "the checkpoint is incomplete, or its config belongs to another model"
# A config may describe this many times the numbers of its files, and a little more; no memory is taken for what goes further.
MAX_EXCESS, SMALL_EXCESS = 4, 1 << 24
EXPERT_EXCESS = 1 << 12  # however small an expert is, its matrices take pages of their own
MAX_SMALL = 1 << 16  # numbers that a spec is made of: a head has a thousand rotary divisors at the most
_ROWS_COMPARED = 32
GGUF_EXTRAS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


def read_spec(checkpoint: Checkpoint, reader: WeightReader) -> ModelSpec:
    """The ModelSpec of a checkpoint. UnsupportedError for an unknown architecture, CheckpointError for a broken config."""
    if family_of(checkpoint).assists:
        raise UnsupportedError(
            f"{checkpoint.path}: a model ({family_of(checkpoint).name}) that guesses for another, and does nothing by itself",
            "name the model that it is made for, and this one by --draft-model",
        )
    spec = hf_spec(checkpoint) if checkpoint.format == "hf" else _gguf_spec(checkpoint)
    check_scale(spec, checkpoint, reader)
    one_of_each = replace(spec, blocks=tuple(dict.fromkeys(spec.blocks)), passes=None)
    tensor_shapes(one_of_each, names_of(checkpoint))  # all of them have names
    return spec


def read_assistant(checkpoint: Checkpoint, reader: WeightReader, model: ModelSpec) -> ModelSpec:
    """The same of one that guesses for `model`; see `assistant_spec`."""
    family, join = family_of(checkpoint), names_of(checkpoint)["join.weight"]
    if join not in reader.names() or len(reader.shape(join)) != 2:
        raise CheckpointError(f"{checkpoint.path}: tensor {join!r} is missing or no matrix", "the file is incomplete")
    own = spec_from_hf(checkpoint.config, family) if checkpoint.format == "hf" else _gguf_spec(checkpoint)
    spec = assistant_spec(own, reader.shape(join)[1] // 2, model)
    check_scale(spec, checkpoint, reader)
    return spec


def hf_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The same of a folder, by its config, and the names of its tensors where these have no head."""
    family = family_of(checkpoint)
    spec = spec_from_hf(checkpoint.config, family)
    spec = as_divided(spec, checkpoint)
    if family.tensors is not None and checkpoint.has_numbers:
        spec = family.tensors(spec, partial(small_values, checkpoint), str(checkpoint.path))
    if spec.tied_head and spec.has_head and _has_own_head(checkpoint):
        spec = replace(spec, tied_head=False)
    if classifies(checkpoint) or (not spec.tied_head and lacks_head(checkpoint)):
        return replace(spec, tied_head=True, has_head=False)
    if spec.encoder is not None and spec.head_bias and names_of(checkpoint)["head.bias"] not in checkpoint.names():
        spec = replace(spec, head_bias=False)
    if may_be_tied(checkpoint.config) and not stores_head(checkpoint):
        return replace(spec, tied_head=True)
    return spec


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a folder whose config ties the head to the embedding has another one all the same, which then counts, as in
    transformers. Rows here and there tell."""
    names, there = names_of(checkpoint), set(checkpoint.names())
    head, embedding = names["head.weight"], names["embedding.weight"]
    if not checkpoint.has_numbers or not {head, embedding} <= there:
        return False
    infos = checkpoint.info(head), checkpoint.info(embedding)
    if infos[0].shape != infos[1].shape or any(info.dtype_name not in ("F32", "F16", "BF16") for info in infos):
        return False
    rows = infos[0].shape[0]
    for row in range(0, rows, max(1, rows // _ROWS_COMPARED)):
        one, other = (checkpoint.tensor(name, (row, row + 1)).float() for name in (head, embedding))
        if not torch.equal(one, other):
            return True
    return False


def _gguf_spec(checkpoint: Checkpoint) -> ModelSpec:
    names = set(checkpoint.names())
    embedding = names_of(checkpoint)["embedding.weight"]
    if embedding not in names or not checkpoint.info(embedding).shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {embedding!r} is missing or empty",
            "the file holds a vocabulary only, or is incomplete",
        )

    vocab_size = checkpoint.info(embedding).shape[0]
    spec = spec_from_gguf(checkpoint.config, family_of(checkpoint), vocab_size, names, partial(small_values, checkpoint))
    return replace(spec, has_head=spec.has_head and not lacks_head(checkpoint))


def small_values(checkpoint: Checkpoint, name: str) -> tuple[float, ...] | None:
    """Of a small tensor; None where there is none of this name."""
    if name not in checkpoint.names():
        return None
    if (count := math.prod(checkpoint.info(name).shape)) > MAX_SMALL:
        raise CheckpointError(f"{checkpoint.path}: tensor {name!r} holds {count} numbers, of at most {MAX_SMALL}", OTHER_MODEL)
    return tuple(checkpoint.tensor(name).flatten().tolist())


def check_scale(spec: ModelSpec, checkpoint: Checkpoint, reader: WeightReader) -> None:
    """Refuses a config of a far larger model than there are weights for, before it is built. What is missing is told later."""
    wanted = spec.vocab_size * spec.hidden_size + spec.num_by_token
    if spec.entry is not None:
        wanted += (spec.entry.positions + spec.entry.segments) * spec.hidden_size
    wanted += 3 * spec.num_layers * spec.hidden_size * spec.per_layer_width
    for block in (*spec.blocks, *(() if spec.encoder is None else spec.encoder.blocks)):
        wanted += block.num_weights(spec.hidden_size)
        if isinstance(block.mlp, MoESpec):
            wanted += block.mlp.num_experts * EXPERT_EXCESS
    there = sum(math.prod(reader.shape(name)) for name in reader.names())
    if wanted > MAX_EXCESS * there + SMALL_EXCESS:
        raise CheckpointError(
            f"{checkpoint.path}: the config describes a model of {wanted:.2g} parameters, the tensors have {there:.2g}",
            OTHER_MODEL,
        )


DenseBytes = Callable[[int, int, torch.dtype], int]
"""What a matrix of so many rows and columns takes in a compute type: `Platform.dense_bytes`."""


_BY_HEAD = ("kv_b", "k_b.{e}", "v_b.{e}", "o_a")
"""Weights that are taken apart by head, or by groups of them: whatever they are stored in, they are kept in the compute type
(layers/latent.py, layers/shared_key.py)."""


_IN_LAYERS = (*_BY_HEAD, "router", "seen.router", "shared.gate_row", "delta_b", "delta_a", "delta_f_a", "delta_f_b", "delta_f",
              "delta_g_a", "delta_g_b", "scan_x", "scan_dt", "altup_router", "laurel_left", "laurel_right",
              "router_table", *(f"{kind}_{part}" for kind in ("digest", "index") for part in ("k", "gate", "bias")),
              *(f"{half}_connection{part}" for half in ("attention", "mlp") for part in ("", ".down", ".up", ".inject")),
              "attention_norm.gate_in", "attention_norm.gate_out", "mlp_norm.gate_in",
              "mlp_norm.gate_out", *(f"time_{part}{i}" for part in "wavg" for i in (1, 2)))  # fmt: skip
_OUTSIDE = ("positions.weight", "encoder.positions.weight", "altup_in.{e}.weight", "altup_out.{e}.weight",
            *(f"last_connection{part}.weight" for part in ("", ".down", ".up")))  # fmt: skip
PLAIN = (*(f"blocks.{{i}}.{name}.weight" for name in _IN_LAYERS), *_OUTSIDE)
"""Weights that decide what becomes of others, those that are taken apart by head, and what llama.cpp leaves alone as well."""


OUTER = ("embedding", "head", "per_layer_embedding", "per_layer_projection")
"""Weights that all layers share."""


def is_by_head(ours: str) -> bool:
    """Whether our name is that of a weight which is taken apart by head, and kept in the compute type."""
    parts = ours.split(".")
    return parts[0] == "blocks" and parts[2] in {name.removesuffix(".{e}") for name in _BY_HEAD}


class WeightFormats:
    """Which format each matrix of a model is kept in: as it is stored, or, for plain weights, as `wanted`.

    Below eight bits, what is in OUTER gets int8: it is a small part of most models, and much depends on it. So it does on what is
    in PLAIN, which is smaller still: it stays as it is. table: of our names, where it is not the model's own.
    """

    def __init__(
        self, checkpoint: Checkpoint, reader: WeightReader, wanted: Format | None, table: dict[str, str] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._names = names_of(checkpoint) if table is None else table
        self._plain, self._by_head = self._any_of(PLAIN), self._any_of([name for name in PLAIN if is_by_head(name)])
        self._tables = self._any_of([STAYS])
        self._wanted = wanted
        self._outer = {self._names.get(f"{name}.weight") for name in OUTER}
        self._outer_wanted = Integer(8) if wanted is not None and wanted.row_bytes(1 << 10) < 1 << 10 else wanted

    def _any_of(self, ours: Collection[str]) -> re.Pattern[str]:
        """The file's names of these, in any layer, of any expert or head."""
        theirs = [re.escape(self._names.get(name, "")) for name in ours]
        return re.compile(re.sub(r"\\\{[ie]\\\}", r"\\d+", "|".join(theirs)))

    def of(self, ours: str) -> Format | None:
        """By our name; None for the compute type. UsageError where stored and wanted contradict each other."""
        return self._of(checkpoint_name(ours, self._names))

    def _of(self, name: str) -> Format | None:
        stored = self._reader.format(name) if name in self._reader.names() else None
        if stored is not None and self._wanted is not None:
            raise UsageError(
                f"{self._checkpoint.path}: its weights are {stored.name} already",
                "leave --quant out (--draft-quant of a draft), or take the original",
            )
        if stored is not None or self._plain.fullmatch(name):
            return stored
        return self._outer_wanted if name in self._outer else self._wanted

    def num_bytes(self, dtype: torch.dtype, dense_bytes: DenseBytes, names: Collection[str] | None = None) -> int:
        """What the weights will take, those without a format in dtype; tables that stay in their files take nothing. names: some
        of the file's, if not all of the model."""
        total = 0.0
        for name in self._reader.names() - left_aside(self._checkpoint, self._reader.names()) if names is None else names:
            if self._tables.fullmatch(name):
                continue
            shape = self._reader.shape(name)
            if len(shape) != 2 or self._by_head.fullmatch(name):
                total += math.prod(shape) * dtype.itemsize
            elif (form := self._of(name)) is None:
                total += dense_bytes(shape[0], shape[1], dtype)
            else:
                total += shape[0] * form.row_bytes(shape[1])
        return int(total)


def load_weights(
    model: Decoder, checkpoint: Checkpoint, reader: WeightReader, progress: LoadProgress | None = None
) -> None:
    """Fill every slot of the model. CheckpointError names missing, extra and misshapen tensors, and those with NaN."""
    progress = progress or NullProgress()
    slots = model.slots()
    table = names_of(checkpoint)
    names = {ours: checkpoint_name(ours, table) for ours in slots}
    ignored = {table["head.weight"]} if model.spec.tied_head else set()
    _compare(checkpoint, reader, {names[ours]: slot.shape for ours, slot in slots.items()}, model.spec, ignored)
    fill({ours: slot for ours, slot in slots.items() if not (slot.stays or slot.counts)}, names, reader, progress)
    whole = unstacked(checkpoint)
    for ours, slot in slots.items():
        if slot.stays:
            slot.load(view_of(whole, names[ours]), 0)
        elif slot.counts:
            slot.load(counts_in(whole, names[ours]), 0)


def load_mtp(model: MTP, checkpoint: Checkpoint, reader: WeightReader, table: dict[str, str], progress: LoadProgress) -> None:
    """Fill every slot of the layer that `table` (`mtp_names_of`) has the names of; errors as above."""
    slots = model.slots()
    names = {ours: checkpoint_name(ours, table) for ours in slots}
    wanted = {names[ours]: slot.shape for ours, slot in slots.items()}
    there = {name: reader.shape(name) for name in of_that_layer(table, reader.names()) | (wanted.keys() & reader.names())}
    shared = {name for name in there if MTP_SHARED.fullmatch(name)}
    check_tensors(checkpoint.path, model.spec, wanted, there, shared, misshapen=MISSHAPEN)
    fill(slots, names, reader, progress)
    if not model.head_rows:
        return
    for rows, first in reader.slices(head_name(table, model.spec)):
        if first >= model.head_rows:
            break
        model.head.weight.load_rows(first, take_rows(rows, slice(model.head_rows - first)))


def head_name(table: Mapping[str, str], spec: ModelSpec) -> str:
    """The checkpoint's tensor that a model's head is."""
    return table["embedding.weight" if spec.tied_head else "head.weight"]


def fill(slots: Slots, names: Mapping[str, str], reader: WeightReader, progress: LoadProgress) -> None:
    """With the tensors of these names, whose shapes are as they should be."""
    progress.stage("loading weights", sum(reader.num_bytes(names[ours]) for ours in slots), "B")
    try:
        for ours, slot in slots.items():
            form = reader.format(names[ours]) if slot.plain else None
            for rows, first in reader.slices(names[ours]):
                slot.load(rows if form is None or isinstance(rows, torch.Tensor) else form.dequantize(rows), first)
            progress.advance(reader.num_bytes(names[ours]))
    finally:
        progress.done()


def _compare(
    checkpoint: Checkpoint, reader: WeightReader, wanted: dict[str, tuple[int, ...]], spec: ModelSpec, ignored: set[str]
) -> None:
    there = {name: reader.shape(name) for name in reader.names()}
    ignored = ignored | left_aside(checkpoint, there)
    biases = {name for name in there.keys() - wanted.keys() if name.endswith(".bias") and not name.endswith(HF_IGNORED)}
    ignored |= {name for name in biases if _is_zero(reader, name)}
    check_tensors(checkpoint.path, spec, wanted, there, ignored, misshapen=MISSHAPEN)


def check_tensors(
    path: Path,
    spec: ModelSpec,
    wanted: Mapping[str, tuple[int, ...]],
    there: Mapping[str, tuple[int, ...]],
    ignored: Collection[str],
    *,
    misshapen: str,
) -> None:
    """Names and shapes of a checkpoint against those of its model, all differences at once, as a CheckpointError. `ignored`: may
    be there, beside what no model needs; `misshapen`: the word for those of other shapes."""
    extra = {name for name in there.keys() - wanted.keys() if not (name in GGUF_EXTRAS or name.endswith(HF_IGNORED))}
    other = [name for name in sorted(there.keys() & wanted.keys()) if there[name] != wanted[name]]
    problems = [
        ("missing", sorted(wanted.keys() - there.keys())),
        ("not part of the model", sorted(extra.difference(ignored))),
        (misshapen, [f"{name} (expected {list(wanted[name])}, found {list(there[name])})" for name in other]),
    ]
    lines = [f"{len(names)} {what}: {some(names)}" for what, names in problems if names]
    if lines:
        raise CheckpointError(f"{path}: tensors don't match a {spec.architecture} model: {'; '.join(lines)}", OTHER_MODEL)


def _is_zero(reader: WeightReader, name: str) -> bool:
    """Some quantizers give every layer a bias, which adds nothing where the model has none."""
    return all(isinstance(rows, torch.Tensor) and not rows.any() for rows, _ in reader.slices(name))
