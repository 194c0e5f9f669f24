"""Log-probabilities of the content of an answer, apart from those of its reasoning."""

from __future__ import annotations

from msgspec import Raw

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.logprobs import TextTokens, chat_form
from nanovllm_cli.server.ports import Event
from nanovllm_cli.text.tokenizer import Tokenizer


class ContentTokens:
    """Hands tokens out with the content that they wrote. Those whose text is held back, since it could become a tag, wait with
    it; those of reasoning and of its tags are dropped."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.logprobs or 0
        self._tokens = TextTokens(tokenizer, params)
        self._waiting: list[TokenLogprobs] = []

    def take(self, event: Event) -> list[Raw]:
        self._waiting += self._tokens.take(event)
        if not event.content:
            if event.reasoning:
                self._waiting = []
            return []
        ready, self._waiting = self._waiting, []
        spare = sum(self._num_bytes(entry) for entry in ready) - len(event.content.encode())
        first = 0
        while first < len(ready) and spare >= self._num_bytes(ready[first]):  # what stood before the content
            spare -= self._num_bytes(ready[first])
            first += 1
        return chat_form(self._tokenizer, ready[first:], self._num_top)

    def _num_bytes(self, entry: TokenLogprobs) -> int:
        return len(self._tokenizer.id_to_bytes(entry.token_id))
