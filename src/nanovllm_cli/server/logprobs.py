"""Log-probabilities of a text's tokens, in the forms that OpenAI and vLLM give them.

Reported are the tokens whose text is in the answer's text: joined they are the text. What an answer drew beyond it is left out:
the token that ends it, and what a stop string cut off. A token that the cut goes through is reported whole. In a chat the text is
all that was drawn: reasoning, tags of calls, and the white space beside them, which no reader of the content wants, have their
tokens here too, as in vLLM and llama-server.

What is said of one token is JSON at once (`Raw`): as Python's values the alternatives of a long answer would be gigabytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import invalid_value
from nanovllm_cli.server.ports import Event
from nanovllm_cli.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode

MOST_PROMPT_LOGPROBS = 1 << 21
"""Of one request's prompts. Until the answer is written all of them are values, some 250 bytes each, in two processes."""

MOST_LOGPROBS = 1 << 22
"""Of one request's answers, some 100 bytes each in two processes."""

LOWEST = -9999.0
"""Instead of minus infinity, which JSON cannot say (OpenAI's)."""


def check_prompt_logprobs(num_tokens: int, params: SamplingParams) -> None:
    """num_tokens: of all prompts. Raises ApiError 400."""
    if params.prompt_logprobs is None:
        return
    wanted = num_tokens * (params.prompt_logprobs + 1)
    if wanted > MOST_PROMPT_LOGPROBS:
        told = f"{wanted} log-probabilities of {num_tokens} prompt tokens are more than one request may ask for"
        raise invalid_value(f"{told}, {MOST_PROMPT_LOGPROBS}", "prompt_logprobs")


def check_logprobs(count: int) -> None:
    """count: of all answers so far, of which nobody knows beforehand how long they become. Raises ApiError 400."""
    if count > MOST_LOGPROBS:
        told = f"{MOST_LOGPROBS} log-probabilities of all answers are the most that one request may have"
        raise invalid_value(f"{told}: ask for fewer, or for shorter answers", "logprobs")


class TextTokens:
    """The drawn tokens of one answer, handed out with the text that they belong to: a stop string that may be about to come
    holds both back. visible_ids: special tokens that are in the text (`ServedModel.visible_ids`). offset: where in the text those
    begin that were handed out last, in characters."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, visible_ids: Collection[int]) -> None:
        self._skipped = tokenizer.special_ids.difference(visible_ids) if params.skip_special_tokens else frozenset()
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[tuple[int, TokenLogprobs]] = []  # where in the text each begins, in characters
        self._drawn_chars = self._shown_chars = self.offset = 0

    def take(self, event: Event) -> list[TokenLogprobs]:
        """The tokens whose text this event completes or begins."""
        self._shown_chars += len(event.text)
        for entry in event.logprobs or ():
            if entry.token_id not in self._skipped:
                self._waiting.append((self._drawn_chars, entry))
                self._drawn_chars += len(self._decoder.decode(self._tokenizer.id_to_bytes(entry.token_id)))
        if event.finish_reason is None or isinstance(event.stop_reason, str):
            return self._pop(sum(start < self._shown_chars for start, _ in self._waiting))
        is_cut = event.finish_reason in ("length", "repetition")
        ended = bool(self._waiting) and not is_cut and self._waiting[-1][0] >= self._shown_chars
        return self._pop(len(self._waiting) - ended)

    def _pop(self, count: int) -> list[TokenLogprobs]:
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        self.offset = ready[0][0] if ready else self.offset
        return [entry for _, entry in ready]


class ContentTokens:
    """The drawn tokens of an answer's content, apart from those of its reasoning, handed out with what they wrote. Those whose
    text is held back, since it could become a tag or be the end, wait with it; those of reasoning, of its tags and of white space
    beside them are dropped."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, visible_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.logprobs or 0
        self._tokens = TextTokens(tokenizer, params, visible_ids)
        self._waiting: list[TokenLogprobs] = []
        self._text = ""  # what was drawn before the content begins
        self._in_content = False
        self._num_owed = 0  # bytes of content whose tokens were not handed out
        self._num_ahead = 0  # bytes of the last token that a stop string may be about to cut off

    def take(self, event: Event) -> list[Raw]:
        tokens = self._tokens.take(event)
        self._waiting += tokens
        self._num_ahead += sum(map(self._num_bytes, tokens)) - len(event.text.encode())
        if event.reasoning:
            self._in_content = False
        if not self._in_content:
            self._text += event.text
        if not event.content:
            if event.reasoning:
                self._text = self._text[len(self._text) - event.num_held :]
                self._drop(len(self._text.encode()))
            return []
        size = len(event.content.encode())
        if not self._in_content:
            decided = len(self._text) - event.num_held
            start = self._text.rfind(event.content, 0, decided)
            held = self._text[start + len(event.content) if start >= 0 else decided :]
            self._num_owed = self._drop(size + len(held.encode()))
            self._in_content, self._text = True, ""
        self._num_owed += size
        count = 0
        while count < len(self._waiting) and (self._num_owed > 0 or event.finish_reason is not None):
            self._num_owed -= self._num_bytes(self._waiting[count])
            count += 1
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return chat_form(self._tokenizer, ready, self._num_top)

    def _drop(self, num_kept: int) -> int:
        """Drops tokens, but the last ones with so many bytes of text. Returns how many bytes more these have: what the content is
        without of its first token."""
        spare = sum(map(self._num_bytes, self._waiting)) - num_kept - max(0, self._num_ahead)
        first = 0
        while first < len(self._waiting) and spare >= self._num_bytes(self._waiting[first]):
            spare -= self._num_bytes(self._waiting[first])
            first += 1
        del self._waiting[:first]
        return max(0, spare)

    def _num_bytes(self, entry: TokenLogprobs) -> int:
        return len(self._tokenizer.id_to_bytes(entry.token_id))


