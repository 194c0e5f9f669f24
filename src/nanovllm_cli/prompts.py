"""What a caller of the library may give as a prompt, or as several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from nanovllm_cli.errors import UsageError
from nanovllm_cli.vision_spec import TokenIds

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or either as vLLM has them: {"prompt": text} or {"prompt_token_ids": ids}."""
_TEXT, _IDS = "prompt", "prompt_token_ids"


def token_ids(prompt: Prompt, encode: Callable[[str], list[int]]) -> list[int]:
    """A prompt's ids, with its images where it has some. UsageError for what is no prompt."""
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({_TEXT}, {_IDS}) or isinstance(next(iter(prompt.values())), str) is not (_TEXT in prompt):
            raise UsageError(f"a prompt's keys are {_TEXT!r}, a text, or {_IDS!r}", "images go into messages, for `chat`")
        prompt = next(iter(prompt.values()))
    if isinstance(prompt, str):
        return encode(prompt)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        raise UsageError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    return ids if isinstance(ids, TokenIds) else list(ids)


def text_of(prompt: Prompt) -> str | None:
    """What of a prompt is text."""
    text = prompt.get(_TEXT) if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, told apart by what is inside: a list of ints is one prompt. Arrays and tensors are lists, too."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence | Mapping) or isinstance(prompts, bytes):
        raise UsageError(f"prompts are a list of texts, or of lists of token ids, not {type(prompts).__name__}")
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
