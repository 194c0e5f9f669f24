"""How answers of /v1/completions are written, whole and as frames. Several prompts share one answer: their choices follow each
other, and a choice's index is counted through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.server.logprobs import TextTokens, prompt_form, text_form
from nanovllm_cli.server.openai_answers import Answer, Head, Style, end_fields
from nanovllm_cli.server.ports import Event, Generation

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStyle(Style):
    """echo: the prompt stands before the answer. draws: False leaves the answer out (its client asked for no tokens, and wants to
    know of the prompt)."""

    echo: bool = False
    draws: bool = True


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as `echo` shows it."""

    text: str
    token_ids: Sequence[int]
    entries: Sequence[TokenLogprobs | None]

    @classmethod
    def of(cls, prompt: str | Sequence[int], generation: Generation, style: TextStyle) -> Echo:
        """Nothing where nobody asked. A BOS that the tokenizer put before a text is no part of it."""
        if not style.echo:
            return cls("", (), ())
        tokenizer, ids = generation.model.tokenizer, list(generation.prompt_ids)
        entries = list(generation.prompt_logprobs or [])
        if not isinstance(prompt, str):
            return cls(tokenizer.decode(ids, skip_special_tokens=False), ids, entries)
        added = int(tokenizer.adds_bos and ids[:1] == [tokenizer.bos_id])
        return cls(prompt, ids[added:], entries[added:])


class TextFrames:
    """The frames of one prompt's answers. base: the index of the first. Made in a thread (`off_loop`), as that writes the
    log-probabilities of an echo."""

    def __init__(self, head: Head, generation: Generation, style: TextStyle, echo: Echo, base: int) -> None:
        self._head, self._generation, self._style, self._base = head, generation, style, base
        self._start = head.frame_start()
        self._echoed, self._echo_logprobs = echo.text, Raw(encode(self._logprobs_of(echo)))
        self._tokens: dict[int, TextTokens] = {}
        self._num_chars: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def frames(self, events: Sequence[Event]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if event.index not in self._num_chars:
                self._num_chars[event.index] = len(self._echoed)
                if self._style.echo or self._style.token_ids:
                    out.append(self._frame(event.index, self._echoed, self._echo_logprobs, None))
            self._counts[event.index] = self._counts.get(event.index, 0) + len(event.token_ids)
            text = event.text if self._style.draws else ""
            logprobs = self._logprobs(event) if self._style.draws else None
            shows_ids = self._style.token_ids and self._style.draws and event.token_ids
            if text or logprobs is not None or shows_ids or event.finish_reason is not None:
                out.append(self._frame(event.index, text, logprobs, event))
            self._num_chars[event.index] += len(text)
        return b"".join(out)

    def _frame(self, index: int, text: str, logprobs: Any, event: Event | None) -> bytes:
        reason = None if event is None else event.finish_reason
        more = b""
        if event is not None and reason is not None:
            more = end_fields(event.stop_reason, self._counts[index] if self._style.draws else 0)
        if self._style.token_ids:
            drawn = event.token_ids if event is not None and self._style.draws else []
            more += b',"token_ids":' + encode(drawn)
            more += b"" if event is not None else b',"prompt_token_ids":' + encode(list(self._generation.prompt_ids))
        parts = (b',"text":', encode(text), b',"logprobs":', encode(logprobs), b',"finish_reason":', encode(reason), more)
        return b"".join((self._start, b"%d" % (self._base + index), *parts, b"}]", self._style.tail(self._generation)))

    def _logprobs_of(self, echo: Echo) -> dict[str, Any] | None:
        top = self._style.params.logprobs
        if top is None:
            return None
        return text_form(self._head.model.tokenizer, echo.entries, echo.token_ids, top, 0)

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        params, tokenizer = self._style.params, self._head.model.tokenizer
        if params.logprobs is None:
            return None
        entries = self._tokens.setdefault(event.index, TextTokens(tokenizer, params)).take(event)
        if not entries:
            return None
        ids = [entry.token_id for entry in entries]
        return text_form(tokenizer, entries, ids, params.logprobs, self._num_chars[event.index])


def text_choice(
    head: Head, style: TextStyle, echo: Echo, index: int, answer: Answer, generation: Generation
) -> dict[str, Any]:
    """One choice of a whole answer."""
    logprobs = None
    if style.params.logprobs is not None:
        drawn = answer.entries if style.draws else []
        ids = [*echo.token_ids, *(entry.token_id for entry in drawn)]
        logprobs = text_form(head.model.tokenizer, [*echo.entries, *drawn], ids, style.params.logprobs, 0)
    drawn_ids = answer.token_ids if style.draws else []
    choice = {
        "index": index,
        "text": echo.text + ("".join(answer.text) if style.draws else ""),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason if style.draws else "length",
        "stop_reason": answer.stop_reason,
        "completion_tokens": len(drawn_ids),
    }
    if style.token_ids:
        choice |= {"token_ids": drawn_ids, "prompt_token_ids": list(generation.prompt_ids)}
    return choice


def with_prompt_logprobs(choice: dict[str, Any], generation: Generation) -> dict[str, Any]:
    """vLLM's addition, where a client asked for it."""
    return {**choice, "prompt_logprobs": prompt_form(generation.model.tokenizer, generation.prompt_logprobs or [])}
