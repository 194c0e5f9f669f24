"""Who runs when: progress, fairness, limits, preemption. Tokens are checked too: the fake model reads all that it is
given.
"""

from __future__ import annotations

import random

import pytest

from fake_model import GREEDY, VOCAB, FakeClock, FakeModel, drain, expected_tokens, make_engine
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.looking import Looking
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.engine.scheduler import Scheduler
from nanovllm_cli.engine.sequence import Request, Sequence, Status
from nanovllm_cli.engine.strategy import Standard
from nanovllm_cli.sampling_params import SamplingParams


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random ones, of which a third begin alike."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(longest // 2)] for _ in range(5)]
    return [
        (rng.choice(stems) if rng.random() < 0.33 else [])
        + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest // 2))]
        for _ in range(count)
    ]


def fed(plan: Plan) -> dict[int, int]:
    return {each.seq_id: len(each.token_ids) for each in plan.scheduled}


def test_two_thousand_requests_in_a_tenth_of_the_memory_give_the_same_tokens() -> None:
    rng = random.Random(7)
    asked = {
        str(index): (prompt, rng.randint(1, 24), rng.choice((1, 1, 1, 1, 2, 4)))
        for index, prompt in enumerate(prompts(2000, 40))
    }
    demand = sum(-(-(len(prompt) + count) // 4) for prompt, count, _ in list(asked.values())[:48])
    engine, model = make_engine(num_blocks=demand // 10, max_num_seqs=48, max_num_batched_tokens=64)
    for name, (prompt, count, n) in asked.items():
        engine.add(name, prompt, params(count, n))
    before = -1
    last = {}
    while engine.has_unfinished():
        outputs = engine.step()
        assert outputs
        last.update({output.request_id: output for output in outputs})
        stats = engine.stats()
        assert stats.scheduled_tokens > before
        before = stats.scheduled_tokens
        assert stats.running <= 48
    assert model.violations == []
    for name, (prompt, count, n) in asked.items():
        assert [each.token_ids for each in last[name].outputs] == [expected_tokens(prompt, count)] * n
        assert all(each.finish_reason == "length" for each in last[name].outputs)
    stats = engine.stats()
    assert stats.used_blocks == stats.running == stats.waiting == 0
    assert stats.free_blocks + stats.cached_blocks == demand // 10
    assert 100 < stats.preemptions < 1500  # twice as many without room to grow
    # Preemption is bounded: what was computed twice is a fraction of what had to be computed.
    needed = sum(len(prompt) + count * n for prompt, count, n in asked.values())
    assert stats.scheduled_tokens < 2 * needed


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("num_blocks", [30, 1000])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_memory_do_not_change_tokens(chunk: int, num_blocks: int, caching: bool) -> None:
    engine, model = make_engine(
        num_blocks=num_blocks, max_num_batched_tokens=chunk, max_num_seqs=8, enable_prefix_caching=caching
    )
    asked = {str(index): prompt for index, prompt in enumerate(prompts(30, 60))}
    for name, prompt in asked.items():
        engine.add(name, prompt, params(10))
    last = drain(engine)
    assert model.violations == []
    assert {name: last[name].outputs[0].token_ids for name in asked} == {
        name: expected_tokens(prompt, 10) for name, prompt in asked.items()
    }
    assert engine.stats().used_blocks == 0


def test_a_step_mixes_decodes_and_prefill_chunks() -> None:
    engine, model = make_engine(max_num_batched_tokens=16)
    engine.add("short", [1, 2, 3], params(20))
    engine.step()
    engine.add("long", list(range(60)), params(20))
    for _ in range(4):
        engine.step()
        assert fed(model.plans[-1]) == {0: 1, 1: 15}
    assert drain(engine)["long"].outputs[0].token_ids == expected_tokens(list(range(60)), 20)


def test_decodes_go_on_while_long_prompts_come_in() -> None:
    engine, model = make_engine(num_blocks=500, max_num_batched_tokens=8)
    engine.add("first", [1], params(40))
    engine.step()
    for index in range(5):
        engine.add(f"long {index}", [index] * 100, params(1))
    for _ in range(39):
        engine.step()
        assert fed(model.plans[-1])[0] == 1


@pytest.mark.parametrize("budget", [1, 2, 4, 8])
def test_prompts_get_on_and_decodes_take_turns_where_decodes_fill_the_step(budget: int) -> None:
    engine, model = make_engine(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=budget)
    for index in range(3 * budget):
        engine.add(str(index), [index], params(300))
    for _ in range(20 * budget):
        engine.step()
    assert engine.stats().running == 3 * budget
    engine.add("late", [5] * 12, params(1))
    before = engine.stats().steps
    while "late" not in {output.request_id for output in engine.step() if output.finished}:
        assert engine.stats().steps - before < 12 * 4
    turns: dict[int, int] = {}
    for _ in range(12):
        engine.step()
        for seq_id, count in fed(model.plans[-1]).items():
            turns[seq_id] = turns.get(seq_id, 0) + count
    assert set(turns) == set(range(3 * budget))
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_request_that_lost_its_place_was_scheduled_when_it_first_was() -> None:
    clock = FakeClock()
    engine, _ = make_engine(max_num_seqs=1, policy="priority", clock=clock)
    engine.add("low", [1], params(5), priority=5)
    engine.step()
    begun, clock.now = clock.now, clock.now + 7
    engine.add("urgent", [2], params(2))
    outputs = drain(engine)
    assert engine.stats().preemptions == 1
    assert (outputs["low"].metrics.first_scheduled, outputs["urgent"].metrics.first_scheduled) == (begun, begun + 7)


def test_with_one_token_a_step_an_answer_and_a_prompt_take_turns() -> None:
    engine, model = make_engine(max_num_batched_tokens=1)
    engine.add("answer", [1], params(100))
    for _ in range(3):
        engine.step()
    engine.add("prompt", [2] * 40, params(1))
    for _ in range(20):
        engine.step()
    turns = [plan.scheduled[0].seq_id for plan in model.plans[-20:]]
    assert 8 <= turns.count(turns[0]) <= 12
    assert len(set(turns)) == 2


def test_one_token_a_step_is_enough_for_everybody() -> None:
    engine, model = make_engine(num_blocks=12, max_num_batched_tokens=1, max_num_seqs=5)
    asked = {str(index): prompt for index, prompt in enumerate(prompts(12, 20))}
    for name, prompt in asked.items():
        engine.add(name, prompt, params(6, n=2))
    last = drain(engine)
    assert all(last[name].outputs[1].token_ids == expected_tokens(prompt, 6) for name, prompt in asked.items())
    assert model.violations == []


def test_limits_hold_in_every_step() -> None:
    for budget, seats in ((1, 1), (3, 2), (5, 9), (64, 4)):
        engine, model = make_engine(num_blocks=40, max_num_batched_tokens=budget, max_num_seqs=seats)
        for index, prompt in enumerate(prompts(25, 30)):
            engine.add(str(index), prompt, params(5, n=1 + index % 3))
        drain(engine)
        assert model.violations == []
        assert max(sum(fed(plan).values()) for plan in model.plans) <= budget
        assert max(len(plan.scheduled) for plan in model.plans) <= seats


def test_first_come_first_served() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for index in range(6):
        engine.add(str(index), [index], params(2))
    assert list(drain(engine)) == [str(index) for index in range(6)]


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    engine, _ = make_engine(num_blocks=10, block_size=4)
    engine.add("running", [1] * 16, params(8))
    engine.step()
    engine.add("large", [2] * 30, params(1))
    engine.add("small", [3], params(1))
    engine.step()
    assert engine.stats().waiting == 2
    assert list(drain(engine)) == ["running", "large", "small"]


def order(engine: Engine) -> list[str]:
    done = []
    while engine.has_unfinished():
        done += [output.request_id for output in engine.step() if output.finished]
    return done


def test_urgent_requests_go_first() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 0), ("e", -3)):
        engine.add(name, [1], params(2), priority=priority)
    assert order(engine) == ["c", "e", "a", "d", "b"]


def test_waiting_is_worth_a_level_every_aging_seconds() -> None:
    clock = FakeClock()
    engine, _ = make_engine(max_num_seqs=1, policy="priority", aging_seconds=10.0, clock=clock)
    engine.add("patient", [1], params(1), priority=2)
    clock.now += 19
    engine.add("urgent", [1], params(1), priority=0)
    assert order(engine) == ["urgent", "patient"]
    engine.add("patient", [1], params(1), priority=2)
    clock.now += 21
    engine.add("urgent", [1], params(1), priority=0)
    assert order(engine) == ["patient", "urgent"]


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    clock = FakeClock()
    engine, _ = make_engine(max_num_seqs=1, policy="priority", aging_seconds=5.0, clock=clock)
    engine.add("patient", [1], params(1), priority=10)
    for turn in range(200):
        engine.add(str(turn), [1], params(1), priority=0)
        clock.now += 1.0
        if "patient" in {output.request_id for output in engine.step()}:
            break
    assert 45 <= turn <= 55


@pytest.mark.parametrize(("seats", "num_blocks"), [(2, 64), (64, 9)])
def test_running_ones_make_way_for_more_urgent_ones_only(seats: int, num_blocks: int) -> None:
    engine, model = make_engine(
        policy="priority", enable_prefix_caching=False, max_num_seqs=seats, num_blocks=num_blocks
    )
    for name, priority in (("middle", 5), ("low", 9)):
        engine.add(name, [priority] * 8, params(12), priority=priority)
    for _ in range(3):
        engine.step()
    engine.add("equal", [4] * 12, params(2), priority=9)
    engine.step()
    assert engine.stats().preemptions == 0
    engine.add("urgent", [3] * 20, params(1), priority=0)
    assert [output.request_id for output in engine.step() if output.outputs[0].token_ids][-1] == "urgent"
    last = drain(engine)
    assert last["low"].metrics.num_preemptions == 1
    assert last["low"].outputs[0].token_ids == expected_tokens([9] * 8, 12)
    assert last["middle"].metrics.num_preemptions == last["equal"].metrics.num_preemptions == 0
    assert model.violations == []


def test_nobody_makes_way_for_an_older_one_of_the_same_priority() -> None:
    """One that had to give up its blocks because the younger was in that step already: they would take turns at it."""
    engine, _ = make_engine(policy="priority", enable_prefix_caching=False, max_num_seqs=2, num_blocks=64)
    for name in ("older", "younger"):
        engine.add(name, [4] * 8, params(12), priority=5)
    engine.step()
    scheduler = engine._scheduler
    scheduler._preempt(scheduler.running[0])
    engine.add("urgent", [3] * 8, params(6), priority=0)  # takes its place
    last = drain(engine)
    assert {name: output.metrics.num_preemptions for name, output in last.items()} == {"older": 1, "younger": 0, "urgent": 0}
    assert [output.outputs[0].token_ids for output in last.values() if output.request_id != "urgent"] == [
        expected_tokens([4] * 8, 12)
    ] * 2


def test_who_has_waited_long_enough_makes_way_for_nobody() -> None:
    clock = FakeClock()
    engine, _ = make_engine(max_num_seqs=1, policy="priority", aging_seconds=5.0, clock=clock)
    engine.add("old", [1], params(20), priority=3)
    engine.step()
    clock.now += 14
    engine.add("urgent", [1], params(2), priority=0)
    engine.step()
    assert engine.stats().preemptions == 1
    drain(engine)
    engine.add("old", [1], params(20), priority=3)
    engine.step()
    clock.now += 16
    engine.add("urgent", [1], params(2), priority=0)
    drain(engine)
    assert engine.stats().preemptions == 1


def test_least_urgent_is_preempted_and_the_most_urgent_never() -> None:
    engine, model = make_engine(num_blocks=10, policy="priority", enable_prefix_caching=False)
    engine.add("low", [1] * 8, params(20), priority=3)
    engine.add("middle", [2] * 8, params(20), priority=2)
    engine.step()
    engine.add("high", [3] * 8, params(20), priority=1)
    last = drain(engine)
    assert last["high"].metrics.num_preemptions == 0
    assert last["low"].metrics.num_preemptions > 0
    assert last["low"].metrics.num_preemptions <= 2
    assert list(last) != []
    assert model.violations == []


def test_the_last_one_is_preempted_first() -> None:
    engine, _ = make_engine(num_blocks=9, enable_prefix_caching=False)
    for name in "abc":
        engine.add(name, [1] * 8, params(20))
    while engine.stats().preemptions == 0:
        engine.step()
    last = drain(engine)
    assert [last[name].metrics.num_preemptions > 0 for name in "abc"] == [False, True, True]
    assert list(last) == ["a", "b", "c"]


def test_a_waiting_request_enters_as_soon_as_there_is_room() -> None:
    engine, _ = make_engine(num_blocks=13, enable_prefix_caching=False)
    engine.add("long", [1] * 4, params(40))
    engine.add("short", [1] * 16, params(5))
    engine.add("waits", [1] * 30, params(1))
    last: dict[str, RequestOutput] = {}
    while "waits" not in last:
        last.update({output.request_id: output for output in engine.step()})
    assert last["short"].finished
    assert not last["long"].finished


def test_an_urgent_prompt_does_not_wait_for_the_chunks_of_another() -> None:
    engine, model = make_engine(num_blocks=200, max_num_batched_tokens=8, policy="priority")
    engine.add("long", [1] * 200, params(1), priority=1)
    engine.step()
    engine.add("urgent", [2] * 12, params(1), priority=0)
    engine.add("later", [3] * 12, params(1), priority=2)
    engine.step()
    assert fed(model.plans[-1]) == {1: 8}
    engine.step()
    assert fed(model.plans[-1]) == {1: 4, 0: 4}
    assert order(engine) == ["long", "later"]


def test_answers_that_are_to_fork_have_their_seats() -> None:
    engine, _ = make_engine(max_num_seqs=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    engine.add("three", list(range(19)), params(30, n=3))
    for index in range(5):
        engine.add(str(index), [index], params(30))
    drain(engine)
    assert engine.stats().scheduled_tokens == 19 + 3 * 29 + 5 * 30


def test_preempted_sequence_keeps_its_tokens_and_finds_its_blocks() -> None:
    engine, model = make_engine(num_blocks=12)
    asked = {"old": [1] * 9, "young": [2] * 9}
    for name, prompt in asked.items():
        engine.add(name, prompt, params(30))
    seen: dict[str, int] = {}
    last = {}
    while engine.has_unfinished():
        for output in engine.step():
            length = len(output.outputs[0].token_ids)
            assert length >= seen.get(output.request_id, 0)
            seen[output.request_id] = length
            last[output.request_id] = output
    assert last["young"].metrics.num_preemptions == 1
    assert last["old"].metrics.num_preemptions == 0
    assert last["young"].metrics.num_cached_tokens == 0  # finding its own blocks again does not count
    assert engine.stats().prefix_hit_tokens > 0
    assert last["young"].outputs[0].token_ids == expected_tokens(asked["young"], 30)
    assert model.violations == []


def test_forks_share_the_prompt_and_copy_its_partial_block() -> None:
    engine, model = make_engine(num_blocks=100, enable_prefix_caching=False)
    prompt = list(range(18))  # 4 full blocks and half of one
    engine.add("a", prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=5, n=3))
    (output,) = engine.step()
    assert len(model.plans[0].scheduled) == 1
    assert model.plans[0].scheduled[0].draws == (0, 1, 2)
    assert [len(each.token_ids) for each in output.outputs] == [1, 1, 1]
    assert engine.stats().used_blocks == 5
    engine.step()
    assert len(model.plans[1].copies) == 2  # the third keeps the original
    assert engine.stats().used_blocks == 4 + 3
    tables = [each.block_table for each in model.plans[1].scheduled]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    last = drain(engine)["a"]
    seeds = [new.seed for plan in model.plans for new in plan.new]
    assert seeds[0] == 5
    assert [each.token_ids for each in last.outputs] == [expected_tokens(prompt, 5, seed) for seed in seeds]
    assert len({each.token_ids for each in last.outputs}) == 3
    assert engine.stats().used_blocks == 0
    assert model.violations == []


def test_forks_on_a_block_border_copy_nothing() -> None:
    engine, model = make_engine()
    engine.add("a", [1] * 8, params(6, n=4))
    drain(engine)
    assert all(plan.copies == [] for plan in model.plans)
    assert model.violations == []


def test_forks_without_seats_or_blocks_wait_and_give_the_same_tokens() -> None:
    engine, model = make_engine(num_blocks=8, max_num_seqs=2)
    prompt = list(range(17))
    engine.add("a", prompt, params(10, n=6))
    engine.add("b", prompt[:5], params(10, n=6))
    last = drain(engine)
    assert [each.token_ids for each in last["a"].outputs] == [expected_tokens(prompt, 10)] * 6
    assert [each.token_ids for each in last["b"].outputs] == [expected_tokens(prompt[:5], 10)] * 6
    assert model.violations == []
    assert engine.stats().used_blocks == 0


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    engine, _ = make_engine(enable_prefix_caching=False)
    engine.add("a", list(range(30)), params(4, n=5))
    drain(engine)
    assert engine.stats().scheduled_tokens == 30 + 5 * 3


def test_sequences_are_introduced_before_they_draw_and_forgotten_once() -> None:
    engine, model = make_engine(num_blocks=20, max_num_seqs=6)
    for index, prompt in enumerate(prompts(40, 20)):
        engine.add(str(index), prompt, params(4, n=1 + index % 2))
    drain(engine)
    engine.add("last", [1], params(1))
    drain(engine)
    introduced = [new.seq_id for plan in model.plans for new in plan.new]
    forgotten = [seq_id for plan in model.plans for seq_id in plan.finished]
    assert len(introduced) == len(set(introduced)) == 61
    assert sorted(forgotten) == sorted(set(introduced) - {60})
    assert model.violations == []


def test_prompt_logprobs_come_whole_through_chunks_and_preemptions() -> None:
    engine, model = make_engine(num_blocks=16, max_num_batched_tokens=5)
    asked = {str(index): [(index + step) % VOCAB for step in range(20)] for index in range(8)}
    for name, prompt in asked.items():
        engine.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=14, prompt_logprobs=0, n=2))
    last = drain(engine)
    for name, prompt in asked.items():
        logprobs = last[name].prompt_logprobs
        assert logprobs is not None
        assert logprobs[0] is None
        assert [each.token_id for each in logprobs[1:] if each] == prompt[1:]
        assert last[name].outputs[1].token_ids == expected_tokens(prompt, 14)
    assert engine.stats().preemptions > 0
    assert model.violations == []


