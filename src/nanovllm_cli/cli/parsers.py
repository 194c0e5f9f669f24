"""What the words behind a flag mean, where that is more than a number or a name. ValueError says what was expected."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_args

from nanovllm_cli.config import MAX_SCALE, EngineConfig, KVCacheDType, LoraModule, RopeChange, RopeKind
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.spoken import LANGUAGES

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([kKmMgGtT]?)(i?[bB])?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_CACHE_TYPES = get_args(KVCacheDType)
_CACHE_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp8_e4m3": "fp8", "q8_0": "int8"}
_NEAR_CACHE_TYPES = {"fp8_e5m2": "fp8 is e4m3"} | dict.fromkeys(
    ("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"), "int8 and fp8 take the least here"
)
_ROPE_KEYS = {"factor": "scale", "rope_theta": "base", "original_max_position_embeddings": "original_len"}
_NEAR_DEVICES = {"none": "cpu"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_LETTERS = {meant: letter for letter, meant in _ESCAPES.items()}


ALL_LAYERS = 999_999
"""More than any model has."""


def count(text: str) -> int:
    """Tokens: 4096, 25.6k (25,600), 32K (32,768). 0 and -1 pass through."""
    if text.strip() in ("0", "-1"):
        return int(text)
    return _size(text, "a number of tokens such as 4096, 25.6k (thousands) or 32K (times 1024)", units=("",))


def bound(text: str) -> float:
    """A number, or "none", which is infinity."""
    if text.strip().lower() == "none":
        return math.inf
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{text!r} is not a number, or none")
    return found


def memory(text: str) -> int:
    """Bytes: 512M, 1.5G, 1.5GiB (powers of 1024), 800MB (powers of 1000)."""
    return _size(text, "a size such as 512M, 1.5GiB (powers of 1024) or 800MB (powers of 1000)", units=("", "b", "ib"))


def _size(text: str, expected: str, units: tuple[str, ...]) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] or "").lower() not in units:
        raise ValueError(f"{text!r} is not {expected}")
    letter, unit = match[2], (match[3] or "").lower()
    decimal = unit == "b" if "b" in units else letter.islower()
    whole, _, fraction = match[1].partition(".")
    scale: int = (1000 if decimal else 1024) ** _POWERS[letter.lower()]
    value = int(whole or 0) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if not 0 < value < 1 << 62 or (scale == 1 and fraction.strip("0")):
        raise ValueError(f"{text!r} is not {expected}")
    return value


def logit_bias(text: str) -> tuple[int, float]:
    """15043+1, 15043-1.5: a token id and what is added to its logit."""
    match = re.fullmatch(r"\s*([0-9]{1,10})\s*([+-](?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*", text)
    if match is None:
        never = "; -100 all but forbids a token, --bad-word forbids a text" if text.strip().lower().endswith("-inf") else ""
        spoken = f"; a language is --language {text}" if text in LANGUAGES or text == "auto" else ""  # whisper.cpp's -l
        raise ValueError(f"{text!r} is not a token id with a bias, such as 15043+1 or 15043-1.5{never}{spoken}")
    return int(match[1]), float(match[2])


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """What stands behind `flag`. Raises UsageError for anything but a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"{flag} is not JSON: {failure}", example) from failure
    if not isinstance(value, dict):
        raise UsageError(f"{flag} is not a JSON object", example)
    return value


def escaped(text: str) -> str:
    r"""A short string in which \n, \t, \r and \\ mean what they mean in most languages; other backslashes stay."""
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)


def unescaped(text: str) -> str:
    """What `escaped` makes `text` of."""
    return re.sub(r"[\n\t\r\\]", lambda match: "\\" + _LETTERS[match[0]], text)


def cache_type(text: str) -> str:
    """What K or V is kept as, by EngineConfig's names, llama.cpp's and vLLM's, in any case."""
    lowered = text.lower()
    name = _CACHE_NAMES.get(lowered, lowered)
    if name in _CACHE_TYPES:
        return name
    near = f"; {_NEAR_CACHE_TYPES[lowered]}" if lowered in _NEAR_CACHE_TYPES else ""
    raise ValueError(f"{text!r} is not a KV cache type: {', '.join((*_CACHE_TYPES, *_CACHE_NAMES))}{near}")


def rope_scaling(text: str) -> RopeChange:
    """A kind, or an object with what transformers says of one: {"rope_type": "yarn", "factor": 4.0}."""
    if not text.lstrip().startswith("{"):
        if text.lower() not in get_args(RopeKind):
            raise ValueError(f"{text!r} is not a scaling of rotary positions: {', '.join(get_args(RopeKind))}")
        return RopeChange(text.lower())  # type: ignore[arg-type]
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON: {error}") from error
    kinds = [said.pop(name) for name in ("rope_type", "type") if name in said]
    known: dict[str, Any] = {name: said.pop(key, None) for key, name in _ROPE_KEYS.items()}
    if said or len(kinds) > 1:
        other = next(iter(said), "type")
        raise ValueError(f"{text!r}: {other!r} is not known here: rope_type, {', '.join(_ROPE_KEYS)}")
    return RopeChange(kinds[0] if kinds else None, **known)


