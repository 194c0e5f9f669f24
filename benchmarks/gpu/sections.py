"""Sections of the run: each in a process of its own with a limit of its own, so that none takes another with it.

A section is a function of an Output, to which it gives a result at a time; what it gave before it crashed, hung or ran out of
time is kept. A record is what the report has of a section: status (running, done, failed, timed out, skipped), seconds, results,
and why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ENGINE = ("numpy", "safetensors", "gguf", "tokenizers", "huggingface_hub", "jinja2", "numba", "llguidance", "cupy")
"""What the engine imports beside torch."""
LEAST_SECONDS = 15.0
"""A section that would have less is not started."""
GLANCE_SECONDS = 1.0
"""How often a running section's results are looked at."""
MOST_ENDING_SECONDS = 20.0
TAIL = 4000
SKIPPED_STATUS = 77
ONE_BY_ONE = "TEST_NANOVLLM_ONE_BY_ONE"
"""In a section's environment: kernels are not to start before the one ahead of them ends."""
NO_TIME = "no time left"
Record = dict[str, Any]


class Section(NamedTuple):
    """function: `file:name` in this folder. limit: seconds. needs: packages without which it is skipped."""

    name: str
    what: str
    function: str
    limit: float
    needs: tuple[str, ...] = ENGINE


SECTIONS = (
    Section("environment", "machine, packages, versions", "environment:section", 60, ()),
    Section("contact", "whether anything runs at all, and whether kernels may overlap", "contact:section", 90),
    Section("ceilings", "copy GB/s, matmul TFLOP/s", "sweeps:ceilings", 40),
    Section("batch-1", "decode of one sequence: graphs, eager, CPU time", "engine_runs:batch_1", 110),
    Section("attention", "paged decode and prefill attention of Qwen3-8B", "sweeps:attention", 45),
    Section("quantized", "products of one row in the formats that have bars", "quantized:kernels", 60),
    Section("crossover", "packed int4 GEMMs, unpacking and bf16 by rows", "quantized:crossover", 60),
    Section("prefill", "prompts of Qwen3-8B", "engine_runs:prefill", 60),
    Section("quantized-8b", "Qwen3-8B in fp8, int4 and Q4_K_M: 1 and 32 sequences", "quantized:batch_1", 120),
    Section("workload", "nano-vllm's own workload on Qwen3-0.6B", "engine_runs:workload", 90),
    Section("quantized-prefill", "prompts of Qwen3-8B in fp8, int4 and Q4_K_M", "quantized:prefill", 120),
    Section("batches", "decode of 8 to 256 sequences of Qwen3-0.6B", "engine_runs:batches", 60),
    Section("kernels", "every kernel test on the device", "checks:kernel_tests", 170, (*ENGINE, "pytest")),
    Section("transformers", "the peer: StaticCache, compiled", "peers:transformers_section", 260, (*ENGINE, "transformers")),
    Section("tokens", "GPU tokens against CPU tokens", "checks:tokens", 140),
    Section("ways", "ways to run a decode step of one sequence", "engine_runs:ways", 110),
    Section("attention-others", "attention of other heads: windows, 512 dims", "sweeps:attention_of_others", 60),
    Section("batches-others", "decode of 8 to 256 sequences of larger models", "engine_runs:batches_of_others", 110),
    Section("quantized-others", "products of one row in the other formats", "quantized:other_kernels", 60),
    Section("quantized-8b-others", "Qwen3-8B in other formats", "quantized:batch_1_of_others", 90),
    Section("crossover-others", "packed GEMMs of other formats by rows", "quantized:other_crossovers", 90),
    Section("experts", "decode of mixtures of experts", "experts:section", 140),
    Section("latent", "latent attention, and products with matrices of heads", "latent:section", 90),
    Section("far", "weights in the machine's memory", "far:section", 60),
    Section("step", "which kernels a decode step's time goes to", "breakdown:section", 75),
    Section("recording", "what launches wait for in a recorded step", "checks:recording", 30),
    Section("matmul", "matmuls of 1 to 8 rows, and small kernels", "sweeps:matmuls", 60),
    Section("tuning", "constants that only a GPU can decide", "sweeps:tuning", 60),
    Section("plans", "every plan of packed GEMMs by warpgroups, against what is chosen", "quantized:plans", 90),
    Section("llama.cpp", "the peer on one GGUF file, where its tools are there", "quantized:llama_cpp", 120),
    Section("sanitizer", "compute-sanitizer on a short run", "checks:sanitizer", 200),
)
"""In the order in which they run: first what the bars are about, each as short as it can be, then whether all is right, then what
explains the bars, and what takes minutes last."""