class Guessing:
    """Speculation's seam: feeds guesses behind the known token, some of them wrong. The fake model below verifies
    them.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def begin(self, num_decodes: int) -> None: ...

    def feed(self, sequence: Sequence, limit: int) -> list[int]:
        start = sequence.num_computed
        known = sequence.token_ids[start : start + limit]
        room = min(limit - len(known), sequence.request.max_len - len(sequence.token_ids) - 1, 3)
        if start + len(known) < len(sequence.token_ids) or sequence.pending or room <= 0:
            return known
        right = expected_tokens(sequence.token_ids, room)
        guesses = [token if self.rng.random() < 0.6 else (token + 1) % VOCAB for token in right]
        return known + guesses

    def num_valid(self, sequence: Sequence, fed: list[int], drawn: list[int]) -> int:
        num_known = len(sequence.token_ids) - sequence.num_computed
        return len(fed) if len(fed) <= num_known else num_known + len(drawn) - 1


class Verifying(FakeModel):
    def execute(self, plan: Plan) -> StepOutput:
        output = super().execute(plan)
        by_id = {each.seq_id: each for each in plan.scheduled}
        drawn = []
        for draw in output.drawn:
            each = by_id.get(draw.seq_id)
            count = each.num_guesses if each else 0
            if each is None or count == 0:
                drawn.append(draw)
                continue
            prefix = [self._at(each, position)[0] for position in range(each.start + len(each.token_ids) - count)]
            right = expected_tokens(prefix, count + 1)
            guesses = each.token_ids[-count:]
            accepted = next((index for index in range(count) if guesses[index] != right[index]), count)
            drawn.append(draw._replace(token_ids=list(right[: accepted + 1])))
        return output._replace(drawn=drawn)


def test_a_strategy_that_guesses_gives_the_same_tokens_in_fewer_steps() -> None:
    for num_blocks in (25, 300):
        model = Verifying(4)
        engine = Engine(
            model,
            EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=32),
            vocab_size=VOCAB,
            max_model_len=90,
            num_blocks=num_blocks,
            eos_ids=(5,),
            strategy=Guessing(random.Random(3)),
        )
        asked = {str(index): prompt for index, prompt in enumerate(prompts(40, 30))}
        for name, prompt in asked.items():
            engine.add(name, prompt, params(20, n=1 + len(prompt) % 2))
        last = drain(engine)
        assert model.violations == []
        for name, prompt in asked.items():
            right = expected_tokens(prompt, 20)
            right = right[: right.index(5) + 1] if 5 in right else right
            assert all(each.token_ids == right for each in last[name].outputs)
        assert engine.stats().used_blocks == 0
        answers = [answer for output in last.values() for answer in output.outputs]
        assert engine.stats().generated_tokens == sum(len(answer.token_ids) for answer in answers), "not those behind an end"
    assert engine.stats().steps < 40 * 20 / 8


def make_scheduler(num_blocks: int = 8) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks, 4)
    return Scheduler(EngineConfig(block_size=4), blocks, Standard(), FakeClock(), Looking()), blocks


def test_nothing_to_do_is_no_plan() -> None:
    scheduler, _ = make_scheduler()
    assert scheduler.plan() is None


def test_a_request_that_never_fits_is_an_internal_error_and_no_silent_standstill() -> None:
    scheduler, _ = make_scheduler(num_blocks=2)
    request = Request("r", tuple(range(20)), GREEDY, 30, (), 0.0)
    request.sequences = [Sequence(0, request, 0, 0, list(range(20)))]
    scheduler.add(request)
    with pytest.raises(AssertionError, match="progress"):
        scheduler.plan()


def test_a_broken_off_step_is_planned_again() -> None:
    scheduler, blocks = make_scheduler()
    request = Request("r", (1, 2, 3), SamplingParams(n=2), 30, (), 0.0)
    request.sequences = [Sequence(index, request, index, 0, [1, 2, 3]) for index in range(2)]
    scheduler.add(request)
    first = scheduler.plan()
    scheduler.rewind()
    assert blocks.num_used == 0
    again = scheduler.plan()
    assert first is not None
    assert again is not None
    assert [each._replace(block_table=[]) for each in first.scheduled] == [
        each._replace(block_table=[]) for each in again.scheduled
    ]
    assert first.new == again.new


@pytest.mark.parametrize("status", list(Status))
def test_ending_a_sequence_in_any_state_frees_it(status: Status) -> None:
    scheduler, blocks = make_scheduler()
    request = Request("r", tuple(range(9)), SamplingParams(n=2), 30, (), 0.0)
    request.sequences = [Sequence(index, request, index, 0, list(range(9))) for index in range(2)]
    scheduler.add(request)
    if status is not Status.WAITING:
        scheduler.plan()
    which = request.sequences[1 if status is Status.PENDING else 0]
    if status is Status.FINISHED:
        scheduler.finish(which)
    else:
        assert which.status is status
    scheduler.finish(which)
    other = next(each for each in request.sequences if each is not which)
    assert other.status in (Status.WAITING, Status.RUNNING)
    scheduler.finish(other)
    assert blocks.num_used == 0
    assert scheduler.plan() is None
