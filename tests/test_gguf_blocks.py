"""Block types as codes and scales: against `gguf.quants`, on bytes that a quantizer made and on any bytes at all."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.kernels.integer import unpack
from nanovllm_cli.quant.gguf_blocks import (
    BLOCKS,
    CODES,
    BlockType,
    block_type,
    decompose,
    dequantize,
    is_finite,
    negated,
)

NAMES = list(BLOCKS)


def any_bytes(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Every byte is a valid block, with NaN and infinite scales among them."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * BLOCKS[name].block_bytes), dtype=np.uint8)


def expected(name: str, data: np.ndarray) -> np.ndarray:
    """By `gguf`, or what it cannot read by ggml's definition: a float16, then bits from the lowest of the first byte on."""
    with np.errstate(all="ignore"):
        if name not in ("Q1_0", "Q2_0"):
            return np.asarray(quants.dequantize(data, GGMLQuantizationType[name]))
        blocks = data.reshape(-1, 18)
        d, bits = blocks[:, :2].copy().view("<f2").astype(np.float32), np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
        values = np.where(bits == 1, 1, -1) if name == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2].astype(int) - 1
        return (d * values.astype(np.float32)).reshape(*data.shape[:-1], -1)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """NaN for NaN, whatever its payload; zeros with their sign."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.int32), want[~nan].view(np.int32))


def test_every_block_type_that_gguf_reads_is_there() -> None:
    assert set(BLOCKS) == {kind.name for kind in quants._type_traits} - {"BF16"} | {"Q1_0", "Q2_0"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (37, 3), (3, 17)])
def test_any_bytes_dequantize_as_gguf_does_to_the_bit(name: str, rows: int, blocks: int) -> None:
    for seed in range(3):
        data = any_bytes(name, rows, blocks, seed)
        assert_same_bits(dequantize(name, torch.from_numpy(data)).numpy(), expected(name, data))


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_reads_the_same_numbers(name: str) -> None:
    """It may multiply in another order."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python, the peer, is not installed")
    ggml = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))
    data = any_bytes(name, 1, 40, seed=6)
    theirs = np.empty(40 * BLOCKS[name].block_len, np.float32)
    spelled = name if name.startswith(("Q2_", "Q3_", "Q4_K", "Q5_K", "Q6_")) else name.lower()
    read = getattr(ggml, f"dequantize_row_{spelled[0].lower()}{spelled[1:]}")
    read(ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(theirs.ctypes.data), ctypes.c_int64(theirs.size))
    ours = dequantize(name, torch.from_numpy(data))[0].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_code_dequantizes_as_gguf_does(name: str) -> None:
    data = any_bytes(name, 256, 1)
    data[:, 0] = np.arange(256)
    assert_same_bits(dequantize(name, torch.from_numpy(data)).numpy(), expected(name, data))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_what_a_quantizer_wrote_dequantizes_as_gguf_does(name: str) -> None:
    rows = np.random.default_rng(1).normal(0, 0.02, (5, 512)).astype(np.float32)
    data = quants.quantize(rows, GGMLQuantizationType[name])
    assert_same_bits(dequantize(name, torch.from_numpy(data)).numpy(), expected(name, data))


def d_span(kind: BlockType) -> int:
    """Columns that share a d."""
    return kind.group if kind.sub is None else kind.block_len


