"""One token's step of RWKV-7's rule over some columns of a state, as LLVM vectors: as many as registers hold the sums of. Each
column is summed in ascending rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanovllm_cli.kernels.simd import WIDE
from nanovllm_cli.kernels.simd_ir import F32, I64, LANES, VF, at_address, counted, fma, multiple, splat

_VECTORS = 4 if WIDE else 2
COLUMNS = _VECTORS * LANES


def _code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
    state, stride, rows, away, q, v, out, kept, key, put, alike, turned = args

    def vector(row: Any, i: int) -> Any:
        return at_address(b, state, b.add(b.mul(row, stride), I64(4 * LANES * i)), VF)

    def number(base: Any, row: Any) -> Any:
        return splat(b, b.load(at_address(b, base, multiple(b, row, 4), F32)), VF)

    zeros = ir.Constant(VF, [0.0] * LANES)
    entry, loop, end = b.block, *(b.function.append_basic_block(name) for name in ("sums", "change"))
    b.branch(loop)
    b.position_at_end(loop)
    row, sums = b.phi(I64), [b.phi(VF) for _ in range(2 * _VECTORS)]
    row.add_incoming(I64(0), entry)
    by, added = (number(away, row), number(q, row)), []
    for i in range(_VECTORS):
        numbers = b.load(vector(row, i), align=4)
        added += [fma(b, numbers, one, total) for one, total in zip(by, sums[2 * i : 2 * i + 2], strict=True)]
    for total, more in zip(sums, added, strict=True):
        total.add_incoming(zeros, entry)
        total.add_incoming(more, loop)
    following = b.add(row, I64(1))
    row.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, rows), loop, end)

    b.position_at_end(end)
    by_value, by_taken = splat(b, alike, VF), splat(b, turned, VF)
    values = [b.load(at_address(b, v, I64(4 * LANES * i), VF), align=4) for i in range(_VECTORS)]
    for i, value in enumerate(values):
        taken, found = added[2 * i : 2 * i + 2]
        total = fma(b, by_taken, taken, fma(b, by_value, value, found))
        b.store(total, at_address(b, out, I64(4 * LANES * i), VF), align=4)
    with counted(b, rows) as row:
        keeps, by_key, by_put = (number(base, row) for base in (kept, key, put))
        for i, value in enumerate(values):
            numbers = b.fmul(keeps, b.load(vector(row, i), align=4))
            b.store(fma(b, by_put, added[2 * i], fma(b, by_key, value, numbers)), vector(row, i), align=4)
    return context.get_dummy_value()


@intrinsic
def wkv_step(typing: Any, state, stride, rows, away, q, v, out, kept, key, put, alike, turned):  # type: ignore[no-untyped-def]
    """Addresses of a state's first row at these columns, bytes from row to row, rows; of away, q, kept, key and put [rows], v and
    out [COLUMNS], all fp32. With taken = S^T away the state becomes kept * S + key v^T + put taken^T, in its place, and
    out = S^T q + alike * v + turned * taken, of S as it was."""
    return types.void(*[types.int64] * 10, *[types.float32] * 2), _code
