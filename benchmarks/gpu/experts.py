"""A section about mixtures of experts: decode of a few and of many sequences, recorded, against the bytes such steps can't do
without. Real models' layers, a few of them, as a step's time is so many times one layer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.engine_runs import room
from gpu.engines import Loaded, decode, gpu, release
from gpu.quantized import load_quantized
from gpu.sections import Output
from gpu.workload import PROMPT
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.weights.shapes import SHAPES

MODELS = (*(("qwen3-30b-a3b", quant) for quant in (None, "int4", "fp8", "q4_k_m")), ("gpt-oss-20b", None),
          ("deepseek-v2-lite", None))  # fmt: skip
LAYERS = 8
BATCHES = (1, 3, 8, 33, 64)  # 3 and 33 are padded to 4 and 64
STEPS = 48
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """So many layers of a model that the package knows."""

    name: str
    layers: int

    @property
    def config(self) -> dict[str, Any]:
        return {**SHAPES[self.name], "num_hidden_layers": self.layers}


def section(output: Output) -> None:
    for name, quant in MODELS:
        output.attempt(_model, output, name, quant or "bf16")
        release()


def _model(output: Output, name: str, quant: str) -> None:
    loaded = load_quantized(Cut(name, LAYERS), gpu(), quant, **room(max(BATCHES), 256))
    for batch in BATCHES:
        output.put(f"{name}, {LAYERS} layers, {quant}, {batch}", measure(loaded, batch, STEPS))


def measure(loaded: Loaded, batch: int, steps: int) -> dict[str, float]:
    """Of the quickest round, after one that compiles and records. Bytes: of the experts that so many tokens take on average."""
    worker = loaded.worker
    work = ModelWork.of(worker.spec, worker.read_bytes, (worker.dtype, worker.dtype), worker.expert_bytes)
    decode(loaded, batch, PROMPT, 4, salt=9)
    run = min((decode(loaded, batch, PROMPT, steps, salt=i) for i in range(ROUNDS)), key=lambda run: run.seconds)
    read = work.step_bytes(batch) + work.kv_bytes * (PROMPT + 16 + steps / 2) * batch
    return {
        "tok/s": run.tokens / run.seconds,
        "ms a step": 1e3 * run.seconds / run.steps,
        "CPU ms a step": 1e3 * (run.seconds - run.waited) / run.steps,
        "GB/s": read * run.steps / run.seconds / 1e9,
    }
