"""T5 and its kin against transformers, by tiny random models: what a decoder makes of the text that an encoder reads; and that no
bit of it depends on steps, neighbours, or what was found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.sampling_params import SamplingParams
from reading import KINDS, a_source, expected, t5_folder

pytest.importorskip("transformers")


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    """Alone and in one batch: sources of less than a block, of whole ones, and of more than a tile of the kernels."""
    worker = worker_for(t5_folder(tmp_path, kind), dtype="float32", num_blocks=64)
    sources = [a_source(length, length) for length in (1, 5, 16, 17, 150)]
    together = run(engine_for(worker), [(list(source), greedily(30, logprobs=0)) for source in sources])
    for source, output in zip(sources, together, strict=True):
        ids = output.outputs[0].token_ids
        logprobs = expected(kind, source, tuple(ids))[:-1]
        assert list(ids) == logprobs.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
        (alone,) = run(engine_for(worker), [(list(source), greedily(30, logprobs=0))])
        assert logprobs_of(alone) == logprobs_of(output)
        assert output.prompt_token_ids == source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5_folder(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return worker_for(folder, dtype="float32", num_blocks=64)


def test_neither_steps_nor_neighbours_change_a_bit(worker: Worker) -> None:
    """Alone, cut anywhere, beside others, recorded or not, behind a found prefix, and computed again after a preemption."""
    sources = [a_source(40), a_source(40), a_source(33, 3), (*a_source(32)[:-1], 1)]
    requests = [(list(source), greedily(20, logprobs=0)) for source in sources]
    num_blocks = sum(-(-len(source) // 16) + 1 for source in sources) + 2
    alone = check_that_no_bit_changes(worker, requests, num_blocks)
    assert logprobs_of(alone[0]) != logprobs_of(alone[3]), "what they have in common is not found by its beginning"
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    try:
        for first, again in zip(alone, run(engine_for(worker, enable_prefix_caching=False), requests), strict=True):
            assert logprobs_of(again) == logprobs_of(first)
    finally:
        worker.runner.graphs._recordable = True  # type: ignore[attr-defined]


def test_the_same_text_is_encoded_once(worker: Worker) -> None:
    sight = worker.sight
    assert sight is not None
    engine, before = engine_for(worker), sight.num_computed
    source = list(a_source(20, 11))
    for count in (2, 3, 20):
        (output,) = run(engine, [(source, greedily(count))])
    assert sight.num_computed - before == 1
    assert engine.stats().prefix_hit_tokens == 2 * 32, "the encoder's rows; what was written is not the next answer's beginning"
    assert output.metrics.num_cached_tokens == len(source), "and no more than were sent"
    run(engine, [([*source[:16], *a_source(4, 12)], greedily(2))])
    assert engine.stats().prefix_hit_tokens == 2 * 32, "what is cached is of the whole text alone"
    assert sight.num_computed - before == 2
