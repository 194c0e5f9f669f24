"""norm.cu, emulated, against the formula in float64, and join_norm.cu against its parts."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import join_norm, norm, reference, scale
from nanovllm_cli.kernels.ops import Normed

pytestmark = needs_emulation
SHAPES = [(1, 64), (3, 1), (2, 17), (5, 100), (1, 1024), (4, 4096), (2, 9000), (1, 33000), (1, 8193)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_norm_is_one_rounding_from_float64(tokens: int, width: int, dtype: torch.dtype, order: int) -> None:
    x, residual, weight = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype), random(width, dtype=dtype)
    total = (x.double() + residual.double()).to(dtype)
    expected = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    got = norm.add_rms_norm(Emulator(order), x, residual, weight, 1e-6, 1.0)
    assert torch.equal(residual, total)
    close_to_rounding(got, expected)


@pytest.mark.parametrize("width", [64, 30])
def test_without_a_residual_x_itself_is_normalised_and_kept(width: int) -> None:
    x, weight = random(3, width, dtype=torch.bfloat16), random(width, dtype=torch.bfloat16)
    before = x.clone()
    got = norm.add_rms_norm(Emulator(), x, None, weight, 1e-5, 0.0)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(x, before)
    close_to_rounding(got, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(3, 1), (2, 17), (5, 100), (4, 4096), (1, 33000)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_without_its_mean_a_row_has_a_layer_norm(
    with_residual: bool, tokens: int, width: int, dtype: torch.dtype, order: int
) -> None:
    x, residual, weight = random(tokens, width, dtype=dtype) + 2, random(tokens, width, dtype=dtype), random(width, dtype=dtype)
    total = (x.double() + residual.double()).to(dtype) if with_residual else x.clone()
    expected = torch.nn.functional.layer_norm(total.double(), (width,), weight.double(), eps=1e-5)
    got = norm.add_rms_norm(Emulator(order), x, residual if with_residual else None, weight, 1e-5, 0.0, centered=True)
    assert torch.equal(residual if with_residual else x, total)
    assert float((got.double() - expected).abs().max()) < (4e-2 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(3, 1), (2, 17), (5, 100), (4, 768), (2, 9000), (1, 33000)])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_sum_becomes_its_layer_norm_in_its_place(
    shifted: bool, tokens: int, width: int, dtype: torch.dtype, order: int
) -> None:
    """What joins it stays as it is. Near to the formula in float64, and but for a few numbers what fp32 rounds to."""
    x, stream, weight, shift = (random(*shape, dtype=dtype) for shape in ((tokens, width), (tokens, width), (width,), (width,)))
    stream, before = stream + 2, x.clone()
    for added in (x, None):
        total = stream.double() if added is None else (stream.double() + added.double()).to(dtype).double()
        table = shift if shifted else None
        wanted = torch.nn.functional.layer_norm(total, (width,), weight.double(), shift.double() * shifted, 1e-5)
        by_reference = reference.norm_sum(added, stream, weight, table, 1e-5)
        got = stream.clone()
        norm.norm_sum(Emulator(order), added, got, weight, table, 1e-5)
        assert float((got.double() - wanted).abs().max()) < (4e-2 if dtype == torch.bfloat16 else 5e-3)
        assert float((got == by_reference).double().mean()) > 0.97
    assert torch.equal(x, before)


def test_each_column_has_its_own_shift() -> None:
    """Whichever thread has it."""
    stream, weight = random(2, 9000, dtype=torch.bfloat16), torch.zeros(9000, dtype=torch.bfloat16)
    shift = torch.arange(9000).to(torch.bfloat16)
    norm.norm_sum(Emulator(), None, stream, weight, shift, 1e-5)
    assert torch.equal(stream, shift.expand(2, -1))


@pytest.mark.parametrize("bad", [
    lambda x, s, w, b: (x[:2], s, w, b), lambda x, s, w, b: (x.half(), s, w, b), lambda x, s, w, b: (x, s, w[:-1], b),
    lambda x, s, w, b: (x, s, w, b.half()), lambda x, s, w, b: (x, s, w, b[::2]), lambda x, s, w, b: (x, s[:, ::2], w, b),
])  # fmt: skip
def test_a_sum_that_the_kernel_would_misread_is_refused(bad) -> None:
    tensors = (random(*shape, dtype=torch.bfloat16) for shape in ((3, 64), (3, 64), (64,), (64,)))
    x, stream, weight, shift = bad(*tensors)
    with pytest.raises(AssertionError):
        norm.norm_sum(Emulator(), x, stream, weight, shift, 1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("first", "width", "row"), [(64, 128, 320), (33, 17, 100), (8, 9000, 9032)])
def test_columns_have_the_bits_of_rows_and_nothing_else_is_touched(first: int, width: int, row: int, order: int) -> None:
    whole, weight = random(3, row, dtype=torch.bfloat16), random(width, dtype=torch.bfloat16)
    columns, expected = whole[:, first : first + width], whole.clone()
    expected[:, first : first + width] = norm.add_rms_norm(Emulator(), columns.contiguous(), None, weight, 1e-6, 0.0)
    norm.norm_columns(Emulator(order), columns, weight, 1e-6, 0.0)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_two_norms_and_a_sum_have_the_bits_of_their_kernels(tokens: int, width: int, dtype: torch.dtype, order: int) -> None:
    x, residual = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype)
    gains, weight = random(width, dtype=dtype), random(width, dtype=dtype)
    emulator, joined = Emulator(order), residual.clone()
    got = join_norm.join_and_norm(emulator, Normed(x, gains, 1e-5, 0.5), joined, 0.7, weight, 1e-6, 1.0)
    assert len(emulator.launches) == 1
    added = norm.add_rms_norm(Emulator(), x, None, gains, 1e-5, 0.5)
    expected = scale.add(Emulator(), residual.clone(), added, 0.7)
    assert torch.equal(joined, expected)
    assert torch.equal(got, norm.add_rms_norm(Emulator(), expected, None, weight, 1e-6, 1.0))
    alone = residual.clone()
    join_norm.join(Emulator(order), Normed(x, gains, 1e-5, 0.5), alone, 0.7)
    assert torch.equal(alone, expected)
    by_formula, wide = residual.double(), (x.double(), gains.double())
    by_formula = (by_formula + reference.add_rms_norm(wide[0], None, wide[1], 1e-5, 0.5)) * 0.7
    assert float((joined.double() - by_formula).norm() / by_formula.norm()) < (4e-3 if dtype == torch.bfloat16 else 5e-4)


GROUPS = [(2, 3, 17), (5, 2, 100), (3, 8, 128), (1, 4, 9000), (4, 6, 1)]
"""Tokens, groups of each, their width."""


def of_groups(tokens: int, groups: int, width: int, dtype: torch.dtype, emulator: Emulator) -> None:
    x, weight = random(tokens * groups, width, dtype=dtype), random(groups * width, dtype=dtype)
    rows = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    got = norm.add_rms_norm(emulator, x, None, weight, 1e-5, 0.0)
    close_to_rounding(got.view(tokens, -1), rows.view(tokens, -1) * weight.double())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "groups", "width"), GROUPS)
def test_rows_take_turns_at_the_gains(tokens: int, groups: int, width: int, dtype: torch.dtype, order: int) -> None:
    of_groups(tokens, groups, width, dtype, Emulator(order))


def test_gains_of_another_group_are_seen() -> None:
    with pytest.raises(AssertionError):
        of_groups(2, 3, 17, torch.bfloat16, Emulator(bugs=("FIRST_GAINS",)))


@pytest.mark.parametrize(("rows", "gains"), [(4, 3 * 64), (3, 64 + 32), (3, 32)])
def test_gains_that_do_not_go_round_are_refused(rows: int, gains: int) -> None:
    x, weight = random(rows, 64, dtype=torch.bfloat16), random(gains, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        norm.add_rms_norm(Emulator(), x, None, weight, 1e-5, 0.0)


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    assert norm.add_rms_norm(emulator, empty, None, torch.ones(64, dtype=torch.bfloat16), 1e-6, 0.0).shape == (0, 64)
    assert not emulator.launches


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, w: (x[:, ::2], w[::2].contiguous()),
        lambda x, w: (x, w[:-1]),
        lambda x, w: (x, w.half()),
        lambda x, w: (x.float(), w),
    ],
    ids=["strides", "shape", "type", "other type"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    x, weight = bad(random(3, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16))
    with pytest.raises((AssertionError, KeyError)):
        norm.add_rms_norm(Emulator(), x, None, weight, 1e-6, 0.0)
