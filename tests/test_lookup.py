"""Speculation by looking up: the same tokens and log-probabilities to the bit, in fewer steps."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.config import MAX_GUESSES, EngineConfig
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine import cuda_runner, runner
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.plan import Drawn
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.engine.strategy import LONGEST_WAIT, MATCHED, MOST_ROWS, Lookup, Past
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint

# Few tokens, so that what was drawn comes again, and guesses hold now and then.
SHAPE = SMALL | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 259}
BYTES = [bytes([i]) for i in range(256)]
PROMPT = list(b"12 and 12 and 12 and 12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE)), tmp_path_factory.mktemp("model"))


def engine_with(folder: Path, num_guesses: int, **more: Any) -> Engine:
    config = EngineConfig(**{"num_blocks": 256, "threads": 2, "num_speculative_tokens": num_guesses} | more)
    with open_checkpoint(folder) as checkpoint:
        worker = Worker(checkpoint, config, lambda text: list(text.encode()), lambda: BYTES)
    return Engine(
        worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, eos_ids=(1,), prepare=worker.prepare,
    )  # fmt: skip


def answers(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """All there is to an answer; log-probabilities are compared to the bit."""
    outputs = [answer for output in run(engine, asked) for answer in output.outputs]
    return [(each.token_ids, each.logprobs, each.finish_reason, each.stop_reason, each.error) for each in outputs]


def few(**more: Any) -> SamplingParams:
    """Draws from three tokens, so that lookups hold often, and fail often."""
    return SamplingParams(**{"seed": 7, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": (49, 50, 32)} | more)


ASKED = {
    "greedy": greedy(90, allowed_token_ids=(49, 50, 32)),
    "random": few(),
    "filtered": few(temperature=1.7, top_k=2, top_p=0.9, min_p=0.01),
    "logprobs": few(logprobs=3),
    "penalties": few(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2, penalty_last_n=9),
    "dry": few(dry_multiplier=0.6, dry_sequence_breakers=(), dry_allowed_length=1),
    "bias": few(logit_bias={50: 1.5}, bad_words=("22",)),
    "several": few(n=3),
    "schema": few(allowed_token_ids=None, constraint=Constraint("regex", "(12 ){20}(21 )+")),
    "ends": SamplingParams(temperature=0.0, max_tokens=80, constraint=Constraint("regex", "(12 and ){6}")),
    "stop ids": few(ignore_eos=False, stop_token_ids=(50,), min_tokens=17),
    "prompt logprobs": few(prompt_logprobs=1, logprobs=0),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_the_same_to_the_bit(name: str, folder: Path) -> None:
    asked = [(PROMPT, ASKED[name]), (PROMPT[:9], ASKED[name])]
    plain, guessing = engine_with(folder, 0), engine_with(folder, 8)
    assert answers(guessing, asked) == answers(plain, asked)
    assert guessing.stats().steps < plain.stats().steps, "and some guess held"


@pytest.mark.parametrize("more", [{"quant": "int8"}, {"quant": "fp8"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}])
def test_rounded_weights_and_caches_too(more: dict[str, Any], folder: Path) -> None:
    asked = [(PROMPT, ASKED["logprobs"]), (PROMPT[:9], ASKED["greedy"])]
    assert answers(engine_with(folder, 8, **more), asked) == answers(engine_with(folder, 0, **more), asked)


def test_all_kinds_together_under_pressure(folder: Path) -> None:
    """Where blocks are so few that sequences lose theirs, and steps so small that guesses find no room."""
    r = random.Random(4)
    asked = [(PROMPT[: r.randint(4, len(PROMPT))], params) for params in ASKED.values() for _ in range(3)]
    r.shuffle(asked)
    plain = answers(engine_with(folder, 0, max_num_seqs=64), asked)
    for num_blocks, batched in ((40, 512), (24, 7), (256, 5)):
        pressed = engine_with(folder, 5, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=batched)
        assert answers(pressed, asked) == plain
        assert pressed.stats().used_blocks == 0
        assert (pressed.stats().preemptions > 0) == (num_blocks < 256)


def test_what_a_guess_costs_and_gives_is_counted(folder: Path) -> None:
    (output,) = run(engine_with(folder, 8), [(PROMPT, ASKED["ends"])])
    plain = engine_with(folder, 0)
    (other,) = run(plain, [(PROMPT, ASKED["ends"])])
    assert output.metrics.num_guessed_tokens >= output.metrics.num_held_tokens > 20
    assert (other.metrics.num_guessed_tokens, other.metrics.num_held_tokens) == (0, 0)


def test_a_draw_that_fails_behind_a_guess_ends_its_sequence_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it drew before, and with the error that it would have had without guesses."""

    def failing_at(count: int) -> list[Any]:
        engine = engine_with(folder, count)
        sample = Sampler.sample

        def sampled(self: Sampler, seq_ids: Any, logits: torch.Tensor, *more: Any) -> list[Drawn]:
            drawn: list[Drawn] = []
            for index, seq_id in enumerate(seq_ids):
                state = self._states[seq_id]
                if state.position == 33 and state.params.seed == 7:
                    drawn.append(Drawn(seq_id, [], error="it failed"))
                else:
                    drawn += sample(self, [seq_id], logits, [more[0][index]])
            return drawn

        with monkeypatch.context() as patched:
            patched.setattr(Sampler, "sample", sampled)
            return answers(engine, [(PROMPT, few(allowed_token_ids=(49,))), (PROMPT, few(seed=8))])

    plain, guessing = failing_at(0), failing_at(8)
    assert guessing == plain
    assert len(plain[0][0]) == 33
    assert plain[0][-1] == "it failed"
    assert plain[1][-1] is None


# ---- what is guessed ----


