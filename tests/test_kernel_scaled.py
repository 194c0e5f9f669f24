"""scale_sums.cu, embedding.cu and matmuls by torch, all of 8-bit codes, emulated, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random, relative_error
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import reference, scale_sums, scaled_matmul
from nanovllm_cli.kernels.embedding import scaled_rows
from nanovllm_cli.kernels.scaled_gemv import scaled_gemv
from nanovllm_cli.kernels.scaled_matmul import Scaled, has_e4m3, matmul, scales_rows

pytestmark = needs_emulation
BF16, FP16, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
SHAPES = [(1, 16), (3, 4), (17, 132), (2, 1028), (5, 100), (8, 2052), (31, 64), (4, 12)]


def scales(groups: int, rows: int) -> torch.Tensor:
    return random(groups, rows).abs() + 0.1


def scaled(rows: int, width: int, kind: torch.dtype, groups: int = 1) -> Scaled:
    codes = (40 * random(rows, width)).clamp(-127, 127).round().to(kind) if kind == INT8 else random(rows, width, dtype=kind)
    return Scaled(codes, scales(groups, rows) / width**0.5)


def values(side: Scaled) -> torch.Tensor:
    """float64 [rows, K]."""
    span = side.codes.shape[1] if side.scales.shape[0] == 1 else 128
    return side.codes.double() * side.scales.double().t().repeat_interleave(span, 1)[:, : side.codes.shape[1]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32])
def test_scales_bias_and_residual_with_one_rounding(kind: torch.dtype, rows: int, columns: int, order: int) -> None:
    sums = (1000 * random(rows, columns)).to(kind)
    by_row, by_column = scales(1, rows), scales(1, columns)
    bias, residual = random(columns, dtype=BF16), random(rows, columns, dtype=BF16)
    expected = sums.double() * by_row.double().t() * by_column.double() + bias.double() + residual.double()
    got = scale_sums.scale_sums(Emulator(order), sums, by_row, by_column, bias, residual, BF16, BF16)
    assert got is residual
    close_to_rounding(got, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_scaled_sums_in_float32(order: int) -> None:
    sums, by_row, by_column = random(5, 132), scales(1, 5), scales(1, 132)
    got = scale_sums.scale_sums(Emulator(order), sums, by_row, by_column, None, None, BF16, torch.float32)
    assert relative_error(got, sums.double() * by_row.double().t() * by_column.double()) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize(("count", "width", "groups"), [(1, 8, 1), (5, 264, 1), (3, 136, 2), (7, 2056, 17), (2, 384, 3)])
def test_rows_of_codes_are_scaled_and_rounded_once(count: int, width: int, groups: int, kind: torch.dtype, order: int) -> None:
    weight, ids = scaled(11, width, kind, groups), torch.randint(0, 11, (count,))
    got = scaled_rows(Emulator(order), ids, *weight, BF16)
    close_to_rounding(got, values(weight)[ids], sums=0.0)


def test_row_ids_and_indices_out_of_range_are_rows_of_zeros() -> None:
    weight = scaled(7, 64, INT8)
    weight.scales[0, 0] = torch.nan
    tokens, slots = torch.tensor([3, -1, 6, 7, 1]), torch.tensor([2, -1, 0, 1, 5, 3, 2**32, 4, 2])
    table = (weight.codes.float() * weight.scales.t()).to(BF16)
    got = scaled_rows(Emulator(), slots, *weight, BF16, tokens)
    assert torch.equal(got, reference.embedding(slots, table, 1.0, tokens))
    ids = torch.tensor([6, -1, 7, 2**40])
    assert torch.equal(scaled_rows(Emulator(), ids, *weight, BF16), reference.embedding(ids, table, 1.0))


# ---- the matmuls ----

MATMULS = [(1, 16, 16), (2, 48, 32), (16, 32, 400), (17, 64, 128), (5, 16, 1040), (40, 80, 48), (3, 32, 256), (19, 112, 384)]
"""rows, outputs, width"""


@pytest.mark.parametrize("capability", [75, 89, 90, 120])
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize(("rows", "outputs", "width"), MATMULS)
def test_scaled_codes_are_multiplied(rows: int, outputs: int, width: int, kind: torch.dtype, capability: int) -> None:
    if kind == FP8 and not has_e4m3(capability, 1):
        return
    emulator = Emulator(capability=capability, num_multiprocessors=1)  # which every product fills
    x, weight = scaled(rows, width, kind), scaled(outputs, width, kind)
    bias, product = random(outputs, dtype=FP16), values(x) @ values(weight).t()
    close_to_rounding(matmul(emulator, x, weight, bias, dtype=FP16), product + bias.double())
    got = matmul(emulator, x, weight, None, dtype=BF16, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, product) < 1e-5
    before = random(rows, outputs, dtype=BF16)
    residual = before.clone()
    assert matmul(emulator, x, weight, None, dtype=BF16, residual=residual) is residual
    allowed = 2.0**-8 * (residual.double().abs() + product.abs()) + 1e-5 * product.abs().max()
    assert ((residual.double() - before.double() - product).abs() <= allowed).all(), "two roundings at most"


@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 16, 256), (5, 48, 384), (8, 32, 272), (18, 160, 1040)])
def test_scales_for_128_columns(rows: int, outputs: int, width: int) -> None:
    groups = -(-width // 128)
    x, weight = scaled(rows, width, FP8, groups), scaled(outputs, width, FP8, groups)
    bias, residual = random(outputs, dtype=BF16), random(rows, outputs, dtype=BF16)
    product = values(x) @ values(weight).t()
    close_to_rounding(matmul(Emulator(), x, weight, None, dtype=BF16), product)
    expected = residual.double() + product + bias.double()
    got = matmul(Emulator(), x, weight, bias, dtype=BF16, residual=residual)
    parts = product.abs() + (product + bias.double()).abs() + expected.abs()
    assert ((got.double() - expected).abs() <= 2.0**-8 * parts + 1e-5).all(), "three roundings at most"
    assert not has_e4m3(89, groups)
    assert not has_e4m3(100, groups)


def test_half_numbers_with_scales_for_128_columns_are_rounded_behind_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tests cuBLASLt's products of blocks to bfloat16 and float32."""
    asked: list[torch.dtype] = []
    on_host = scaled_matmul._on_host
    monkeypatch.setattr(scaled_matmul, "_on_host", lambda *args: (asked.append(args[-1].dtype), on_host(*args)))
    x, weight = scaled(5, 384, FP8, 3), scaled(48, 384, FP8, 3)
    bias, product = random(48, dtype=FP16), values(x) @ values(weight).t()
    close_to_rounding(matmul(Emulator(), x, weight, bias, dtype=FP16), product + bias.double())
    residual = random(5, 48, dtype=FP16)
    expected = residual.double() + product
    assert matmul(Emulator(), x, weight, None, dtype=FP16, residual=residual) is residual
    close_to_rounding(residual, expected)
    assert asked == [torch.float32] * 2


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [(127, 3072, False), (32, 4096, False), (512, 4096, False), (513, 4096, True), (32, 24576, True), (2048, 6144, True)],
)
def test_scales_of_rows_are_in_products_that_fill_a_hopper(rows: int, outputs: int, expected: bool) -> None:
    """cuBLASLt fails at 127 x 3072 sums of 9216 products, and succeeds at so many of 3072."""
    assert scales_rows(Emulator(capability=90, num_multiprocessors=132), rows, outputs) == expected
    assert not scales_rows(Emulator(capability=120, num_multiprocessors=132), rows, outputs)


