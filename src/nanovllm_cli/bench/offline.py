"""Many requests through an engine in this process: `throughput` (as many as there are, all at once) and `latency` (a batch of
equal requests, again and again).

Prompts are tokens before the clock starts. Answers are greedy, have exactly the length that was asked for, and take the whole
engine: scheduling, sampling, text. Names of figures are vLLM's (`vllm bench throughput`, `vllm bench latency`) where it has them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.metrics import latency_figures, most_at_once
from nanovllm_cli.bench.record import Summary
from nanovllm_cli.bench.table import format_names, greedy, peak_memory, reserved_tokens
from nanovllm_cli.bench.workload import Request, Workload, drawn_ids
from nanovllm_cli.errors import RequestError, UsageError
from nanovllm_cli.progress import LoadProgress

if TYPE_CHECKING:
    from nanovllm_cli.engine.outputs import RequestMetrics, RequestOutput
    from nanovllm_cli.llm import LLM

Clock = Callable[[], float]


class Batches(NamedTuple):
    """What `latency` runs: so many equal requests together, so many times, after so many that do not count."""

    batch_size: int
    input_len: int
    output_len: int
    repetitions: int
    warm_up: int = 0
    seed: int = 0


def measure_throughput(
    llm: LLM,
    workload: Workload,
    machine: Machine,
    percentiles: Sequence[float],
    progress: LoadProgress,
    *,
    warm_up: int = 1,
    clock: Clock = time.perf_counter,
) -> Summary:
    """All requests but the first `warm_up`, which run beforehand. Raises UsageError for one that the context does not hold, and
    RequestError where one fails."""
    prompts = [_encoded(llm, number, request) for number, request in enumerate(workload, 1)]
    params = [greedy(request.max_tokens) for request in workload]
    if warm_up:
        progress.stage("warming up", None, "requests")
        llm.generate(prompts[:warm_up], params[:warm_up])
    before = llm.stats()
    timed = prompts[warm_up:]
    progress.stage("throughput", len(timed), "requests")
    began = clock()
    outputs = llm.generate(timed, params[warm_up:], progress=lambda done, total: progress.advance(1))
    duration = clock() - began
    progress.done()
    _refuse_failures(outputs)
    after = llm.stats()
    inputs, generated = [len(prompt) for prompt in timed], [len(output.outputs[0].token_ids) for output in outputs]
    each = [output.metrics for output in outputs]
    samples = {
        "ttft": [_between(metrics.arrival, metrics.first_token) for metrics in each],
        "tpot": [
            _between(metrics.first_token, metrics.finished) / (count - 1)
            for metrics, count in zip(each, generated, strict=True) if count > 1
        ],
        "e2el": [_between(metrics.arrival, metrics.finished) for metrics in each],
    }  # fmt: skip
    metrics: dict[str, float] = {
        "completed": len(outputs),
        "duration": duration,
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(generated),
        "request_throughput": len(outputs) / duration,
        "input_throughput": sum(inputs) / duration,
        "output_throughput": sum(generated) / duration,
        "total_token_throughput": (sum(inputs) + sum(generated)) / duration,
        "max_concurrent_requests": peak_concurrency(each),
        "prefix_hit_tokens": after.prefix_hit_tokens - before.prefix_hit_tokens,
        "preemptions": after.preemptions - before.preemptions,
    }
    for name, seconds in samples.items():
        metrics |= latency_figures(name, seconds, percentiles)
    series: dict[str, list[float]] = {f"{name}_ms": [1e3 * value for value in values] for name, values in samples.items()}
    series |= {"input_tokens": [float(count) for count in inputs], "output_tokens": [float(count) for count in generated]}
    settings = _settings(llm) | {"dataset": workload.name, "num_prompts": len(timed)} | workload.settings
    return Summary("throughput", llm.name, settings, metrics | _memory(llm), series, machine)


def measure_latency(
    llm: LLM,
    batches: Batches,
    machine: Machine,
    percentiles: Sequence[float],
    progress: LoadProgress,
    *,
    clock: Clock = time.perf_counter,
) -> Summary:
    """How long a whole batch takes. Its prompts are made-up tokens that no repetition shares with another. Raises UsageError,
    RequestError."""
    draw = random.Random(batches.seed)
    params, reserved = greedy(batches.output_len), reserved_tokens(llm)
    seconds: list[float] = []
    progress.stage("latency", batches.warm_up + batches.repetitions, "batches")
    for number in range(batches.warm_up + batches.repetitions):
        prompts = [drawn_ids(draw, batches.input_len, llm.spec.vocab_size, reserved) for _ in range(batches.batch_size)]
        _encoded(llm, number, Request(prompts[0], batches.output_len))
        began = clock()
        outputs = llm.generate(prompts, params)
        if number >= batches.warm_up:
            seconds.append(clock() - began)
        _refuse_failures(outputs)
        progress.advance(1)
    progress.done()
    mean = sum(seconds) / len(seconds)
    tokens = batches.batch_size * batches.output_len
    metrics = latency_figures("latency", seconds, percentiles) | {
        "output_throughput": tokens / mean,
        "total_token_throughput": (tokens + batches.batch_size * batches.input_len) / mean,
    }
    settings = _settings(llm) | batches._asdict()
    series = {"latency_ms": [1e3 * value for value in seconds]}
    return Summary("latency", llm.name, settings, metrics | _memory(llm), series, machine)


def peak_concurrency(requests: Sequence[RequestMetrics]) -> int:
    """The most requests between their first step and their last token at any one moment."""
    return most_at_once((metrics.first_scheduled or 0.0, metrics.finished or 0.0) for metrics in requests)


def _encoded(llm: LLM, number: int, request: Request) -> list[int]:
    ids = llm.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    if len(ids) + request.max_tokens > llm.max_model_len:
        raise UsageError(
            f"request {number} needs {len(ids)} + {request.max_tokens} tokens, the context holds {llm.max_model_len}",
            "ask for shorter prompts and answers, or raise --ctx-size if the model allows it",
        )
    return ids


def _refuse_failures(outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        if output.outputs[0].error is not None:
            raise RequestError(f"{output.request_id} failed: {output.outputs[0].error}")


def _between(begin: float | None, end: float | None) -> float:
    assert begin is not None
    assert end is not None
    return end - begin


def _settings(llm: LLM) -> dict[str, Any]:
    settings = {"formats": ", ".join(format_names(llm)), "dtype": str(llm.dtype).removeprefix("torch."), "threads": llm.threads}
    several = llm.tensor_parallel_size if llm.tensor_parallel_size > 1 else None
    beside = {"tensor_parallel_size": several, "lora": "; ".join(map(str, llm.lora)),
              "control_vectors": "; ".join(map(str, llm.control_vectors)), "draft_model": llm.draft_model,
              "mtp": llm.mtp}  # fmt: skip
    return settings | {name: value for name, value in beside.items() if value}


def _memory(llm: LLM) -> dict[str, float]:
    """Bytes."""
    return {"model_size": llm.weight_bytes, "kv_cache": llm.kv_bytes, "peak_memory": peak_memory(on_cpu=llm.threads is not None)}
