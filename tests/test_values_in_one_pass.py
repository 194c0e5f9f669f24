"""Few rows of bf16 over fp8, nf4 and whole numbers of 4 bits: products without a panel give the bits of those with one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels import simd_values
from nanovllm_cli.kernels.record_kinds import Codebook, RecordLayout
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.format import Blocks, Format, Fp8, Integer, Nf4
from nanovllm_cli.quant.rows import Fp8Rows

FORMS: list[Format] = [
    Fp8(128, "none"), Fp8(128), Fp8(0, "none"), Fp8(), Nf4(), Nf4(32), Nf4(16), Integer(4, 32, activation="none"),
    Integer(4, 128, activation="none"), Integer(4, 32, zeros=True, activation="none"),
]  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("width", [32, 256, 640, 672, 100])
def test_a_row_has_the_same_bits_in_any_batch(width: int, form: Format) -> None:
    """13 rows go through a panel; so does each width that is not whole steps, or a group of half a one."""
    if getattr(form, "group", 0) and width % getattr(form, "group", 0):
        pytest.skip("the format has whole groups")
    weight = make_storage(form, 130, width, torch.bfloat16, rounds=True)
    weight.load_rows(0, randn(130, width) / 8)
    x, bias = randn(13, width).bfloat16(), randn(130).bfloat16()
    whole = weight.matmul(x, bias, torch.bfloat16)
    for first, last in [(0, 1), (12, 13), (3, 5), (0, 3), (4, 8), (0, 5), (1, 7), (2, 9), (5, 13)]:
        assert torch.equal(weight.matmul(x[first:last].contiguous(), bias, torch.bfloat16), whole[first:last])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12])
def test_every_code_is_the_number_that_torch_has_for_it(rows: int) -> None:
    """Numbers below the smallest normal one too: a processor that multiplies pairs of bf16 would take theirs for zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN, which no reader lets in
    weight = make_storage(Fp8(0, "none"), 256, 64, torch.bfloat16, rounds=True)
    table = codes[:, None].repeat(1, 64)
    weight.load_rows(0, Fp8Rows(table, torch.full((256, 1), 0.5)))
    x = torch.zeros(rows, 64).bfloat16()
    for row in range(rows):
        x[row, 5 * row + row % 4] = 2.0 * (row + 1)
    expected = codes.view(torch.float8_e4m3fn).float()
    out = weight.matmul(x, None, torch.float32)
    for row in range(rows):
        assert torch.equal(out[row], expected * (row + 1))


@pytest.mark.parametrize("rows", [1, 4, 13])
def test_codes_that_a_table_says_the_numbers_of(rows: int) -> None:
    """MXFP4 with exact activations: whole numbers, by a table of the layout's own."""
    weight = make_storage(Blocks("MXFP4"), 70, 512, torch.bfloat16, rounds=False)
    weight.load_rows(0, randn(70, 512))
    x = randn(rows, 512).bfloat16()
    exact = x.double() @ weight.rows(torch.arange(70), None).double().T  # whose numbers bf16 has
    assert ((weight.matmul(x, None, torch.float32) - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("rows", [4, 200])
def test_against_float64(rows: int) -> None:
    weight = make_storage(Nf4(), 70, 512, torch.bfloat16, rounds=True)
    values = randn(70, 512)
    weight.load_rows(0, values)
    ids = torch.arange(70)
    # nf4's numbers are rounded to bf16, its scales are not
    x, dense = randn(rows, 512).bfloat16(), weight.rows(ids, None).double()
    out = weight.matmul(x, None, torch.float32).double()
    exact = x.double() @ dense.T
    assert ((out - exact).norm() / exact.norm()) < 2e-3
    assert ((out - x.double() @ values.double().T).norm() / exact.norm()) < 0.12


def test_which_weights_have_it() -> None:
    if not simd_values.AVAILABLE:
        pytest.skip("this processor adds products up in pairs, and finds no e4m3 in pairs")
    eight, four = RecordLayout(64, 1024, 8, 128, kinds.BF16), RecordLayout(64, 1024, 4, 64, kinds.BF16)
    rows_of, most = simd_values.most_rows, simd_values.MOST_ROWS
    assert rows_of(eight, True) == rows_of(four, False) == most
    assert rows_of(eight, False) == 0, "whole numbers of 8 bits are no e4m3"
    assert rows_of(replace(eight, width=1000), True) == 0, "a step reads 32 columns"
    assert rows_of(replace(four, group=16), False) == 0, "a group is half a step"
    assert rows_of(replace(four, low=kinds.ZERO), False) == 0, "zero points differ from column to column"
    points = Codebook(8, 4, kinds.NO_SIGNS, bytes(4 << 8), ((0, 1, 2, 3),) * 2)
    assert rows_of(replace(four, bits=0, codebook=points), False) == 0
