"""Checkpoints of AMD's Quark: packed by hand from what its packing does, settings as it writes them, a whole model against
transformers with the same weights; and what is refused. Twenty-six folders that Quark 0.13 had made gave the same numbers, to the
bit where one scale makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from engines import engine_for, greedy, run, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant.format import Blocks, Fp8, Integer
from quantized_checkpoints import (
    NAME,
    Made,
    Maker,
    Tensors,
    check_refused,
    e4m3,
    fp8,
    module,
    nvfp4,
    open_quantized,
    packed,
    read_weight,
    small_slices,
    write,
)
from test_quantized_models import EXPERTS, PROMPTS, SIZES, build, worst_difference

WEIGHT = f"{NAME}.weight"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX 1.0, section 5.3.3
TURNS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(8))}


def spec(dtype: str, qscheme: str = "per_tensor", **values: Any) -> dict[str, Any]:
    """As QTensorConfig.to_dict has it."""
    return {
        "dtype": dtype, "is_dynamic": False, "qscheme": qscheme, "ch_axis": None, "group_size": None, "block_size": None,
        "symmetric": True, "round_method": "half_even", "scale_type": "float", "zero_point_type": "int32", "scale_format": None,
        "scale_calculation_mode": None, "mx_element_dtype": None, "observer_cls": "PerTensorMinMaxObserver",
        "is_scale_quant": False, **values,
    }  # fmt: skip


def layer(weight: Any, inputs: Any = None, **values: Any) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None, **values}


def settings(weight: Any, inputs: Any = None, pack: str = "reorder", **more: Any) -> dict[str, Any]:
    """quantization_config."""
    return {
        "quant_method": "quark", "global_quant_config": layer(weight, inputs), "exclude": ["lm_head"], "algo_config": None,
        "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {}, "softmax_quant_spec": None,
        "quant_mode": "eager_mode", "version": "0.12", "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": pack, "weight_format": "real_quantized",
            "weight_merge_groups": None,
        }, **more,
    }  # fmt: skip


GROUPS: dict[str, Any] = {"qscheme": "per_group", "group_size": 32, "ch_axis": 1}
ROWS: dict[str, Any] = {"qscheme": "per_channel", "ch_axis": 0}
MXFP4 = spec("fp4", "per_group", group_size=32, ch_axis=-1, scale_format="e8m0", symmetric=None)
NVFP4 = [spec("fp4", "per_group", group_size=16, scale_format="float32", symmetric=None), spec("fp8_e4m3", is_scale_quant=True)]
FP8_INPUT = spec("fp8_e4m3")
DYNAMIC = {"is_dynamic": True}
E8M0 = {"scale_format": "e8m0"}


def words(codes: np.ndarray, pack: str) -> np.ndarray:
    """int32 [X, count / 8] of [X, count], two's complement where they have a sign; what is short is padded with zeros."""
    whole = np.pad(codes & 15, ((0, 0), (0, -codes.shape[1] % 8))).reshape(len(codes), -1, 8).astype(np.int64)
    number = sum(whole[:, :, place] << 4 * i for i, place in enumerate(TURNS[pack]))
    return np.asarray(number).astype(np.uint32).view(np.int32)


