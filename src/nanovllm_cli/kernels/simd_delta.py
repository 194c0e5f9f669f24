"""One token's step of the gated delta rule over some columns of a state, as LLVM vectors: as many as registers hold the sums of.
Each column is summed in ascending rows.
"""

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
    source, target, stride, rows, k, q, v, out, kept, beta, alike = args
    zeros = ir.Constant(VF, [0.0] * LANES)

    def vector(base: Any, row: Any, i: int) -> Any:
        offset = b.add(b.mul(row, stride), I64(4 * LANES * i))
        return at_address(b, base, offset, VF)

    def number(base: Any, row: Any) -> Any:
        return splat(b, b.load(at_address(b, base, multiple(b, row, 4), F32)), VF)

    entry, loop, end = b.block, *(b.function.append_basic_block(name) for name in ("sums", "change"))
    b.branch(loop)
    b.position_at_end(loop)
    row, sums = b.phi(I64), [b.phi(VF) for _ in range(2 * _VECTORS)]
    row.add_incoming(I64(0), entry)
    by, added = (number(k, row), number(q, row)), []
    for i in range(_VECTORS):
        state = b.load(vector(source, row, i), align=4)
        added += [fma(b, state, one, total) for one, total in zip(by, sums[2 * i : 2 * i + 2], strict=True)]
    for total, more in zip(sums, added, strict=True):
        total.add_incoming(zeros, entry)
        total.add_incoming(more, loop)
    following = b.add(row, I64(1))
    row.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, rows), loop, end)

    b.position_at_end(end)
    kept, beta, alike = (splat(b, each, VF) for each in (kept, beta, alike))
    changes = []
    for i in range(_VECTORS):
        seen, found = added[2 * i : 2 * i + 2]
        place = I64(4 * LANES * i)
        change = b.fmul(beta, b.fsub(b.load(at_address(b, v, place, VF), align=4), b.fmul(kept, seen)))
        b.store(fma(b, alike, change, b.fmul(kept, found)), at_address(b, out, place, VF), align=4)
        changes.append(change)
    with counted(b, rows) as row:
        by_k = number(k, row)
        for i in range(_VECTORS):
            state = b.load(vector(source, row, i), align=4)
            b.store(fma(b, by_k, changes[i], b.fmul(kept, state)), vector(target, row, i), align=4)
    return context.get_dummy_value()


@intrinsic
def delta_step(typing: Any, source, target, stride, rows, k, q, v, out, kept, beta, alike):  # type: ignore[no-untyped-def]
    """Addresses of states' first rows at these columns, bytes from row to row, rows; of k and q [rows], v and out [COLUMNS], all
    fp32; and what the token keeps of the state, its beta, and k . q. out = S'^T q, target S' = kept * S + k (beta * (v - kept *
    S^T k))^T."""
    return types.void(*[types.int64] * 8, *[types.float32] * 3), _code