def test_a_small_product_on_a_hopper_has_its_scales_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_matmul, "_scaled", None)
    x, weight = scaled(9, 32, FP8), scaled(48, 32, FP8)
    got = matmul(Emulator(capability=90), x, weight, None, dtype=BF16)
    close_to_rounding(got, values(x) @ values(weight).t())


def test_whole_numbers_have_the_same_bits_in_any_batch() -> None:
    x, weight = scaled(40, 272, INT8), scaled(64, 272, INT8)
    together = matmul(Emulator(), x, weight, None, dtype=BF16)
    for first, last in [(0, 1), (3, 11), (20, 40), (39, 40)]:
        part = Scaled(x.codes[first:last].contiguous(), x.scales[:, first:last].contiguous())
        assert torch.equal(matmul(Emulator(), part, weight, None, dtype=BF16), together[first:last])


def test_sizes_that_the_library_does_not_take_are_refused() -> None:
    for outputs, width in ((24, 32), (32, 24)):
        with pytest.raises(AssertionError):
            matmul(Emulator(), scaled(2, width, INT8), scaled(outputs, width, INT8), None, dtype=BF16)


# ---- the kernel for few rows ----

FEW = [(1, 16, 16), (8, 48, 32), (3, 33 * 16, 80), (2, 64, 1024), (5, 128, 144), (7, 528, 128), (1, 48, 2064), (4, 704, 48)]
"""rows, outputs, width: every number of strips and parts, more panels than blocks, tails."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize(("rows", "outputs", "width"), FEW)
def test_few_rows_of_codes(rows: int, outputs: int, width: int, kind: torch.dtype, order: int) -> None:
    x, weight = scaled(rows, width, kind), scaled(outputs, width, kind)
    bias, residual = random(outputs, dtype=BF16), random(rows, outputs, dtype=BF16)
    expected = values(x) @ values(weight).t() + bias.double() + residual.double()
    got = scaled_gemv(Emulator(order), x, weight, bias, dtype=BF16, residual=residual)
    assert got is residual
    close_to_rounding(got, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 16, 256), (3, 256, 400), (8, 48, 1040), (2, 528, 2048)])
def test_few_rows_with_scales_for_128_columns(rows: int, outputs: int, width: int, order: int) -> None:
    groups = -(-width // 128)
    x, weight = scaled(rows, width, FP8, groups), scaled(outputs, width, FP8, groups)
    got = scaled_gemv(Emulator(order), x, weight, None, dtype=BF16, out_dtype=torch.float32)
    assert relative_error(got, values(x) @ values(weight).t()) < 1e-5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 64, 1024), (3, 136, 128), (8, 24, 16)])
def test_few_rows_with_a_gate(rows: int, outputs: int, width: int, order: int) -> None:
    x, weight, bias = scaled(rows, width, INT8), scaled(2 * outputs, width, INT8), random(2 * outputs, dtype=FP16)
    weight.scales.mul_(0.01)
    got = scaled_gemv(Emulator(order), x, weight, bias, dtype=FP16, activation="silu")
    gate, up = (values(x) @ values(weight).t() + bias.double()).to(FP16).double().chunk(2, -1)
    expected = gate * gate.sigmoid() * up
    assert ((got.double() - expected).abs() <= 2.0**-9 * (gate * up).abs() + 1e-5).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 64, 1024), (3, 144, 128), (8, 32, 16)])
def test_few_rows_without_a_gate(rows: int, outputs: int, width: int, kind: torch.dtype, order: int) -> None:
    x, weight, bias = scaled(rows, width, kind), scaled(outputs, width, kind), random(outputs, dtype=BF16)
    got = scaled_gemv(Emulator(order), x, weight, bias, dtype=BF16, activation="relu2")
    assert torch.equal(got, reference.gated_activation(scaled_gemv(Emulator(), x, weight, bias, dtype=BF16), "relu2"))
    expected = (values(x) @ values(weight).t() + bias.double()).relu().square()
    assert ((got.double() - expected).abs() <= 2.0**-6 * expected + 1e-5 * expected.max()).all(), "three roundings at most"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [INT8, FP8])
def test_few_rows_with_a_lone_gelu(kind: torch.dtype, order: int) -> None:
    x, weight, bias = scaled(3, 144, kind), scaled(80, 144, kind), random(80, dtype=BF16)
    weight.scales.mul_(0.01)  # near to zero, where it bends
    got = scaled_gemv(Emulator(order), x, weight, bias, dtype=BF16, activation="lone_gelu")
    before = scaled_gemv(Emulator(), x, weight, bias, dtype=BF16)
    close_to_rounding(got, reference.gated_activation(before.double(), "lone_gelu"))
    exact = values(x) @ values(weight).t() + bias.double()
    assert ((before.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_few_rows_are_alone_in_their_bits_and_a_nan_stays_in_its_row() -> None:
    x, weight = scaled(8, 272, FP8), scaled(48, 272, FP8)
    x.scales[0, 5] = torch.nan
    together = scaled_gemv(Emulator(), x, weight, None, dtype=BF16)
    assert together.isnan().all(1).tolist() == together.isnan().any(1).tolist() == [row == 5 for row in range(8)]
    for first, last in [(0, 1), (7, 8), (2, 5), (0, 5)]:
        part = Scaled(x.codes[first:last].contiguous(), x.scales[:, first:last].contiguous())
        assert torch.equal(scaled_gemv(Emulator(), part, weight, None, dtype=BF16), together[first:last])


@pytest.mark.parametrize("bug", ["NO_BARRIER", "TAIL"])
def test_bugs_planted_among_few_rows_are_seen(bug: str) -> None:
    def right(order: int) -> bool:
        x, weight = scaled(4, 336, INT8), scaled(80, 336, INT8)
        # Behind the last rows there is something to be read.
        x, weight = (Scaled(torch.cat((s.codes, torch.full((1, 336), 99, dtype=INT8)))[:-1], s.scales) for s in (x, weight))
        try:
            got = scaled_gemv(Emulator(order, bugs=(bug,)), x, weight, None, dtype=BF16)
            close_to_rounding(got, values(x) @ values(weight).t())
        except AssertionError:
            return False
        return True

    assert not all(right(order) for order in ORDERS)


@pytest.mark.parametrize(
    ("capability", "one_scale", "scales_by_row"),
    [(80, False, False), (86, False, False), (89, True, False), (90, True, True), (100, True, False), (120, True, False)],
)
def test_e4m3_begins_with_ada_and_scales_by_row_are_hoppers(capability: int, one_scale: bool, scales_by_row: bool) -> None:
    assert [has_e4m3(capability, groups) for groups in (1, 2)] == [one_scale, scales_by_row]


@pytest.mark.parametrize(("cuda", "expected"), [("12.6", False), ("12.8", False), ("12.9", True), ("13.0", True)])
def test_scales_by_row_are_not_asked_of_a_library_that_lacks_them(
    cuda: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """«DeepSeek style (1x128, 128x128) scaling requires cublasLt >= 12.9», torch of CUDA 12.8 says at the first prompt."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert has_e4m3(90, 2) == scales_rows(Emulator(capability=90, num_multiprocessors=132), 2048, 6144) == expected
    assert has_e4m3(90, 1)
