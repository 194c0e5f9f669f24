"""unpack.cu, emulated, against the formats' own dequantized weights."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from emulation.quantized import quantized
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.kernels.unpack import packed_rows, unpack
from nanovllm_cli.quant.format import Fp8, Integer, Nf4

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
INT4 = Integer(4, 32, zeros=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("first", "count", "outputs", "width"),
    [(0, 1, 1, 32), (0, 37, 37, 96), (15, 2, 40, 64), (16, 16, 40, 160), (3, 30, 33, 544), (33, 4, 37, 1056), (7, 0, 9, 32),
     (1, 15, 16, 608)],
)  # fmt: skip
def test_a_range_of_rows(first: int, count: int, outputs: int, width: int, order: int) -> None:
    weight, meaning = quantized(INT4, outputs, width)
    emulator = Emulator(order)
    got = unpack(emulator, weight, first, count, BF16)
    assert torch.equal(got, meaning[first : first + count].to(BF16))
    assert emulator.launches == ({"unpack": 1} if count else {})


@pytest.mark.parametrize(
    ("form", "dtype", "width"),
    [(Fp8(128), BF16, 200), (Integer(8), FP16, 101), (Integer(8, 64, zeros=True), BF16, 128), (Nf4(64), BF16, 128)],
    ids=str,
)
def test_every_kind(form: Fp8 | Integer | Nf4, dtype: torch.dtype, width: int) -> None:
    weight, meaning = quantized(form, 50, width, dtype)
    close_to_rounding(unpack(Emulator(), weight, 5, 40, dtype), meaning[5:45], sums=0.0)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_by_their_ids(order: int) -> None:
    width = 65 * 64  # a block's tiles and one more
    weight, meaning = quantized(INT4, 21, width)
    none = torch.zeros(1, width)
    ids = torch.tensor([20, 0, 8, 8, -1, 15, 21])
    expected = torch.cat((meaning[[20, 0, 8, 8]], none, meaning[15:16], none)).to(BF16)
    assert torch.equal(packed_rows(Emulator(order), weight, ids, BF16), expected)
    tokens, places = torch.tensor([8, 20, -1]), torch.tensor([1, 3, 0, 2, -1])
    expected = torch.cat((meaning[20:21], none, meaning[8:9], none, none)).to(BF16)
    assert torch.equal(packed_rows(Emulator(order), weight, places, BF16, tokens=tokens), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_columns_go_back_to_their_own_order(dtype: torch.dtype) -> None:
    weight, meaning = quantized(INT4, 20, 160, ordered=True)
    assert torch.equal(unpack(Emulator(), weight, 0, 20, dtype), meaning.to(dtype))
    ids = torch.tensor([19, 3])
    assert torch.equal(packed_rows(Emulator(), weight, ids, dtype), meaning[ids].to(dtype))


def test_planted_bug_is_seen() -> None:
    def right(order: int) -> bool:
        weight, meaning = quantized(INT4, 32, 128)
        try:
            return torch.equal(unpack(Emulator(order, bugs=("NO_SYNC",)), weight, 0, 32, BF16), meaning.to(BF16))
        except KernelFailed:
            return False

    assert not all(right(order) for order in ORDERS)


@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_bytes(bug: tuple[str, ...]) -> None:
    strips = (1 << 31) // 512 + 1  # the last one begins at 2^31
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are codes of zero
    last, meaning = quantized(INT4, 16, 64)
    codes = zeros(below + strips * 512, torch.uint8)[below:].view(strips, 1, 512)
    scales, points = zeros(strips * 32, BF16).view(strips, 2, 16), zeros(strips * 32, torch.uint8).view(strips, 2, 16)
    codes[-1:], scales[-1:], points[-1:] = last.codes, last.scales, last.zeros
    weight = last._replace(num_rows=strips * 16, codes=codes, scales=scales, zeros=points)
    got = packed_rows(Emulator(bugs=bug), weight, torch.tensor([strips * 16 - 1]), BF16)
    assert torch.equal(got, meaning[-1:].to(BF16)) is not bool(bug)


@pytest.mark.parametrize(
    "bad",
    [
        lambda w: unpack(Emulator(), w, 0, 18, BF16),
        lambda w: unpack(Emulator(), w, -1, 2, BF16),
        lambda w: unpack(Emulator(), w, 0, 2, torch.float64),
        lambda w: unpack(Emulator(), w._replace(codes=w.codes[:1]), 0, 2, BF16),
        lambda w: packed_rows(Emulator(), w, torch.tensor([1], dtype=torch.int32), BF16),
        lambda w: packed_rows(Emulator(), w, torch.tensor([[1]]), BF16),
        lambda w: packed_rows(Emulator(), w, torch.tensor([1]), BF16, tokens=torch.tensor([1.0])),
    ],
    ids=["too many rows", "before the first", "type", "codes", "type of ids", "shape of ids", "type of tokens"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    with pytest.raises((AssertionError, KeyError, KernelFailed)):
        bad(quantized(INT4, 17, 64)[0])
