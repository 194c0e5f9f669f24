"""The loops of few rows over a record: over its groups, onto sums in memory, and over a group's steps, with sums in registers
(simd_planes.py and simd_values.py have what is summed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from nanovllm_cli.kernels.simd_ir import I64, LANES, VF

Cells = dict[tuple[int, int], Any]
"""Of each row and vector of columns."""


def each_group(
    b: ir.IRBuilder, groups: Any, out_at: Cells, accumulate: Any, build: Callable[[Any, Any], tuple[Any, Any]]
) -> None:
    """build(group, its first step) writes one or more, and says which group and which step come next. out_at: addresses of the
    sums, which begin at 0 unless they are to be accumulated onto."""
    entry, clear, group, end = b.block, *(b.function.append_basic_block(name) for name in ("clear", "group", "end"))
    b.cbranch(b.icmp_signed("!=", accumulate, I64(0)), group, clear)
    b.position_at_end(clear)
    for at in out_at.values():
        b.store(ir.Constant(VF, [0.0] * LANES), at, align=4)
    b.branch(group)

    b.position_at_end(group)
    number, first = b.phi(I64), b.phi(I64)
    for block in (entry, clear):
        number.add_incoming(I64(0), block)
        first.add_incoming(I64(0), block)
    following, step = build(number, first)
    number.add_incoming(following, b.block)
    first.add_incoming(step, b.block)
    b.cbranch(b.icmp_signed("<", following, groups), group, end)
    b.position_at_end(end)


def each_step(b: ir.IRBuilder, first: Any, last: Any, sums: Cells, add: Callable[[Any, Cells], Cells]) -> Cells:
    """The sums, with those of the steps from first to before last, one at least, that add(step, sums) puts onto them."""
    entry, loop, end = b.block, *(b.function.append_basic_block(name) for name in ("loop", "end"))
    b.branch(loop)
    b.position_at_end(loop)
    step, carried = b.phi(I64), {cell: b.phi(vector.type) for cell, vector in sums.items()}
    step.add_incoming(first, entry)
    new = add(step, dict(carried))
    following = b.add(step, I64(1))
    step.add_incoming(following, b.block)
    for cell, phi in carried.items():
        phi.add_incoming(sums[cell], entry)
        phi.add_incoming(new[cell], b.block)
    b.cbranch(b.icmp_signed("<", following, last), loop, end)
    b.position_at_end(end)
    return new
