"""What the prefix cache finds, and what it must never find. A prompt of the fake model proves the content of its
blocks.
"""

from __future__ import annotations

import pytest

from fake_model import GREEDY, drain, expected_tokens, make_engine
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.plan import Drawn, Plan, StepOutput
from nanovllm_cli.engine.prefix_cache import PrefixCache
from nanovllm_cli.errors import RequestError
from nanovllm_cli.sampling_params import SamplingParams

PROMPT = [index * 7 % 97 for index in range(21)]  # five full blocks of 4 and one token


def ask(engine: Engine, name: str, prompt: list[int], *, salt: str | None = None, **params: object) -> int:
    """Runs one request to its end; returns how many of its prompt tokens were found."""
    settings = {"temperature": 0.0, "max_tokens": 3, **params}
    engine.add(name, prompt, SamplingParams(**settings), cache_salt=salt)  # type: ignore[arg-type]
    output = drain(engine)[name]
    assert output.outputs[0].token_ids == expected_tokens(prompt, len(output.outputs[0].token_ids))
    return output.metrics.num_cached_tokens


def test_second_request_computes_only_what_is_new() -> None:
    engine, model = make_engine()
    assert ask(engine, "a", PROMPT) == 0
    fed = engine.stats().scheduled_tokens
    assert ask(engine, "b", PROMPT) == 20
    assert engine.stats().scheduled_tokens - fed == 1 + 2
    assert ask(engine, "c", [*PROMPT[:10], 5, 5, 5]) == 8
    assert ask(engine, "d", PROMPT[1:]) == 0
    assert engine.stats().prefix_hit_tokens == 28
    assert model.violations == []


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_last_prompt_token_is_always_computed(length: int) -> None:
    engine, model = make_engine()
    ask(engine, "a", PROMPT[:length], max_tokens=12)
    assert ask(engine, "b", PROMPT[:length]) == (length - 1) // 4 * 4
    assert model.violations == []


def test_answers_are_found_too() -> None:
    engine, _ = make_engine()
    ask(engine, "a", PROMPT, max_tokens=12)
    whole = [*PROMPT, *expected_tokens(PROMPT, 12)]
    assert ask(engine, "b", [*whole, 1]) == 32  # 21 + 12 tokens, but the K and V of the last one were never computed


def test_salt_separates() -> None:
    engine, model = make_engine()
    assert ask(engine, "a", PROMPT, salt="one") == 0
    assert ask(engine, "b", PROMPT, salt="two") == 0
    assert ask(engine, "c", PROMPT) == 0
    assert ask(engine, "d", PROMPT, salt="") == 0
    assert ask(engine, "e", PROMPT, salt="one") == ask(engine, "f", PROMPT) == 20
    assert model.violations == []


def test_salt_may_be_any_string() -> None:
    engine, _ = make_engine()
    assert ask(engine, "a", PROMPT, salt="\ud800") == 0  # as JSON may have it, and UTF-8 not
    assert ask(engine, "b", PROMPT, salt="\ud801") == 0
    assert ask(engine, "c", PROMPT, salt="\ud800") == 20


def test_a_block_is_known_by_all_that_stands_before_it() -> None:
    engine, model = make_engine()
    other = [*PROMPT[:4], 5, 5, 5, 5, *PROMPT[8:]]
    assert (ask(engine, "a", PROMPT), ask(engine, "b", other)) == (0, 4)
    assert (ask(engine, "c", PROMPT), ask(engine, "d", other)) == (20, 20)
    assert model.violations == []


def test_digests_depend_on_the_process() -> None:
    engines = [make_engine(cache_salt_secret=secret)[0] for secret in (None, None, b"x", b"x")]
    for engine in engines:
        ask(engine, "a", PROMPT)
    prefixes = [engine._blocks._prefixes for engine in engines]
    digests = [set(each._by_digest) for each in prefixes if each is not None]
    assert digests[0].isdisjoint(digests[1])
    assert digests[2] == digests[3]


