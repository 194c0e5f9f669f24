"""Checkpoints of torchao: laid out by hand from what its classes are, tensor cores' order by the loops of PyTorch's kernel; whole
models against transformers with the same weights; and what is refused. Folders that transformers had written with torchao 0.18
(Int8Tensor, Float8Tensor and IntxUnpackedToInt8Tensor) gave the numbers that it dequantizes to, but for its rounding to
bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engines import engine_for, greedy, run, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant.format import Affine, Fp8, Integer
from nanovllm_cli.weights.quantized_torchao import untiled
from nanovllm_cli.weights.weight_reader import WeightReader
from quantized_checkpoints import (
    NAME,
    Made,
    Maker,
    Tensors,
    e4m3,
    e4m3_codes,
    open_quantized,
    read_weight,
    small_slices,
)
from test_quantized_models import PROMPTS, SIZES, build, worst_difference

WEIGHT = f"{NAME}.weight"
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}}
DTYPE = {"_type": "torch.dtype", "_data": "bfloat16"}
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
SYMMETRIC = {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}, "granularity": PER_ROW}
ROUNDED = {"_type": "QuantizeTensorToInt8Kwargs", "_data": SYMMETRIC}
ROUNDED_FP8 = {"_type": "QuantizeTensorToFloat8Kwargs", "_data": {"float8_dtype": DTYPE | {"_data": "float8_e4m3fn"}}}


def kept(kind: str, tensors: Tensors, **values: Any) -> str:
    """A weight's metadata."""
    return json.dumps({"_type": kind, "_data": values, "_tensor_data_names": list(tensors)})


def write(folder: Path, tensors: Tensors, metadata: dict[str, str], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    names = json.dumps(list(metadata))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata | {"format": "pt", "tensor_names": names})  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": CONFIG}))
    return folder


def of_module(tensors: Tensors, name: str = NAME) -> Tensors:
    return {f"{name}._weight_{part}": tensor for part, tensor in tensors.items()}


def opened(folder: Path, tensors: Tensors, kind: str, **values: Any) -> WeightReader:
    return open_quantized(write(folder, of_module(tensors), {WEIGHT: kept(kind, tensors, **values)}))


