"""What this machine can do at most: how fast it reads memory, and how fast our kernels multiply.

A decoded token is held back by the first (every weight is read once a step), a long prompt by the second. Both are measured, not
looked up: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.

    roofline()            from the cache of this machine, measured in a child process the first time (and with fresh=True)
    measure_roofline()    measured here and now; it takes memory and changes this thread's number of kernel threads

Run as a module it prints what it measures, as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm_cli import system
from nanovllm_cli.bench.machine import this_machine
from nanovllm_cli.children import child_environment
from nanovllm_cli.cli.files import write_whole
from nanovllm_cli.errors import NanovllmError, OutputError
from nanovllm_cli.folders import cache_folder
from nanovllm_cli.processors import default_threads
from nanovllm_cli.progress import LoadProgress, NullProgress

if TYPE_CHECKING:
    import torch

CPU_KINDS = ("fp32", "bf16", "int8")
_MIN_BYTES, _MAX_SHARE = 512 << 20, 4
_ROWS, _WIDTH, _OUTPUTS = 384, 2048, 4096
_MAX_CACHE_BYTES = 1 << 20


class RooflineError(NanovllmError):
    """The machine could not be measured."""


class Roofline(NamedTuple):
    """read_gb_s: 10^9 bytes a second. gflops: 10^9 operations a second (a multiply-add is two) by what is multiplied: fp32, bf16,
    int8 on a CPU; fp32, bf16, fp16 on a GPU."""

    read_gb_s: float
    gflops: dict[str, float]

    def times(self, count: int) -> Roofline:
        """Of so many devices alike."""
        return Roofline(count * self.read_gb_s, {kind: count * speed for kind, speed in self.gflops.items()})


def roofline(
    device: str = "cpu",
    threads: int | None = None,
    *,
    fresh: bool = False,
    seconds: float = 1.0,
    progress: LoadProgress | None = None,
) -> Roofline:
    """The roofline of `device` (cpu, cuda, cuda:N) with so many threads (as many as a model would use). Kept in
    $XDG_CACHE_HOME/nanovllm/roofline.json, by machine, threads and kernels. Raises RooflineError."""
    progress = progress or NullProgress()
    threads = threads or default_threads()
    key = _key(device, threads)
    known = {} if fresh else _read_cache()
    if key in known:
        return known[key]
    progress.stage("measuring this machine (once)", None, "tensors")
    words = [sys.executable, "-P", "-m", __name__, device, str(threads), str(seconds)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL, env=child_environment()
        )
        found = _checked(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RooflineError(f"the machine could not be measured: {error}") from error
    finally:
        progress.done()
    if found is None:
        raise RooflineError("the machine could not be measured: no numbers came back")
    _write_cache(_read_cache() | {key: found})
    return found


def measure_roofline(seconds: float = 1.0, threads: int | None = None, device: str = "cpu") -> Roofline:
    """Measures for about `seconds`, besides making the data. The best of several passes counts: others only disturb."""
    if device != "cpu":
        return _measure_gpu(seconds, device)
    threads = threads or default_threads()
    read_gb_s = _read_bandwidth(seconds / 2, threads)
    return Roofline(read_gb_s, {kind: _multiply_rate(seconds / 6, threads, kind) for kind in CPU_KINDS})


def _read_bandwidth(seconds: float, threads: int) -> float:
    """Sums 64-bit words of memory that no cache holds, each thread a stretch of its own. 10^9 bytes a second."""
    import numba
    import numpy as np
    import torch

    from nanovllm_cli.kernels import cpu

    num_words = _buffer_bytes() // 8 // threads * threads
    words = cpu.zeros(num_words, torch.int64, huge_pages=True).numpy()
    words[:] = 1  # pages that were never written are all the same page of zeros
    add_up = numba.njit(nogil=True)(_sum)
    add_up(words[:1])
    stretches = np.split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        best = _best_seconds(seconds, lambda: list(pool.map(add_up, stretches)))
    return words.nbytes / best / 1e9


def _sum(words: Any) -> int:
    total = 0
    for word in words:
        total += word
    return total


def _buffer_bytes() -> int:
    """Well beyond the last cache, as far as memory allows."""
    from nanovllm_cli.engine.memory import available_bytes

    return max(1 << 20, min(max(_MIN_BYTES, 4 * system.last_cache_bytes()), available_bytes() // _MAX_SHARE))


def _multiply_rate(seconds: float, threads: int, kind: str) -> float:
    """Of the matmul that prompts go through, at a size that it likes. 10^9 operations a second."""
    import torch

    from nanovllm_cli.kernels import cpu

    cpu.set_num_threads(threads)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    weight = _weight(kind, dtype)
    x = torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        weight.matmul(x, None, dtype)
        best = _best_seconds(seconds, lambda: weight.matmul(x, None, dtype))
    return 2.0 * _ROWS * _WIDTH * _OUTPUTS / best / 1e9


def _weight(kind: str, dtype: torch.dtype) -> Any:
    import torch

    from nanovllm_cli.quant.cpu_formats import make_storage
    from nanovllm_cli.quant.dense import DenseStorage
    from nanovllm_cli.quant.format import Integer

    if kind == "int8":
        empty = make_storage(Integer(8), _OUTPUTS, _WIDTH, dtype, rounds=True)
    else:
        empty = DenseStorage(_OUTPUTS, _WIDTH, dtype)
    empty.load_rows(0, torch.randn(_OUTPUTS, _WIDTH, generator=torch.Generator().manual_seed(1)))
    return empty


def _measure_gpu(seconds: float, device: str) -> Roofline:
    """Copies within the device's memory (read and written bytes both count), and the vendor's matmuls."""
    import torch

    where = torch.device(device)

    def rate(amount: float, work: Callable[[], object]) -> float:
        """10^9 a second of what one call of `work` does `amount` of."""

        def several() -> None:
            for _ in range(8):
                work()
            torch.cuda.synchronize(where)

        several()
        return 8 * amount / _best_seconds(seconds / 4, several) / 1e9

    source = torch.ones(1 << 28, dtype=torch.float32, device=where)  # 1 GiB
    copied = rate(2 * source.nbytes, source.clone)
    del source
    size, gflops = 4096, {}
    for kind, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        square = torch.randn(size, size, device=where).to(dtype)
        gflops[kind] = rate(2.0 * size**3, partial(torch.mm, square, square))
    return Roofline(copied, gflops)


def _best_seconds(seconds: float, work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest of at least three passes, for at least `seconds`."""
    passes: list[float] = []
    end = clock() + seconds
    while len(passes) < 3 or clock() < end:
        begin = clock()
        work()
        passes.append(clock() - begin)
    return min(passes)


