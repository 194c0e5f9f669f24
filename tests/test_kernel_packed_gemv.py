"""packed_gemv.cu, emulated, against the formats' own dequantized weights in float64."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, gains, random, relative_error
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from emulation.quantized import quantized
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import packed, reference
from nanovllm_cli.kernels import packed_gemv as module
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.packed_gemv import packed_gemv
from nanovllm_cli.quant.format import Format, Fp8, Integer, Nf4

pytestmark = needs_emulation
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def normed(rows: int, width: int, dtype: torch.dtype) -> tuple[Normed, torch.Tensor]:
    """Rows to be normalised, and the same in float64, rounded. The mean of their squares is four in every order of sums."""
    x, gain = 2 * random(rows, width).sign(), gains(width, dtype, 1.0, torch.ones(1))
    return Normed(x.to(dtype), gain, 0.0, 1.0), (x.double() / 2 * (1 + gain.double())).to(dtype)


# form, dtype, ordered; rows, outputs, width. The shapes of a line have the same variant: each is compiled in a second.
PLAIN = [
    (Integer(8), BF16, False, [(1, 1, 17), (8, 100, 255), (3, 65, 65), (5, 12, 769)]),
    (Integer(4, 128, scales="float16"), FP16, True, [(1, 17, 128), (7, 40, 384), (4, 130, 896)]),
    (Integer(4, 32, zeros=True), BF16, False, [(2, 34, 32), (6, 19, 160), (8, 129, 1056)]),
    (Nf4(), FP16, False, [(1, 40, 64), (8, 33, 320), (5, 50, 448)]),
    (Fp8(), BF16, False, [(1, 16, 64), (3, 100, 1024), (8, 3, 640)]),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("form", "dtype", "ordered", "shapes"), PLAIN, ids=lambda value: getattr(value, "name", ""))
def test_product_is_added_to_the_residual_with_one_rounding(
    form: Format, dtype: torch.dtype, ordered: bool, shapes: list[tuple[int, int, int]], order: int
) -> None:
    for rows, outputs, width in shapes:
        weight, meant = quantized(form, outputs, width, dtype, ordered=ordered)
        x, bias, residual = random(rows, width, dtype=dtype), random(outputs, dtype=dtype), random(rows, outputs, dtype=dtype)
        expected = residual.double() + x.double() @ meant.T + bias.double()
        got = packed_gemv(Emulator(order), x, weight, bias, residual=residual)
        assert got is residual
        close_to_rounding(got, expected)


NORMED = [
    (Integer(8, 64, zeros=True), BF16, False, (3, 33, 192)),
    (Integer(8, 128), FP16, False, (1, 20, 256)),
    (Integer(4, 64, scales="float32"), BF16, True, (5, 18, 192)),
    (Nf4(32), BF16, False, (2, 130, 96)),
    (Fp8(128), FP16, False, (8, 200, 384)),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("form", "dtype", "ordered", "shape"), NORMED, ids=lambda value: getattr(value, "name", ""))
def test_normalised_rows_to_unrounded_logits(
    form: Format, dtype: torch.dtype, ordered: bool, shape: tuple[int, int, int], order: int
) -> None:
    rows, outputs, width = shape
    weight, meant = quantized(form, outputs, width, dtype, ordered=ordered)
    hidden, x = normed(rows, width, dtype)
    got = packed_gemv(Emulator(order), hidden, weight, None, out_dtype=FP32)
    assert got.dtype == FP32
    assert relative_error(got, x.double() @ meant.T) <= 1e-5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 64), (3, 144), (8, 16), (2, 40)])
def test_gated_is_what_two_kernels_leave(rows: int, outputs: int, order: int) -> None:
    """40 gates and 40 ups share a tile: they are two kernels."""
    weight, meant = quantized(Integer(4, 32, scales="float16"), 2 * outputs, 416)
    hidden, x = normed(rows, 416, BF16)
    bias = random(2 * outputs, dtype=BF16)
    emulator = Emulator(order)
    got = packed_gemv(emulator, hidden, weight, bias, activation="silu")
    assert emulator.launches == {"packed_gemv": 1} | ({"gated_activation": 1} if outputs == 40 else {})
    gate, up = (x.double() @ meant.T + bias.double()).to(BF16).double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    exact = got == expected.to(BF16)  # but where a gate or an up lies near the middle of two numbers
    assert exact.double().mean() > 0.97
    assert ((got.double() - expected).abs() <= 2.0**-6 * (gate * up).abs() + 1e-5).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 33), (3, 144), (8, 16)])
def test_without_a_gate_it_is_what_two_kernels_leave(rows: int, outputs: int, order: int) -> None:
    weight, meant = quantized(Integer(4, 32, scales="float16"), outputs, 416)
    hidden, x = normed(rows, 416, BF16)
    bias, emulator = random(outputs, dtype=BF16), Emulator(order)
    got = packed_gemv(emulator, hidden, weight, bias, activation="relu2")
    assert emulator.launches == {"packed_gemv": 1}
    assert torch.equal(got, reference.gated_activation(packed_gemv(Emulator(), hidden, weight, bias), "relu2"))
    expected = (x.double() @ meant.T + bias.double()).relu().square()
    assert ((got.double() - expected).abs() <= 2.0**-6 * expected + 1e-5).all(), "three roundings at most"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 33), (8, 144)])
def test_a_lone_gelu_is_what_two_kernels_leave(rows: int, outputs: int, order: int) -> None:
    weight, meant = quantized(Integer(4, 32, scales="float16"), outputs, 416)
    x, bias = random(rows, 416, dtype=BF16), random(outputs, dtype=BF16)
    got = packed_gemv(Emulator(order), x, weight, bias, activation="lone_gelu")
    before = packed_gemv(Emulator(), x, weight, bias)
    close_to_rounding(got, reference.gated_activation(before.double(), "lone_gelu"))
    exact = torch.nn.functional.gelu(x.double() @ meant.T + bias.double())
    assert ((got.double() - exact).abs() <= 2.0**-6 * exact.abs() + 2e-5 + 2.0**-8 * before.double().abs()).all(), "two roundings"


def test_rows_are_alone_in_their_bits() -> None:
    """Whatever other rows there are, and however many."""
    weight, _ = quantized(Integer(4, 32, zeros=True), 34, 160)
    x, residual = random(8, 160, dtype=BF16), random(8, 34, dtype=BF16)
    together = packed_gemv(Emulator(), x, weight, None, residual=residual.clone())
    for first, last in [(0, 1), (7, 8), (3, 5), (1, 6), (0, 7)]:
        part = slice(first, last)
        assert torch.equal(packed_gemv(Emulator(), x[part], weight, None, residual=residual[part].clone()), together[part])


def test_rows_that_do_not_fit_shared_memory_take_several_launches() -> None:
    hidden, x = normed(8, 4096, FP16)
    weight, meant = quantized(Fp8(128), 9, 4096, FP16)
    small, large = Emulator(capability=75), Emulator(capability=90)
    got = packed_gemv(small, hidden, weight, None, out_dtype=FP32)
    assert small.launches == {"packed_gemv": 2}
    assert torch.equal(got, packed_gemv(large, hidden, weight, None, out_dtype=FP32))
    assert large.launches == {"packed_gemv": 1}
    assert relative_error(got, x.double() @ meant.T) <= 1e-5


@pytest.mark.parametrize(("outputs", "parts", "panels"), [(1793, 1, 8), (897, 2, 8), (450, 4, 8), (34, 8, 2)])
def test_warps_of_a_block_share_rows_or_take_others(outputs: int, parts: int, panels: int) -> None:
    """And a block has several panels, one after another."""
    emulator = Emulator(num_multiprocessors=1)
    weight, meant = quantized(Integer(4, 32, zeros=True), outputs, 32)
    assert module.parts_of(outputs, 32, 32, module.unit_of(weight, 2), 1) == parts
    assert -(-outputs // (8 // parts * 32)) == panels
    x = random(3, 32, dtype=BF16)
    got = packed_gemv(emulator, x, weight, None, residual=torch.zeros(3, outputs, dtype=BF16))
    close_to_rounding(got, x.double() @ meant.T)


def fails(bug: str, form: Format, rows: int, width: int) -> bool:
    """True if the planted bug is seen in one order at least."""
    for order in ORDERS:
        weight, meant = quantized(form, 34, width)
        x = random(rows + 1, width, dtype=BF16)[:rows]  # behind the last row there is something to be read
        try:
            got = packed_gemv(Emulator(order, bugs=(bug,)), x, weight, None, residual=torch.zeros(rows, 34, dtype=BF16))
            close_to_rounding(got, x.double() @ meant.T)
        except (AssertionError, KernelFailed):
            return True
    return False


@pytest.mark.parametrize(
    ("bug", "form", "width"), [("NO_BARRIER", Integer(4, 32, zeros=True), 1056), ("TAIL", Integer(8), 160)]
)
def test_planted_bugs_are_seen(bug: str, form: Format, width: int) -> None:
    assert fails(bug, form, 3, width)


@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_bytes(bug: tuple[str, ...]) -> None:
    """The last sixteen rows begin there."""
    width, outputs = 1 << 15, (1 << 16) + 16
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are zeros
    last, meant = quantized(Fp8(), 16, width)
    weight = packed.empty("fp8", outputs, width, 0, FP32, zeros=False, ordered=False, device="meta")
    codes = zeros(below + outputs * width, torch.uint8)[below:].view(-1, width // 64, 1024)
    scales = torch.zeros(outputs // 16, 1, 16)
    codes[-1], scales[-1] = last.codes[0], last.scales[0]
    emulator = Emulator(num_multiprocessors=1025, bugs=bug)
    assert module.strips_of(outputs, 16, 1025) == 2
    emulator.only_block = outputs // 32
    x, residual = random(1, width, dtype=BF16), torch.zeros(1, outputs, dtype=BF16)
    packed_gemv(emulator, x, weight._replace(codes=codes, scales=scales), None, residual=residual)
    if bug:
        assert not residual.any()
    else:
        close_to_rounding(residual[:, -16:], x.double() @ meant.T)


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, w, b, r: (x[:, ::2], w, b, r),
        lambda x, w, b, r: (x[:, :32].contiguous(), w, b, r),
        lambda x, w, b, r: (x.float(), w, b, r),
        lambda x, w, b, r: (x, w._replace(codes=w.codes[:1]), b, r),
        lambda x, w, b, r: (x, w._replace(scales=w.scales[:, :1].contiguous()), b, r),
        lambda x, w, b, r: (x, w._replace(zeros=w.zeros.int()), b, r),
        lambda x, w, b, r: (x, w._replace(order=torch.arange(64)), b, r),
        lambda x, w, b, r: (x, w, b[:-1], r),
        lambda x, w, b, r: (x, w, b.float(), r),
        lambda x, w, b, r: (x, w, b, r[:1]),
        lambda x, w, b, r: (x.repeat(3, 1), w, b, r.repeat(3, 1)),
    ],
    ids=["strides", "width", "float32", "codes", "scales", "zeros", "order", "bias", "bias type", "residual rows", "nine rows"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    weight, _ = quantized(Integer(4, 32, zeros=True), 20, 64)
    x, weight, bias, residual = bad(random(3, 64, dtype=BF16), weight, random(20, dtype=BF16), random(3, 20, dtype=BF16))
    with pytest.raises((AssertionError, KeyError)):
        packed_gemv(Emulator(), x, weight, bias, residual=residual)


def test_turing_has_no_bfloat16() -> None:
    with pytest.raises(UnsupportedError):
        packed_gemv(Emulator(capability=75), random(1, 64, dtype=BF16), quantized(Fp8(), 16, 64)[0], None)