def whole(bits: int, group: int, zeros: Any = "none", dtype: torch.dtype = torch.float32) -> Maker:
    """Int8Tensor and IntxUnpackedToInt8Tensor. group: 0 for a scale a row, -1 for one of all. zeros: "none", "zero", or drawn."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        half = 1 << bits - 1
        codes = random.integers(-half, half, (rows, columns))
        shape = (1 if group == -1 else rows, columns // group if group > 0 else 1)
        scales = torch.from_numpy(random.uniform(0.5, 2, shape) / half / columns**0.5 * 2).to(dtype)
        points = random.integers(-half, half, shape) * (zeros not in ("none", "zero"))
        tensors = {"qdata": torch.from_numpy(codes.astype(np.int8)), "scale": scales}
        if zeros != "none":
            tensors["zero_point"] = torch.from_numpy(points).to(zeros if isinstance(zeros, torch.dtype) else torch.int8)
        repeat = columns // shape[1]
        return tensors, (codes - np.repeat(points, repeat, 1)) * np.repeat(scales.double().numpy(), repeat, 1)

    return make


def fours(rows: int, columns: int, random: np.random.Generator, group: int = 64) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Codes from 0 on, scales and numbers that are added [N, G]."""
    codes = random.integers(0, 16, (rows, columns))
    scales = torch.from_numpy(random.uniform(0.5, 2, (rows, columns // group)) / 8 / columns**0.5).bfloat16()
    return codes, scales, torch.from_numpy(random.uniform(-1, 1, scales.shape) / columns**0.5).bfloat16()


def meaning(codes: np.ndarray, scales: torch.Tensor, zeros: torch.Tensor) -> np.ndarray:
    spread = [np.repeat(each.double().numpy(), codes.shape[1] // each.shape[1], 1) for each in (scales, zeros)]
    return (codes - 8) * spread[0] + spread[1]


def int4(rows: int, columns: int, random: np.random.Generator) -> Made:
    codes, scales, zeros = fours(rows, columns, random)
    signed = codes - 8 & 15
    pairs = (signed[:, ::2] | signed[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    tensors = {"qdata": torch.from_numpy(pairs), "scale": scales.t().contiguous(), "zero_point": zeros.t().contiguous()}
    return tensors, meaning(codes, scales, zeros)


def tiles(codes: np.ndarray) -> np.ndarray:
    """int32 [N / 8, K / 128, 32, 4], lane by lane as matrix_to_m16n8k16_Bint4_layout goes, from bytes of two codes, the first in
    the high bits."""
    data = codes[:, ::2] << 4 | codes[:, 1::2]
    down, across = len(codes) // 8, codes.shape[1] // 128
    out = np.zeros((down, across, 32, 4), np.uint32)
    for tile in range(down):
        for outer in range(across):
            for lane in range(32):
                for inner in range(0, 8, 2):
                    base = (outer * 8 + inner) * 16 // 2
                    v = [int(data[tile * 8 + lane // 4, base + lane % 4 + more]) for more in (0, 4, 8, 12)]
                    word = sum((v[i] & 15) << 16 + 4 * i | v[i] >> 4 << 4 * i for i in range(4))
                    out[tile, outer, lane, inner // 2] = word
    return out.view(np.int32)


def tiled(rows: int, columns: int, random: np.random.Generator) -> Made:
    """Filled up to multiples of 8 and 1024."""
    codes, scales, zeros = fours(rows, columns, random)
    more = -rows % 8, -columns % 1024
    filled = np.pad(codes, ((0, more[0]), (0, more[1])))
    both = torch.stack([torch.nn.functional.pad(each, (0, more[1] // 64, 0, more[0])) for each in (scales, zeros)], -1)
    tensors = {"qdata": torch.from_numpy(tiles(filled)), "scale_and_zero": both.transpose(0, 1).contiguous()}
    return tensors, meaning(codes, scales, zeros)


def drawn(maker: Maker, rows: int = 140, columns: int = 192) -> Made:
    return maker(rows, columns, np.random.default_rng(1))


@pytest.mark.parametrize(("group", "block"), [(0, [1, 192]), (-1, [140, 192]), (32, [1, 32])])
@pytest.mark.parametrize("zeros", ["none", "zero", "drawn"])
def test_int8(group: int, block: list[int], zeros: str, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = drawn(whole(8, group, zeros))
    reader = opened(tmp_path, tensors, "Int8Tensor", block_size=block, dtype=DTYPE, act_quant_kwargs=None, reduce_range=False)
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Integer(8, max(group, 0), zeros == "drawn", "none", scales="float32")
    assert reader.num_bytes(WEIGHT) == sum(tensor.nbytes for tensor in tensors.values())
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("inputs", "more", "activation"), [
    (ROUNDED, {}, "int8"),
    (ROUNDED, {"act_quant_scale": torch.ones(1), "act_quant_zero_point": torch.zeros(1, dtype=torch.int8)}, "none"),
    (ROUNDED | {"_data": {"mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}}, {}, "none"),
])  # fmt: skip
def test_inputs_of_int8(inputs: Any, more: Tensors, activation: str, tmp_path: Path) -> None:
    """Rounded as they come; those with a scale that is fixed, or zero points, are kept finer."""
    tensors, expected = drawn(whole(8, 0, "zero"))
    reader = opened(tmp_path, tensors | more, "Int8Tensor", block_size=[1, 192], dtype=DTYPE, act_quant_kwargs=inputs)
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Integer(8, 0, activation=activation, scales="float32")  # type: ignore[arg-type]
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


@pytest.mark.parametrize("zeros", ["zero", torch.int8, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_intx(bits: int, zeros: Any, tmp_path: Path) -> None:
    tensors, expected = drawn(whole(bits, 64, zeros, torch.bfloat16))
    said = {"target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"}, "block_size": [1, 64], "dtype": DTYPE,
            "activation_quantization": "int8_asym_per_token"}  # fmt: skip
    reader = opened(tmp_path, tensors, "IntxUnpackedToInt8Tensor", **said)
    form = reader.format(WEIGHT)
    assert isinstance(form, Integer)
    assert (form.bits, form.group, form.zeros) == ({1: 2, 5: 8, 6: 8, 7: 8}.get(bits, bits), 64, zeros != "zero")
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("block", "scales"), [([1, 192], (140, 1)), ([140, 192], (1, 1)), ([], ()), ([128, 128], (2, 2))])
@pytest.mark.parametrize("inputs", [None, ROUNDED_FP8])
def test_float8(block: list[int], scales: tuple[int, ...], inputs: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    codes, numbers = e4m3_codes(random, 140, 192), random.uniform(0.5, 2, scales).astype(np.float32)
    tensors = {"qdata": torch.from_numpy(codes).view(torch.float8_e4m3fn), "scale": torch.from_numpy(np.asarray(numbers))}
    reader = opened(tmp_path, tensors, "Float8Tensor", block_size=block, act_quant_kwargs=inputs, dtype=DTYPE, mm_config=None)
    blocks = block == [128, 128]
    assert reader.format(WEIGHT) == Fp8(128 if blocks else 0, "none" if inputs is None else "dynamic")
    spread = np.repeat(np.repeat(numbers, 128, 0), 128, 1)[:140, :192] if blocks else numbers
    np.testing.assert_allclose(read_weight(reader), e4m3(codes) * spread, rtol=1e-6)


@pytest.mark.parametrize(("kind", "maker"), [("Int4Tensor", int4), ("Int4TilePackedTo4dTensor", tiled)])
@pytest.mark.parametrize("rows", [136, 133])
def test_int4(kind: str, maker: Maker, rows: int, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = drawn(maker, rows)
    reader = opened(tmp_path, tensors, kind, block_size=[1, 64], shape=[rows, 192], activation_dtype=DTYPE)
    assert reader.names() == {WEIGHT}
    assert reader.shape(WEIGHT) == (rows, 192)
    assert reader.format(WEIGHT) == Affine(4, 64, "float32")
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-5, atol=1e-7)


def test_where_each_code_of_tensor_cores_lies() -> None:
    """Each place of a tile by itself."""
    for place in (0, 1, 2, 8, 9, 16, 31, 32, 127):
        for row in (0, 3, 7):
            codes = np.zeros((8, 128), np.int64)
            codes[row, place] = 11
            np.testing.assert_array_equal(untiled(torch.from_numpy(tiles(codes)), 0, 8).numpy(), codes)


def test_others_of_a_folder_stay_and_each_shard_says_of_its_own(tmp_path: Path) -> None:
    first, second = drawn(whole(8, 0)), drawn(int4)
    other = NAME.replace("q_proj", "k_proj")
    said = [kept("Int8Tensor", first[0], block_size=[1, 192], dtype=DTYPE), kept("Int4Tensor", second[0], block_size=[1, 64])]
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    plain = {"model.norm.weight": torch.ones(4), f"{NAME}.bias": torch.ones(140)}
    write(tmp_path, {}, {})
    (tmp_path / "model.safetensors").unlink()
    save_file(of_module(first[0]) | plain, tmp_path / one, {WEIGHT: said[0]})
    save_file(of_module(second[0], other), tmp_path / two, {f"{other}.weight": said[1]})
    where = dict.fromkeys([*of_module(first[0]), *plain], one) | dict.fromkeys(of_module(second[0], other), two)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    reader = open_quantized(tmp_path)
    assert reader.names() == {WEIGHT, f"{other}.weight", *plain}
    np.testing.assert_allclose(read_weight(reader), first[1], rtol=1e-6)
    np.testing.assert_allclose(read_weight(reader, f"{other}.weight"), second[1], rtol=1e-5, atol=1e-7)


INTX = {"target_dtype": DTYPE | {"_data": "int4"}, "block_size": [1, 32], "dtype": DTYPE, "activation_quantization": None}
CASES: dict[str, tuple[Maker, str, dict[str, Any]]] = {
    "int8": (whole(8, 0, "zero"), "Int8Tensor", {"block_size": None, "dtype": DTYPE}),
    "intx": (whole(4, 32, "zero"), "IntxUnpackedToInt8Tensor", INTX),
    "int4, tiled": (tiled, "Int4TilePackedTo4dTensor", {"block_size": [1, 64]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_models_are_what_transformers_makes_of_their_weights(case: str, tmp_path: Path) -> None:
    maker, kind, said = CASES[case]
    shapes: dict[str, list[int]] = {}

    def named(rows: int, columns: int, random: np.random.Generator) -> Made:
        tensors, weight = maker(rows, columns, random)
        return {f"_weight_{part}": tensor for part, tensor in tensors.items()} | {"shape": torch.tensor([rows, columns])}, weight

    reference = build(tmp_path, LlamaConfig(**SIZES), named, CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".shape")]:
        shapes[name.removesuffix("shape") + "weight"] = tensors.pop(name).tolist()
    metadata = {name: kept(kind, {}, **said, shape=shape) for name, shape in shapes.items()}
    write(tmp_path, tensors, metadata, json.loads((tmp_path / "config.json").read_text()))
    worker = worker_for(tmp_path, dtype="float32")
    assert worst_difference(worker, reference) < 1e-4
    for ids, output in zip(PROMPTS, run(engine_for(worker), [(ids, greedy(8)) for ids in PROMPTS]), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + list(output.outputs[0].token_ids)])).logits[0]
        assert list(output.outputs[0].token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


# ---- what is refused ----


def bad(maker: Maker, kind: str, error: type[NanovllmError], words: str, said: Any = None, **changes: Any) -> tuple[Any, ...]:
    """said: the weight's metadata, or changes to it. changes: tensors in place of others, or None."""
    tensors: dict[str, Any] = drawn(maker, 32, 128)[0] | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    own = {"block_size": [1, 64] if maker in (int4, tiled) else [1, 32], "dtype": DTYPE, "shape": [32, 128],
           "target_dtype": {"_type": "torch.dtype", "_data": "int4"}}  # fmt: skip
    text = said if isinstance(said, str) else kept(kind, tensors, **own | (said or {}))
    return tensors, text, error, words


I4, I8 = whole(4, 32, "zero"), whole(8, 32)
FLOAT8 = {"qdata": torch.zeros(32, 128).to(torch.float8_e4m3fn), "scale": torch.ones(32, 1), "zero_point": None}
BAD: dict[str, tuple[Any, ...]] = {
    "no codes": bad(I8, "Int8Tensor", CheckpointError, "._weight_qdata' is missing", qdata=None),
    "no scales": bad(I8, "Int8Tensor", CheckpointError, "._weight_scale' is missing", scale=None),
    "scales of other groups": bad(I8, "Int8Tensor", CheckpointError, "expected [32, 4]", scale=torch.ones(32, 2)),
    "a scale is NaN": bad(I8, "Int8Tensor", CheckpointError, "NaN", scale=torch.full((32, 4), np.nan)),
    "floats as codes": bad(I8, "Int8Tensor", CheckpointError, "holds F32, expected I8", qdata=torch.zeros(32, 128)),
    "zero points in between": bad(I4, "IntxUnpackedToInt8Tensor", UnsupportedError, "no whole numbers",
                                  zero_point=torch.full((32, 4), 0.5)),
    "zero points of other groups": bad(I4, "IntxUnpackedToInt8Tensor", CheckpointError, "expected [32, 4]",
                                       zero_point=torch.zeros(32, 1, dtype=torch.int8)),
    "codes of more bits": bad(I4, "IntxUnpackedToInt8Tensor", CheckpointError, "which 4 bits don't hold",
                              qdata=torch.full((32, 128), 9, dtype=torch.int8)),
    "scales for rows together": bad(I8, "Int8Tensor", UnsupportedError, "a scale for 8 x 32", {"block_size": [8, 32]}),
    "blocks of nothing": bad(I8, "Int8Tensor", CheckpointError, "two sizes", {"block_size": [1, 0]}),
    "blocks that are a word": bad(I8, "Int8Tensor", CheckpointError, "two sizes", {"block_size": "row"}),
    "inputs that are scaled": bad(I8, "Int8Tensor", UnsupportedError, "scales what goes into", act_pre_scale=torch.ones(128)),
    "a class that is not known": bad(I8, "NVFP4Tensor", UnsupportedError, "of the class 'NVFP4Tensor'"),
    "numbers of another type": bad(I4, "IntxUnpackedToInt8Tensor", UnsupportedError, "of the type 'uint4'",
                                   {"target_dtype": {"_type": "torch.dtype", "_data": "uint4"}}),
    "a digit that is none": bad(I4, "IntxUnpackedToInt8Tensor", UnsupportedError, "of the type 'int\u00b2'",
                                {"target_dtype": {"_type": "torch.dtype", "_data": "int\u00b2"}}),
    "zero points without end": bad(I4, "IntxUnpackedToInt8Tensor", CheckpointError, "infinite",
                                   zero_point=torch.full((32, 4), np.inf)),
    "no class": bad(I8, "", CheckpointError, "has no '_type'", json.dumps({"_data": {}})),
    "metadata that is no JSON": bad(I8, "", CheckpointError, "metadata of", "{"),
    "metadata that is a list": bad(I8, "", CheckpointError, "metadata of", "[]"),
    "metadata without end": bad(I8, "", CheckpointError, "at most 20000 are read", "{" + " " * 20_001 + "}"),
    "e5m2": bad(I8, "Float8Tensor", CheckpointError, "holds F8_E5M2", {"block_size": [1, 128]},
                **FLOAT8 | {"qdata": torch.zeros(32, 128).to(torch.float8_e5m2)}),
    "fp8 in groups": bad(I8, "Float8Tensor", UnsupportedError, "a scale for 1 x 32", **FLOAT8),
    "int4 in groups of 24": bad(int4, "Int4Tensor", UnsupportedError, "a scale for 1 x 24", {"block_size": [1, 24]}),
    "int4 without zero points": bad(int4, "Int4Tensor", CheckpointError, "zero_point' is missing", zero_point=None),
    "int4, scales by rows": bad(int4, "Int4Tensor", CheckpointError, "the shape [32, 2]", scale=torch.ones(32, 2)),
    "tiles of another shape": bad(tiled, "Int4TilePackedTo4dTensor", CheckpointError, "which 64 x 128", {"shape": [64, 128]}),
    "tiles without a shape": bad(tiled, "Int4TilePackedTo4dTensor", CheckpointError, "'shape' must be", {"shape": None}),
    "tiles, other groups": bad(tiled, "Int4TilePackedTo4dTensor", CheckpointError, "expected [32, 32, 2]",
                               {"block_size": [1, 32]}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, said, error, words = BAD[case]
    write(tmp_path, of_module(tensors), {WEIGHT: said})
    with pytest.raises(NanovllmError) as raised:
        for _ in open_quantized(tmp_path).slices(WEIGHT):
            pass
    assert type(raised.value) is error
    assert words in raised.value.message
    assert raised.value.hint


def test_tensors_of_which_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path, of_module(drawn(I8)[0]), {})
    with pytest.raises(CheckpointError, match=r"metadata of .* is missing"):
        open_quantized(tmp_path)


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"model.layers.0.mlp.experts._gate_up_proj_qdata": torch.zeros(2, 4, 4, dtype=torch.int8)}, {})
    with pytest.raises(UnsupportedError, match="_gate_up_proj_qdata' is of no layer's weight"):
        open_quantized(tmp_path)
