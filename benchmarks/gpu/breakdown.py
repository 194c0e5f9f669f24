"""Which kernels a decode step's time goes to, from a trace of the device."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpu.engines import Loaded, decode
from gpu.workload import PROMPT

STEPS = 16
MOST_ROWS = 24
ONCE_A_STEP = "largest_logits"
"""The kernel that tells how many steps were traced."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def kernels_of_a_step(loaded: Loaded, batch: int, step_ms: float) -> dict[str, Any]:
    """Traces steps that replay a graph. step_ms: of a step that nobody traces."""
    return summary(traced(lambda start: decode(loaded, batch, PROMPT, STEPS, salt=99, middle=start)), step_ms)


def traced(run: Callable[[Callable[[], None]], object]) -> list[dict[str, Any]]:
    """Events of what `run` does after it has called what it is given."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    trace = profile(activities=[ProfilerActivity.CUDA])

    def start() -> None:
        torch.cuda.synchronize()
        trace.start()

    run(start)
    torch.cuda.synchronize()
    trace.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def summary(events: Iterable[dict[str, Any]], step_ms: float) -> dict[str, Any]:
    """Rows by kernel and grid, the longest first: how often in a step, microseconds a step, and of one launch."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            grid = event.get("args", {}).get("grid")
            times[short(event["name"]), "x".join(map(str, grid)) if grid else ""].append(float(event["dur"]))
    steps = sum(len(each) for (name, _), each in times.items() if name == ONCE_A_STEP) or STEPS
    rows = [
        {
            "kernel": name,
            "grid": grid,
            "a step": round(len(each) / steps, 2),
            "us a step": sum(each) / steps,
            "us each": sum(each) / len(each),
        }
        for (name, grid), each in times.items()
    ]
    rows.sort(key=lambda row: -row["us a step"])
    busy = sum(row["us a step"] for row in rows)
    return {
        "rows": rows[:MOST_ROWS],
        "launches a step": round(sum(row["a step"] for row in rows), 1),
        "busy us a step": busy,
        "step us": 1e3 * step_ms,
    }


def short(name: str) -> str:
    """A library's kernel without its template arguments."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:60]
