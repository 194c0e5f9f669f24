"""How many tokens an answer's reasoning has, in whatever pieces it is heard.

Counted are the tokens that have a part in the text of the reasoning, each once: no tags, no white space beside them that nobody
is told, and nothing that a stop string cut off. A token may be heard ahead of its text, of which a part is held back where a stop
string or a character may be about to come; so it is found by where in the text it lies.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from nanovllm_cli.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Of one answer. hidden_ids: special tokens that its text does not show. comes_again: whether there may be more of it behind
    content."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int], *, comes_again: bool) -> None:
        self._tokenizer, self._hidden, self._comes_again = tokenizer, hidden_ids, comes_again
        self._is_over = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: deque[tuple[int, int]] = deque()  # where each begins and ends, in characters of the text
        self._drawn = 0
        self._text, self._begin = "", 0  # what is not told apart yet, and where it begins

    def take(self, token_ids: Sequence[int], text: str, reasoning: str, *, ends: bool, num_held: int) -> int:
        """reasoning: of the text, as the parser has it, which has not decided the last `num_held` characters. ends: content or a
        call is behind it. Returns how many tokens of the reasoning are new."""
        if self._is_over:
            return 0
        shown = [self._tokenizer.id_to_bytes(token_id) for token_id in token_ids if token_id not in self._hidden]
        is_level = self._drawn == self._begin and not (self._tokens or self._text or num_held)
        if is_level and reasoning == text and b"".join(shown) == text.encode():  # as nearly always
            self._drawn = self._begin = self._drawn + len(text)
            return len(shown)
        for token in shown:
            size = len(self._decoder.decode(token))
            self._tokens.append((self._drawn, self._drawn + max(1, size)))  # what begins a character has a part in it
            self._drawn += size
        self._text += text
        count, decided = 0, len(self._text) - num_held
        if reasoning:
            start = self._start(reasoning, ends, decided)
            count = self._pass(start, start + len(reasoning)) if start >= 0 else self._size(reasoning)
        if ends:
            self._is_over = not self._comes_again
            decided = len(self._text) - num_held
            self._pass(decided, decided)
        return count

    def _start(self, reasoning: str, ends: bool, decided: int) -> int:
        """Where in the text it is: it goes on, or stands behind a tag."""
        if self._text.startswith(reasoning):
            return 0
        return self._text.find(reasoning, 0, decided) if ends else self._text.rfind(reasoning, 0, decided)

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
