"""SentencePiece's precompiled normalization rules ("charsmap"): whether every text can be looked up in them.

Form: the size of a trie in bytes (u32), the trie, the replacements, each ended by a NUL. All numbers are little-endian. The trie
is a double array of u32 units as darts-clone builds it: bits 0-7 the byte that leads here, 8 whether a value follows, 9 whether
the offset counts in 256s, 10-30 the offset; a unit with bit 31 is a value, where a replacement begins. A text's bytes are
followed from unit to unit by `position ^ offset ^ byte`, unchecked: the library that does so would panic over a broken trie, in
the middle of a text.
"""

from __future__ import annotations

import sys
from array import array

from nanovllm_cli.errors import CheckpointError

_VALUE, _LEAF, _FAR = 1 << 31, 1 << 8, 1 << 9
_MAX_REPLACEMENT = 256  # bytes for one character; Unicode's longest compatibility form, of U+FDFA, has 33
_HINT = "download the model again, or use another copy"


def check_charsmap(charsmap: bytes) -> None:
    """CheckpointError where a text could lead out of the rules, or grow by them without measure."""
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size > len(charsmap) - 4:
        raise CheckpointError("the vocabulary's normalization rules are cut off", _HINT)
    units = array("I", charsmap[4 : 4 + size - size % 4])
    assert units.itemsize == 4
    if sys.byteorder == "big":
        units.byteswap()
    starts = _starts(charsmap[4 + size :])
    if not units or size % 4 or starts is None or not _closed(units, starts):
        raise CheckpointError("the vocabulary's normalization rules lead nowhere", _HINT)


def _closed(units: array[int], starts: frozenset[int]) -> bool:
    """Whether each unit that can be come to leads to units that are there, and to replacements.

    Units that no key uses obey this as well: they lead to themselves. Finding out which ones are in use would take longer.
    """
    for position, unit in enumerate(units):
        if unit & _VALUE:
            continue
        base = position ^ (unit >> 10 << (8 if unit & _FAR else 0))
        if base | 0xFF >= len(units):
            return False
        if unit & _LEAF and units[base] & ~_VALUE not in starts:
            return False
    return True


def _starts(replacements: bytes) -> frozenset[int] | None:
    """Where each begins. None where one is without its end, is no text, or is too long."""
    *texts, rest = replacements.split(b"\0")
    if rest or any(len(text) > _MAX_REPLACEMENT for text in texts):
        return None
    starts, position = [], 0
    for text in texts:
        try:
            text.decode()
        except UnicodeDecodeError:
            return None
        starts.append(position)
        position += len(text) + 1
    return frozenset(starts)
