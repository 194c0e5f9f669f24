"""Parts of tensors that hold several matrices of a model (see `stacked.py`): what says which, and those of states."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_cli.layers.wkv import SHARES

MAX_PARTS = 1 << 17  # the largest models that are published have some 60,000
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix: these rows of an expert's part of a stack. turned: that is [K, N]. expert: None where there is but one. flat:
    that is [N, 1, K]. lying: that is [K], for one row. whole: that is [G, N], for one vector. number: it is one, of a half
    where an expert has two, rows being which. rows may be a list of them, in their order here."""

    stack: str
    expert: int | None
    rows: slice | tuple[int, ...]
    turned: bool = False
    flat: bool = False
    lying: bool = False
    whole: bool = False
    number: bool = False


Parts = Iterator[tuple[str, Part]]
Config = Mapping[str, Any]


def parts_by_key_head(found: re.Match[str], stack: str, shape: tuple[int, ...], config: Config) -> Parts:
    """What belongs to a key head lies together; here it is dealt out."""
    place, what = found.groups()
    names = [f"linear_{name}" for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")]
    if what == "ssm_ba":
        place_of = f"{config.get('general.architecture')}.ssm"
        names = [f"{place_of}.{name}" for name in ("group_count", "state_size", "time_step_rank", "state_size")]
    sizes = [size for name in names if type(size := config.get(name)) is int and 0 < size <= MAX_PARTS]
    if len(sizes) < len(names) or sizes[2] % sizes[0]:
        return
    keys, key_dim, values, value_dim = sizes
    group = values // keys
    widths = {"b": group, "a": group}
    if what == "qkvz":
        widths = {"q": key_dim, "k": key_dim, "v": group * value_dim, "z": group * value_dim}
    if keys * sum(widths.values()) != shape[0]:
        return
    rows: dict[str, list[int]] = {}
    for part, first in zip(widths, itertools.accumulate(widths.values(), initial=0), strict=False):
        starts = range(first, shape[0], sum(widths.values()))
        rows[part] = [start + i for start in starts for i in range(widths[part])]
    if what == "qkvz":
        rows = {"qkv": rows["q"] + rows["k"] + rows["v"], "z": rows["z"]}
    for part, own in rows.items():
        name = {"b": "ssm_beta", "a": "ssm_alpha"}[part] if what == "ssm_ba" else f"in_proj_{part}"
        yield f"{place}.{name}.weight", Part(stack, None, tuple(own))


def delta_parts(found: re.Match[str], stack: str, shape: tuple[int, ...], config: Config) -> Parts:
    """What a delta rule reads its input by, one part behind the other."""
    names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    sizes = [size for name in names if type(size := config.get(f"linear_{name}")) is int and 0 < size <= MAX_PARTS]
    if len(sizes) < len(names):
        return
    keys, key_dim, values, value_dim = sizes
    rows = {"qkv": 2 * keys * key_dim + values * value_dim, "z": values * value_dim, "b": values, "a": values}
    if sum(rows.values()) != shape[0]:
        return
    for part, end in zip(rows, itertools.accumulate(rows.values()), strict=True):
        yield f"{found[1]}.in_proj_{part}.weight", Part(stack, None, slice(end - rows[part], end))


def shares_of_before(kind: str, found: re.Match[str], stack: str, shape: tuple[int, ...], config: Config) -> Parts:
    """Of the token before, which RWKV-7's mixtures of a row have a share of. kind: what parts' names end with."""
    for number, part in enumerate(SHARES if shape[0] == len(SHARES) else ""):
        yield f"{found[1]}{part}{kind}", Part(stack, number, ALL, whole=True)
