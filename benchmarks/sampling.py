"""What a step's drawing costs: masks, penalties, filters and the draw for all rows, beside the model's forward.

    python benchmarks/sampling.py --threads 2 --output benchmarks/results/sampling.json

Rows of logits as a model of Qwen3's vocabulary gives them: normal, with a few likely tokens. Each case is a batch of one kind of
request with 256 tokens of prompt. Reported: the fastest and the median wall time of `Sampler.sample`, and the time of all
threads together, which a loaded machine changes least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from common import save
from nanovllm_cli.engine.plan import NewSequence
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.kernels import cpu
from nanovllm_cli.sampling_params import SamplingParams

VOCAB = 151_936
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 20, top_p 0.95, t 0.6": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "t 1": {},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "penalties, DRY, top_k 40": {
        "repetition_penalty": 1.1,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": (),
        "top_k": 40,
    },
    "logprobs 5, t 1": {"logprobs": 5},
}


def rows_of(count: int) -> torch.Tensor:
    random = np.random.default_rng(0)
    logits = random.standard_normal((count, VOCAB), dtype=np.float32) * 2.5
    for row in logits:
        row[random.integers(0, VOCAB, 40)] += random.random(40, dtype=np.float32) * 12
    return torch.from_numpy(logits)


def measure(fields: dict[str, Any], logits: torch.Tensor, seconds: float) -> dict[str, float]:
    """Milliseconds a step."""
    count = len(logits)
    sampler, random = Sampler(VOCAB), np.random.default_rng(1)
    for seq_id in range(count):
        prompt = random.integers(0, VOCAB, 256).tolist()
        sampler.add(NewSequence(seq_id, prompt, SamplingParams(**fields), seq_id, ()))
    for _ in range(2):
        sampler.sample(range(count), logits)
    walls, spent = [], 0.0
    while len(walls) < 5 or spent < seconds:
        begin, of_threads = time.perf_counter(), time.process_time()
        sampler.sample(range(count), logits)
        walls.append((time.perf_counter() - begin, time.process_time() - of_threads))
        spent += walls[-1][0]
    wall, busy = zip(*walls, strict=True)
    found = {"fastest": min(wall), "median": statistics.median(wall), "threads": statistics.median(busy)}
    return {name: round(1e3 * value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cpu.set_num_threads(options.threads)
    found: dict[str, dict[int, dict[str, float]]] = {}
    print(
        f"| V {VOCAB}, {options.threads} threads | rows | fastest ms | median ms | of all threads ms |\n|---|---|---|---|---|"
    )
    for name, fields in CASES.items():
        found[name] = {rows: measure(fields, rows_of(rows), options.seconds) for rows in options.rows}
        for rows, times in found[name].items():
            print(
                f"| {name} | {rows} | {times['fastest']:.3f} | {times['median']:.3f} | {times['threads']:.3f} |",
                flush=True,
            )
    save(options.output, {"vocabulary": VOCAB, "threads": options.threads, "milliseconds": found})


if __name__ == "__main__":
    main()
