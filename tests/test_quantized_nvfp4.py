"""NVFP4 as compressed-tensors and NVIDIA's Model Optimizer store it, and FP8 as the latter does: packed by hand from their
descriptions, compressed-tensors where it is installed by the library itself; and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.quant.format import Blocks, Fp8
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert import plan
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.weight_reader import WeightReader
from quantized_checkpoints import (
    NAME,
    Tensors,
    check_refused,
    e4m3,
    e4m3_codes,
    module,
    nvfp4,
    open_quantized,
    read_weight,
    small_slices,
    write,
)  # fmt: skip
from test_quantized_compressed import library, needs_library, settings

WEIGHT = f"{NAME}.weight"
ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
INPUTS = ARGS | {"dynamic": "local"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
LAYOUT = "nvfp4-pack-quantized"


def by_hand(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    return nvfp4("modelopt")(rows, columns, np.random.default_rng(1))


def test_modelopt(tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = by_hand(140, 192)
    reader = open_quantized(write(tmp_path, module(tensors), MODELOPT))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Blocks("NVFP4")
    assert reader.num_bytes(WEIGHT) == 140 * (96 + 12) + 2 * 4
    np.testing.assert_allclose(read_weight(reader), expected, rtol=2e-7)


@pytest.mark.parametrize("inputs", [None, INPUTS])
def test_compressed_tensors(inputs: Any, tmp_path: Path) -> None:
    """Inputs of four bits are kept finer than that."""
    tensors, expected = nvfp4("compressed")(33, 64, np.random.default_rng(2))
    if inputs is None:
        del tensors["input_global_scale"]
    reader = open_quantized(write(tmp_path, module(tensors), settings(LAYOUT, ARGS, inputs)))
    assert reader.names() == {WEIGHT}
    np.testing.assert_allclose(read_weight(reader), expected, rtol=3e-7)


@needs_library
def test_as_the_library_writes_it(tmp_path: Path) -> None:
    compressor, scheme = library(LAYOUT, ARGS | {"scale_dtype": torch.float8_e4m3fn})
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 128, generator=generator)
    whole = 448 * 6 / weight.abs().amax().reshape(1)
    scales = (weight.view(70, 8, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    given = {"weight": weight, "weight_scale": scales.float(), "weight_global_scale": whole}
    tensors = compressor.compress(dict(given), scheme)
    expected = compressor.decompress(dict(tensors), scheme)["weight"].double().numpy()
    reader = open_quantized(write(tmp_path, module(tensors), settings(LAYOUT, ARGS, INPUTS)))
    np.testing.assert_allclose(read_weight(reader), expected, rtol=2e-2)  # the library computes in bfloat16
    assert np.abs(expected - weight.numpy()).max() < 0.5


def test_every_scale_that_is_a_number(tmp_path: Path) -> None:
    """All 127 e4m3 numbers from 0 to 448, and -0."""
    codes = torch.arange(128 * 32, dtype=torch.int64).reshape(128, 32).to(torch.uint8)
    scales = torch.arange(128, dtype=torch.uint8).repeat_interleave(4).view(128, 4)
    scales[127] = 0x80
    tensors = {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_scale_2": torch.tensor(0.5)}
    read = read_weight(open_quantized(write(tmp_path, module(tensors), MODELOPT)))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # OCP MX 1.0, table 6
    values = np.concatenate([numbers, -numbers])[np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(128, 64)]
    np.testing.assert_array_equal(read, values * np.repeat(e4m3(scales.numpy() & 127), 16, 1) * 0.5)


def test_a_part_of_a_model_may_be_fp8(tmp_path: Path) -> None:
    """MIXED_PRECISION: what a module's tensors are says how it is kept."""
    random = np.random.default_rng(3)
    other = NAME.replace("q_proj", "o_proj")
    first, expected = by_hand(64, 64)
    codes, blocks = e4m3_codes(random, 64, 64), e4m3_codes(random, 200, 130)
    fp8 = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    scales = np.array([[1, 2], [4, 0.5]])
    third = {"weight": torch.from_numpy(blocks).view(torch.float8_e4m3fn), "weight_scale": torch.from_numpy(scales).float()}
    names = (other, other.replace("o_proj", "k_proj"), other.replace("o_proj", "v_proj"))
    tensors = module(first) | module(fp8 | {"input_scale": torch.tensor(0.25)}, names[0])
    tensors |= module(fp8, names[1]) | module(third, names[2])
    layers = {NAME: {"quant_algo": "NVFP4", "group_size": 16}, other: {"quant_algo": "FP8"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    reader = open_quantized(write(tmp_path, tensors, config))
    forms = [reader.format(f"{name}.weight") for name in (NAME, *names)]
    assert forms == [Blocks("NVFP4"), Fp8(0, "static"), Fp8(0, "dynamic"), Fp8(128, "none")]
    np.testing.assert_allclose(read_weight(reader), expected, rtol=2e-7)
    for name in names[:2]:
        np.testing.assert_array_equal(read_weight(reader, f"{name}.weight"), e4m3(codes) * 0.5)
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :130]
    np.testing.assert_array_equal(read_weight(reader, f"{names[2]}.weight"), e4m3(blocks) * spread)


def test_the_halved_scales_of_the_table_are_those_of_gguf() -> None:
    assert BLOCKS["NVFP4"].d_values is not None
    np.testing.assert_array_equal(2 * np.array(BLOCKS["NVFP4"].d_values[:127]), e4m3(np.arange(127, dtype=np.uint8)))


# ---- GGUF: llama.cpp keeps what multiplies a weight in a tensor beside it ----


def gguf_file(folder: Path, arch: str = "llama", **beside: list[float]) -> tuple[WeightReader, np.ndarray, np.ndarray]:
    """A file with a weight and a stack of three in NVFP4, and these tensors; what the blocks say, float64."""
    random = np.random.default_rng(5)

    def blocks(*shape: int) -> np.ndarray:
        data = random.integers(0, 256, (*shape, 36), dtype=np.uint8)
        data[..., :4] = data[..., :4] % 0x7F
        return data.reshape(*shape[:-1], -1)

    one, stack, nvfp4_type = blocks(33, 2), blocks(3, 33, 1), gguf.GGMLQuantizationType.NVFP4
    writer = gguf.GGUFWriter(folder / "m.gguf", arch)
    writer.add_tensor("blk.0.ffn_up.weight", one, raw_dtype=nvfp4_type)
    writer.add_tensor("blk.0.ffn_down_exps.weight", stack, raw_dtype=nvfp4_type)
    for name, values in beside.items():
        writer.add_tensor(f"blk.0.{name.replace('__', '.')}", np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = [dequantize(data, nvfp4_type).astype(np.float64) for data in (one, stack)]
    return open_reader(open_checkpoint(folder / "m.gguf")), values[0], values[1]


def test_numbers_beside_weights_of_a_gguf_file(tmp_path: Path) -> None:
    beside = {"ffn_up__scale": [0.25], "ffn_up__input_scale": [3.0], "ffn_down_exps__scale": [0.5, 3.0, 2.0**-40]}
    reader, one, stack = gguf_file(tmp_path, **beside)
    assert reader.names() == {"blk.0.ffn_up.weight", *(f"blk.0.ffn_down_exps.{e}.weight" for e in range(3))}
    np.testing.assert_array_equal(read_weight(reader, "blk.0.ffn_up.weight"), one * 0.25)
    for e, factor in enumerate((0.5, 3, 2.0**-40)):
        np.testing.assert_allclose(read_weight(reader, f"blk.0.ffn_down_exps.{e}.weight"), stack[e] * factor, rtol=1e-7)


def test_without_such_numbers_blocks_are_what_they_say(tmp_path: Path) -> None:
    reader, one, stack = gguf_file(tmp_path)
    np.testing.assert_array_equal(read_weight(reader, "blk.0.ffn_up.weight"), one)
    np.testing.assert_array_equal(read_weight(reader, "blk.0.ffn_down_exps.2.weight"), stack[2])


def test_gemma_4_has_numbers_of_its_own_there(tmp_path: Path) -> None:
    """It multiplies what its experts give by them: once is enough."""
    reader, _, stack = gguf_file(tmp_path, "gemma4", ffn_down_exps__scale=[0.5, 3.0, 2.0])
    assert "blk.0.ffn_down_exps.scale" in reader.names()
    np.testing.assert_array_equal(read_weight(reader, "blk.0.ffn_down_exps.2.weight"), stack[2])


@pytest.mark.parametrize(
    ("values", "words"),
    [([0.0], "0.0e+00"), ([-1.0], "-1.0e+00"), ([np.nan], "nan"), ([np.inf], "inf"), ([1e36], "1.0e+36"), ([1.0, 1.0], "[2]")],
)
def test_bad_numbers_beside_weights(values: list[float], words: str, tmp_path: Path) -> None:
    reader, *_ = gguf_file(tmp_path, ffn_up__scale=values)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read_weight(reader, "blk.0.ffn_up.weight")


def test_other_types_are_made_of_originals(tmp_path: Path) -> None:
    gguf_file(tmp_path, ffn_up__scale=[0.5])
    with open_checkpoint(tmp_path / "m.gguf") as source:
        with pytest.raises(UnsupportedError, match=r"'blk.0.ffn_up.weight' is NVFP4 with a number beside it"):
            plan(source, "gguf", "q8_0")
        assert {step.after for step in plan(source, "gguf").steps} == {"NVFP4", "F32"}


def test_a_stack_has_as_many_numbers_as_matrices(tmp_path: Path) -> None:
    reader, *_ = gguf_file(tmp_path, ffn_down_exps__scale=[1.0, 2.0])
    with pytest.raises(CheckpointError, match=re.escape("[2]")):
        read_weight(reader, "blk.0.ffn_down_exps.0.weight")


# ---- what is refused ----


def changed(**more: torch.Tensor | None) -> Tensors:
    tensors: dict[str, Any] = by_hand(32, 64)[0] | more
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


NARROW = {"weight": torch.zeros(4, 24, dtype=torch.uint8), "weight_scale": torch.ones(4, 3).to(torch.float8_e4m3fn)}
SCALES = torch.ones(32, 4).to(torch.float8_e4m3fn)
BAD: dict[str, tuple[Tensors, type[Exception], str]] = {
    "no scales": (changed(weight_scale=None), CheckpointError, "q_proj.weight_scale' is missing"),
    "scales of other groups": (changed(weight_scale=SCALES[:, :2]), CheckpointError, "expected [32, 4]"),
    "scales of another type": (changed(weight_scale=torch.ones(32, 4)), CheckpointError, "holds F32, expected F8_E4M3"),
    "scales that are NaN": (changed(weight_scale=SCALES.float().mul(np.nan).to(torch.float8_e4m3fn)), CheckpointError, "NaN"),
    "scales below 0": (changed(weight_scale=(-SCALES.float()).to(torch.float8_e4m3fn)), CheckpointError, "below 0"),
    "codes of another type": (changed(weight=torch.zeros(32, 32)), CheckpointError, "holds F32, expected U8"),
    "no codes": (changed(weight=None), CheckpointError, "q_proj.weight' is missing"),
    "several factors": (changed(weight_scale_2=torch.ones(32)), CheckpointError, "weight_scale_2' has the shape [32]"),
    "a factor of 0": (changed(weight_scale_2=torch.tensor(0.0)), CheckpointError, "0 or below"),
    "a factor below 0": (changed(weight_scale_2=torch.tensor(-1.0)), CheckpointError, "0 or below"),
    "an infinite factor": (changed(weight_scale_2=torch.tensor(torch.inf)), CheckpointError, "infinite"),
    "a factor that makes infinities": (changed(weight_scale_2=torch.tensor(3e35)), CheckpointError, "infinite"),
    "rows of 48": (NARROW | {"weight_scale_2": torch.tensor(1.0)}, UnsupportedError, "48"),
    "inputs that are scaled": (changed(pre_quant_scale=torch.ones(64)), UnsupportedError, "pre_quant_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_refused(name: str, tmp_path: Path) -> None:
    tensors, kind, words = BAD[name]
    check_refused(tmp_path, tensors, MODELOPT, kind, words)


@pytest.mark.parametrize(("factor", "words"), [(1e-39, "infinite"), (0.0, "0 or below"), (3e38, "infinite")])
def test_what_divides_must_leave_numbers(factor: float, words: str, tmp_path: Path) -> None:
    tensors, _ = nvfp4("compressed")(32, 64, np.random.default_rng(2))
    tensors["weight_global_scale"] = torch.tensor([factor])
    check_refused(tmp_path, tensors, settings(LAYOUT, ARGS), CheckpointError, words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "algorithm 'NVFP4_AWQ'"),
        ({"quant_algo": "W4A8_AWQ"}, "algorithm 'W4A8_AWQ'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}}}, "algorithm 'W4A16_AWQ'"),
    ],
)
def test_other_algorithms_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    check_refused(tmp_path, by_hand(32, 64)[0], MODELOPT | config, UnsupportedError, words)


def test_a_config_must_name_an_algorithm(tmp_path: Path) -> None:
    check_refused(tmp_path, by_hand(32, 64)[0], {"quant_method": "modelopt"}, CheckpointError, "no 'quant_algo'")
