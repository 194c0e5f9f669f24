"""Matmuls of packed integer weights against float64 products of what the rounding and the formats' formulas give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, integer
from nanovllm_cli.kernels.integer import Packed, Rounding
from nanovllm_cli.kernels.record_kinds import E8M0, F16, SUB_I8, RecordLayout
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.cpu_records import pack_rows
from nanovllm_cli.quant.cpu_stacked import CpuStacked
from nanovllm_cli.quant.cpu_values import CpuValues
from nanovllm_cli.quant.format import Blocks, Integer
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from nanovllm_cli.quant.rows import BlockRows, IntegerRows, take_rows
from record_reference import dequantize
from test_cpu_records import CODEBOOKS, KINDS, codebook_layout, random_rows
from test_gguf_blocks import expected

GENERATOR = torch.Generator().manual_seed(3)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def rounded(x: torch.Tensor, group: int, per_row: bool = False) -> torch.Tensor:
    """x rounded to 127 steps of the largest magnitude of each group, float64."""
    tokens, width = x.shape
    padded = torch.zeros(tokens, -(-width // group) * group)
    padded[:, :width] = x
    groups = padded.view(tokens, -1, group)
    largest = groups.abs().amax((1, 2) if per_row else 2, keepdim=True)
    codes = torch.round(groups * torch.div(torch.tensor(127.0), largest)).nan_to_num()
    return (codes.double() * (largest.double() / 127)).view(tokens, -1)[:, :width]


def packed(layout: RecordLayout, seed: int = 0) -> tuple[Packed, torch.Tensor]:
    """A random weight, and what it is."""
    rows = random_rows(layout, seed)
    weight = integer.empty(layout)
    pack_rows(layout, weight.data, 0, rows)
    return weight, dequantize(layout, rows)


def multiply(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    per_row: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.layout.num_rows), 7.0, dtype=dtype)
    integer.matmul(integer.quantize(x, Rounding(weight.layout.group, per_row, None)), weight, bias, out)
    return out


@pytest.mark.parametrize(("bits", "group", "scale", "low", "offset"), KINDS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 256), (2, 3, 20), (7, 70, 288), (13, 130, 768), (263, 65, 96)])
def test_matmul_equals_the_formula(
    tokens: int, n: int, k: int, bits: int, group: int, scale: int, low: int, offset: int
) -> None:
    weight, values = packed(RecordLayout(n, k, bits, group, scale, low, offset))
    x = randn(tokens, k)
    expected = rounded(x, group) @ values.double().T
    assert error(multiply(x, weight), expected) < 1e-6
    bias = randn(n)
    assert error(multiply(x, weight, bias, dtype=torch.bfloat16), expected + bias.double()) < 4e-3


@pytest.mark.parametrize(("index_bits", "length", "signs"), CODEBOOKS)
def test_codes_may_be_points_of_a_codebook(index_bits: int, length: int, signs: int) -> None:
    for tokens, n, k in [(7, 70, 288), (300, 130, 768)]:
        weight, values = packed(codebook_layout(n, k, index_bits, length, signs))
        x = randn(tokens, k)
        whole = multiply(x, weight)
        assert error(whole, rounded(x, 32) @ values.double().T) < 1e-6
        ids = torch.tensor([n - 1, 0, n // 2])
        assert torch.equal(integer.rows(weight, ids, None, torch.float32), values[ids])
        for first, last in [(0, 1), (3, 5), (tokens - 4, tokens)]:
            assert torch.equal(multiply(x[first:last].contiguous(), weight), whole[first:last])
        cpu.set_num_threads(1)
        assert torch.equal(multiply(x, weight), whole)
        cpu.set_num_threads(2)


_TABLE = tuple(int(v) for v in np.random.default_rng(0).permutation(16) * 15)


@pytest.mark.parametrize(("bits", "table"), [(2, None), (3, None), (4, None), (4, _TABLE)])
@pytest.mark.parametrize(("group", "scale"), [(16, SUB_I8), (32, SUB_I8), (32, E8M0), (64, F16)])
def test_codes_may_stand_for_other_numbers(group: int, scale: int, bits: int, table: tuple[int, ...] | None) -> None:
    """A single row is multiplied without a panel, by the same numbers."""
    layout = RecordLayout(70, 288, bits, group, scale, 0, offset=113, unit=3, table=table)
    weight, values = packed(layout)
    x = randn(5, 288)
    whole = multiply(x, weight)
    assert error(whole, rounded(x, group) @ values.double().T) < 1e-6
    for row in range(5):
        assert torch.equal(multiply(x[row : row + 1].contiguous(), weight), whole[row : row + 1])
    ids = torch.arange(70)
    assert torch.equal(integer.rows(weight, ids, None, torch.float32), values)


@pytest.mark.parametrize(("bits", "group", "scale", "low", "offset"), KINDS)
@pytest.mark.parametrize("k", [40, 768])
def test_a_row_has_the_same_bits_in_any_batch(k: int, bits: int, group: int, scale: int, low: int, offset: int) -> None:
    weight, _ = packed(RecordLayout(130, k, bits, group, scale, low, offset))
    x = randn(300, k)
    whole = multiply(x, weight)
    for first, last in [(0, 1), (5, 6), (3, 5), (0, 3), (4, 8), (0, 5), (1, 7), (0, 7), (2, 10), (4, 13), (250, 261), (13, 300)]:
        assert torch.equal(multiply(x[first:last].contiguous(), weight), whole[first:last])


@pytest.mark.parametrize(("bits", "group", "scale", "low", "offset"), KINDS)
def test_rows_are_dequantized_to_the_bit(bits: int, group: int, scale: int, low: int, offset: int) -> None:
    weight, values = packed(RecordLayout(130, 288, bits, group, scale, low, offset))
    ids = torch.tensor([129, 0, 64, 64])
    assert torch.equal(integer.rows(weight, ids, None, torch.float32), values[ids])
    assert torch.equal(integer.rows(weight, ids, None, torch.bfloat16), values[ids].bfloat16())


def test_columns_of_a_wider_result() -> None:
    weight, _ = packed(RecordLayout(70, 256, 4, 32, 1, 0, 8))
    x = randn(9, 256)
    wide = torch.zeros(9, 100)
    integer.matmul(integer.quantize(x, Rounding(32, False, None)), weight, None, wide[:, 20:90])
    assert torch.equal(wide[:, 20:90], multiply(x, weight))
    assert not wide[:, :20].any()
    assert not wide[:, 90:].any()


def test_rows_of_zeros_and_tiny_numbers() -> None:
    weight, values = packed(RecordLayout(64, 256, 8, 256, 0, 0, 128))
    x = torch.zeros(3, 256)
    x[1] = 1e-37
    x[2] = 1e-30
    out = multiply(x, weight)
    assert not out[0].any()
    assert out.isfinite().all()
    assert error(out[2], 1e-30 * values.double().sum(1)) < 1e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_row_with_a_bad_number_shows_it_and_the_others_do_not(bad: float, per_row: bool) -> None:
    weight, _ = packed(RecordLayout(64, 512, 4, 128, 2, 1))
    x = randn(7, 512)
    good = multiply(x, weight, per_row=per_row)
    x[3, 300] = bad
    out = multiply(x, weight, per_row=per_row)
    assert not out[3].isfinite().any()
    keep = [0, 1, 2, 4, 5, 6]
    assert torch.equal(out[keep], good[keep])


def integer_rows(form: Integer, n: int, k: int, order: torch.Tensor | None = None) -> IntegerRows:
    rows = form.quantize(randn(n, k, dtype=torch.float32) * 0.02)
    return rows._replace(order=order)


FORMS = [
    Integer(8), Integer(8, 32), Integer(4, 32), Integer(4, 128, zeros=True), Integer(2, 16), Integer(3, 64, scales="float16"),
    Integer(4, 512, scales="float32"), Integer(8, 0, zeros=True), Integer(4),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_integer_formats(form: Integer) -> None:
    n, k = 150, 1024
    storage = CpuInteger(form, n, k, torch.bfloat16)
    rows = integer_rows(form, n, k)
    for first, last in [(0, 128), (128, 150)]:
        storage.load_rows(first, IntegerRows(*(None if t is None else t[first:last] for t in rows)))  # type: ignore[arg-type]
    values = form.dequantize(rows)
    x = randn(11, k)
    group = min(form.group or 256, 256)
    actual = storage.matmul(x, None, torch.float32)
    assert error(actual, rounded(x, group, per_row=form.group == 0) @ values.double().T) < 1e-6
    assert error(actual, x.double() @ values.double().T) < 0.012
    ids = torch.tensor([149, 3])
    assert torch.equal(storage.rows(ids, None), values[ids].bfloat16())
    assert storage.num_bytes <= 1.1 * form.row_bytes(k) * 192  # three tiles of 64


def test_floats_are_rounded_where_they_are_loaded() -> None:
    form, weight = Integer(4, 32), randn(128, 64)
    storages = [CpuInteger(form, 128, 64, torch.bfloat16) for _ in range(2)]
    storages[0].load_rows(0, weight)
    storages[1].load_rows(0, form.quantize(weight))
    ids = torch.arange(128)
    assert torch.equal(storages[0].rows(ids, None), storages[1].rows(ids, None))
    assert torch.equal(storages[0].rows(ids, None), form.dequantize(form.quantize(weight)).bfloat16())


def test_activation_order() -> None:
    form = Integer(4, 32, ordered=True)
    order = torch.randperm(96, generator=GENERATOR).int()
    rows = integer_rows(Integer(4, 32), 70, 96, order)
    storage = CpuInteger(form, 70, 96, torch.bfloat16)
    storage.load_rows(0, rows)
    values, x = form.dequantize(rows), randn(5, 96)
    expected = rounded(x[:, order.long()], 32) @ values[:, order.long()].double().T
    assert error(storage.matmul(x, None, torch.float32), expected) < 1e-6
    ids = torch.tensor([69, 1])
    assert torch.equal(storage.rows(ids, None), values[ids].bfloat16())


@pytest.mark.parametrize("group", [8, 48, 288])
def test_groups_that_do_not_fit_are_refused(group: int) -> None:
    with pytest.raises(UnsupportedError, match=f"groups of {group}"):
        CpuInteger(Integer(4, group), 64, 288, torch.bfloat16)


def block_bytes(name: str, n: int, blocks: int) -> torch.Tensor:
    """Any bytes whose numbers are finite and of a sane size."""
    kind, rng = BLOCKS[name], np.random.default_rng(5)
    found = np.empty((0, kind.block_bytes), np.uint8)
    while len(found) < n * blocks:
        data = rng.integers(0, 256, (4096, kind.block_bytes), dtype=np.uint8)
        values = np.abs(expected(name, data)).max(1)
        found = np.concatenate([found, data[(values < 1e4) & (values > 1e-3)]])
    return torch.from_numpy(found[: n * blocks].reshape(n, -1).copy())


@pytest.mark.parametrize("name", list(BLOCKS))
def test_every_block_type(name: str) -> None:
    n, width = 70, 512 + BLOCKS[name].block_len % 256
    data = block_bytes(name, n, width // BLOCKS[name].block_len)
    storage = CpuInteger(Blocks(name), n, width, torch.bfloat16)
    storage.load_rows(0, BlockRows(data))
    values = torch.from_numpy(expected(name, data.numpy()))
    x = randn(7, width)
    out = storage.matmul(x, None, torch.float32)
    assert error(out, rounded(x, BLOCKS[name].group) @ values.double().T) < 1e-6
    assert torch.equal(storage.matmul(x[2:3].contiguous(), None, torch.float32), out[2:3])
    ids = torch.arange(n)
    assert torch.equal(storage.rows(ids, None), values.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_nvfp4_have_factors(dtype: torch.dtype) -> None:
    """As small as of a weight of 1e-3, and beyond what a scale of 16 bits holds."""
    n = 70
    data, factors = block_bytes("NVFP4", n, 5), torch.logspace(-12, 2, n)
    values = torch.from_numpy(expected("NVFP4", data.numpy())).double() * factors.double()[:, None]
    exact, rounding = CpuValues(Blocks("NVFP4"), n, 320, dtype, rounds=False), CpuInteger(Blocks("NVFP4"), n, 320, dtype)
    for storage in (exact, rounding):
        storage.load_rows(40, take_rows(BlockRows(data, factors), slice(40, n)))
        storage.load_rows(0, take_rows(BlockRows(data, factors), slice(0, 40)))
    x = randn(7, 320, dtype=dtype)
    for found, wanted in (
        (exact.matmul(x, None, torch.float32), x.double() @ values.T),
        (rounding.matmul(x, None, torch.float32), rounded(x, 16) @ values.T),
    ):
        assert ((found.double() - wanted).abs() / wanted.abs().amax(0)).max() < 2e-6
    assert torch.allclose(exact.rows(torch.arange(n), None).double(), values, rtol=2**-8, atol=0)
    assert torch.equal(exact.rows(torch.arange(n), None), rounding.rows(torch.arange(n), None))
    assert torch.allclose(Blocks("NVFP4").dequantize(BlockRows(data, factors)).double(), values, rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_type_with_activations_as_they_are(name: str, dtype: torch.dtype) -> None:
    n, blocks = 70, 512 // BLOCKS[name].block_len
    data = block_bytes(name, n, blocks)
    storage = CpuValues(Blocks(name), n, 512, dtype, rounds=False)
    storage.load_rows(0, BlockRows(data))
    values = torch.from_numpy(expected(name, data.numpy()))
    x = randn(7, 512, dtype=dtype)
    out = storage.matmul(x, None, torch.float32)
    assert error(out, x.double() @ values.double().T) < 1e-6
    assert torch.equal(storage.matmul(x[2:3].contiguous(), None, torch.float32), out[2:3])
    assert torch.equal(storage.rows(torch.arange(n), None), values.to(dtype))


def test_parts_of_several_formats_write_one_result() -> None:
    forms: list[Integer | Blocks] = [Blocks("Q4_0"), Blocks("Q8_0"), Integer(8)]
    parts = [CpuInteger(form, 70, 256, torch.bfloat16) for form in forms]
    stacked = CpuStacked(parts, torch.bfloat16)
    weight, bias, x = randn(70, 256), randn(210), randn(6, 256)
    for i in range(3):
        stacked.load_rows(70 * i, weight)
    assert stacked.recordable
    actual = stacked.matmul(x, bias, torch.bfloat16)
    for i, part in enumerate(parts):
        columns = slice(70 * i, 70 * i + 70)
        assert torch.equal(actual[:, columns], part.matmul(x, bias[columns], torch.bfloat16))


def test_a_recording_gives_the_same_bits() -> None:
    storage = CpuInteger(Blocks("Q4_0"), 130, 512, torch.bfloat16)
    storage.load_rows(0, randn(130, 512))
    x, ids = randn(4, 512), torch.tensor([5, 129])
    with cpu.Program(cpu.MemoryPool()) as program:
        out, rows = storage.matmul(x, None, torch.float32), storage.rows(ids, None)
    for _ in range(2):
        x.copy_(randn(4, 512))
        program.replay()
        assert torch.equal(out, storage.matmul(x, None, torch.float32))
        assert torch.equal(rows, storage.rows(ids, None))
