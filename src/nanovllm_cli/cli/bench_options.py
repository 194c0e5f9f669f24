"""The options of `nanovllm bench`: names as llama-bench has them. What other options of one value take, these take several of,
between commas, as ranges (4-64*2, 1-8+1), or by being given again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm_cli.bench import sweep
from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.bench_output import Plot, Report
from nanovllm_cli.cli.command import ENGINE, MODEL, OUTPUT, option
from nanovllm_cli.cli.options import (
    Deterministic,
    Device,
    DType,
    Offline,
    Revision,
)
from nanovllm_cli.cli.shared_options import ActivationsChoice, RooflineChoice
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import UsageError

TESTS = "Tests"
Format = Literal["md", "csv", "json", "jsonl", "sql"]
_STEP = EngineConfig().max_num_batched_tokens


def _sizes(text: str) -> list[int]:
    return [parsers.count(text)] if text.strip()[-1:].isalpha() else sweep.numbers(text)


def _layers(text: str) -> list[int]:
    return [parsers.layers(text)] if text.strip() in ("auto", "all", "-1", "-2") else sweep.numbers(text)


def _cache_types(text: str) -> list[str]:
    return [parsers.cache_type(part.strip()) for part in text.split(",")]


def _switch(text: str) -> int:
    if text.strip() not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return int(text)


def _several(*flags: str, help: str, panel: str, **more: Any) -> Any:
    return option(*flags, help=help, panel=panel, **({"metavar": "N,…", "parser": sweep.numbers} | more))


@dataclass(frozen=True, slots=True)
class BenchModelOptions:
    """Which models, in which numbers."""

    model: list[str] | None = option(
        "-m", "--model",
        help="A path, org/repo[:quant][@revision], or a short name, beside the arguments. Repeatable.",
        panel=MODEL, metavar="MODEL,…",
    )
    random_weights: list[str] | None = option(
        "--random-weights",
        help="Made-up weights of a known shape (qwen3-0.6b, llama-3.1-8b, mistral-7b, …) or of a config.json. Repeatable.",
        panel=MODEL, metavar="SHAPE",
    )
    revision: Revision = None
    offline: Offline = False
    dtype: DType = EngineConfig().dtype
    device: Device = "auto"
    quant: list[str] | None = option(
        "--quant",
        help="Round plain weights while loading: int8, fp8, int4[:group=N], nf4, q4_k, …; none keeps them. [none]",
        panel=MODEL, metavar="FORMAT,…",
    )
    activations: ActivationsChoice = EngineConfig().activations

    def names(self) -> list[str]:
        """What -m names. A file may have a comma in its name."""
        return [part for text in self.model or [] for part in ([text] if os.path.exists(text) else text.split(","))]


@dataclass(frozen=True, slots=True)
class TestOptions:
    """What is measured."""

    n_prompt: list[Any] | None = _several(
        "-p", "--n-prompt", help="pp: read prompts of so many tokens; 0 for none. [512]", panel=TESTS
    )
    n_gen: list[Any] | None = _several(
        "-n", "--n-gen", help="tg: generate so many tokens; 0 for none. [128]", panel=TESTS
    )
    prompt_and_gen: list[Any] | None = _several(
        "-pg", "--prompt-and-gen", help="Read a prompt, then generate, timed together. Repeatable.",
        panel=TESTS, metavar="PP,TG", parser=sweep.pair,
    )
    n_depth: list[Any] | None = _several(
        "-d", "--n-depth", help="Behind so many tokens of context, which are not timed. [0]", panel=TESTS
    )
    parallel: list[Any] | None = _several(
        "-npl", "--parallel", help="So many sequences generate at once, in tests that do. [1]", panel=TESTS
    )
    embeddings: Any = option(
        "-embd", "--embeddings", help="1: make a vector of each prompt, of a model that embeds; -npl texts at once. [0]",
        default="0", panel=TESTS, metavar="0|1", parser=_switch,
    )
    repetitions: int = option(
        "-r", "--repetitions", help="How often each test is repeated. [5]", default=5, panel=TESTS, metavar="N"
    )
    delay: float = option(
        "--delay", help="Seconds to wait before each test. [0]", default=0.0, panel=TESTS, metavar="SECONDS"
    )
    no_warmup: bool = option("--no-warmup", help="No repetition beforehand.", default=False, panel=TESTS)


@dataclass(frozen=True, slots=True)
class BenchEngineOptions:
    """Settings that can be swept."""

    batch_size: list[Any] | None = _several(
        "-b", "--batch-size", help=f"Most tokens in one step of the engine. [{_STEP}]", panel=ENGINE, parser=_sizes
    )
    ubatch_size: list[Any] | None = _several(
        "-ub", "--ubatch-size", help="The same as in llama.cpp: a step has at most the smaller of both. [--batch-size]",
        panel=ENGINE, parser=_sizes,
    )
    cache_type_k: list[Any] | None = _several(
        "-ctk", "--cache-type-k", help="What keys are kept as: auto, bf16, int8, fp8, … [auto]",
        panel=ENGINE, metavar="TYPE,…", parser=_cache_types,
    )
    cache_type_v: list[Any] | None = _several(
        "-ctv", "--cache-type-v", help="The same for values. [auto]",
        panel=ENGINE, metavar="TYPE,…", parser=_cache_types,
    )
    n_gpu_layers: list[Any] | None = _several(
        "-ngl", "--n-gpu-layers", "--gpu-layers",
        help="How many layers have their weights on a GPU, the head being one; it reads all others from the machine's memory. "
        "A number, or all. [auto: as many as fit]", panel=ENGINE, parser=_layers,
    )
    n_cpu_moe: list[Any] | None = _several(
        "-ncmoe", "--n-cpu-moe", help="Of how many layers a GPU reads the experts from there. [as few as do not fit]",
        panel=ENGINE,
    )
    threads: list[Any] | None = _several(
        "-t", "--threads", help="CPU threads. [one a core; of a Mac, one a fast core]", panel=ENGINE
    )
    tensor_parallel_size: list[Any] | None = _several(
        "-tp", "--tensor-parallel-size",
        help="Processes that compute the model together, on a GPU each or beside a memory each. [1]", panel=ENGINE,
    )
    deterministic: Deterministic = False


@dataclass(frozen=True, slots=True)
class BenchOutputOptions:
    """What is said, and where."""

    output: Format = option(
        "-o", "--output", help="What results are printed as. [md]", default="md", panel=OUTPUT, envvar=None
    )
    output_err: Format | None = option(
        "-oe", "--output-err", help="The same on standard error as well. [nothing]", panel=OUTPUT, envvar=None
    )
    progress: bool = option(
        "--progress", help="A line on standard error before each test.", default=False, panel=OUTPUT
    )
    report: Report = None
    plot: Plot = False
    roofline: RooflineChoice = "cached"


def sweep_of(models: list[str], model: BenchModelOptions, tests: TestOptions, engine: BenchEngineOptions) -> sweep.Sweep:
    """Raises UsageError."""
    if tests.repetitions < 1:
        raise UsageError("-r takes a number from 1 on")
    if not 0.0 <= tests.delay <= 3600.0:
        raise UsageError("--delay takes seconds from 0 to 3600")
    quants = [part.strip() for text in model.quant or [] for part in text.split(",")]
    given: dict[str, Any] = {
        "num_prompts": _flat(tests.n_prompt),
        "num_gens": _flat(tests.n_gen),
        "pairs": tuple(tests.prompt_and_gen or ()),
        "depths": _flat(tests.n_depth),
        "parallel": _flat(tests.parallel),
        "quants": tuple([None if name == "none" else name for name in quants]),
        "batch_sizes": _flat(engine.batch_size),
        "ubatch_sizes": _flat(engine.ubatch_size),
        "cache_types_k": _flat(engine.cache_type_k),
        "cache_types_v": _flat(engine.cache_type_v),
        "n_gpu_layers": tuple([None if count == -1 else count for count in _flat(engine.n_gpu_layers)]),
        "n_cpu_moe": _flat(engine.n_cpu_moe),
        "threads": _flat(engine.threads),
        "tensor_parallel_sizes": _flat(engine.tensor_parallel_size),
        "embeds": bool(tests.embeddings),
    }
    if tests.embeddings and any(given["num_gens"]):
        raise UsageError("-embd 1 and -n contradict each other: a model that embeds generates nothing", "leave one of them out")
    return sweep.Sweep(tuple(models), **{name: values for name, values in given.items() if values})


def swept_fields(engine: BenchEngineOptions) -> list[str]:
    """Columns of the table that show what was asked for, by the record's names."""
    asked = {
        "n_gpu_layers": engine.n_gpu_layers,
        "n_cpu_moe": engine.n_cpu_moe,
        "n_threads": engine.threads,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "n_batch": engine.batch_size,
        "n_ubatch": engine.ubatch_size,
        "type_k": engine.cache_type_k,
        "type_v": engine.cache_type_v,
    }
    return [name for name, values in asked.items() if values]


def _flat(values: list[Any] | None) -> tuple[Any, ...]:
    return tuple([value for several in values or () for value in several])
