"""What results were measured with, which of that tells them apart, and how it is said."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nanovllm_cli.bench.record import Record, Result

# A record's settings, and what is said in front of a value; the first that tell records apart are used.
_RECORD = {
    "model_type": "", "backends": "", "n_threads": "threads ", "tensor_parallel_size": "tp ", "n_batch": "batch ",
    "n_ubatch": "ubatch ", "type_k": "K ", "type_v": "V ", "quant": "", "formats": "", "dtype": "",
    "deterministic": "deterministic ", "activations": "activations ",
    "n_gpu_layers": "ngl ", "n_cpu_moe": "ncmoe ",
    "flash_attn": "fa ", "model_filename": "", "cpu_info": "", "gpu_info": "",
}  # fmt: skip
_BESIDE_THE_POINT = ("cpu_info", "gpu_info", "url", "seed", "num_prompts")


def settings_of(result: Result) -> dict[str, Any]:
    """By name. Of a model's file only its own name: folders differ between machines."""
    if isinstance(result, Record):
        values = {name: getattr(result, name) for name in _RECORD}
        return values | {"model_type": short_model(result), "model_filename": PurePath(result.model_filename).name}
    return {"kind": result.kind, "model": result.model, **result.settings}


def short_model(record: Record) -> str:
    """The model in few words: its type, which llama-bench has too, or the file's name."""
    return record.model_type or PurePath(record.model_filename).stem or "model"


def distinguishing(groups: Iterable[Sequence[Result]]) -> list[str]:
    """The names of settings that tell apart what can be told apart within each group; of several that say the same, the first.
    A group has results of one kind: records, or runs."""
    settings = [[settings_of(result) for result in group] for group in groups]
    names = dict.fromkeys(name for group in settings for each in group for name in each)
    chosen: list[str] = []
    for name in names:
        if name not in _BESIDE_THE_POINT and any(_splits(group, chosen, name) for group in settings):
            chosen.append(name)
    return chosen


def said(settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those settings in words; what is empty is left out."""
    words = [(_RECORD.get(name, f"{name.replace('_', ' ')} "), plain(settings.get(name))) for name in names]
    return [before.lstrip() + value for before, value in words if value]


def plain(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _splits(group: Sequence[Mapping[str, Any]], chosen: Sequence[str], name: str) -> bool:
    """Whether results that agree in all that is chosen differ in `name`."""
    found: dict[tuple[str, ...], str] = {}
    for each in group:
        value = repr(each.get(name))
        if found.setdefault(tuple(repr(each.get(other)) for other in chosen), value) != value:
            return True
    return False
