"""States: who holds them, which are kept behind blocks, and what is to be copied; by numbers alone."""

from __future__ import annotations

import random

import pytest

from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.sequence import NO_STATE, Request, Sequence
from nanovllm_cli.engine.states import StatePool, num_copies
from nanovllm_cli.sampling_params import SamplingParams

SIZE = 16


def sequence_of(token_ids: list[int]) -> Sequence:
    request = Request("r", tuple(token_ids), SamplingParams(), len(token_ids) + 1000, (), 0.0)
    return Sequence(0, request, 0, 0, list(token_ids))


def compute(blocks: BlockManager, sequence: Sequence) -> list[tuple[int, int]]:
    """Its prompt, chunk by chunk, and a draw. Returns the copies that were due, by the number of tokens behind which."""
    copies = []
    while sequence.num_computed < len(sequence.token_ids):
        pair = blocks.states.copy_due(sequence, 1)
        if pair is not None:
            copies.append((sequence.num_computed, pair[1]))
        left = len(sequence.token_ids) - sequence.num_computed
        sequence.num_computed += blocks.states.chunk(sequence, left)
    blocks.register(sequence)
    return copies


def admitted(blocks: BlockManager, token_ids: list[int]) -> Sequence:
    sequence = sequence_of(token_ids)
    assert blocks.admit(sequence, 0)
    blocks.states.drop(source for source, _ in blocks.states.take_sources([sequence]))
    return sequence


def test_the_copy_that_was_used_least_recently_goes() -> None:
    pool = StatePool(3)
    for block in (10, 11, 12):
        state = pool.take()
        assert state is not None
        pool.keep(block, state)
    pool.use(10)
    taken = pool.take()
    assert (pool.behind(10) is None, pool.behind(11) is None, pool.behind(12) is None) == (False, True, False)
    assert taken is not None
    pool.drop(taken)
    assert pool.num_free == 1


def test_what_is_held_is_never_taken() -> None:
    pool = StatePool(2)
    kept, other = pool.take(), pool.take()
    assert kept is not None
    assert other is not None
    pool.keep(7, kept)
    pool.hold(kept)  # a copy is to be made of it
    assert pool.take() is None
    pool.drop(kept)
    assert pool.take() == kept
    assert pool.behind(7) is None


def test_a_state_behind_a_block_stays_where_there_is_one() -> None:
    pool = StatePool(2)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.keep(7, first)
    pool.keep(7, second)
    assert pool.behind(7) == first
    assert pool.num_free == 1


@pytest.mark.parametrize(
    ("prompt_len", "behind"),
    [(1, []), (128, []), (129, [128]), (300, [128, 256, 288]), (513, [128, 256, 512]), (1000, [128, 256, 512, 992])],
)
def test_copies_are_made_behind_powers_of_two_and_the_last_whole_block(prompt_len: int, behind: list[int]) -> None:
    blocks = BlockManager(100, SIZE, num_states=9)
    sequence = admitted(blocks, list(range(prompt_len)))
    assert [num_tokens for num_tokens, _ in compute(blocks, sequence)] == behind
    assert num_copies(prompt_len, SIZE) == len(behind)
    assert blocks.states.pool.num_kept == len(behind)
    blocks.release(sequence)
    again = admitted(blocks, list(range(prompt_len)))
    assert again.num_computed == max(behind, default=0)


def test_nothing_is_copied_twice() -> None:
    blocks = BlockManager(200, SIZE, num_states=9)
    first = admitted(blocks, list(range(600)))
    compute(blocks, first)
    second = admitted(blocks, [*range(590), *range(1000, 1040)])
    assert second.num_computed == 512
    assert [num_tokens for num_tokens, _ in compute(blocks, second)] == [624]


def test_answers_are_copied_now_and_then() -> None:
    blocks = BlockManager(200, SIZE, num_states=9)
    sequence = admitted(blocks, list(range(250)))
    compute(blocks, sequence)
    found = []
    for token in range(600):
        sequence.token_ids.append(token)
        if blocks.states.copy_due(sequence, 1) is not None:
            found.append(sequence.num_computed)
        sequence.num_computed += 1
        blocks.grow(sequence, len(sequence.token_ids))
        blocks.register(sequence)
    assert found == list(range(256, 850, 64))
    kept = [index * SIZE for index, block in enumerate(sequence.block_table, 1) if blocks.states.pool.behind(block) is not None]
    assert kept == [128, 240, 256, 512, 768, 832]  # two of its prompt, then each 256, and the latest


def test_of_many_answers_the_latest_are_not_copied() -> None:
    states = BlockManager(20, SIZE, num_states=2).states
    assert [n for n in range(1, 600) if states.is_copied_at(n, 8)] == list(range(64, 600, 64))
    assert [n for n in range(1, 600) if states.is_copied_at(n, 9)] == [256, 512]


def test_who_gets_no_state_changes_nothing() -> None:
    blocks = BlockManager(100, SIZE, num_states=2)
    first, second = admitted(blocks, list(range(40))), admitted(blocks, list(range(40, 80)))
    compute(blocks, first)
    before = blocks.num_available
    assert not blocks.admit(third := sequence_of([1]), 0)
    assert not blocks.fork(first, third)
    assert (third.block_table, third.state, third.state_source, blocks.num_available) == ([], NO_STATE, NO_STATE, before)
    blocks.release(second)
    assert blocks.admit(third, 0)


