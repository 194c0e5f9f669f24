"""compressed-tensors checkpoints: packed by hand from the library's description, and where it is installed written and read back
by the library itself; and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant.format import Blocks, Fp8, Integer
from nanovllm_cli.quant.rows import Fp8Rows
from quantized_checkpoints import (
    NAME,
    Tensors,
    check_refused,
    e4m3,
    e4m3_codes,
    module,
    open_quantized,
    packed,
    read_weight,
    small_slices,
    write,
)  # fmt: skip

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install -e '.[peers]')",
)
WEIGHT = f"{NAME}.weight"
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def settings(layout: str, weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    """quantization_config."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": 1.5,
        **more,
    }  # fmt: skip


def scale_shape(weights: dict[str, Any], rows: int, columns: int) -> tuple[int, ...]:
    match weights["strategy"]:
        case "tensor":
            return (1,)
        case "channel":
            return (rows, 1)
        case "group":
            return (rows, columns // weights["group_size"])
    down, across = weights["block_structure"]
    return (-(-rows // down), -(-columns // across))


def compress(
    layout: str, weights: dict[str, Any], rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensors, np.ndarray]:
    """A module's tensors, packed by hand, and the weight that they stand for, float64."""
    random = np.random.default_rng(11)
    scales = (0.8 + random.random(scale_shape(weights, rows, columns))) * 2 / largest_code(weights)
    tensors = {"weight_scale": torch.from_numpy(scales).to(dtype)}

    def spread(values: np.ndarray) -> np.ndarray:
        if weights["strategy"] == "block":
            return np.repeat(np.repeat(values, 128, 0), 128, 1)[:rows, :columns]
        return np.repeat(values, columns // values.shape[1], 1) if values.ndim == 2 else values

    numbers = spread(tensors["weight_scale"].double().numpy())
    if weights["type"] == "float":
        codes = e4m3_codes(random, rows, columns)
        return {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn)} | tensors, e4m3(codes) * numbers
    bits, half = weights["num_bits"], 2 ** (weights["num_bits"] - 1)
    codes = random.integers(-half, half, (rows, columns))
    zeros = random.integers(-half, half, scales.shape) * (not weights["symmetric"])
    if layout == "pack-quantized":
        tensors["weight_packed"] = torch.from_numpy(packed((codes + half).T, bits).T.copy())
        tensors["weight_shape"] = torch.tensor([rows, columns])
    else:
        tensors["weight"] = torch.from_numpy(codes.astype(np.int8))
    if not weights["symmetric"]:
        stored = packed(zeros + half, bits) if layout == "pack-quantized" else zeros.astype(np.int8)
        tensors["weight_zero_point"] = torch.from_numpy(stored)
    return tensors, (codes - spread(zeros)) * numbers


def by_the_library(
    layout: str, weights: dict[str, Any], rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensors, np.ndarray]:
    """A module's tensors as the library writes them, and the weight as it reads them, float64."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    shape = scale_shape(weights, rows, columns)
    tensors = {
        "weight": weight,
        "weight_scale": ((0.8 + torch.rand(shape, generator=generator)) * 2 / largest_code(weights)).to(dtype),
    }
    if not weights["symmetric"]:
        half = 2 ** (weights["num_bits"] - 1)
        tensors["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    compressor, scheme = library(layout, weights)
    stored = compressor.compress(tensors, scheme)
    return stored, read_by_the_library(stored, layout, weights)


def read_by_the_library(stored: Tensors, layout: str, weights: dict[str, Any]) -> np.ndarray:
    compressor, scheme = library(layout, weights)
    exact = {name: tensor.double() if name == "weight_scale" else tensor for name, tensor in stored.items()}
    return compressor.decompress(exact, scheme)["weight"].double().numpy()


def library(layout: str, weights: dict[str, Any]) -> tuple[Any, Any]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    return BaseCompressor.get_value_from_registry(layout), scheme


def largest_code(weights: dict[str, Any]) -> int:
    return 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1)


def integers(bits: int, strategy: str, group: int | None = None, symmetric: bool = True) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": group,
        "symmetric": symmetric,
        "dynamic": False,
    }


def floats(strategy: str) -> dict[str, Any]:
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **blocks}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, tuple[int, int], Any]] = {
    "int8, channels": (
        "int-quantized", integers(8, "channel"), INT8_INPUTS, (300, 33), Integer(8, 0, False, "int8", False, "bfloat16"),
    ),
    "int8, a tensor": (
        "int-quantized", integers(8, "tensor"), INT8_INPUTS, (31, 40), Integer(8, 0, False, "int8", False, "bfloat16"),
    ),
    "int8, groups": (
        "int-quantized", integers(8, "group", 32), INT8_INPUTS, (130, 64), Integer(8, 32, False, "int8", False, "bfloat16"),
    ),
    "int8, zero points": (
        "int-quantized", integers(8, "channel", symmetric=False), INT8_INPUTS, (130, 33),
        Integer(8, 0, True, "int8", False, "bfloat16"),
    ),
    "int8, naive, weights only": (
        "naive-quantized", integers(8, "channel"), None, (17, 33), Integer(8, 0, False, "none", False, "bfloat16"),
    ),
    "int4, one a byte": (
        "naive-quantized", integers(4, "group", 32), None, (17, 64), Integer(4, 32, False, "int8", False, "bfloat16"),
    ),
    **{
        f"{bits} bits, packed, {'symmetric' if symmetric else 'zero points'}": (
            "pack-quantized", integers(bits, "group", 32, symmetric), None, (300, 96),
            Integer(bits, 32, not symmetric, "none" if bits == 8 else "int8", False, "bfloat16"),  # type: ignore[arg-type]
        )
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
    },
    "4 bits, packed, channels": (
        "pack-quantized", integers(4, "channel"), None, (33, 41), Integer(4, 0, False, "int8", False, "bfloat16"),
    ),
    "3 bits, packed, channels, zero points": (
        "pack-quantized", integers(3, "channel", symmetric=False), None, (141, 43),
        Integer(3, 0, True, "int8", False, "bfloat16"),
    ),
    "4 bits and int8 inputs": (
        "pack-quantized", integers(4, "group", 64), INT8_INPUTS, (33, 128), Integer(4, 64, False, "int8", False, "bfloat16"),
    ),
    "8 bits, packed, and int8 inputs": (
        "pack-quantized", integers(8, "channel"), INT8_INPUTS, (33, 41), Integer(8, 0, False, "int8", False, "bfloat16"),
    ),
    "fp8, channels": ("float-quantized", floats("channel"), FP8_INPUTS, (300, 33), Fp8(0, "dynamic")),
    "fp8, a tensor": ("float-quantized", floats("tensor"), FP8_INPUTS, (31, 33), Fp8(0, "dynamic")),
    "fp8, weights only": ("naive-quantized", floats("tensor"), None, (31, 33), Fp8(0, "none")),
    "fp8, blocks": (
        "float-quantized", floats("block"), FP8_INPUTS | {"strategy": "group", "group_size": 128}, (300, 384),
        Fp8(128, "dynamic"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", [compress, pytest.param(by_the_library, marks=needs_library)])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_what_was_written(case: str, make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    layout, weights, inputs, shape, form = CASES[case]
    tensors, expected = make(layout, weights, *shape, torch.bfloat16)
    reader = open_quantized(write(tmp_path, module(tensors), settings(layout, weights, inputs)))
    assert reader.names() == {WEIGHT}
    assert reader.shape(WEIGHT) == shape
    assert reader.format(WEIGHT) == form
    assert reader.num_bytes(WEIGHT) == sum(tensor.nbytes for tensor in tensors.values())
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=0)


@needs_library
@pytest.mark.parametrize("case", CASES)
def test_the_library_reads_what_is_packed_by_hand(case: str) -> None:
    layout, weights, _, shape, _ = CASES[case]
    tensors, expected = compress(layout, weights, *shape, torch.bfloat16)
    np.testing.assert_allclose(read_by_the_library(tensors, layout, weights), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = integers(4, "group", 32)
    tensors, expected = compress("pack-quantized", weights, 33, 64, dtype)
    reader = open_quantized(write(tmp_path, module(tensors), settings("pack-quantized", weights)))
    assert reader.format(WEIGHT) == Integer(4, 32, False, "int8", False, str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=0)


MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}


def mxfp4(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    """By OCP's Microscaling specification: two E2M1 numbers a byte, the lower half first, and for 32 of them a power of two."""
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (rows, columns))
    powers = random.integers(118, 130, (rows, columns // 32))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    tensors = {
        "weight_packed": torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        "weight_scale": torch.from_numpy(powers.astype(np.uint8)),
    }
    return tensors, numbers * np.repeat(2.0 ** (powers - 127), 32, 1)


def mxfp4_by_the_library(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    compressor, scheme = library("mxfp4-pack-quantized", MXFP4 | {"scale_dtype": torch.uint8})
    generator = torch.Generator().manual_seed(1)
    scales = 2.0 ** torch.randint(-9, 3, (rows, columns // 32), generator=generator)
    weight = torch.randn(rows, columns, generator=generator) * 6 * scales.repeat_interleave(32, 1)
    tensors = compressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    return tensors, compressor.decompress(dict(tensors), scheme)["weight"].double().numpy()


@pytest.mark.parametrize("make", [mxfp4, pytest.param(mxfp4_by_the_library, marks=needs_library)])
def test_mxfp4(make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = make(140, 96)
    reader = open_quantized(write(tmp_path, module(tensors), settings("mxfp4-pack-quantized", MXFP4)))
    assert reader.format(WEIGHT) == Blocks("MXFP4")
    np.testing.assert_array_equal(read_weight(reader), expected)


@pytest.mark.parametrize(("strategy", "group"), [("tensor", None), ("channel", -1), ("group", 32)])
def test_the_groups_say_what_the_strategy_is_where_nothing_else_does(strategy: str, group: int | None, tmp_path: Path) -> None:
    """As the library's QuantizationArgs has it."""
    tensors, expected = compress("int-quantized", integers(8, strategy, group), 33, 64, torch.bfloat16)
    weights = {"num_bits": 8, "type": "int"} | ({} if group is None else {"group_size": group})
    reader = open_quantized(write(tmp_path, module(tensors), settings("int-quantized", weights)))
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


@pytest.mark.parametrize("inputs", [FP8_STATIC, {"type": "float"}])
def test_static_scales_of_inputs(inputs: dict[str, Any], tmp_path: Path) -> None:
    """The library's defaults: 8 bits, symmetric, not dynamic, one scale a tensor."""
    tensors, expected = compress("float-quantized", floats("tensor"), 31, 33, torch.bfloat16)
    tensors["input_scale"] = torch.tensor([0.25]).bfloat16()
    reader = open_quantized(write(tmp_path, module(tensors), settings("float-quantized", floats("tensor"), inputs)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Fp8(0, "static")
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)
    rows, _ = next(reader.slices(WEIGHT))
    assert isinstance(rows, Fp8Rows)
    assert rows.input_scale is not None
    assert float(rows.input_scale) == 0.25


@pytest.mark.parametrize("set_", [True, False])
def test_order_of_columns(set_: bool, tmp_path: Path) -> None:
    """weight_g_idx, which the library has given up since: column k has the scale of group g_idx[k]. All -1: never set."""
    weights = integers(4, "group", 32) | {"actorder": "group"}
    tensors, grouped = compress("pack-quantized", integers(4, "group", 32), 40, 96, torch.float32)
    ids = torch.arange(96) // 32
    shuffled = ids[torch.randperm(96, generator=torch.Generator().manual_seed(2))]
    scales = tensors["weight_scale"].double().numpy()
    expected = grouped / scales[:, ids] * scales[:, shuffled] if set_ else grouped
    tensors["weight_g_idx"] = shuffled.int() if set_ else torch.full((96,), -1, dtype=torch.int32)
    reader = open_quantized(write(tmp_path, module(tensors), settings("pack-quantized", weights)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Integer(4, 32, False, "int8", set_, "float32")
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        (["Linear"], ["lm_head", "re:.*mlp.*"]),
        (["re:.*self_attn.*", "re:.*down_proj"], []),
        ([NAME, "model.layers.1.mlp.down_proj"], ["Embedding"]),
        ([r"re:model\.layers\.\d+\.(self_attn|mlp)\.(q|down)_proj$"], None),
    ],
)
def test_targets(targets: list[str], ignore: list[str] | None, tmp_path: Path) -> None:
    """By class, by pattern, by name; and what is not quantized stays plain whatever the lists say."""
    weights = integers(4, "group", 32)
    tensors, expected = compress("pack-quantized", weights, 33, 64, torch.bfloat16)
    config = settings("pack-quantized", weights)
    config["config_groups"]["group_0"]["targets"] = targets
    config["ignore"] = ignore
    others = {
        "lm_head.weight": torch.ones(3, 4).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.ones(3, 4).bfloat16(),
    }
    reader = open_quantized(write(tmp_path, module(tensors) | others, config))
    assert reader.names() == {WEIGHT, *others}
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


def test_a_group_by_name_goes_before_one_by_pattern_and_that_before_one_by_class(tmp_path: Path) -> None:
    names = {"q": NAME, "k": NAME.replace("q_proj", "k_proj"), "v": NAME.replace("q_proj", "v_proj")}
    kinds = {"q": integers(8, "group", 32), "k": integers(4, "group", 32), "v": integers(3, "group", 32)}
    targets = {"v": ["Linear"], "k": ["re:.*[qk]_proj"], "q": [NAME]}
    config = settings("mixed-precision", None)
    config["config_groups"] = {part: {"targets": targets[part], "weights": kinds[part]} for part in targets}
    made = {part: compress("pack-quantized", kinds[part], 33, 64, torch.bfloat16) for part in names}
    tensors: Tensors = {}
    for part, name in names.items():
        tensors |= module(made[part][0], name)
    reader = open_quantized(write(tmp_path, tensors, config))
    for part, name in names.items():
        np.testing.assert_allclose(read_weight(reader, f"{name}.weight"), made[part][1], rtol=1e-6)


def test_patterns_are_not_tried_on_names_without_end(tmp_path: Path) -> None:
    """Four repeats take a time that grows with the fourth power of the name's length."""
    made, _ = compress("pack-quantized", INT4, 33, 64, torch.bfloat16)
    config = group(targets=["re:.*a.*a.*a.*b"]) | {"ignore": []}
    with pytest.raises(CheckpointError, match="a name of 501 characters"):
        open_quantized(write(tmp_path, module(made, "a" * 501), config))


def test_a_quantized_head_and_embedding(tmp_path: Path) -> None:
    weights = integers(8, "channel")
    tensors, expected = compress("int-quantized", weights, 33, 64, torch.bfloat16)
    config = settings("int-quantized", weights, INT8_INPUTS, ignore=[])
    config["config_groups"]["group_1"] = {"targets": ["Embedding"], "weights": weights}
    both = module(tensors, "lm_head") | module(tensors, "model.embed_tokens")
    reader = open_quantized(write(tmp_path, both, config))
    for name, activation in (("lm_head.weight", "int8"), ("model.embed_tokens.weight", "none")):
        assert reader.format(name) == Integer(8, 0, False, activation, False, "bfloat16")  # type: ignore[arg-type]
        np.testing.assert_allclose(read_weight(reader, name), expected, rtol=1e-6)


def test_scales_of_a_quantized_cache_are_left_aside(tmp_path: Path) -> None:
    weights = floats("channel")
    tensors, expected = compress("float-quantized", weights, 33, 64, torch.bfloat16)
    cache = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = settings("float-quantized", weights, FP8_INPUTS, kv_cache_scheme=scheme)
    reader = open_quantized(write(tmp_path, module(tensors) | cache, config))
    assert reader.names() == {WEIGHT}
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


INT4 = integers(4, "group", 32)
ASYMMETRIC = integers(4, "group", 32, symmetric=False)
PACKED = compress("pack-quantized", INT4, 33, 64, torch.bfloat16)[0]
WITH_ZEROS = compress("pack-quantized", ASYMMETRIC, 33, 64, torch.bfloat16)[0]
INT8 = compress("int-quantized", integers(8, "channel"), 33, 64, torch.bfloat16)[0]
FP8 = compress("float-quantized", floats("channel"), 33, 64, torch.bfloat16)[0]


def bad(
    tensors: Tensors, config: dict[str, Any], error: type[NanovllmError], words: str, **changes: Any
) -> tuple[Tensors, dict[str, Any], type[NanovllmError], str]:
    """changes: a tensor instead of one that is there, or None."""
    changed = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    return changed, config, error, words


def inputs(**values: Any) -> dict[str, Any]:
    return settings("int-quantized", integers(8, "channel"), INT8_INPUTS | values)


PACK = settings("pack-quantized", INT4)
PACK_ZEROS = settings("pack-quantized", ASYMMETRIC)
INTS = settings("int-quantized", integers(8, "channel"), INT8_INPUTS)
FLOATS = settings("float-quantized", floats("channel"), FP8_INPUTS)


def group(**values: Any) -> dict[str, Any]:
    """PACK with another group."""
    return PACK | {"config_groups": {"group_0": PACK["config_groups"]["group_0"] | values}}


def weights(**values: Any) -> dict[str, Any]:
    return group(weights=INT4 | values)


BAD = {
    "no scales": bad(PACKED, PACK, CheckpointError, "weight_scale' is missing", weight_scale=None),
    "no shape": bad(PACKED, PACK, CheckpointError, "weight_shape' is missing", weight_shape=None),
    "no codes": bad(PACKED, PACK, CheckpointError, "weight_packed' is missing", weight_packed=None),
    "no zero points": bad(WITH_ZEROS, PACK_ZEROS, CheckpointError, "zero_point' is missing", weight_zero_point=None),
    "zero points of other words": bad(
        WITH_ZEROS,
        PACK_ZEROS,
        CheckpointError,
        "expected [5, 2]",
        weight_zero_point=torch.zeros(4, 2, dtype=torch.int32),
    ),
    "zero points one a byte": bad(
        WITH_ZEROS, PACK_ZEROS, CheckpointError, "holds I8", weight_zero_point=torch.zeros(33, 2, dtype=torch.int8)
    ),
    "another shape": bad(PACKED, PACK, CheckpointError, "belongs to 65 inputs", weight_shape=torch.tensor([33, 65])),
    "more rows in the shape": bad(PACKED, PACK, CheckpointError, "says 34 x 64", weight_shape=torch.tensor([34, 64])),
    "an absurd shape": bad(PACKED, PACK, CheckpointError, "says 33 x", weight_shape=torch.tensor([33, 2**62])),
    "a negative shape": bad(PACKED, PACK, CheckpointError, "says 33 x -64", weight_shape=torch.tensor([33, -64])),
    "a shape of floats": bad(PACKED, PACK, CheckpointError, "holds F32", weight_shape=torch.tensor([33.0, 64.0])),
    "scales of other groups": bad(
        PACKED, PACK, CheckpointError, "weight_scale' has 4 groups, expected 2", weight_scale=torch.ones(33, 4)
    ),
    "scales of other rows": bad(PACKED, PACK, CheckpointError, "shape [32, 2]", weight_scale=torch.ones(32, 2)),
    "scales in fp8": bad(
        PACKED, PACK, CheckpointError, "holds F8_E4M3", weight_scale=torch.ones(33, 2).to(torch.float8_e4m3fn)
    ),
    "a scale of zero": bad(PACKED, PACK, CheckpointError, "weight_scale' has scales", weight_scale=torch.zeros(33, 2)),
    "a negative scale": bad(PACKED, PACK, CheckpointError, "weight_scale' has scales", weight_scale=-torch.ones(33, 2)),
    "a NaN scale": bad(
        PACKED, PACK, CheckpointError, "weight_scale' has scales", weight_scale=torch.full((33, 2), torch.nan)
    ),
    "codes as floats": bad(PACKED, PACK, CheckpointError, "holds F32", weight_packed=torch.ones(33, 8)),
    "no order": bad(PACKED, weights(actorder="group"), CheckpointError, "weight_g_idx' is missing"),
    "a group out of range": bad(
        PACKED, PACK, CheckpointError, "out of range", weight_g_idx=torch.full((64,), 2, dtype=torch.int32)
    ),
    "uneven groups": bad(
        PACKED, PACK, CheckpointError, "other sizes than 32", weight_g_idx=torch.zeros(64, dtype=torch.int32)
    ),
    "too few groups of columns": bad(
        PACKED, PACK, CheckpointError, "g_idx' has the shape [63]", weight_g_idx=torch.zeros(63, dtype=torch.int32)
    ),
    "other bits": bad(PACKED, weights(num_bits=8), CheckpointError, "has 8 words a row, expected 16"),
    "bits that are not kept": bad(PACKED, weights(num_bits=5), UnsupportedError, "numbers of 5 bits"),
    "one-byte codes of five bits": bad(
        INT8, settings("naive-quantized", integers(5, "channel")), UnsupportedError, "numbers of 5 bits"
    ),
    "a group size that does not divide": bad(PACKED, weights(group_size=48), CheckpointError, "don't divide"),
    "a group size of 0": bad(PACKED, weights(group_size=0), CheckpointError, "group_size"),
    "a group size as text": bad(PACKED, weights(group_size="32"), CheckpointError, "group_size"),
    "a strategy that is not known": bad(PACKED, weights(strategy="tensor_group"), UnsupportedError, "tensor_group"),
    "blocks of integers": bad(
        PACKED,
        weights(strategy="block", block_structure=[128, 128], group_size=None),
        UnsupportedError,
        "scale a block",
    ),
    "numbers of no kind": bad(PACKED, weights(type="complex"), UnsupportedError, "complex"),
    "dynamic weights": bad(PACKED, weights(dynamic=True), CheckpointError, "dynamic"),
    "symmetric as text": bad(PACKED, weights(symmetric="yes"), CheckpointError, "symmetric"),
    "no weights": bad(PACKED, group(weights=None), CheckpointError, "nothing about weights"),
    "quantized outputs": bad(PACKED, group(output_activations=FP8_STATIC), UnsupportedError, "outputs"),
    "no targets": bad(PACKED, group(targets=[]), CheckpointError, "targets"),
    "other targets": bad(PACKED, group(targets=["Conv2d"]), CheckpointError, "no config group has"),
    "targets that are numbers": bad(PACKED, group(targets=[1]), CheckpointError, "targets"),
    "a pattern that is none": bad(PACKED, group(targets=["re:.*("]), CheckpointError, "which is none"),
    "a pattern that never ends": bad(PACKED, group(targets=["re:((.?)*)*x"]), UnsupportedError, "too long"),
    "a pattern of many repeats": bad(PACKED, group(targets=["re:" + ".*" * 12 + "x"]), UnsupportedError, "too long"),
    "a pattern of what may be missing": bad(PACKED, group(targets=["re:" + "a?" * 40 + "b"]), UnsupportedError, "too long"),
    "ignored, and yet quantized": bad(PACKED, PACK | {"ignore": ["re:.*q_proj"]}, CheckpointError, "to ignore"),
    "ignored by its end": bad(PACKED, PACK | {"ignore": ["q_proj"]}, CheckpointError, "to ignore"),
    "ignored by most of its name": bad(
        PACKED, PACK | {"ignore": [NAME.removeprefix("model.")]}, CheckpointError, "to ignore"
    ),
    "very many groups": bad(
        PACKED,
        PACK | {"config_groups": {str(i): PACK["config_groups"]["group_0"] for i in range(1001)}},
        CheckpointError,
        "1 to 1000 groups",
    ),
    "one zero point a tensor": bad(
        WITH_ZEROS,
        settings("pack-quantized", integers(4, "tensor", symmetric=False)),
        UnsupportedError,
        "one zero point a tensor",
        weight_scale=torch.ones(1),
    ),
    "codes above four bits": bad(
        INT8, settings("int-quantized", integers(4, "channel")), CheckpointError, "4 bits don't hold",
        weight=torch.full((33, 64), 8, dtype=torch.int8),
    ),
    "codes below four bits": bad(
        INT8, settings("int-quantized", integers(4, "channel")), CheckpointError, "4 bits don't hold",
        weight=torch.full((33, 64), -9, dtype=torch.int8),
    ),
    "mxfp4 with a scale for all": bad(
        mxfp4(33, 64)[0],
        settings("mxfp4-pack-quantized", MXFP4),
        UnsupportedError,
        "floats of 4 bits",
        weight_global_scale=torch.ones(1),
    ),
    "no groups": bad(PACKED, PACK | {"config_groups": {}}, CheckpointError, "config_groups"),
    "a list of groups": bad(PACKED, PACK | {"config_groups": []}, CheckpointError, "config_groups"),
    "sparse": bad(PACKED, PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedError, "sparse"),
    "marlin": bad(PACKED, PACK | {"format": "marlin-24"}, UnsupportedError, "marlin-24"),
    "nvfp4 of other scales": bad(PACKED, PACK | {"format": "nvfp4-e5m3-pack-quantized"}, UnsupportedError, "nvfp4-e5m3"),
    "rotations": bad(PACKED, PACK | {"transform_config": {"config_groups": {"u": {}}}}, UnsupportedError, "rotations"),
    "int8, no scales": bad(INT8, INTS, CheckpointError, "weight_scale' is missing", weight_scale=None),
    "int8 as fp8": bad(INT8, FLOATS, CheckpointError, "weight' holds I8, expected F8_E4M3"),
    "fp8 as int8": bad(FP8, INTS, CheckpointError, "weight' holds F8_E4M3, expected I8"),
    "int8 of four bits": bad(
        INT8, settings("int-quantized", integers(4, "channel")), CheckpointError, "4 bits don't hold"
    ),
    "int8, static inputs": bad(INT8, inputs(dynamic=False, strategy="tensor"), UnsupportedError, "static"),
    "int8, inputs with zero points": bad(INT8, inputs(symmetric=False), UnsupportedError, "zero points"),
    "int8, inputs of four bits": bad(INT8, inputs(num_bits=4), UnsupportedError, "4 bits"),
    "int8, fp8 inputs": bad(INT8, inputs(type="float"), UnsupportedError, "float"),
    "int8, local inputs": bad(INT8, inputs(dynamic="local"), UnsupportedError, "local"),
    "fp8, no scales": bad(FP8, FLOATS, CheckpointError, "weight_scale' is missing", weight_scale=None),
    "fp8, a scale of zero": bad(
        FP8, FLOATS, CheckpointError, "weight_scale' has scales", weight_scale=torch.zeros(33, 1)
    ),
    "fp8 in groups": bad(
        FP8, settings("float-quantized", floats("group") | {"group_size": 32}), UnsupportedError, "scale a group"
    ),
    "fp8 in other blocks": bad(
        FP8, settings("float-quantized", floats("block") | {"block_structure": [64, 64]}), UnsupportedError, "blocks of"
    ),
    "floats of four bits": bad(
        PACKED, settings("pack-quantized", floats("channel") | {"num_bits": 4}), UnsupportedError, "floats of 4 bits"
    ),
    "static inputs without a scale": bad(
        FP8, settings("float-quantized", floats("channel"), FP8_STATIC), CheckpointError, "input_scale' is missing"
    ),
    "never rounded": bad(INT8, INTS, UnsupportedError, "never rounded", weight=torch.ones(33, 64)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *BAD[case])