def integers(kind: str, qscheme: str, pack: str = "reorder", symmetric: bool = True) -> Maker:
    bits = int(kind[-1])
    low = 0 if kind.startswith("u") else -(1 << bits - 1)

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        groups = columns // 32 if qscheme == "per_group" else 1
        height = 1 if qscheme == "per_tensor" else rows
        codes = random.integers(low, low + (1 << bits), (rows, columns))
        zeros = random.integers(low, low + (1 << bits), (height, groups)) * (not symmetric)
        scales = torch.from_numpy(random.uniform(0.5, 2, (height, groups)) / (1 << bits) / columns**0.5 * 4).float()
        turned = qscheme == "per_group" and kind != "int3"
        tensors = {"weight": torch.from_numpy(stored(codes.T if turned else codes)).contiguous()}
        found, points = scales.t().contiguous(), zeros.T
        if qscheme == "per_channel":
            found, points = scales[:, 0], zeros.T
        elif qscheme == "per_tensor":
            found = scales.reshape(())
        tensors["weight_scale"] = found
        if qscheme == "per_tensor" and bits < 8:
            tensors["weight_zero_point"] = torch.tensor(int(zeros[0, 0]), dtype=torch.int32)
        elif kind != "int3":
            own = torch.from_numpy(stored(points)).contiguous()
            tensors["weight_zero_point"] = own if qscheme == "per_group" else own.reshape(() if qscheme == "per_tensor" else -1)
        repeat = columns // groups
        return tensors, (codes - np.repeat(zeros, repeat, 1)) * np.repeat(scales.double().numpy(), repeat, 1)

    def stored(values: np.ndarray) -> np.ndarray:
        if bits == 8:
            return values.astype(np.uint8 if kind.startswith("u") else np.int8)
        if bits == 4:
            return words(values, pack)
        data = np.ascontiguousarray(packed(values.T & 7, 3).T).view(np.uint8)
        return data.reshape(len(values), -1)[:, : values.shape[1] * 3 // 8]

    return make


def mxfp4(rows: int, columns: int, random: np.random.Generator) -> Made:
    codes, scales = random.integers(0, 16, (rows, columns)), random.integers(118, 124, (rows, columns // 32)).astype(np.uint8)
    pairs = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    return {"weight": pairs, "weight_scale": torch.from_numpy(scales)}, FP4[codes] * np.repeat(2.0 ** (scales - 127.0), 32, 1)


def small_float(codes: np.ndarray, exponent: int, mantissa: int, bias: int) -> np.ndarray:
    """OCP's formats: a sign, an exponent, a mantissa, and numbers below the least exponent."""
    sign, rest = codes >> exponent + mantissa, codes & (1 << exponent + mantissa) - 1
    power, fraction = rest >> mantissa, (rest & (1 << mantissa) - 1) / (1 << mantissa)
    value = np.where(power == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (power - float(bias)))
    return np.where(sign == 1, -value, value)


def mxfp8(kind: str) -> Maker:
    exponent, mantissa, bias = {"fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15), "fp6_e2m3": (2, 3, 1), "fp6_e3m2": (3, 2, 3)}[kind]

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        codes = random.integers(0, 1 << 1 + exponent + mantissa, (rows, columns))
        if kind == "fp8_e4m3":
            codes[(codes & 127) == 127] = 0
        elif kind == "fp8_e5m2":
            codes[(codes & 127) >= 124] = 0
        scales = random.integers(115, 124, (rows, columns // 32)).astype(np.uint8)
        if kind.startswith("fp8"):
            dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
            data = torch.from_numpy(codes.astype(np.uint8)).view(dtype)
        else:
            stored = np.ascontiguousarray(packed(codes.T, 6).T).view(np.uint8)
            data = torch.from_numpy(stored.reshape(rows, -1)[:, : columns * 6 // 8].copy())
        values = small_float(codes, exponent, mantissa, bias) * np.repeat(2.0 ** (scales - 127.0), 32, 1)
        return {"weight": data, "weight_scale": torch.from_numpy(scales)}, values

    return make


def drawn(maker: Maker, rows: int = 140, columns: int = 192) -> Made:
    return maker(rows, columns, np.random.default_rng(1))


@pytest.mark.parametrize("pack", TURNS)
@pytest.mark.parametrize("qscheme", ["per_group", "per_channel", "per_tensor"])
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8", "int3"])
def test_integers(kind: str, qscheme: str, pack: str, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    symmetric = not kind.startswith("u")
    tensors, expected = drawn(integers(kind, qscheme, pack, symmetric))
    said = {"per_group": GROUPS, "per_channel": ROWS, "per_tensor": {}}[qscheme] | {"symmetric": symmetric}
    config = settings(spec(kind, **{"qscheme": qscheme, **said}), pack=pack)
    reader = open_quantized(write(tmp_path, module(tensors), config))
    assert reader.names() == {WEIGHT}
    form = reader.format(WEIGHT)
    assert isinstance(form, Integer)
    assert (form.bits, form.group, form.zeros) == (int(kind[-1]), 32 * (qscheme == "per_group"), not symmetric)
    assert form.activation == ("none" if form.bits == 8 else "int8")
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("qscheme", ["per_group", "per_channel"])
def test_int8_with_zero_points_below_and_above_0(qscheme: str, tmp_path: Path) -> None:
    tensors, expected = drawn(integers("int8", qscheme, symmetric=False))
    said = GROUPS if qscheme == "per_group" else ROWS
    reader = open_quantized(write(tmp_path, module(tensors), settings(spec("int8", **said | {"symmetric": False}))))
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


def test_outputs_that_no_word_ends_with(tmp_path: Path) -> None:
    tensors, expected = drawn(integers("uint4", "per_group", symmetric=False), 133)
    reader = open_quantized(write(tmp_path, module(tensors), settings(spec("uint4", **GROUPS | {"symmetric": False}))))
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("inputs", "activation"), [
    (None, "none"), (spec("int8", **ROWS | DYNAMIC), "int8"), (spec("int8"), "none"),
    (spec("int8", **DYNAMIC, symmetric=False), "none"),
])  # fmt: skip
def test_inputs_of_int8(inputs: Any, activation: str, tmp_path: Path) -> None:
    """Rounded with a scale a token; those with a scale that is fixed, or with zero points, are kept finer."""
    tensors, expected = drawn(integers("int8", "per_channel"))
    tensors |= {"input_scale": torch.tensor(0.1), "input_zero_point": torch.tensor(0, dtype=torch.int8)} if inputs else {}
    reader = open_quantized(write(tmp_path, module(tensors), settings(spec("int8", **ROWS), inputs)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Integer(8, 0, activation=activation, scales="float32")  # type: ignore[arg-type]
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


@pytest.mark.parametrize(("layout", "weight", "inputs", "form"), [
    ("tensor", spec("fp8_e4m3"), None, Fp8(0, "none")),
    ("tensor", spec("fp8_e4m3"), FP8_INPUT, Fp8(0, "static")),
    ("tensor", spec("fp8_e4m3"), FP8_INPUT | DYNAMIC, Fp8(0, "dynamic")),
    ("row", spec("fp8_e4m3", **ROWS), spec("fp8_e4m3", **ROWS | DYNAMIC), Fp8(0, "dynamic")),
    ("block", spec("fp8_e4m3", "per_block", block_size=[128, 128]), spec("fp8_e4m3", **GROUPS | DYNAMIC), Fp8(128, "dynamic")),
])  # fmt: skip
def test_fp8(layout: str, weight: Any, inputs: Any, form: Fp8, tmp_path: Path) -> None:
    """Scales of a KV cache lie beside it, and are left aside."""
    tensors, expected = drawn(fp8(layout, static=form.activation == "static"))
    if layout != "block":
        tensors["weight_scale"] = tensors["weight_scale"].reshape(() if layout == "tensor" else -1)
    cache = {NAME.replace("q_proj", name): torch.tensor(1.0) for name in ("k_proj.output_scale", "prob_output_scale")}
    reader = open_quantized(write(tmp_path, module(tensors) | cache, settings(weight, inputs)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == form
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


@pytest.mark.parametrize("inputs", [None, MXFP4 | DYNAMIC, FP8_INPUT])
def test_mxfp4(inputs: Any, tmp_path: Path) -> None:
    """Inputs of fewer bits are kept finer."""
    tensors, expected = drawn(mxfp4)
    tensors |= {"input_scale": torch.tensor(0.5)} if inputs is FP8_INPUT else {}
    reader = open_quantized(write(tmp_path, module(tensors), settings(MXFP4, inputs)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Blocks("MXFP4")
    np.testing.assert_array_equal(read_weight(reader), expected)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2"])
def test_mxfp8_and_mxfp6_are_numbers_that_bfloat16_holds(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = drawn(mxfp8(kind))
    tensors["input_scale"] = torch.tensor(0.5)
    said = settings(spec(kind, **GROUPS, **E8M0), spec(kind, **GROUPS, **E8M0) | DYNAMIC)
    reader = open_quantized(write(tmp_path, module(tensors), said))
    assert (reader.names(), reader.format(WEIGHT)) == ({WEIGHT}, None)
    assert reader.stored_as(WEIGHT) == f"mx{kind.replace('_', ':')}"
    rows = torch.cat([rows for rows, _ in reader.slices(WEIGHT)])  # type: ignore[misc]
    np.testing.assert_array_equal(rows.double().numpy(), expected)
    assert torch.equal(rows.bfloat16().float(), rows)


OF_32 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
MX8 = {"targets": ["Linear"], "weights": OF_32, "input_activations": OF_32 | {"dynamic": True}}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"group_0": MX8}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32},
}


@pytest.mark.parametrize("tool", ELSEWHERE)
def test_mxfp8_of_other_tools(tool: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The same tensors, and another config."""
    small_slices(monkeypatch)
    tensors, expected = drawn(mxfp8("fp8_e4m3"))
    reader = open_quantized(write(tmp_path, module(tensors), ELSEWHERE[tool]))
    assert (reader.names(), reader.format(WEIGHT), reader.stored_as(WEIGHT)) == ({WEIGHT}, None, "mxfp8:e4m3")
    rows = torch.cat([rows for rows, _ in reader.slices(WEIGHT)])  # type: ignore[misc]
    np.testing.assert_array_equal(rows.double().numpy(), expected)
    less = tensors | {"weight_scale": tensors["weight_scale"][:, 1:]}
    check_refused(tmp_path, less, ELSEWHERE[tool], CheckpointError, "expected [140, 6]")
    nan = tensors | {"weight_scale": torch.full_like(tensors["weight_scale"], 255)}
    check_refused(tmp_path, nan, ELSEWHERE[tool], CheckpointError, "scales that are NaN")


def test_nvfp4(tmp_path: Path) -> None:
    tensors, expected = drawn(nvfp4("modelopt"))
    tensors["input_scale_2"] = tensors.pop("input_scale")[0]
    reader = open_quantized(write(tmp_path, module(tensors), settings(NVFP4, [NVFP4[0] | DYNAMIC, NVFP4[1]])))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Blocks("NVFP4")
    np.testing.assert_allclose(read_weight(reader), expected, rtol=2e-7)


def test_int4_of_fp8(tmp_path: Path) -> None:
    """One scale of all numbers, and one a row."""
    tensors, expected = drawn(integers("int4", "per_channel"))
    tensors = {name if name == "weight" else f"{name}_2": tensor for name, tensor in tensors.items()}
    both = [spec("fp8_e4m3"), spec("int4", **ROWS)]
    tensors["weight_scale"] = torch.tensor(0.125)
    reader = open_quantized(write(tmp_path, module(tensors), settings(both, FP8_INPUT | DYNAMIC)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Integer(4, 0, scales="float32")
    np.testing.assert_allclose(read_weight(reader), expected / 8, rtol=1e-6)


def test_what_is_said_of_a_module_goes_before_what_is_said_of_all(tmp_path: Path) -> None:
    """By its name, else the first pattern that it has, else its class."""
    names = [NAME.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj", "o_proj")]
    made = [drawn(maker) for maker in (mxfp4, integers("int4", "per_group"), integers("int8", "per_channel"), fp8("tensor"))]
    tensors: Tensors = {"lm_head.weight": torch.ones(3, 4)}
    for name, (each, _) in zip(names, made, strict=True):
        tensors |= module(each, name)
    own = {"*k_proj": layer(spec("int4", **GROUPS), output_tensors=FP8_INPUT), "re:.*[kv]_proj": layer(spec("int8", **ROWS)),
           "*": layer(None), names[0]: layer(MXFP4), names[3]: layer(spec("fp8_e4m3"))}  # fmt: skip
    reader = open_quantized(write(tmp_path, tensors, settings(spec("uint4", **GROUPS), layer_quant_config=own)))
    assert reader.names() == {"lm_head.weight", *(f"{name}.weight" for name in names)}
    for name, (_, expected) in zip(names, made, strict=True):
        np.testing.assert_allclose(read_weight(reader, f"{name}.weight"), expected, rtol=1e-6)
    types = {"layer_type_quant_config": {"Linear": layer(MXFP4)}}
    reader = open_quantized(write(tmp_path, module(made[0][0]), settings(spec("int8"), **types)))
    np.testing.assert_array_equal(read_weight(reader), made[0][1])


@pytest.mark.parametrize("names", [("qweight", "scales", "qzeros"), ("qweight", "qscales", "qqzeros")])
@pytest.mark.parametrize(("zero_point", "pack"), [(True, "reorder"), (False, "reorder"), (False, "order")])
def test_awq_as_quark_writes_it(zero_point: bool, pack: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Without zero points codes are two's complement; and what some versions call scales and zero points."""
    tensors, expected = drawn(integers("uint4" if zero_point else "int4", "per_group", pack, not zero_point), 136)
    renamed = dict(zip(names, (tensors[name] for name in ("weight", "weight_scale", "weight_zero_point")), strict=True))
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": zero_point, "pack_method": pack}
    reader = open_quantized(write(tmp_path, module(renamed), config))
    assert reader.names() == {WEIGHT}
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


SAID_U4 = settings(spec("uint4", **ROWS | {"symmetric": False}))
CASES: dict[str, tuple[Any, Maker, dict[str, Any]]] = {
    "mxfp4, experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), mxfp4, settings(MXFP4, MXFP4 | DYNAMIC)),
    "int4, turned": (LlamaConfig(**SIZES), integers("int4", "per_group"), settings(spec("int4", **GROUPS))),
    "uint4 by rows": (LlamaConfig(**SIZES), integers("uint4", "per_channel", symmetric=False), SAID_U4),
    "fp8, static": (LlamaConfig(**SIZES), fp8("tensor", static=True), settings(spec("fp8_e4m3"), FP8_INPUT)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_models_are_what_transformers_makes_of_their_weights(case: str, tmp_path: Path) -> None:
    config, maker, quantization = CASES[case]
    reference = build(tmp_path, config, maker, quantization)
    worker = worker_for(tmp_path, dtype="float32")
    assert worst_difference(worker, reference) < 1e-4
    for ids, output in zip(PROMPTS, run(engine_for(worker), [(ids, greedy(8)) for ids in PROMPTS]), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + list(output.outputs[0].token_ids)])).logits[0]
        assert list(output.outputs[0].token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


# ---- what is refused ----


def changed(maker: Maker, **others: Any) -> Tensors:
    tensors, _ = drawn(maker, 32, 64)
    return {name: tensor for name, tensor in (tensors | others).items() if tensor is not None}


I4, I8 = integers("int4", "per_group"), integers("int8", "per_channel")
SAID4, SAID8, SAIDF = settings(spec("int4", **GROUPS)), settings(spec("int8", **ROWS)), settings(spec("fp8_e4m3"))
ONE = {"weight_scale": torch.tensor(0.5)}
BAD: dict[str, tuple[Tensors, Any, type[NanovllmError], str]] = {
    "no weight": (changed(I4, weight=None), SAID4, CheckpointError, "q_proj.weight' is missing"),
    "no scales": (changed(I4, weight_scale=None), SAID4, CheckpointError, "q_proj.weight_scale' is missing"),
    "scales by rows": (changed(I4, weight_scale=torch.ones(32)), SAID4, CheckpointError, "expected ['any', 'any']"),
    "not turned": (changed(I4, weight=torch.zeros(32, 8, dtype=torch.int32)), SAID4, CheckpointError, "which 32 outputs"),
    "groups of 64, says the config": (changed(I4), settings(spec("int4", **GROUPS | {"group_size": 64})),
                                      CheckpointError, "expected 1"),
    "groups of nothing": (changed(I4), settings(spec("int4", **GROUPS | {"group_size": 0})),
                          CheckpointError, "'group_size' must be"),
    "codes of bytes": (changed(I4, weight=torch.zeros(64, 4, dtype=torch.int8)), SAID4,
                       CheckpointError, "holds I8, expected I32"),
    "zero points that are not 0": (changed(I4, weight_zero_point=torch.ones(2, 4, dtype=torch.int32)), SAID4, CheckpointError,
                                   "nothing but zeros"),
    "zero points, other words": (changed(I4, weight_zero_point=torch.zeros(2, 5, dtype=torch.int32)), SAID4, CheckpointError,
                                 "expected [2, 4]"),
    "no zero points": (changed(integers("uint4", "per_group"), weight_zero_point=None), settings(spec("uint4", **GROUPS)),
                       CheckpointError, "weight_zero_point' is missing"),
    "no zero points of int8": (changed(I8, weight_zero_point=None), settings(spec("int8", **ROWS | {"symmetric": False})),
                               CheckpointError, "weight_zero_point' is missing"),
    "a scale is NaN": (changed(I8, weight_scale=torch.full((32,), np.nan)), SAID8, CheckpointError, "NaN"),
    "int3, short rows": (changed(integers("int3", "per_channel"), weight=torch.zeros(32, 25, dtype=torch.uint8)),
                         settings(spec("int3", **ROWS)), CheckpointError, "rows of 25 bytes"),
    "e5m2": ({"weight": torch.zeros(4, 4).to(torch.float8_e5m2)} | ONE, SAIDF, CheckpointError, "holds F8_E5M2"),
    "fp8, no scale of inputs": (changed(fp8("tensor")), settings(spec("fp8_e4m3"), FP8_INPUT),
                                CheckpointError, "input_scale' is missing"),
    "never packed": ({"weight": torch.zeros(4, 32)} | ONE, SAIDF, UnsupportedError, "it was never packed"),
    "mxfp4 of other groups": (changed(mxfp4, weight_scale=torch.zeros(32, 3, dtype=torch.uint8)), settings(MXFP4),
                              CheckpointError,
                              "expected [32, 2]"),
    "mxfp4, a scale is NaN": (changed(mxfp4, weight_scale=torch.full((32, 2), 255, dtype=torch.uint8)), settings(MXFP4),
                              CheckpointError, "NaN"),
    "a bias that is quantized": (changed(I8, bias_scale=torch.ones(1)), SAID8, UnsupportedError, "a bias is quantized"),
    "inputs that are rotated": (changed(I8, input_rotation=torch.ones(8, 8, dtype=torch.int8)), SAID8,
                                UnsupportedError, "rotates"),
    "inputs that are scaled": (changed(I8, input_prescale=torch.ones(64)), SAID8, UnsupportedError, "scales what goes into"),
    "fp6, float scales": (changed(mxfp4), settings(spec("fp6_e3m2", **GROUPS)), UnsupportedError, "weights in fp6_e3m2"),
    "mxfp8 in groups of 64": (changed(mxfp8("fp8_e4m3")), settings(spec("fp8_e4m3", **GROUPS | {"group_size": 64}, **E8M0)),
                              UnsupportedError, "groups of 64"),
    "mxfp8, a scale is NaN": (changed(mxfp8("fp8_e4m3"), weight_scale=torch.full((32, 2), 255, dtype=torch.uint8)),
                              settings(spec("fp8_e4m3", **GROUPS, **E8M0)), CheckpointError, "scales that are NaN"),
    "mxfp6, scales of other groups": (changed(mxfp8("fp6_e2m3"), weight_scale=torch.zeros(32, 3, dtype=torch.uint8)),
                                      settings(spec("fp6_e2m3", **GROUPS, **E8M0)), CheckpointError, "expected [32, 2]"),
    "mx, as it once was": (changed(mxfp4), settings(spec("mx", **GROUPS)), UnsupportedError, "weights in mx"),
    "fp4 with scales that are floats": (changed(mxfp4), settings(MXFP4 | {"scale_format": "float32"}),
                                        UnsupportedError, "in float32"),
    "two kinds at once": (changed(I4), settings([spec("int4"), spec("int8")]), UnsupportedError, "weights in int4 of int8"),
    "fp8 by columns of 64": (changed(fp8("block")), settings(spec("fp8_e4m3", "per_block", block_size=[64, 64])),
                             UnsupportedError,
                             "blocks of 64 x 64"),
    "fp8 by groups": (changed(fp8("tensor")), settings(spec("fp8_e4m3", **GROUPS)), UnsupportedError, "qscheme 'per_group'"),
    "fp8, inputs of int8": (changed(fp8("tensor")), settings(spec("fp8_e4m3"), spec("int8")), UnsupportedError, "inputs in int8"),
    "fp8, fixed scales a token": (changed(fp8("row")), settings(spec("fp8_e4m3", **ROWS), spec("fp8_e4m3", **ROWS)),
                                  UnsupportedError,
                                  "static scales of inputs"),
    "a scale a column": (changed(I8), settings(spec("int8", **ROWS | {"ch_axis": 1})), UnsupportedError, "a scale a column"),
    "zero points that are floats": (changed(I8), settings(spec("int8", **ROWS, zero_point_type="float32")),
                                    UnsupportedError, "floats"),
    "int3 with zero points": (changed(integers("int3", "per_channel")), settings(spec("int3", **ROWS | {"symmetric": False})),
                              UnsupportedError, "int3 with zero points"),
    "another order": (changed(I4), settings(spec("int4", **GROUPS), pack="turned"), UnsupportedError, "pack_method 'turned'"),
    "not quantized for real": (changed(I8), SAID8 | {"export": {"weight_format": "fake_quantized"}},
                               UnsupportedError, "fake_quantized"),
    "rotations of activations": (changed(I8), SAID8 | {"algo_config": [{"name": "rotation", "online_r1_rotation": True}]},
                                 UnsupportedError, "rotations of activations ('rotation')"),
    "nothing said of it": (changed(I8), SAID8 | {"global_quant_config": layer(None)},
                           CheckpointError, "says nothing of the weight"),
    "no dtype": (changed(I8), settings({"qscheme": "per_channel"}), CheckpointError, "no 'dtype'"),
    "a spec that is a word": (changed(I8), settings("int8"), CheckpointError, "'weight' must be an object"),
    "a pattern without end": (changed(I8), SAID8 | {"layer_quant_config": {"re:.*a.*a.*a.*a.*b": layer(None)}}, UnsupportedError,
                              "take too long"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *BAD[case])


def test_outputs_of_other_modules_are_refused(tmp_path: Path) -> None:
    """Those that a KV cache is made of, and queries, may be; here the cache's type is asked for otherwise."""
    said = SAID8 | {"global_quant_config": layer(spec("int8", **ROWS), output_tensors=FP8_INPUT)}
    open_quantized(write(tmp_path, module(changed(I8)), said))
    with pytest.raises(UnsupportedError, match=r"quantized outputs of 'model\.layers\.0\.mlp\.up_proj'"):
        open_quantized(write(tmp_path, module(changed(I8), "model.layers.0.mlp.up_proj"), said))


def test_as_many_patterns_as_are_believed(tmp_path: Path) -> None:
    many = {f"*{i}": layer(None) for i in range(1001)}
    check_refused(tmp_path, changed(I8), SAID8 | {"layer_quant_config": many}, CheckpointError, "at most 1000 patterns")


def test_every_number_of_e4m3_in_a_row(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    codes[(codes & 0x7F) == 0x7F] = 0
    made = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    np.testing.assert_array_equal(read_weight(open_quantized(write(tmp_path, module(made), SAIDF))), e4m3(codes) * 0.5)
