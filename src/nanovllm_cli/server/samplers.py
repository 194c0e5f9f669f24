"""`samplers`, llama-server's: which of the steps from logits to a token a request wants, and in which order.

The order is fixed here (engine/sampler.py says why): `ORDER`. A step that is not named is left out. Another order is taken where
it draws the same: a step that changes nothing may stand anywhere, and some steps are the same either way round. Any other is
refused, by the two steps that would have to change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError, invalid_value

ORDER = ("penalties", "dry", "temperature", "top_n_sigma", "min_p", "top_k", "typ_p", "top_p", "xtc")

_WITHOUT: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "temperature": {"temperature": 1.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
}
_LETTERS = dict(zip("edtsmkypxai", (*ORDER, "adaptive_p", "infill"), strict=True))
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "temp": "temperature", "nucleus": "top_p"}
_OFF = "adaptive_p"
"""A step whose own field is only taken where it switches it off."""
_EITHER_WAY = {
    frozenset(pair)
    for pair in (("temperature", "top_k"), ("temperature", "min_p"), ("min_p", "top_k"), ("temperature", "top_n_sigma"))
}
"""Those look at the order of logits, or at one beside the largest: to be less likely than it by a factor of m is to be that by a
factor of m ** (1 / temperature) once logits are divided by it. Deviations are divided along with them."""


def names_of(samplers: Sequence[str] | str, without: Sequence[str] = ()) -> list[str]:
    """llama-server's names, or its letters; but for those that are known to change nothing, and those in `without`. Raises
    ApiError 400 for what is no step, none of ours, or there twice."""
    names: list[str] = []
    for said in samplers:
        name = said.replace("-", "_")
        name = _LETTERS.get(name, name) if isinstance(samplers, str) else _OTHER_NAMES.get(name, name)
        if name == _OFF or name in without:
            continue
        if name == "infill":
            raise ApiError(400, "samplers: infill is not supported", code="unsupported", param="samplers")
        if name not in ORDER:
            raise invalid_value(f"samplers: {said[:40]!r} is none of {', '.join(ORDER)}", "samplers")
        if name in names:
            raise ApiError(400, f"samplers: {name} twice is not supported", code="unsupported", param="samplers")
        names.append(name)
    return names


def with_samplers(params: SamplingParams, names: Sequence[str]) -> SamplingParams:
    """What draws as these steps do, in their order. names: of `names_of`. Raises ApiError 400 where nothing does."""
    left_out: dict[str, Any] = {}
    for name in _WITHOUT.keys() - set(names):
        left_out |= _WITHOUT[name]
    params = replace(params, **left_out)
    active = [name for name in names if _changes(params, name)]
    for first, second in combinations(active, 2):
        if ORDER.index(first) > ORDER.index(second) and not _same_either_way(params, first, second):
            order = ", ".join(ORDER)
            message = f"samplers: {first} ahead of {second} is not supported while both have an effect; here the order is {order}"
            raise ApiError(400, message, code="unsupported", param="samplers")
    if "min_p" in active and "temperature" in active[active.index("min_p") :]:
        params = replace(params, min_p=params.min_p ** (1 / params.temperature))
    return params


def _changes(params: SamplingParams, name: str) -> bool:
    """Whether a step can change what is drawn. Where the likeliest token is, it is left by cuts that look for the likeliest."""
    if params.is_greedy and name in ("top_n_sigma", "min_p", "top_k", "top_p"):
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
