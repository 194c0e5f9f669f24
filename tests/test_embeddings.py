"""Pooled hidden states against transformers: alone, in chunks, beside generation, under pressure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from engines import SMALL, engine_for, random_model, save, worker_for
from nanovllm_cli.engine import runner
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import PromptTooLongError, UsageError
from nanovllm_cli.model_spec import Pooling
from nanovllm_cli.sampling_params import SamplingParams

LENS = [1, 2, 16, 17, 33, 70]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls")


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(Qwen3Config(**SMALL))


@pytest.fixture(scope="module")
def worker(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return worker_for(save(model, tmp_path_factory.mktemp("qwen3") / "m"))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, SMALL["vocab_size"], (count,), generator=generator).tolist() for count in LENS]


@pytest.fixture(scope="module")
def expected(model: Any, texts: list[list[int]]) -> dict[str, list[torch.Tensor]]:
    with torch.no_grad():
        hidden = [model.model(torch.tensor([text])).last_hidden_state[0].double() for text in texts]
    return {"mean": [h.mean(0) for h in hidden], "last": [h[-1] for h in hidden], "cls": [h[0] for h in hidden]}


def embed(engine: Engine, texts: list[list[int]], pooling: Pooling) -> list[torch.Tensor]:
    for i, text in enumerate(texts):
        engine.embed(f"e{i}", text, pooling)
    done: dict[str, torch.Tensor] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.pooled is not None:
                assert output.finished
                assert output.outputs[0].token_ids == ()
                done[output.request_id] = torch.tensor(output.pooled, dtype=torch.float64)
    return [done[f"e{i}"] for i in range(len(texts))]


def near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("budget", [512, 7])
def test_it_is_what_transformers_pools_whole_and_in_chunks(
    worker: Worker, texts: list[list[int]], expected: dict[str, list[torch.Tensor]], pooling: Pooling, budget: int
) -> None:
    near(embed(engine_for(worker, max_num_batched_tokens=budget), texts, pooling), expected[pooling])


def test_a_cached_prefix_is_computed_again_where_every_row_counts(
    worker: Worker, texts: list[list[int]], expected: dict[str, list[torch.Tensor]]
) -> None:
    engine = engine_for(worker)
    engine.add("g", texts[-1], SamplingParams(max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    near(embed(engine, texts, "mean"), expected["mean"])
    assert engine.stats().used_blocks == 0


def test_beside_answers_and_without_room_for_all(
    worker: Worker, texts: list[list[int]], expected: dict[str, list[torch.Tensor]]
) -> None:
    """Seven blocks hold one of the long texts: others are preempted, and start their sums again."""
    engine = engine_for(worker, num_blocks=7, max_num_batched_tokens=24)
    engine.add("g", texts[3], SamplingParams(max_tokens=40, ignore_eos=True))
    near(embed(engine, texts, "mean"), expected["mean"])
    stats = engine.stats()
    assert stats.used_blocks == 0
    assert stats.running == stats.waiting == 0


def test_what_is_aborted_or_refused_leaves_nothing(worker: Worker, texts: list[list[int]]) -> None:
    engine = engine_for(worker, num_blocks=8)
    engine.embed("e", texts[-1], "mean")
    engine.abort("e")
    assert not engine.has_unfinished()
    with pytest.raises(PromptTooLongError):
        engine.embed("e", [3] * 129, "mean")
    with pytest.raises(UsageError):
        engine.embed("e", [], "mean")
    with pytest.raises(UsageError):
        engine.embed("e", [SMALL["vocab_size"]], "last")
    with pytest.raises(UsageError, match="priorities mean nothing"):
        engine.embed("e", texts[0], "mean", priority=1)
    assert engine.stats().used_blocks == 0


def test_an_urgent_text_is_read_first(worker: Worker, texts: list[list[int]]) -> None:
    engine = engine_for(worker, max_num_seqs=1, policy="priority")
    for name, priority in (("late", 5), ("soon", -5)):
        engine.embed(name, texts[-1], "mean", priority=priority)
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["soon", "late"]
    with pytest.raises(UsageError, match="priority"):
        engine.embed("e", texts[0], "mean", priority=2**31 + 1)


def test_a_text_gets_the_same_bits_whatever_is_beside_it(worker: Worker, texts: list[list[int]]) -> None:
    together = embed(engine_for(worker), texts, "mean")
    for text, vector in zip(texts, together, strict=True):
        assert torch.equal(embed(engine_for(worker), [text], "mean")[0], vector)


def test_the_library_embeds(tmp_path: Path) -> None:
    from nanovllm_cli import LLM

    with LLM("tiny") as llm:
        first, second = llm.embed(["hello there", "hello there"])
        assert len(first) == llm.spec.hidden_size
        assert first == second
        assert llm.embed("hello there", "last") != [first]


def test_a_vector_of_no_numbers_is_an_error_of_its_text_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    pooled = runner.pooled_of

    def broken(model: Any, hidden: Any, owners: list[Any]) -> dict[int, list[float]]:
        found = pooled(model, hidden, owners)
        return {i: [float("nan"), *vector[1:]] if i == min(found) else vector for i, vector in found.items()}

    monkeypatch.setattr(runner, "pooled_of", broken)
    engine = engine_for(worker)
    for name in ("bad", "good"):
        engine.embed(name, [3, 4, 5], "mean")
    bad, good = sorted(engine.step(), key=lambda output: output.request_id)
    assert bad.finished
    assert bad.pooled is None
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in (bad.outputs[0].error or "")
    assert good.pooled is not None
