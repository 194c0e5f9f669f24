"""connection.cu, emulated, and the CPU's kernels alike: against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.kernels import connection, connections, reference

BF16, HALF, F32 = torch.bfloat16, torch.float16, torch.float32
# Streams, tokens, width: for loads of four and for single elements alone. Each other pair of streams and vector is a compilation.
SHAPES = [(4, 1, 8), (4, 3, 264), (4, 2, 2056), (3, 1, 1), (3, 4, 17), (3, 5, 301)]
EPS, LEAST, MOST = 1e-5, 0.01, 1.7


class Case:
    """A half of a layer: streams, what decides, and what was made."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, writes: bool = True) -> None:
        count, tokens, width = shape
        shares = 2 * count if writes else count
        self.streams = random(*shape, dtype=dtype, scale=3.0)
        self.found = random(tokens, width, dtype=dtype)
        self.decides = (random(shares, count * width, scale=(count * width) ** -0.5), random(shares),
                        random(shares // count, scale=2.0))  # fmt: skip

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.read_streams(self.streams.double(), *(each.double() for each in self.decides), EPS, LEAST, MOST)

    def check(self, read: Callable[..., Any], write: Callable[..., Any]) -> None:
        (rows, weights), before = self.expected(), self.streams.clone()
        out, kept = read(self.streams, *self.decides, EPS, LEAST, MOST)
        assert torch.equal(self.streams, before)
        close_to_rounding(out, rows)
        assert kept.shape == weights.shape
        if kept.numel():
            assert float((kept.double() - weights).abs().max()) < 1e-5
            expected = reference.write_streams(self.streams.double(), self.found.double(), kept.double())
            write(self.streams, self.found, kept)
            close_to_rounding(self.streams, expected)


def on_gpu(op: Callable[..., Any], order: int = 0, bugs: tuple[str, ...] = ()) -> Callable[..., Any]:
    return lambda *args: op(Emulator(order, bugs=bugs), *args)


RUNS = [
    (BF16, None),
    (F32, None),
    *(pytest.param(dtype, order, marks=needs_emulation) for dtype in (BF16, HALF) for order in ORDERS),
]
"""Types, and the emulation's orders of threads; None: the CPU's kernel."""


def ops(order: int | None) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    if order is None:
        return connections.spread, connections.read_streams, connections.write_streams
    return on_gpu(connection.spread, order), on_gpu(connection.read_streams, order), on_gpu(connection.write_streams, order)


@pytest.mark.parametrize(("dtype", "order"), RUNS)
def test_what_is_read_and_written_is_one_rounding_from_float64(dtype: torch.dtype, order: int | None) -> None:
    _, read, write = ops(order)
    for shape in SHAPES:
        Case(shape, dtype).check(read, write)
    Case((4, 3, 264), dtype, writes=False).check(read, write)


@pytest.mark.parametrize(("dtype", "order"), RUNS)
def test_a_tokens_bits_are_its_own(dtype: torch.dtype, order: int | None) -> None:
    spread, read, write = ops(order)
    case = Case((4, 7, 88), dtype)
    rows = [case.streams[:, i : i + 1].contiguous() for i in range(7)]
    out, kept = read(case.streams, *case.decides, EPS, LEAST, MOST)
    write(case.streams, case.found, kept)
    for i, row in enumerate(rows):
        own, weights = read(row, *case.decides, EPS, LEAST, MOST)
        assert torch.equal(own[0], out[i])
        assert torch.equal(weights[0], kept[i])
        write(row, case.found[i : i + 1].contiguous(), weights)
        assert torch.equal(row[:, 0], case.streams[:, i])
    assert torch.equal(spread(case.found, 3), case.found.expand(3, 7, 88))


@pytest.mark.parametrize(("dtype", "order"), RUNS)
def test_no_tokens_are_none(dtype: torch.dtype, order: int | None) -> None:
    spread, read, write = ops(order)
    case = Case((4, 0, 8), dtype)
    out, kept = read(case.streams, *case.decides, EPS, LEAST, MOST)
    write(case.streams, case.found, kept)
    assert (out.shape, kept.shape, spread(out, 4).shape) == ((0, 8), (0, 4), (4, 0, 8))


@needs_emulation
@pytest.mark.parametrize("bug", ["ONE_NORM", "WITHOUT_LEAST", "REPLACED"])
def test_planted_bugs_are_found(bug: str) -> None:
    read, write = (on_gpu(op, bugs=(bug,)) for op in (connection.read_streams, connection.write_streams))
    with pytest.raises(AssertionError):
        Case((3, 4, 17), BF16).check(read, write)
