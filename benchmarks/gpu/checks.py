"""Sections that ask whether it is right: the kernels' tests on the device, tokens against the CPU's, compute-sanitizer."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu.engines import Loaded, finished, gpu, load, overlaps, release, serve
from gpu.sections import TAIL, Output, Skipped
from gpu.shapes import SHAPES, Shape
from gpu.workload import Request, prompt
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.launcher import DRIVER, CudaLauncher
from nanovllm_cli.kernels.norm import add_rms_norm
from nanovllm_cli.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 8
"""Test processes; their time is the CPU's, which computes what is expected."""
FILE_SECONDS = 150
NEAR_TIE = 0.1
"""Log-probability by which a GPU's token may lie behind the CPU's first: the logits have a spread of 0.6, and both round to bf16
some hundred times on the way to them."""
PROMPTS, PROMPT_LEN, ANSWER_LEN = 8, 48, 24


# ---- the kernels' tests ----


def kernel_tests(output: Output) -> None:
    """Each file in a pytest of its own: an illegal address ends only that one."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {pool.submit(run_tests, file): file.stem for file in test_files()}
        for future in as_completed(started):
            output.put(started[future], future.result())


def test_files() -> list[Path]:
    """Whose tests a GPU can run as they are: those of kernels, but for what only the emulation can tell; and of whole engines."""
    texts = {file: file.read_text() for file in (ROOT / "tests").glob("test_kernel_*.py")}
    kernels = [file for file, text in texts.items() if "Emulator" in text and "emulation_alone" not in text]
    return sorted([*kernels, *(ROOT / "tests" / name for name in ("test_gpu.py", "test_cuda_engine.py"))])


def run_tests(file: Path) -> dict[str, Any]:
    environment = os.environ | {"TEST_NANOVLLM_DEVICE": "cuda", "OMP_NUM_THREADS": "2"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=FILE_SECONDS
            )
            said = done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            said = f"not done after {FILE_SECONDS} s: {_text(late.stdout)}"
        found = counted(report.read_text()) if report.exists() else {"passed": 0, "failed": 0, "skipped": 0}
    found["seconds"] = round(time.monotonic() - begin, 1)
    lost = re.search(r"the GPU is lost.*", said)
    if lost:
        found["lost"] = lost[0][:300]
    elif not found["passed"] and not found["skipped"]:
        found["log"] = said[-TAIL:]
    return found


def counted(report: str) -> dict[str, Any]:
    """From pytest's XML: how many passed, failed and were skipped, the first failures, and why tests were skipped."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "reasons": {}}
    for case in ElementTree.fromstring(report).iter("testcase"):
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if problem is not None:
            found["failed"] += 1
            if len(found["failures"]) < 8:
                message = (problem.get("message") or "").strip().splitlines()
                found["failures"].append(f"{case.get('name')}: {message[0][:200] if message else ''}")
        elif skip is not None:
            found["skipped"] += 1
            reason = (skip.get("message") or "")[:100]
            found["reasons"][reason] = found["reasons"].get(reason, 0) + 1
        else:
            found["passed"] += 1
    return found


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace")[-TAIL:] if isinstance(said, bytes) else (said or "")[-TAIL:]


# ---- tokens ----


def tokens(output: Output) -> None:
    """What the GPU answers greedily, judged by the CPU's probabilities of the same tokens."""
    shape = replace(SHAPES["qwen3-0.6b"], tied=False)  # a tied head of random weights repeats the prompt's last token
    ways: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "bf16": lambda: answered(shape, gpu(), PROMPTS),
        "bf16, one at a time": lambda: answered(shape, gpu(), 1),
        "programmatic launch": lambda: answered(shape, gpu(True), PROMPTS),
        "one kernel after the other": lambda: answered(shape, gpu(False), PROMPTS),
        "eager": lambda: answered(shape, gpu(), PROMPTS, eager=True),
        "deterministic": lambda: answered(shape, gpu(), PROMPTS, deterministic=True),
        "fp8 cache": lambda: answered(shape, gpu(), PROMPTS, kv_cache_dtype="fp8"),
        "int8 cache": lambda: answered(shape, gpu(), PROMPTS, kv_cache_dtype="int8"),
    }
    if not overlaps():  # where kernels hang so, nobody waits for them
        del ways["programmatic launch"]
    answers: dict[str, list[tuple[int, ...]]] = {}
    for kind, answer in ways.items():
        output.attempt(lambda kind=kind, answer=answer: answers.update({kind: answer()}))
        release()
    alike = ("programmatic launch", "one kernel after the other", "eager")
    same = [answers[kind] == answers.get("bf16") for kind in alike if kind in answers]
    output.put("recorded, eager and programmatic steps have the same tokens", all(same))
    cpu = load(shape, None, **_room(PROMPTS))
    for kind, found in answers.items():
        output.put(kind, judged(cpu, found))


