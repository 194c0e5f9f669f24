"""Kernels that are called by their address, with the address of their arguments.

A recorded step (cpu_program.py) can run them without knowing them when it is compiled: so who never loads a quantized model never
waits for its kernels. Each is compiled, or loaded from the cache, when it is first asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@cache
def address(kernel: Callable[[Any], None]) -> int:
    """Of the machine code of kernel(arguments), where `arguments` is the address of int64 numbers."""
    numba.get_num_threads()  # starts the threads: code of a cfunc that comes from the cache doesn't, and crashes without
    compiled: Any = cfunc(types.void(types.int64), cache=True, error_model="numpy")(kernel)
    _keep.append(compiled)
    return int(compiled.address)


_keep: list[Any] = []


def call(kernel_address: int, arguments: tuple[int, ...]) -> None:
    """Run it now, without the interpreter's lock."""
    numbers = (ctypes.c_int64 * len(arguments))(*arguments)
    _function(kernel_address)(ctypes.addressof(numbers))


@cache
def _function(kernel_address: int) -> Callable[[int], None]:
    return _PROTOTYPE(kernel_address)


@intrinsic
def call_address(typing: Any, kernel: Any, arguments: Any) -> Any:
    """The same, from compiled code."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code
