"""sigmoid_gate.cu, emulated: against the formula in float64, and what lies beside its numbers untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.sigmoid_gate import sigmoid_gate

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
# Widths for 16-byte loads and for single elements alone: each other vector would be a compilation more.
SHAPES = [(1, 8), (3, 64), (2, 264), (5, 2056), (1, 1), (4, 17), (7, 301)]


def formula(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.double() / (1 + (-gate.double()).exp())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("by_rows", [False, True])
def test_one_rounding_from_float64(by_rows: bool, dtype: torch.dtype, order: int) -> None:
    for tokens, width in SHAPES:
        x = random(tokens, width, dtype=dtype, scale=4.0)
        gate = random(tokens, 1, scale=4.0) if by_rows else random(tokens, width, dtype=dtype, scale=4.0)
        expected = formula(x, gate)
        assert sigmoid_gate(Emulator(order), x, gate) is x
        close_to_rounding(x, expected)


@pytest.mark.parametrize(
    ("first", "width", "whole"), [(64, 64, 136), (0, 8, 24), (3, 16, 40), (8, 16, 33), (1, 1, 3), (8, 17, 32)]
)
def test_gates_may_be_columns_of_a_wider_tensor(first: int, width: int, whole: int) -> None:
    """Wherever those begin: no load crosses a boundary of its own."""
    x, gates = random(5, width, dtype=BF16), random(5, whole, dtype=BF16)
    gate = gates[:, first : first + width]
    before, expected = gates.clone(), formula(x, gate)
    close_to_rounding(sigmoid_gate(Emulator(), x, gate), expected)
    assert torch.equal(gates, before)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(
    ("tokens", "columns", "each", "stride"),
    [(1, 1, 8, 1), (3, 4, 20, 4), (5, 3, 128, 11), (2, 6, 64, 6), (4, 17, 3, 20), (7, 2, 500, 2), (1, 16, 128, 16), (3, 5, 1, 9)],
)
def test_a_gate_may_be_for_several_numbers(tokens: int, columns: int, each: int, stride: int, softplus: bool, order: int) -> None:
    x, gates = random(tokens, columns * each, dtype=BF16), random(tokens, stride, dtype=BF16, scale=8.0)
    gate = gates[:, :columns]
    factor = torch.nn.functional.softplus(gate.double()) if softplus else gate.double().sigmoid()
    expected = x.double() * factor.repeat_interleave(each, dim=1)
    close_to_rounding(sigmoid_gate(Emulator(order), x, gate, softplus=softplus), expected)


@pytest.mark.parametrize("by_rows", [False, True])
def test_gates_far_from_zero(by_rows: bool) -> None:
    """The tail keeps its digits, an exponential that overflows gives zero, and NaN stays."""
    gates = torch.tensor([-1e30, -60000.0, -100.0, -80.0, -20.0, -5.0, -0.0, 1e-3, 5.0, 100.0, 1e30, torch.inf, -torch.inf])
    gate = gates[:, None] if by_rows else gates[:, None].expand(-1, 8).to(BF16).contiguous()
    x = torch.full((len(gates), 8), 3.0, dtype=BF16)
    expected = formula(x, gate)
    close_to_rounding(sigmoid_gate(Emulator(), x, gate.contiguous()), expected, sums=0.0)
    x[1, 2] = torch.nan
    gate[3] = torch.nan
    got = sigmoid_gate(Emulator(), x, gate.contiguous())
    assert got.isnan().nonzero().tolist() == [[1, 2], *([3, column] for column in range(8))]


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_gates_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    """The last row of three that lie far apart."""
    stride = 2**31 + 8
    try:
        memory = cpu.zeros(2 * stride + 8, BF16)
    except OSError:
        pytest.skip("no address space of 8 GiB")
    memory[-8:] = random(8, dtype=BF16, scale=4.0)
    x = random(3, 8, dtype=BF16)
    expected = formula(x[2], memory[-8:])

    sigmoid_gate(Emulator(bugs=bugs, only_block=2), x, memory.as_strided((3, 8), (stride, 1)))
    is_right = bool((x[2].double() - expected).abs().max() < 0.1 * expected.abs().max())
    assert is_right == (not bugs)  # with 32 bits the 16th gate is read, a zero


def check_masked(run: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """A row of 17 elements, one behind the other, and room behind the last for what a bug writes."""
    memory, gates = random(4 * 17 + 64, dtype=BF16), random(4 * 17 + 64, dtype=BF16)
    x, gate = (each[: 4 * 17].view(4, 17) for each in (memory, gates))
    expected, behind = formula(x, gate), memory[4 * 17 :].clone()
    run(x, gate)
    close_to_rounding(x, expected)
    assert torch.equal(memory[4 * 17 :], behind)


def test_threads_past_the_end_of_a_row_change_nothing() -> None:
    check_masked(lambda x, gate: sigmoid_gate(Emulator(), x, gate))


def test_a_missing_mask_is_found() -> None:
    with pytest.raises(AssertionError):
        check_masked(lambda x, gate: sigmoid_gate(Emulator(bugs=("UNMASKED_TAIL",)), x, gate))


@pytest.mark.parametrize(
    "bad",
    [
        (torch.ones(3, 8, dtype=BF16), torch.ones(3, 8, dtype=HALF)),
        (torch.ones(3, 8, dtype=BF16), torch.ones(8, 3, dtype=BF16).T),
        (torch.ones(3, 8, dtype=BF16), torch.ones(3, 3, dtype=BF16)),
        (torch.ones(3, 8, dtype=BF16), torch.ones(3, 8)),
        (torch.ones(3, 16, dtype=BF16)[:, :8], torch.ones(3, 1)),
    ],
    ids=["type", "strides", "columns that do not divide", "fp32", "x's strides"],
)
def test_what_would_be_misread_is_refused(bad: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(AssertionError):
        sigmoid_gate(Emulator(), *bad)


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    assert sigmoid_gate(emulator, torch.ones(0, 8, dtype=BF16), torch.ones(0, 1)).shape == (0, 8)
    assert not emulator.launches
