"""What one sequence's next draw depends on beside the model's logits: its parameters, and the tokens so far.

Both as data that the whole step's rows are changed by together (`kernels.cpu_sampling`): the ids it allows, and edits
of single logits, in vLLM's order: bad words, n-grams, min_tokens, logit_bias, penalties; DRY comes last, as behind llama.cpp's
penalties.
What they cost grows with what a request asks for and with its length, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.engine.plan import NewSequence
from nanovllm_cli.engine.sampling_chain import Chain
from nanovllm_cli.engine.sampling_dry import DryHistory, DryPrompt
from nanovllm_cli.engine.sampling_ngrams import WrittenNgrams
from nanovllm_cli.engine.sampling_transcript import TranscriptMask
from nanovllm_cli.kernels.cpu_sampling import Edits, Words, draw_settings, is_filtered, no_change, packed_bits
from nanovllm_cli.kernels.cpu_sampling_edits import MINUS, SCALE, THEN_MINUS
from nanovllm_cli.samplers import chain_of
from nanovllm_cli.sampling_params import SamplingParams

BadWord = tuple[int, ...]
Ban = tuple[list[int], Edits]
"""What the output has to end in, and what then changes."""
_NO_EDITS = no_change([])


class SequenceState:
    """One registered sequence.

    bad_words: by `completion_bans`. dry_prompt: None without DRY. Both are shared with other sequences, and not changed.
    guide: None without a constraint. rules: of a transcript, or None. chain: None where it draws in the fixed order.
    is_filtered: whether a draw leaves out what is unlikely. expects_allowed: whether, by the last mask that was drawn under, a
    draw without it would have been as good; expected: the same behind each token. memories: the chain's behind each token.
    """

    def __init__(
        self,
        new: NewSequence,
        vocab_size: int,
        bad_words: Sequence[Ban],
        dry_prompt: DryPrompt | None,
        guide: Guide | None,
    ) -> None:
        params = new.params
        self.new = new
        self.draw_settings = draw_settings(params)
        self.guide = guide
        self.expects_allowed = False
        self.expected: list[bool] = []
        self.memories: list[float] = []
        steps = chain_of(params)
        self.chain = None if steps is None else Chain(steps, params, vocab_size)
        self.is_filtered = is_filtered(self.draw_settings)
        self.rules = None if params.transcript is None else TranscriptMask(params.transcript, vocab_size)
        self.params = params
        self.seed = new.seed
        self.output_ids: list[int] = []
        self.allowed: Words | None = None
        if params.allowed_token_ids is not None:
            allowed = np.zeros(vocab_size, dtype=np.bool_)
            allowed[list(params.allowed_token_ids)] = True
            self.allowed = packed_bits(allowed)
        self._bad_words = bad_words
        self._stop_bans = _bans([token_id for token_id in new.stop_ids if 0 <= token_id < vocab_size])
        biases = params.logit_bias or {}
        self._biases = no_change(list(biases))
        self._biases[:, MINUS] = [-bias for bias in biases.values()]
        self._counts = TokenCounts(new.prompt_ids, params) if params.has_penalties else None
        size = params.no_repeat_ngram_size
        self._ngrams = WrittenNgrams(size, new.prompt_ids) if size else None
        self._dry = DryHistory(dry_prompt, params) if dry_prompt is not None else None
        for token_id in new.drawn:
            self.append(token_id)

    @property
    def position(self) -> int:
        """Index of the token that is drawn next."""
        return len(self.output_ids)

    @property
    def left(self) -> float:
        """See `TranscriptMask`, of the next draw; 0 without rules of a transcript."""
        return 0.0 if self.rules is None else self.rules.left

    @property
    def adjusts(self) -> bool:
        """Whether the next draw's logits differ from the model's."""
        return bool(
            self.allowed is not None
            or self._bad_words
            or self._ngrams
            or len(self._biases)
            or self._bans_stop_ids
            or self._counts
            or self._dry
        )

    @property
    def draws_first(self) -> bool:
        """Whether the next draw is made without a mask, and its constraint asked afterwards."""
        return self.expects_allowed and self.guide is not None and self.guide.may_say

    @property
    def takes_the_largest(self) -> bool:
        """Whether the next draw is nothing but the model's most likely token."""
        return self.params.is_greedy and self.params.logprobs is None and not self.adjusts and self.chain is None

    @property
    def _bans_stop_ids(self) -> bool:
        return self.position < self.params.min_tokens and len(self._stop_bans) > 0

    def repeat(self, before: SequenceState, count: int) -> None:
        """Goes on behind the first tokens that the same sequence drew before."""
        for i in range(self.position, count):
            self.expects_allowed = before.expected[i]
            self.append(before.output_ids[i], before.memories[i] if before.memories else None)

    def append(self, token_id: int, memory: float | None = None) -> None:
        """What was drawn. memory: the chain's, where it was not drawn here. Raises as its guide does, where that can't follow."""
        self.output_ids.append(token_id)
        self.expected.append(self.expects_allowed)
        if self.chain is not None:
            self.chain.accept(memory)
            self.memories.append(self.chain.memory)
        if self._ngrams is not None:
            self._ngrams.append(token_id)
        if self._counts is not None:
            self._counts.append(token_id)
        if self._dry is not None:
            self._dry.append(token_id)
        if self.guide is not None:
            self.guide.accept(token_id)

    def edits(self) -> list[Edits]:
        """What changes the next draw's logits, in this order, after what is not `allowed` has been banned."""
        return [*self.bans(), *(self.edits_of(step) for step in ("penalties", "dry"))]

    def bans(self) -> list[Edits]:
        """Of these what comes before all steps that have a name."""
        edits = [ban for begin, ban in self._bad_words if not begin or self.output_ids[-len(begin) :] == begin]
        if self._ngrams is not None and (banned := self._ngrams.banned):
            edits.append(_bans(sorted(banned)))
        return [*edits, *([self._stop_bans] if self._bans_stop_ids else ()), self._biases]

    def edits_of(self, step: str) -> Edits:
        """What "penalties" change, or "dry"."""
        if step == "penalties":
            return _NO_EDITS if self._counts is None else self._counts.edits
        return _NO_EDITS if self._dry is None else self._dry.edits()


