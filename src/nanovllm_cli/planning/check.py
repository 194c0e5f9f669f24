"""What happened, beside what was planned: the model is loaded, reads a prompt and answers, and both are put side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.memory import near_of, size_cache
from nanovllm_cli.engine.states import num_copies
from nanovllm_cli.llm import LLM
from nanovllm_cli.planning import estimate
from nanovllm_cli.planning.plan import Plan
from nanovllm_cli.sampling_params import SamplingParams

ANSWER_LEN = 32
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """unit: "B" or "tokens/s". planned: None where nothing could be said of it."""

    what: str
    unit: str
    planned: float | None
    found: float

    @property
    def share(self) -> float | None:
        """What was found, of what was planned."""
        return None if not self.planned else self.found / self.planned


def compare(plan: Plan, llm: LLM, config: EngineConfig, peak_memory: Callable[[], int]) -> list[Comparison]:
    """The plan's first format against what the engine holds and does. peak_memory: of this process.

    Speeds are the best of a few prompts and answers. Prompts are random, so that nothing of them is cached.
    """
    row = plan.formats[0]
    answer_len = min(ANSWER_LEN, llm.max_model_len // 4) if llm.spec.has_head else 0
    answers = answer_len > 1  # of one token no rate can be told
    answer_len *= answers
    prompt_len = min(estimate.PROMPT_LEN, llm.max_model_len - answer_len - answers)
    prefill, decode = _rates(llm, prompt_len, answer_len)
    cache, process = None, None
    if plan.processor == "cpu":
        spec, units = plan.facts.spec, plan.units
        near = near_of(spec, config, units.near)
        size = size_cache(config, spec.max_position, units.block, plan.cache_room, units.state, near, whole=spec.reads_both_ways)
        cache = size.num_bytes(*units)
        written = REPEATS * -(-(prompt_len + answer_len) // config.block_size) * units.block
        written += min(size.num_states, 1 + REPEATS * num_copies(prompt_len, config.block_size)) * units.state
        process = estimate.total_bytes(row.weight_bytes, written) if config.tensor_parallel_size == 1 else None
    found = [
        Comparison("weights", "B", row.weight_bytes, llm.weight_bytes),
        Comparison("KV cache", "B", cache, llm.kv_bytes),
        Comparison(f"prompt of {prompt_len}", "tokens/s", row.prefill, prefill),
    ]
    if answers:
        found.append(Comparison(f"answer of {answer_len}", "tokens/s", row.decode, decode))
    if process is not None:
        found.insert(2, Comparison("whole process", "B", process, peak_memory()))
    return found


def _rates(llm: LLM, prompt_len: int, answer_len: int) -> tuple[float, float]:
    """Tokens a second of a prompt and of an answer, 0 without one. The first run is for what is made on first use."""
    generator = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=max(1, answer_len), ignore_eos=True)
    prefill, decode = 0.0, 0.0
    for _ in range(REPEATS):
        ids = [generator.randrange(llm.spec.vocab_size) for _ in range(prompt_len)]
        began = time.perf_counter()
        if answer_len == 0:
            llm.pooled([ids], llm.pooling, None)
            prefill = max(prefill, prompt_len / (time.perf_counter() - began))
            continue
        times = [time.perf_counter() for output in llm.stream(ids, params) if output.outputs[0].delta_ids]
        prefill = max(prefill, prompt_len / (times[0] - began))
        decode = max(decode, (len(times) - 1) / (times[-1] - times[0]))
    return prefill, decode
