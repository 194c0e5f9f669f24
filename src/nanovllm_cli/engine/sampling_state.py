"""What one sequence's next draw depends on beside the model's logits: its parameters, and the tokens so far.

`adjust` changes a row of logits in place, in vLLM's order: allowed ids, bad words, min_tokens, logit_bias, penalties;
DRY comes last, as behind llama.cpp's penalties. What it costs grows with what a request asks for and with its
length, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.engine.plan import NewSequence
from nanovllm_cli.engine.sampling_dry import DryBreakers, DryHistory

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
BadWord = tuple[int, ...]


class SequenceState:
    """One registered sequence.

    bad_words: token sequences that must not be completed. dry_breakers: None without DRY.
    """

    def __init__(
        self, new: NewSequence, vocab_size: int, bad_words: Sequence[BadWord], dry_breakers: DryBreakers | None
    ) -> None:
        params = new.params
        self.params = params
        self.seed = new.seed
        self.output_ids: list[int] = []
        self._bad_words = bad_words
        self._stop_ids = np.array([token_id for token_id in new.stop_ids if token_id < vocab_size], dtype=np.int64)
        self._allowed_ids: Ids | None = None
        if params.allowed_token_ids is not None:
            self._allowed_ids = np.unique(np.array(params.allowed_token_ids, dtype=np.int64))
        self._bias_ids = np.array(list(params.logit_bias or ()), dtype=np.int64)
        self._biases = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self._counts = TokenCounts(new.prompt_ids, params.penalty_last_n) if params.has_penalties else None
        self._dry = DryHistory(new.prompt_ids, params, dry_breakers) if dry_breakers is not None else None

    @property
    def position(self) -> int:
        """Index of the token that is drawn next."""
        return len(self.output_ids)

    @property
    def adjusts(self) -> bool:
        """Whether the next draw's logits differ from the model's."""
        return bool(
            self._allowed_ids is not None
            or self._bad_words
            or len(self._bias_ids)
            or self._bans_stop_ids
            or self._counts
            or self._dry
        )

    @property
    def takes_the_largest(self) -> bool:
        """Whether the next draw is nothing but the model's most likely token."""
        return self.params.is_greedy and self.params.logprobs is None and not self.adjusts

    @property
    def _bans_stop_ids(self) -> bool:
        return self.position < self.params.min_tokens and len(self._stop_ids) > 0

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        if self._counts is not None:
            self._counts.append(token_id)
        if self._dry is not None:
            self._dry.append(token_id)

    def adjust(self, logits: Logits) -> None:
        """Change a row of logits [V] in place."""
        if self._allowed_ids is not None:
            allowed = logits[self._allowed_ids]
            logits.fill(-np.inf)
            logits[self._allowed_ids] = allowed
        for *begin, last in self._bad_words:
            if not begin or self.output_ids[-len(begin) :] == begin:
                logits[last] = -np.inf
        if self._bans_stop_ids:
            logits[self._stop_ids] = -np.inf
        if len(self._bias_ids):
            logits[self._bias_ids] += self._biases
        if self._counts is not None:
            params = self.params
            self._counts.penalize(logits, params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if self._dry is not None:
            self._dry.penalize(logits)


class TokenCounts:
    """How often each token stands in the last `last_n` tokens (-1: in all), and how often of those in the output.

    Kept in arrays of the distinct tokens, in order of their first sight; a token that left the window stays with a
    count of zero.
    """

    def __init__(self, prompt_ids: Sequence[int], last_n: int) -> None:
        self._last_n = last_n
        self._tokens = list(prompt_ids)
        self._prompt_len = len(self._tokens)
        window = self._tokens if last_n < 0 else self._tokens[max(0, self._prompt_len - last_n) :]
        ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
        self._size = len(ids)
        self._ids = ids
        self._in_window = counts
        self._in_output = np.zeros_like(counts)
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}

    def append(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            self._add_slot(token_id)
        self._in_window[slot] += 1
        self._in_output[slot] += 1
        self._tokens.append(token_id)
        leaves = len(self._tokens) - 1 - self._last_n
        if self._last_n >= 0 and leaves >= 0:
            slot = self._slots[self._tokens[leaves]]
            self._in_window[slot] -= 1
            self._in_output[slot] -= leaves >= self._prompt_len

    def penalize(self, logits: Logits, repetition: float, presence: float, frequency: float) -> None:
        """Repetition of everything seen, then presence and frequency of the output, on logits [V] in place."""
        ids, in_output = self._ids[: self._size], self._in_output[: self._size]
        seen = logits[ids]
        if repetition != 1.0:
            changed = np.where(seen > 0, seen / np.float32(repetition), seen * np.float32(repetition))
            seen = np.where(self._in_window[: self._size] > 0, changed, seen)
        seen -= np.float32(frequency) * in_output.astype(np.float32)
        seen -= np.float32(presence) * (in_output > 0)
        logits[ids] = seen

    def _add_slot(self, token_id: int) -> None:
        if self._size == len(self._ids):
            more = np.zeros(max(16, self._size), dtype=np.int64)
            self._ids = np.concatenate((self._ids, more))
            self._in_window = np.concatenate((self._in_window, more))
            self._in_output = np.concatenate((self._in_output, more))
        self._ids[self._size] = token_id
        self._size += 1


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]], vocab_size: int) -> list[BadWord]:
    """Each word as the tokens it is at a text's start, and after a space where that changes its first token (vLLM)."""
    sequences = []
    for word in words:
        plain = tuple(encode(word.lstrip() or word))
        spaced = tuple(encode(" " + word.lstrip()))
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            sequences.append(spaced)
    return [sequence for sequence in sequences if sequence and max(sequence) < vocab_size]