class TokenCounts:
    """How often each token stands in the last `penalty_last_n` tokens (-1: in all), how often of those in the output, and what
    that takes from its logit: repetition of everything seen, then frequency and presence in the output.

    An edit for each distinct token, in order of their first sight; a token that left the window stays, without effect.
    """

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._params = params
        self._last_n = params.penalty_last_n
        self._tokens = list(prompt_ids)
        self._prompt_len = len(self._tokens)
        window = self._tokens if self._last_n < 0 else self._tokens[max(0, self._prompt_len - self._last_n) :]
        ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._in_window = counts.tolist()
        self._in_output = [0] * len(ids)
        self._edits = no_change(ids)
        self._edits[:, SCALE] = params.repetition_penalty

    @property
    def edits(self) -> Edits:
        return self._edits[: len(self._slots)]

    def append(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._in_window):
            self._add_slot(slot, token_id)
        self._tokens.append(token_id)
        self._count(slot, 1, 1)
        leaves = len(self._tokens) - 1 - self._last_n
        if self._last_n >= 0 and leaves >= 0:
            self._count(self._slots[self._tokens[leaves]], -1, -(leaves >= self._prompt_len))

    def _count(self, slot: int, in_window: int, in_output: int) -> None:
        self._in_window[slot] += in_window
        self._in_output[slot] += in_output
        params, times = self._params, self._in_output[slot]
        edit = self._edits[slot]
        edit[SCALE] = params.repetition_penalty if self._in_window[slot] else 1.0
        edit[MINUS] = np.float32(params.frequency_penalty) * np.float32(times)
        edit[THEN_MINUS] = params.presence_penalty if times else 0.0

    def _add_slot(self, slot: int, token_id: int) -> None:
        if slot == len(self._edits):
            self._edits = np.concatenate((self._edits, no_change([0] * max(16, slot))))
        self._edits[slot] = no_change([token_id])
        self._in_window.append(0)
        self._in_output.append(0)


def _bans(token_ids: Sequence[int]) -> Edits:
    edits = no_change(token_ids)
    edits[:, MINUS] = np.inf
    return edits


def completion_bans(sequences: Sequence[BadWord]) -> list[Ban]:
    """What keeps each of these from being completed."""
    return [(list(begin), _bans([last])) for *begin, last in sequences]


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
