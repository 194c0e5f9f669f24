"""Encoders of GGUF's block types: against llama.cpp on the same weights where it is installed, against `gguf`, and against a
brute-force search in float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.quant.gguf_blocks import BLOCKS, decompose, dequantize
from nanovllm_cli.quant.gguf_encode import ENCODED, encode, pack
from nanovllm_cli.quant.gguf_types import TENSOR_TYPES
from test_gguf_blocks import expected

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SIGNS = ("Q1_0", "Q2_0")
BY_GGUF = tuple(name for name in ENCODED if name not in (*K_TYPES, *SIGNS))
HALF_STEP = 2.0**-11  # of float16


def weights(kind: str, rows: int = 48, width: int = 1024, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = {
        "normal": lambda: rng.normal(0, 0.02, (rows, width)),
        "long tails": lambda: 0.02 * rng.standard_t(4, (rows, width)),
        "uniform": lambda: rng.uniform(-1, 1, (rows, width)),
        "positive": lambda: np.abs(rng.normal(0, 1, (rows, width))),
        "outlying columns": lambda: rng.normal(0, 0.02, (rows, width)) * (1 + 20 * (rng.random(width) < 0.01)),
    }
    return drawn[kind]().astype(np.float32)


def square_error(name: str, data: torch.Tensor, x: np.ndarray, importance: np.ndarray | None = None) -> float:
    """By `gguf`'s way back, in float64."""
    back = expected(name, data.numpy()).astype(np.float64)
    return float((np.square(back - x) * (1 if importance is None else importance)).sum())


# ---- against others ----


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python, the peer, is not installed")
    library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, address, address, count, count, count, address]
    return library


