"""FP8 checkpoints: values against the e4m3 table of the specification, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant.format import Fp8
from nanovllm_cli.quant.rows import Fp8Rows
from quantized_checkpoints import (
    NAME,
    assert_reads,
    check_refused,
    e4m3,
    fp8,
    module,
    open_quantized,
    read_weight,
    small_slices,
    write,
)

WEIGHT = f"{NAME}.weight"
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
SHAPES = [(1, 1), (31, 33), (128, 128), (300, 257)]


def random() -> np.random.Generator:
    return np.random.default_rng(5)


def test_the_table_is_the_one_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).double().numpy()
    finite = ~np.isnan(expected)
    assert finite.sum() == 254
    np.testing.assert_array_equal(e4m3(codes.numpy())[finite], expected[finite])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_128(shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = fp8("block", "weight_scale_inv", scale_dtype=dtype)(*shape, random())
    reader = assert_reads(tmp_path, tensors, BLOCKS, expected)
    assert reader.format(WEIGHT) == Fp8(128, "dynamic")


@pytest.mark.parametrize("layout", ["tensor", "row"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_a_tensor_or_row(layout: str, shape: tuple[int, int], tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = fp8(layout)(*shape, random())
    assert assert_reads(tmp_path, tensors, TENSOR, expected).format(WEIGHT) == Fp8(0, "dynamic")


def test_a_scale_without_dimensions(tmp_path: Path) -> None:
    tensors, expected = fp8("tensor")(5, 7, random())
    tensors["weight_scale"] = tensors["weight_scale"].reshape(())
    assert_reads(tmp_path, tensors, TENSOR, expected)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    tensors, _ = fp8("block", "weight_scale_inv")(200, 130, random())
    exponents = torch.tensor([[120, 121], [127, 119]], dtype=torch.uint8)
    tensors["weight_scale_inv"] = exponents.view(torch.float8_e8m0fnu)
    scales = np.repeat(np.repeat(2.0 ** (exponents.double().numpy() - 127), 128, 0), 128, 1)[:200, :130]
    expected = e4m3(tensors["weight"].view(torch.uint8).numpy()) * scales
    assert_reads(tmp_path, tensors, BLOCKS | {"scale_fmt": "ue8m0"}, expected)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_static_scales_of_activations_come_with_the_rows(name: str, tmp_path: Path) -> None:
    tensors, expected = fp8("tensor", static=True)(9, 16, random())
    tensors[name] = tensors.pop("input_scale")
    reader = assert_reads(tmp_path, tensors, STATIC, expected)
    assert reader.format(WEIGHT) == Fp8(0, "static")
    rows, _ = next(reader.slices(WEIGHT))
    assert isinstance(rows, Fp8Rows)
    assert rows.input_scale is not None
    assert float(rows.input_scale) == pytest.approx(0.02)


def test_weights_alone(tmp_path: Path) -> None:
    """As Quark says it: inputs stay as they are, where one that says nothing means that they are rounded as they come."""
    tensors, expected = fp8("row")(33, 64, np.random.default_rng(1))
    for config, activation in ((TENSOR | {"activation_scheme": None}, "none"), ({"quant_method": "fp8"}, "dynamic")):
        reader = assert_reads(tmp_path, tensors, config, expected)
        assert reader.format(f"{NAME}.weight") == Fp8(0, activation)  # type: ignore[arg-type]


def test_fbgemm(tmp_path: Path) -> None:
    tensors, expected = fp8("row")(33, 48, random())
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    assert assert_reads(tmp_path, tensors, config, expected).format(WEIGHT) == Fp8(0, "dynamic")


def test_what_was_left_alone_is_plain(tmp_path: Path) -> None:
    tensors, expected = fp8("block", "weight_scale_inv")(128, 128, random())
    plain = torch.randn(3, 5).bfloat16()
    others = {"lm_head.weight": plain, "model.norm.weight": torch.ones(4), f"{NAME}.bias": torch.ones(128)}
    scales = {"model.layers.0.self_attn.k_scale": torch.ones(1), f"{NAME}.v_scale": torch.ones(1)}
    reader = open_quantized(
        write(tmp_path, module(tensors) | others | scales, BLOCKS | {"ignored_layers": ["lm_head"]})
    )
    assert reader.names() == {WEIGHT, *others}
    assert reader.format("lm_head.weight") is None
    assert reader.shape("lm_head.weight") == (3, 5)
    assert reader.num_bytes("lm_head.weight") == 30
    (rows, first), *_ = reader.slices("lm_head.weight")
    assert first == 0
    assert isinstance(rows, torch.Tensor)
    assert torch.equal(rows, plain)
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


def damaged(tensors: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


def nan_code(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8).clone()
    codes[-1, -1] = 0xFF
    return codes.view(torch.float8_e4m3fn)


GOOD = fp8("block", "weight_scale_inv")(150, 200, random())[0]
PLAIN = fp8("tensor", static=True)(5, 7, random())[0]
BAD: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], type[NanovllmError], str]] = {
    "no scales": (damaged(GOOD, weight_scale_inv=None), BLOCKS, CheckpointError, f"{NAME}.weight_scale_inv' is missing"),
    "no weight scale": (damaged(PLAIN, weight_scale=None), TENSOR, CheckpointError, f"{NAME}.weight_scale' is missing"),
    "scales of another shape": (
        damaged(GOOD, weight_scale_inv=torch.ones(2, 3)), BLOCKS, CheckpointError, "shape [2, 3], expected [2, 2]",
    ),
    "integer scales": (
        damaged(GOOD, weight_scale_inv=torch.ones(2, 2, dtype=torch.int32)), BLOCKS, CheckpointError, "holds I32",
    ),
    "a scale of zero": (damaged(GOOD, weight_scale_inv=torch.zeros(2, 2)), BLOCKS, CheckpointError, "scales that are 0"),
    "a scale too large": (
        damaged(GOOD, weight_scale_inv=torch.full((2, 2), 1e36)), BLOCKS, CheckpointError, "scales of up to 1.0e+36, with which",
    ),
    "a negative scale": (damaged(GOOD, weight_scale_inv=-torch.ones(2, 2)), BLOCKS, CheckpointError, "scales that are 0"),
    "a scale that is NaN": (
        damaged(GOOD, weight_scale_inv=torch.full((2, 2), torch.nan)), BLOCKS, CheckpointError, "weight_scale_inv' has scales",
    ),
    "a code that is NaN": (damaged(GOOD, weight=nan_code(GOOD["weight"])), BLOCKS, CheckpointError, "NaN"),
    "a weight of three dimensions": (
        damaged(GOOD, weight=GOOD["weight"].reshape(2, 75, 200)), BLOCKS, CheckpointError, "shape [2, 75, 200]",
    ),
    "an empty weight": (
        damaged(GOOD, weight=GOOD["weight"][:0]), BLOCKS, CheckpointError, "holds nothing",
    ),
    "e5m2": (damaged(GOOD, weight=torch.zeros(150, 200).to(torch.float8_e5m2)), BLOCKS, UnsupportedError, "F8_E5M2"),
    "no input scale": (damaged(PLAIN, input_scale=None), STATIC, CheckpointError, "input_scale' is missing"),
    "an input scale of zero": (damaged(PLAIN, input_scale=torch.zeros(1)), STATIC, CheckpointError, "input_scale"),
    "a scale a shard": (damaged(PLAIN, weight_scale=torch.ones(3)), TENSOR, CheckpointError, "shape [3]"),
    "other blocks": (GOOD, BLOCKS | {"weight_block_size": [1, 128]}, UnsupportedError, "1 x 128"),
    "blocks of three": (GOOD, BLOCKS | {"weight_block_size": [1, 128, 1]}, CheckpointError, "weight_block_size"),
    "blocks of text": (GOOD, BLOCKS | {"weight_block_size": "128"}, CheckpointError, "weight_block_size"),
    "static blocks": (GOOD, BLOCKS | {"activation_scheme": "static"}, UnsupportedError, "static"),
    "an unknown scheme": (GOOD, BLOCKS | {"activation_scheme": "later"}, UnsupportedError, "later"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *BAD[case])
