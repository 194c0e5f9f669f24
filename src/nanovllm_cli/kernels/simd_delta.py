"""One token's step of the gated delta rule over some columns of a state, and steps of Mamba-2's, as LLVM vectors: as many as
registers hold the sums of. Each column is summed in ascending rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanovllm_cli.kernels.simd import WIDE
from nanovllm_cli.kernels.simd_ir import F32, I32, I64, LANES, VF, at_address, counted, fma, multiple, splat

_VECTORS = 4 if WIDE else 2
COLUMNS = _VECTORS * LANES
LINE = 4 * LANES
TOKENS = 4 if WIDE else 2
"""That Mamba-2's rule takes at once, so that a state is read and written once for all of them."""


def _put(b: ir.IRBuilder, value: Any, pointer: Any, past: bool) -> None:
    """past: the caches, where they need not read what is overwritten as a whole; the address is that of a line."""
    stored = b.store(value, pointer, align=64 if past else 4)
    if past:
        stored.set_metadata("nontemporal", b.module.add_metadata([I32(1)]))


def _delta_code(past: bool, by_row: bool = False) -> Any:
    """by_row: what is kept of a state is a number of each row, by which what sums are made with has been multiplied already."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kept_at = key = None
        if by_row:
            source, target, stride, rows, k, q, v, out, key, kept_at, beta, alike = args
            kept = taken = F32(1.0)
        else:
            source, target, stride, rows, k, q, v, out, kept, taken, beta, alike = args
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
        kept, taken, beta, alike = (splat(b, each, VF) for each in (kept, taken, beta, alike))
        changes = []
        for i in range(_VECTORS):
            seen, found = added[2 * i : 2 * i + 2]
            place = I64(4 * LANES * i)
            seen, found = (seen, found) if by_row else (b.fmul(taken, seen), b.fmul(kept, found))
            change = b.fmul(beta, b.fsub(b.load(at_address(b, v, place, VF), align=4), seen))
            b.store(fma(b, alike, change, found), at_address(b, out, place, VF), align=4)
            changes.append(change)
        with counted(b, rows) as row:
            by_k = number(k if key is None else key, row)
            kept = kept if kept_at is None else number(kept_at, row)
            for i in range(_VECTORS):
                state = b.load(vector(source, row, i), align=4)
                _put(b, fma(b, by_k, changes[i], b.fmul(kept, state)), vector(target, row, i), past)
        return context.get_dummy_value()

    return code


@intrinsic
def delta_step(typing: Any, source, target, stride, rows, k, q, v, out, kept, taken, beta, alike):  # type: ignore[no-untyped-def]
    """Addresses of states' first rows at these columns, bytes from row to row, rows; of k and q [rows], v and out [COLUMNS], all
    fp32; and what the token keeps of the state, what of it is taken off values, its beta, and k . q. out = S'^T q, target
    S' = kept * S + k (beta * (v - taken * S^T k))^T."""
    return types.void(*[types.int64] * 8, *[types.float32] * 4), _delta_code(past=False)


@intrinsic
def delta_step_past(typing: Any, source, target, stride, rows, k, q, v, out, kept, taken, beta, alike):  # type: ignore[no-untyped-def]
    """The same, with what it leaves written past the caches, to whole lines: `settle` before others read it."""
    return types.void(*[types.int64] * 8, *[types.float32] * 4), _delta_code(past=True)


@intrinsic
def channel_step(typing: Any, source, target, stride, rows, k, q, v, out, key, kept, beta, alike):  # type: ignore[no-untyped-def]
    """As `delta_step`, of a rule that keeps kept [rows] of a state: k and q are times that, key is not. out = S'^T of the query
    itself, target S' = kept * S + key (beta * (v - S^T k))^T."""
    return types.void(*[types.int64] * 10, *[types.float32] * 2), _delta_code(past=False, by_row=True)


