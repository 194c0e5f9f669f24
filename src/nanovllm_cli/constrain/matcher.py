"""One answer's place in a grammar: which tokens may come, and moving on by one, or back."""

from __future__ import annotations

import time
from typing import Self

import llguidance
import numpy as np

from nanovllm_cli.constrain.vocabulary import Vocabulary, Words
from nanovllm_cli.errors import RequestError, UnmeetableError

SLOW = 0.05
"""Seconds of a processor for one call, that others wait for: a hundred times what grammars take that can be read in few ways."""
MAX_SLOW_SECONDS = 2.0
"""Of all such calls of an answer."""
_REASONS = {
    "ParserTooComplex": "the text so far can be read in too many ways",
    "LexerTooComplex": "its expressions are too involved",
}
_OTHER_ERRORS = {
    "lexer error": "LexerTooComplex",
    "parser error: Too many items": "ParserTooComplex",
    "Parser Error: Current row has": "ParserTooComplex",
}
"""How errors begin that llguidance calls internal, as it calls a token that isn't allowed."""


class Matcher:
    """At a grammar's beginning. Raises where llguidance can't go on, as `check` does; it then never can.

    Not thread-safe: one thread at a time, though not always the same.
    """

    def __init__(self, inner: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.inner = inner
        self._vocabulary = vocabulary
        self._slow_seconds = 0.0

    def allowed_mask(self) -> Words:
        """The tokens that may come next; bit `vocabulary.end_id` where the grammar may end."""
        words = np.zeros(self._vocabulary.num_words, dtype=np.uint32)
        self.fill(words)
        self.check()
        return words

    def fill(self, words: Words) -> None:
        """The same into zeros, without the interpreter's lock; what went wrong, `check` raises."""
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._count(began)

    def allows(self, token_id: int) -> bool:
        """Whether `allowed_mask` has this token, which is no special one's. Where a text is forced, that is the first token of
        the text as the tokenizer writes it, and no other beginning of it."""
        began = time.thread_time()
        forced = self.inner.compute_ff_tokens()
        if forced:
            return token_id == forced[0]
        is_allowed = self.inner.validate_tokens([token_id]) == 1
        self._count(began)
        self.check()
        return is_allowed

    def accept(self, token_id: int) -> None:
        began = time.thread_time()
        if not self.inner.consume_token(token_id):
            self.check()
        self._count(began)

    def try_accept(self, token_id: int) -> bool:
        """Moves on if the grammar allows it, and else stays where it is."""
        return self.inner.try_consume_tokens([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens that were accepted."""
        if num_tokens and not self.inner.rollback(num_tokens):
            self.check()

    def copy(self) -> Self:
        twin = type(self)(self.inner.deep_copy(), self._vocabulary)
        twin._slow_seconds = self._slow_seconds
        return twin

    @property
    def is_complete(self) -> bool:
        """The grammar is fulfilled, and nothing can follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    def check(self) -> None:
        """Raises UnmeetableError if the grammar is more than llguidance follows, in time or at all; RequestError if it gave up
        otherwise."""
        message = "the answer could not be held to its constraint"
        if self._slow_seconds > MAX_SLOW_SECONDS:
            raise UnmeetableError(f"{message}: the text so far can be read in so many ways that it takes too long")
        if not self.inner.is_error():
            return
        reason = _REASONS.get(self.inner.stop_reason())
        for start, kind in _OTHER_ERRORS.items():
            if self.inner.get_error().startswith(start):
                reason = _REASONS[kind]
        if reason is None:
            raise RequestError(f"{message}: llguidance gave up")
        raise UnmeetableError(f"{message}: {reason}")

    def _count(self, began: float) -> None:
        seconds = time.thread_time() - began
        if seconds > SLOW:
            self._slow_seconds += seconds
