"""How processes that compute one model bring together what each of them has of a tensor's columns, in memory that they share.

Each has two areas there, which take turns. It writes its columns into one, tells so, waits until all have, and reads theirs. When
it writes to the same area again it has met the others once in between, who have read by then what was there.

The memory they share: words, a cache line (_LINE) apart: 0, which is not 0 when somebody is lost and nobody is to wait any more;
then one of each process, how often it has come to meet the others. Behind HEAD_BYTES, 2 areas of each process.

A process's own words (`control`): how often all have met, its number, how many there are, bytes of an area, address of what they
share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.waiting import LOOKS, let_others, tell, told

HEAD_BYTES = 1 << 14
"""Room for more processes than `config` allows."""
CONTROL_WORDS = 5
PIECE_WORDS = 5
"""Of a piece: bytes of a row of its process, where it begins there, where in a row of the whole, how many bytes; the process."""
_LINE = 128
_MET, _RANK, _SIZE, _AREA, _SHARED = range(CONTROL_WORDS)


@intrinsic
def _copy(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Bytes from one address to another."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        to, of = (b.inttoptr(each, ir.IntType(8).as_pointer()) for each in args[:2])
        cgutils.raw_memcpy(b, to, of, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@inner
def _area(control, rank, met):
    """Where a process writes when all have met so often."""
    words = carray(typed_pointer(control, np.int64(0)), (CONTROL_WORDS,))
    return words[_SHARED] + HEAD_BYTES + (2 * rank + met % 2) * words[_AREA]


@inner
def _meet(control):
    """Wait until all have come here, or somebody is lost."""
    words = carray(typed_pointer(control, np.int64(0)), (CONTROL_WORDS,))
    shared, met = words[_SHARED], words[_MET] + 1
    tell(shared + _LINE * (1 + words[_RANK]), met)
    for rank in range(words[_SIZE]):
        looks = 0
        while told(shared + _LINE * (1 + rank)) < met and told(shared) == 0:
            looks += 1
            if looks > LOOKS:
                let_others()
    words[_MET] = met


@inner
def _take_row(control, met, pieces, num_pieces, row, own, out):
    """A row of the whole, at out: of each process the row that is this one in its area, of this process the one at own."""
    rank = _word(control, _RANK)
    for i in range(num_pieces):
        words = carray(typed_pointer(pieces + 8 * PIECE_WORDS * i, np.int64(0)), (PIECE_WORDS,))
        row_bytes, first, place, count, whose = words[0], words[1], words[2], words[3], words[4]
        source = own if whose == rank else _area(control, whose, met) + row * row_bytes
        _copy(out + place, source + first, count)


@inner
def _word(control, which):
    return carray(typed_pointer(control, np.int64(0)), (CONTROL_WORDS,))[which]


@kernel()
def gather(arguments, thread, team):
    """out [rows, out_bytes] of what each process has: own [rows, own_bytes]. pieces [num_pieces, PIECE_WORDS] int64: see above.
    chunk: rows at a time, for which all areas have room. gives: not 0 if others take what this process has. One thread does all
    of it, as it mostly waits."""
    control, own, own_bytes, out, out_bytes, rows, pieces, num_pieces, chunk, gives = fields(arguments)
    for _ in share(1, thread, team):
        for first in range(0, rows, chunk):
            count, met, begin = min(chunk, rows - first), _word(control, _MET), own + first * own_bytes
            if gives != 0:
                _copy(_area(control, _word(control, _RANK), met), begin, count * own_bytes)
            _meet(control)
            for row in range(count):
                _take_row(control, met, pieces, num_pieces, row, begin + row * own_bytes, out + (first + row) * out_bytes)


@kernel()
def give(arguments, thread, team):
    """The first of three kernels that do what `gather` does, of so many rows that all threads are of use: own goes to where the
    others see it."""
    control, own, own_bytes, rows = fields(arguments)
    area = _area(control, _word(control, _RANK), _word(control, _MET))
    for row in share(rows, thread, team):
        _copy(area + row * own_bytes, own + row * own_bytes, own_bytes)


@kernel()
def meet(arguments, thread, team):
    """The second: all wait for each other."""
    (control,) = fields(arguments)
    for _ in share(1, thread, team):
        _meet(control)


@kernel()
def take(arguments, thread, team):
    """The third: out [rows, out_bytes] of what the others have given, and own."""
    control, own, own_bytes, out, out_bytes, rows, pieces, num_pieces = fields(arguments)
    met = _word(control, _MET) - 1
    for row in share(rows, thread, team):
        _take_row(control, met, pieces, num_pieces, row, own + row * own_bytes, out + row * out_bytes)


NUM_ARGUMENTS = {gather: 10, give: 4, meet: 1, take: 8}
"""Of the kernels above."""


@kernel()
def own_rows(arguments, thread, team):
    """own [count] int64: which of a process's rows, first to end - 1 of a table, ids [count] int64 ask for; any for those of
    others."""
    ids, own, count, first, end = fields(arguments)
    asked, found = carray(typed_pointer(ids, np.int64(0)), (count,)), carray(typed_pointer(own, np.int64(0)), (count,))
    for i in share(count, thread, team):
        found[i] = min(max(asked[i], first), end - 1) - first


@kernel()
def gather_rows(arguments, thread, team):
    """out [count, row_bytes] of rows that one process has each. own: alike, right where ids [count] int64 ask for a row of this
    one's; bounds [processes + 1] int64: where each one's begin in the table. chunk: rows at a time."""
    control, own, out, row_bytes, count, ids, bounds, chunk = fields(arguments)
    words = carray(typed_pointer(control, np.int64(0)), (CONTROL_WORDS,))
    asked = carray(typed_pointer(ids, np.int64(0)), (count,))
    begins = carray(typed_pointer(bounds, np.int64(0)), (words[_SIZE] + 1,))
    for _ in share(1, thread, team):
        for first in range(0, count, chunk):
            here, met = min(chunk, count - first), _word(control, _MET)
            _copy(_area(control, words[_RANK], met), own + first * row_bytes, here * row_bytes)
            _meet(control)
            for row in range(here):
                owner = 0
                while asked[first + row] >= begins[owner + 1]:
                    owner += 1
                _copy(out + (first + row) * row_bytes, _area(control, owner, met) + row * row_bytes, row_bytes)
