"""What is asked of an OpenAI-compatible server, and what its streamed answers say.

Requests carry what was asked for and nothing else: a server's own defaults count, and servers differ in what they take. Names
are OpenAI's, vLLM's where OpenAI has none. How far a prompt is read is asked of servers that are known to tell (llama-server's
return_progress). Answers are untrusted: what has no meaning is passed over,
and what is missing is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanovllm_cli.client.events import StreamError, event_object, token_count
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.sampling_params import SamplingParams

CHAT, TEXT = "/chat/completions", "/completions"
_REASONING = ("reasoning_content", "reasoning")
_REPEATS = ("max_repeats", "max_repeat_size", "min_repeat_size")
_NO_CHANCE = -9999.0  # OpenAI's and vLLM's stand-in for the logarithm of zero

Given = Mapping[str, Any]
"""Fields of SamplingParams that were asked for, and "reasoning_budget": most tokens of reasoning, -1 for no limit."""


def chat_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    given: Given,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tells_reading: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A conversation whose last message is to be answered; or, where that is an answer, to be gone on with. tells_reading: its
    server can tell how far the prompt is read. tools: that may be called, in OpenAI's form. Raises UnsupportedError."""
    body = {"model": model, "messages": list(messages), **_fields(given, tells_reading)}
    if given.get("reasoning_budget", -1) >= 0:
        body["reasoning_budget"] = given["reasoning_budget"]
    if body.get("logprobs") is not None:
        body["logprobs"], body["top_logprobs"] = True, body["logprobs"]
    if messages and messages[-1].get("role") == "assistant":
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools:
        body["tools"] = list(tools)
    if template_kwargs:
        body["chat_template_kwargs"] = dict(template_kwargs)
    return body


def text_body(model: str, prompt: str, given: Given, *, tells_reading: bool = False) -> dict[str, Any]:
    """A text that is to be gone on with. Where no length is given it goes as far as the context does: null, because the default
    of most servers is 16. Raises UsageError and UnsupportedError."""
    if given.get("reasoning_budget", -1) >= 0:
        raise UsageError("a budget for reasoning has no meaning in plain text")
    return {"model": model, "prompt": prompt, "max_tokens": None, **_fields(given, tells_reading)}


