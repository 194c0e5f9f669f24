"""Helpers of the tests of `quantize`: the library's own calls, without the command line."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import nanovllm_cli
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.quantization.card import Card
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.pipeline import Method, Verification, quantize_model
from nanovllm_cli.quantization.plan import Choices, Plan, make_plan
from nanovllm_cli.quantization.texts import bundled_text

TINY = Path(nanovllm_cli.__file__).parent / "assets" / "tiny"


def plan_of(to: str, source: Path = TINY, **choices: Any) -> Plan:
    with open_original("tiny", source) as original:
        return make_plan(original, Choices(to, **choices))


def quantize(
    to: str,
    output: Path,
    source: Path = TINY,
    *,
    algorithm: Any = "rtn",
    verify_tokens: int = 0,
    progress: LoadProgress | None = None,
    replace: bool = False,
    num_samples: int = 8,
    **choices: Any,
) -> Card | None:
    with open_original("tiny", source) as original:
        plan = make_plan(original, Choices(to, **choices))
        verification = Verification(bundled_text("verification"), verify_tokens) if verify_tokens else None
        method = Method(algorithm, bundled_text("calibration"), num_samples)
        return quantize_model(original, plan, method, output, verification, progress or NullProgress(), replace=replace)


def digest_of(path: Path) -> str:
    """Of a file, or of all files of a folder with their names."""
    found = hashlib.blake2b()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        found.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    return found.hexdigest()