def encoded_by_llama_cpp(ggml: ctypes.CDLL, name: str, x: np.ndarray, importance: np.ndarray | None) -> torch.Tensor:
    kind = BLOCKS[name]
    out = np.empty((x.shape[0], x.shape[1] // kind.block_len * kind.block_bytes), np.uint8)
    address = None if importance is None else importance.ctypes.data
    written = ggml.ggml_quantize_chunk(
        TENSOR_TYPES[name].number, x.ctypes.data, out.ctypes.data, 0, x.shape[0], x.shape[1], address
    )
    assert written == out.size
    return torch.from_numpy(out)


@pytest.mark.parametrize("kind", ["normal", "long tails", "uniform", "positive", "outlying columns"])
@pytest.mark.parametrize("name", K_TYPES)
def test_the_error_is_at_most_that_of_llama_cpp(ggml: ctypes.CDLL, name: str, kind: str) -> None:
    """The bar is 1.02. An importance is weighed in there too."""
    x = weights(kind)
    importance = np.random.default_rng(1).chisquare(1, x.shape[1]).astype(np.float32) + np.float32(0.01)
    for weighed in (None, importance):
        ours = encode(name, torch.from_numpy(x), None if weighed is None else torch.from_numpy(weighed))
        theirs = encoded_by_llama_cpp(ggml, name, x, weighed)
        assert square_error(name, ours, x, weighed) <= square_error(name, theirs, x, weighed)


@pytest.mark.parametrize("shift", [0.0, 0.01, -0.03])
@pytest.mark.parametrize("weighed", [False, True])
def test_of_weights_with_three_values_next_to_nothing_is_lost(weighed: bool, shift: float) -> None:
    """As those of ternary models are, though two bits have no code halfway between the outermost."""
    rng = np.random.default_rng(2)
    x = (rng.choice([-0.1, 0.0, 0.1], (9, 768)) + shift).astype(np.float32)
    importance = rng.chisquare(1, 768).astype(np.float32) if weighed else None
    size = float((np.square(x.astype(np.float64)) * (1 if importance is None else importance)).sum())
    for name in ("Q2_K", "Q4_K", "Q5_K") if shift else K_TYPES:
        data = encode(name, torch.from_numpy(x), None if importance is None else torch.from_numpy(importance))
        assert square_error(name, data, x, importance) < 2e-4 * size, name


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_plain_types_have_the_bytes_of_llama_cpp(ggml: ctypes.CDLL, name: str) -> None:
    """gguf rounds halves as C does but divides differently: a code in ten thousand may be its neighbour."""
    x = weights("normal")
    ours = encode(name, torch.from_numpy(x))
    assert (ours != encoded_by_llama_cpp(ggml, name, x, None)).float().mean() < 1e-3


@pytest.mark.parametrize("name", BY_GGUF)
def test_types_that_gguf_writes_have_its_bytes(name: str) -> None:
    x = weights("long tails", rows=7, width=768)
    want = quants.quantize(x, GGMLQuantizationType[name])
    np.testing.assert_array_equal(encode(name, torch.from_numpy(x)).numpy(), want)


@pytest.mark.parametrize("name", SIGNS)
def test_signs_have_the_bytes_of_llama_cpp(ggml: ctypes.CDLL, name: str) -> None:
    for kind in ("normal", "long tails", "positive"):
        x = weights(kind)
        assert torch.equal(encode(name, torch.from_numpy(x)), encoded_by_llama_cpp(ggml, name, x, None))


def test_a_block_of_signs_by_hand() -> None:
    """The mean of 128 magnitudes, 0.5, as float16 0x3800; a bit a number, lowest first, 1 from zero on."""
    x = np.full(128, 0.5, np.float32)
    x[[0, 9, 127]] *= -1
    x[[1, 2]], x[[3, 4]] = 0.0, 1.0
    signs = bytes([0b11111110, 0b11111101, *[255] * 13, 0b01111111])
    assert encode("Q1_0", torch.from_numpy(x)[None]).numpy().tobytes() == b"\x00\x38" + signs


def test_a_block_of_three_values_by_hand() -> None:
    """The largest magnitude, 2, as float16 0x4000; two bits a number, lowest first: what rounds to -1, 0, 1 of it, plus one."""
    x = np.zeros(64, np.float32)
    x[:8] = 2.0, -2.0, 1.0, -1.0, 0.999, -0.999, 1.5, -0.0
    codes = bytes([0b00_10_00_10, 0b01_10_01_01, *[0b01_01_01_01] * 14])
    assert encode("Q2_0", torch.from_numpy(x)[None]).numpy().tobytes() == b"\x00\x40" + codes


@pytest.mark.parametrize(("name", "values"), [("Q1_0", (-1, 1)), ("Q2_0", (-1, 0, 1))])
def test_weights_that_are_so_already_lose_nothing(name: str, values: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).choice(values, (9, 512)).astype(np.float32) * np.float32(np.float16(0.0123))
    assert torch.equal(dequantize(name, encode(name, torch.from_numpy(x))), torch.from_numpy(x))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q2_K"])
def test_a_group_with_a_minimum_is_near_the_best_that_there_is(name: str) -> None:
    """One group in a block of zeros, where d and dmin are free: every scale and minimum of a fine net, in float64."""
    kind = BLOCKS[name]
    most = (1 << kind.code_bits) - 1
    ratios = []
    for seed in range(8):
        group = np.random.default_rng(seed).normal(0, 1, kind.group)
        span = group.max() - group.min()
        s = np.linspace(0.6, 1.1, 300)[:, None, None] * span / most
        m = np.linspace(0.6, 1.1, 200)[None, :, None] * -group.min()
        codes = np.clip(np.rint((group + m) / s), 0, most)
        least = np.square(group - s * codes + m).sum(-1).min()
        x = np.zeros((1, 256), np.float32)
        x[0, 2 * kind.group : 3 * kind.group] = group
        ratios.append(square_error(name, encode(name, torch.from_numpy(x)), x) / least)
    assert np.mean(ratios) < 1.05
    assert max(ratios) < 1.3


@pytest.mark.parametrize("name", ["Q3_K", "Q6_K"])
def test_a_centred_group_is_near_the_best_that_there_is(name: str) -> None:
    kind = BLOCKS[name]
    ratios = []
    for seed in range(8):
        group = np.random.default_rng(seed).normal(0, 1, kind.group)
        s = np.linspace(-1.3, 1.3, 4001)[:, None] * np.abs(group).max() / kind.offset
        s = s[s[:, 0] != 0]
        values = np.clip(np.rint(group / s), -kind.offset, kind.offset - 1)
        least = np.square(group - s * values).sum(-1).min()
        x = np.zeros((1, 256), np.float32)
        x[0, 5 * kind.group : 6 * kind.group] = group
        ratios.append(square_error(name, encode(name, torch.from_numpy(x)), x) / least)
    assert np.mean(ratios) < 1.1
    assert max(ratios) < 1.5


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("size", [1.0, 5e-3])
def test_every_code_is_the_nearest_for_the_scales_as_they_are_in_the_file(name: str, size: float) -> None:
    """At the smaller size d is among float16's denormals, with few bits left."""
    x = np.float32(size) * weights("normal", rows=5)
    parts = decompose(name, encode(name, torch.from_numpy(x)))
    scales = parts.scales().repeat_interleave(parts.kind.group, 1).double().numpy()
    minima = parts.minima()
    low = 0.0 if minima is None else minima.repeat_interleave(parts.kind.group, 1).double().numpy()
    codes = parts.codes.double().numpy()
    taken = np.abs(scales * (codes - parts.kind.offset) - low - x)
    for step in (-1, 1):
        other = np.clip(codes + step, 0, (1 << parts.kind.code_bits) - 1)
        assert (taken <= np.abs(scales * (other - parts.kind.offset) - low - x) + 1e-6 * np.abs(x).max()).all()


@pytest.mark.parametrize("name", K_TYPES)
def test_the_scales_of_a_block_fit_its_codes_about_as_well_as_any(name: str) -> None:
    """Least squares of numpy over d and dmin, block by block, leave nothing to gain but what the search can't round to."""
    x = weights("normal", rows=24)
    data = encode(name, torch.from_numpy(x))
    parts = decompose(name, data)
    assert parts.sub is not None
    u = (parts.values() * parts.sub.float().repeat_interleave(parts.kind.group, 1)).double().numpy().reshape(-1, 256, 1)
    if parts.sub_min is not None:
        v = parts.sub_min.double().repeat_interleave(parts.kind.group, 1).numpy().reshape(-1, 256, 1)
        u = np.concatenate([u, v], -1)
    least = sum(
        np.square(block - columns @ np.linalg.lstsq(columns, block, rcond=None)[0]).sum()
        for columns, block in zip(u, x.astype(np.float64).reshape(-1, 256), strict=True)
    )
    assert square_error(name, data, x) <= 1.0018 * least  # without step 3 all but Q3_K are above


# ---- bytes ----


@pytest.mark.parametrize("name", [*K_TYPES, *SIGNS])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (5, 3)])
def test_packing_is_the_inverse_of_decomposing_for_any_bytes(name: str, rows: int, blocks: int) -> None:
    size = (rows, blocks * BLOCKS[name].block_bytes)
    data = torch.from_numpy(np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8))
    assert torch.equal(pack(decompose(name, data)), data)