def test_switched_off_finds_nothing() -> None:
    engine, _ = make_engine(enable_prefix_caching=False)
    assert ask(engine, "a", PROMPT) == ask(engine, "b", PROMPT) == 0
    assert engine.stats().cached_blocks == 0


def test_prompt_logprobs_want_every_row_computed() -> None:
    engine, model = make_engine()
    ask(engine, "a", PROMPT)
    assert ask(engine, "b", PROMPT, prompt_logprobs=0) == 0
    rows = [len(each.targets) for plan in model.plans for each in plan.scheduled if each.prompt_logprobs is not None]
    assert sum(rows) == len(PROMPT) - 1
    assert ask(engine, "c", PROMPT) == 20


@pytest.mark.parametrize("digest", [lambda self, data: b"same", lambda self, data: bytes([sum(data) % 3])])
def test_colliding_digests_never_mix_prompts(digest: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_hash", digest)
    engine, model = make_engine(num_blocks=24)
    prompts = [[1] * 9, [2] * 9, [1] * 13, [2, 2, 2, 2, 1, 1, 1, 1, 5], [1, 1, 1, 1, 2, 2, 2, 2, 5]]
    for salt in (None, "a", "b"):
        for turn in range(4):
            for index, prompt in enumerate(prompts):
                ask(engine, f"{turn} {index} {salt}", prompt, salt=salt)
    assert model.violations == []
    stats = engine.stats()
    assert stats.used_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == 24


def test_colliding_digests_do_not_betray_another_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_hash", lambda self, data: b"same")
    engine, _ = make_engine()
    assert ask(engine, "a", [1] * 5, salt="one", max_tokens=1) == 0
    assert ask(engine, "b", [1] * 5, salt="two", max_tokens=1) == 0
    assert ask(engine, "c", [1] * 5, salt="two", max_tokens=1) == 4


def test_equal_block_at_another_place_is_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_hash", lambda self, data: b"same")
    engine, model = make_engine()
    ask(engine, "a", [1] * 5, max_tokens=1)
    ask(engine, "b", [1] * 9, max_tokens=1)
    assert model.violations == []


def test_least_recently_used_goes_first() -> None:
    engine, _ = make_engine(num_blocks=12)
    first, second, third = ([token] * 9 for token in (1, 2, 3))  # 2 full blocks stay of each
    for name, prompt in (("a", first), ("b", second), ("c", third)):
        ask(engine, name, prompt, max_tokens=1)
    assert ask(engine, "d", first, max_tokens=1) == 8  # used again: now the second is the oldest
    assert engine.stats().cached_blocks == 6
    ask(engine, "e", [9] * 25, max_tokens=1)  # 7 blocks: the 6 free ones and one more
    assert ask(engine, "f", first, max_tokens=1) == 8
    assert ask(engine, "g", third, max_tokens=1) == 8
    assert ask(engine, "h", second, max_tokens=1) == 4  # it lost its end, not its beginning


def test_blocks_in_use_are_never_evicted() -> None:
    engine, model = make_engine(num_blocks=10)
    ask(engine, "a", PROMPT[:9], max_tokens=1)
    engine.add("b", PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=20))
    engine.step()
    for turn in range(4):
        engine.add(f"c{turn}", [turn] * 10, SamplingParams(temperature=0.0, max_tokens=5))
    last = drain(engine)
    assert last["b"].outputs[0].token_ids == expected_tokens(PROMPT[:9], 20)
    assert model.violations == []


def test_unfinished_prompt_is_not_findable() -> None:
    engine, model = make_engine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, GREEDY)
    engine.step()
    engine.step()
    assert engine.stats().cached_blocks == 0
    engine.abort("a")
    assert engine.stats().cached_blocks == 0
    assert ask(engine, "b", PROMPT) == 0
    assert model.violations == []


