"""Engines with little room, of models with states and of those that others guess for: what random mixes of requests found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import engine_for, greedy, random_model, run, save, worker_for
from fake_model import make_engine
from nanovllm_cli.engine.mtp import MTPDraft
from nanovllm_cli.engine.states import StatePool
from nanovllm_cli.sampling_params import SamplingParams
from test_models import CASES
from test_mtp import with_layer

STATES = "granite 4 h"


pytestmark = pytest.mark.usefixtures("eight_rows_may_have_guesses")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that keeps states."""
    return save(random_model(CASES[STATES]), tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("states", [1.5, 2.5])
def test_the_only_state_is_taken_over_from_the_prefix_that_it_is_kept_for(folder: Path, states: float) -> None:
    """A second turn, where an answer ended with a block, so that its state stayed there."""
    probe = worker_for(folder)
    room = 256 // 16 * probe.block_bytes + int(states * probe.state_bytes)
    worker = worker_for(folder, num_blocks=None, max_model_len=256, kv_cache_bytes=room)
    assert worker.num_states == int(states)
    engine = engine_for(worker, num_blocks=worker.num_blocks)
    prompt = list(range(2, 22))
    (first,) = run(engine, [(prompt, greedy(13))])
    turn = [*prompt, *first.outputs[0].token_ids, 5, 6, 7]
    for _ in range(2):
        (second,) = run(engine, [(turn, greedy(5))])
        (alone,) = run(engine_for(probe), [(turn, greedy(5))])
        assert second.outputs[0].token_ids == alone.outputs[0].token_ids
    assert engine.stats().prefix_hit_tokens >= 32


def test_a_state_that_somebody_copies_is_not_taken_over() -> None:
    pool = StatePool(2)
    state = pool.take()
    assert state is not None
    pool.keep(7, state)
    pool.hold(state)
    assert pool.take_over(7) is None
    pool.drop(state)
    assert (pool.take_over(7), pool.behind(7), pool.num_kept) == (state, None, 0)


@pytest.mark.parametrize("request_", [(list(range(2, 152)), greedy(5)), ([5, 6, 7], greedy(5, n=2))])
def test_a_draft_without_states_guesses_for_a_model_that_keeps_some(folder: Path, request_: Any, tmp_path: Path) -> None:
    """Where states are copied: behind long prompts, and for several answers."""
    small = save(random_model(CASES["granite 4, all attention"]), tmp_path)
    worker = worker_for(folder, draft_model=str(small))
    engine = engine_for(worker, draft_model=str(small))
    (alone,) = run(engine_for(worker_for(folder)), [request_])
    for _ in range(2):
        (output,) = run(engine, [request_])
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone.outputs]


def test_prompts_that_end_between_their_chunks_leave_nothing_behind(tmp_path: Path) -> None:
    saved = with_layer("glm4 moe, 2 of 5 and shared", tmp_path)
    worker = worker_for(saved.folder, mtp=True)
    engine = engine_for(worker, mtp=True, max_num_batched_tokens=16)
    for i in range(20):
        engine.add(str(i), [2 + i % 4] * 100, greedy(5))
        engine.step()
        engine.step()
        engine.abort(str(i))
    run(engine, [([3, 4, 5], greedy(5))])
    assert isinstance(worker._draft, MTPDraft)
    assert len(worker._draft._unfed) == 1  # that of the last one, until the next step


def test_who_waits_is_asked_again_when_more_of_its_prompt_can_be_found() -> None:
    """Two requests with the same prompt, where there is no room for it twice; the second comes while it is computed."""
    engine, model = make_engine(num_blocks=64, block_size=4, max_num_batched_tokens=64)
    document = [i % 50 for i in range(160)]
    engine.add("a", [*document, 60], SamplingParams(temperature=0.0, max_tokens=80))
    engine.step()
    engine.add("b", [*document, 61], SamplingParams(temperature=0.0, max_tokens=5))
    steps = 0
    while not any(output.request_id == "b" and output.outputs[0].token_ids for output in engine.step()):
        steps += 1
    assert steps < 5
    assert model.violations == []


def test_who_waits_for_a_state_is_asked_again_when_one_is_free(folder: Path) -> None:
    """Though there are fewer blocks by then."""
    worker = worker_for(folder)
    worker.num_states = 2
    engine = engine_for(worker, num_blocks=200)
    engine.add("a", list(range(2, 162)), greedy(200, n=2))
    engine.step()
    engine.add("b", [5, 6, 7], greedy(5))
    for _ in range(20):
        engine.step()
    engine.abort("a", 1)
    steps = 0
    while not any(output.request_id == "b" and output.outputs[0].token_ids for output in engine.step()):
        steps += 1
    assert steps < 3


@pytest.mark.parametrize("most", [3, 512])
def test_a_state_that_was_never_copied_is_not_kept(most: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the draft's part of the step in which children get the state of the one that computed their prompt."""
    settings: dict[str, Any] = {"draft_model": str(folder), "draft_min_p": 0.0, "max_num_batched_tokens": most}
    worker = worker_for(folder, **settings)
    engine = engine_for(worker, **settings)
    draft = worker._draft
    assert draft is not None
    plain, armed = draft._runner.run, []

    def interrupted(plan: Any, *args: Any) -> Any:
        if armed and plan.scheduled:
            armed.clear()
            raise KeyboardInterrupt
        return plain(plan, *args)

    monkeypatch.setattr(draft._runner, "run", interrupted)
    prompt = list(range(2, 162))
    engine.add("a", prompt, greedy(16, n=3))
    while engine.stats().running < 3:
        engine.step()
    armed.append(1)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.add("b", [*prompt, 5], greedy(3))
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    alone = worker_for(folder)
    (several,) = run(engine_for(alone), [(prompt, greedy(16, n=3))])
    (one,) = run(engine_for(alone), [([*prompt, 5], greedy(3))])
    for name, wanted in (("a", several), ("b", one)):
        assert [each.token_ids for each in done[name].outputs] == [each.token_ids for each in wanted.outputs]
