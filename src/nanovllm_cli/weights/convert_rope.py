"""Rotary scalings between config.json and GGUF: what each format can say, and what gets lost.

GGUF has linear, yarn and longrope by name, and any other fixed scaling as one divisor a frequency (`rope_freqs.weight`), which is
how llama.cpp's converter writes llama3's. config.json has no divisors; the llama3 that they came from is looked for, and where
there is none they go into longrope's lists, which hold any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.weights.convert_names import shortest

_USUAL_LENGTHS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
_SHARE_UNREAD = ("bailingmoe3", "hy_v4")
_GROWS_ANYHOW = ("deepseek2", "mistral4")
"""Architectures of latent attention for which llama.cpp reads no mscale_all_dim, and those whose scores and angles it lets grow
where there is none."""


class SayableRope(NamedTuple):
    """`spec`: the nearest that GGUF can say. `notes`: what it lacks, a line each."""

    spec: RopeSpec
    notes: list[str]


def sayable_in_gguf(
    rope: RopeSpec, context_length: int, known: Iterable[str] = (), *, truncate: bool = True
) -> SayableRope:
    """`rope` as it will be read back from GGUF, whose scaling lengths are the context's where nothing else is said. known: notes
    on it. truncate: what files of the family mean by yarn, see `RopeSpec`."""
    plain = RopeSpec(rope.dim, rope.theta, rope.interleaved, original_len=context_length, truncate=truncate)
    notes = [*known]
    if rope.attention_factor is not None and rope.scaling not in ("yarn", "longrope"):
        notes.append(f"rope attention_factor {rope.attention_factor:g}")
    match rope.scaling:
        case "linear":
            spec = replace(plain, scaling="linear", factor=rope.factor, original_len=rope.original_len)
        case "yarn":
            spec = replace(
                plain, scaling="yarn", factor=rope.factor, original_len=rope.original_len,
                beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, attention_factor=rope.attention_factor,
            )  # fmt: skip
            extras = ("truncate", "mscale", "mscale_all_dim")
            notes += [
                f"rope {name} {getattr(rope, name)}" for name in extras if getattr(rope, name) != getattr(spec, name)
            ]
        case "llama3":
            spec = replace(plain, scaling="divisors", short_divisors=llama3_divisors(rope))
        case "longrope":
            spec = replace(
                plain, scaling="longrope", factor=context_length / rope.original_len, original_len=rope.original_len,
                short_divisors=rope.short_divisors, long_divisors=rope.long_divisors,
                attention_factor=_longrope_factor(rope),
            )  # fmt: skip
        case "dynamic":
            spec = plain
            notes.append(
                f"rope scaling dynamic with factor {rope.factor:g}: past {rope.original_len} tokens it will differ"
            )
        case _:
            spec = replace(plain, scaling=rope.scaling, short_divisors=rope.short_divisors)
    return SayableRope(spec, notes)


def yarn_of_one_share(rope: RopeSpec, arch: str) -> tuple[RopeSpec, list[str]]:
    """Of latent attention, whose scores grow by yarn's mscale_all_dim, and what llama.cpp makes otherwise of it. Files have
    nothing for angles that grow as well."""
    if rope.scaling != "yarn":
        return rope, []
    if not rope.mscale_all_dim:
        others = "rope scaling yarn without mscale_all_dim: llama.cpp computes other scores for this architecture"
        return rope, [others] if arch in _GROWS_ANYHOW else []
    if rope.mscale != rope.mscale_all_dim or rope.attention_factor is not None:
        raise UnsupportedError("GGUF cannot say this of latent attention: yarn of two shares", "keep the model as a folder")
    unread = "rope mscale_all_dim: written, but llama.cpp does not read it for this architecture"
    return replace(rope, mscale=0.0, mscale_all_dim=0.0, attention_factor=1.0), [unread] if arch in _SHARE_UNREAD else []


def divisor_tensors(rope: RopeSpec) -> dict[str, torch.Tensor]:
    """The GGUF tensors [dim / 2] of a spec from `sayable_in_gguf`."""
    if rope.scaling == "divisors":
        return {"rope_freqs.weight": torch.tensor(rope.short_divisors)}
    if rope.scaling == "longrope":
        return {
            "rope_factors_long.weight": torch.tensor(rope.long_divisors),
            "rope_factors_short.weight": torch.tensor(rope.short_divisors),
        }
    return {}


def scaling_for_config(rope: RopeSpec, context_length: int) -> dict[str, Any] | None:
    """config.json's "rope_scaling" for what was read from a GGUF file."""
    match rope.scaling:
        case "none":
            return None
        case "divisors":
            llama3 = next(
                (each for each in _llama3_candidates(rope) if llama3_divisors(each) == rope.short_divisors), None
            )
            if llama3 is not None:
                return {
                    "rope_type": "llama3", "factor": llama3.factor, "low_freq_factor": llama3.low_freq,
                    "high_freq_factor": llama3.high_freq, "original_max_position_embeddings": llama3.original_len,
                }  # fmt: skip
            return {
                "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
                "short_factor": list(rope.short_divisors), "long_factor": list(rope.short_divisors),
                "original_max_position_embeddings": context_length,
            }  # fmt: skip
        case "longrope":
            return {
                "rope_type": "longrope", "factor": rope.factor,
                "short_factor": list(rope.short_divisors), "long_factor": list(rope.long_divisors),
                "original_max_position_embeddings": rope.original_len,
                **({} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}),
            }  # fmt: skip
        case _:
            return {
                "rope_type": rope.scaling, "factor": rope.factor, "original_max_position_embeddings": rope.original_len,
                **{name: shortest(value) for name, value in unusual_yarn(rope).items()},
            }  # fmt: skip


