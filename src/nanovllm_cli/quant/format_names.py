"""Formats by name: what `--quant`, `--to` and their kin take.

    int8[:group=N][:zeros]           int8 weights and activations; without a group one scale a row
    int8-weight-only, fp8-weight-only, int4-weight-only …     activations as they are
    int4[:group=N][:zeros]           4 bits, groups of 128; likewise int2 and int3. group=0: one scale a row
    fp8[:block=128]                  e4m3, a scale a row, or a block of 128 x 128
    nf4[:group=N]                    16 quantiles of the normal distribution, groups of 64
    q8_0, q4_0, q4_k, …              GGUF's block types

Not covered: GGUF's mixes of several types (q4_k_m), which say which tensor gets what; `quantization/mixes.py` has those.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm_cli.errors import UsageError
from nanovllm_cli.quant.format import Blocks, Format, Fp8, Integer, Nf4
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from nanovllm_cli.quant.gguf_encode import ENCODED

DEFAULT_GROUP = 128
GROUPS = (32, 64, 128, 256)
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FORMAT_NAMES = (
    *("int8", "int8-weight-only", "fp8", "fp8-weight-only", "int4", "int4-weight-only", "int3", "int2", "nf4"),
    *(name.lower() for name in BLOCK_TYPES),
)
_MADE_BY = ("gptq", "awq", "gptq_marlin", "awq_marlin", "compressed-tensors", "bitsandbytes", "modelopt", "bnb", "gguf", "mxfp4")
"""What vLLM calls the formats of checkpoints by."""
_NEAR = {"4bit": "int4", "8bit": "int8", "4": "int4", "8": "int8"}
_PLAIN = ("f32", "fp32", "f16", "fp16", "bf16")


def parse_format(spec: str) -> Format:
    """The format that `spec` names, such as "int4:group=32:zeros". UsageError lists what there is, the nearest first."""
    name, *words = spec.strip().lower().split(":")
    base = name.removesuffix("-weight-only")
    activation: Any = "none" if base != name else None
    if name.upper() in BLOCK_TYPES:
        _options(spec, words, {})
        return Blocks(name.upper())
    if match := re.fullmatch(r"int([2348])", base):
        given = _options(spec, words, {"group": (0, *GROUPS), "zeros": ()})
        bits: Any = int(match[1])
        group = given.get("group", 0 if bits == 8 else DEFAULT_GROUP)
        return Integer(bits, group, "zeros" in given, activation or "int8")
    if base == "fp8":
        return Fp8(128 if _options(spec, words, {"block": (128,)}) else 0, activation or "dynamic")
    if name == "nf4":
        return Nf4(**_options(spec, words, {"group": GROUPS}))
    raise unknown_format(spec, FORMAT_NAMES)


def unknown_format(spec: str, names: tuple[str, ...]) -> UsageError:
    """For a spec that none of `names` fits."""
    name = spec.strip().lower().split(":")[0]
    if name.upper() in BLOCKS and name.upper() not in ENCODED:
        writer = "llama.cpp's llama-quantize writes it, with an importance matrix if it has 1 or 2 bits"
        return UsageError(f"{name} can be read, not written", f"{writer}; known here: {', '.join(names)}")
    if name.upper() in BLOCKS:
        return UsageError(
            f"{name} is written by convert alone", f"nanovllm convert MODEL --outtype {name}; known here: {', '.join(names)}"
        )
    if name in _PLAIN:
        writer = f"nanovllm convert MODEL --outtype {name.replace('fp', 'f')} writes plain numbers"
        return UsageError(f"{name} is no quantized format", f"{writer}; --dtype says what is computed in")
    if name in _MADE_BY:
        maker = f"; nanovllm quantize MODEL --to int4 --algorithm {name} makes one" if name in ("gptq", "awq") else ""
        return UsageError(f"{name} is no format", f"a checkpoint that was quantized so is read as it is{maker}")
    near = difflib.get_close_matches(_NEAR.get(name, name), names, n=1, cutoff=0.6)
    suggestion = f"did you mean {near[0]}? " if near else ""
    return UsageError(f"unknown format {spec[:80]!r}", f"{suggestion}known: {', '.join(names)}")


def _options(spec: str, words: list[str], allowed: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """What stands behind a name's colons. allowed: the numbers that each option may have; one that takes none is 1."""
    found: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in allowed:
            known = f"{spec.split(':')[0]} takes {', '.join(allowed) or 'none'}"
            raise UsageError(f"unknown option {word[:40]!r} in the format {spec[:80]!r}", known)
        if key in found:
            raise UsageError(f"{key} stands twice in the format {spec[:80]!r}")
        numbers = {str(number): number for number in allowed[key]} or {"": 1}
        if value not in numbers:
            hint = f"known: {', '.join(numbers)}" if allowed[key] else f"write :{key}"
            raise UsageError(f"{word[:40]!r} has no meaning in the format {spec[:80]!r}", hint)
        found[key] = numbers[value]
    return found
