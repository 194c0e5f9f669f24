"""The layout of packed integer weights: sizes, places written down by hand, and the way there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm_cli.kernels import simd_codebook
from nanovllm_cli.kernels.record_kinds import (
    BF16,
    E8M0,
    F16,
    F32,
    MIN,
    NIBBLE,
    NO_LOW,
    NO_SIGNS,
    SCALE_DTYPES,
    SIGN_A_CODE,
    SIGN_A_POINT,
    SUB_I8,
    SUB_MIN,
    SUB_ODD,
    SUB_U8,
    UE4M3,
    ZERO,
    Codebook,
    RecordLayout,
)
from nanovllm_cli.quant.cpu_integer import compact_layout_of
from nanovllm_cli.quant.cpu_records import RecordRows, pack_rows
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from record_reference import dequantize, unpack

KINDS = [
    (2, 16, SUB_U8, NIBBLE, 0), (3, 16, SUB_I8, NO_LOW, 4), (4, 32, F16, NO_LOW, 8), (4, 32, F16, MIN, 0),
    (4, 32, SUB_U8, SUB_MIN, 0), (5, 32, SUB_U8, SUB_MIN, 0), (6, 16, SUB_I8, NO_LOW, 32), (7, 64, F32, ZERO, 0),
    (8, 32, F16, NO_LOW, 128), (8, 256, BF16, NO_LOW, 128), (4, 128, BF16, ZERO, 0), (4, 64, F32, NO_LOW, 8),
    (4, 32, E8M0, NO_LOW, 8), (2, 64, F16, ZERO, 0), (3, 128, BF16, NO_LOW, 4), (5, 32, F16, NO_LOW, 16), (4, 16, F16, NO_LOW, 8),
    (4, 16, UE4M3, NO_LOW, 8), (4, 64, BF16, MIN, 0), (8, 32, F32, MIN, 0), (3, 128, F16, MIN, 0), (6, 64, BF16, MIN, 0),
    (2, 32, BF16, MIN, 0), (8, 64, BF16, MIN, 0), (5, 64, BF16, MIN, 0),
]  # fmt: skip
# Index bits, codes of a point, signs.
CODEBOOKS = [
    (7, 4, NO_SIGNS), (8, 8, SIGN_A_CODE), (9, 8, SIGN_A_CODE), (10, 8, SIGN_A_CODE), (11, 8, SIGN_A_POINT),
    (8, 4, SIGN_A_CODE), (9, 4, SIGN_A_CODE),
]  # fmt: skip


def codebook_layout(n: int, k: int, index_bits: int, length: int, signs: int) -> RecordLayout:
    """Any points, with GGUF's number of codes: 3 of points of 8, 8 of 4."""
    rng = np.random.default_rng(index_bits)
    codes = 3 if length == 8 or signs == NO_SIGNS else 8
    points = rng.integers(0, codes, (1 << index_bits, length), dtype=np.uint8)
    numbers = tuple(tuple(int(v) for v in rng.integers(0, 126, codes)) for _ in range(2))
    book = Codebook(index_bits, length, signs, points.tobytes(), (numbers[0], numbers[1]))
    return RecordLayout(n, k, 0, 32, SUB_ODD, offset=62, unit=3, codebook=book)


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
    elif layout.scale == SUB_ODD:
        scales = bytes_((n, -(-groups // 2)), 0, 256)
    elif layout.scale == UE4M3:
        scales = bytes_((n, groups), 0, 128)
    else:
        scales = floats((n, groups), scale)
    lows = None
    if layout.low in (ZERO, SUB_MIN):
        lows = bytes_((n, groups), 0, 1 << min(layout.bits, 6))
    elif layout.low == MIN:
        lows = floats((n, groups), scale)
    codes, signs = bytes_((n, layout.width), 0, 1 << layout.bits), None
    if layout.codebook is not None:
        book = layout.codebook
        codes = bytes_((n, layout.width // book.length), 0, 1 << book.index_bits, torch.int16)
        if book.signs != NO_SIGNS:
            signs = bytes_((n, layout.width // 8), 0, 256 if book.signs == SIGN_A_CODE else 2)
    return RecordRows(
        codes,
        scales,
        lows,
        floats((n, supers), torch.float32 if layout.scale == UE4M3 else torch.float16) if layout.has_supers else None,
        floats((n, supers), torch.float16) if layout.has_super_lows else None,
        signs,
    )


def assert_comes_back_in_parts(layout: RecordLayout) -> None:
    n, rows = layout.num_rows, random_rows(layout)
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


@pytest.mark.parametrize(("bits", "group", "scale", "low", "offset"), KINDS)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 288), (3, 20), (5, 40), (130, 768)])
def test_rows_come_back_and_can_be_packed_in_parts(
    n: int, k: int, bits: int, group: int, scale: int, low: int, offset: int
) -> None:
    assert_comes_back_in_parts(RecordLayout(n, k, bits, group, scale, low, offset))


@pytest.mark.parametrize("by_vectors", [True, False] if simd_codebook._BY_VECTORS else [False])
def test_a_codebooks_function_is_compiled_once_for_all_processes(by_vectors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_vectors:
        monkeypatch.setattr(simd_codebook, "_unpack", simd_codebook._unpack_columns)
    compiled = [simd_codebook._compiled.__wrapped__(8, 8, 2, SIGN_A_CODE) for _ in range(2)]
    assert compiled[1].cache_hits == 1


@pytest.mark.parametrize(("index_bits", "length", "signs"), CODEBOOKS)
@pytest.mark.parametrize(("n", "k"), [(70, 288), (3, 32), (130, 768)])
def test_points_of_a_codebook_come_back(n: int, k: int, index_bits: int, length: int, signs: int) -> None:
    assert_comes_back_in_parts(codebook_layout(n, k, index_bits, length, signs))


def test_points_can_be_packed_over_others() -> None:
    layout = codebook_layout(64, 256, 10, 8, SIGN_A_CODE)
    used, fresh = (torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(2))
    pack_rows(layout, used, 0, random_rows(layout, 1))
    for packed in (used, fresh):
        pack_rows(layout, packed, 0, random_rows(layout, 2))
    assert torch.equal(used, fresh)


def test_places_of_points_in_a_record() -> None:
    """Row 5, columns 40 to 47 of the weight: step 1, row 1 of its indices. Code 2 of the eight, in unit 2 of the step, is signed.
    """
    layout = codebook_layout(64, 64, 10, 8, SIGN_A_CODE)
    index, signs = torch.zeros(64, 8, dtype=torch.int16), torch.zeros(64, 8, dtype=torch.uint8)
    index[5, 5], signs[5, 5] = 0b10_0001_0111, 0b100
    scales, supers = torch.zeros(64, 1, dtype=torch.uint8), torch.zeros(64, 1, dtype=torch.float16)
    packed = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack_rows(layout, packed, 0, RecordRows(index, scales, supers=supers, signs=signs))
    assert layout.codes_at(64) == 64 * (2 + 1)
    step = packed[layout.codes_at(64) :].view(2, 64 * 4 + 4 * 2 * 8 + 8 * 32)[1]
    assert step.nonzero().flatten().tolist() == [64 + 5, 256 + 8 * (2 + 1), 320 + 32 * 2 + (5 * 4 + 2) // 8]
    assert step[[64 + 5, 256 + 8 * 3, 320 + 66]].tolist() == [0b0001_0111, 1 << 5, 1 << (5 * 4 + 2) % 8]


def test_the_eighth_index_of_seven_bits_lies_on_top_of_the_others() -> None:
    layout = codebook_layout(64, 32, 7, 4, NO_SIGNS)
    index = torch.zeros(64, 8, dtype=torch.int16)
    index[9, 3], index[9, 7] = 0b101_0101, 0b100_0011
    scales, supers = torch.zeros(64, 1, dtype=torch.uint8), torch.zeros(64, 1, dtype=torch.float16)
    packed = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack_rows(layout, packed, 0, RecordRows(index, scales, supers=supers))
    assert packed[layout.codes_at(32) :].view(7, 64)[:, 9].tolist() == [128, 128, 0, 0b101_0101, 0, 0, 128]


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
    assert record[1, 1, 5, 1] == 0b10 << 2, "the second plane's first row is needed behind the first one's"
    assert int(record.int().sum()) == (0b1101 << 4) + (0b10 << 2)


@pytest.mark.parametrize("width", [1024, 2560, 3072, 4096])
@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_weight_takes_what_its_file_takes(name: str, width: int) -> None:
    """TQ1_0 has 7 bits for four codes instead of a byte for five, IQ1_S a sign for 8 codes instead of for 32, IQ2_XXS, IQ2_XS and
    IQ3_XXS the eighth sign, which the file leaves out because it follows from the others."""
    kind = BLOCKS[name]
    layout = compact_layout_of(Blocks(name), 128, width)
    most = {"TQ1_0": 1.08, "IQ1_S": 1.08}.get(name, 1.07)
    assert 1.0 <= layout.num_bytes / (128 * width // kind.block_len * kind.block_bytes) <= most


def test_what_padding_costs() -> None:
    """Rows fill up to 64, columns to 32; blocks are 32 columns or more, so that in a file only rows do."""
    full = RecordLayout(64, 64, 4, 32, F16).num_bytes
    assert RecordLayout(1, 33, 4, 32, F16).num_bytes == full
    assert RecordLayout(65, 64, 4, 32, F16).num_bytes == 2 * full
    assert [compact_layout_of(Blocks("Q4_0"), 64, 32 * blocks).num_bytes for blocks in (1, 9)] == [64 * 18, 64 * 18 * 9]


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
