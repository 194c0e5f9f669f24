"""How many processors there are for us, how many threads are best on them, and how many at most the environment wants."""

from __future__ import annotations

import itertools
import os
from collections.abc import MutableMapping

from nanovllm_cli import control_groups, system
from nanovllm_cli.errors import UsageError

THREADS_VARIABLE = "NUMBA_NUM_THREADS"
_MOST_THREADS = 1 << 20  # numba keeps something for each one that there can be


def num_processors() -> int:
    """That this process may use: those it is kept to, or fewer where its container or service has less time (`docker --cpus`)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, control_groups.processors())


def default_threads() -> int:
    """One a processor, but for the frugal cores of a Mac: all threads wait for the slowest, and those are for other programs."""
    return min(system.fast_processors() or num_processors(), num_processors())


def shares_of_processors(size: int) -> list[set[int]] | None:
    """Those that each of so many processes is best kept to, memory by memory; None where there is one memory, or are too few."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = [sorted(node & allowed) for node in system.memory_nodes() if node & allowed]
    listed = [processor for node in nodes for processor in node]
    if len(nodes) < 2 or len(listed) < size:
        return None
    cuts = [len(listed) * i // size for i in range(size + 1)]
    return [set(listed[first:end]) for first, end in itertools.pairwise(cuts)]


def check_thread_limit(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raises UsageError for a NUMBA_NUM_THREADS that numba would fail over when it is imported; one that is set to nothing, which
    numba would warn of, is taken out. Where a Mac has none, it becomes default_threads(): numba wakes all its threads there,
    twice for each kernel, and waits for them, however few are used (its workqueue.c)."""
    text = environ.get(THREADS_VARIABLE)
    if not text:
        environ.pop(THREADS_VARIABLE, None)
        if system.is_macos():
            environ[THREADS_VARIABLE] = str(default_threads())
        return
    try:
        is_number = 1 <= int(text) <= _MOST_THREADS
    except ValueError:
        is_number = False
    if not is_number:
        raise UsageError(
            f"{THREADS_VARIABLE} is {text!r}, not a number of threads",
            f"write 1 to {_MOST_THREADS}, or unset it: -t is the usual way",
        )
