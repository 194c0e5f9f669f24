"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from gpu.sections import ENGINE, Output

PACKAGES = (
    "torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "triton", "transformers", "numba", "numpy", "gguf",
    "tokenizers", "pytest",
)  # fmt: skip
QUERY = ("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader")


def section(output: Output) -> None:
    import torch

    output.put("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    output.put("machine", machine())
    output.put("packages", {name: version for name in PACKAGES if (version := version_of(name))})
    output.put("missing", [name for name in (*ENGINE, "pytest", "transformers") if importlib.util.find_spec(name) is None])
    device = torch.cuda.get_device_properties(0)
    output.put(
        "gpu",
        {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
            "memory GiB": round(device.total_memory / 2**30, 1),
            "L2 MB": round(getattr(device, "L2_cache_size", 0) / 1e6, 1),
            "driver, clocks, limit": answer(*QUERY),
            "cuda": torch.version.cuda,
        },
    )
    from gpu.engines import overlaps
    from nanovllm_cli.kernels.launcher import CudaLauncher

    output.put("programmatic launch", CudaLauncher(0, programmatic_launch=overlaps()).programmatic_launch)
    output.put("commit", answer("git", "rev-parse", "--short", "HEAD"))


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def answer(*command: str) -> str | None:
    """What a program prints, or None where it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