def _fields(given: Given, tells_reading: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if tells_reading:
        body["return_progress"] = True
    for name, value in given.items():
        if name == "constraint":
            body |= _form(value)
        elif name == "logit_bias":
            body[name] = {str(token_id): bias for token_id, bias in value.items()}
        elif name in _REPEATS:
            continue
        elif name == "num_beams":
            body |= {name: value, "use_beam_search": value > 1}  # vLLM has as many beams as answers
        elif name == "reasoning":
            raise UnsupportedError("a server takes no tags of reasoning: it knows those of its models")
        elif value is not None and name != "reasoning_budget" and (name, value) != ("seed", -1):
            body[name] = list(value) if isinstance(value, tuple) else value
    if any(name in given for name in _REPEATS):
        body["repetition_detection"] = _repeats(given)
    return body


def _repeats(given: Given) -> dict[str, int]:
    """vLLM's object: whole, as no server could add a part of it to its own default."""
    if "max_repeats" not in given:
        raise UsageError("max_repeat_size and min_repeat_size have no meaning with a server, but beside max_repeats")
    asked = SamplingParams(**{name: given[name] for name in _REPEATS if name in given})
    if not asked.max_repeats:
        return {"max_pattern_size": 0}
    sizes = {"max_pattern_size": asked.max_repeat_size, "min_pattern_size": asked.min_repeat_size}
    return {**sizes, "min_count": asked.max_repeats}


def _form(form: Constraint | None) -> dict[str, Any]:
    if form is None:
        return {}
    if form.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(form.text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    name = "grammar" if form.kind in ("lark", "gbnf") else form.kind
    return {"structured_outputs": {name: json.loads(form.text) if form.kind == "choice" else form.text}}


class TokenLogprob(NamedTuple):
    """logprob: None for a probability of zero. top: the likeliest tokens, with theirs."""

    token: str
    logprob: float | None
    top: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Of a tool's call. index: which call of its answer."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What an event adds to one answer. num_tokens: of the whole answer, where the server counts its answers one by one. calls:
    pieces of calls of tools."""

    index: int
    reasoning: str
    content: str
    token_ids: tuple[int, ...] | None
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None
    stop_reason: str | int | None
    num_tokens: int | None = None
    calls: tuple[CallPiece, ...] = ()


class Timings(NamedTuple):
    """llama-server's `timings`: of the prompt's tokens that were computed, and of all answers; tokens that were guessed ahead,
    and how many of these were right. None where it does not say."""

    prompt_tokens: int | None
    prompt_seconds: float | None
    answer_tokens: int | None
    answer_seconds: float | None
    guessed_tokens: int | None
    held_tokens: int | None


class AnswerStream:
    """Makes deltas of events. prompt_tokens, cached_tokens, answer_tokens: what the server's `usage` has said last; timings:
    likewise, from the servers that say them. read_tokens: of the prompt, by the last one that told how far it is read."""

    def __init__(self) -> None:
        self.timings: Timings | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.answer_tokens: int | None = None
        self.read_tokens: int | None = None
        self.done = False
        self._ended: set[int] = set()

    def is_whole(self, num_answers: int) -> bool:
        """All of it came: the server said so, or gave the reason why each of the answers ended."""
        return self.done or len(self._ended) >= num_answers

    def read(self, data: str) -> list[Delta]:
        """Raises StreamError."""
        if data.strip() == "[DONE]":
            self.done = True
            return []
        chunk = event_object(data)
        self._read_usage(chunk.get("usage"))
        self._read_progress(chunk.get("prompt_progress"))
        self.timings = _timings(chunk.get("timings")) or self.timings
        choices = chunk.get("choices")
        return [_delta(each) for each in (choices if isinstance(choices, list) else ()) if self._is_choice(each)]

    def _is_choice(self, choice: Any) -> bool:
        if not isinstance(choice, dict):
            return False
        index = choice.get("index", 0)
        if not isinstance(index, int) or not 0 <= index < 1 << 16:
            raise StreamError(f"an answer of number {str(index)[:20]}")
        if choice.get("finish_reason"):
            self._ended.add(index)
        return True

    def _read_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.prompt_tokens = token_count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.answer_tokens = token_count(usage.get("completion_tokens"), self.answer_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = token_count(details.get("cached_tokens"), self.cached_tokens)

    def _read_progress(self, progress: Any) -> None:
        if isinstance(progress, dict) and (total := token_count(progress.get("total"))) is not None:
            self.prompt_tokens = total
            self.read_tokens = token_count(progress.get("processed"), self.read_tokens)


def _timings(value: Any) -> Timings | None:
    if not isinstance(value, dict):
        return None
    return Timings(
        token_count(value.get("prompt_n")),
        _seconds(value.get("prompt_ms")),
        token_count(value.get("predicted_n")),
        _seconds(value.get("predicted_ms")),
        token_count(value.get("draft_n")),
        token_count(value.get("draft_n_accepted")),
    )


def _seconds(ms: Any) -> float | None:
    return ms / 1000 if isinstance(ms, int | float) and not isinstance(ms, bool) and 0 <= ms < 1e12 else None


def _delta(choice: dict[str, Any]) -> Delta:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        delta = {"content": choice.get("text")}
    thought, said = _parts(delta.get("content"))
    reasoning = next((text for name in _REASONING if (text := _text(delta.get(name)))), thought)
    content = said or _text(delta.get("refusal"))
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    ids = choice.get("token_ids")
    known = isinstance(ids, list) and all(token_count(each) is not None for each in ids)
    return Delta(
        choice.get("index", 0),
        reasoning,
        content,
        tuple(ids or ()) if known else None,
        _logprobs(choice.get("logprobs")),
        _text(reason) or None,
        _text(stop) if isinstance(stop, str) else stop if isinstance(stop, int) else None,
        token_count(choice.get("completion_tokens")),
        _calls(delta.get("tool_calls")),
    )


def _calls(value: Any) -> tuple[CallPiece, ...]:
    """Each belongs to the call of its index; a server that sends whole calls may leave that out."""
    found = []
    for place, each in enumerate(value if isinstance(value, list) else ()):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict):
            continue
        index, arguments = token_count(each.get("index"), place), function.get("arguments")
        given = json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments)
        found.append(CallPiece(index or 0, _text(each.get("id")) or None, _text(function.get("name")) or None, given))
    return tuple(found)


def _parts(content: Any) -> tuple[str, str]:
    """Reasoning and text of what is said: a text, or Mistral's list of parts, where reasoning is one of parts itself."""
    if not isinstance(content, list):
        return "", _text(content)
    parts = [part for part in content if isinstance(part, dict)]
    thoughts = (part["thinking"] for part in parts if part.get("type") == "thinking" and isinstance(part.get("thinking"), list))
    thought = "".join(_text(each.get("text")) for inner in thoughts for each in inner if isinstance(each, dict))
    return thought, "".join(_text(part.get("text")) for part in parts)


def _logprobs(value: Any) -> list[TokenLogprob] | None:
    """Of a chat (a list of objects), or of a text (lists beside each other)."""
    if not isinstance(value, dict):
        return None
    content = value.get("content")
    if isinstance(content, list):
        return [_of_chat(each) for each in content if isinstance(each, dict)]
    tokens, numbers, tops = value.get("tokens"), value.get("token_logprobs"), value.get("top_logprobs")
    if not isinstance(tokens, list) or not isinstance(numbers, list):
        return None
    others = tops if isinstance(tops, list) and len(tops) == len(tokens) else [None] * len(tokens)
    return [
        TokenLogprob(_text(token), _number(number), _likeliest(top.items() if isinstance(top, dict) else ()))
        for token, number, top in zip(tokens, numbers, others, strict=False)
    ]


def _of_chat(entry: dict[str, Any]) -> TokenLogprob:
    top = entry.get("top_logprobs")
    pairs = [(each.get("token"), each.get("logprob")) for each in top if isinstance(each, dict)] if isinstance(top, list) else []
    return TokenLogprob(_text(entry.get("token")), _number(entry.get("logprob")), _likeliest(pairs))


def _likeliest(pairs: Any) -> tuple[tuple[str, float | None], ...]:
    return tuple((_text(token), _number(number)) for token, number in pairs)


def _text(value: Any) -> str:
    """As UTF-8 can hold it: half a surrogate pair, which JSON can write, becomes a question mark."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and _NO_CHANCE < value <= 0.0 else None
