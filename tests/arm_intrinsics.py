"""ARM's vector instructions that kernels ask LLVM for by name, written out for any processor after the Arm Architecture Reference
Manual, so that what is built for ARM can be run on this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

I8, I32 = ir.IntType(8), ir.IntType(32)


def known_function(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
    """As `simd_ir.known_function`, with a body where it is one of ARM's."""
    own_name, meaning = name.replace("llvm.aarch64.neon", "arm"), _MEANINGS.get(name.removeprefix("llvm.aarch64.neon."))
    known = builder.module.globals.get(own_name)
    if known is not None:
        return known
    function = ir.Function(builder.module, ir.FunctionType(result, arguments), own_name)
    if meaning is None:
        return function
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block())
    whole = ir.Constant(result, ir.Undefined)
    for lane, value in enumerate(meaning(b, *function.args)):
        whole = b.insert_element(whole, value, I32(lane))
    b.ret(whole)
    return function


def _at(b: ir.IRBuilder, vector: Any, lane: int) -> Any:
    return b.extract_element(vector, I32(lane))


def _dot(first_is_signed: bool) -> Callable[..., list[Any]]:
    """SDOT and USDOT: four products of bytes are added to each lane, modulo 2**32."""

    def meaning(b: ir.IRBuilder, acc: Any, first: Any, second: Any) -> list[Any]:
        lanes = []
        for lane in range(4):
            total = _at(b, acc, lane)
            for i in range(4 * lane, 4 * lane + 4):
                widened = b.sext(_at(b, first, i), I32) if first_is_signed else b.zext(_at(b, first, i), I32)
                total = b.add(total, b.mul(widened, b.sext(_at(b, second, i), I32)))
            lanes.append(total)
        return lanes

    return meaning


def _long_products(b: ir.IRBuilder, first: Any, second: Any) -> list[Any]:
    """SMULL: whole products of signed bytes."""
    wide = ir.IntType(16)
    return [b.mul(b.sext(_at(b, first, i), wide), b.sext(_at(b, second, i), wide)) for i in range(8)]


def _sums_of_pairs(b: ir.IRBuilder, first: Any, second: Any) -> list[Any]:
    """ADDP: neighbours of the first vector, then of the second, modulo 2**16."""
    return [b.add(_at(b, vector, i), _at(b, vector, i + 1)) for vector in (first, second) for i in range(0, 8, 2)]


def _long_sums_of_pairs(b: ir.IRBuilder, vector: Any) -> list[Any]:
    """SADDLP: neighbours, signed, without overflow."""
    return [b.add(*(b.sext(_at(b, vector, i + j), I32) for j in range(2))) for i in range(0, 8, 2)]


def _table(b: ir.IRBuilder, table: Any, places: Any) -> list[Any]:
    """TBL of one register: 0 for a place beyond it."""
    found = []
    for i in range(16):
        place = b.zext(_at(b, places, i), I32)
        inside = b.extract_element(table, b.and_(place, I32(15)))
        found.append(b.select(b.icmp_unsigned("<", place, I32(16)), inside, I8(0)))
    return found


_MEANINGS: dict[str, Callable[..., list[Any]]] = {
    "sdot.v4i32.v16i8": _dot(True),
    "usdot.v4i32.v16i8": _dot(False),
    "smull.v8i16": _long_products,
    "addp.v8i16": _sums_of_pairs,
    "saddlp.v4i32.v8i16": _long_sums_of_pairs,
    "tbl1.v16i8": _table,
}
