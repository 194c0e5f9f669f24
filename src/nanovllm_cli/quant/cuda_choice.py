"""Which way a GPU multiplies x [M, K] by a packed weight [N, K]: one table, every line with its reason.

    gemv       our kernel for few rows, which reads the packed weight once; norm, gate and residual are in it
    gemm       our kernel that multiplies packed weights by tensor cores, converting codes in registers
    library    unpack into 16-bit scratch, then the vendor's matmul: moves many times as many bytes, but multiplies faster

N and K do not count so far: all ways scale with their product, and what a small matrix loses it loses by its launches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Way = Literal["gemv", "gemm", "library"]


class Line(NamedTuple):
    """Up to gemv_rows rows by GEMV, up to gemm_rows by our GEMM, above by the library. From min_capability on."""

    kind: str
    min_capability: int
    gemv_rows: int
    gemm_rows: int
    reason: str


# Estimated, as no GPU has measured it yet: `benchmarks/gpu/all.py --only crossover` prints lines to put here.
# An H200 (4.3 TB/s, 790 TFLOP/s by the vendor's matmul, perhaps 400 by mma.sync) unpacks 50 M weights of 4 bits in 29 us and
# reads them again in 24; our GEMM of 192 rows takes 48.
TABLE = (
    Line("int4", 80, 8, 192, "estimated: unpacking costs as much as 192 rows"),
    Line("nf4", 80, 8, 192, "estimated, as int4"),
    Line("int8", 80, 8, 192, "estimated, as int4"),
    Line("fp8", 80, 8, 192, "estimated, as int4"),
    Line("int4", 75, 8, 32, "estimated: no asynchronous copies before sm_80"),
    Line("nf4", 75, 8, 32, "estimated, as int4"),
    Line("int8", 75, 8, 32, "estimated, as int4"),
    Line("fp8", 75, 8, 32, "estimated, as int4"),
    Line("blocks", 75, 64, 64, "estimated: GEMV reads the weight once for 32 rows, unpacking moves eight times as much"),
)


def choose(kind: str, rows: int, capability: int) -> Way:
    """The way for so many rows; of a kind's lines the first that the GPU is new enough for counts."""
    line = next(line for line in TABLE if line.kind == kind and line.min_capability <= capability)
    if 0 < rows <= line.gemv_rows:
        return "gemv"
    return "gemm" if 0 < rows <= line.gemm_rows else "library"