class Output:
    """Results of a section, written to a file at each one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[str, Any] = {}
        self.error: str | None = None

    def attempt(self, work: Callable[..., object], *args: Any) -> None:
        """A part of a section that takes none of the others with it: what it raises is kept, and the section has failed, but it
        goes on."""
        try:
            work(*args)
        except Exception:
            self.error = (self.error or "") + traceback.format_exc()
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            self.save()

    def put(self, name: str, result: Any) -> None:
        self.results[name] = result
        self.save()

    def save(self) -> None:
        write_json(self._path, {"results": self.results, "error": self.error})


class Skipped(Exception):
    """Raised by a section that has nothing to do here; its message is the reason."""


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(value, indent=1, default=str) + "\n")
    unfinished.replace(path)


def run_all(
    names: list[str], command: list[str], budget: float, report: Callable[[str, Record], None], environment: dict[str, str]
) -> None:
    """The named sections, one after the other. report(name, record) is called after each, and while it runs whenever it has more:
    who ends this process loses nothing. command: what runs one section when its name and a file are added. budget: seconds for
    all together."""
    end = time.monotonic() + budget
    by_name = {section.name: section for section in SECTIONS}
    for name in names:

        def keep(record: Record, name: str = name) -> None:
            report(name, record)

        keep(run(by_name[name], command, end - time.monotonic(), environment, keep))


def run(
    section: Section,
    command: list[str],
    left: float,
    environment: dict[str, str],
    so_far: Callable[[Record], None] = lambda record: None,
) -> Record:
    """so_far: called with a record of status running where there are new results."""
    absent = [package for package in section.needs if importlib.util.find_spec(package) is None]
    if absent:
        return skipped(f"not installed: {', '.join(absent)}; carry wheels and name their folder with --wheels")
    if left < LEAST_SECONDS:
        return skipped(NO_TIME)
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "results.json", Path(folder) / "log"
        limit, begin = min(section.limit, left), time.monotonic()

        def record_of(found: Record) -> Record:
            return {"seconds": round(time.monotonic() - begin, 1), "results": found["results"]}

        with log.open("w") as errors:
            # A group of its own, to end all that it starts; not a session, which would outlive whoever ends this one.
            process = subprocess.Popen(
                [*command, section.name, str(path)], stdout=errors, stderr=errors, process_group=0, env=environment
            )
            try:
                status, known = None, 0
                while status is None and (waits := limit - (time.monotonic() - begin)) > 0:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        status = process.wait(min(GLANCE_SECONDS, waits))
                    if status is None and path.exists() and (changed := path.stat().st_mtime_ns) != known:
                        known = changed
                        so_far(record_of(json.loads(path.read_text())) | {"status": "running"})
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it started too
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # of a driver that does not let go of it
                    process.wait(MOST_ENDING_SECONDS)
        found = json.loads(path.read_text()) if path.exists() else {"results": {}, "error": None}
        tail = log.read_text(errors="replace")[-TAIL:]
    record = record_of(found)
    if status is None:
        return record | {"status": "timed out", "why": f"not done after {limit:.0f} s", "log": tail}
    if status == 0:
        return record | {"status": "done"} | ({"log": tail} if tail.strip() else {})
    if status == SKIPPED_STATUS:
        return record | {"status": "skipped", "why": found["error"]}
    return record | {"status": "failed", "why": found["error"] or f"ended with {status}", "log": tail}


def skipped(why: str) -> Record:
    return {"status": "skipped", "seconds": 0.0, "results": {}, "why": why}


def run_inside(name: str, path: Path) -> int:
    """In the section's own process: the exit status, with results and a traceback in the file."""
    section = next(section for section in SECTIONS if section.name == name)
    output = Output(path)
    output.save()
    try:
        file, function = section.function.split(":")
        getattr(importlib.import_module(f"gpu.{file}"), function)(output)
        return 0 if output.error is None else 1
    except Skipped as reason:
        output.error = str(reason)
        return SKIPPED_STATUS
    except BaseException:
        output.error = (output.error or "") + traceback.format_exc()
        print(output.error, file=sys.stderr)
        return 1
    finally:
        output.save()
