"""Answers of one model that are to be the same however its steps are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import engine_for, greedy, run, worker_for
from nanovllm_cli.engine.worker import Worker


def answers(engine: Any, asked: Any) -> list[Any]:
    """Of each request, tokens and their log-probabilities to the bit."""
    found = [output.outputs[0] for output in run(engine, asked)]
    return [(each.token_ids, [step.logprob for step in each.logprobs]) for each in found]


def check_chunks_and_prefixes(worker: Worker, prompts: Sequence[list[int]]) -> None:
    """Each alone and whole, against all together in chunks, and again behind what those left in the cache."""
    asked = [(ids, greedy(12, logprobs=1)) for ids in prompts]
    alone = [answers(engine_for(worker, max_num_batched_tokens=512), [each])[0] for each in asked]
    engine = engine_for(worker, max_num_batched_tokens=24)
    assert answers(engine, asked) == alone
    assert answers(engine, asked) == alone, "behind what the first left in the cache"


def check_guesses_and_few_blocks(folder: Path, kept: str) -> None:
    """Words that repeat are guessed, and most guesses are wrong; where blocks run short, sequences begin again. kept: as what
    keys and values are."""
    asked = [([*range(i, i + 5)] * 6, greedy(30, logprobs=1)) for i in range(3, 9)]

    def found(**settings: Any) -> list[Any]:
        worker = worker_for(folder, deterministic=True, kv_cache_dtype=kept, **settings)
        more = {name: value for name, value in settings.items() if name == "num_speculative_tokens"}
        return answers(engine_for(worker, max_num_batched_tokens=40, **more), asked)

    assert found(num_speculative_tokens=4) == found()
    assert found(num_speculative_tokens=4, num_blocks=12) == found(num_blocks=12) == found()
