"""Sections about quantized weights: kernels by themselves, where one way overtakes another, whole models, and llama.cpp."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from gpu.cases import BF16, Case, randn
from gpu.engine_runs import measure, prefill_of, room
from gpu.engines import Loaded, gpu, load, overlaps, release
from gpu.report import MOST_ROWS, SIZES
from gpu.sections import Output, Skipped
from gpu.shapes import SHAPES, HasConfig, RandomCheckpoint
from gpu.sweeps import attempt, timed
from gpu.timing import copies_for
from nanovllm_cli.engine import loaded_model
from nanovllm_cli.kernels import library, packed, packed_gemm, packed_gemv, packed_wgmma, scaled_matmul, unpack
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.gemv import MAX_ROWS
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.launcher import CudaLauncher
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.packed import Packed
from nanovllm_cli.quant import cuda_unpacked
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.format import Blocks, Format
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quant.rows import Fp8Rows, IntegerRows, Nf4Rows, QuantizedRows
from nanovllm_cli.weights.weight_reader import PlainReader, Slices

FORMATS = ("int4", "q4_k", "fp8-weight-only", "int8-weight-only", "q8_0")
"""Those that have bars."""
OTHER_FORMATS = ("fp8", "fp8:block=128", "int8", "nf4", "q6_k")
MODELS = ("int4", "fp8", "q4_k_m")
"""The same."""
OTHER_MODELS = ("fp8-weight-only", "int8")
KINDS: dict[packed.Kind, str] = {"int4": "int4", "int8": "int8-weight-only", "fp8": "fp8-weight-only", "nf4": "nf4"}
"""Of packed weights, and a format of each."""
CROSSED = (12288, 4096)
"""Outputs and columns."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, MOST_ROWS)
PLANNED: tuple[packed.Kind, ...] = ("int4", "fp8")
PLANNED_SIZES = ((4096, 4096), (24576, 4096), (4096, 12288))
"""Outputs and columns of Qwen3-8B's matrices behind attention, before and behind the MLP's middle."""
PLANNED_ROWS = (96, 256, 768)
POOL_ROWS = 256
"""Rows that are really quantized; the others are theirs again."""
LOADED_ROWS = 16 * POOL_ROWS
"""At once."""


# ---- kernels ----


def kernels(output: Output) -> None:
    """Products of one row, as a decode step launches them: bytes are those that the format keeps."""
    _kernels(output, FORMATS)


def other_kernels(output: Output) -> None:
    _kernels(output, OTHER_FORMATS)


def _kernels(output: Output, names: tuple[str, ...]) -> None:
    launcher = CudaLauncher(programmatic_launch=overlaps())
    for name in names:
        for outputs, width in SIZES:
            attempt(output, name, product_case, launcher, name, outputs, width, 1)


def product_case(launcher: Launcher, name: str, outputs: int, width: int, rows: int) -> Case:
    """A weight in a format with a norm before it, through its storage."""
    form = parse_format(name)
    formats = CudaFormats(launcher, rounds=True, deterministic=False)
    many = repeated(quantized_rows(form, width, launcher.device))
    storages = []
    for _ in range(copies_for(outputs * form.row_bytes(width))):
        storages.append(formats.make(form, outputs, width, BF16))
        for first in range(0, outputs, LOADED_ROWS):
            storages[-1].load_rows(first, first_rows(many, min(LOADED_ROWS, outputs - first)))
    hidden = Normed(randn(launcher, rows, width), randn(launcher, width), 1e-6, 0.0)

    def call(storage: Any) -> Callable[[], object]:
        return lambda: storage.matmul(hidden, None, BF16)

    calls = [call(storage) for storage in storages]
    return Case(f"{name}, {outputs} x {width}, {rows}", storages[0].num_bytes, 2.0 * rows * outputs * width, calls)


def quantized_rows(form: Format, width: int, device: torch.device) -> QuantizedRows:
    """POOL_ROWS random ones."""
    rows = torch.randn(POOL_ROWS, width) * width**-0.5
    return form.quantize(rows if isinstance(form, Blocks) else rows.to(device))


def repeated(rows: QuantizedRows) -> QuantizedRows:
    """LOADED_ROWS of POOL_ROWS."""
    times = LOADED_ROWS // POOL_ROWS
    return type(rows)(*(None if part is None else part.repeat(times, 1) for part in rows))


