"""Who could not enter, and whether that has changed: to ask again costs a walk along all of its prompt."""

from __future__ import annotations

from typing import NamedTuple

from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.sequence import Sequence


class _Refused(NamedTuple):
    """room, parts: blocks and near parts that there were beside those to be left; found: blocks that hold its beginning; changes:
    of all else until then."""

    sequence: Sequence
    room: int
    parts: int
    found: int
    changes: int


class Refusal:
    """The last one: nobody overtakes the first of those who wait. headroom: blocks that are to be left beside it."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._last: _Refused | None = None

    def note(self, sequence: Sequence, headroom: int) -> None:
        """There is no room for it."""
        blocks = self._blocks
        room, parts = blocks.num_available - headroom, blocks.near.num_available - headroom
        self._last = _Refused(sequence, room, parts, blocks.num_found(sequence), blocks.states.pool.num_changes)

    def forget(self) -> None:
        """It has entered."""
        self._last = None

    def stands(self, sequence: Sequence, headroom: int) -> bool:
        """Whether there was no room for it, and there is no more now of blocks, of those that hold more of it, or else. O(1)."""
        last, blocks = self._last, self._blocks
        if last is None or last.sequence is not sequence or blocks.num_available - headroom > last.room:
            return False
        if blocks.near.num_available - headroom > last.parts or blocks.states.pool.num_changes != last.changes:
            return False
        return not blocks.finds_more(sequence, last.found)