def answered(shape: Shape, device: Device, at_once: int, **settings: Any) -> list[tuple[int, ...]]:
    loaded = load(shape, device, **_room(at_once), **settings)
    requests = [Request(prompt(PROMPT_LEN, i, loaded.vocab), ANSWER_LEN) for i in range(PROMPTS)]
    outputs = serve(loaded, requests, 0.0)[1]
    del loaded
    release()
    return [output.outputs[0].token_ids for output in outputs]


def judged(cpu: Loaded, answers: list[tuple[int, ...]]) -> dict[str, Any]:
    """Each answer read by the CPU as a prompt: how many of its tokens are the CPU's first choice, and how far the others'
    log-probability is behind it."""
    done: dict[str, RequestOutput] = {}
    for i, answer in enumerate(answers):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        cpu.engine.add(str(i), [*prompt(PROMPT_LEN, i, cpu.vocab), *answer], params)
    while cpu.engine.has_unfinished():
        done.update(finished(cpu))
    gaps = []
    for i in range(len(answers)):
        read = done[str(i)].prompt_logprobs
        assert read is not None
        gaps += [entry.top[0][1] - entry.logprob for entry in read[PROMPT_LEN:] if entry is not None]
    return {
        "tokens": len(gaps),
        "the CPU's first": sum(gap == 0 for gap in gaps) / len(gaps),
        "mean gap": statistics.mean(gaps),
        "largest gap": max(gaps),
        "near-ties only": max(gaps) <= NEAR_TIE,
    }


def _room(batch: int) -> dict[str, Any]:
    return {"num_blocks": 16 * batch, "max_num_seqs": batch, "max_model_len": 256}


# ---- recorded launches ----


class Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [(name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")] + [("rest", ctypes.c_ubyte * 5)]


PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def recording(output: Output) -> None:
    """What a launch of ours waits for in a graph, by what is recorded ahead of it: for its end (full), or itself (programmatic).
    And whether replays compute what the same launches do without a graph."""
    launcher = CudaLauncher(0, programmatic_launch=True)
    x = torch.arange(1 << 16, device=launcher.device).view(64, -1).sin().bfloat16()
    gain, place, square = torch.ones_like(x[0]), torch.empty_like(x), x.T @ x
    ahead = {
        "nothing": lambda: x,
        "a kernel of ours": lambda: add_rms_norm(launcher, x, None, gain, 1.0, 0.0),
        "a kernel of torch's": lambda: x * 2,
        "the vendor's matmul": lambda: x @ square,
        "a copy": lambda: place.copy_(x),
    }
    for what, first in ahead.items():
        expected = add_rms_norm(launcher, first(), None, gain, 1.0, 0.0)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            found = add_rms_norm(launcher, first(), None, gain, 1.0, 0.0)
        waits = ["programmatic" if edge.type == PROGRAMMATIC else "full" for edge in edges(graph.raw_cuda_graph())]
        right = []
        for _ in range(3):
            found.zero_()
            graph.replay()
            right.append(torch.equal(found, expected))
        output.put(what, {"waits": waits, "replays are right": all(right)})


def edges(graph: int) -> list[Edge]:
    """graph: a CUgraph."""
    driver = ctypes.CDLL(DRIVER)
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    _succeed(driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)))
    if not count.value:
        return []
    ends, found = [(ctypes.c_void_p * count.value)() for _ in range(2)], (Edge * count.value)()
    _succeed(driver.cuGraphGetEdges_v2(handle, *ends, found, ctypes.byref(count)))
    return list(found)


def _succeed(error: int) -> None:
    if error:
        raise RuntimeError(f"cuGraphGetEdges_v2: error {error}")


# ---- compute-sanitizer ----


def sanitizer(output: Output) -> None:
    """A tiny model's prompts and steps, launch by launch, in processes that compute-sanitizer watches. Torch takes each tensor's
    memory for itself, so that one byte past its end is an error."""
    program = find_program("compute-sanitizer")
    if program is None:
        raise Skipped("no compute-sanitizer on the PATH or in /usr/local/cuda*/bin")
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in ("memcheck", "racecheck", "synccheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        inner = "from gpu.checks import short_run; short_run()"
        begin = time.monotonic()
        done = subprocess.run([*command, sys.executable, "-c", inner], env=environment, capture_output=True, text=True)
        summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", done.stdout)
        clean = done.returncode == 0 and bool(summary)
        found: dict[str, Any] = {"clean": clean, "summary": summary, "seconds": round(time.monotonic() - begin, 1)}
        output.put(tool, found if clean else found | {"log": (done.stdout + done.stderr)[-TAIL:]})


def short_run() -> None:
    shape = SHAPES["tiny"]
    requests = [Request(prompt(length, length, shape.vocab), 4) for length in (1, 37, 90)]
    for settings in ({}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}, {"deterministic": True}):
        serve(load(shape, gpu(), **_room(3), eager=True, **settings), requests, 0.7, seed=1)


def find_program(name: str) -> str | None:
    places = [shutil.which(name), *sorted(glob.glob(f"/usr/local/cuda*/bin/{name}"))]
    return next((place for place in places if place), None)
