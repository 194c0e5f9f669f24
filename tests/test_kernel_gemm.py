"""gemm.cu, emulated, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random, relative_error
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.kernels.gemm import LARGE, MEDIUM, SMALL, Tile, gemm, tile_for

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
TINY = Tile(32, 32, 2, 2, 3)
"""Not in use, but quick to emulate at shapes of several tiles."""
# rows, outputs, width
SHAPES = [
    (1, 1, 16), (5, 17, 24), (16, 33, 80), (33, 64, 64), (64, 129, 8), (130, 20, 136), (31, 65, 1032), (40, 38, 192),
    (300, 40, 72),
]  # fmt: skip


def weights(outputs: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return random(outputs, width, dtype=dtype, scale=width**-0.5)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_product_is_added_to_the_residual_with_one_rounding(rows: int, outputs: int, width: int, order: int) -> None:
    x, weight, bias = random(rows, width, dtype=BF16), weights(outputs, width, BF16), random(outputs, dtype=BF16)
    residual = random(rows, outputs, dtype=BF16)
    expected = residual.double() + product(x, weight) + bias.double()
    got = gemm(Emulator(order), x, weight, bias, residual=residual, tile=TINY)
    assert got is residual
    close_to_rounding(got, expected)


@pytest.mark.parametrize("tile", [SMALL, MEDIUM, LARGE])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 40, 136), (18, 23, 72), (130, 200, 80), (7, 17, 1096)])
def test_every_tile_is_one_rounding_from_float64(rows: int, outputs: int, width: int, tile: Tile) -> None:
    x, weight, bias = random(rows, width, dtype=FP16), weights(outputs, width, FP16), random(outputs, dtype=FP16)
    close_to_rounding(gemm(Emulator(), x, weight, bias, tile=tile), product(x, weight) + bias.double())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [100, 17, 66])
def test_rows_without_16_byte_boundaries(width: int, order: int) -> None:
    x, weight = random(19, width, dtype=BF16), weights(33, width, BF16)
    close_to_rounding(gemm(Emulator(order), x, weight, None, tile=MEDIUM), product(x, weight))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 51, 136), (16, 16, 1024), (3, 100, 2056)])
def test_logits_are_not_rounded(rows: int, outputs: int, width: int, order: int) -> None:
    x, weight = random(rows, width, dtype=BF16), weights(outputs, width, BF16)
    got = gemm(Emulator(order), x, weight, None, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, product(x, weight)) <= 1e-5


def test_a_row_has_the_same_bits_alone_and_among_any_others() -> None:
    """In whatever tile that number of rows is computed."""
    x, weight, bias = random(130, 168, dtype=BF16), weights(72, 168, BF16), random(72, dtype=BF16)
    residual = random(130, 72, dtype=BF16)
    few, many = Emulator(num_multiprocessors=1), Emulator(num_multiprocessors=200)
    together = gemm(few, x, weight, bias, residual=residual.clone())
    tiles = set()
    for rows in (1, 5, 8, 16, 33, 64, 127, 130):
        for emulator in (few, many):
            for part in (slice(0, rows), slice(130 - rows, 130)):
                tiles.add(tile_for(rows, 72, emulator))
                alone = gemm(emulator, x[part], weight, bias, residual=residual[part].clone())
                assert torch.equal(alone, together[part])
    assert tiles == {SMALL, MEDIUM, LARGE}


@pytest.mark.parametrize(("capability", "shared"), [(75, 64), (80, 163), (89, 99), (90, 227), (120, 99)])
def test_tiles_fit_shared_memory(capability: int, shared: int) -> None:
    for rows in (1, 40, 4096):
        assert tile_for(rows, 4096, Emulator(capability=capability)).shared_bytes <= shared << 10


def test_turing_has_no_bfloat16() -> None:
    turing = Emulator(capability=75)
    with pytest.raises(UnsupportedError):
        gemm(turing, random(1, 16, dtype=BF16), random(8, 16, dtype=BF16), None)


def test_nothing_is_launched_for_no_rows() -> None:
    emulator = Emulator()
    assert gemm(emulator, random(0, 16, dtype=BF16), random(8, 16, dtype=BF16), None).shape == (0, 8)
    assert not emulator.launches


@pytest.mark.parametrize(("bug", "width"), [("NO_WAIT", 200), ("NO_BARRIER", 328), ("TAIL", 200)])
def test_planted_bugs_are_seen(bug: str, width: int) -> None:
    def right(order: int) -> bool:
        x, weight = random(20, width, dtype=BF16), weights(40, width, BF16)
        x = torch.cat((x, random(20, width, dtype=BF16)))[:20]  # behind the last row there is something to be read
        weight = torch.cat((weight, random(1, width, dtype=BF16)))[:40]
        try:
            close_to_rounding(gemm(Emulator(order, bugs=(bug,)), x, weight, None, tile=TINY), product(x, weight))
        except (AssertionError, KernelFailed):
            return False
        return True

    assert not all(right(order) for order in ORDERS)


@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_elements(bug: tuple[str, ...]) -> None:
    width, outputs = 16384, 131080  # the last eight rows begin at 2^31
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are zeros
    weight = zeros(below + outputs * width, BF16)[below:].view(outputs, width)
    weight[-8:] = weights(8, width, BF16)
    x, residual = random(1, width, dtype=BF16), torch.zeros(1, outputs, dtype=BF16)
    emulator = Emulator(bugs=bug, only_block=TINY.needed(1, outputs) - 1)
    gemm(emulator, x, weight, None, residual=residual, tile=TINY)
    if bug:
        assert not residual.any()
    else:
        close_to_rounding(residual[:, -8:], product(x, weight[-8:]))


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, w, b, r: (x[:, ::2], w[:, ::2].contiguous(), b, r),
        lambda x, w, b, r: (x, w[:, :-1].contiguous(), b, r),
        lambda x, w, b, r: (x, w.half(), b, r),
        lambda x, w, b, r: (x.float(), w.float(), b, r),
        lambda x, w, b, r: (x, w, b[:-1], r),
        lambda x, w, b, r: (x, w, b, r[:1]),
        lambda x, w, b, r: (x, w, b, r.float()),
    ],
    ids=["strides", "width", "type", "float32", "bias", "residual rows", "residual type"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    x, weight, bias, residual = bad(
        random(3, 64, dtype=BF16), random(9, 64, dtype=BF16), random(9, dtype=BF16), random(3, 9, dtype=BF16)
    )
    with pytest.raises((AssertionError, KeyError)):
        gemm(Emulator(), x, weight, bias, residual=residual)
