"""Which kernels a decode step's time goes to, from a trace of the device. A section of its own: tracing can end a process."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.engine_runs import measure, room
from gpu.engines import Loaded, decode, gpu, load, release
from gpu.sections import Output
from gpu.shapes import SHAPES
from gpu.workload import PROMPT

STEPS = 16
MOST_ROWS = 24
ONCE_A_STEP = "largest_logits"
"""The kernel that tells how many steps were traced."""
CASES = (("qwen3-0.6b", 1), ("qwen3-8b", 1), ("qwen3-0.6b", 256))
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def section(output: Output) -> None:
    """Recorded steps; launch by launch too, where a trace does not look into graphs."""
    with _Trace():  # so that the tracer is there before the first graph
        torch.zeros(1, device="cuda")
    for name, batch in CASES:
        output.attempt(_step, output, name, batch)
        release()


def _step(output: Output, name: str, batch: int) -> None:
    for eager in (False, True):
        shape = SHAPES[name]
        loaded = load(shape, gpu(), **room(batch, 512), max_num_batched_tokens=8192, eager=eager)
        step_ms = measure(loaded, shape, batch, 64, rounds=1)[0]["ms a step"]
        found = kernels_of_a_step(loaded, batch, step_ms)
        del loaded
        release()
        if found["rows"]:
            output.put(f"{name}, batch {batch}{', eager' if eager else ''}", found)
            return
    output.put(f"{name}, batch {batch}", "the tracer saw nothing of the device")


def kernels_of_a_step(loaded: Loaded, batch: int, step_ms: float) -> dict[str, Any]:
    """step_ms: of a step that nobody traces."""
    return summary(traced(lambda trace: decode(loaded, batch, PROMPT, STEPS, salt=99, around=trace)), step_ms)


def traced(run: Callable[[AbstractContextManager[Any]], object]) -> list[dict[str, Any]]:
    """Events on the device while `run` has entered what it is given."""
    trace = _Trace()
    run(trace)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.profile.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


class _Trace:
    """torch's profiler, over work that is done when it is left."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CUDA])

    def __enter__(self) -> _Trace:
        torch.cuda.synchronize()
        self.profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.profile.stop()


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
