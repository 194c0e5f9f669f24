"""Fields of SamplingParams, one by one: what a value has to be, and what becomes of it. Each raises UsageError, which begins with
the field's name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from nanovllm_cli.config import MAX_LORA_MODULES, MAX_LORA_NAME, MAX_SCALE, Lora
from nanovllm_cli.errors import CheckpointError, UsageError

MAX_TOKEN_ID = 2**31 - 1
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
_MOST_CHARS = 64
OTHER_NAMES = {
    "max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "n_predict": "max_tokens", "temp": "temperature",
    "repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n", "typical": "typical_p",
    "num_return_sequences": "n", "stop_strings": "stop", "eos_token_id": "stop_token_ids", "beam_width": "num_beams",
    "top_logprobs": "logprobs", "src_lang": "source_language", "tgt_lang": "target_language",
}  # fmt: skip
"""What transformers, llama.cpp and OpenAI call fields."""
HABITS = {
    **dict.fromkeys(("structured_outputs", "guided_decoding", "response_format", "json_schema", "grammar"),
                    'constraint=Constraint("json_schema", …), of nanovllm_cli.constraint; or "regex", "choice", "gbnf"'),
    **dict.fromkeys(("use_beam_search", "best_of"), "num_beams looks for the likeliest answers, n draws several"),
    **dict.fromkeys(("logits_processors", "logits_processor"), "logit_bias, bad_words, allowed_token_ids say what is drawn"),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens", "output_kind", "extra_args", "skip_clone", "flat_logprobs",
                     "stream_interval", "skip_reading_prefix_cache"), "leave it out"),
    "repetition_detection": "max_repeats, max_repeat_size and min_repeat_size end an answer that repeats itself",
    "thinking_token_budget": "reasoning=ReasoningPhase(…), of nanovllm_cli.constraint",
    "logprob_token_ids": "logprobs=100 reports so many of the likeliest",
    "do_sample": "temperature=0 takes the likeliest token", "early_stopping": "leave it out",
    "truncate_prompt_tokens": "a prompt is never cut: shorten it", "lora_request": "lora=NAME, of the model's lora_modules",
}  # fmt: skip
"""Fields that vLLM and transformers have, and what serves instead."""


class LogitBias(Mapping[int, float]):
    """A mapping that cannot change: hashable, ordered by id, equal to the dict it was made of."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float]) -> None:
        self._items = dict(sorted(items.items()))

    def __getitem__(self, token_id: int) -> float:
        return self._items[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def shown(value: object) -> str:
    try:
        return reprlib.repr(value).replace("\n", " ")
    except ValueError:  # an integer with more digits than Python prints
        return "a number of thousands of digits"


def refused(name: str, value: object, allowed: str) -> UsageError:
    return UsageError(f"{name} must be {allowed}, not {shown(value)}")


def number(name: str, value: object, low: float, high: float) -> float:
    """Numpy's numbers are Real, and Integral, like Python's; typeshed knows no comparison of either."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise refused(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def whole_number(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise refused(name, value, f"a whole number from {low} to {high}")
    return int(value)


def entries_of(name: str, value: object, most: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise refused(name, value, "a list")
    if len(value) > most:
        raise UsageError(f"{name} has {len(value)} entries, at most {most} are allowed")
    return value


def strings(name: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    """One string stands for a list of itself."""
    entries = entries_of(name, [value] if isinstance(value, str) else value, most)
    for entry in entries:
        if not isinstance(entry, str) or not 1 <= len(entry) <= longest:
            raise refused(name, entry, f"strings of 1 to {longest} characters")
        if any("\ud800" <= character <= "\udfff" for character in entry):
            raise UsageError(f"{name} must be valid text, not {entry[:32]!a} with half a surrogate pair")
    return tuple(entries)


def token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    return tuple(whole_number(f"{name}: a token id", entry, 0, MAX_TOKEN_ID) for entry in entries_of(name, value, most))


def adapters(value: object) -> tuple[Lora, ...]:
    """A name alone is one adapter, of scale 1."""
    entries = [value] if isinstance(value, str) else list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(entries, list | tuple):
        raise refused("lora", value, "an adapter's name, a list of names, or names with their scales")
    chosen: dict[str, float] = {}
    for entry in entries_of("lora", entries, MAX_LORA_MODULES):
        name, scale = entry if isinstance(entry, list | tuple) and len(entry) == 2 else (entry, 1.0)
        (name,) = strings("lora", name, 1, MAX_LORA_NAME)
        if name in chosen:
            raise UsageError(f"lora has {shown(name)} twice")
        chosen[name] = number(f"lora: the scale of {shown(name)}", scale, -MAX_SCALE, MAX_SCALE)
    return tuple(Lora(*pair) for pair in chosen.items())


def token_biases(value: object) -> LogitBias:
    if not isinstance(value, Mapping):
        raise refused("logit_bias", value, "a mapping of token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise UsageError(f"logit_bias has {len(value)} entries, at most {MAX_LOGIT_BIASES} are allowed")
    biases: dict[int, float] = {}
    for token_id, bias in value.items():
        known_id = whole_number("logit_bias: a token id", token_id, 0, MAX_TOKEN_ID)
        biases[known_id] = number(f"logit_bias[{known_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return LogitBias(biases)


def check_language(name: str, value: object) -> None:
    """A name or a code, or None; which ones there are, a model knows."""
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= _MOST_CHARS and value.isprintable()):
        raise refused(name, value, f"a language's name or code of up to {_MOST_CHARS} characters")


def bans_of(suppressed: object, vocab_size: int) -> LogitBias | None:
    """Of generation_config.json's suppress_tokens. Raises CheckpointError."""
    try:
        ids = token_ids("suppress_tokens", suppressed, MAX_LOGIT_BIASES)
    except UsageError as error:
        raise CheckpointError(f"generation_config.json: {error.message}", "correct the file") from error
    return LogitBias({token_id: -MAX_LOGIT_BIAS for token_id in ids if token_id < vocab_size}) or None
