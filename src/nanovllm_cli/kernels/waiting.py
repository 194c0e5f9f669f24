"""How compiled code waits for what other threads, or processes in shared memory, do: words that they look at."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_cli.kernels.simd_ir import I32, I64, known_function

LOOKS = 2000
"""That one takes for others before it lets somebody else have its processor: some microseconds, or tens of them with rests."""


@intrinsic
def told(typing: Any, address: Any) -> Any:
    """The word at an address, and all that was written before it was."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def tell(typing: Any, address: Any, word: Any) -> Any:
    """The word at an address, behind all that was written before."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def added(typing: Any, address: Any, count: Any) -> Any:
    """The number at an address, after count was added to it for whoever looks; as `told` and `tell`."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        before = b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")
        return b.add(before, args[1])

    return types.int64(types.int64, types.int64), code


@intrinsic
def rest(typing: Any) -> Any:
    """The processor is told that this thread waits: another one on the same core goes on meanwhile."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if platform.machine() in ("aarch64", "arm64"):
            b.call(known_function(b, "llvm.aarch64.hint", ir.VoidType(), I32), [I32(1)])
        elif platform.machine() in ("x86_64", "AMD64"):
            b.call(known_function(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def let_others(typing: Any) -> Any:
    """The system may give this processor to another thread."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), code
