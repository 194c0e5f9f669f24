"""The layout of packed integer weights: sizes, places written down by hand, and the way there and back."""

from __future__ import annotations

import pytest
import torch

from nanovllm_cli.kernels.record_kinds import BF16, E8M0, F16, F32, MIN, NIBBLE, NO_LOW, SUB_I8, SUB_MIN, SUB_U8, ZERO
from nanovllm_cli.quant.cpu_records import (
    LOW_DTYPES,
    SCALE_DTYPES,
    RecordLayout,
    RecordRows,
    dequantize,
    pack_rows,
    unpack,
)

KINDS = [
    (2, 16, SUB_U8, NIBBLE, 0), (3, 16, SUB_I8, NO_LOW, 4), (4, 32, F16, NO_LOW, 8), (4, 32, F16, MIN, 0),
    (4, 32, SUB_U8, SUB_MIN, 0), (5, 32, SUB_U8, SUB_MIN, 0), (6, 16, SUB_I8, NO_LOW, 32), (7, 64, F32, ZERO, 0),
    (8, 32, F16, NO_LOW, 128), (8, 256, BF16, NO_LOW, 128), (4, 128, BF16, ZERO, 0), (4, 64, F32, NO_LOW, 8),
    (4, 32, E8M0, NO_LOW, 8), (2, 64, F16, ZERO, 0), (3, 128, BF16, NO_LOW, 4), (5, 32, F16, NO_LOW, 16), (4, 16, F16, NO_LOW, 8),
]  # fmt: skip


def random_rows(layout: RecordLayout, seed: int = 0) -> RecordRows:
    """Codes over their whole range, scales of any kind around 0.1."""
    g = torch.Generator().manual_seed(seed)
    n, groups, supers = layout.num_rows, layout.num_groups, layout.num_chunks

    def bytes_(shape: tuple[int, int], low: int, high: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g).to(dtype)

    def floats(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return (torch.rand(shape, generator=g) * 0.2 - 0.1).to(dtype)

    scale = SCALE_DTYPES[layout.scale]
    if layout.scale == E8M0:
        scales = bytes_((n, groups), 115, 130)
    elif layout.scale == SUB_I8:
        scales = bytes_((n, groups), -128, 128, torch.int8)
    elif layout.scale == SUB_U8:
        scales = bytes_((n, groups), 0, 256)
    else:
        scales = floats((n, groups), scale)
    lows = None
    if layout.low in (ZERO, SUB_MIN):
        lows = bytes_((n, groups), 0, 1 << min(layout.bits, 6))
    elif layout.low == MIN:
        lows = floats((n, groups), LOW_DTYPES[MIN])
    return RecordRows(
        bytes_((n, layout.width), 0, 1 << layout.bits),
        scales,
        lows,
        floats((n, supers), torch.float16) if layout.has_supers else None,
        floats((n, supers), torch.float16) if layout.has_super_lows else None,
    )


@pytest.mark.parametrize(("bits", "group", "scale", "low", "offset"), KINDS)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 288), (3, 20), (5, 40), (130, 768)])
def test_rows_come_back_and_can_be_packed_in_parts(
    n: int, k: int, bits: int, group: int, scale: int, low: int, offset: int
) -> None:
    layout = RecordLayout(n, k, bits, group, scale, low, offset)
    rows = random_rows(layout)
    packed = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for first, last in [(0, n // 3), (n // 3, n // 3 + 1), (n // 3 + 1, n)]:
        part = [t if t is None else t[first:last] for t in vars(rows).values()]
        pack_rows(layout, packed, first, RecordRows(*part))  # type: ignore[arg-type]
    back = unpack(layout, packed)
    for name, expected in vars(rows).items():
        actual = getattr(back, name)
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert torch.equal(actual, expected), name


def test_places_of_codes_in_a_record() -> None:
    """Column 5, k = 37 of a 6-bit weight: step 1, unit 1, byte 1. The plane of 4 has two units a row, that of 2 has four."""
    layout = RecordLayout(64, 64, 6, 16, SUB_I8, offset=32)
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[5, 37] = 0b10_1101
    rows = RecordRows(codes, torch.zeros(64, 4, dtype=torch.int8), supers=torch.zeros(64, 1, dtype=torch.float16))
    packed = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack_rows(layout, packed, 0, rows)
    record = packed[layout.codes_at(64) :].view(2, 6, 64, 4)
    assert record[1, 0, 5, 1] == 0b1101 << 4
    assert record[1, 4, 5, 1] == 0b10 << 2
    assert int(record.int().sum()) == (0b1101 << 4) + (0b10 << 2)


@pytest.mark.parametrize(
    ("bits", "group", "scale", "low", "offset", "file_bytes"),
    [  # bytes of GGUF's blocks of 256 (or eight of 32)
        (4, 32, F16, NO_LOW, 8, 8 * 18), (4, 32, F16, MIN, 0, 8 * 20), (5, 32, F16, NO_LOW, 16, 8 * 22),
        (8, 32, F16, NO_LOW, 128, 8 * 34), (2, 16, SUB_U8, NIBBLE, 0, 84),
        (3, 16, SUB_I8, NO_LOW, 4, 110), (4, 32, SUB_U8, SUB_MIN, 0, 144),
        (5, 32, SUB_U8, SUB_MIN, 0, 176), (6, 16, SUB_I8, NO_LOW, 32, 210),
    ],
)  # fmt: skip
def test_a_weight_takes_what_its_file_takes(
    bits: int, group: int, scale: int, low: int, offset: int, file_bytes: int
) -> None:
    layout = RecordLayout(64, 1024, bits, group, scale, low, offset)
    assert 1.0 <= layout.num_bytes / (64 * 4 * file_bytes) < 1.04


def test_dequantize_is_the_formula() -> None:
    layout = RecordLayout(1, 32, 4, 16, SUB_U8, SUB_MIN)
    half = lambda *v: torch.tensor([v], dtype=torch.float16)
    rows = RecordRows(
        torch.full((1, 32), 3, dtype=torch.uint8),
        torch.tensor([[2, 5]], dtype=torch.uint8),
        torch.tensor([[1, 4]], dtype=torch.uint8),
        half(0.5),
        half(0.25),
    )
    assert dequantize(layout, rows).unique(dim=1).tolist() == [[0.5 * 2 * 3 - 0.25 * 1, 0.5 * 5 * 3 - 0.25 * 4]]
    zeros = RecordLayout(1, 32, 4, 32, F16, ZERO)
    rows = RecordRows(rows.codes, half(0.5), torch.tensor([[7]], dtype=torch.uint8))
    assert dequantize(zeros, rows).unique().tolist() == [-2.0]