def first_rows(rows: QuantizedRows, count: int) -> QuantizedRows:
    return type(rows)(*(None if part is None else part[:count] for part in rows))


# ---- the table of ways ----


def crossover(output: Output) -> None:
    """Our GEMMs against unpacking and against bf16 weights, by rows; and a line for quant/cuda_choice.py. Of the kind that has
    bars."""
    _crossovers(output, ("int4",))


def other_crossovers(output: Output) -> None:
    _crossovers(output, tuple(kind for kind in KINDS if kind != "int4"))


def _crossovers(output: Output, kinds: tuple[packed.Kind, ...]) -> None:
    launcher, (outputs, width) = CudaLauncher(), CROSSED
    plain = [randn(launcher, outputs, width, scale=width**-0.5) for _ in range(copies_for(2.0 * outputs * width))]
    lines: list[str] = []
    for kind in kinds:
        output.attempt(_crossover, output, launcher, kind, plain, lines)


def _crossover(output: Output, launcher: Launcher, kind: packed.Kind, plain: list[torch.Tensor], lines: list[str]) -> None:
    (outputs, width), form = CROSSED, parse_format(KINDS[kind])
    copies = copies_for(outputs * form.row_bytes(width))
    weights = [packed_weight(launcher, kind, form, outputs, width) for _ in range(copies)]
    rows: list[dict[str, Any]] = []
    for count in ROWS:
        cases = way_cases(launcher, weights, plain, count)
        row: dict[str, Any] = {"rows": count} | {f"{way} us": timed(case)["us"] for way, case in cases.items()}
        ours = {way: row[f"{way} us"] for way in cases if way != "bf16"}
        best = min(ours, key=lambda way: ours[way])
        rows.append(row | {"gain": row["bf16 us"] / ours[best], "best": best})
        output.put(kind, rows)
    limits = ", ".join(map(str, (MAX_ROWS, *best_limits(rows))))  # our GEMV has norm and gate in it besides
    lines.append(f'Line(("{kind}",), {launcher.capability}, {limits}, "measured, {outputs} x {width}")')
    output.put("lines", lines)


