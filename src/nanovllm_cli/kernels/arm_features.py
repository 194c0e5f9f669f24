"""What an ARM processor can multiply, for LLVM.

LLVM knows an ARM processor's name, and of its features few under Linux (22 still does: none of those that multiply bytes), and
none under macOS, not even that it has vectors. A name that it knows brings them along unseen; a processor that is newer than LLVM
would have to do without.
"""

from __future__ import annotations

from collections.abc import Collection

import llvmlite.binding as llvm

from nanovllm_cli import system

LLVM_NAMES = {"asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm"}
"""Of `system.ARM_FEATURES`."""


def described(found: Collection[str] | None, known: str) -> str:
    """Features in LLVM's form ("+neon,-sve"): what LLVM knows by itself, and what the system has found. Nothing is added where it
    says nothing, as on any other kind of processor."""
    if found is None:
        return known
    listed = known.split(",") if known else []
    names = [(name, system_name) for system_name, name in LLVM_NAMES.items() if f"+{name}" not in listed]
    return ",".join([*listed, *(f"{'+' if system_name in found else '-'}{name}" for name, system_name in names)])


def of_this_processor() -> str:
    """The same for this one."""
    return described(system.arm_features(), llvm_features())


def llvm_features() -> str:
    """Those that LLVM knows of. A system or processor of which it knows none is an error to older versions of llvmlite."""
    try:
        return str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:
        return ""
