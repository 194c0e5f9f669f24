"""What an ARM processor can multiply, for LLVM.

LLVM takes an ARM processor's name from /proc/cpuinfo, and few of its features (22 still does): none of those that multiply bytes.
A name that it knows brings them along unseen; a processor that is newer than LLVM would have to do without.
"""

from __future__ import annotations

import llvmlite.binding as llvm

FEATURES = {"asimddp": "dotprod", "i8mm": "i8mm"}
"""Those that kernels use: the system's names, LLVM's names."""


def described(cpuinfo: str, known: str) -> str:
    """Features in LLVM's form ("+neon,-sve"): what LLVM knows by itself, and what the text of /proc/cpuinfo says of FEATURES.
    Nothing is added where it says nothing, as on any other kind of processor."""
    lists = [line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line.startswith("Features") and ":" in line]
    if not lists:
        return known
    everywhere = set(lists[0]).intersection(*lists)  # a thread may run on any core
    found = [f"{'+' if system in everywhere else '-'}{name}" for system, name in FEATURES.items()]
    return ",".join([*known.split(","), *found] if known else found)


def of_this_processor() -> str:
    """The same for this one."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            cpuinfo = file.read()
    except OSError:
        cpuinfo = ""
    return described(cpuinfo, llvm.get_host_cpu_features().flatten())
