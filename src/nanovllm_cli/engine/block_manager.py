"""The KV cache's blocks: who holds them, which are free, which may be shared.

A block is in exactly one of three states: in use (its reference count says by how many sequences), cached (nobody
holds it but the prefix cache still finds it; the least recently released is evicted first), or free. Only numbers
live here; the memory is `attention/kv_cache.py`'s. Sequences write only into blocks that they hold alone: see `grow`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm_cli.engine.near import NearParts, NearRoom
from nanovllm_cli.engine.plan import Copy
from nanovllm_cli.engine.prefix_cache import Entry, PrefixCache
from nanovllm_cli.engine.sequence import Sequence
from nanovllm_cli.engine.states import States


class BlockManager:
    """All operations are O(1) per block that they touch. num_states: of a model that keeps some. near: of one with windows."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_states: int = 0,
        near: NearRoom = NearRoom(),
        enable_prefix_caching: bool = True,
        secret: bytes | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._prefixes = PrefixCache(block_size, secret) if enable_prefix_caching else None
        self.states = States(num_states, self._prefixes, block_size)
        self.near = NearParts(near, block_size)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: the free ones, and the cached ones after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_spare(self) -> int:
        """For how many sequences there is a block each, and its near part."""
        return min(self.num_available, self.near.num_available) if self.near.num_parts else self.num_available

    @property
    def finds_prefixes(self) -> bool:
        return self._prefixes is not None

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, headroom: int, *, use_cache: bool = True, brings_state: bool = False) -> bool:
        """Gives an empty-handed sequence blocks for all of its tokens, cached ones where they hold its beginning.

        False, and nothing changes, where fewer than `headroom` blocks would then be available, or no state is. `num_computed`
        becomes the number of tokens found; the last token is never among them, because its logits are wanted. brings_state: the
        caller draws nothing, and writes near parts and the state that belongs behind all tokens: all that is known is found.
        """
        limit = None if brings_state else self._num_reusable(sequence)
        known = self.known(sequence, limit) if use_cache else []
        entries = known if brings_state else self._usable(known, sequence)
        fresh = self.blocks_for(len(sequence.token_ids)) - len(entries)
        revived = sum(1 for entry in entries if self._references[entry.block] == 0)
        if self.num_available - revived - fresh < headroom:
            return False
        if not brings_state and not self.near.admits(entries, fresh, headroom):
            return False
        if not self.states.give(sequence, [] if brings_state else entries):
            return False
        for entry in entries:
            self._share(entry.block)
        sequence.block_table = [entry.block for entry in entries]
        sequence.block_table.extend(self._take() for _ in range(fresh))
        sequence.num_computed = len(entries) * self.block_size
        if not brings_state:
            self.near.hold(sequence, sequence.num_computed)
        return True

    def num_found(self, sequence: Sequence) -> int:
        """How many blocks that hold its beginning are cached."""
        return len(self.known(sequence, self._num_reusable(sequence)))

    def finds_more(self, sequence: Sequence, num_found: int) -> bool:
        """Whether there may be more by now. O(1)."""
        if self._prefixes is None or num_found >= self._num_reusable(sequence):
            return False
        return self._prefixes.may_know(sequence, num_found)

    def adopt(self, sequence: Sequence) -> int:
        """Swaps blocks that the sequence would compute next for cached ones that somebody else computed meanwhile.

        Returns how many tokens that saves.
        """
        index = sequence.num_computed // self.block_size
        if not self.finds_more(sequence, index):
            return 0
        entries = self._usable(self.known(sequence, self._num_reusable(sequence)), sequence)[index:]
        if not entries:
            return 0
        self.near.release(sequence)
        for position, entry in enumerate(entries, start=index):
            self._share(entry.block)
            self._drop(sequence.block_table[position])
            sequence.block_table[position] = entry.block
        self.states.go_on_behind(sequence, entries[-1].block)
        computed, sequence.num_computed = sequence.num_computed, (index + len(entries)) * self.block_size
        self.near.hold(sequence, sequence.num_computed)
        return sequence.num_computed - computed

    @property
    def num_registered(self) -> int:
        """Blocks that ever became findable."""
        return 0 if self._prefixes is None else self._prefixes.num_made

    def findable(self, sequence: Sequence | None = None) -> list[Entry]:
        """The full blocks that hold a sequence's beginning and would be found; without one, all that might, the latest first."""
        if sequence is not None:
            return self._usable(self.known(sequence))
        if self._prefixes is None:
            return []
        entries = self._prefixes.entries()
        in_use = [entry for block, entry in entries.items() if self._references[block] > 0]
        return in_use + [entries[block] for block in reversed(self._cached)]

    def known(self, sequence: Sequence, limit: int | None = None) -> list[Entry]:
        """The same, at most `limit`, whether anything can go on behind the last of them or not."""
        most = len(sequence.token_ids) // self.block_size if limit is None else limit
        return [] if self._prefixes is None else self._prefixes.match(sequence, most)

    def use(self, sequence: Sequence) -> None:
        """What is known of its beginning counts as used now: its first block last, as when it is released."""
        known = self.known(sequence)
        for entry in reversed(known):
            if entry.block in self._cached:
                self._cached.move_to_end(entry.block)
        usable = self._usable(known)
        self.states.use(usable)
        self.near.use(usable)

    def slide(self, running: Iterable[Sequence]) -> None:
        """Takes back near parts that none of these sees from its next token on."""
        if self.near.num_parts:
            for sequence in running:
                self.near.slide(sequence)

    def chunk(self, sequence: Sequence, limit: int) -> int:
        """How many tokens of its prompt, of `limit` at most, may be computed at once."""
        return self.near.chunk(sequence, self.states.chunk(sequence, limit))

    def lacks(self, sequence: Sequence, end: int) -> bool:
        """Whether `grow(sequence, end)` would take more than is available."""
        copies = self._shared_index(sequence) is not None
        if self.near.num_parts and self.near.missing(sequence, end) + copies > self.near.num_available:
            return True
        return self.missing(sequence, end) > self.num_available

    def missing(self, sequence: Sequence, end: int) -> int:
        """How many blocks `grow(sequence, end)` would take."""
        behind = max(0, self.blocks_for(end) - len(sequence.block_table))
        return behind + (self._shared_index(sequence) is not None)

    def grow(self, sequence: Sequence, end: int) -> Copy | None:
        """Makes positions num_computed … end - 1 writable; the blocks must be available.

        Where the first of them lies in a block that others hold too, the sequence gets a block of its own, and what is to be
        copied before anything is written. The source stays referenced until `unpin(source)`, so that nobody can be given it
        within the same step. Its last holder may write behind what was shared.
        """
        copy: Copy | None = None
        index = self._shared_index(sequence)
        if index is not None:
            own, sequence.block_table[index] = sequence.block_table[index], self._take()
            self._pins[own] += 1
            copy = Copy(own, sequence.block_table[index], *self.near.swap(sequence, index, own))
        while len(sequence.block_table) * self.block_size < end:
            sequence.block_table.append(self._take())
        self.near.hold(sequence, end)
        return copy

    def num_writable(self, sequence: Sequence) -> int:
        """Up to how many of its tokens it has blocks by now, and their near parts."""
        held = sequence.near_end if self.near.num_parts else len(sequence.block_table)
        return min(len(sequence.block_table), held) * self.block_size

    def unpin(self, block: int) -> None:
        """Ends what `grow` began: the copy has been made."""
        self._pins[block] -= 1
        self.near.unpin(block)
        self._drop(block)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child`, whose tokens begin with the computed ones of `parent`, shares the parent's blocks. False, and nothing changes,
        where it would need a state and none is left."""
        if not self.states.fork(parent, child):
            return False
        child.block_table = parent.block_table[: self.blocks_for(parent.num_computed)]
        for block in child.block_table:
            self._references[block] += 1
        child.num_computed = parent.num_computed
        child.block_digests = parent.block_digests[: parent.num_computed // self.block_size]
        child.num_registered, child.last_uid = parent.num_registered, parent.last_uid
        self.near.fork(parent, child)
        return True

    def release(self, sequence: Sequence, *, has_sound_state: bool = True) -> None:
        """Takes all blocks back. Last ones first, so that the beginnings, which others may share, are evicted last.
        has_sound_state: see `States.release`."""
        self.states.release(sequence, is_sound=has_sound_state)
        self.near.release(sequence)
        for block in reversed(sequence.block_table):
            self._drop(block)
        if self.states.num_states:
            self.use(sequence)  # it had blocks of its own for some that others computed, and could not be gone on behind
        sequence.block_table = []
        sequence.num_computed = sequence.num_held = sequence.num_registered = sequence.last_uid = 0

    def register(self, sequence: Sequence) -> None:
        """Full blocks of computed tokens become findable. Call it only when a draw from them has proved them sound."""
        num_full = sequence.num_computed // self.block_size
        if self._prefixes is not None and num_full > sequence.num_registered:
            self._reclaim(self._prefixes.register(sequence, num_full, self.near.has))
        self.states.register(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Nothing that this sequence holds is to be found again: its numbers went bad."""
        if self._prefixes is not None:
            for block in sequence.block_table:
                self._prefixes.forget(block)
        self.states.distrust(sequence)

    def _usable(self, known: list[Entry], sequence: Sequence | None = None) -> list[Entry]:
        """Those that the sequence can go on behind."""
        return self.near.usable(self.states.usable(known, sequence))

    def _num_reusable(self, sequence: Sequence) -> int:
        return min(len(sequence.token_ids) - 1, sequence.request.most_found) // self.block_size

    def _shared_index(self, sequence: Sequence) -> int | None:
        index = sequence.num_computed // self.block_size
        if index >= len(sequence.block_table):
            return None
        block = sequence.block_table[index]
        return index if self._references[block] - self._pins[block] > 1 else None

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "a block was taken that nobody had"
            block, _ = self._cached.popitem(last=False)
            assert self._prefixes is not None
            self._prefixes.forget(block)
            self.states.pool.forget(block)
            self.near.forget(block)
        self._references[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._prefixes is not None and block in self._prefixes:
                self._cached[block] = None
            else:
                self._free.append(block)
                self.near.forget(block)
        assert self._references[block] >= 0, "a block was returned twice"

    def _reclaim(self, ousted: list[int]) -> None:
        for block in ousted:
            self.states.pool.forget(block)
            if self._references[block] == 0:
                del self._cached[block]
                self._free.append(block)
                self.near.forget(block)