@intrinsic
def channel_step_past(  # type: ignore[no-untyped-def]
    typing: Any, source, target, stride, rows, k, q, v, out, key, kept, beta, alike
):
    """See `delta_step_past`."""
    return types.void(*[types.int64] * 10, *[types.float32] * 2), _delta_code(past=True, by_row=True)


def _mamba_code(num_tokens: int, vectors: int, past: bool = False) -> Any:
    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, target, stride, rows, k, q, v, out, key_bytes, value_bytes, kept, step = args
        tokens = range(num_tokens)

        def behind(base: Any, size: Any, t: int) -> Any:
            return b.add(base, b.mul(size, I64(t)))

        def number(base: Any, row: Any) -> Any:
            return splat(b, b.load(at_address(b, base, multiple(b, row, 4), F32)), VF)

        def place(base: Any, i: int) -> Any:
            return at_address(b, base, I64(4 * LANES * i), VF)

        keys, queries = ([behind(base, key_bytes, t) for t in tokens] for base in (k, q))
        values, found = ([behind(base, value_bytes, t) for t in tokens] for base in (v, out))
        keeps, steps = ([number(base, I64(t)) for t in tokens] for base in (kept, step))
        changes = [[b.fmul(steps[t], b.load(place(values[t], i), align=4)) for i in range(vectors)] for t in tokens]
        zeros = ir.Constant(VF, [0.0] * LANES)
        entry, loop, end = b.block, *(b.function.append_basic_block(name) for name in ("rows", "found"))
        b.branch(loop)
        b.position_at_end(loop)
        row = b.phi(I64)
        sums = [[b.phi(VF) for _ in range(vectors)] for _ in tokens]
        row.add_incoming(I64(0), entry)
        by_keys, by_queries = ([number(base, row) for base in bases] for bases in (keys, queries))
        for i in range(vectors):
            offset = b.add(b.mul(row, stride), I64(4 * LANES * i))
            state = b.load(at_address(b, source, offset, VF), align=4)
            for t in tokens:
                state = fma(b, by_keys[t], changes[t][i], b.fmul(keeps[t], state))
                total = fma(b, state, by_queries[t], sums[t][i])
                sums[t][i].add_incoming(zeros, entry)
                sums[t][i].add_incoming(total, loop)
                sums[t][i] = total
            _put(b, state, at_address(b, target, offset, VF), past)
        following = b.add(row, I64(1))
        row.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, rows), loop, end)
        b.position_at_end(end)
        for t in tokens:
            for i in range(vectors):
                b.store(sums[t][i], place(found[t], i), align=4)
        return context.get_dummy_value()

    return code


@intrinsic
def mamba_step(  # type: ignore[no-untyped-def]
    typing: Any, source, target, stride, rows, k, q, v, out, key_bytes, value_bytes, kept, step
):
    """As `delta_step`, of Mamba-2's rule: target S' = kept * S + k (step * v)^T. kept, step: addresses."""
    return types.void(*[types.int64] * 12), _mamba_code(1, _VECTORS)


@intrinsic
def mamba_step_past(  # type: ignore[no-untyped-def]
    typing: Any, source, target, stride, rows, k, q, v, out, key_bytes, value_bytes, kept, step
):
    """See `delta_step_past`."""
    return types.void(*[types.int64] * 12), _mamba_code(1, _VECTORS, past=True)


@intrinsic
def settle(typing: Any):  # type: ignore[no-untyped-def]
    """What was written past the caches is there for all threads before what is written from here on."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def mamba_steps(  # type: ignore[no-untyped-def]
    typing: Any, source, target, stride, rows, k, q, v, out, key_bytes, value_bytes, kept, step
):
    """TOKENS of them, each on what the one before left, of COLUMNS / 2 columns; a token's k and q lie key_bytes behind those of
    the one before, v and out value_bytes."""
    return types.void(*[types.int64] * 12), _mamba_code(TOKENS, _VECTORS // 2)
