"""How answers of /v1/completions are written, whole and as frames. Several prompts share one answer: their choices follow each
other, and a choice's index is counted through."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import Raw

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.server.logprobs import TextTokens, prompt_form, text_form
from nanovllm_cli.server.openai_answers import Answer, Head, Style, encode, end_fields
from nanovllm_cli.server.ports import Event, FinishReason, Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStyle(Style):
    """echo: the prompt stands before the answer. draws: False leaves the answer out (its client asked for no tokens, and wants to
    know of the prompt). prompt_logprobs: vLLM's addition."""

    echo: bool = False
    draws: bool = True
    prompt_logprobs: bool = False


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
        make = partial(TextTokens, generation.model.tokenizer, style.params, generation.model.visible_ids)
        self._tokens = defaultdict[int, TextTokens](make)
        self._counts: Counter[int] = Counter()
        self._num_ended = 0

    def frames(self, events: Sequence[Event]) -> bytes:
        if not events:
            tail = self._style.tail(self._generation, is_reading=True)
            return self._start + b'%d,"text":"","logprobs":null,"finish_reason":null}]%b' % (self._base, tail)
        out: list[bytes] = []
        for event in events if self._style.draws else map(_without_token, events):
            if event.index not in self._counts and (self._style.echo or self._style.token_ids):
                out.append(self._frame(event.index, self._echoed, self._echo_logprobs, None))
            self._counts[event.index] += len(event.token_ids)
            logprobs = self._logprobs(event)
            shows_ids = self._style.token_ids and event.token_ids
            if event.text or logprobs is not None or shows_ids or event.finish_reason is not None:
                out.append(self._frame(event.index, event.text, logprobs, event))
        return b"".join(out)

    def _frame(self, index: int, text: str, logprobs: Any, event: Event | None) -> bytes:
        reason = None if event is None else event.finish_reason
        more = b""
        if event is not None and reason is not None:
            more = end_fields(event.stop_reason, self._counts[index])
            self._num_ended += 1
        if self._style.token_ids:
            more += b',"token_ids":' + encode([] if event is None else event.token_ids)
            more += b"" if event is not None else b',"prompt_token_ids":' + encode(list(self._generation.prompt_ids))
        parts = (b',"text":', encode(text), b',"logprobs":', encode(logprobs), b',"finish_reason":', encode(reason), more)
        tail = self._style.tail(self._generation, is_last=reason is not None and self._num_ended == self._style.params.n)
        return b"".join((self._start, b"%d" % (self._base + index), *parts, b"}]", tail))

    def _logprobs_of(self, echo: Echo) -> dict[str, Any] | None:
        top = self._style.params.logprobs
        if top is None:
            return None
        return text_form(self._head.model.tokenizer, echo.entries, echo.token_ids, top, 0)

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        num_top, tokens = self._style.params.logprobs, self._tokens[event.index]
        if num_top is None or not (entries := tokens.take(event)):
            return None
        ids = [entry.token_id for entry in entries]
        return text_form(self._head.model.tokenizer, entries, ids, num_top, len(self._echoed) + tokens.offset)


def text_choice(
    head: Head, style: TextStyle, echo: Echo, index: int, answer: Answer, generation: Generation
) -> dict[str, Any]:
    """One choice of a whole answer."""
    if not style.draws:
        answer = Answer(None, finish_reason="length")
    logprobs = None
    if style.params.logprobs is not None:
        ids = [*echo.token_ids, *(entry.token_id for entry in answer.entries)]
        logprobs = text_form(head.model.tokenizer, [*echo.entries, *answer.entries], ids, style.params.logprobs, 0)
    choice = {
        "index": index,
        "text": echo.text + "".join(answer.text),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "completion_tokens": len(answer.token_ids),
    }
    if style.token_ids:
        choice |= {"token_ids": answer.token_ids, "prompt_token_ids": list(generation.prompt_ids)}
    if style.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_form(head.model.tokenizer, generation.prompt_logprobs or [])
    return choice


def _without_token(event: Event) -> Event:
    """An event of the token that is drawn where none was asked for: it may end the answer, and no other way than by its limit."""
    reason: FinishReason | None = None if event.finish_reason is None else "length"
    return replace(event, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)