def best_limits(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """The most rows for `gemm`, and for `wgmma` (0: never), by which all that are too many for our GEMV take the least time. Each
    number of rows counts alike, so that none that was disturbed decides alone."""
    many = [row for row in rows if row["rows"] > MAX_ROWS]
    limits = [MAX_ROWS, *(row["rows"] for row in many)]
    pairs = [(gemm, 0) for gemm in limits]
    if all("wgmma us" in row for row in many):
        pairs += [(gemm, wgmma) for gemm in limits for wgmma in limits if gemm < wgmma]

    def cost(pair: tuple[int, int]) -> float:
        gemm, wgmma = pair
        ways = ["gemm" if row["rows"] <= gemm else "wgmma" if row["rows"] <= wgmma else "library" for row in many]
        return sum(math.log(row[f"{way} us"]) for row, way in zip(many, ways, strict=True))

    return min(pairs, key=cost)


def packed_weight(launcher: Launcher, kind: packed.Kind, form: Format, outputs: int, width: int) -> Packed:
    some = repeated(quantized_rows(form, width, launcher.device))
    assert isinstance(some, IntegerRows | Fp8Rows | Nf4Rows)
    group = width // some.scales.shape[1] if some.scales.shape[1] > 1 else 0
    weight = packed.empty(
        kind, outputs, width, group, some.scales.dtype, zeros=False, ordered=False, device=launcher.device
    )
    for first in range(0, outputs, LOADED_ROWS):
        count = min(LOADED_ROWS, outputs - first)
        packed.pack_rows(weight, first, some.codes[:count], some.scales[:count])
    return weight


def way_cases(launcher: Launcher, weights: list[Packed], plain: list[torch.Tensor], rows: int) -> dict[str, Case]:
    """By our GEMV where it takes so many rows, our GEMMs, unpacking, and by the vendor's matmul of bf16 weights."""
    outputs, width = weights[0].num_rows, weights[0].width
    x, counters = randn(launcher, rows, width), packed_gemm.new_counters(launcher)

    def gemv(weight: Packed) -> Callable[[], object]:
        return lambda: packed_gemv.packed_gemv(launcher, x, weight, None)

    def gemm(weight: Packed) -> Callable[[], object]:
        return lambda: packed_gemm.packed_gemm(launcher, x, weight, None, counters)

    def wgmma(weight: Packed) -> Callable[[], object]:
        return lambda: packed_wgmma.packed_wgmma(launcher, x, weight, None, counters)

    def unpacked(weight: Packed) -> Callable[[], object]:
        def rows_of(first: int, count: int) -> torch.Tensor:
            return unpack.unpack(launcher, weight, first, count, BF16)

        return lambda: cuda_unpacked.matmul(launcher, x, outputs, rows_of, None, deterministic=False)

    def dense(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: library.matmul(launcher, x, weight, None)

    made: dict[str, list[Callable[[], object]]] = {
        "gemm": [gemm(weight) for weight in weights],
        "library": [unpacked(weight) for weight in weights],
        "bf16": [dense(weight) for weight in plain],
    }
    if rows <= MAX_ROWS:
        made["gemv"] = [gemv(weight) for weight in weights]
    if launcher.capability == packed_wgmma.CAPABILITY:
        made["wgmma"] = [wgmma(weight) for weight in weights]
    flops = 2.0 * rows * outputs * width
    return {way: Case(f"{way}, {rows}", weights[0].num_bytes, flops, calls) for way, calls in made.items()}


def plans(output: Output) -> None:
    """What blocks of `packed_wgmma` take in every plan, against the one that its estimate of cycles chooses."""
    launcher = CudaLauncher()
    for kind in PLANNED:
        for outputs, width in PLANNED_SIZES:
            output.attempt(_plans, output, launcher, kind, outputs, width)


def _plans(output: Output, launcher: Launcher, kind: packed.Kind, outputs: int, width: int) -> None:
    form = parse_format(KINDS[kind])
    copies = copies_for(outputs * form.row_bytes(width))
    weights = [packed_weight(launcher, kind, form, outputs, width) for _ in range(copies)]
    for rows in PLANNED_ROWS:
        found = best_plan(launcher, weights, rows, lambda case: timed(case)["us"])
        output.put(f"{kind}, {outputs} x {width}, {rows}", found)


def best_plan(launcher: Launcher, weights: list[Packed], rows: int, microseconds: Callable[[Case], float]) -> dict[str, Any]:
    """A plan is written as outputs, columns and rows of a block, and blocks that share a tile."""
    weight, x, counters = weights[0], randn(launcher, rows, weights[0].width), packed_gemm.new_counters(launcher)
    flops = 2.0 * rows * weight.num_rows * weight.width

    def case(plan: packed_wgmma.Plan) -> Case:
        def call(weight: Packed) -> Callable[[], object]:
            return lambda: packed_wgmma.packed_wgmma(launcher, x, weight, None, counters, plan=plan)

        return Case(named(plan), weight.num_bytes, flops, [call(each) for each in weights])

    def named(plan: packed_wgmma.Plan) -> str:
        shape = plan.shape
        return f"{shape.outputs} x {packed.TILE_COLUMNS * shape.along} x {shape.rows} / {plan.splits}"

    every = packed_wgmma.plans(rows, weight.num_rows, launcher.num_multiprocessors)
    times = {named(plan): microseconds(case(plan)) for plan in every}
    chosen = named(packed_wgmma.plan_of(rows, weight, launcher.num_multiprocessors))
    best = min(times, key=lambda name: times[name])
    return {"chosen": chosen, "us": times[chosen], "best": best, "best us": times[best], "every": times}


# ---- whole models ----


class RandomBlocks(PlainReader):
    """A model in GGUF's mix Q4_K_M: every matrix Q4_K, or Q6_K where more depends on it. Rows repeat after POOL_ROWS."""

    def __init__(self, checkpoint: RandomCheckpoint) -> None:
        super().__init__(checkpoint)
        self._pool: dict[tuple[Format, int], QuantizedRows] = {}

    def format(self, name: str) -> Format | None:
        if len(self.shape(name)) < 2:
            return None
        return Blocks("Q6_K" if _is_precious(name) else "Q4_K")

    def slices(self, name: str) -> Slices:
        form, shape = self.format(name), self.shape(name)
        if form is None:
            yield from super().slices(name)
            return
        key = form, shape[1]
        if key not in self._pool:
            self._pool[key] = quantized_rows(form, shape[1], torch.device("cpu"))
        many = repeated(self._pool[key])
        for first in range(0, shape[0], LOADED_ROWS):
            yield first_rows(many, min(LOADED_ROWS, shape[0] - first)), first


def _is_precious(name: str) -> bool:
    """As llama.cpp's Q4_K_M has it: the head, and half of the layers' v and down (the first and last eighth, and every third)."""
    if "lm_head" in name:
        return True
    if not any(part in name for part in ("v_proj", "down_proj")):
        return False
    layer = int(name.split(".layers.")[1].split(".")[0])
    return layer % 3 == 2 or layer < 4


def load_quantized(shape: HasConfig, device: Device, name: str, **settings: Any) -> Loaded:
    """name: as `--quant` takes it, "q4_k_m", or "bf16"."""
    if name == "bf16":
        return load(shape, device, **settings)
    if name == "q4_k_m":
        with patch.object(loaded_model, "open_reader", RandomBlocks):
            return load(shape, device, **settings)
    return load(shape, device, quant=name, **settings)


def batch_1(output: Output) -> None:
    _batches(output, MODELS)


def batch_1_of_others(output: Output) -> None:
    _batches(output, OTHER_MODELS)


def _batches(output: Output, names: tuple[str, ...]) -> None:
    for name in names:
        output.attempt(_model, output, name)
        release()


def _model(output: Output, name: str) -> None:
    loaded = load_quantized(SHAPES["qwen3-8b"], gpu(), name, **room(32, 1024))
    for batch in (1, 32):
        result, _ = measure(loaded, SHAPES["qwen3-8b"], batch, 64, rounds=2)
        del result["GB/s"]  # of bf16 weights
        output.put(f"{name}, {batch}", result)


def prefill(output: Output) -> None:
    for name in ("bf16", "fp8", "int4", "q4_k_m"):
        output.attempt(_prompts, output, name, 2048)
        release()


def _prompts(output: Output, name: str, tokens: int) -> None:
    loaded = load_quantized(
        SHAPES["qwen3-8b"], gpu(), name, max_num_batched_tokens=tokens, max_num_seqs=2, num_blocks=tokens // 4,
        max_model_len=tokens + 16,
    )  # fmt: skip
    output.put(name, prefill_of(loaded, SHAPES["qwen3-8b"], tokens, 1))
    if name == "fp8":
        with patch.object(scaled_matmul, "FAST_SUMS", True):
            output.put("fp8, fast sums", prefill_of(loaded, SHAPES["qwen3-8b"], tokens, 1))


# ---- the peer ----


def llama_cpp(output: Output) -> None:
    """llama-bench and llama-batched-bench on the file that GGUF names, beside our `bench` of it. They are not built here: their
    sources need a network and a quarter of an hour."""
    theirs, batched, file = shutil.which("llama-bench"), shutil.which("llama-batched-bench"), os.environ.get("GGUF")
    if theirs is None or batched is None or not file:
        raise Skipped("put llama-bench and llama-batched-bench on PATH, and a model's path into GGUF")
    tests = ["-p", "2048", "-n", "128", "-o", "json"]
    ours = [sys.executable, "-m", "nanovllm_cli", "bench", file, "--device", "cuda"]
    for title, words in (("llama.cpp", [theirs, "-m", file, "-ngl", "99", "-fa", "1"]), ("nanovllm", ours)):
        for row in json.loads(_stdout([*words, *tests])):
            output.put(f"{title}, {'batch 1' if row['n_gen'] else 'prompt'}", {"tok/s": row["avg_ts"]})
    of_32 = ["-npp", "128", "-ntg", "128", "-npl", "32", "-c", "16384", "-ngl", "99", "--output-format", "jsonl"]
    for line in _stdout([batched, "-m", file, *of_32]).splitlines():
        if line.startswith("{"):
            output.put("llama.cpp, batch 32", {"tok/s": json.loads(line)["speed_tg"]})
    for row in json.loads(_stdout([*ours, "-p", "0", "-n", "128", "-npl", "32", "-o", "json"])):
        output.put("nanovllm, batch 32", {"tok/s": row["avg_ts"]})


def _stdout(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
