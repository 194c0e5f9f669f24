"""What a request changes in rows of logits before the draw: edits of single tokens, one after another.

Addresses and counts only; the caller has checked them.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer

TOKEN, SCALE, MINUS, THEN_MINUS, EDIT = range(5)
"""Columns of an edit of one logit, float32 (exact for any id that `cpu_sampling.MAX_VOCABULARY` lets through). A positive logit
is divided by SCALE, another multiplied; then the other two are subtracted. A ban subtracts infinity."""


@kernel()
def edit_rows(arguments, thread, team):
    """The logits at the addresses rows [B], edited, to copies [B, V]; a row that holds NaN or +inf starts with NaN there.

    edits [E, EDIT] float32, of row r from edit_starts[r] to edit_starts[r + 1], one after another.
    """
    rows, num_rows, size, edits, edit_starts, copies = fields(arguments)
    addresses = carray(typed_pointer(rows, np.int64(0)), (num_rows,))
    starts = carray(typed_pointer(edit_starts, np.int64(0)), (num_rows + 1,))
    table = carray(typed_pointer(edits, np.float32(0)), (starts[num_rows], EDIT))
    out = carray(typed_pointer(copies, np.float32(0)), (num_rows, size))
    for r in share(num_rows, thread, team):
        _edit(carray(typed_pointer(addresses[r], np.float32(0)), (size,)), table[starts[r] : starts[r + 1]], out[r])


@inner
def _edit(source, edits, out):
    num_bad = 0
    for i in range(len(out)):
        num_bad += not source[i] < np.inf
        out[i] = source[i]
    if num_bad:  # said by the logits as they came: a ban would hide it
        out[0] = np.nan
        return
    for e in range(len(edits)):
        token, scale = np.int64(edits[e, TOKEN]), edits[e, SCALE]
        x = out[token]
        x = x / scale if x > 0 else x * scale
        out[token] = x - edits[e, MINUS] - edits[e, THEN_MINUS]
