"""GPTQ and AWQ checkpoints: codes packed as one long number a column, values from the drawn codes; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.rows import IntegerRows
from quantized_checkpoints import (
    NAME,
    Tensors,
    assert_reads,
    awq,
    awq_config,
    check_refused,
    gptq,
    gptq_config,
    module,
    open_quantized,
    read_weight,
    small_slices,
    write,
)

WEIGHT = f"{NAME}.weight"


def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("symmetric", "version"), [(True, 1), (False, 1), (True, 2), (False, 2)])
@pytest.mark.parametrize("order", [False, True])
def test_gptq(bits: int, symmetric: bool, version: int, order: bool, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    kind = (bits, 32, symmetric, order, version)
    tensors, expected = gptq(*kind)(160, 96, random())
    reader = assert_reads(tmp_path, tensors, gptq_config(*kind), expected)
    activation = "none" if bits == 8 else "int8"
    assert reader.format(WEIGHT) == Integer(bits, 32, not symmetric, activation, order, "float16")  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_with_one_group_a_row(bits: int, tmp_path: Path) -> None:
    tensors, expected = gptq(bits, 0)(32, 64, random())
    reader = assert_reads(tmp_path, tensors, gptq_config(bits, 0), expected)
    assert reader.format(WEIGHT) == Integer(bits, 0, False, "none" if bits == 8 else "int8", False, "float16")  # type: ignore[arg-type]


@pytest.mark.parametrize(("bits", "rows", "columns"), [(4, 33, 40), (3, 35, 40), (2, 17, 24), (8, 5, 8)])
def test_gptq_whose_last_words_are_not_full(bits: int, rows: int, columns: int, tmp_path: Path) -> None:
    tensors, expected = gptq(bits, 8, symmetric=False)(rows, columns, random())
    assert_reads(tmp_path, tensors, gptq_config(bits, 8, symmetric=False), expected)


def test_gptq_without_g_idx(tmp_path: Path) -> None:
    tensors, expected = gptq(4, 32)(64, 64, random())
    del tensors["g_idx"]
    assert_reads(tmp_path, tensors, gptq_config(4, 32), expected)


def test_gptq_order_sorts_columns_by_group_and_leaves_each_group_in_order(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 32, order=True)(32, 96, random())
    reader = open_quantized(write(tmp_path, module(tensors), gptq_config(4, 32, order=True)))
    rows, _ = next(reader.slices(WEIGHT))
    assert isinstance(rows, IntegerRows)
    assert rows.order is not None
    groups = tensors["g_idx"].tolist()
    assert rows.order.tolist() == sorted(range(96), key=lambda column: (groups[column], column))
    assert rows.order.dtype == torch.int32


def test_gptq_zero_points_of_the_first_version_wrap_around(tmp_path: Path) -> None:
    """A zero point of 0 is stored as the largest code: what AutoGPTQ and gptqmodel read."""
    tensors, _ = gptq(4, 32, symmetric=False)(32, 32, random())
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    reader = open_quantized(write(tmp_path, module(tensors), gptq_config(4, 32, symmetric=False)))
    rows, _ = next(reader.slices(WEIGHT))
    assert isinstance(rows, IntegerRows)
    assert rows.zeros is not None
    assert rows.zeros.unique().tolist() == [0]


def test_gptq_with_rules_by_module_reads_bits_and_groups_from_the_tensors(tmp_path: Path) -> None:
    four, expected_four = gptq(4, 32)(64, 96, random())
    eight, expected_eight = gptq(8, 48, symmetric=False)(64, 96, random())
    config = gptq_config(4, 32) | {"dynamic": {"+:.*k_proj": {"bits": 8, "group_size": 48, "sym": False}}}
    other = NAME.replace("q_proj", "k_proj")
    reader = open_quantized(write(tmp_path, module(four) | module(eight, other), config))
    np.testing.assert_allclose(read_weight(reader), expected_four, rtol=1e-6)
    np.testing.assert_allclose(read_weight(reader, f"{other}.weight"), expected_eight, rtol=1e-6)


def test_gptq_beside_plain_layers_and_biases(tmp_path: Path) -> None:
    tensors, expected = gptq(4, 32)(32, 32, random())
    others = {"lm_head.weight": torch.ones(3, 5).half(), f"{NAME}.bias": torch.ones(32).half()}
    reader = open_quantized(write(tmp_path, module(tensors) | others, gptq_config(4, 32) | {"lm_head": False}))
    assert reader.names() == {WEIGHT, *others}
    assert reader.format("lm_head.weight") is None
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("shape", [(8, 64), (264, 128)])
def test_awq(group: int, shape: tuple[int, int], tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = awq(group)(*shape, random())
    reader = assert_reads(tmp_path, tensors, awq_config(group), expected)
    size = 0 if group in (0, shape[1]) else group
    assert reader.format(WEIGHT) == Integer(4, size, True, "int8", False, "float16")


def test_awq_by_its_older_names(tmp_path: Path) -> None:
    tensors, expected = awq(32)(16, 64, random())
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    assert_reads(tmp_path, tensors, config | {"modules_to_not_convert": ["lm_head"]}, expected)


GPTQ = gptq(4, 32, order=True)(64, 96, random())[0]
GPTQ_CONFIG = gptq_config(4, 32, order=True)
AWQ = awq(32)(64, 96, random())[0]
AWQ_CONFIG = awq_config(32)


def with_changes(tensors: Tensors, **changes: Any) -> Tensors:
    """None takes a tensor away, a function makes another of it."""
    changed = {name: make(tensors[name].clone()) for name, make in changes.items() if make is not None}
    return {name: tensor for name, tensor in (tensors | changed).items() if changes.get(name, 1) is not None}


def at(index: Any, value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


BAD: dict[str, tuple[Tensors, dict[str, Any], type[NanovllmError], str]] = {
    "no scales": (with_changes(GPTQ, scales=None), GPTQ_CONFIG, CheckpointError, f"{NAME}.scales' is missing"),
    "no zeros": (with_changes(GPTQ, qzeros=None), GPTQ_CONFIG, CheckpointError, f"{NAME}.qzeros' is missing"),
    "no codes": (with_changes(GPTQ, qweight=None), GPTQ_CONFIG, CheckpointError, f"{NAME}.qweight' is missing"),
    "no order": (with_changes(GPTQ, g_idx=None), GPTQ_CONFIG, CheckpointError, f"{NAME}.g_idx' is missing"),
    "a scale of zero": (with_changes(GPTQ, scales=at((0, 0), 0)), GPTQ_CONFIG, CheckpointError, "scales' has scales that"),
    "a negative scale": (with_changes(GPTQ, scales=at((2, 63), -1)), GPTQ_CONFIG, CheckpointError, "scales' has scales that"),
    "a scale that is NaN": (with_changes(GPTQ, scales=at((1, 1), torch.nan)), GPTQ_CONFIG, CheckpointError, "NaN"),
    "an infinite scale": (with_changes(GPTQ, scales=at((1, 1), torch.inf)), GPTQ_CONFIG, CheckpointError, "infinite"),
    "a group too high": (with_changes(GPTQ, g_idx=at(5, 3)), GPTQ_CONFIG, CheckpointError, "g_idx' has groups out of range"),
    "a group below 0": (with_changes(GPTQ, g_idx=at(5, -1)), GPTQ_CONFIG, CheckpointError, "g_idx' has groups out of range"),
    "a huge group": (with_changes(GPTQ, g_idx=at(5, 2**31 - 1)), GPTQ_CONFIG, CheckpointError, "out of range"),
    "groups of other sizes": (
        with_changes(GPTQ, g_idx=lambda ids: torch.where(ids == 0, 1, ids)), GPTQ_CONFIG, CheckpointError, "other sizes than 32",
    ),
    "too few groups of columns": (
        with_changes(GPTQ, g_idx=lambda ids: ids[:64]), GPTQ_CONFIG, CheckpointError, "qweight' has 12 rows of words, expected 8",
    ),
    "groups as floats": (
        with_changes(GPTQ, g_idx=lambda ids: ids.float()), GPTQ_CONFIG, CheckpointError, "g_idx' holds F32, expected I32 or I64",
    ),
    "another group size": (GPTQ, GPTQ_CONFIG | {"group_size": 48}, CheckpointError, "has 3 groups, expected 2 of 48"),
    "a group size that does not divide": (GPTQ, GPTQ_CONFIG | {"group_size": 36}, CheckpointError, "into groups of 36"),
    "a group size of 0": (GPTQ, GPTQ_CONFIG | {"group_size": 0}, CheckpointError, "group_size"),
    "an absurd group size": (GPTQ, GPTQ_CONFIG | {"group_size": 2**31 - 1}, CheckpointError, "don't divide"),
    "no group size": ({**GPTQ}, {**GPTQ_CONFIG, "group_size": "many"}, CheckpointError, "group_size"),
    "other bits": (GPTQ, GPTQ_CONFIG | {"bits": 8}, CheckpointError, "qzeros' has the shape [3, 8], expected [3, 16]"),
    "bits that nobody packs": (GPTQ, GPTQ_CONFIG | {"bits": 5}, UnsupportedError, "5 bits"),
    "bits as text": (GPTQ, GPTQ_CONFIG | {"bits": "4"}, CheckpointError, "'bits'"),
    "a marlin layout": (GPTQ, GPTQ_CONFIG | {"checkpoint_format": "marlin"}, UnsupportedError, "marlin"),
    "the old marlin flag": (GPTQ, GPTQ_CONFIG | {"is_marlin_format": True}, UnsupportedError, "layout"),
    "rotated": (GPTQ, GPTQ_CONFIG | {"rotation": "hadamard"}, UnsupportedError, "hadamard"),
    "not symmetric after all": (
        with_changes(GPTQ, qzeros=at((0, 0), 0)), GPTQ_CONFIG, CheckpointError, "qzeros' should hold 8 everywhere",
    ),
    "the other version": (GPTQ, GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"}, CheckpointError, "qzeros' should hold 8"),
    "codes as bytes": (
        with_changes(GPTQ, qweight=lambda codes: codes.view(torch.uint8)), GPTQ_CONFIG, CheckpointError, "qweight' holds U8",
    ),
    "codes of one dimension": (
        with_changes(GPTQ, qweight=lambda codes: codes.flatten()), GPTQ_CONFIG, CheckpointError, "qweight' has the shape [768]",
    ),
    "no codes in it": (
        with_changes(GPTQ, qweight=lambda codes: codes[:0]), GPTQ_CONFIG, CheckpointError, "holds nothing",
    ),
    "scales of fewer rows": (
        with_changes(GPTQ, scales=lambda scales: scales[:, :32]), GPTQ_CONFIG, CheckpointError, "scales' has the shape [3, 32]",
    ),
    "no scales in it": (
        with_changes(GPTQ, scales=lambda s: s[:0], qzeros=lambda z: z[:0]), GPTQ_CONFIG, CheckpointError, "has 0 groups",
    ),
    "rules and zeros of no width": (
        with_changes(GPTQ, qzeros=lambda zeros: zeros[:, :5]), GPTQ_CONFIG | {"dynamic": {"-:x": {}}}, CheckpointError, "5 words",
    ),
    "awq, no zeros": (with_changes(AWQ, qzeros=None), AWQ_CONFIG, CheckpointError, "qzeros' is missing"),
    "awq, scales of fewer rows": (
        with_changes(AWQ, scales=lambda scales: scales[:, :8]), AWQ_CONFIG, CheckpointError, "scales' has the shape [3, 8]",
    ),
    "awq, zeros of fewer groups": (
        with_changes(AWQ, qzeros=lambda zeros: zeros[:2]), AWQ_CONFIG, CheckpointError, "qzeros' has the shape [2, 8]",
    ),
    "awq, a scale of zero": (with_changes(AWQ, scales=at((0, 0), 0)), AWQ_CONFIG, CheckpointError, "scales' has scales"),
    "awq, another group size": (AWQ, AWQ_CONFIG | {"group_size": 48}, CheckpointError, "has 3 groups, expected 2"),
    "awq, gemv": (AWQ, AWQ_CONFIG | {"version": "gemv"}, UnsupportedError, "gemv"),
    "awq, three bits": (AWQ, AWQ_CONFIG | {"bits": 3}, UnsupportedError, "3 bits"),
    "awq, no zero points": (AWQ, AWQ_CONFIG | {"zero_point": False}, UnsupportedError, "zero points"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *BAD[case])


# ---- AutoRound, which packs as either of the others does ----

AUTO_ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True,
    "data_type": "int", "iters": 200, "autoround_version": "0.14.2",
    "extra_config": {f"{NAME[:-7]}.q_norm": {"bits": 16, "data_type": "float"}},
}  # fmt: skip


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_round(symmetric: bool, method: str, tmp_path: Path) -> None:
    tensors, expected = gptq(4, 32, symmetric)(64, 64, random())
    del tensors["g_idx"]
    reader = assert_reads(tmp_path, tensors, AUTO_ROUND | {"sym": symmetric, "quant_method": method}, expected)
    assert reader.format(WEIGHT) == Integer(4, 32, not symmetric, "int8", False, "float16")


@pytest.mark.parametrize(("said", "version"), [
    ({"packing_format": "auto_round:gptq"}, 1), ({"packing_format": None}, 1), ({"packing_format": None, "backend": "auto"}, 1),
    ({"packing_format": None, "backend": "auto_round:gptq:exllamav2"}, 1), ({"packing_format": "auto_round"}, 2),
    ({"packing_format": "auto_round:gptqmodel"}, 2),
])  # fmt: skip
def test_zero_points_of_auto_round_are_as_the_layout_has_them(said: dict[str, Any], version: int, tmp_path: Path) -> None:
    tensors, expected = gptq(4, 32, False, version=version)(64, 64, random())
    del tensors["g_idx"]
    assert_reads(tmp_path, tensors, AUTO_ROUND | {"sym": False} | said, expected)


@pytest.mark.parametrize("said", [{"packing_format": "auto_round:auto_awq"},
                                  {"packing_format": None, "backend": "auto_round:awq:gemm"}])  # fmt: skip
def test_auto_round_packed_as_awq(said: dict[str, Any], tmp_path: Path) -> None:
    tensors, expected = awq(32)(64, 64, random())
    assert_reads(tmp_path, tensors, AUTO_ROUND | said, expected)


def test_a_module_of_auto_round_may_have_bits_of_its_own(tmp_path: Path) -> None:
    tensors, expected = gptq(8, 16, symmetric=False)(64, 64, random())
    own = {"extra_config": {NAME: {"bits": 8, "group_size": 16, "sym": False}}}
    reader = assert_reads(tmp_path, tensors, AUTO_ROUND | own, expected)
    assert reader.format(WEIGHT) == Integer(8, 16, True, "none", False, "float16")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "the layout 'llm_compressor'"),
        ({"packing_format": None, "backend": "auto_round:exllamav2"}, "the layout 'exllamav2'"),
        ({"data_type": "mx_fp"}, "as 'mx_fp'"),
        ({"bits": 5}, "of 5 bits"),
    ],
)
def test_what_else_auto_round_writes_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors, _ = gptq(4, 32)(64, 64, random())
    check_refused(tmp_path, tensors, AUTO_ROUND | config, UnsupportedError, words)


@pytest.mark.parametrize("own", [3, {NAME: 4}, {NAME: {"bits": "many"}}, {NAME: {"group_size": -2}}])
def test_settings_of_auto_rounds_modules_are_checked(own: Any, tmp_path: Path) -> None:
    tensors, _ = gptq(4, 32)(64, 64, random())
    check_refused(tmp_path, tensors, AUTO_ROUND | {"extra_config": own}, CheckpointError, "extra_config")
