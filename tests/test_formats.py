"""Rounding to nearest and back, against the formulas worked in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.format import NF4, Blocks, Fp8, Integer, Nf4
from nanovllm_cli.quant.rows import IntegerRows


def rows_of(n: int, width: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * 0.05
    rows[0] = 0
    rows[1, 0] = 40.0
    return rows


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers_are_off_by_half_a_step_at_most(bits: int, group: int, zeros: bool) -> None:
    rows = rows_of(5, 192)
    form = Integer(bits, group, zeros, scales="float32")
    quantized = form.quantize(rows)
    step = quantized.scales.double().repeat_interleave(192 // quantized.scales.shape[1], 1).numpy()
    error = np.abs(form.dequantize(quantized).double().numpy() - rows.double().numpy())
    assert int(quantized.codes.max()) < 1 << bits
    # zero points are rounded too; centred codes reach half a step less far up than down
    assert (error <= step * (1.0 if zeros or bits < 8 else 0.5) + 1e-6).all()


@pytest.mark.parametrize("form", [Integer(8), Integer(8, 64), Fp8(), Fp8(128), Nf4()])
def test_what_a_format_can_say_it_says_exactly(form: Integer | Fp8 | Nf4) -> None:
    once = form.dequantize(form.quantize(rows_of(130, 192)))
    again = form.dequantize(form.quantize(once))
    assert torch.allclose(once, again, rtol=0.01, atol=1e-3)
    assert (once[0] == 0).all()


def test_integer_dequantizes_by_its_formula_in_the_order_of_its_columns() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (3, 64), generator=generator, dtype=torch.uint8)
    scales = torch.rand(3, 2, generator=generator).half()
    zeros = torch.randint(0, 16, (3, 2), generator=generator, dtype=torch.uint8)
    order = torch.randperm(64, generator=generator).int()
    got = Integer(4, 32, zeros=True, ordered=True, scales="float16").dequantize(
        IntegerRows(codes, scales, zeros, order)
    )
    for row in range(3):
        for position, column in enumerate(order.tolist()):
            group = position // 32
            wanted = (int(codes[row, column]) - int(zeros[row, group])) * float(scales[row, group])
            assert float(got[row, column]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("block", [0, 128])
def test_fp8_rounds_as_its_type_does(block: int) -> None:
    rows = rows_of(200, 192)
    quantized = Fp8(block).quantize(rows)  # type: ignore[arg-type]
    values = Fp8(block).dequantize(quantized).double().numpy()  # type: ignore[arg-type]
    first = rows[:128, :128].double().numpy() if block else rows[1:2].double().numpy()
    got = values[:128, :128] if block else values[1:2]
    scale = np.abs(first).max() / 448
    # e4m3 has three bits after the point: half a step is a sixteenth of the value, or half of the smallest number, 2**-9
    assert (np.abs(got - first) <= np.maximum(np.abs(first) / 16, scale * 2**-10) * 1.0001).all()


def test_nf4_takes_the_nearest_of_its_values() -> None:
    rows = rows_of(3, 128)
    quantized = Nf4().quantize(rows)
    table = np.array(NF4)
    scaled = rows.double().numpy().reshape(3, 2, 64)
    scaled = scaled / np.maximum(np.abs(scaled).max(-1, keepdims=True), 1e-30)
    wanted = np.abs(scaled[..., None] - table).argmin(-1).reshape(3, 128)
    assert (quantized.codes.numpy() == wanted).mean() > 0.999  # but for ties in float32


@pytest.mark.parametrize(
    ("form", "bytes_a_row"),
    [
        (Integer(8), 258), (Integer(4, 32), 144), (Integer(4, 128, zeros=True), 133), (Nf4(), 144), (Blocks("Q4_0"), 144),
        (Fp8(), 260), (Blocks("Q4_K"), 144),
    ],
)  # fmt: skip
def test_bytes_of_a_row_are_those_of_the_published_format(form: Integer, bytes_a_row: float) -> None:
    assert form.row_bytes(256) == bytes_a_row


@pytest.mark.parametrize("form", [Integer(4, 32), Nf4(), Blocks("Q4_0"), Blocks("Q4_K")])
def test_a_width_that_does_not_divide_is_refused(form: Integer) -> None:
    with pytest.raises(UnsupportedError, match="divide"):
        form.check_width(72)