@pytest.mark.parametrize("name", ENCODED)
def test_a_row_has_the_same_bytes_alone_and_with_any_number_of_threads(name: str) -> None:
    x = torch.from_numpy(weights("normal", rows=9, width=512))
    whole = encode(name, x)
    assert whole.shape == (9, 512 // BLOCKS[name].block_len * BLOCKS[name].block_bytes)
    assert torch.equal(encode(name, x[4:5]), whole[4:5])
    wide = torch.zeros(9, 700)
    wide[:, 100:612] = x
    assert torch.equal(encode(name, wide[:, 100:612]), whole)
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        assert torch.equal(encode(name, x), whole)
    finally:
        numba.set_num_threads(threads)


@pytest.mark.parametrize("name", ENCODED)
def test_bf16_rows_are_their_float32_values(name: str) -> None:
    x = torch.from_numpy(weights("normal", rows=3, width=256)).bfloat16()
    assert torch.equal(encode(name, x), encode(name, x.float()))


@pytest.mark.parametrize("name", K_TYPES)
def test_a_power_of_two_changes_d_alone(name: str) -> None:
    x = torch.from_numpy(weights("uniform", rows=3, width=512))
    once, scaled = decompose(name, encode(name, x)), decompose(name, encode(name, 16 * x))
    assert torch.equal(once.codes, scaled.codes)
    assert torch.equal(16 * once.d, scaled.d)


# ---- edges ----


@pytest.mark.parametrize("name", ENCODED)
def test_no_rows_and_rows_of_zeros(name: str) -> None:
    assert encode(name, torch.zeros(0, 512)).shape == (0, 512 // BLOCKS[name].block_len * BLOCKS[name].block_bytes)
    for zero in (0.0, -0.0):
        assert not dequantize(name, encode(name, torch.full((3, 512), zero))).any()


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.37, -123.0])
def test_a_constant_row_stays_constant(name: str, value: float) -> None:
    """Up to the rounding of d: a code and a sub scale are exact whole numbers."""
    back = dequantize(name, encode(name, torch.full((2, 512), value)))
    np.testing.assert_allclose(back.numpy(), value, rtol=HALF_STEP)


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-30, 1e-12])
def test_numbers_too_small_for_a_scale_are_zero(name: str, size: float) -> None:
    x = torch.from_numpy(weights("normal", rows=3, width=512) * np.float32(50 * size))
    back = dequantize(name, encode(name, x))
    if name == "MXFP4" and size > 1e-31:
        assert (back - x).abs().max() < 0.5 * x.abs().max()
    else:
        assert not back.any()


@pytest.mark.parametrize("name", K_TYPES)
def test_a_zero_group_beside_others_stays_zero(name: str) -> None:
    x = weights("normal", rows=3, width=512)
    x[:, 32:64] = 0
    assert not dequantize(name, encode(name, torch.from_numpy(x)))[:, 32:64].any()