Pairs = tuple[tuple[str, Any], ...]
_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int, "float": float, "bool": {"true": True, "false": False}.__getitem__, "str": str,
}  # fmt: skip


def override_kv(text: str) -> Pairs:
    """KEY=TYPE:VALUE, or several with commas between."""
    found = []
    for part in re.split(r",(?=[^,=:]+=(?:int|float|bool|str):)", text):
        match = re.fullmatch(r"([^=:]+)=(int|float|bool|str):(.*)", part, re.DOTALL)
        if match is None:
            raise ValueError(f"{part!r} is not KEY=TYPE:VALUE with int, float, bool or str, such as general.name=str:mine")
        key, kind, value = match.groups()
        try:
            found.append((key, _TYPES[kind](value)))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{key}: {value!r} is no {kind}") from error
    return tuple(found)


def layers(text: str) -> int:
    """How many: a number, all, or auto, which is -1."""
    known = {"auto": -1, "-1": -1, "all": ALL_LAYERS, "-2": ALL_LAYERS}
    if text.strip() in known:
        return known[text.strip()]
    if re.fullmatch(r"[0-9]{1,6}", text.strip()) is None:
        raise ValueError(f"{text!r} is not a number of layers, all or auto")
    return int(text)


def device(text: str) -> str:
    """auto, cpu, cuda, cuda:N."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text) is None:
        known = re.fullmatch(r"(gpu|cuda)([0-9]{1,3})?", text.lower())
        near = "cuda" + (f":{known[2]}" if known[2] else "") if known else _NEAR_DEVICES.get(text.lower())
        raise ValueError(f"{text!r} is not a device: auto, cpu, cuda, cuda:N{f'; did you mean {near}?' if near else ''}")
    return text


Scaled = tuple[tuple[str, float], ...]


def listed(text: str) -> list[str]:
    """A path, or several with commas between them, as llama.cpp takes them."""
    return [text] if os.path.exists(text) else [name for name in text.split(",") if name] or [text]


def scaled(text: str) -> Scaled:
    """PATH:SCALE of an adapter, or several with commas between them."""
    return _scaled(text, "an adapter with its scale, such as folder:0.5")


def scaled_vector(text: str) -> Scaled:
    """The same of a control vector's file."""
    return _scaled(text, "a control vector with its scale, such as happy.gguf:-0.5")


def _scaled(text: str, expected: str) -> Scaled:
    found = []
    for each in text.split(","):
        name, colon, scale = each.rpartition(":")
        try:
            value = float(scale)
        except ValueError:
            value = math.nan
        if not (name and colon and abs(value) <= MAX_SCALE):
            raise ValueError(f"{each!r} is not {expected}")
        found.append((name, value))
    return tuple(found)


def lora_module(text: str) -> LoraModule:
    """NAME=PATH of an adapter that requests choose."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"{text!r} is not an adapter with its name, such as sql=folder")
    return LoraModule(name, path)


_NO_FLAGS = {
    "allowed_token_ids", "stop_token_ids", "include_stop_str_in_output", "prompt_logprobs", "skip_special_tokens", "constraint",
    "reasoning", "transcript", "block_size", "num_blocks", "memory_utilization", "enable_prefix_caching", "aging_seconds",
    "cache_salt_secret",
}  # fmt: skip
_FIELDS = {field.name for field in (*fields(SamplingParams), *fields(EngineConfig))} - _NO_FLAGS
FLAGS = {name: "--" + name.replace("_", "-") for name in _FIELDS} | {
    "max_tokens": "--predict", "n": "--num-answers", "repetition_penalty": "--repeat-penalty", "temperature": "--temp",
    "penalty_last_n": "--repeat-last-n", "typical_p": "--typical", "top_n_sigma": "--top-nsigma", "bad_words": "--bad-word",
    "dry_sequence_breakers": "--dry-sequence-breaker", "max_num_batched_tokens": "--batch-size", "max_model_len": "--ctx-size",
    "kv_cache_bytes": "--kv-cache", "num_speculative_tokens": "--speculate", "policy": "--scheduling-policy",
    "rope": "--rope-scaling", "overrides": "--override-kv", "control_vectors": "--control-vector",
    "control_vector_layers": "--control-vector-layer-range", "num_beams": "--beams",
}  # fmt: skip
"""What fields of SamplingParams and EngineConfig are called on the command line: those that are an option of some command."""


@contextlib.contextmanager
def by_their_flags() -> Iterator[None]:
    """Fields of SamplingParams and EngineConfig in a UsageError are called as they were typed, but not in what it quotes."""
    try:
        yield
    except UsageError as error:
        # Whole words: "n" and "stop" are names only where a message begins.
        words = r"""(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|^[a-z_]+|\b[a-z]+_[a-z_]+\b"""
        error.message = re.sub(words, lambda match: FLAGS.get(match[0], match[0]), error.message)
        error.args = (error.message,)
        raise
