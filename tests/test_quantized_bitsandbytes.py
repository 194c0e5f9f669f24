"""bitsandbytes checkpoints: packed by hand, and where it is installed written and read back by the library itself; and what is
refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.quant.format import Integer, Nf4
from quantized_checkpoints import NAME, Tensors, check_refused, module, open_quantized, read_weight, small_slices, write

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (pip install -e '.[peers]')"
)

WEIGHT = f"{NAME}.weight"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": False,
    "load_in_8bit": True,
    "llm_int8_skip_modules": ["lm_head"],
}
STATE = "weight.quant_state.bitsandbytes__nf4"


VALUES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""Of NF4, by appendix E of "QLoRA" (Dettmers et al., 2023)."""


def text(value: Any) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(value if isinstance(value, bytes) else json.dumps(value).encode()), dtype=torch.uint8
    )


def nf4(rows: int, columns: int, block: int, nested: bool) -> tuple[Tensors, np.ndarray]:
    """A module's tensors, packed by hand, and the weight that they stand for. The first of two codes is the upper half of a byte;
    nested scales are codes themselves, of 256 values, with a scale for each 256 of them and an offset for all."""
    random = np.random.default_rng(3)
    codes = random.integers(0, 16, rows * columns)
    count = len(codes) // block
    tensors = {
        "weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))[:, None],
        "weight.quant_map": torch.from_numpy(VALUES).float(),
    }
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [rows, columns]}
    scales = random.random(count).astype(np.float32)
    scales[0] = 0  # a block of zeros
    if nested:
        outer, values = random.random(-(-count // 256)).astype(np.float32), random.random(256).astype(np.float32)
        outer[-1] = 0
        which = random.integers(0, 256, count, np.uint8)
        tensors |= {"weight.nested_absmax": torch.from_numpy(outer), "weight.nested_quant_map": torch.from_numpy(values)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = values[which] * outer[np.arange(count) // 256] + np.float32(0.25)
    tensors |= {"weight.absmax": torch.from_numpy(which if nested else scales), STATE: text(state)}
    return tensors, (VALUES[codes].reshape(-1, block) * scales[:, None]).reshape(rows, columns)


def nf4_by_the_library(
    rows: int, columns: int, block: int, nested: bool, **options: Any
) -> tuple[Tensors, np.ndarray]:
    """A module's tensors as the library writes them, and the weight as it reads them."""
    import bitsandbytes as bnb

    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.1
    weight[0] = 0  # blocks of zeros
    data, state = bnb.functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type="nf4", **options
    )
    tensors = {"weight": data} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return tensors, bnb.functional.dequantize_4bit(data, state).double().numpy()


@pytest.mark.parametrize("make", [nf4, pytest.param(nf4_by_the_library, marks=needs_library)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("rows", "columns", "block"), [(3, 64, 64), (300, 192, 64), (141, 256, 128), (1, 64, 32)])
def test_nf4(make: Any, rows: int, columns: int, block: int, nested: bool, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = make(rows, columns, block, nested)
    reader = open_quantized(write(tmp_path, module(tensors), FOUR))
    assert reader.names() == {WEIGHT}
    assert reader.shape(WEIGHT) == (rows, columns)
    assert reader.format(WEIGHT) == Nf4(block)
    assert reader.num_bytes(WEIGHT) == sum(tensor.nbytes for tensor in tensors.values())
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


def floats(rows: int, columns: int, block: int, nested: bool) -> tuple[Tensors, np.ndarray]:
    tensors, expected = nf4(rows, columns, block, nested)
    return tensors | {"weight": tensors["weight"].flatten().view(torch.bfloat16)[:, None]}, expected


def floats_by_the_library(rows: int, columns: int, block: int, nested: bool) -> tuple[Tensors, np.ndarray]:
    return nf4_by_the_library(rows, columns, block, nested, quant_storage=torch.bfloat16)


@pytest.mark.parametrize("make", [floats, pytest.param(floats_by_the_library, marks=needs_library)])
def test_nf4_in_storage_that_is_labelled_as_floats(make: Any, tmp_path: Path) -> None:
    tensors, expected = make(6, 128, 64, True)
    assert tensors["weight"].dtype == torch.bfloat16
    reader = open_quantized(write(tmp_path, module(tensors), FOUR | {"bnb_4bit_quant_storage": "bfloat16"}))
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-9)


def int8(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    random = np.random.default_rng(3)
    codes, largest = random.integers(-127, 128, (rows, columns), np.int8), random.random(rows).astype(np.float32)
    largest[0] = 0
    tensors = {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(largest)}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, codes * (largest.astype(np.float64) / 127)[:, None]


def int8_by_the_library(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    import bitsandbytes as bnb

    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.1
    weight[0] = 0
    codes, largest, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, bnb.functional.int8_vectorwise_dequant(codes, largest).double().numpy()


@pytest.mark.parametrize("make", [int8, pytest.param(int8_by_the_library, marks=needs_library)])
@pytest.mark.parametrize("config", [EIGHT, {"load_in_8bit": True}])
def test_int8(make: Any, config: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = make(300, 33)
    others = {"lm_head.weight": torch.ones(3, 5).half()}
    reader = open_quantized(write(tmp_path, module(tensors) | others, config))
    assert reader.names() == {WEIGHT, *others}
    assert reader.format(WEIGHT) == Integer(8, 0, False, "none", False, "float32")
    assert reader.format("lm_head.weight") is None
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)


NESTED = nf4(6, 128, 64, True)[0]
SINGLE = nf4(6, 128, 64, False)[0]
INT8 = int8(6, 32)[0]
SAID: dict[str, Any] = json.loads(NESTED[STATE].numpy().tobytes())
Case = tuple[Tensors, dict[str, Any], type[NanovllmError], str]


def bad(tensors: Tensors, error: type[NanovllmError], words: str, config: Any = FOUR, **changes: Any) -> Case:
    """changes: tensors by suffix, with "__" for ".". None takes one away."""
    names = {name: name.replace("__", ".") for name in changes}
    changed = tensors | {names[name]: tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}, config, error, words


def said(error: type[NanovllmError], words: str, **values: Any) -> Case:
    changed = {key: value for key, value in (SAID | values).items() if value is not None}
    return NESTED | {STATE: text(changed)}, FOUR, error, words


BAD: dict[str, Case] = {
    "no state": ({n: t for n, t in NESTED.items() if n != STATE}, FOUR, CheckpointError, "bitsandbytes__nf4' is missing"),
    "no scales": bad(NESTED, CheckpointError, "absmax' is missing", weight__absmax=None),
    "no codes": bad(NESTED, CheckpointError, f"{NAME}.weight' is missing", weight=None),
    "no values": bad(NESTED, CheckpointError, "quant_map' is missing", weight__quant_map=None),
    "no nested values": bad(NESTED, CheckpointError, "nested_quant_map' is missing", weight__nested_quant_map=None),
    "no nested scales": bad(NESTED, CheckpointError, "absmax' holds U8, expected F32", weight__nested_absmax=None),
    "codes cut short": bad(NESTED, CheckpointError, "has 383 bytes, expected 384", weight=NESTED["weight"][:-1]),
    "too few scales": bad(SINGLE, CheckpointError, "absmax' has the shape [11]", weight__absmax=torch.ones(11)),
    "too few nested scales": bad(NESTED, CheckpointError, "nested_absmax' has the shape", weight__nested_absmax=torch.ones(2)),
    "scales of another type": bad(SINGLE, CheckpointError, "holds F16", weight__absmax=torch.ones(12).half()),
    "a negative scale": bad(SINGLE, CheckpointError, "absmax' has scales", weight__absmax=-torch.ones(12)),
    "a scale that is NaN": bad(SINGLE, CheckpointError, "absmax' has scales", weight__absmax=torch.full((12,), torch.nan)),
    "a nested scale that is NaN": bad(
        NESTED, CheckpointError, "nested_absmax' has scales", weight__nested_absmax=torch.full((1,), torch.nan)
    ),
    "an infinite product": bad(
        NESTED, CheckpointError, "infinite",
        weight__nested_absmax=torch.full((1,), 3e38), weight__nested_quant_map=torch.full((256,), 3e38),
    ),
    "nested values that are NaN": bad(
        NESTED, CheckpointError, "nested_quant_map' has values", weight__nested_quant_map=torch.full((256,), torch.nan)
    ),
    "other values": bad(NESTED, UnsupportedError, "other values", weight__quant_map=torch.linspace(-1, 1, 16)),
    "fp4": (
        {n: t for n, t in NESTED.items() if n != STATE} | {STATE.replace("nf4", "fp4"): text(SAID | {"quant_type": "fp4"})},
        FOUR | {"bnb_4bit_quant_type": "fp4"}, UnsupportedError, "FP4",
    ),
    "a state that is no JSON": (NESTED | {STATE: text(b"{")}, FOUR, CheckpointError, "not JSON"),
    "a state of many bytes": (
        NESTED | {STATE: torch.zeros(20_000, dtype=torch.uint8)}, FOUR, CheckpointError, "has 20000 bytes",
    ),
    "a state with a key twice": (
        NESTED | {STATE: text(b'{"blocksize": 64, "blocksize": 64}')}, FOUR, CheckpointError, "'blocksize' occurs twice",
    ),
    "an offset beyond all numbers": (
        NESTED | {STATE: text(json.dumps(SAID).replace("0.25", "1e999").encode())}, FOUR, CheckpointError, "nested_offset",
    ),
    "a deep state": (NESTED | {STATE: text(b'{"a":' * 900 + b"1" + b"}" * 900)}, FOUR, CheckpointError, "nested"),
    "a state of floats": (NESTED | {STATE: torch.zeros(4)}, FOUR, CheckpointError, "holds F32"),
    "a state of fp4": said(CheckpointError, "fp4", quant_type="fp4"),
    "another shape": said(CheckpointError, "has 384 bytes, expected 448", shape=[7, 128]),
    "an absurd shape": said(CheckpointError, "weight", shape=[2**40, 2**40]),
    "a shape of fractions": said(CheckpointError, "6.5 x 128", shape=[6.5, 128]),
    "a shape of three": said(CheckpointError, "shape", shape=[2, 3, 128]),
    "no shape": said(CheckpointError, "shape", shape=None),
    "a block of 0": said(CheckpointError, "blocksize", blocksize=0),
    "an odd block": said(CheckpointError, "blocks of 65", blocksize=65),
    "a block across rows": said(UnsupportedError, "don't divide into groups of 256", blocksize=256),
    "an offset of text": said(CheckpointError, "nested_offset", nested_offset="0"),
    "a nested block of 0": said(CheckpointError, "nested_blocksize", nested_blocksize=0),
    "int8, no scales": bad(INT8, CheckpointError, "SCB' is missing", EIGHT, SCB=None),
    "int8, scales of other rows": bad(INT8, CheckpointError, "SCB' has the shape [5]", EIGHT, SCB=torch.ones(5)),
    "int8, a negative scale": bad(INT8, CheckpointError, "SCB' has scales", EIGHT, SCB=-torch.ones(6)),
    "int8, codes as floats": bad(INT8, CheckpointError, "holds F32", EIGHT, weight=torch.ones(6, 32)),
    "int8, a layout for a GPU": bad(
        INT8, UnsupportedError, "laid out", EIGHT, weight_format=torch.tensor(2, dtype=torch.uint8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *BAD[case])
