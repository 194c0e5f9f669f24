"""packed_wgmma.cu, emulated, against the formats' own dequantized weights in float64: what wgmma reads, writes and when is
emulation/warpgroups.cpp's."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random, relative_error
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from emulation.quantized import quantized
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.kernels.kernel import largest_shared_bytes
from nanovllm_cli.kernels.packed import BITS, GROUPS, Packed, empty
from nanovllm_cli.kernels.packed_gemm import Shape, new_counters
from nanovllm_cli.kernels.packed_wgmma import (
    LEAST_STAGES,
    SHAPES,
    Plan,
    packed_wgmma,
    plan_of,
    shared_bytes,
    stages_of,
)
from nanovllm_cli.quant.format import Fp8, Integer, Nf4

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
SMALL = Plan(Shape(4, 1, 64))
"""Not in use, but the quickest to emulate: a warpgroup, 64 outputs."""
INT4 = Integer(4, 32, zeros=True, scales="float16")
# rows, outputs, width
CASES = [(1, 1, 32), (17, 33, 64), (63, 64, 96), (64, 65, 544), (65, 130, 352), (130, 20, 1056)]
ONE_IN_256 = 2e-3
"""Of the largest sum: bf16 weights whose scale has more bits may be one step off, one weight in 256, and a sum may have two."""


def run(emulator: Emulator, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None, **how) -> torch.Tensor:
    return packed_wgmma(emulator, x, weight, bias, new_counters(emulator), **{"plan": SMALL} | how)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By weights that are rounded to x's type, as unpacking leaves them."""
    return x.double() @ weight.to(x.dtype).double().T


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), CASES)
def test_product_is_added_to_the_residual_with_one_rounding(rows: int, outputs: int, width: int, order: int) -> None:
    weight, meaning = quantized(INT4, outputs, width)
    x, bias, residual = random(rows, width, dtype=BF16), random(outputs, dtype=BF16), random(rows, outputs, dtype=BF16)
    expected = residual.double() + product(x, meaning) + bias.double()
    out = run(Emulator(order), x, weight, bias, residual=residual)
    assert out is residual
    close_to_rounding(out, expected, ONE_IN_256)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_in_use(shape: Shape) -> None:
    weight, meaning = quantized(Integer(4, 128), 300, 384)
    x = random(140, 384, dtype=BF16)
    close_to_rounding(run(Emulator(7), x, weight, plan=Plan(shape)), product(x, meaning))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("form", "dtype", "width"),
    [
        (Fp8(128), BF16, 1000), (Fp8(128, "none"), FP16, 384), (Integer(8, 64, zeros=True), BF16, 576), (Nf4(64), BF16, 320),
        (Nf4(32), FP16, 96), (Integer(4, 128), FP16, 256),
    ],
    ids=str,
)  # fmt: skip
def test_every_kind(form: Fp8 | Integer | Nf4, dtype: torch.dtype, width: int, order: int) -> None:
    weight, meaning = quantized(form, 50, width, dtype)
    x = random(9, width, dtype=dtype)
    close_to_rounding(run(Emulator(order), x, weight), product(x, meaning), ONE_IN_256)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", [Fp8(), Integer(8), Integer(8, zeros=True), Integer(4)], ids=str)
def test_scales_of_rows_multiply_sums_that_are_not_rounded(form: Fp8 | Integer, order: int) -> None:
    weight, meaning = quantized(form, 50, 520, FP16)
    x = random(70, 520, dtype=FP16)
    got = run(Emulator(order), x, weight, None, out_dtype=torch.float32, plan=Plan(Shape(4, 4, 64)))
    assert relative_error(got, x.double() @ meaning.T) <= 1e-5


