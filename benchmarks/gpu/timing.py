"""Time on the device: events around the work, medians, and graphs where launches are short."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


WARM_SECONDS = 0.05
"""Of the same work before it is timed: a GPU that had nothing to do raises its clock only under load."""


def seconds_of(call: Call, repeats: int = 20, warm: int = 3) -> float:
    """Median of one call, timed by events."""
    begin_warm = time.perf_counter()
    while warm > 0 or time.perf_counter() - begin_warm < WARM_SECONDS:
        call()
        torch.cuda.synchronize()
        warm -= 1
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def seconds_in_graph(calls: Sequence[Call], repeats: int = 20, least: int = 20) -> float:
    """Median of one of the calls, all recorded in one graph, in turn, so that launching them takes no time of the CPU's.

    calls: the same work on inputs of its own each, more bytes in all than the L2 holds.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = -(-least // len(calls))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
    finally:
        torch.cuda.set_stream(stream)  # where a capture fails, torch stays on the one it captured on
    return seconds_of(graph.replay, repeats) / (rounds * len(calls))


def copies_for(num_bytes: float, at_least: float = 256e6, most: int = 64) -> int:
    """How many sets of inputs of so many bytes are far more than an L2 (50 MB on an H200)."""
    return max(2, min(most, -(-int(at_least) // max(1, int(num_bytes)))))
