"""States of sequences, beside the blocks that hold their keys and values: who holds them, and which are kept for prefixes.

A model whose layers keep a state (the delta rule's) can go on behind a token only from the state that was there. So a running
sequence has a state of its own, in all layers, and copies of it are kept behind some blocks: a prefix is found as far as the last
of these. They are made where prompts that begin alike may part: behind powers of two of tokens, behind the last whole block of a
prompt, where two did part, as a third may do, and now and then in an answer, where the latest one moves along, for the turn that
goes on behind it. What ends behind a whole block leaves its state there. Where states run short, the copy goes that was used
least recently. Behind guesses that held a state serves each token from the last known one on: a step that goes past a stop leaves
a copy for it all the same.

Only numbers live here; the memory is `attention/kv_cache.py`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm_cli.engine.prefix_cache import Entry, PrefixCache
from nanovllm_cli.engine.sequence import NO_STATE, Sequence

FIRST_KEPT, KEPT_EVERY, LATEST_EVERY = 128, 256, 64
"""Tokens of a prompt behind which its state is worth a copy; of an answer from one copy to the next, and to the next that stays
only until the one after it."""
FEW = 8
"""Sequences, with more of which no such copies are made: a step with one isn't planned ahead, and prompts are quick there."""

Pair = tuple[int, int]
"""What is to be copied where."""


def num_copies(prompt_len: int, block_size: int) -> int:
    """Of a prompt's state, that are kept behind it."""
    last = (prompt_len - 1) // block_size * block_size
    powers = [1 << i for i in range(last.bit_length()) if FIRST_KEPT <= 1 << i <= last]
    return len({*powers, last} - set(range(FIRST_KEPT)))


class StatePool:
    """Each state has as many holders as were counted: a sequence, a block behind which it is kept, a copy that is to be made."""

    def __init__(self, num_states: int) -> None:
        self._free = list(range(num_states - 1, -1, -1))
        self._holders = [0] * num_states
        self._behind: OrderedDict[int, int] = OrderedDict()
        self.num_changes = 0
        """Grows with all that may let somebody have a state who could have none before."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._behind)

    def take(self) -> int | None:
        """One for a new holder; None where all are held by others than blocks."""
        if not self._free:
            idle = next((block for block, state in self._behind.items() if self._holders[state] == 1), None)
            if idle is None:
                return None
            self.forget(idle)
        state = self._free.pop()
        self._holders[state] = 1
        return state

    def hold(self, state: int) -> None:
        """One more holder."""
        self._holders[state] += 1

    def drop(self, state: int) -> None:
        """One less."""
        self.num_changes += 1
        self._holders[state] -= 1
        assert self._holders[state] >= 0, "a state was returned twice"
        if self._holders[state] == 0:
            self._free.append(state)

    def keep(self, block: int, state: int) -> None:
        """The state behind this block's last token, which the block holds from now on. The first one stays."""
        self.num_changes += 1
        if block in self._behind:
            self.drop(state)
        else:
            self._behind[block] = state

    def behind(self, block: int) -> int | None:
        """The state that is kept behind a block."""
        return self._behind.get(block)

    def use(self, block: int) -> int:
        """The same, of which there is one, as used now."""
        self._behind.move_to_end(block)
        return self._behind[block]

    def take_over(self, block: int) -> int | None:
        """The state that is kept behind a block, for a new holder. None where it has others."""
        if self._holders[self._behind[block]] > 1:
            return None
        return self._behind.pop(block)

    def forget(self, block: int) -> None:
        """The block is no longer to be found. Blocks without a state are fine."""
        state = self._behind.pop(block, None)
        if state is not None:
            self.drop(state)