@pytest.mark.parametrize("name", NAMES)
def test_parts_have_the_types_and_sizes_that_the_table_says(name: str) -> None:
    kind = BLOCKS[name]
    data = torch.from_numpy(any_bytes(name, 7, 3))
    parts = decompose(name, data)
    width = 3 * kind.block_len
    assert parts.kind is kind
    assert parts.codes.shape == (7, width)
    assert parts.codes.dtype == torch.uint8
    assert int(parts.codes.max()) < 1 << kind.code_bits
    assert parts.d.shape == (7, width // d_span(kind))
    assert parts.d.dtype == (torch.float16 if kind.d_values is None else torch.uint8)
    assert (None if parts.sub is None else parts.sub.dtype) == kind.sub
    assert (parts.dmin is not None) == kind.has_minimum
    assert (parts.sub_min is not None) == (kind.has_minimum and kind.sub is not None)
    for part in (parts.sub, parts.sub_min):
        assert part is None or part.shape == (7, width // kind.group)
    assert all(part.is_contiguous() for part in parts[1:] if part is not None)
    if kind.table is not None:
        assert len(kind.table) == 16
        assert all(-128 <= value <= 127 for value in kind.table)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_the_formula_of_the_module(name: str) -> None:
    """Read straight in float64, where nothing is rounded before the last difference."""
    data = any_bytes(name, 5, 2, seed=4)
    kind, codes, d, sub, dmin, sub_min = decompose(name, torch.from_numpy(data))
    values = (
        codes.numpy().astype(np.float64) - kind.offset if kind.table is None else np.array(kind.table)[codes.numpy()]
    )

    def a_column(parts: torch.Tensor | None, span: int) -> np.ndarray | float:
        return 1.0 if parts is None else np.repeat(parts.numpy().astype(np.float64), span, 1)

    outer = a_column(d, d_span(kind))
    if name == "MXFP4":
        outer = 2.0 ** (outer - 128)
    elif name == "NVFP4":  # e4m3 without a sign, halved as the table is doubled
        exponent, fraction = np.divmod(outer, 8)
        outer = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7)) / 2
    with np.errstate(all="ignore"):
        weights = outer * kind.unit * a_column(sub, kind.group) * values
        if dmin is not None:
            weights = weights - a_column(dmin, d_span(kind)) * a_column(sub_min, kind.group)
    want = expected(name, data)
    finite = np.isfinite(want)
    np.testing.assert_allclose(weights[finite], want[finite], rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_read_alone_and_from_any_view(name: str) -> None:
    data = torch.from_numpy(any_bytes(name, 9, 2, seed=5))
    wide = torch.zeros(9, data.shape[1] + 3, dtype=torch.uint8)
    wide[:, 3:] = data  # rows that neither begin at even addresses nor lie without gaps
    whole = dequantize(name, data).numpy()
    assert_same_bits(dequantize(name, wide[:, 3:]).numpy(), whole)
    assert_same_bits(dequantize(name, data[4:5]).numpy(), whole[4:5])
    assert dequantize(name, data[:0]).shape == (0, whole.shape[1])


@pytest.mark.parametrize("name", CODES)
def test_codes_are_unpacked_by_all_threads_as_by_torch(name: str) -> None:
    """More blocks than a task has, in rows that lie anywhere."""
    data = torch.from_numpy(any_bytes(name, 35, 7, seed=6))
    wide = torch.zeros(35, data.shape[1] + 3, dtype=torch.uint8)
    wide[:, 3:] = data
    for rows in (data, wide[:, 3:], data[4:5], data[:0]):
        by_threads = decompose(name, rows, lambda kind, blocks: unpack(blocks, kind.block_len, CODES[kind.name]))
        assert torch.equal(by_threads.codes, decompose(name, rows).codes)


SIGNED = [name for name in NAMES if not name.startswith(("IQ1", "IQ2", "IQ3", "MXFP4", "NVFP4"))]


@pytest.mark.parametrize("name", SIGNED)
def test_blocks_are_negated_to_the_bit(name: str) -> None:
    data = any_bytes(name, 6, 3, seed=8)
    rows = torch.from_numpy(data).view(3, 2, -1)
    found = negated(name, rows)
    assert np.array_equal(expected(name, found.view(6, -1).numpy()), -expected(name, data), equal_nan=True)
    assert torch.equal(negated(name, found), rows)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", "IQ2_S"])
def test_blocks_whose_scales_have_no_sign_are_not_negated(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} blocks cannot be negated"):
        negated(name, torch.from_numpy(any_bytes(name, 1, 1)))


@pytest.mark.parametrize("name", NAMES)
def test_scales_that_are_not_finite_are_found(name: str) -> None:
    """By every element of them alone, as the numbers that come out tell."""
    kind, data = BLOCKS[name], np.zeros((1, 2 * BLOCKS[name].block_bytes), np.uint8)
    for at in range(kind.block_bytes, data.shape[1] - 1):
        data[:] = 0
        data[0, at : at + 2] = 0xFF, 0x7F if name != "IQ1_M" else 0xFF
        rows = torch.from_numpy(data)
        parts = decompose(name, rows)
        lows = parts.minima()
        finite = bool(parts.scales().isfinite().all()) and (lows is None or bool(lows.isfinite().all()))
        assert is_finite(name, rows) is finite
    assert is_finite(name, torch.from_numpy(data * 0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("excess", [-1, 1])
def test_rows_that_are_not_whole_blocks_are_refused(name: str, excess: int) -> None:
    size = 2 * BLOCKS[name].block_bytes + excess
    with pytest.raises(CheckpointError, match=rf"{name}: rows of {size} bytes aren't whole blocks"):
        decompose(name, torch.zeros(3, size, dtype=torch.uint8))


def test_rows_without_bytes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rows of 0 bytes"):
        decompose("Q4_K", torch.zeros(3, 0, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["", "Q4_k", "Q8_K", "F16", "Q4_K\n"])
def test_an_unknown_type_is_refused_with_a_list_of_those_that_are_known(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"unknown block type .*known: Q4_0, "):
        block_type(name)
    with pytest.raises(UnsupportedError):
        decompose(name, torch.zeros(1, 144, dtype=torch.uint8))
