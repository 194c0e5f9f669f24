"""Weights as GPTQ and AWQ tools store them: integers in int32 words, inputs first.

    GPTQ         qweight [K * bits / 32, N]: down a column the codes of all inputs, from the lowest bit on and across words
                 qzeros [G, N * bits / 32], likewise along the row; scales [G, N]; g_idx [K], the group of each input
                 "gptq", the first version, stores zero points less one, "gptq_v2" as they are
    AWQ, gemm    qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]: of eight neighbouring outputs in a word, nibbles hold
                 0, 2, 4, 6, 1, 3, 5, 7 in turn. As AMD's Quark writes it ("pack_method") perhaps one behind the other, without
                 zero points codes are two's complement, and some versions call tensors qscales and qqzeros

AutoRound stores either, and GPTQ's zero points both ways ("packing_format"). Sources: gptqmodel's, AutoAWQ's and AutoRound's
packing. A module is quantized if it has a qweight, so the config's lists are not needed.

Activations are rounded to int8 where weights have less than eight bits, as for every integer format of so few bits: what that
loses is small beside what the weights have lost. With eight bits it would not be, and they stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.rows import IntegerRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_weight import (
    FLOATS,
    Module,
    Part,
    QuantizedWeight,
    modules,
    num_words,
    those,
    unpack,
    unpack_columns,
)

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
AWQ_SUFFIXES = ("qweight", "qzeros", "scales", "qscales", "qqzeros")
BITS = (2, 3, 4, 8)
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points
AUTO_ROUND_FORMATS = {"auto_gptq": 1, "gptq": 1, "auto_round": 0, "gptqmodel": 0}
# The output that each nibble of an AWQ word belongs to is 0, 2, 4, 6, 1, 3, 5, 7; this is the way back.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
PACK_METHODS = ("reorder", "order")
"""Quark's: whether nibbles are AWQ's."""


def rounded_activations(bits: int) -> Literal["int8", "none"]:
    """What happens to activations of weights that others quantized, and not their inputs."""
    return "none" if bits == 8 else "int8"


@dataclass(frozen=True)
class GPTQWeight:
    """order: see IntegerRows. zero_shift: what is added to stored zero points."""

    format: Integer
    shape: tuple[int, int]
    codes: Part
    zeros: Part
    scales: Part
    groups: Part | None
    order: torch.Tensor | None
    zero_shift: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.zeros, self.scales, self.groups)

    def rows(self, first: int, end: int) -> IntegerRows:
        bits, most = self.format.bits, self.format.most
        words = self.codes.read()[:, first:end].t().contiguous()
        codes = unpack(words.view(torch.uint8), bits, self.shape[1])
        zeros = (unpack_columns(self.zeros.read(), bits, first, end) + self.zero_shift) & most
        scales = self.scales.checked_scales(self.scales.read()[:, first:end].t().contiguous())
        if self.format.zeros:
            return IntegerRows(codes, scales, zeros, self.order)
        if bool((zeros != self.format.middle).any()):
            raise self.zeros.misfit(
                f"should hold {self.format.middle} everywhere: the config says that weights are symmetric"
            )
        return IntegerRows(codes, scales, None, self.order)


@dataclass(frozen=True)
class AWQWeight:
    """zeros: of symmetric weights all 0. reordered: see `unpack_awq`."""

    format: Integer
    shape: tuple[int, int]
    codes: Part
    zeros: Part | None
    scales: Part
    reordered: bool = True

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.zeros, self.scales)

    def rows(self, first: int, end: int) -> IntegerRows:
        codes = unpack_awq(self.codes.read(), first, end, reordered=self.reordered)
        scales = self.scales.checked_scales(self.scales.read()[:, first:end].t().contiguous())
        zeros = None if self.zeros is None else unpack_awq(self.zeros.read(), first, end, reordered=self.reordered)
        if self.format.zeros:
            return IntegerRows(codes, scales, zeros)
        if self.zeros is not None and zeros is not None and bool(zeros.any()):
            raise self.zeros.misfit("should hold nothing but zeros: the config says that weights are symmetric")
        return IntegerRows(codes ^ self.format.middle, scales)


def read_gptq(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    layout = config.text("checkpoint_format", config.text("format", "gptq")).lower()
    if layout not in GPTQ_FORMATS or config.flag("is_marlin_format", False):
        raise UnsupportedError(
            f"{config.where}: GPTQ weights in the layout {layout[:40]!r}", f"known: {', '.join(GPTQ_FORMATS)}"
        )
    bits, group = _checked_bits(config), _group_size(config)
    if config.values.get("rotation"):
        raise UnsupportedError(
            f"{config.where}: rotated weights ({config.values['rotation']!r:.40})", "take a model without them"
        )
    symmetric, varies = config.flag("sym", True), bool(config.values.get("dynamic"))  # gptqmodel's rules by module
    for module in modules(checkpoint, SUFFIXES) if config.flag("desc_act", False) else ():
        module.part("g_idx", ("I32", "I64"))  # without it nobody knows the order
    return _gptq_weights(checkpoint, bits, group, symmetric, GPTQ_FORMATS[layout], varies=varies)


def _checked_bits(config: ConfigReader) -> int:
    bits = config.integer("bits")
    if bits not in BITS:
        raise UnsupportedError(f"{config.where}: GPTQ weights of {bits} bits", f"known: {', '.join(map(str, BITS))}")
    return bits


def read_auto_round(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    layout, kind = _auto_round_layout(config), config.text("data_type", "int").lower()
    if layout not in (*AUTO_ROUND_FORMATS, "auto_awq") or kind != "int":
        known = f"known: int, as {', '.join(AUTO_ROUND_FORMATS)} and auto_awq"
        raise UnsupportedError(f"{config.where}: AutoRound's weights as {kind[:40]!r} in the layout {layout[:40]!r}", known)
    if layout == "auto_awq":
        return read_awq(checkpoint, config)
    bits, group, symmetric = _checked_bits(config), _group_size(config), config.flag("sym", True)
    layers = config.section("extra_config")
    varies = any(_differs(layers.section(name), bits, group, symmetric) for name in layers.values)
    return _gptq_weights(checkpoint, bits, group, symmetric, AUTO_ROUND_FORMATS[layout], varies=varies)


def _auto_round_layout(config: ConfigReader) -> str:
    """Early versions said it with what they computed by: "auto_round:gptq:exllamav2"."""
    backend = config.text("backend", "auto").lower()
    old = next((kind for kind in ("auto_gptq", "auto_awq") if kind.removeprefix("auto_") in backend), backend)
    return config.text("packing_format", "auto_gptq" if old == "auto" else old).lower().removeprefix("auto_round:")


def _differs(layer: ConfigReader, bits: int, group: int, symmetric: bool) -> bool:
    """Of 16 bits and more are those that are left alone."""
    own = layer.integer("bits", bits)
    same = (own, layer.integer("group_size", group, least=-1), layer.flag("sym", symmetric)) == (bits, group, symmetric)
    return own < 16 and not same


def _gptq_weights(
    checkpoint: Checkpoint, bits: int, group: int, symmetric: bool, zero_shift: int, *, varies: bool
) -> dict[str, QuantizedWeight]:
    """By their names. varies: modules have settings of their own, so that bits and groups follow from shapes, and any may have
    zero points."""
    said_bits, said_group = (None, None) if varies else (bits, group)
    return {
        module.weight_name: _gptq_weight(module, said_bits, said_group, symmetric and not varies, zero_shift)
        for module in modules(checkpoint, SUFFIXES)
    }


def _gptq_weight(module: Module, bits: int | None, group: int | None, symmetric: bool, zero_shift: int) -> GPTQWeight:
    codes = module.matrix("qweight", ("I32",))
    num_rows = codes.shape[1]
    scales = module.part("scales", FLOATS, (None, num_rows))
    num_groups = scales.shape[0]
    zeros = module.part("qzeros", ("I32",), (num_groups, None if bits is None else num_words(num_rows, bits)))
    if bits is None:
        bits = next((b for b in BITS if num_words(num_rows, b) == zeros.shape[1]), 0)
        if not bits:
            raise zeros.misfit(f"has {zeros.shape[1]} words for {num_rows} outputs, which fits no number of bits")
    groups = module.part("g_idx", ("I32", "I64"), (None,)) if module.has("g_idx") else None
    width = codes.shape[0] * 32 // bits if groups is None else groups.shape[0]
    if codes.shape[0] != num_words(width, bits):
        raise codes.misfit(f"has {codes.shape[0]} rows of words, expected {num_words(width, bits)} for {width} inputs")
    size = checked_group(scales, num_groups, width, group)
    order = None if groups is None else group_order(groups, num_groups)
    form = Integer(
        bits,  # type: ignore[arg-type]
        size,
        zeros=not symmetric,
        activation=rounded_activations(bits),
        ordered=order is not None,
        scales=scales.scale_type,
    )
    return GPTQWeight(form, (num_rows, width), codes, zeros, scales, groups, order, zero_shift)


def checked_group(scales: Part, num_groups: int, width: int, group: int | None) -> int:
    """The group size that so many scales mean, 0 for one a row. group: what the config says, -1 for one a row, None for nothing.

    CheckpointError where they contradict each other."""
    if group is not None:
        size = width if group == -1 else group
        if width % size:
            raise scales.misfit(f"belongs to {width} inputs, which don't divide into groups of {size}")
        if num_groups != width // size:
            raise scales.misfit(f"has {num_groups} groups, expected {width // size} of {size} inputs")
    if num_groups == 0 or width % num_groups:
        raise scales.misfit(f"has {num_groups} groups, which {width} inputs don't divide into")
    return 0 if num_groups == 1 else width // num_groups


def group_order(groups: Part, num_groups: int) -> torch.Tensor | None:
    """IntegerRows.order for the group of each input; None where they are one behind the other anyway.

    CheckpointError unless every group has the same number of inputs."""
    ids = groups.read().long()
    size = len(ids) // num_groups
    if bool(((ids < 0) | (ids >= num_groups)).any()):
        raise groups.damaged(f"has groups out of range: there are {num_groups}")
    if not torch.equal(ids.bincount(minlength=num_groups), torch.full((num_groups,), size)):
        raise groups.misfit(f"has groups of other sizes than {size}")
    if torch.equal(ids, torch.arange(len(ids)) // size):
        return None
    return ids.argsort(stable=True).int()


def read_awq(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    layout = config.text("version", config.text("format", "gemm")).lower()
    if layout != "gemm":
        raise UnsupportedError(f"{config.where}: AWQ weights in the layout {layout[:40]!r}", "known: gemm")
    bits = config.integer("bits", config.values.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedError(f"{config.where}: AWQ weights of {bits} bits", "known: 4")
    by_quark = config.has("pack_method")
    if not config.flag("zero_point", True) and not by_quark:
        raise UnsupportedError(f"{config.where}: AWQ weights without zero points", "known: those with zero points")
    order = config.text("pack_method", "reorder")
    if order not in PACK_METHODS:
        raise UnsupportedError(f"{config.where}: the pack_method {order[:40]!r}", f"known: {', '.join(PACK_METHODS)}")
    group = _group_size(config, config.values.get("q_group_size"))
    return {
        module.weight_name: _awq_weight(module, group, config.flag("zero_point", True), order == "reorder")
        for module in modules(checkpoint, AWQ_SUFFIXES)
    }


def _awq_weight(module: Module, group: int, zero_points: bool, reordered: bool) -> AWQWeight:
    codes = module.matrix("qweight", ("I32",))
    width, num_rows = codes.shape[0], codes.shape[1] * 8
    scales = module.part("qscales" if module.has("qscales") else "scales", FLOATS, (None, num_rows))
    zeros = None
    if zero_points or module.has("qzeros") or module.has("qqzeros"):
        zeros = module.part("qqzeros" if module.has("qqzeros") else "qzeros", ("I32",), (scales.shape[0], codes.shape[1]))
    size = checked_group(scales, scales.shape[0], width, group)
    form = Integer(4, size, zeros=zero_points, activation=rounded_activations(4), scales=scales.scale_type)
    return AWQWeight(form, (num_rows, width), codes, zeros, scales, reordered)


def unpack_awq(words: torch.Tensor, first: int, end: int, *, reordered: bool = True) -> torch.Tensor:
    """uint8 [end - first, X] of int32 [X, N / 8]; first is a multiple of 8. reordered: whether nibbles lie as AWQ has them, and
    not one behind the other."""
    some = words[:, first // 8 : -(-end // 8)].contiguous()
    nibbles = unpack(some.view(torch.uint8), 4, 8 * some.shape[1])
    if reordered:
        nibbles = nibbles.reshape(len(words), -1, 8)[..., list(AWQ_NIBBLES)].flatten(1)
    return nibbles[:, : end - first].t().contiguous()


def _group_size(config: ConfigReader, default: Any = None) -> int:
    """-1 for one group a row."""
    size = config.integer("group_size", 128 if default is None else default, least=-1)
    if size == 0:
        raise CheckpointError(f"{config.where}: 'group_size' must be above 0, or -1 for one group a row", BROKEN)
    return size
