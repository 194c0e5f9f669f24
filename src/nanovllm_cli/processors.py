"""How many processors there are for us."""

from __future__ import annotations

import os


def num_processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
