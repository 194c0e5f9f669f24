"""Sizes and places in a packed integer weight: shared by the kernels that read records and by `quant/cpu_records.py`, which
fills them and says what they look like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

TILE = 64
"""Output columns (rows of the weight) of a record."""
CHUNK = 256
"""Codes along k of a record, at most."""
STEP = 32
"""Codes along k that are packed together: what a record's length is a multiple of."""

F32, F16, BF16, E8M0, SUB_U8, SUB_I8, SUB_ODD, UE4M3 = range(8)
"""Kinds of scale. SUB_*: whole numbers that an f16 a record multiplies (GGUF's super-blocks); SUB_ODD: 1, 3, … 31, of which two
groups share a byte, the first in the lower half. E8M0: 2**(byte - 128), half of what the byte says elsewhere, for codes that are
twice the value (fp4's are 0.5 apart). UE4M3: an 8-bit float of seven bits, four of exponent and three of fraction, times
an f32 a row that every record has (NVFP4's)."""
NO_LOW, ZERO, MIN, SUB_MIN, NIBBLE = range(5)
"""Kinds of what is taken off. ZERO: u8 codes; MIN: of the type of the scales, added; SUB_MIN: u8 times an f16 a record; NIBBLE:
the same, in the upper half of the scale's byte."""

GROUPS = (16, 32, 64, 128, 256)
SCALE_DTYPES = {
    F32: torch.float32,
    F16: torch.float16,
    BF16: torch.bfloat16,
    E8M0: torch.uint8,
    UE4M3: torch.uint8,
    SUB_U8: torch.uint8,
    SUB_I8: torch.int8,
    SUB_ODD: torch.uint8,
}
PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}


def _places(planes: tuple[int, ...]) -> tuple[int, ...]:
    rows = [(8 // plane * line, number) for number, plane in enumerate(planes) for line in range(plane)]
    return tuple(sorted(rows).index(row) for row in rows)


ROW_PLACES = np.array([(*_places(PLANES.get(bits, ())), *range(8))[:8] for bits in range(9)])
"""Of codes of so many bits, and each row of a step's planes, one plane behind the other, where it lies: rows lie in the order in
which units need them."""
NO_SIGNS, SIGN_A_CODE, SIGN_A_POINT = range(3)
"""What has a bit of its own in a record that says which of a codebook's two rows of numbers counts."""


@dataclass(frozen=True)
class Codebook:
    """Codes that come `length` (4 or 8) at a time, as points found by an index (GGUF's IQ types).

    points: u8 [2**index_bits, length], below 4 or below 16. numbers: what they stand for, by their sign, u8.
    """

    index_bits: int
    length: int
    signs: int
    points: bytes
    numbers: tuple[tuple[int, ...], tuple[int, ...]]

    def __post_init__(self) -> None:
        assert 7 <= self.index_bits <= 15
        assert len(self.points) == self.length << self.index_bits
        assert (self.index_bits, self.length) != (7, 8)

    @property
    def code_bits(self) -> int:
        """As many as a vector of points is unpacked by."""
        return 2 if max(self.points) < 4 else 4

    @property
    def step_bytes(self) -> int:
        """Of 32 codes along k, 64 columns: as `kernels/simd_codebook.py` reads them."""
        rows = STEP // self.length
        sign_bits = {NO_SIGNS: 0, SIGN_A_CODE: self.length, SIGN_A_POINT: 1}[self.signs]
        return TILE * rows * (self.index_bits + sign_bits) // 8


@dataclass(frozen=True)
class RecordLayout:
    """A packed [num_rows, width] weight: scale * (table[code] - offset) - low. scale, low: kinds as above.

    bits: of a code; 0 with a codebook. unit: supers are divided by 2**unit. table: 16 bytes, what codes of up to
    4 bits stand for; None: for themselves. Codes of one bit stand for 0 and 2: signs, with an offset of 1.
    """

    num_rows: int
    width: int
    bits: int
    group: int
    scale: int
    low: int = NO_LOW
    offset: int = 0
    unit: int = 0
    table: tuple[int, ...] | None = None
    codebook: Codebook | None = None

    def __post_init__(self) -> None:
        assert self.bits in PLANES if self.codebook is None else self.bits == 0
        assert self.group in GROUPS
        assert (self.low in (SUB_MIN, NIBBLE)) <= (self.scale == SUB_U8)
        assert self.low == NO_LOW or self.offset == 0
        assert self.low != MIN or self.scale in (F32, F16, BF16)
        assert self.table is None or len(self.table) == 16
        assert self.bits != 1 or (self.table is not None and self.table[:2] == (0, 2)), "what kernels unpack a bit to"

    @property
    def padded_width(self) -> int:
        return -(-self.width // STEP) * STEP

    @property
    def num_groups(self) -> int:
        return -(-self.width // self.group)

    @property
    def num_chunks(self) -> int:
        return -(-self.width // CHUNK)

    @property
    def num_tiles(self) -> int:
        return -(-self.num_rows // TILE)

    @property
    def has_supers(self) -> bool:
        return self.scale in (SUB_U8, SUB_I8, SUB_ODD, UE4M3)

    @property
    def has_super_lows(self) -> bool:
        return self.low in (SUB_MIN, NIBBLE)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """Of what has a place of its own beside the scales."""
        if self.low == MIN:
            return SCALE_DTYPES[self.scale]
        return torch.uint8 if self.low in (ZERO, SUB_MIN) else None

    @property
    def low_bytes(self) -> int:
        """Of a group."""
        return 0 if self.low_dtype is None else self.low_dtype.itemsize

    @property
    def super_bytes(self) -> int:
        """Of a row in a record."""
        return (4 if self.scale == UE4M3 else 2 * self.has_supers) + 2 * self.has_super_lows

    @property
    def scale_span(self) -> int:
        """Columns that share an element of the scales."""
        return self.group * (2 if self.scale == SUB_ODD else 1)

    @property
    def step_bytes(self) -> int:
        """Of 32 codes along k."""
        return TILE * STEP * self.bits // 8 if self.codebook is None else self.codebook.step_bytes

    def chunk_width(self, chunk: int) -> int:
        return min(CHUNK, self.padded_width - chunk * CHUNK)

    def codes_at(self, width: int) -> int:
        """Bytes before the codes in a record of `width` codes along k."""
        groups = -(-width // self.group)
        scales = -(-width // self.scale_span) * SCALE_DTYPES[self.scale].itemsize
        return TILE * (self.super_bytes + scales + groups * self.low_bytes)

    def record_bytes(self, width: int) -> int:
        """Bytes of a record of `width` codes along k."""
        return self.codes_at(width) + width // STEP * self.step_bytes

    @property
    def tile_bytes(self) -> int:
        last = self.num_chunks - 1
        return last * self.record_bytes(CHUNK) + self.record_bytes(self.chunk_width(last))

    @property
    def num_bytes(self) -> int:
        return self.num_tiles * self.tile_bytes