def looked_up(tokens: list[int], count: int) -> list[int]:
    """By its definition: the last earlier place that has the same tokens before it."""
    tail = tokens[-MATCHED:]
    places = [end for end in range(MATCHED, len(tokens)) if tokens[end - MATCHED : end] == tail]
    if not places or len(tokens) < MATCHED:
        return []
    longer = list(tokens)
    for _ in range(count):
        longer.append(longer[places[-1] + len(longer) - len(tokens)])
    return longer[len(tokens) :]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(1, 6), max_size=8), st.integers(1, 12))
def test_what_followed_last_time_is_guessed(tokens: list[int], steps: list[int], count: int) -> None:
    """Also where the sequence has grown by some tokens at a time since it was asked last."""
    past, size = Past(), len(tokens) - sum(steps)
    for step in [0, *steps]:
        size += step
        if size >= 0:
            assert past.find(tokens[:size], count) == looked_up(tokens[:size], count)


def sequence_of(tokens: list[int], num_computed: int, max_len: int = 10**6) -> Sequence:
    request = Request("r", tuple(tokens), SamplingParams(), max_len, (), 0.0)
    sequence = Sequence(0, request, 0, 0, list(tokens))
    sequence.num_computed = num_computed
    return sequence


REPEATS = [1, 2, 3, 4, 5, 6, 7, 8] * 9


@pytest.mark.parametrize(
    ("limit", "max_len", "num_decodes", "num_guesses"),
    [
        (100, 10**6, 1, 2),
        (2, 10**6, 1, 1),
        (1, 10**6, 1, 0),
        (100, len(REPEATS) + 1, 1, 0),
        (100, len(REPEATS) + 2, 1, 1),
        (100, 10**6, 12, 1),
        (100, 10**6, MOST_ROWS, 0),
    ],
)
def test_guesses_have_limits(limit: int, max_len: int, num_decodes: int, num_guesses: int) -> None:
    """The step's, the answer's, and those of a batch that has enough to compute."""
    lookup = Lookup(16)
    lookup.begin(num_decodes)
    fed = lookup.feed(sequence_of(REPEATS, len(REPEATS) - 1, max_len), limit)
    assert fed == [8, 1, 2, 3, 4, 5][: 1 + num_guesses]


def test_only_a_sequence_that_decodes_is_guessed_for() -> None:
    lookup = Lookup(16)
    lookup.begin(1)
    assert lookup.feed(sequence_of(REPEATS, 20), 100) == REPEATS[20:]
    forks = sequence_of(REPEATS, len(REPEATS) - 1)
    forks.pending = [sequence_of(REPEATS, 0)]
    assert lookup.feed(forks, 100) == [8]


def test_guesses_follow_their_luck() -> None:
    lookup, sequence = Lookup(64), sequence_of(REPEATS, len(REPEATS) - 1)
    lookup.begin(1)

    def step(num_held: int) -> int:
        """How many guesses there were, of which so many hold, or all."""
        fed = lookup.feed(sequence, 1000)
        drawn = [*fed[1 : 1 + num_held], 99]
        assert lookup.num_valid(sequence, fed, drawn) == len(drawn)
        return len(fed) - 1

    assert [step(100) for _ in range(5)] == [2, 4, 8, 16, 16], "powers of two, that MOST_ROWS has room for"
    assert [step(5), step(2), step(2), step(1), step(0)] == [16, 4, 2, 4, 1]
    tries = [index for index in range(120) if step(0)]
    assert tries[:5] == [1, 5, 13, 29, 61]
    assert tries[-1] - tries[-2] == 1 + LONGEST_WAIT
    for _ in range(LONGEST_WAIT):
        step(1)
    assert [step(100), step(100)] == [2, 4], "after one that held"


@pytest.mark.parametrize("count", [-1, MAX_GUESSES + 1])
def test_how_many_is_bounded(count: int) -> None:
    with pytest.raises(UsageError, match=f"between 0 and {MAX_GUESSES}"):
        EngineConfig(num_speculative_tokens=count)


def test_nobody_makes_way_for_guesses(folder: Path) -> None:
    """Three answers end with their second blocks, and guesses reach into a third. There is one."""
    form = greedy(40, constraint=Constraint("regex", "1{9}"))
    engine = engine_with(folder, 8, num_blocks=7, enable_prefix_caching=False)
    outputs = run(engine, [(PROMPT, form)] * 3)
    assert [len(output.prompt_token_ids) + output.outputs[0].num_tokens for output in outputs] == [32] * 3
    assert sum(output.metrics.num_held_tokens for output in outputs) > 4
    assert engine.stats().preemptions == 0


def broken_off_once(monkeypatch: pytest.MonkeyPatch, after: int) -> Any:
    """Breaks off a step of several sequences behind its first draws behind guesses, the one after so many. Returns what is left
    of it: nothing, once it has been."""
    draw, passed, failures = runner.draw_behind_guesses, itertools.count(), [RuntimeError("once")]

    def drawn(draws: list[runner.Draw], sample: Any) -> list[Drawn]:
        def sampled(going: list[runner.Draw], depth: int) -> list[Drawn]:
            found: list[Drawn] = sample(going, depth)
            if depth == 1 and len(draws) > 1 and next(passed) >= after and failures:
                raise failures.pop()
            return found

        return draw(draws, sampled)

    for module in (runner, cuda_runner):
        monkeypatch.setattr(module, "draw_behind_guesses", drawn)
    return failures


@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_is_broken_off_behind_a_guess_has_drawn_nothing(
    after: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(PROMPT, ASKED[name]) for name in ("dry", "penalties", "schema", "logprobs", "filtered")]
    expected = answers(engine_with(folder, 0), asked)
    left = broken_off_once(monkeypatch, after)
    assert answers(engine_with(folder, 8), asked) == expected
    assert not left
