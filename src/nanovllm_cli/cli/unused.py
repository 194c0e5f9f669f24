"""Options that were typed and change nothing, as another one has it: refused, or, where that is harmless or a habit
(`--temp 0 --top-k 40`), answered with a line. Defaults of settings files and of the environment are for where they have a
meaning, and nothing is said of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.command import flag_of, is_typed
from nanovllm_cli.errors import UsageError
from nanovllm_cli.samplers import left_out

if TYPE_CHECKING:
    from nanovllm_cli.sampling_params import SamplingParams

# Fields of SamplingParams with the value that switches each of them off.
_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "typical_p": 1.0, "xtc_probability": 0.0}
_CHANCE = {**_FILTERS, "dynatemp_range": 0.0, "mirostat": 0, "adaptive_target": -1.0, "seed": None}
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_OF_DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breaker")


def sampling_notes(ctx: Any, params: SamplingParams, known: Collection[str] | None = None) -> list[str]:
    """A line for each of SamplingOptions that was typed and that `params`, as they are in the end, leave without effect.
    known: fields of `params` that are certain; None: all, and not what a server may have besides."""
    flags = {param.name: flag_of(ctx, param.name) for param in ctx.command.params if is_typed(ctx, param.name)}
    return notes_on(flags, params, known)


def notes_on(flags: Mapping[str, str], params: SamplingParams, known: Collection[str] | None) -> list[str]:
    """The same of the fields of SamplingOptions that `flags` names. flags: what each one is called."""

    def typed(names: Iterable[str]) -> list[str]:
        return [name for name in names if name in flags]

    def changed(fields: Mapping[str, object]) -> list[str]:
        return [name for name, off in fields.items() if getattr(params, name) != off]

    def certain(*names: str) -> bool:
        return known is None or set(names) <= set(known)

    def notes() -> Iterator[tuple[list[str], str]]:
        if params.num_beams > 1 and certain("num_beams"):
            yield typed(["temperature", *changed(_CHANCE)]), "--beams takes the likeliest answer"
        elif params.is_greedy and certain("temperature"):
            yield typed(changed(_CHANCE)), "at --temp 0 the likeliest token is taken"
        elif params.mirostat and certain("mirostat"):
            yield typed(changed({**_FILTERS, "adaptive_target": -1.0})), "--mirostat is in its place"
        if params.samplers is not None and certain("samplers"):
            yield typed(changed(left_out(params.samplers))), "--samplers leaves that out"
        if params.dynatemp_range == 0 and certain("dynatemp_range"):
            yield typed(["dynatemp_exponent"]), "--dynatemp-range is 0"
        if params.mirostat == 0 and certain("mirostat"):
            yield typed(["mirostat_tau", "mirostat_eta"]), "--mirostat is 0"
        if params.adaptive_target < 0 and certain("adaptive_target"):
            yield typed(["adaptive_decay"]), "--adaptive-target is below 0"
        if params.penalty_last_n == 0 and certain("penalty_last_n"):
            yield typed(changed(_PENALTIES)), "--repeat-last-n is 0"
        if all(getattr(params, name) == off for name, off in _PENALTIES.items()) and certain(*_PENALTIES):
            yield typed(["penalty_last_n"]), "there is no penalty"
        if params.max_repeats == 0 and certain("max_repeats"):
            yield typed(["max_repeat_size", "min_repeat_size"]), "--max-repeats is 0"
        if params.num_beams == 1 and certain("num_beams"):
            yield typed(["length_penalty"]), "there are no --beams"
        if params.dry_multiplier == 0 and certain("dry_multiplier"):
            yield typed(_OF_DRY), "--dry-multiplier is 0"
        elif params.dry_penalty_last_n == 0 and certain("dry_penalty_last_n"):
            yield typed(["dry_multiplier"]), "--dry-penalty-last-n is 0"
        if params.xtc_probability == 0 and certain("xtc_probability"):
            yield typed(["xtc_threshold"]), "--xtc-probability is 0"
        elif params.xtc_threshold > 0.5 and certain("xtc_threshold"):
            yield typed(["xtc_probability"]), "--xtc-threshold is above 0.5"

    def line(names: list[str], why: str) -> str:
        verb = "changes" if len(names) == 1 else "change"
        return f"{' and '.join(flags[name] for name in names)} {verb} nothing: {why}"

    return [line(names, why) for names, why in notes() if names]


def refuse_typed(ctx: Any, names: Collection[str], why: str, hint: str | None = None) -> None:
    """Raises UsageError for the first of these parameters that was typed: `--flag why`."""
    for param in ctx.command.params:
        if param.name in names and is_typed(ctx, param.name):
            raise UsageError(f"{flag_of(ctx, param.name)} {why}", hint)


def refuse_beside(ctx: Any, flag: str, allowed: type, *more: str) -> None:
    """Raises UsageError for a parameter that was typed beside `flag`, which does all there is to do. allowed: a group of options
    that may be; more: other names of parameters."""
    names = {*(field.name for field in dataclasses.fields(allowed)), *more}
    others = [param.name for param in ctx.command.params if param.name not in names]
    refuse_typed(ctx, others, f"has no meaning with {flag}", "leave one of them out")