class States:
    """What `BlockManager` and the scheduler do about states: nothing where the model keeps none. prefixes: None where none are
    found."""

    def __init__(self, num_states: int, prefixes: PrefixCache | None, block_size: int) -> None:
        self.num_states = num_states
        self.pool = StatePool(num_states)
        self._prefixes = prefixes
        self._block_size = block_size

    def usable(self, entries: list[Entry], sequence: Sequence | None = None) -> list[Entry]:
        """Of the first blocks of a sequence those that it can go on behind; it is told where it parts from others."""
        count = len(entries)
        while self.num_states and count and self.pool.behind(entries[count - 1].block) is None:
            count -= 1
        if sequence is not None:
            sequence.parting = len(entries) * self._block_size if (len(entries) - count) * self._block_size >= FIRST_KEPT else 0
        return entries[:count]

    def use(self, entries: list[Entry]) -> None:
        """What is kept behind the last of these blocks, which are `usable`, counts as used now."""
        if self.num_states and entries:
            self.pool.use(entries[-1].block)

    def give(self, sequence: Sequence, entries: list[Entry]) -> bool:
        """A state for a sequence without one, behind these blocks, which are `usable`: a copy of the one that is kept there, or,
        where that is the last, it itself. False, and nothing changes, where none is left."""
        if not self.num_states:
            return True
        if entries:  # held first: the one that is taken must not be this one
            self.go_on_behind(sequence, entries[-1].block)
        state = self.pool.take()
        if state is None:
            self.forget_source(sequence)
            state = self.pool.take_over(entries[-1].block) if entries else None
        if state is None:
            return False
        sequence.state = state
        return True

    def go_on_behind(self, sequence: Sequence, block: int) -> None:
        """What is kept behind the block is copied to the sequence's state before that runs again."""
        if self.num_states:
            self._set_source(sequence, self.pool.use(block))

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """The child gets a copy of the parent's, before either runs again. False where none is left."""
        if not self.num_states:
            return True
        state = self.pool.take()
        if state is None:
            return False
        child.state = state
        self._set_source(child, parent.state)
        return True

    def chunk(self, sequence: Sequence, limit: int) -> int:
        """How many tokens of its prompt, of `limit` at most, may be computed before a copy is due."""
        if not self._are_kept or sequence.request.wants_every_row:
            return limit
        done, last = sequence.num_computed, self._last(sequence)
        power = max(FIRST_KEPT, 1 << done.bit_length())
        stops = [stop - done for stop in (power, last, sequence.parting) if max(done, FIRST_KEPT - 1) < stop <= last]
        return min(limit, *stops) if stops else limit

    def copy_due(self, sequence: Sequence, num_running: int) -> Pair | None:
        """(source, destination) to copy before the sequence runs, where it is worth one and there is room."""
        if not self._are_kept or sequence.request.wants_every_row or sequence.state_source != NO_STATE:
            return None
        done = next((tokens for tokens in _served(sequence) if self._is_stop(sequence, tokens, num_running)), None)
        if done is None:
            return None
        if any(num_tokens == done for num_tokens, _ in sequence.kept_states) or self._block_behind(sequence, done) is not None:
            return None
        self._forget_latest(sequence, done)
        state = self.pool.take()
        if state is None:
            return None
        sequence.kept_states.append((done, state))
        return sequence.state, state

    def is_copied_at(self, num_tokens: int, num_running: int) -> bool:
        """Whether a sequence that draws, one of so many, has a copy made behind so many tokens."""
        return self._are_kept and num_tokens % (LATEST_EVERY if num_running <= FEW else KEPT_EVERY) == 0

    def take_sources(self, sequences: Iterable[Sequence]) -> list[Pair]:
        """(source, destination) to copy before anybody runs. The sources stay held until `drop`."""
        pairs = []
        for sequence in sequences:
            if sequence.state_source != NO_STATE:
                pairs.append((sequence.state_source, sequence.state))
                sequence.state_source = NO_STATE
        return pairs

    def drop(self, held: Iterable[int]) -> None:
        """Ends what `take_sources` began: the copies have been made."""
        for state in held:
            self.pool.drop(state)

    def register(self, sequence: Sequence) -> None:
        """Its blocks can be found now, so copies behind them can."""
        kept, sequence.kept_states = sequence.kept_states, []
        for num_tokens, state in kept:
            self._keep(sequence, num_tokens, state)

    def distrust(self, sequence: Sequence) -> None:
        """Nothing of this sequence is to be found."""
        if not self.num_states:
            return
        for block in sequence.block_table:
            self.pool.forget(block)
        self._drop_kept(sequence)

    def release(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Before its blocks are given back. is_sound: whether its state is known to be behind its tokens."""
        if sequence.state == NO_STATE:
            return
        done = sequence.num_registered * self._block_size
        if is_sound and sequence.state_source == NO_STATE and done and done in _served(sequence):
            self.pool.hold(sequence.state)
            self._keep(sequence, done, sequence.state)
        self.forget_source(sequence)
        self._drop_kept(sequence)
        self.pool.drop(sequence.state)
        sequence.state = NO_STATE

    @property
    def _are_kept(self) -> bool:
        return self.num_states > 0 and self._prefixes is not None

    def _last(self, sequence: Sequence) -> int:
        """Tokens in the blocks that a prompt like this one could be found with."""
        return (len(sequence.token_ids) - 1) // self._block_size * self._block_size

    def _is_stop(self, sequence: Sequence, done: int, num_running: int) -> bool:
        if done < FIRST_KEPT or done % self._block_size:
            return False
        if done >= len(sequence.request.prompt_ids) and len(sequence.token_ids) - sequence.num_computed == 1:
            return self.is_copied_at(done, num_running)
        return done & (done - 1) == 0 or done in (self._last(sequence), sequence.parting)

    def _forget_latest(self, sequence: Sequence, done: int) -> None:
        """Another copy comes behind its answer: the one before need not stay."""
        before = done - LATEST_EVERY
        if before > len(sequence.request.prompt_ids) and before % KEPT_EVERY:
            block = self._block_behind(sequence, before)
            if block is not None:
                self.pool.forget(block)

    def _block_behind(self, sequence: Sequence, num_tokens: int) -> int | None:
        """The block behind which a state after so many tokens is kept."""
        assert self._prefixes is not None
        count = num_tokens // self._block_size
        entries = self._prefixes.match(sequence, count)
        return entries[-1].block if len(entries) == count and len(self.usable(entries)) == count else None

    def _keep(self, sequence: Sequence, num_tokens: int, state: int) -> None:
        """Takes the state over, for whoever finds the block behind which it is; in vain where nobody can."""
        count = num_tokens // self._block_size
        entries = [] if self._prefixes is None else self._prefixes.match(sequence, count)
        if len(entries) == count:
            self.pool.keep(entries[-1].block, state)
        else:
            self.pool.drop(state)

    def _set_source(self, sequence: Sequence, state: int) -> None:
        self.pool.hold(state)
        self.forget_source(sequence)
        sequence.state_source = state

    def forget_source(self, sequence: Sequence) -> None:
        """Nothing is to be copied to its state any more."""
        if sequence.state_source != NO_STATE:
            self.pool.drop(sequence.state_source)
            sequence.state_source = NO_STATE

    def _drop_kept(self, sequence: Sequence) -> None:
        kept, sequence.kept_states = sequence.kept_states, []
        for _, state in kept:
            self.pool.drop(state)


def _served(sequence: Sequence) -> range:
    """Numbers of tokens that a sequence with this one's state can go on behind, from the last down."""
    return range(sequence.num_computed, sequence.num_computed - sequence.num_held - 1, -1)