@pytest.mark.parametrize("name", K_TYPES)
def test_one_huge_number_leaves_finite_rows(name: str) -> None:
    x = weights("normal", rows=2, width=512)
    x[:, 300] = 3e4
    back = dequantize(name, encode(name, torch.from_numpy(x))).numpy()
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[:, 300], 3e4, rtol=0.02)
    np.testing.assert_array_equal(back[:, :256], dequantize(name, encode(name, torch.from_numpy(x[:, :256]))).numpy())


@pytest.mark.parametrize("name", [name for name in ENCODED if name != "MXFP4"])
@pytest.mark.parametrize("size", [3e9, 1e30, 3.4e38])
def test_numbers_beyond_a_float16_scale_are_refused(name: str, size: float) -> None:
    x = torch.zeros(2, 512)
    x[1, 257] = -size
    x[1, 258] = size
    with pytest.raises(UnsupportedError, match=rf"{name}: numbers up to \S+ are more than its scales can carry"):
        encode(name, x)


def test_nearly_the_largest_that_a_scale_carries_is_written() -> None:
    x = torch.full((1, 256), 0.9 * 65504 * 15 * 63)
    assert dequantize("Q4_K", encode("Q4_K", x)).isfinite().all()


# ---- importance ----


@pytest.mark.parametrize("name", K_TYPES)
def test_important_columns_lose_less(name: str) -> None:
    x = weights("normal")
    importance = np.random.default_rng(3).chisquare(1, x.shape[1]).astype(np.float32)
    plain = encode(name, torch.from_numpy(x))
    weighed = encode(name, torch.from_numpy(x), torch.from_numpy(importance))
    assert square_error(name, weighed, x, importance) < 0.97 * square_error(name, plain, x, importance)


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("size", [0.0, 1e-30, 7.0, 1e30])
def test_equal_importance_is_none(name: str, size: float) -> None:
    x = torch.from_numpy(weights("normal", rows=3))
    assert torch.equal(encode(name, x, torch.full((1024,), size)), encode(name, x))


@pytest.mark.parametrize("name", K_TYPES)
def test_columns_without_importance_may_be_anything(name: str) -> None:
    x = weights("normal", rows=5, width=512)
    importance = torch.ones(512)
    importance[::2] = 0
    data = encode(name, torch.from_numpy(x), importance)
    assert dequantize(name, data).isfinite().all()
    odd = np.arange(512) % 2
    assert square_error(name, data, x, odd) < square_error(name, encode(name, torch.from_numpy(x)), x, odd)


@pytest.mark.parametrize("name", K_TYPES)
def test_a_group_without_importance_is_rounded_like_any_other(name: str) -> None:
    """No calibration text has used its columns; the next text may."""
    x = weights("normal", width=256)
    importance = torch.ones(256)
    importance[64:96] = 0
    unused = 1.0 - importance.numpy()
    plain = square_error(name, encode(name, torch.from_numpy(x)), x, unused)
    assert square_error(name, encode(name, torch.from_numpy(x), importance), x, unused) < 1.1 * plain


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_an_importance_that_is_no_weight_is_refused(bad: float) -> None:
    importance = torch.ones(256)
    importance[17] = bad
    with pytest.raises(UsageError, match="negative or not finite"):
        encode("Q4_K", torch.ones(1, 256), importance)


@pytest.mark.parametrize("shape", [(255,), (257,), (1, 256), (0,)])
def test_an_importance_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="for 256 columns"):
        encode("Q4_K", torch.ones(1, 256), torch.ones(shape))


# ---- refused ----


@pytest.mark.parametrize("name", [*BY_GGUF, *SIGNS])
def test_an_importance_for_a_type_that_can_not_weigh_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} is rounded to nearest"):
        encode(name, torch.ones(1, 256), torch.ones(256))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ENCODED])
def test_a_type_that_can_only_be_read_is_refused_with_those_that_can_be_written(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} can be read, not written") as caught:
        encode(name, torch.ones(1, 256))
    assert caught.value.hint is not None
    assert "Q4_K" in caught.value.hint


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown block type 'Q9_K'"):
        encode("Q9_K", torch.ones(1, 256))


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("excess", [-1, 1])
def test_a_width_that_is_not_whole_blocks_is_refused(name: str, excess: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"{name}: rows of {256 + excess} don't divide into blocks"):
        encode(name, torch.ones(1, 256 + excess))


def test_rows_without_columns_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="rows of 0"):
        encode("Q4_K", torch.ones(3, 0))
