"""Sections that run the engine: decode of one and of many sequences, prompts, nano-vllm's workload."""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest.mock import patch

from gpu.engines import Decoded, Loaded, decode, finished, gpu, load, overlaps, release, serve
from gpu.report import EAGER, ONE_BY_ONE, OVERLAPPED, SMALLEST
from gpu.sections import Output
from gpu.shapes import SHAPES, Shape
from gpu.workload import PROMPT, Request, nano_vllm, prompt
from nanovllm_cli.kernels import launcher
from nanovllm_cli.sampling_params import SamplingParams

LARGE = "qwen3-8b"
OTHERS = (LARGE, "llama-3.2-1b")
ROUNDS = 3
BATCHES = (32, 8, 128, 256)
"""The first has a bar."""
Way = tuple[str, dict[str, Any], bool | None, int]
"""Of a decode step: settings, programmatic launch (None: as elsewhere), percent of a multiprocessor's memory that is shared."""
WAYS: tuple[Way, ...] = ((EAGER, {"eager": True}, None, 100), (ONE_BY_ONE, {}, False, 100), (OVERLAPPED, {}, True, 100))
OTHER_WAYS: tuple[Way, ...] = (
    ("deterministic", {"deterministic": True}, None, 100),
    ("eight guesses", {"num_speculative_tokens": 8}, None, 100),
    ("programmatic launch, memory divided as each kernel likes", {}, True, -1),
)
PREFILLS = ((2048, 1), (512, 1), (8192, 1), (2048, 4))
"""Tokens of a prompt, prompts at once."""


def room(batch: int, tokens: int) -> dict[str, int]:
    """Settings of an engine for `batch` sequences of so many tokens."""
    return {"num_blocks": batch * (tokens // 16 + 2), "max_num_seqs": batch, "max_model_len": max(tokens + 16, 256)}


def measure(loaded: Loaded, shape: Shape, batch: int, steps: int, rounds: int = ROUNDS) -> tuple[dict[str, Any], Decoded]:
    """The median of rounds, and the last one. The first round, which compiles and records, is not counted."""
    decode(loaded, batch, PROMPT, 4, salt=9)
    runs = [decode(loaded, batch, PROMPT, steps, salt=i) for i in range(rounds)]
    rates = [run.tokens / run.seconds for run in runs]
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    read = shape.decode_bytes(PROMPT + 16 + steps / 2, batch)
    result = {
        "tok/s": statistics.median(rates),
        "spread": (max(rates) - min(rates)) / statistics.median(rates),
        "ms a step": 1e3 * middle.seconds / middle.steps,
        "CPU ms a step": 1e3 * (middle.seconds - middle.waited) / middle.steps,
        "GB/s": read * middle.steps / middle.seconds / 1e9,
    }
    return result, runs[-1]


def batch_1(output: Output) -> None:
    """Two models; then what graphs and programmatic launch do for the smaller one, whose steps are shortest."""
    tokens: list[tuple[int, ...]] = []
    for name in (SMALLEST, LARGE):
        output.attempt(_model, output, name, tokens)
        release()
    _ways(output, WAYS, tokens)


def ways(output: Output) -> None:
    """What else there is to do with a step of the smallest model; and a third model."""
    tokens: list[tuple[int, ...]] = []
    output.attempt(_model, output, SMALLEST, tokens)
    release()
    _ways(output, OTHER_WAYS, tokens)
    output.attempt(_model, output, OTHERS[-1], tokens)


def _model(output: Output, name: str, tokens: list[tuple[int, ...]]) -> None:
    """tokens: the answer is added."""
    shape = SHAPES[name]
    result, last = measure(load(shape, gpu(), **room(1, 1024)), shape, 1, 256 if shape.hidden < 4096 else 128)
    output.put(name, result)
    tokens.append(last.outputs[0].outputs[0].token_ids)


def _ways(output: Output, ways: tuple[Way, ...], tokens: list[tuple[int, ...]]) -> None:
    """Each row says whether its tokens are the first ones'. Where overlapping kernels hang or err, nobody waits for them."""
    for way in ways:
        if overlaps() or not way[2]:
            output.attempt(_way, output, way, tokens)
            release()


def _way(output: Output, way: Way, tokens: list[tuple[int, ...]]) -> None:
    title, settings, programmatic, carveout = way
    shape = SHAPES[SMALLEST]
    with patch.object(launcher, "CARVEOUT", carveout):
        loaded = load(shape, gpu(programmatic), **room(1, 1024), **settings)
        result, last = measure(loaded, shape, 1, 256)
    same = last.outputs[0].outputs[0].token_ids == tokens[0] if tokens else None
    output.put(f"{SMALLEST}, {title}", result | {"same tokens": same})


def batches(output: Output) -> None:
    _batches(output, SMALLEST)


def batches_of_others(output: Output) -> None:
    for name in OTHERS:
        output.attempt(_batches, output, name)
        release()


def _batches(output: Output, name: str) -> None:
    shape = SHAPES[name]
    loaded = load(shape, gpu(), **room(max(BATCHES), 512), max_num_batched_tokens=8192)
    for batch in BATCHES:
        output.put(f"{name}, {batch}", measure(loaded, shape, batch, 64, rounds=2)[0])


def prefill(output: Output) -> None:
    """From the request to its first token; the step is one, whatever the length."""
    shape = SHAPES[LARGE]
    most = max(tokens * count for tokens, count in PREFILLS)
    loaded = load(
        shape, gpu(), max_num_batched_tokens=most, max_num_seqs=4, num_blocks=2 * most // 16, max_model_len=most + 16
    )
    for tokens, count in PREFILLS:
        output.put(f"{tokens} x {count}", prefill_of(loaded, shape, tokens, count))


def prefill_of(loaded: Loaded, shape: Shape, tokens: int, count: int, rounds: int = 7) -> dict[str, float]:
    times = []
    for salt in range(rounds):
        prompts = [prompt(tokens, salt * count + i, loaded.vocab) for i in range(count)]
        begin = time.perf_counter()
        for i, ids in enumerate(prompts):
            loaded.engine.add(f"{salt}-{i}", ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        while loaded.engine.has_unfinished():
            finished(loaded)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[2:])
    return {
        "tok/s": count * tokens / seconds,
        "ms": 1e3 * seconds,
        "TFLOP/s": shape.prefill_flops(tokens, count) / seconds / 1e12,
    }


def warming(most: int) -> list[Request]:
    """Sequences of which every four steps half are left: each size of a step is seen, recorded and replayed."""
    return [Request(prompt(64, i, 10000), 5 + 4 * ((most - 1).bit_length() - i.bit_length())) for i in range(most)]


def workload(output: Output) -> None:
    """As nano-vllm's bench.py runs it: all 256 at once, temperature 0.6, tokens of answers over the time of everything."""
    for title, settings in (("bf16", {}), ("fp8 cache", {"kv_cache_dtype": "fp8"})):
        output.attempt(_workload, output, title, settings)
        release()


def _workload(output: Output, title: str, settings: dict[str, Any]) -> None:
    loaded = load(
        SHAPES[SMALLEST], gpu(), max_num_seqs=256, max_num_batched_tokens=16384, enable_prefix_caching=True, **settings
    )
    serve(loaded, warming(256), 0.6)
    seconds, outputs = serve(loaded, nano_vllm(), 0.6)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    stats = loaded.engine.stats()
    output.put(
        title,
        {
            "tok/s": tokens / seconds,
            "seconds": seconds,
            "tokens": tokens,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "blocks": loaded.worker.num_blocks,
        },
    )
