"""altup.cu, altup_match.cu and sparse_gate.cu, emulated: against the formulas in float64, and the CPU's kernels alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import altup, altups, cpu, reference
from nanovllm_cli.kernels.sparse_gate import sparse_gate

BF16, HALF = torch.bfloat16, torch.float16
# Streams, tokens, width: for 16-byte loads and for single elements alone. Each other pair of streams and vector is a compilation.
SHAPES = [(4, 1, 8), (4, 3, 264), (4, 2, 2056), (3, 1, 1), (3, 4, 17), (3, 5, 301)]
FACTOR = 1 / 3


class Case:
    """A layer's streams, what it made of the first, and what decides."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        count, tokens, width = shape
        self.streams, self.found = random(*shape, dtype=dtype), random(tokens, width, dtype=dtype)
        self.logits = random(tokens, count, scale=4.0)
        self.to_predict, self.to_correct = random(count * count, count), random(count, count)
        self.gains = random(width, dtype=dtype)

    def predict(self, op: Callable[..., torch.Tensor]) -> None:
        expected = reference.altup_predict(self.streams.double(), self.logits.double(), self.to_predict.double(), FACTOR)
        first = op(self.streams, self.logits, self.to_predict, FACTOR)
        close_to_rounding(self.streams, expected)
        assert torch.equal(first, self.streams[0])

    def correct(self, op: Callable[..., torch.Tensor]) -> None:
        given = [each.double() for each in (self.streams, self.found, self.logits, self.to_correct)]
        expected = reference.altup_correct(*given, FACTOR)
        first = op(self.streams, self.found, self.logits, self.to_correct, self.gains, FACTOR)
        close_to_rounding(self.streams, expected)
        close_to_rounding(first, self.streams[0].double() * self.gains.double())


def on_gpu(op: Callable[..., Any], order: int = 0, bugs: tuple[str, ...] = ()) -> Callable[..., Any]:
    return lambda *args: op(Emulator(order, bugs=bugs), *args)


RUNS = [
    (BF16, None),
    (torch.float32, None),
    *(pytest.param(dtype, order, marks=needs_emulation) for dtype in (BF16, HALF) for order in ORDERS),
]
"""Types, and the emulation's orders of threads; None: the CPU's kernel."""


@needs_emulation
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_streams_are_one_rounding_from_float64(dtype: torch.dtype, order: int) -> None:
    for shape in SHAPES:
        Case(shape, dtype).predict(on_gpu(altup.altup_predict, order))
        Case(shape, dtype).correct(on_gpu(altup.altup_correct, order))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_cpus_streams_are_one_rounding_from_float64(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        Case(shape, dtype).predict(altups.altup_predict)
        Case(shape, dtype).correct(altups.altup_correct)


@needs_emulation
@pytest.mark.parametrize(("bug", "which"), [("TURNED", "predict"), ("WITHOUT_ONE", "correct")])
def test_a_wrong_stream_is_found(bug: str, which: str) -> None:
    op = {"predict": altup.altup_predict, "correct": altup.altup_correct}[which]
    with pytest.raises(AssertionError):
        getattr(Case((3, 4, 17), BF16), which)(on_gpu(op, bugs=(bug,)))


@pytest.mark.parametrize(("dtype", "order"), RUNS)
def test_projections_get_the_size_of_what_they_are_of(dtype: torch.dtype, order: int | None) -> None:
    """A row of next to nothing stays small: 1e-5 is the least mean square that it is taken to have."""
    enter, match = altups.altup_enter, altups.altup_match
    if order is not None:
        enter, match = on_gpu(altup.altup_enter, order), on_gpu(altup.altup_match, order)
    for tokens, width in [(1, 8), (3, 264), (2, 2056), (4, 17), (5, 301)]:
        x, others = random(tokens, width, dtype=dtype), random(tokens, 3 * width, dtype=dtype, scale=5.0)
        others[0, width : 2 * width] *= 1e-4
        parts = [others[:, i * width : (i + 1) * width] for i in range(3)]
        streams = enter(x, others)
        assert torch.equal(streams[0], x)
        for stream, part in zip(streams[1:], parts, strict=True):
            close_to_rounding(stream, reference.altup_match(part.double(), x.double()))
        rows = parts[1].contiguous()
        assert match(rows, x) is rows
        assert torch.equal(rows, streams[2])


@needs_emulation
def test_a_size_without_a_least_is_found() -> None:
    x, rows = random(1, 16, dtype=BF16), random(1, 16, dtype=BF16, scale=1e-4)
    expected = reference.altup_match(rows.double(), x.double())
    with pytest.raises(AssertionError):
        close_to_rounding(on_gpu(altup.altup_match, bugs=("NO_LEAST",))(rows, x), expected)


@pytest.mark.parametrize(("dtype", "order"), RUNS)
def test_few_gates_stay(dtype: torch.dtype, order: int | None) -> None:
    """Columns of a wider tensor, of which the others are left alone."""
    op = altups.sparse_gate
    if order is not None:
        op = on_gpu(sparse_gate, order)
    for tokens, first, width, whole in [(1, 0, 8, 16), (3, 264, 264, 528), (2, 0, 4104, 4104), (4, 3, 17, 21), (5, 0, 301, 602)]:
        tensor = random(tokens, whole, dtype=dtype, scale=3.0) + 1
        before = tensor.clone()
        x = tensor[:, first : first + width]
        expected = reference.sparse_gate(x.double(), 1.0)
        assert op(x, 1.0) is x
        close_to_rounding(x, expected, sums=1e-4)
        before[:, first : first + width] = x
        assert torch.equal(tensor, before)
        assert 0.05 < float((x > 0).float().mean()) < 0.35


@needs_emulation
def test_another_deviation_is_found() -> None:
    x = random(2, 9, dtype=HALF)
    expected = reference.sparse_gate(x.double(), 0.5)
    with pytest.raises(AssertionError):
        close_to_rounding(on_gpu(sparse_gate, bugs=("OF_ONE_LESS",))(x, 0.5), expected, sums=1e-4)


def test_a_gate_that_is_no_number_shows() -> None:
    x = random(2, 40, dtype=BF16)
    x[1, 3] = torch.nan
    found = altups.sparse_gate(x, 1.0)
    assert found.isnan().any(1).tolist() == [False, True]


@needs_emulation
@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_gates_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    stride = 2**31 + 8
    try:
        memory = cpu.zeros(2 * stride + 8, BF16)
    except OSError:
        pytest.skip("no address space of 8 GiB")
    memory[-8:] = random(8, dtype=BF16)
    expected = reference.sparse_gate(memory[-8:].double()[None], 0.5)
    sparse_gate(Emulator(bugs=bugs, only_block=2), memory.as_strided((3, 8), (stride, 1)), 0.5)
    is_right = bool((memory[-8:].double() - expected[0]).abs().max() < 0.02)
    assert is_right == (not bugs)


@needs_emulation
def test_what_would_be_misread_is_refused() -> None:
    case = Case((3, 2, 8), BF16)
    emulator = Emulator()
    with pytest.raises(AssertionError):
        altup.altup_predict(emulator, case.streams, case.logits.T, case.to_predict, FACTOR)
    with pytest.raises(AssertionError):
        altup.altup_correct(emulator, case.streams, case.found.float(), case.logits, case.to_correct, case.gains, FACTOR)
    with pytest.raises(AssertionError):
        altup.altup_match(emulator, case.found, case.found[:, :4])
    with pytest.raises(AssertionError):
        sparse_gate(emulator, case.found.T, 1.0)
    assert not emulator.launches
