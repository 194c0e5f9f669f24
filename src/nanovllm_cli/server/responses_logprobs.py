"""Log-probabilities of the content of an answer, apart from those of its reasoning."""

from __future__ import annotations

from msgspec import Raw

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.logprobs import TextTokens, chat_form
from nanovllm_cli.server.ports import Event
from nanovllm_cli.text.tokenizer import Tokenizer


class ContentTokens:
    """Hands tokens out with the content that they wrote. Those whose text is held back, since it could become a tag or be the
    end, wait with it; those of reasoning and of its tags are dropped, and those of white space beside them."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.logprobs or 0
        self._tokens = TextTokens(tokenizer, params)
        self._waiting: list[TokenLogprobs] = []
        self._text = ""  # what was drawn before the content begins
        self._in_content = False
        self._num_owed = 0  # bytes of content whose tokens were not handed out

    def take(self, event: Event) -> list[Raw]:
        self._waiting += self._tokens.take(event)
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
        """Drops tokens, but the last ones with so many bytes. Returns how many bytes more these have: what the content is
        without of its first token."""
        spare = sum(self._num_bytes(entry) for entry in self._waiting) - num_kept
        first = 0
        while first < len(self._waiting) and spare >= self._num_bytes(self._waiting[first]):
            spare -= self._num_bytes(self._waiting[first])
            first += 1
        del self._waiting[:first]
        return max(0, spare)

    def _num_bytes(self, entry: TokenLogprobs) -> int:
        return len(self._tokenizer.id_to_bytes(entry.token_id))
