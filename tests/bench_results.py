"""Not tests: results of benchmarks, made up but of the right size, for tests of what is done with them."""

from __future__ import annotations

import random
from typing import Any

from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.record import Record, Summary

MACHINE = Machine(
    cpu="Some CPU", processors=4, memory_bytes=8 << 30, system="Linux", version="0.1.0", command="nanovllm bench x"
)


def record(*speeds: float, prompt: int = 0, gen: int = 128, **more: Any) -> Record:
    """A test whose repetitions had these speeds, in tokens a second."""
    count = (prompt + gen) * more.get("n_parallel", 1)
    fields: dict[str, Any] = {
        "model_filename": "m.gguf", "model_type": "qwen3 0.6B Q8_0", "model_size": 640 << 20, "model_n_params": 596_049_920,
        "n_threads": 4, "formats": "q8_0", "peak_memory": 1 << 30, "machine": MACHINE,
    }  # fmt: skip
    return Record(
        n_prompt=prompt, n_gen=gen, samples_ns=tuple(round(1e9 * count / speed) for speed in speeds), **fields | more
    )


def sweep() -> list[Record]:
    """Two formats, three depths of a prompt and of an answer, and one to four sequences at once."""
    made = []
    for formats, factor in (("q8_0", 1.0), ("bf16", 0.6)):
        rooflines = {
            "roofline_gb_s": 20.0,
            "roofline_gflops": 200.0,
            "bytes_per_token": 640e6 / factor,
            "flops_per_token": 1.2e9,
        }
        for depth in (0, 512, 1024):
            fall = factor / (1 + depth / 2000)
            made.append(record(300 * fall, 310 * fall, prompt=512, gen=0, n_depth=depth, formats=formats))
            made.append(record(20 * fall, 21 * fall, 22 * fall, n_depth=depth, formats=formats, **rooflines))
        made += [record(20 * factor * count**0.7, n_parallel=count, formats=formats) for count in (2, 4)]
    return made


def run(rate: float = 1.0, *, model: str = "qwen3", slower: float = 1.0, samples: int = 300) -> Summary:
    """What a run of `bench serve` leaves."""
    draw = random.Random(7)
    ttft, itl, e2el = (
        [slower * draw.lognormvariate(middle, 0.4) for _ in range(count)]
        for middle, count in ((4.0, samples), (2.5, 5 * samples), (7.0, samples))
    )
    metrics = {
        "completed": samples, "request_throughput": rate / slower, "output_throughput": 100 * rate / slower,
        "max_concurrent_requests": max(1, int(4 * rate)), "mean_ttft_ms": sum(ttft) / samples, "p99_ttft_ms": sorted(ttft)[-2],
        "median_ttft_ms": sorted(ttft)[samples // 2],
        "std_ttft_ms": 20.0, "mean_itl_ms": sum(itl) / len(itl),
    }  # fmt: skip
    settings = {"url": "http://localhost", "request_rate": rate}
    return Summary("serve", model, settings, metrics, {"ttft_ms": ttft, "itl_ms": itl, "e2el_ms": e2el}, MACHINE)
