"""kernels/packed.py: where codes, scales and zero points lie, by the words of its docstring, and the way back."""

from __future__ import annotations

import itertools

import pytest
import torch

from emulation.compare import GENERATOR, random
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import packed
from nanovllm_cli.kernels.packed import BITS, Kind, Packed

KINDS: list[Kind] = ["int4", "int8", "fp8", "nf4"]


def integers(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, generator=GENERATOR, dtype=torch.int64).to(torch.uint8)


def place_of(kind: Kind, row: int, column: int, tiles: int) -> tuple[int, int]:
    """Byte and bit of a code, counted by hand."""
    tile, n, k = row // 16 * tiles + column // 64, row % 16, column % 64
    step, high, c, odd = k // 16, k % 16 // 8, k % 8 // 2, k % 2
    lane, register = n % 8 * 4 + c, 2 * high + n // 8
    if kind == "int4":
        bit = 4 * (register + 4 * odd)
        return tile * 512 + lane * 16 + step * 4 + bit // 8, bit % 8
    if kind == "nf4":
        bit = 4 * (2 * register + odd)
        return tile * 512 + lane * 16 + step * 4 + bit // 8, bit % 8
    return tile * 1024 + n // 8 * 512 + lane * 16 + step * 4 + [[0, 2], [1, 3]][high][odd], 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_lies_where_the_docstring_says(kind: Kind) -> None:
    rows, width, group = 37, 96, 32
    codes, scales = integers(1 << BITS[kind], rows, width), random(rows, 3)
    weight = packed.empty(kind, rows, width, group, torch.float32, zeros=False, ordered=False, device="cpu")
    packed.pack_rows(weight, 0, codes, scales)
    data = weight.codes.flatten().tolist()
    for row in range(rows):
        for column in range(width):
            byte, bit = place_of(kind, row, column, 2)
            assert data[byte] >> bit & (1 << BITS[kind]) - 1 == codes[row, column]
    for row in range(rows):
        assert torch.equal(weight.scales[row // 16, :, 2 * (row % 8) + row % 16 // 8], scales[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(0, 50), (0, 16, 48, 50), (0, 1, 3, 17, 31, 50), (0, 5, 50)])
def test_rows_come_back_whatever_pieces_they_came_in(kind: Kind, cuts: tuple[int, ...]) -> None:
    zeros, order = kind == "int8", torch.randperm(200, generator=GENERATOR).int() if kind == "int4" else None
    weight = packed.empty(kind, 50, 200, 128, torch.float16, zeros=zeros, ordered=order is not None, device="cpu")
    codes, scales = integers(1 << BITS[kind], 50, 200), random(50, 2, dtype=torch.float16)
    points = integers(256, 50, 2) if zeros else None
    for first, last in reversed(list(itertools.pairwise(cuts))):
        part = slice(first, last)
        packed.pack_rows(weight, first, codes[part], scales[part], None if points is None else points[part], order)
    for first, n in [(0, 50), (3, 20), (49, 1), (16, 16)]:
        part = slice(first, first + n)
        got = packed.unpack_rows(weight, first, n)
        assert torch.equal(got[0], codes[part])
        assert torch.equal(got[1], scales[part])
        assert got[2] is None if points is None else torch.equal(got[2], points[part])
    assert not weight.scales[3, :, 1::2].any()  # rows 56 to 63 are padding
    assert weight.num_bytes == 4 * 4 * 128 * BITS[kind] + 4 * 2 * 16 * (3 if zeros else 2) + (800 if order is not None else 0)


def test_columns_lie_in_the_given_order() -> None:
    order = torch.randperm(64, generator=GENERATOR).int()
    codes, scales = integers(16, 16, 64), random(16, 2)
    ordered = packed.empty("int4", 16, 64, 32, torch.float32, zeros=False, ordered=True, device="cpu")
    plain = packed.empty("int4", 16, 64, 32, torch.float32, zeros=False, ordered=False, device="cpu")
    packed.pack_rows(ordered, 0, codes, scales, order=order)
    packed.pack_rows(plain, 0, codes[:, order.long()], scales)
    assert torch.equal(ordered.codes, plain.codes)


def weight() -> Packed:
    return packed.empty("int4", 20, 64, 32, torch.float16, zeros=True, ordered=True, device="cpu")


@pytest.mark.parametrize(
    "bad",
    [
        {"codes": integers(16, 4, 63)}, {"codes": integers(16, 4, 64).int()}, {"scales": random(4, 1, dtype=torch.float16)},
        {"scales": random(4, 2)}, {"zeros": None}, {"zeros": integers(16, 4, 1)}, {"order": None}, {"first_row": 17},
        {"first_row": -1}, {"order": torch.arange(64).int().flip(0)},
    ],
    ids=["width", "codes' type", "groups", "scales' type", "no zeros", "zeros", "no order", "past the end", "before", "order"],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(bad: dict) -> None:
    target = weight()
    right = {
        "first_row": 0, "codes": integers(16, 4, 64), "scales": random(4, 2, dtype=torch.float16), "zeros": integers(16, 4, 2),
        "order": torch.arange(64).int(),
    }  # fmt: skip
    packed.pack_rows(target, **right)
    with pytest.raises((AssertionError, RuntimeError)):
        packed.pack_rows(target, **(right | bad))


def test_groups_without_a_kernel_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 48"):
        packed.empty("int4", 16, 96, 48, torch.float16, zeros=False, ordered=False, device="cpu")
