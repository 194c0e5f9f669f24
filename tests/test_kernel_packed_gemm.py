"""packed_gemm.cu, emulated, against the formats' own dequantized weights in float64."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random, relative_error
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from emulation.quantized import quantized
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.kernels.kernel import largest_shared_bytes
from nanovllm_cli.kernels.packed import Packed, empty
from nanovllm_cli.kernels.packed_gemm import (
    MAX_ROW_TILES,
    NARROW,
    WIDE,
    Shape,
    fitting,
    new_counters,
    packed_gemm,
    shape_of,
    stage_bytes,
)  # fmt: skip
from nanovllm_cli.quant.format import Fp8, Integer, Nf4

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
TINY = Shape(2, 2, 8)
"""Not in use, but quick to emulate at shapes of several tiles: 32 outputs, 128 columns. All below have one variant of it."""
INT4 = Integer(4, 32, zeros=True)
# rows, outputs, width
SHAPES = [
    (1, 1, 32), (5, 17, 64), (8, 33, 96), (9, 64, 128), (16, 129, 160), (23, 20, 1056), (31, 65, 672), (40, 38, 256),
    (3, 300, 352),
]  # fmt: skip


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.T


def run(emulator: Emulator, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None, **how) -> torch.Tensor:
    """Twice, since counters must be zero again after the first time."""
    counters, residual = new_counters(emulator), how.pop("residual", None)
    first, second = (
        packed_gemm(emulator, x, weight, bias, counters, residual=None if residual is None else residual.clone(), **how)
        for _ in range(2)
    )
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_product_is_added_to_the_residual_with_one_rounding(rows: int, outputs: int, width: int, order: int) -> None:
    weight, meaning = quantized(INT4, outputs, width)
    x, bias, residual = random(rows, width, dtype=BF16), random(outputs, dtype=BF16), random(rows, outputs, dtype=BF16)
    expected = residual.double() + product(x, meaning) + bias.double()
    for num_multiprocessors in (2, 7):
        emulator = Emulator(order, num_multiprocessors=num_multiprocessors)
        close_to_rounding(run(emulator, x, weight, bias, residual=residual, shape=TINY), expected)


def test_result_is_the_residual_itself() -> None:
    weight, _ = quantized(INT4, 20, 64)
    residual, emulator = random(3, 20, dtype=BF16), Emulator()
    out = packed_gemm(emulator, random(3, 64, dtype=BF16), weight, None, new_counters(emulator), residual=residual, shape=TINY)
    assert out is residual


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("form", "dtype", "width"),
    [(Fp8(128), BF16, 1000), (Fp8(), FP16, 264), (Integer(8, zeros=True), FP16, 520), (Nf4(64), BF16, 320)],
    ids=str,
)
def test_every_kind(form: Fp8 | Integer | Nf4, dtype: torch.dtype, width: int, order: int) -> None:
    weight, meaning = quantized(form, 50, width, dtype)
    x = random(9, width, dtype=dtype)
    close_to_rounding(run(Emulator(order), x, weight, shape=TINY), product(x, meaning))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [17, 101, 191])
def test_logits_of_rows_without_16_byte_boundaries_are_not_rounded(width: int, order: int) -> None:
    weight, meaning = quantized(Integer(8), 33, width, FP16)
    x = random(5, width, dtype=FP16)
    got = run(Emulator(order), x, weight, out_dtype=torch.float32, shape=Shape(2, 1, 8))
    assert got.dtype == torch.float32
    assert relative_error(got, product(x, meaning)) <= 1e-5


def test_columns_in_another_order() -> None:
    weight, meaning = quantized(INT4, 40, 160, ordered=True)
    x = random(4, 160, dtype=BF16)
    close_to_rounding(run(Emulator(), x, weight, shape=TINY), product(x, meaning))


def test_a_row_has_the_same_bits_alone_and_among_any_others() -> None:
    """In blocks of few rows and of many, whose warps have two strips each; in several launches, too."""
    weight, meaning = quantized(INT4, 70, 608)
    shape, many = TINY._replace(rows=64), 64 * MAX_ROW_TILES + 5
    x, bias = random(many, 608, dtype=BF16), random(70, dtype=BF16)
    emulator = Emulator(num_multiprocessors=5)
    together = packed_gemm(emulator, x[:70], weight, bias, new_counters(emulator), shape=shape)
    close_to_rounding(together, product(x[:70], meaning) + bias.double())
    used = set()
    for part in (slice(0, 1), slice(3, 11), slice(0, 64), slice(61, 69)):
        used.add(fitting(shape, part.stop - part.start, weight, emulator.capability)[0].strips)
        assert torch.equal(packed_gemm(emulator, x[part], weight, bias, new_counters(emulator), shape=shape), together[part])
    assert used == {1, 2}
    small = TINY._replace(rows=8)
    x = x[: 8 * MAX_ROW_TILES + 3]
    several = packed_gemm(emulator, x, weight, bias, new_counters(emulator), shape=small)
    assert torch.equal(several[:70], together)
    close_to_rounding(several, product(x, meaning) + bias.double())


def test_shape_in_use() -> None:
    weight, meaning = quantized(INT4, 300, 512)
    x = random(8, 512, dtype=BF16)
    close_to_rounding(run(Emulator(num_multiprocessors=3), x, weight, shape=NARROW), product(x, meaning))


def test_wide_where_there_is_work_for_all() -> None:
    emulator = Emulator(num_multiprocessors=132)
    assert [shape_of(outputs, emulator) for outputs in (1024, 4096, 6144, 12288, 151936)] == [NARROW] * 3 + [WIDE] * 2


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=["wide", "narrow"])
def test_stages_fit_shared_memory(capability: int, kind, shape: Shape) -> None:
    weight = empty(kind, 16, 1024, 32, torch.float32, zeros=True, ordered=False, device="meta")
    for rows in (1, 8, 9, 33, 64, 65, 1000):
        chosen, stages = fitting(shape, rows, weight, capability)
        assert stages >= (3 if capability >= 80 else 2)
        assert stages * stage_bytes(chosen, weight) <= largest_shared_bytes(capability) - 512
        assert chosen.rows >= min(rows, 16)
        if 90 <= capability < 120:
            assert chosen.rows == (8 if rows <= 8 else 16 if rows <= 16 else 64)


def test_turing_has_no_bfloat16() -> None:
    weight, _ = quantized(INT4, 20, 64)
    turing = Emulator(capability=75)
    with pytest.raises(UnsupportedError):
        packed_gemm(turing, random(1, 64, dtype=BF16), weight, None, new_counters(turing))


def test_nothing_is_launched_for_no_rows() -> None:
    weight, _ = quantized(INT4, 20, 64)
    emulator = Emulator()
    assert packed_gemm(emulator, random(0, 64, dtype=BF16), weight, None, new_counters(emulator)).shape == (0, 20)
    assert not emulator.launches


@pytest.mark.parametrize("bug", ["NO_WAIT", "NO_BARRIER", "COUNTER"])
def test_planted_bugs_are_seen(bug: str) -> None:
    def right(order: int) -> bool:
        weight, meaning = quantized(INT4, 40, 1056)
        x = random(11, 1056, dtype=BF16)
        try:
            got = run(Emulator(order, bugs=(bug,), num_multiprocessors=3), x, weight, shape=TINY)
            close_to_rounding(got, product(x, meaning))
        except (AssertionError, KernelFailed):
            return False
        return True

    assert not all(right(order) for order in ORDERS)


@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_bytes(bug: tuple[str, ...]) -> None:
    strips = (1 << 31) // 512 + 2  # the last two begin at 2^31
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are codes of zero
    last, meaning = quantized(INT4, 32, 64)
    codes = zeros(below + strips * 512, torch.uint8)[below:].view(strips, 1, 512)
    scales, points = zeros(strips * 32, BF16).view(strips, 2, 16), zeros(strips * 32, torch.uint8).view(strips, 2, 16)
    weight = last._replace(num_rows=strips * 16, codes=codes, scales=scales, zeros=points)
    for mine, theirs in ((codes, last.codes), (scales, last.scales), (points, last.zeros)):
        mine[-2:] = theirs
    x, residual = random(1, 64, dtype=BF16), zeros(strips * 16, BF16).view(1, -1)
    stripes = strips // 2 // 4
    emulator = Emulator(bugs=bug, num_multiprocessors=stripes, only_block=stripes - 1)
    packed_gemm(emulator, x, weight, None, new_counters(emulator), residual=residual, shape=TINY)
    if bug:
        assert relative_error(residual[:, -32:], product(x, meaning)) > 0.1
    else:
        close_to_rounding(residual[:, -32:], product(x, meaning))


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, w, b, r: (x[:, ::2], w, b, r),
        lambda x, w, b, r: (x[:, :-1].contiguous(), w, b, r),
        lambda x, w, b, r: (x.float(), w, b, r),
        lambda x, w, b, r: (x, w._replace(codes=w.codes[:1]), b, r),
        lambda x, w, b, r: (x, w._replace(scales=w.scales[:, :1]), b, r),
        lambda x, w, b, r: (x, w._replace(zeros=w.zeros.int()), b, r),
        lambda x, w, b, r: (x, w, b[:-1], r),
        lambda x, w, b, r: (x, w, b, r[:1]),
        lambda x, w, b, r: (x, w, b, r.float()),
    ],
    ids=["strides", "width", "float32", "codes", "scales", "zero points", "bias", "residual rows", "residual type"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    weight, _ = quantized(INT4, 20, 64)
    x, weight, bias, residual = bad(random(3, 64, dtype=BF16), weight, random(20, dtype=BF16), random(3, 20, dtype=BF16))
    emulator = Emulator()
    with pytest.raises((AssertionError, KeyError)):
        packed_gemm(emulator, x, weight, bias, new_counters(emulator), residual=residual)
