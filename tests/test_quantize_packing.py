"""The tensors of a compressed-tensors folder, against the package that defines them, and against its layout worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quantization.compressed_tensors import check_writable, encode, quantization_config, tensors_of

SPECS = (
    *(
        "int8",
        "int8-weight-only",
        "int8:group=32",
        "int8:zeros",
        "int4:group=32",
        "int4:group=64:zeros",
        "int4:group=0",
    ),
    *("fp8", "fp8-weight-only", "fp8:block=128"),
)


def weight_of(form: Format, rows: int = 136, width: int = 192) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(len(form.name))) * 0.1


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(136, 192), (1, 128), (33, 64)])
def test_the_package_reads_the_numbers_that_were_chosen(spec: str, shape: tuple[int, int]) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    form = parse_format(spec)
    if spec == "fp8:block=128" and shape[1] % 128:
        shape = (shape[0], 256)
    rows = form.quantize(weight_of(form, *shape))
    config: Any = QuantizationConfig.model_validate(quantization_config({"layer": form}))
    scheme = config.config_groups["group_0"]
    names = [out.name.removeprefix("layer.") for out in tensors_of(form, "layer.weight", shape)]
    state = dict(zip(names, encode(form, rows), strict=True))
    got = BaseCompressor.get_value_from_registry(str(scheme.format)).decompress(state, scheme)["weight"]
    wanted = form.dequantize(rows)
    rounding = 2**-8 if got.dtype == torch.bfloat16 else 1e-6  # the package multiplies in the type of the scales
    assert torch.allclose(got.float(), wanted, rtol=rounding, atol=0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(136, 256), (3, 256)])
def test_tensors_are_as_they_were_announced(spec: str, shape: tuple[int, int]) -> None:
    form = parse_format(spec)
    outs = tensors_of(form, "a.weight", shape)
    encoded = encode(form, form.quantize(weight_of(form, *shape)))
    assert [(out.shape, out.dtype) for out in outs] == [(tuple(t.shape), t.dtype) for t in encoded]


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [("int8", 256 * (384 + 2)), ("fp8", 256 * (384 + 4)), ("fp8:block=128", 256 * 384 + 4 * 2 * 3), ("int4:group=32", 256 * 216)],
)
def test_a_weight_takes_the_bytes_that_are_planned(spec: str, num_bytes: int) -> None:
    """Codes of 256 rows of 384 columns and their scales: of bfloat16, but for fp8's."""
    form = parse_format(spec)
    written = [out for out in tensors_of(form, "a.weight", (256, 384)) if not out.name.endswith("_shape")]
    assert sum(out.num_bytes for out in written) == 256 * form.row_bytes(384) == num_bytes


def test_nibbles_are_packed_from_the_lowest_bits_up() -> None:
    from nanovllm_cli.quant.format import Integer
    from nanovllm_cli.quant.rows import IntegerRows

    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    zeros = torch.tensor([[1], [2], [15]], dtype=torch.uint8)
    rows = IntegerRows(codes.repeat(3, 1), torch.ones(3, 1, dtype=torch.bfloat16), zeros)
    packed, _, shape, packed_zeros = encode(Integer(4, 0, zeros=True), rows)
    assert packed[0].tolist() == [0x76543210, 0xFEDCBA98 - 2**32]
    assert packed_zeros.tolist() == [[0xF21]]
    assert shape.tolist() == [3, 16]


def test_int8_is_stored_around_zero() -> None:
    from nanovllm_cli.quant.rows import IntegerRows

    rows = IntegerRows(torch.tensor([[0, 1, 127, 128, 255]], dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16))
    assert encode(parse_format("int8"), rows)[0].tolist() == [[-128, -127, -1, 0, 127]]


TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8, "group_size": None}
GROUP = {"strategy": "group", "dynamic": True, "symmetric": True, "num_bits": 8, "group_size": 128, "type": "float"}


@pytest.mark.parametrize(
    ("spec", "kind", "weights", "activations"),
    [
        ("int8", "int-quantized", ("int", 8, True, "channel", None), TOKEN | {"type": "int"}),
        ("int8-weight-only", "pack-quantized", ("int", 8, True, "channel", None), None),
        ("int8:group=32", "pack-quantized", ("int", 8, True, "group", 32), None),
        ("int8:zeros", "pack-quantized", ("int", 8, False, "channel", None), None),
        ("int4:group=32", "pack-quantized", ("int", 4, True, "group", 32), None),
        ("int4:group=64:zeros", "pack-quantized", ("int", 4, False, "group", 64), None),
        ("fp8", "float-quantized", ("float", 8, True, "channel", None), TOKEN | {"type": "float"}),
        ("fp8-weight-only", "naive-quantized", ("float", 8, True, "channel", None), None),
        ("fp8:block=128", "float-quantized", ("float", 8, True, "block", None), GROUP),
    ],
)
def test_config_says_what_the_numbers_are_in_the_packages_words(
    spec: str, kind: str, weights: tuple[Any, ...], activations: dict[str, Any] | None
) -> None:
    """As `compressed-tensors` documents its fields, with which vLLM chooses a kernel."""
    (group,) = quantization_config({"a": parse_format(spec)})["config_groups"].values()
    fields = ("type", "num_bits", "symmetric", "strategy", "group_size")
    assert tuple(group["weights"][field] for field in fields) == weights
    assert (group["format"], group["input_activations"], group["output_activations"]) == (kind, activations, None)
    assert group["weights"].get("block_structure") == ([128, 128] if spec == "fp8:block=128" else None)
    names = [out.name for out in tensors_of(parse_format(spec), "a.weight", (256, 256))]
    packed = ["a.weight_packed", "a.weight_scale", "a.weight_shape"] + ["a.weight_zero_point"] * (not weights[2])
    assert names == (packed if kind == "pack-quantized" else ["a.weight", "a.weight_scale"])


@pytest.mark.parametrize("spec", ["nf4", "int2", "int3", "q4_0", "q4_k"])
def test_formats_without_a_place_are_refused_by_name(spec: str) -> None:
    with pytest.raises(UnsupportedError, match=spec):
        check_writable(parse_format(spec))


def test_a_mixed_model_says_which_layer_has_which_format() -> None:
    int4, int8 = parse_format("int4:group=32"), parse_format("int8")
    config = quantization_config({"a": int4, "b": int8, "c": int4, "lm_head": None})
    assert config["format"] == "mixed-precision"
    groups = config["config_groups"].values()
    assert [(group["targets"], group["format"]) for group in groups] == [
        (["a", "c"], "pack-quantized"),
        (["b"], "int-quantized"),
    ]
    assert config["ignore"] == ["lm_head"]


def test_a_model_in_one_format_targets_its_linear_layers() -> None:
    config = quantization_config({"a": parse_format("fp8"), "lm_head": None})
    assert config["format"] == "float-quantized"
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
