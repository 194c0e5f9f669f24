"""quantize_activations.cu, emulated, against the rounding rule in torch, and against the CPU's kernels."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.kernels import quantize_activations as module
from nanovllm_cli.kernels import values
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.quantize_activations import Rounded, to_blocks, to_e4m3, to_int8
from test_cpu_integer import rounded as rounded_to_int8
from test_kernel_gemv import normed

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
E4M3 = torch.float8_e4m3fn


def spread(scales: torch.Tensor, group: int, width: int) -> torch.Tensor:
    return scales.double().repeat_interleave(group or width, 1)[:, :width]


def numbers(rounded: Rounded, group: int) -> torch.Tensor:
    """What codes and scales stand for, float64."""
    codes = rounded.codes.float().double()
    return codes * spread(rounded.scales, group, codes.shape[1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("rows", "width", "group"),
    [(1, 8, 0), (3, 2048, 0), (2, 4104, 0), (2, 264, 32), (3, 200, 128), (1, 4400, 16), (4, 56, 64), (2, 512, 256)],
)
def test_int8_is_the_rule(rows: int, width: int, group: int, order: int) -> None:
    x = random(rows, width, dtype=BF16, scale=3.0)
    got = to_int8(Emulator(order), x, group)
    assert got.scales.shape == (rows, -(-width // group) if group else 1)
    assert torch.allclose(numbers(got, group), rounded_to_int8(x.float(), group or width), rtol=1e-6, atol=0)


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("width", [1, 77, 300])
def test_rows_without_wide_loads(width: int, group: int) -> None:
    x = random(3, width, dtype=BF16)
    got = to_int8(Emulator(7), x, group)
    assert torch.allclose(numbers(got, group), rounded_to_int8(x.float(), group or width), rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "width", "group"), [(1, 16, 0), (3, 4104, 0), (2, 200, 128), (3, 2304, 128)])
def test_e4m3_is_what_a_cpu_rounds_to(rows: int, width: int, group: int, order: int) -> None:
    x = random(rows, width, dtype=BF16, scale=0.1)
    got = to_e4m3(Emulator(order), x, group)
    expected = values.round_e4m3(x, group or width, None)
    assert expected.scales is not None
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.codes.float(), expected.rows.float())


@pytest.mark.parametrize("group", [0, 32])
def test_rows_too_small_for_a_scale_are_zeros(group: int) -> None:
    """Behind a gate that is all but closed: 1 / scale is infinite, and infinity times the zeros beside them no number."""
    x = torch.zeros(2, 64, dtype=BF16)
    x[0, 3], x[1, 40] = 1e-38, -3e-37
    got, fixed = to_e4m3(Emulator(), x, group), to_e4m3(Emulator(), x, fixed=torch.tensor([1e-39]))
    expected = values.round_e4m3(x, group or 64, None), values.round_e4m3(x, 64, torch.tensor([1e-39]))
    assert not got.codes.float().any()
    assert not fixed.codes.float().any()
    assert not any(each.rows.any() for each in expected)


def test_a_fixed_scale_saturates() -> None:
    x = torch.tensor([[0.5, -1000.0, 224.25, 0.0, 448.0, -449.0, 1e-3, 3.0]], dtype=BF16)
    got = to_e4m3(Emulator(), x, fixed=torch.tensor([0.5]))
    assert got.scales.tolist() == [[0.5]]
    assert torch.equal(got.codes.float(), (x.float() / 0.5).clamp(-448, 448).to(E4M3).float())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [0, 32])
def test_normalised_first(group: int, order: int) -> None:
    hidden, x = normed(3, 2128, BF16)
    before = hidden.rows.clone()
    got, plain = to_int8(Emulator(order), hidden, group), to_int8(Emulator(order), x, group)
    assert torch.equal(hidden.rows, before)
    assert torch.equal(got.codes, plain.codes)
    assert torch.equal(got.scales, plain.scales)


def unordered(codes: torch.Tensor) -> torch.Tensor:
    """Columns in their order again: of 64, lane part c has words [first 32: low, high half; second 32: low, high half]."""
    rows, padded = codes.shape
    return codes.view(rows, padded // 64, 4, 2, 2, 4).permute(0, 1, 3, 4, 2, 5).reshape(rows, padded)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (9, 96), (2, 2880), (3, 64)])
def test_rows_for_blocks(rows: int, width: int, group: int, order: int) -> None:
    hidden, x = normed(rows, width, FP16)
    for source in (x, hidden):
        padded = -(-width // 128) * 128 + 128 * (order == 0)  # records may be wider than what they need
        got = to_blocks(Emulator(order), source, group, padded)
        codes, scales, sums = unordered(got.codes), got.factors[..., 0], got.factors[..., 1]
        assert codes.shape == (rows, padded)
        assert not codes[:, width:].any()
        assert torch.allclose(
            (codes.double() * spread(scales, group, padded))[:, :width], rounded_to_int8(x.float(), group), rtol=1e-6, atol=0
        )
        assert torch.equal(sums, codes.view(rows, -1, group).int().sum(-1).float())


def test_zeros_and_tiny_numbers_have_codes() -> None:
    x = torch.zeros(3, 64, dtype=BF16)
    x[1], x[2] = 1e-37, 1e-30
    got = to_int8(Emulator(), x)
    assert not got.codes[:2].any()
    assert (got.codes[2] == 127).all()
    assert not to_e4m3(Emulator(), torch.zeros(2, 64, dtype=BF16)).codes.float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_shows_in_its_row_alone(bad: float) -> None:
    x = random(3, 96, dtype=BF16)
    x[1, 40] = bad
    for group in (0, 32):
        got = to_int8(Emulator(), x, group)
        assert got.scales.isnan().sum() == 1
        assert numbers(got, group)[1, 40].isnan()
        assert not numbers(got, group)[[0, 2]].isnan().any()
        assert numbers(to_e4m3(Emulator(), x, group), group)[1, 40].isnan()
    assert to_blocks(Emulator(), x, 32, 128).factors[..., 0].isnan().nonzero().tolist() == [[1, 1]]


def test_a_row_is_alone_in_its_bits() -> None:
    x, gain = random(5, 136, dtype=BF16), random(136, dtype=BF16)
    for make in (lambda rows: rows, lambda rows: Normed(rows, gain, 1e-6, 1.0)):
        together, alone = to_int8(Emulator(), make(x)), to_int8(Emulator(), make(x[3:4]))
        assert torch.equal(alone.codes, together.codes[3:4])
        assert torch.equal(alone.scales, together.scales[3:4])


def test_no_rows_is_no_launch() -> None:
    emulator, empty = Emulator(), torch.empty(0, 64, dtype=BF16)
    assert to_int8(emulator, empty).codes.shape == (0, 64)
    assert to_blocks(emulator, empty, 16, 128).factors.shape == (0, 8, 2)
    assert not emulator.launches


@pytest.mark.parametrize(("bug", "group"), [("NO_BARRIER", 0), ("GROUP", 32)])
def test_planted_bugs_are_seen(bug: str, group: int) -> None:
    found = False
    for order in ORDERS:
        x = random(2, 2048, dtype=BF16)
        try:
            got = to_int8(Emulator(order, bugs=(bug,)), x, group)
            found |= not torch.allclose(numbers(got, group), rounded_to_int8(x.float(), group or 2048), rtol=1e-6, atol=0)
        except KernelFailed:
            found = True
    assert found


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: to_int8(Emulator(), x[:, ::2]),
        lambda x: to_int8(Emulator(), x.double()),
        lambda x: to_int8(Emulator(), x, 48),
        lambda x: to_blocks(Emulator(), x, 64, 128),
        lambda x: to_blocks(Emulator(), x, 32, 64),
        lambda x: to_e4m3(Emulator(), x, fixed=torch.ones(2)),
        lambda x: to_int8(Emulator(), Normed(x, torch.ones(63, dtype=BF16), 0.0, 1.0)),
    ],
    ids=["strides", "type", "group", "group of blocks", "width of blocks", "scales", "gain"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    with pytest.raises((AssertionError, KeyError)):
        bad(random(3, 64, dtype=BF16))


def test_variants_cover_the_types() -> None:
    names = [str(kernel) for kernel in module.variants()]
    assert len(names) == len(set(names)) == 7