def test_a_fork_gets_a_copy_before_anybody_runs() -> None:
    blocks = BlockManager(100, SIZE, num_states=4)
    parent, child = admitted(blocks, list(range(40))), sequence_of(list(range(40)))
    compute(blocks, parent)
    assert blocks.fork(parent, child)
    own = parent.state
    blocks.release(parent)  # it has ended meanwhile; what the copy is made of is held
    assert blocks.states.take_sources([child]) == [(own, child.state)]
    assert blocks.states.pool.num_free == 2
    blocks.states.drop([own])
    assert blocks.states.pool.num_free == 3


def test_a_block_that_is_evicted_takes_its_state_along() -> None:
    blocks = BlockManager(10, SIZE, num_states=4)
    first = admitted(blocks, list(range(150)))
    compute(blocks, first)
    blocks.release(first)
    assert blocks.states.pool.num_kept == 2
    other = admitted(blocks, list(range(1000, 1160)))
    assert blocks.states.pool.num_kept == 0
    blocks.release(other)
    assert blocks.states.pool.num_free == 4


def test_numbers_that_went_bad_leave_no_state() -> None:
    blocks = BlockManager(100, SIZE, num_states=9)
    sequence = admitted(blocks, list(range(300)))
    while sequence.num_computed < 300:
        blocks.states.copy_due(sequence, 1)
        sequence.num_computed += blocks.states.chunk(sequence, 300 - sequence.num_computed)
    blocks.distrust(sequence)
    blocks.release(sequence)
    assert blocks.states.pool.num_free == 9


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_state_is_lost_or_shared(seed: int) -> None:
    """Random admissions, steps, forks, ends: every state is free, somebody's own, or kept behind a block that is found."""
    r = random.Random(seed)
    blocks = BlockManager(40, SIZE, num_states=r.choice((1, 3, 7)))
    there: list[Sequence] = []
    text = [r.randrange(3) for _ in range(400)]
    for _ in range(400):
        roll = r.random()
        if roll < 0.3:
            sequence = sequence_of(text[: r.choice((5, 129, 140, 260, 300))] + [r.randrange(9) for _ in range(r.randrange(3))])
            if blocks.admit(sequence, 0):
                there.append(sequence)
        elif roll < 0.8 and there:
            sequence = r.choice(there)
            held = [source for source, _ in blocks.states.take_sources(there)]
            left = len(sequence.token_ids) - sequence.num_computed
            end = sequence.num_computed + (blocks.states.chunk(sequence, r.randint(1, left)) if left else 0)
            if left and blocks.missing(sequence, end) <= blocks.num_available:
                if (copied := blocks.grow(sequence, end)) is not None:
                    blocks.unpin(copied[0])
                blocks.states.copy_due(sequence, 1)
                sequence.num_computed = end
            if sequence.num_computed == len(sequence.token_ids) and r.random() < 0.5:
                (blocks.register if r.random() < 0.8 else blocks.distrust)(sequence)
            blocks.states.drop(held)
        elif roll < 0.85 and there:
            child = sequence_of((parent := r.choice(there)).token_ids)
            if parent.state_source == NO_STATE and blocks.fork(parent, child):
                there.append(child)
        elif there:
            blocks.release(there.pop(r.randrange(len(there))))
        owned = [each.state for each in there] + [state for each in there for _, state in each.kept_states]
        assert len(set(owned)) == len(owned)
        pool = blocks.states.pool
        assert pool.num_free + len(owned) + pool.num_kept >= blocks.states.num_states - len(there)  # sources are held besides
    for sequence in there:
        blocks.release(sequence)
    assert pool.num_free + pool.num_kept == blocks.states.num_states


def test_where_a_second_prompt_parts_from_the_first_a_third_goes_on() -> None:
    blocks = BlockManager(200, SIZE, num_states=20)
    begin = list(range(1000, 1500))
    found = []
    for i in range(3):
        sequence = admitted(blocks, [*begin, *[i] * 100])
        found.append((sequence.num_computed, [count for count, _ in compute(blocks, sequence)]))
        blocks.release(sequence)
    assert found == [(0, [128, 256, 512, 592]), (256, [496, 512, 592]), (496, [512, 592])]


def test_a_parting_near_a_state_is_worth_none() -> None:
    blocks = BlockManager(200, SIZE, num_states=20)
    begin = list(range(1000, 1380))  # 124 tokens behind 256, of which 112 are in blocks
    for i in range(2):
        sequence = admitted(blocks, [*begin, *[i] * 100])
        copies = [count for count, _ in compute(blocks, sequence)]
        blocks.release(sequence)
    assert copies == [464]


def test_where_prompts_that_run_together_part_is_seen_too() -> None:
    blocks = BlockManager(200, SIZE, num_states=20)
    begin = list(range(1000, 1500))
    first, second = (admitted(blocks, [*begin, *[i] * 100]) for i in range(2))
    assert second.num_computed == 0
    compute(blocks, first)
    assert blocks.adopt(second) == 256
    blocks.states.drop(source for source, _ in blocks.states.take_sources([second]))
    assert [count for count, _ in compute(blocks, second)] == [496, 512, 592]


def test_blocks_that_were_found_and_could_not_be_gone_on_behind_are_as_new_as_what_comes_behind_them() -> None:
    """The second prompt computes again what lies behind the last state that it shares; others' blocks of it are what is found."""
    blocks = BlockManager(40, SIZE, num_states=10)
    begin = list(range(1000, 1200))
    for end in (1, 2):
        sequence = admitted(blocks, [*begin, *[end] * 100])
        compute(blocks, sequence)
        blocks.release(sequence)
    running = admitted(blocks, list(range(5000, 5000 + 23 * SIZE)))  # nine blocks more than are free
    blocks.release(running)
    assert admitted(blocks, [*begin, *[2] * 100]).num_computed >= 256