def chat_form(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int) -> list[Raw]:
    """`logprobs.content` of chat completions."""
    return [
        _raw(
            {
                **_named(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_named(tokenizer, token_id, value) for token_id, value in entry.top[:num_top]],
            }
        )
        for entry in entries
    ]


def native_form(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int) -> list[Raw]:
    """`completion_probabilities` of llama-server's own endpoints."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {"id": token_id, **_named(tokenizer, token_id, logprob)}

    return [
        _raw({**named(entry.token_id, entry.logprob), "top_logprobs": [named(*pair) for pair in entry.top[:num_top]]})
        for entry in entries
    ]


def text_form(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], num_top: int, offset: int
) -> dict[str, Any]:
    """`logprobs` of completions. entries: None for a prompt's first token. offset: characters before them."""
    tokens, offsets = [], []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id in token_ids:
        token = tokenizer.id_to_bytes(token_id)
        tokens.append(token.decode("utf-8", "replace"))
        offsets.append(offset)
        offset += len(decoder.decode(token))
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else max(LOWEST, entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _raw(_most_likely(tokenizer, entry, num_top)) for entry in entries],
        "text_offset": offsets,
    }


def prompt_form(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[Raw | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, id -> logprob, rank and text; its own included."""
    return [None if entry is None else _raw(_ranked(tokenizer, entry)) for entry in entries]


def _raw(value: Any) -> Raw:
    return Raw(_encode(value))


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.id_to_bytes(token_id)
    return {"token": token.decode("utf-8", "replace"), "logprob": max(LOWEST, logprob), "bytes": list(token)}


def _most_likely(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The token itself is always among them."""
    pairs = dict([*entry.top[:num_top], (entry.token_id, entry.logprob)])
    return {tokenizer.id_to_bytes(i).decode("utf-8", "replace"): max(LOWEST, value) for i, value in pairs.items()}


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)} | {entry.token_id: entry.rank}
    values = dict([*entry.top, (entry.token_id, entry.logprob)])
    return {
        str(token_id): {
            "logprob": max(LOWEST, value),
            "rank": ranks[token_id],
            "decoded_token": tokenizer.id_to_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, value in values.items()
    }
