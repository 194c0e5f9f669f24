"""Which way a GPU multiplies x [M, K] by a quantized weight [N, K]: one table, every line with its reason.

    gemv       our kernel for one to eight rows, which reads the packed weight once; norm, gate and residual are in it
    gemm       our kernel that multiplies packed weights by tensor cores, converting codes in registers
    library    unpack into 16-bit scratch, then the vendor's matmul: reads and writes five times as much, but multiplies faster

The wrappers that storages (cuda_packed.py, cuda_blocks.py) call, and what they promise. All replay in a graph; `x` of a GEMV may
be `Normed`; `tokens` as in `embedding.embedding` (ids are indices into it; out of range, either is a row of zeros).

    packed.empty(kind, num_rows, width, group, scale_dtype, *, zeros, ordered, device) -> Packed
        kind "int4", "int8", "fp8" or "nf4"; group 0 is a row
    packed.pack_rows(weight, first_row, codes, scales, zeros, order)
        as in quant/rows.py, on any device; any first_row
    packed_gemv.packed_gemv(launcher, x, weight, bias, *, residual=None, activation=None, out_dtype=None)     M <= MAX_ROWS = 8
    packed_gemm.packed_gemm(launcher, x, weight, bias, *, residual=None, out_dtype=None)
    unpack.unpack(launcher, weight, first_row, num_rows, dtype) -> [num_rows, K]
    unpack.packed_rows(launcher, weight, ids, dtype, tokens=None) -> [T, K]

    block_layout.TYPES
    block_layout.empty(type, num_rows, width, device) -> PackedBlocks
    block_layout.pack_rows(weight, first_row, data uint8 [n, bytes of a row])
    block_gemv.block_gemv(launcher, x, weight, bias, *, residual=None, activation=None, out_dtype=None)
        rounds x itself; M <= MAX_ROWS = 8
    block_unpack.unpack(launcher, weight, first_row, num_rows, dtype) -> [num_rows, K]
    block_unpack.block_rows(launcher, weight, ids, dtype, tokens=None) -> [T, K]

    quantize_activations.to_int8(launcher, x, group=0) -> Rounded(codes int8 [M, K], scales fp32 [M, G])      group 0 is a row
    quantize_activations.to_e4m3(launcher, x, group=0, fixed=None) -> Rounded(codes e4m3 [M, K], scales fp32 [M, G])
        fixed: fp32 [1], the scale of all, where it is static
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
# An H200 (4.3 TB/s, 790 TFLOP/s by the vendor's matmul, perhaps 400 by mma.sync) unpacks 50 M weights in 29 us and reads them
# again in 24; our GEMM of 192 rows takes 48.
TABLE = (
    Line("int4", 80, 8, 192, "estimated: unpacking costs as much as 192 rows"),
    Line("nf4", 80, 8, 192, "estimated, as int4"),
    Line("int8", 80, 8, 192, "estimated, as int4"),
    Line("fp8", 80, 8, 192, "estimated, as int4"),
    Line("int4", 75, 8, 32, "estimated: no asynchronous copies before sm_80"),
    Line("nf4", 75, 8, 32, "estimated, as int4"),
    Line("int8", 75, 8, 32, "estimated, as int4"),
    Line("fp8", 75, 8, 32, "estimated, as int4"),
    Line("blocks", 75, 8, 8, "no GEMM of our own"),
)


def choose(kind: str, rows: int, capability: int) -> Way:
    """The way for so many rows; of a kind's lines the first that the GPU is new enough for counts."""
    line = next(line for line in TABLE if line.kind == kind and line.min_capability <= capability)
    if 0 < rows <= line.gemv_rows:
        return "gemv"
    return "gemm" if 0 < rows <= line.gemm_rows else "library"
