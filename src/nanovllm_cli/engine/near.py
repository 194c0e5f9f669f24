"""Near parts: what layers with a window keep of a block, which is of use only as long as the block is within reach.

Such a layer's queries see no further back than its window, so that keys and values behind all windows need not be kept, and a
long context takes little more memory than its other layers need. So the blocks of a cache may be many, and their near parts few:
parts are what those layers have in place of blocks, numbered by themselves, and a sequence has a table of its own for them. It
holds those within reach of its next token, a part that nobody holds stays with its block as long as there is room, and a prefix
is found as far as all parts within reach of its end are still there.

Only numbers live here; the memory is `attention/kv_cache.py`'s. Where num_parts is 0 every block has its part for good, under the
block's own number.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from nanovllm_cli.engine.prefix_cache import Entry
from nanovllm_cli.engine.sequence import Sequence

TILE = 64
"""Kernels read keys in tiles of so many tokens, from multiples of it on."""
SLACK = 64
"""Tokens that are kept beyond a window: what guesses for a sequence may ask from a little further back."""


class NearRoom(NamedTuple):
    """num_parts: those that there is memory for, or 0 where all blocks have theirs; reach: tokens that the widest window sees."""

    num_parts: int = 0
    reach: int = 0


def kept_blocks(reach: int, block_size: int) -> int:
    """Most parts that a sequence holds, beside those of the tokens that it feeds."""
    return -(-(reach + SLACK + TILE) // block_size) + 1


class NearParts:
    """A part is held (by as many sequences as were counted), idle, or free. Of idle ones those go first that are of no use to
    anybody, then what was let go of first."""

    def __init__(self, room: NearRoom, block_size: int) -> None:
        self.num_parts, self._reach = room
        self._size = block_size
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._parts: dict[int, int] = {}
        """Of blocks that have theirs."""
        self._free = list(range(self.num_parts - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Parts that can be had now: those that nobody holds."""
        return self.num_parts - len(self._holders)

    def has(self, block: int) -> bool:
        """Whether the block's part is there."""
        return not self.num_parts or block in self._parts

    def parts_of(self, blocks: list[int]) -> list[int]:
        """Their parts' numbers, below 0 where the part is gone."""
        return [self._parts.get(block, -1) for block in blocks] if self.num_parts else blocks

    def usable(self, entries: list[Entry]) -> list[Entry]:
        """Of the first blocks of a sequence those that it can go on behind."""
        if not self.num_parts:
            return entries
        best = run = 0
        for count, entry in enumerate(entries, 1):
            run = run + 1 if self.has(entry.block) else 0
            if run >= count - self._first(count * self._size):
                best = count
        return entries[:best]

    def admits(self, entries: list[Entry], num_fresh: int, headroom: int) -> bool:
        """Whether a sequence may enter that goes on behind these blocks, `usable` ones, with so many of its own."""
        if not self._holders:
            return True  # whatever it needs, there will never be more
        within = entries[self._first(len(entries) * self._size) :]
        needed = sum(entry.block not in self._holders for entry in within)
        needed += min(num_fresh, kept_blocks(self._reach, self._size))
        return self.num_available - needed >= headroom

    def chunk(self, sequence: Sequence, limit: int) -> int:
        """How many tokens of its prompt, of `limit` at most, there are parts for: in blocks that it holds, and in one for each
        part that is left. One at least, as others may have to make way."""
        if not self.num_parts:
            return limit
        end = max(sequence.near_end, self._first(sequence.num_computed)) + self.num_available
        return min(limit, max(1, end * self._size - sequence.num_computed))

    def missing(self, sequence: Sequence, end: int) -> int:
        """How many parts `hold(sequence, end)` would take."""
        start = max(sequence.near_end, self._first(sequence.num_computed))
        return max(0, -(-end // self._size) - start) if self.num_parts else 0

    def slide(self, sequence: Sequence) -> None:
        """Lets go of what its next token doesn't see."""
        first = min(self._first(sequence.num_computed), sequence.near_end)
        for index in range(sequence.near_start, first):
            self._let_go(sequence.block_table[index])
        sequence.near_start = max(sequence.near_start, first)

    def hold(self, sequence: Sequence, end: int) -> None:
        """Beside what it holds, what it sees from its next token on and writes up to `end`; that many parts must be available."""
        if not self.num_parts:
            return
        start, stop = max(sequence.near_end, self._first(sequence.num_computed)), -(-end // self._size)
        if sequence.near_end < start:
            sequence.near_start = start
        table = sequence.near_table
        table += [0] * (len(sequence.block_table) - len(table))
        for index in range(start, stop):
            table[index] = self._take(sequence.block_table[index])
        sequence.near_end = max(start, stop)

    def swap(self, sequence: Sequence, index: int, own: int) -> tuple[int, int]:
        """Its block there has taken the place of another, which it held and which stays held until `unpin`: the parts of both."""
        block = sequence.block_table[index]
        if not self.num_parts:
            return own, block
        assert sequence.near_start <= index < sequence.near_end, "a block that is being written is out of reach"
        sequence.near_table[index] = self._take(block)
        return self._parts[own], sequence.near_table[index]

    def unpin(self, block: int) -> None:
        """Ends what `swap` began: the copy has been made."""
        if self.num_parts:
            self._let_go(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, whose blocks are the parent's first ones, holds what the parent does."""
        child.near_start = min(parent.near_start, len(child.block_table))
        child.near_end = min(parent.near_end, len(child.block_table))
        child.near_table = parent.near_table[: len(child.block_table)]
        for index in range(child.near_start, child.near_end):
            self._take(child.block_table[index])

    def release(self, sequence: Sequence) -> None:
        """Lets go of all."""
        for index in reversed(range(sequence.near_start, sequence.near_end)):
            self._let_go(sequence.block_table[index])
        sequence.near_start = sequence.near_end = 0
        sequence.near_table = []

    def forget(self, block: int) -> None:
        """What the block holds is of no use any more: its part, if it is idle, goes before others."""
        if block in self._idle:
            self._idle.move_to_end(block, last=False)

    def use(self, entries: list[Entry]) -> None:
        """What a sequence would see behind these blocks counts as used now."""
        for entry in reversed(entries[self._first(len(entries) * self._size) :]):
            if entry.block in self._idle:
                self._idle.move_to_end(entry.block)

    def fill(self, block: int, *, is_whole: bool) -> None:
        """The block, which nobody holds, is about to be written from outside: with its part where is_whole and one can be had."""
        if not self.num_parts:
            return
        if is_whole and self.num_available:
            self._take(block)
            self._let_go(block)
        elif block in self._idle:
            del self._idle[block]
            self._free.append(self._parts.pop(block))

    def _first(self, num_computed: int) -> int:
        """The first block that a token behind so many sees in layers with a window."""
        return max(0, num_computed - self._reach - SLACK) // TILE * TILE // self._size

    def _take(self, block: int) -> int:
        if block in self._holders:
            self._holders[block] += 1
            return self._parts[block]
        if block in self._idle:
            del self._idle[block]
        elif self._free:
            self._parts[block] = self._free.pop()
        else:
            assert self._idle, "a part was taken that nobody had"
            gone, _ = self._idle.popitem(last=False)
            self._parts[block] = self._parts.pop(gone)
        self._holders[block] = 1
        return self._parts[block]

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            del self._holders[block]
            self._idle[block] = None