def unusual_yarn(rope: RopeSpec) -> dict[str, float]:
    """What is set of yarn's fields that both formats have and seldom say, under config.json's names; {} for other scalings."""
    if rope.scaling != "yarn":
        return {}
    usual = RopeSpec(rope.dim)
    found = {name: getattr(rope, name) for name in ("beta_fast", "beta_slow", "attention_factor")}
    return {name: value for name, value in found.items() if value != getattr(usual, name)}


def llama3_divisors(rope: RopeSpec) -> tuple[float, ...]:
    """What llama3 divides each frequency by, in float32 and in the order of llama.cpp's converter, so that bits agree.

    Wavelengths past original_len / low_freq are divided by factor, those under original_len / high_freq by 1; between the two
    the inverse of the divisor goes linearly with 1 / wavelength (Meta's reference model).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    wavelengths = 2 * math.pi / frequencies
    kept = (rope.original_len / wavelengths - rope.low_freq) / (rope.high_freq - rope.low_freq)
    divisors = 1 / ((1 - kept) / rope.factor + kept)
    divisors = torch.where(wavelengths > rope.original_len / rope.low_freq, torch.tensor(rope.factor), divisors)
    divisors = torch.where(wavelengths < rope.original_len / rope.high_freq, torch.tensor(1.0), divisors)
    return tuple(divisors.tolist())


def _llama3_candidates(rope: RopeSpec) -> Iterator[RopeSpec]:
    """llama3 specs that may have made these divisors: the usual one with usual lengths, then one that is fitted.

    Between its bounds, (1 / divisor - 1 / factor) / (1 - 1 / factor) = (length / (high - low)) / wavelength - low / (high - low).
    Two points give the line; only ratios of length, low and high count, so low is 1.
    """
    factor = max(rope.short_divisors)
    if factor <= 1:
        return
    base = replace(rope, scaling="llama3", factor=factor, short_divisors=(), low_freq=1.0, high_freq=4.0)
    for length in _USUAL_LENGTHS:
        yield replace(base, original_len=length)
    points = [
        (rope.theta ** (-2 * i / rope.dim) / (2 * math.pi), (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for i, divisor in enumerate(rope.short_divisors)
        if 1 < divisor < factor
    ]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y0 - y1) / (x0 - x1)
    offset = slope * x0 - y0
    if slope > 0 and offset > 0:
        high = 1 + 1 / offset
        for digits in (0, 1, 2):
            yield replace(base, original_len=max(round(slope / offset), 2), high_freq=round(high, digits) or 1.0)


def _longrope_factor(rope: RopeSpec) -> float:
    """The attention factor that longrope's rule gives (Ding et al. 2024), where the config does not say one."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_len)) if rope.factor > 1 else 1.0
