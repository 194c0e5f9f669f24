"""Steps that begin before the last one's tokens are read: the same answers, one step sooner."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from fake_model import GREEDY, VOCAB, FakeDevice, drain, expected_tokens, make_engine
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.sampling_params import SamplingParams


def device_of(engine: Engine) -> FakeDevice:
    device = engine._ahead
    assert isinstance(device, FakeDevice)
    return device


def tokens_of(engine: Engine) -> dict[str, list[tuple[int, ...]]]:
    return {name: [each.token_ids for each in output.outputs] for name, output in drain(engine).items()}


def test_the_next_step_begins_before_the_last_one_is_read() -> None:
    engine, model = make_engine(ahead=True)
    engine.add("a", [1, 2, 3], replace(GREEDY, max_tokens=5))
    output = drain(engine)["a"]
    assert output.outputs[0].token_ids == expected_tokens([1, 2, 3], 5)
    log = device_of(engine).log
    assert log == ["submit", *["submit", "read"] * 4, "read"]
    assert not model.violations


def test_a_stop_token_wastes_one_step_and_shows_nothing_of_it() -> None:
    answer = expected_tokens([5, 6], 9)
    end = next(i for i in range(1, 9) if answer[i] not in answer[:i])
    engine, model = make_engine(ahead=True)
    engine.add("a", [5, 6], replace(GREEDY, max_tokens=20, stop_token_ids=(answer[end],)))
    engine.add("b", [7], replace(GREEDY, max_tokens=20))
    outputs = drain(engine)
    assert outputs["a"].outputs[0].token_ids == answer[: end + 1]
    assert outputs["a"].outputs[0].finish_reason == "stop"
    assert outputs["b"].outputs[0].token_ids == expected_tokens([7], 20)
    assert not model.violations


def test_blocks_and_sampler_states_are_all_given_back() -> None:
    engine, model = make_engine(ahead=True, eos_ids=(3, 4, 5, 6, 7, 8, 9, 10))
    for i in range(30):
        engine.add(str(i), [i % VOCAB, 2], replace(GREEDY, max_tokens=40))
    drain(engine)
    engine.add("last", [1], replace(GREEDY, max_tokens=2))
    drain(engine)
    assert engine.stats().used_blocks == 0
    assert len(model.known) <= 1, "forgotten with the next plan"
    assert not model.violations


def test_what_must_be_looked_at_is_not_run_ahead() -> None:
    engine, model = make_engine(ahead=True)
    engine.add("a", [1, 2], SamplingParams(temperature=0.0, max_tokens=4, logprobs=1))
    drain(engine)
    assert device_of(engine).log == ["submit", "read"] * 4
    assert not model.violations


def test_nobody_is_left_behind_by_those_who_were_in_the_step_before() -> None:
    engine, model = make_engine(ahead=True, max_num_batched_tokens=2)
    for name in "abc":
        engine.add(name, [1], replace(GREEDY, max_tokens=30))
    for _ in range(40):
        engine.step()
    fed = Counter(each.seq_id for plan in model.plans for each in plan.scheduled)
    assert len(fed) == 3
    assert max(fed.values()) - min(fed.values()) <= 2
    assert not model.violations


def test_an_urgent_request_does_not_wait_for_those_who_run_ahead() -> None:
    engine, model = make_engine(ahead=True, policy="priority", max_num_seqs=1)
    engine.add("low", [1], replace(GREEDY, max_tokens=30), priority=5)
    for _ in range(4):
        engine.step()
    engine.add("urgent", [2], replace(GREEDY, max_tokens=2))
    ended = [output.request_id for _ in range(6) for output in engine.step() if output.finished]
    assert ended == ["urgent"]
    assert not model.violations


def test_a_request_that_comes_in_is_let_in_by_the_next_free_plan() -> None:
    engine, model = make_engine(ahead=True)
    engine.add("a", [1], replace(GREEDY, max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.add("b", [2, 3], replace(GREEDY, max_tokens=3))
    for _ in range(3):
        engine.step()
    assert engine.stats().running == 2
    outputs = drain(engine)
    assert outputs["a"].outputs[0].token_ids == expected_tokens([1], 30)
    assert outputs["b"].outputs[0].token_ids == expected_tokens([2, 3], 3)
    assert not model.violations


def test_steps_run_ahead_of_a_request_that_has_no_room() -> None:
    engine, model = make_engine(ahead=True, num_blocks=10, enable_prefix_caching=False)
    engine.add("a", [1], replace(GREEDY, max_tokens=19))
    engine.step()
    engine.add("b", list(range(33)), replace(GREEDY, max_tokens=4))
    under_way = []
    while engine.stats().waiting:
        engine.step()
        under_way.append(engine._stepper._flight is not None)
    assert len(under_way) > 15
    assert under_way.count(False) <= 3, "as b comes, and as it enters"
    assert drain(engine)["b"].outputs[0].token_ids == expected_tokens(list(range(33)), 4)
    assert not model.violations


def test_an_aborted_request_leaves_the_others_as_they_are() -> None:
    engine, model = make_engine(ahead=True)
    engine.add("a", [1], replace(GREEDY, max_tokens=30))
    engine.add("b", [2], replace(GREEDY, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    outputs = drain(engine)
    assert outputs["b"].outputs[0].token_ids == expected_tokens([2], 30)
    assert engine.stats().used_blocks == 0
    assert not model.violations


def test_a_step_that_cannot_be_started_ahead_is_started_later() -> None:
    engine, model = make_engine(ahead=True)
    engine.add("a", [1], replace(GREEDY, max_tokens=10))
    refused = []

    def refuse_once(plan) -> None:
        if len(model.plans) == 4 and not refused:
            refused.append(plan)
            raise MemoryError("no room for a graph")

    model.before = refuse_once
    assert drain(engine)["a"].outputs[0].token_ids == expected_tokens([1], 10)
    assert refused
    assert not model.violations


def test_nothing_is_started_behind_a_step_that_could_not_start() -> None:
    """Its tokens are drawn only when it is tried again, and those of the step before must not be taken for them."""
    engine, model = make_engine(ahead=True)
    engine.add("a", [1], replace(GREEDY, max_tokens=10))
    refused = []

    def refuse_twice(plan) -> None:
        if len(model.plans) >= 4 and len(refused) < 2:
            refused.append(plan)
            raise MemoryError("no room for the step, be it ahead or not")

    model.before = refuse_twice
    assert drain(engine)["a"].outputs[0].token_ids == expected_tokens([1], 10)
    assert len(refused) == 2
    assert not model.violations


def test_a_row_that_fails_ends_its_own_request_only() -> None:
    engine, model = make_engine(ahead=True)
    engine.add("a", [1], replace(GREEDY, max_tokens=10))
    engine.add("b", [2], replace(GREEDY, max_tokens=10))
    model.draw_error = lambda scheduled, seq_id: "NaN" if seq_id == 0 and scheduled.start == 4 else None
    outputs = drain(engine)
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert outputs["b"].outputs[0].token_ids == expected_tokens([2], 10)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_give_the_same_answers_as_step_by_step(seed: int, policy: str) -> None:
    """Few blocks, n > 1, stops, common prefixes, late arrivals, aborts."""
    answers = []
    for ahead in (False, True):
        r = random.Random(seed)
        engine, model = make_engine(
            ahead=ahead, num_blocks=40, max_num_seqs=6, max_num_batched_tokens=16, eos_ids=(11,), policy=policy
        )
        found: dict[str, list[tuple[int, ...]]] = {}
        aborted = set()
        for i in range(60):
            prompt = [9, 8, 7, 6, 5][: r.randint(0, 5)] + [r.randrange(VOCAB) for _ in range(r.randint(1, 20))]
            params = SamplingParams(
                temperature=float(r.random() < 0.5), seed=i, max_tokens=r.randint(1, 30), n=r.choice((1, 1, 1, 3)),
                logprobs=r.choice((None, None, None, 1)),
            )  # fmt: skip
            engine.add(str(i), prompt, params, priority=r.randint(0, 3) if policy == "priority" else 0)
            if r.random() < 0.1:
                aborted.add(str(i))
                engine.abort(str(i))
            for _ in range(r.randint(0, 5)):
                for output in engine.step():
                    found[output.request_id] = [each.token_ids for each in output.outputs]
        found |= tokens_of(engine)
        answers.append({name: ids for name, ids in found.items() if name not in aborted})
        assert not model.violations
        assert engine.stats().used_blocks == 0
    assert answers[0] == answers[1]
