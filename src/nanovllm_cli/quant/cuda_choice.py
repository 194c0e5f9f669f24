"""Which way a GPU multiplies x [M, K] by a packed weight [N, K]: one table, every line with its reason.

    gemv       our kernel for few rows, which reads the packed weight once; norm, gate and residual are in it
    gemm       our kernel that multiplies packed weights by tensor cores, converting codes in registers
    wgmma      the same by Hopper's products of warpgroups, at twice the rate, in larger tiles
    library    unpack into 16-bit scratch, then the vendor's matmul: moves many times as many bytes, but multiplies faster

N and K do not count so far: all ways scale with their product, and what a small matrix loses it loses by its launches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Way = Literal["gemv", "gemm", "wgmma", "library"]


class Line(NamedTuple):
    """For these kinds of weights up to gemv_rows rows by GEMV, up to gemm_rows by our GEMM, up to wgmma_rows by wgmma (0: never),
    above by the library. From min_capability on."""

    kinds: tuple[str, ...]
    min_capability: int
    gemv_rows: int
    gemm_rows: int
    wgmma_rows: int
    reason: str


# Estimated, as no GPU has measured it yet: `benchmarks/gpu/all.py --only crossover` prints lines to put here.
# An H200 (4.3 TB/s, 790 TFLOP/s by the vendor's matmul, perhaps 400 by mma.sync) unpacks 50 M weights of 4 bits in 29 us and
# reads them again in 24; our GEMM of 192 rows takes 48. wgmma at 80 % of the vendor's rate loses as much as unpacking costs at
# some 1,700 rows, at 85 % at 2,400. Up to 64 rows it reads x as often as our GEMM, whose stripes fill the GPU better.
PACKED = ("int4", "nf4", "int8", "fp8")
TABLE = (
    Line(PACKED, 100, 8, 192, 0, "estimated, as sm_80: no wgmma"),
    Line(("nf4",), 90, 8, 64, 1024, "estimated: its conversion takes as long as the products"),
    Line(PACKED, 90, 8, 64, 2048, "estimated: unpacking costs as much as wgmma loses to the vendor's matmul at 2,048 rows"),
    Line(PACKED, 80, 8, 192, 0, "estimated: unpacking costs as much as 192 rows"),
    Line(PACKED, 75, 8, 32, 0, "estimated: no asynchronous copies before sm_80"),
    Line(("blocks",), 75, 64, 64, 0, "estimated: GEMV reads the weight once for 32 rows, unpacking moves eight times as much"),
)


def choose(kind: str, rows: int, capability: int) -> Way:
    """The way for so many rows; of a kind's lines the first that the GPU is new enough for counts."""
    line = next(line for line in TABLE if kind in line.kinds and line.min_capability <= capability)
    limits: tuple[tuple[Way, int], ...] = (("gemv", line.gemv_rows), ("gemm", line.gemm_rows), ("wgmma", line.wgmma_rows))
    return next((way for way, limit in limits if 0 < rows <= limit), "library")