def test_errors_never_enter_and_take_out_what_they_touched() -> None:
    engine, model = make_engine()
    model.draw_error = lambda scheduled, seq_id: "not a number" if seq_id == 0 else None
    engine.add("bad", PROMPT, GREEDY)
    assert drain(engine)["bad"].outputs[0].error == "not a number"
    assert engine.stats().cached_blocks == 0
    assert ask(engine, "a", PROMPT) == 0

    model.draw_error = lambda scheduled, seq_id: "not a number" if scheduled.start > 22 and seq_id == 2 else None
    engine.add("late", PROMPT, GREEDY)  # finds the good blocks of "a", then goes bad
    late = drain(engine)["late"]
    assert late.metrics.num_cached_tokens == 20
    assert late.outputs[0].finish_reason == "error"
    assert ask(engine, "b", PROMPT) == 0


def test_what_a_request_makes_impossible_takes_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it found, as nothing was drawn that would prove it sound."""
    engine, model = make_engine()
    assert ask(engine, "a", PROMPT) == 0
    with monkeypatch.context() as patched:
        execute = model.execute

        def refusing(plan: Plan) -> StepOutput:
            drawn = [Drawn(each.seq_id, [], error="all are banned", unmeetable=True) for each in execute(plan).drawn]
            return StepOutput(drawn, {})

        patched.setattr(model, "execute", refusing)
        engine.add("bad", [*PROMPT, *PROMPT], GREEDY)
        assert drain(engine)["bad"].outputs[0].unmeetable
    assert ask(engine, "b", [*PROMPT, *PROMPT]) == 20


def test_rows_that_raised_never_enter() -> None:
    engine, model = make_engine()

    def fail(plan: object) -> None:
        raise RequestError("broken")

    model.midway = fail
    engine.add("bad", PROMPT, GREEDY)
    assert drain(engine)["bad"].outputs[0].error == "broken"
    model.midway = lambda plan: None
    assert engine.stats().cached_blocks == 0
    assert ask(engine, "a", PROMPT) == 0


def test_a_row_that_raises_takes_out_what_it_had_found() -> None:
    engine, model = make_engine()
    assert ask(engine, "a", PROMPT) == 0

    def fail(plan: object) -> None:
        raise RequestError("broken")

    model.midway = fail
    engine.add("bad", PROMPT, GREEDY)
    assert drain(engine)["bad"].metrics.num_cached_tokens == 20
    model.midway = lambda plan: None
    assert ask(engine, "b", PROMPT) == 0


def test_answers_of_forks_are_found_whole() -> None:
    engine, model = make_engine()
    engine.add("a", PROMPT, SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12))
    for output in drain(engine)["a"].outputs:
        assert ask(engine, f"b{output.index}", [*PROMPT, *output.token_ids, 1], max_tokens=1) == 32
    assert model.violations == []


def test_blocks_computed_again_after_a_preemption_are_findable_again() -> None:
    engine, model = make_engine(num_blocks=9)
    engine.add("old", [1] * 9, SamplingParams(temperature=0.0, max_tokens=20))
    engine.add("young", PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=20))
    last = drain(engine)
    assert last["young"].metrics.num_preemptions == 1
    whole = [*PROMPT[:9], *last["young"].outputs[0].token_ids]
    assert ask(engine, "b", whole, max_tokens=1) == 28
    assert model.violations == []


def test_prompt_that_another_request_computed_meanwhile_is_taken_over() -> None:
    engine, model = make_engine(max_num_batched_tokens=32, num_blocks=200)
    shared = [index % 89 for index in range(100)]
    for index in range(5):
        engine.add(str(index), [*shared, index], SamplingParams(temperature=0.0, max_tokens=2))
    last = drain(engine)
    for index in range(5):
        assert last[str(index)].outputs[0].token_ids == expected_tokens([*shared, index], 2)
    assert model.violations == []
    assert last["1"].metrics.num_cached_tokens > 60  # it began in the same step in which the first one ended
    assert engine.stats().scheduled_tokens < 101 + 5 * 32
