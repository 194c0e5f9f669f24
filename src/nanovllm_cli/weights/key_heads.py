"""Where rows of q, of k and of v are in a tensor that has those of a key head together: its queries, its key and its value."""

from __future__ import annotations

from typing import Any


def qkv_rows(heads: int, keys: int, head_dim: int) -> tuple[int, ...]:
    """Of all q, then of all k, then of all v. heads: of queries, which `keys` divides."""
    group = heads // keys
    own = range(group), range(group, group + 1), range(group + 1, group + 2)
    starts = ((key * (group + 2) + each) * head_dim for part in own for key in range(keys) for each in part)
    return tuple(start + i for start in starts for i in range(head_dim))


def rows_of(heads: Any, keys: Any, count: int) -> tuple[int, ...]:
    """`qkv_rows` of so many rows, by numbers of a config; empty where they don't fit."""
    if not (type(heads) is type(keys) is int and 0 < keys <= heads) or heads % keys or count % (heads + 2 * keys):
        return ()
    return qkv_rows(heads, keys, count // (heads + 2 * keys))