# ---- the cache ----


def _key(device: str, threads: int) -> str:
    """What a measurement is good for: this machine, so many threads, these kernels."""
    sources = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "kernels").glob("*.py")):
        sources.update(path.read_bytes())
    machine = this_machine([])
    where = f"{machine.gpu} {machine.driver}" if device != "cpu" else ""
    return f"{device}{where} | {machine.cpu} | {threads} threads of {machine.processors} | {sources.hexdigest()[:16]}"


def _cache_path() -> Path:
    return cache_folder() / "roofline.json"


def _read_cache() -> dict[str, Roofline]:
    """What can be read of it; a broken cache is an empty one."""
    try:
        with _cache_path().open("rb") as file:
            kept = json.loads(file.read(_MAX_CACHE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    items = kept.items() if isinstance(kept, dict) else ()
    return {key: found for key, value in items if (found := _checked(value)) is not None}


def _write_cache(known: dict[str, Roofline]) -> None:
    """Whole or not at all; a place that cannot be written to costs a measurement each time, no more."""
    path = _cache_path()
    with contextlib.suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({key: found._asdict() for key, found in known.items()}, indent=1))


def _checked(value: Any) -> Roofline | None:
    """A roofline from JSON, if it is one."""
    if not isinstance(value, dict) or not isinstance(value.get("gflops"), dict):
        return None
    numbers = [value.get("read_gb_s"), *value["gflops"].values()]
    if not all(isinstance(number, int | float) and math.isfinite(number) and number > 0 for number in numbers):
        return None
    return Roofline(float(numbers[0]), {str(kind): float(rate) for kind, rate in value["gflops"].items()})


if __name__ == "__main__":
    print(json.dumps(measure_roofline(float(sys.argv[3]), int(sys.argv[2]), sys.argv[1])._asdict()))
