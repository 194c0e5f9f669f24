"""Sections that time kernels by themselves, and what the device can do at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from gpu import cases
from gpu.cases import BF16, FP8, INT8, Case
from gpu.engines import overlaps
from gpu.sections import Output
from gpu.shapes import SHAPES
from gpu.timing import seconds_in_graph, seconds_of
from nanovllm_cli.kernels import decode_attention
from nanovllm_cli.kernels.launcher import CudaLauncher

Make = Callable[..., Case]
COPY_BYTES = 4 << 30
SIDE = 8192
DECODES = ((32, 2048), (128, 2048), (1, 2048), (1, 32768), (8, 8192), (256, 1024))
"""Sequences and tokens of each; of the first two the bar speaks."""
OTHER_DECODES = ((32, 2048), (1, 2048), (1, 32768))
TUNED: tuple[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]], ...] = (
    ("BLOCKS_WANTED", (3, 6, 9, 12, 18, 24), ((1, 2048), (8, 8192), (32, 2048), (128, 2048))),
    ("LEAST_SPLIT", (64, 128, 256, 512), ((1, 200), (1, 1000), (8, 500))),
)
"""Constants of decode attention, what they may be, and sequences and tokens that tell."""
PREFILLS = ((1, 2048, 0), (1, 512, 0), (1, 8192, 0), (4, 2048, 0), (1, 1024, 8192))
"""Prompts, tokens of each, tokens cached before them."""

DELTAS = ((1, 1), (32, 1), (256, 1), (1, 2048), (8, 512))
"""Sequences and new tokens of each."""


def ceilings(output: Output) -> None:
    """A copy counts bytes read and written. Random data: zeros are faster."""
    device = torch.device("cuda", 0)
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    output.put("copy GB/s", 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9)
    a, b = (torch.randn(SIDE, SIDE, device=device).to(BF16) for _ in range(2))
    c = torch.empty_like(a)
    output.put("matmul TFLOP/s", 2 * SIDE**3 / seconds_of(lambda: torch.mm(a, b, out=c)) / 1e12)


def attention(output: Output) -> None:
    launcher, name = CudaLauncher(programmatic_launch=overlaps()), "qwen3-8b"
    for batch, tokens in DECODES:
        for dtype in (BF16, FP8, INT8):
            attempt(output, "decode", cases.decode_case, launcher, name, SHAPES[name], batch, tokens, dtype)
    for count, tokens, prefix in PREFILLS:
        attempt(output, "prefill", cases.prefill_case, launcher, name, SHAPES[name], count, tokens, prefix, BF16)
    for dtype in (FP8, INT8):
        attempt(output, "prefill", cases.prefill_case, launcher, name, SHAPES[name], 1, 2048, 0, dtype)


def attention_of_others(output: Output) -> None:
    launcher = CudaLauncher(programmatic_launch=overlaps())
    for name in ("qwen3-0.6b", "llama-3.2-1b"):
        for dtype in (BF16, FP8, INT8):
            attempt(output, "decode", cases.decode_case, launcher, name, SHAPES[name], *OTHER_DECODES[0], dtype)
    for name, heads in cases.GEMMA_4_E4B.items():
        for batch, tokens in OTHER_DECODES:
            for dtype in (BF16, FP8):
                attempt(output, "decode", cases.decode_case, launcher, f"gemma-4-e4b {name}", heads, batch, tokens, dtype)
    for dtype, fixed in ((BF16, False), (BF16, True), (FP8, False), (INT8, False)):
        heads = cases.GEMMA_4_E4B["all"]
        attempt(output, "prefill", cases.prefill_case, launcher, "gemma-4-e4b all", heads, 1, 2048, 0, dtype, fixed)


def tuning(output: Output) -> None:
    """Of constants that nothing but a GPU can decide: microseconds by value, and the best."""
    launcher, shape = CudaLauncher(programmatic_launch=overlaps()), SHAPES["qwen3-8b"]
    for constant, values, sizes in TUNED:
        for batch, tokens in sizes:
            title, case = f"{constant}, {batch} x {tokens}", (launcher, "", shape, batch, tokens, BF16)
            output.attempt(best_of, output, title, decode_attention, constant, values, cases.decode_case, *case)


def best_of(
    output: Output, title: str, module: object, constant: str, values: tuple[int, ...], make: Make, *inputs: Any
) -> None:
    """Microseconds of a case by the value of a module's constant, and the best."""
    times = {}
    for value in values:
        with patch.object(module, constant, value):
            times[str(value)] = timed(make(*inputs))["us"]
    output.put(title, times | {"best": int(min(times, key=lambda value: times[value]))})


def matmuls(output: Output) -> None:
    launcher, overlapped = CudaLauncher(), CudaLauncher(programmatic_launch=True)
    for name in ("qwen3-0.6b", "qwen3-8b"):
        for rows, kind in ((1, "gemv"), (8, "gemv"), (1, "gemv, programmatic launch")):
            how = overlapped if kind != "gemv" else launcher
            attempt(output, kind, cases.gemv_cases, how, name, SHAPES[name], rows)
    for rows in (1, 256):
        attempt(output, "small", cases.small_cases, launcher, "qwen3-0.6b", SHAPES["qwen3-0.6b"], rows)
    for make in (cases.delta_case, cases.state_space_case):
        for count, tokens in DELTAS:
            attempt(output, "delta", make, launcher, count, tokens)


def attempt(output: Output, kind: str, make: Callable[..., Case | list[Case]], *inputs: Any) -> None:
    """Cases that take none of the others with them."""

    def measure() -> None:
        made = make(*inputs)
        for case in [made] if isinstance(made, Case) else made:
            output.attempt(put, output, kind, case)

    output.attempt(measure)


def put(output: Output, kind: str, case: Case) -> None:
    """Ours first. What goes wrong in the library's is said and takes nothing of ours; a lost GPU shows in the next case."""
    rows: list[dict[str, Any]] = output.results.setdefault(kind, [])
    row = timed(case)
    rows.append(row)
    output.save()
    if case.library:
        try:
            row["torch us"] = 1e6 * seconds_in_graph(case.library)
        except RuntimeError as error:
            row["torch fails"] = str(error).strip().partition("\n")[0]
        output.save()


def timed(case: Case) -> dict[str, Any]:
    seconds = seconds_in_graph(case.calls)
    row: dict[str, Any] = {"case": case.name, "us": 1e6 * seconds, "GB/s": case.num_bytes / seconds / 1e9}
    if case.flops:
        row["TFLOP/s"] = case.flops / seconds / 1e12
    return row