@pytest.mark.parametrize(
    ("form", "dtype", "off"),
    [
        (Integer(4, 64), BF16, 0), (Integer(4, 64, scales="float16"), FP16, 0), (Integer(4, 128), FP16, 0), (Nf4(32), FP16, 0),
        (INT4, BF16, 0.01), (Nf4(64), BF16, 0.01), (Fp8(128), BF16, 0.01),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_rounded_once(form: Fp8 | Integer | Nf4, dtype: torch.dtype, off: float) -> None:
    """Rows of x with a single one take them out. Scales that bf16 hasn't may leave a few one step away."""
    weight, meaning = quantized(form, 64, 128, dtype)
    got = run(Emulator(), torch.eye(128, dtype=dtype), weight).T
    assert (got != meaning.to(dtype)).double().mean() <= off
    assert ((got - meaning).abs() <= meaning.abs() * (2.0**-8 if dtype == BF16 else 2.0**-11) * 1.01 + 2.0**-25).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [17, 101, 191])
def test_logits_of_rows_without_16_byte_boundaries_are_not_rounded(width: int, order: int) -> None:
    weight, meaning = quantized(Integer(8), 33, width, FP16)
    x = random(5, width, dtype=FP16)
    got = run(Emulator(order), x, weight, None, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, x.double() @ meaning.T) <= 1e-5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width", "splits"), [(65, 70, 544, 4), (3, 33, 101, 2), (9, 130, 64, 3)])
def test_blocks_that_share_a_tile(rows: int, outputs: int, width: int, splits: int, order: int) -> None:
    """Some have no columns, where there are fewer slices than blocks. Twice, since counters must be zero again."""
    weight, meaning = quantized(Integer(4, 32), outputs, width) if width % 32 == 0 else quantized(Integer(8), outputs, width)
    x, bias, residual = random(rows, width, dtype=BF16), random(outputs, dtype=BF16), random(rows, outputs, dtype=BF16)
    exact = x.double() @ meaning.T if weight.group == 0 else product(x, meaning)
    emulator = Emulator(order)
    counters = new_counters(emulator)
    first, second = (
        packed_wgmma(emulator, x, weight, bias, counters, residual=residual.clone(), plan=Plan(SMALL.shape, splits))
        for _ in range(2)
    )
    assert torch.equal(first, second)
    close_to_rounding(first, exact + bias.double() + residual.double())


def test_columns_in_another_order() -> None:
    weight, meaning = quantized(INT4, 40, 160, ordered=True)
    x = random(4, 160, dtype=BF16)
    close_to_rounding(run(Emulator(), x, weight), product(x, meaning), ONE_IN_256)


def test_a_row_has_the_same_bits_in_tiles_of_any_height() -> None:
    """Beyond one band of tiles, too."""
    weight, meaning = quantized(Integer(4, 64), 70, 192)
    x = random(64 * 17 + 5, 192, dtype=BF16)
    launcher = Emulator(7)
    together = run(launcher, x, weight)
    close_to_rounding(together, product(x, meaning))
    for part, shape in ((slice(0, 1), SMALL.shape), (slice(60, 190), Shape(8, 1, 128)), (slice(3, 99), Shape(8, 1, 96))):
        assert torch.equal(run(launcher, x[part], weight, plan=Plan(shape)), together[part])


def test_blocks_are_chosen_to_fill_the_gpu() -> None:
    def plan(rows: int, outputs: int, width: int) -> Plan:
        weight = empty("int4", outputs, width, 128, BF16, zeros=False, ordered=False, device="meta")
        chosen = plan_of(rows, weight, 132)
        assert chosen.shape in SHAPES
        assert chosen.splits == 1 or chosen.tiles(rows, outputs) * chosen.splits <= 132
        return chosen

    for rows in (65, 128, 256, 512):
        for outputs, width in ((4096, 4096), (4096, 12288), (12288, 4096), (1024, 8192)):
            chosen = plan(rows, outputs, width)
            blocks = chosen.tiles(rows, outputs) * chosen.splits
            assert blocks > 0.7 * -(-blocks // 132) * 132
    assert plan(4096, 24576, 4096).shape in SHAPES[:2]
    assert plan(128, 4096, 12288).splits > 1


@pytest.mark.parametrize("kind", BITS)
def test_every_shape_has_room_for_its_stages(kind) -> None:
    for group in GROUPS:
        for scales, points in ((BF16, False), (torch.float32, kind in ("int4", "int8"))):
            weight = empty(kind, 16, 1024, group, scales, zeros=points, ordered=False, device="meta")
            for shape in SHAPES:
                stages = stages_of(shape, weight)
                assert stages >= LEAST_STAGES
                assert shared_bytes(shape, weight, stages) <= largest_shared_bytes(90)


@pytest.mark.parametrize("capability", [75, 80, 89, 100, 120])
def test_other_gpus_have_no_such_products(capability: int) -> None:
    weight, _ = quantized(INT4, 20, 64)
    with pytest.raises(UnsupportedError, match=r"compute capability 9\.0"):
        run(Emulator(capability=capability), random(1, 64, dtype=BF16), weight)


def test_nothing_is_launched_for_no_rows() -> None:
    weight, _ = quantized(INT4, 20, 64)
    emulator = Emulator()
    assert run(emulator, random(0, 64, dtype=BF16), weight).shape == (0, 20)
    assert not emulator.launches


@pytest.mark.parametrize("bug", ["NO_WAIT", "NO_FENCE", "NO_BARRIER", "EARLY", "NO_END", "UNALIGNED", "PATTERN", "COUNTER"])
def test_planted_bugs_are_seen(bug: str) -> None:
    def right(order: int) -> bool:
        weight, meaning = quantized(INT4, 70, 544)
        x = random(11, 544, dtype=BF16)
        try:
            emulator = Emulator(order, bugs=(bug,))
            counters = new_counters(emulator)
            for _ in range(2):
                got = packed_wgmma(emulator, x, weight, None, counters, plan=SMALL._replace(splits=2))
                close_to_rounding(got, product(x, meaning), ONE_IN_256)
        except (AssertionError, KernelFailed):
            return False
        return True

    assert not all(right(order) for order in ORDERS)


@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_bytes(bug: tuple[str, ...]) -> None:
    strips = (1 << 31) // 512 + 4  # the last four begin at 2^31
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are codes of zero
    last, meaning = quantized(INT4, 64, 64)
    codes = zeros(below + strips * 512, torch.uint8)[below:].view(strips, 1, 512)
    scales, points = zeros(strips * 32, FP16).view(strips, 2, 16), zeros(strips * 32, torch.uint8).view(strips, 2, 16)
    weight = last._replace(num_rows=strips * 16, codes=codes, scales=scales, zeros=points)
    for mine, theirs in ((codes, last.codes), (scales, last.scales), (points, last.zeros)):
        mine[-4:] = theirs
    x, residual = random(1, 64, dtype=BF16), zeros(strips * 16, BF16).view(1, -1)
    run(Emulator(bugs=bug, only_block=strips // 4 - 1), x, weight, None, residual=residual)
    if bug:
        assert relative_error(residual[:, -64:], product(x, meaning)) > 0.1
    else:
        close_to_rounding(residual[:, -64:], product(x, meaning), ONE_IN_256)


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
    with pytest.raises((AssertionError, KeyError)):
        run(Emulator(), x, weight, bias, residual=residual)
