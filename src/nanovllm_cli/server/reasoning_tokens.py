"""How many tokens an answer's reasoning has, in whatever pieces it is heard.

Counted are the tokens that have a part in the text of the reasoning, each once: no tags, no white space beside them that nobody
is told, and nothing that a stop string cut off. A token may be heard ahead of its text, of which a part is held back where a stop
string or a character may be about to come; so it is found by where in the text it lies.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from nanovllm_cli.text.answer_format import AnswerDelta
from nanovllm_cli.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Of one answer. hidden_ids: special tokens that its text does not show."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: deque[tuple[int, int]] = deque()  # where each begins and ends, in characters of the text
        self._drawn = 0
        self._text, self._begin = "", 0  # what is not told apart yet, and where it begins

    def take(self, token_ids: Sequence[int], text: str, said: AnswerDelta, num_held: int) -> int:
        """What of the text is reasoning, as the parser has it, which has not decided the last `num_held` characters. Returns how
        many tokens of the reasoning are new."""
        for token_id in token_ids:
            if token_id not in self._hidden:
                size = len(self._decoder.decode(self._tokenizer.id_to_bytes(token_id)))
                self._tokens.append((self._drawn, self._drawn + max(1, size)))  # what begins a character has a part in it
                self._drawn += size
        self._text += text
        count, decided = 0, len(self._text) - num_held
        if said.reasoning:
            start = self._start(said, decided)
            count = self._pass(start, start + len(said.reasoning)) if start >= 0 else self._size(said.reasoning)
        if said.content or said.calls:
            decided = len(self._text) - num_held
            self._pass(decided, decided)
        return count

    def _start(self, said: AnswerDelta, decided: int) -> int:
        """Where in the text the reasoning is: it goes on, or stands behind a tag."""
        if self._text.startswith(said.reasoning):
            return 0
        if said.content or said.calls:
            return self._text.find(said.reasoning, 0, decided)
        return self._text.rfind(said.reasoning, 0, decided)

    def _size(self, reasoning: str) -> int:
        """Of what is not as it was written."""
        return len(self._tokenizer.encode(reasoning, add_special_tokens=False, parse_special=False))

    def _pass(self, start: int, end: int) -> int:
        """Goes on behind that part of the text. Returns how many tokens have a part in it."""
        count = 0
        while self._tokens and self._tokens[0][0] < self._begin + end:
            count += self._tokens.popleft()[1] > self._begin + start
        self._text, self._begin = self._text[end:], self._begin + end
        return count
