"""Not tests: the calls of macOS' C library that `nanovllm_cli.system` makes, on another system, as their manuals have them.

`LIBRARY` has functions with C's own calling convention; what they tell is the dictionary that it was made of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

Value = int | bytes
M2: dict[str, Value] = {
    "hw.nperflevels": 2,
    "hw.perflevel0.name": b"Performance", "hw.perflevel0.physicalcpu": 4, "hw.perflevel0.l2cachesize": 16777216,
    "hw.perflevel1.name": b"Efficiency", "hw.perflevel1.physicalcpu": 4, "hw.perflevel1.l2cachesize": 4194304,
    "hw.optional.neon": 1, "hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 1,
    "hw.memsize": 17179869184, "machdep.cpu.brand_string": b"Apple M2",
}  # fmt: skip
"""What `sysctl -a` says there, shortened."""
_LONG = ("hw.perflevel0.l2cachesize", "hw.perflevel1.l2cachesize", "hw.memsize")
_HOST, _HOST_VM_INFO64 = 0x1203, 4
_KERN_INVALID_ARGUMENT = 4


class Library:
    """values: of names. pages: the first numbers of `struct vm_statistics64`: free, active, inactive, wired."""

    def __init__(self, values: Mapping[str, Value], pages: tuple[int, int, int, int] = (1 << 20, 0, 0, 0)) -> None:
        self.sysctlbyname = _by_name(values)
        self.mach_host_self = ctypes.CFUNCTYPE(ctypes.c_uint32)(lambda: _HOST)
        self.host_statistics64 = _statistics(pages)


def _by_name(values: Mapping[str, Value]) -> Callable[..., int]:
    """sysctl(3)."""

    def call(name: bytes, old: int | None, size: Any, new: int | None, new_size: int) -> int:
        assert (new, new_size) == (None, 0), "nothing is set"
        value = values.get(name.decode())
        if value is None:
            return -1
        data = value + b"\0" if isinstance(value, bytes) else value.to_bytes(8 if name.decode() in _LONG else 4, "little")
        if size[0] < len(data):
            return -1
        assert old is not None
        ctypes.memmove(old, data, len(data))
        size[0] = len(data)
        return 0

    pointer = ctypes.POINTER(ctypes.c_size_t)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, pointer, ctypes.c_void_p, ctypes.c_size_t)
    return kind(call)


def _statistics(pages: tuple[int, int, int, int]) -> Callable[..., int]:
    """mach/mach_host.h, mach/vm_statistics.h: count is of 32-bit words, 38 of which the structure has at the least."""

    def call(host: int, flavor: int, words: int, count: Any) -> int:
        if (host, flavor) != (_HOST, _HOST_VM_INFO64) or count[0] < 38:
            return _KERN_INVALID_ARGUMENT
        data = b"".join(number.to_bytes(4, "little") for number in pages)
        ctypes.memmove(words, data + bytes(38 * 4 - len(data)), 38 * 4)
        count[0] = 38
        return 0

    pointer = ctypes.POINTER(ctypes.c_uint32)
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, pointer)(call)
