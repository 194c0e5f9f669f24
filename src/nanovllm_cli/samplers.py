"""The steps from logits to a token by name, as llama.cpp's `samplers` lists them, and the order they are taken in.

Requests that say nothing of it draw in a fixed order, `ORDER` (`engine/sampler.py` says why), by kernels that know no other. One
that names its steps has those and no others. Where that is the fixed order, or draws as it does, `settled` says it so: a step
that changes nothing may stand anywhere, and some are the same either way round. What is left goes step by step
(`engine/sampling_chain.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.sampling_params import SamplingParams

ORDER = ("penalties", "dry", "temperature", "top_n_sigma", "min_p", "top_k", "typ_p", "top_p", "xtc")
LLAMA_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's own, where nobody names another."""
ADAPTIVE = "adaptive_p"
STEPS = (*ORDER, ADAPTIVE)
MAX_STEPS = 64

_WITHOUT: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
    ADAPTIVE: {"adaptive_target": -1.0},
}
_LETTERS = dict(zip("edtsmkypxai", (*STEPS, "infill"), strict=True))
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "temp": "temperature", "nucleus": "top_p"}
_GONE = ("tfs_z", "tail_free")
"""Clients still send them, with settings under which they would change nothing."""
_EITHER_WAY = {
    frozenset(pair)
    for pair in (("temperature", "top_k"), ("temperature", "min_p"), ("min_p", "top_k"), ("temperature", "top_n_sigma"))
}
"""Those look at the order of logits, or at one beside the largest: to be less likely than it by a factor of m is to be that by a
factor of m ** (1 / temperature) once logits are divided by it. Deviations are divided along with them."""


def sampler_names(said: Sequence[str] | str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Of llama.cpp's names, or of one text of its letters; but for those in `without`, and those that llama.cpp no longer has and
    passes over. Raises UsageError for what is no step here."""
    if len(said) > MAX_STEPS:
        raise UsageError(f"samplers has {len(said)} entries, at most {MAX_STEPS} are allowed")
    names: list[str] = []
    for each in said:
        name = each.replace("-", "_")
        name = _LETTERS.get(name, name) if isinstance(said, str) else _OTHER_NAMES.get(name, name)
        if name in without or name in _GONE:
            continue
        if name == "infill":
            raise UsageError("samplers: 'infill' is not supported")
        if name not in STEPS:
            known = ", ".join(map(repr, STEPS)) if not isinstance(said, str) else "".join(_LETTERS)[: len(STEPS)]
            raise UsageError(f"samplers: {each[:40]!r} is none of {known}")
        names.append(name)
    return tuple(names)


def chain_of(params: SamplingParams) -> tuple[str, ...] | None:
    """The steps that a request goes through one by one, with `mirostat` or adaptive_p at their end if it has them; None where it
    draws in the fixed order.

    What only llama.cpp has is taken in llama.cpp's order where no other is named. Mirostat takes the place of all that leaves
    tokens out.
    """
    names = params.samplers
    if names is None and (params.is_greedy or not _is_llamas(params)):
        return None
    steps = tuple(name for name in (LLAMA_ORDER if names is None else names) if name != ADAPTIVE)
    if params.mirostat and not params.is_greedy:
        return (*(name for name in steps if name in ("penalties", "dry", "temperature")), "mirostat")
    adapts = params.adaptive_target >= 0.0 and not params.is_greedy and (names is None or ADAPTIVE in names)
    return (*steps, ADAPTIVE) if adapts else steps


def left_out(names: Sequence[str]) -> dict[str, Any]:
    """Fields of SamplingParams that belong to steps which are not named, with what switches them off."""
    return {field: value for name in STEPS if name not in names for field, value in _WITHOUT[name].items()}


def settled(params: SamplingParams) -> SamplingParams:
    """What draws as these do, without `samplers` where the fixed order can."""
    names = params.samplers
    if names is None:
        return params
    params = replace(params, **left_out(names))
    active = [name for name in names if _changes(params, name)]
    if (_is_llamas(params) and not params.is_greedy) or not all(
        ORDER.index(first) < ORDER.index(second) or _same_either_way(params, first, second)
        for first, second in combinations(active, 2)
    ):
        return params
    if "min_p" in active and "temperature" in active[active.index("min_p") :]:
        params = replace(params, min_p=params.min_p ** (1 / params.temperature))
    return replace(params, samplers=None)


def _is_llamas(params: SamplingParams) -> bool:
    """Whether something is asked for that the fixed order has no place for."""
    return bool(params.mirostat or params.dynatemp_range or params.adaptive_target >= 0.0)


def _changes(params: SamplingParams, name: str) -> bool:
    """Whether a step can change what is drawn. Where the likeliest token is, it is left by cuts that look for the likeliest."""
    if params.is_greedy and name in ("top_n_sigma", "min_p", "top_k", "top_p", ADAPTIVE):
        return False
    match name:
        case "penalties":
            return params.has_penalties
        case "dry":
            return params.has_dry
        case "xtc":
            return params.has_xtc
    return any(getattr(params, field) != value for field, value in _WITHOUT[name].items())


def _same_either_way(params: SamplingParams, first: str, second: str) -> bool:
    pair = frozenset((first, second))
    return pair in _EITHER_WAY or (pair == {"penalties", "dry"} and params.repetition_penalty == 1.0)
