"""The block manager against a naive model of a cache that really holds something."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.sequence import Request, Salt, Sequence
from nanovllm_cli.sampling_params import SamplingParams

SIZE = 4


SALTS: list[Salt] = [(None, ()), ("a", ()), ("a", (1.0, 0.0)), (None, (0.0, 1.0))]


def sequence_of(tokens: list[int], salt: Salt = (None, ())) -> Sequence:
    request = Request("r", tuple(tokens), SamplingParams(), 1000, (), 0.0, cache_salt=salt[0], lora=salt[1])
    return Sequence(0, request, 0, 0, list(tokens))


def compute(blocks: BlockManager, sequence: Sequence, end: int) -> None:
    copy = blocks.grow(sequence, end)
    if copy is not None:
        blocks.unpin(copy[0])
    sequence.num_computed = end


def test_admitted_sequence_holds_just_the_blocks_of_its_tokens() -> None:
    blocks = BlockManager(10, SIZE)
    for length, expected in ((1, 1), (4, 1), (5, 2), (17, 5)):
        sequence = sequence_of(list(range(length)))
        assert blocks.admit(sequence, 0)
        assert len(sequence.block_table) == expected == blocks.num_used
        blocks.release(sequence)
        assert blocks.num_available == 10


def test_admission_that_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(4, SIZE)
    cached = sequence_of(list(range(9)))
    assert blocks.admit(cached, 0)
    compute(blocks, cached, 9)
    blocks.register(cached)
    blocks.release(cached)
    before = (blocks.num_available, blocks.num_cached)
    too_long = sequence_of(list(range(17)))
    assert not blocks.admit(too_long, 0)
    assert not blocks.admit(sequence_of(list(range(13))), 1)
    assert (blocks.num_available, blocks.num_cached) == before
    assert too_long.block_table == []
    assert too_long.num_computed == 0


def test_blocks_that_somebody_else_uses_take_no_room() -> None:
    blocks = BlockManager(4, SIZE)
    first, second = sequence_of(list(range(9))), sequence_of(list(range(9)))
    assert blocks.admit(first, 0)
    compute(blocks, first, 9)
    blocks.register(first)
    assert blocks.num_available == 1  # the second one's last block; the two before it are the first one's
    assert blocks.admit(second, 0)
    assert second.num_computed == 8
    assert blocks.num_available == 0


def test_what_is_taken_over_counts_from_where_the_prompt_was() -> None:
    blocks = BlockManager(20, SIZE)
    whole, late = sequence_of(list(range(13))), sequence_of(list(range(13)))
    assert blocks.admit(whole, 0)
    assert blocks.admit(late, 0)
    compute(blocks, late, 4)
    compute(blocks, whole, 13)
    blocks.register(whole)
    assert blocks.adopt(late) == 8
    assert late.num_computed == 12


def test_behind_a_block_that_was_forgotten_nothing_is_taken_over() -> None:
    blocks = BlockManager(20, SIZE)
    whole = sequence_of(list(range(9)))
    assert blocks.admit(whole, 0)
    compute(blocks, whole, 9)
    blocks.register(whole)
    bad = sequence_of([0, 1, 2, 3, 90, 91])
    assert blocks.admit(bad, 0)
    blocks.distrust(bad)  # and so the first block of both
    late = sequence_of(list(range(13)))
    assert blocks.admit(late, 0)
    compute(blocks, late, 5)
    assert blocks.adopt(late) == 0
    assert late.num_computed == 5


def test_a_prompt_that_is_looked_up_when_its_last_block_is_begun_is_findable_when_that_is_full() -> None:
    blocks = BlockManager(20, SIZE)
    sequence = sequence_of(list(range(6)))
    assert blocks.admit(sequence, 0)
    compute(blocks, sequence, 4)
    assert blocks.adopt(sequence) == 0
    sequence.token_ids += [6, 7, 8]
    compute(blocks, sequence, 8)
    blocks.register(sequence)
    again = sequence_of(list(range(9)))
    assert blocks.admit(again, 0)
    assert again.num_computed == 8


def test_writing_into_a_shared_block_moves_the_writer_and_not_the_others() -> None:
    blocks = BlockManager(8, SIZE)
    parent = sequence_of([1, 2, 3, 4, 5, 6])
    assert blocks.admit(parent, 0)
    compute(blocks, parent, 6)
    children = [sequence_of([1, 2, 3, 4, 5, 6, 7 + index]) for index in range(2)]
    for child in children:
        blocks.fork(parent, child)
    assert blocks.num_used == 2
    shared = parent.block_table[1]
    copies = [blocks.grow(each, 7) for each in (parent, *children)]
    assert [copy and copy[0] for copy in copies] == [shared, shared, None]  # the last one keeps it
    for copy in copies[:2]:
        assert copy is not None
        blocks.unpin(copy[0])
    assert blocks.num_used == 1 + 3
    assert blocks.missing(children[1], 7) == 0  # nor when the copies have been made
    assert blocks.grow(children[1], 7) is None
    assert len({each.block_table[1] for each in (parent, *children)}) == 3


def test_last_holder_writes_in_place() -> None:
    blocks = BlockManager(8, SIZE)
    parent, child = sequence_of([1, 2, 3, 4, 5, 6]), sequence_of([1, 2, 3, 4, 5, 6, 7])
    assert blocks.admit(parent, 0)
    compute(blocks, parent, 6)
    blocks.fork(parent, child)
    blocks.release(parent)
    assert blocks.missing(child, 7) == 0
    assert blocks.grow(child, 7) is None


def test_block_under_copy_is_not_handed_out_before_the_copy_is_made() -> None:
    blocks = BlockManager(3, SIZE, enable_prefix_caching=False)
    parent, child = sequence_of([1, 2]), sequence_of([1, 2, 3])
    assert blocks.admit(parent, 0)
    compute(blocks, parent, 2)
    blocks.fork(parent, child)
    copy = blocks.grow(child, 3)
    assert copy is not None
    blocks.release(parent)
    other = sequence_of([9])
    assert blocks.admit(other, 0)
    assert copy[0] not in other.block_table
    assert blocks.num_available == 0
    blocks.unpin(copy[0])
    assert blocks.num_available == 1


def test_returning_a_block_twice_is_noticed() -> None:
    blocks = BlockManager(2, SIZE)
    sequence = sequence_of([1])
    assert blocks.admit(sequence, 0)
    table = list(sequence.block_table)
    blocks.release(sequence)
    sequence.block_table = table
    with pytest.raises(AssertionError):
        blocks.release(sequence)


def test_taking_a_block_that_nobody_has_is_noticed() -> None:
    blocks = BlockManager(1, SIZE)
    sequence = sequence_of([1])
    assert blocks.admit(sequence, 0)
    with pytest.raises(AssertionError):
        blocks.grow(sequence, 5)


class Cache(RuleBasedStateMachine):
    """Random operations; `memory` is what the blocks would really hold: a hash of the whole prefix at each place."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, SIZE)
        self.memory: dict[tuple[int, int], int] = {}
        self.live: list[Sequence] = []
        self.pins: list[int] = []
        self.salts: dict[Salt, int] = dict.fromkeys(SALTS, 0)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18), salt=st.sampled_from(SALTS))
    def admit(self, tokens: list[int], salt: Salt) -> None:
        sequence = sequence_of(tokens, salt)
        before = self.blocks.num_available
        if self.blocks.admit(sequence, 0):
            assert sequence.num_computed < len(tokens)
            assert sequence.num_computed % SIZE == 0
            self.live.append(sequence)
        else:
            assert self.blocks.num_available == before

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 7))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = self._pick(data)
        end = min(sequence.num_computed + count, len(sequence.token_ids))
        if end == sequence.num_computed or self.blocks.missing(sequence, end) > self.blocks.num_available:
            return
        missing, available = self.blocks.missing(sequence, end), self.blocks.num_available
        copy = self.blocks.grow(sequence, end)
        assert self.blocks.num_available == available - missing
        if copy is not None:
            self.pins.append(copy[0])
            for offset in range(SIZE):
                self.memory[copy[1], offset] = self.memory.get((copy[0], offset), -1)
        for position in range(sequence.num_computed, end):
            block = sequence.block_table[position // SIZE]
            assert self._counts()[block] - self.pins.count(block) == 1, "somebody else holds the block"
            self.memory[block, position % SIZE] = self._truth(sequence, position)
        sequence.num_computed = end

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def draw(self, data: st.DataObject, token: int) -> None:
        sequence = self._pick(data)
        if sequence.num_computed == len(sequence.token_ids):
            sequence.token_ids.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        parent = self._pick(data)
        if parent.num_computed == len(parent.token_ids):
            child = sequence_of([*parent.token_ids, token], parent.salt)
            used = self.blocks.num_used
            self.blocks.fork(parent, child)
            assert self.blocks.num_used == used
            self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        self.blocks.register(self._pick(data))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        sequence = self._pick(data)
        before = sequence.num_computed
        if before < len(sequence.token_ids):
            saved = self.blocks.adopt(sequence)
            assert sequence.num_computed == before + saved < len(sequence.token_ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), trusted=st.booleans())
    def leave(self, data: st.DataObject, trusted: bool) -> None:
        sequence = self._pick(data)
        if not trusted:
            held = set(sequence.block_table)
            self.blocks.distrust(sequence)
            assert self.blocks._prefixes is not None
            assert not any(block in self.blocks._prefixes for block in held)
        self.live.remove(sequence)
        self.blocks.release(sequence)

    @rule()
    def step_ends(self) -> None:
        for block in self.pins:
            self.blocks.unpin(block)
        self.pins = []

    @invariant()
    def counts_are_those_of_the_tables(self) -> None:
        counts = self._counts()
        assert [counts[block] for block in range(self.NUM_BLOCKS)] == self.blocks._references

    @invariant()
    def each_block_is_in_one_state(self) -> None:
        held = {block for block, count in self._counts().items() if count}
        free, cached = set(self.blocks._free), set(self.blocks._cached)
        assert len(free) == len(self.blocks._free)
        assert held | free | cached == set(range(self.NUM_BLOCKS))
        assert len(held) + len(free) + len(cached) == self.NUM_BLOCKS
        assert self.blocks.num_used == len(held)

    @invariant()
    def everybody_reads_his_own_prefix(self) -> None:
        for sequence in self.live:
            for position in range(sequence.num_computed):
                kept = self.memory[sequence.block_table[position // SIZE], position % SIZE]
                assert kept == self._truth(sequence, position)

    @invariant()
    def free_blocks_are_not_findable_and_findable_ones_hold_what_they_promise(self) -> None:
        prefixes = self.blocks._prefixes
        assert prefixes is not None
        assert not any(block in prefixes for block in self.blocks._free)
        assert all(block in prefixes for block in self.blocks._cached)
        assert len(prefixes._by_digest) == len(prefixes._by_block)

    def _pick(self, data: st.DataObject) -> Sequence:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    def _counts(self) -> Counter[int]:
        counts = Counter(block for sequence in self.live for block in sequence.block_table)
        counts.update(self.pins)
        return counts

    def _truth(self, sequence: Sequence, position: int) -> int:
        return hash((sequence.salt, *sequence.token_ids[: position + 1]))


class CollidingCache(Cache):
    """The same where digests collide all the time."""

    def __init__(self) -> None:
        super().__init__()
        assert self.blocks._prefixes is not None
        self.blocks._prefixes._hash = lambda data: bytes([sum(data) % 4])  # type: ignore[method-assign]


TestCache = Cache.TestCase
TestCollidingCache = CollidingCache.TestCase
TestCollidingCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
