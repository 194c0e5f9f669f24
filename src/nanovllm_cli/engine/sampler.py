"""From logits to tokens, on the worker's side. Knows nothing of schedules, and of text only what two hooks tell it.

A sequence is registered once, with its prompt and its seed, and forgotten when it finishes; a preempted one stays
registered. The sampler appends what it draws. What happens to a row of logits, in this order:

    logprobs                 read from the model's own logits, before anything else
    mask                     a structured-output constraint: everything else is banned
    allowed_token_ids        everything else is banned
    bad_words                the token that would complete one is banned
    min_tokens               stop ids are banned
    logit_bias               added
    penalties                repetition, then frequency and presence
    DRY                      subtracted
    (temperature 0)          the largest logit wins, the lowest id of equal ones; the rest is for other temperatures
    temperature              logits are divided by it
    min_p, top_k             as in vLLM, where min_p comes first; both cut at a place in the order by logit
    typical_p, top_p, XTC    in llama.cpp's order, each on what is left, renormalized
    draw

vLLM's parameters come in vLLM's order; typical_p and XTC stand where llama.cpp has them between and behind top_k and
top_p, on probabilities at the given temperature. `kernels/cpu_sampling.py` says how a token is drawn, and why the batch
cannot matter. All rows of a step are changed and drawn from together, in compiled code; a sequence by itself only keeps the
list of what its own tokens change (`sampling_state`).

A row that holds NaN or +inf, or where nothing may be drawn, ends its own sequence and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_cli.constrain.compiler import Compiler
from nanovllm_cli.constrain.masks import MaskThread
from nanovllm_cli.engine.plan import Drawn, NewSequence, TokenLogprobs
from nanovllm_cli.engine.sampling_dry import BreakerVocabulary, no_breakers
from nanovllm_cli.engine.sampling_random import DRAW_TOKEN, EXCLUDE_TOP_CHOICES, philox_uniforms
from nanovllm_cli.engine.sampling_state import SequenceState, bad_word_ids
from nanovllm_cli.errors import NanovllmError, RequestError, UsageError
from nanovllm_cli.kernels.cpu_sampling import (
    MAX_VOCABULARY,
    Edits,
    Ids,
    RowLogprobs,
    Words,
    adjust_rows,
    as_rows,
    draw_tokens,
    largest,
    logprobs,
    mask_words,
    row_addresses,
)
from nanovllm_cli.kernels.cpu_sampling_rows import NOT_FINITE, TEMPERATURE, UNIFORM, XTC_THRESHOLD

Mask = torch.Tensor | Words | None

_NOT_FINITE = "the model's logits are not finite: NaN or infinity"
_NOTHING_LEFT = "no token is left to draw: every one is banned"


class Sampler:
    """Draws one token for each sequence it is asked for.

    encode: text to ids, without special tokens; bad_words and DRY's breakers need it. token_bytes: the bytes of every
    token, by id; DRY's breakers need it, and it is called once, when the first of them comes. compiler: of constraints.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        encode: Callable[[str], list[int]] | None = None,
        token_bytes: Callable[[], Sequence[bytes]] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        if vocab_size > MAX_VOCABULARY:
            raise UsageError(f"a vocabulary of {vocab_size} tokens; the sampler goes up to {MAX_VOCABULARY}")
        self._vocab_size = vocab_size
        self._encode = encode
        self._breaker_vocabulary = (
            BreakerVocabulary(vocab_size, encode, token_bytes) if encode and token_bytes else None
        )
        self._compiler = compiler
        self._mask_thread = MaskThread()
        self._states: dict[int, SequenceState] = {}
        self._refused: dict[int, str] = {}
        self._scratch = np.empty((0, vocab_size), dtype=np.float32)

    def add(self, new: NewSequence) -> None:
        """Register a sequence; again, from its start, where a step that failed is repeated.

        Asking for what can't be had (an id outside the vocabulary, bad_words without a tokenizer) is reported by its
        draw, not here, so that a step goes on with the others.
        """
        self.remove(new.seq_id)
        try:
            self._states[new.seq_id] = self._state(new)
        except Exception as error:
            self._refused[new.seq_id] = _reason(error)

    def _state(self, new: NewSequence) -> SequenceState:
        params = new.params
        vocab_size = self._vocab_size
        params.check_vocabulary(vocab_size)
        for token_id in (min(new.prompt_ids, default=0), max(new.prompt_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise UsageError(f"the prompt holds token id {token_id}, outside the vocabulary of {vocab_size} tokens")
        bad_words = []
        if params.bad_words:
            if self._encode is None:
                raise UsageError("bad_words needs a tokenizer, and this engine runs without one")
            bad_words = bad_word_ids(params.bad_words, self._encode, vocab_size)
        dry_breakers = None
        if params.has_dry:
            if self._breaker_vocabulary is not None:
                dry_breakers = self._breaker_vocabulary.breakers(params.dry_sequence_breakers)
            elif params.dry_sequence_breakers:
                raise UsageError("dry_multiplier needs a tokenizer, and this engine runs without one")
            else:
                dry_breakers = no_breakers(vocab_size)
        guide = None
        if params.is_guided:
            if self._compiler is None:
                raise UsageError("a constraint needs a tokenizer, and this engine runs without one")
            guide = self._compiler.guide(params, new.stop_ids)
        return SequenceState(new, vocab_size, bad_words, dry_breakers, guide)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; one that was never registered is no matter."""
        self._states.pop(seq_id, None)
        self._refused.pop(seq_id, None)

    def start_masks(self, seq_ids: Sequence[int]) -> None:
        """Begins to compute what constraints allow these sequences; before the model runs, so that it costs no time."""
        guides = {seq_id: state.guide for seq_id in seq_ids if (state := self._states.get(seq_id)) and state.guide}
        if guides:
            self._mask_thread.start(guides)

    def sample(
        self,
        seq_ids: Sequence[int],
        logits: torch.Tensor,
        rows: Sequence[int] | None = None,
        masks: Sequence[Mask] | None = None,
    ) -> list[Drawn]:
        """One token for each of seq_ids, in their order.

        logits: [R, V] float32, not changed. rows: which row of logits each sequence draws from; by default each its
        own, in order. masks: for each sequence the tokens it may draw, as bool or packed bits
        (`kernels.cpu_sampling.mask_words`), or None for all of them; by default what its constraint allows.
        """
        rows = range(len(seq_ids)) if rows is None else rows
        settled = {seq_id: Drawn(seq_id, [], error=self._refused[seq_id]) for seq_id in seq_ids if seq_id in self._refused}
        if masks is None:
            masks = self._masks(seq_ids, settled)
        if settled:
            wanted = [index for index, seq_id in enumerate(seq_ids) if seq_id not in settled]
            drawn = self.sample(
                [seq_ids[i] for i in wanted], logits, [rows[i] for i in wanted], [masks[i] for i in wanted]
            )
            settled |= {entry.seq_id: entry for entry in drawn}
            return [settled[seq_id] for seq_id in seq_ids]
        states = [self._states[seq_id] for seq_id in seq_ids]
        if all(state.takes_the_largest for state in states) and all(mask is None for mask in masks):
            ids, values = largest(logits)
            return [
                self._take_largest(seq_id, state, ids[row], values[row])
                for seq_id, state, row in zip(seq_ids, states, rows, strict=True)
            ]
        if not seq_ids:
            return []
        matrix = as_rows(logits)
        assert matrix.shape[1] == self._vocab_size
        originals = row_addresses(matrix, rows)
        sources, errors = self._adjusted(states, originals, masks)
        ids = draw_tokens(sources, self._vocab_size, _settings(states)).tolist()
        for index, token_id in enumerate(ids):
            if token_id < 0:
                errors.setdefault(index, _NOT_FINITE if token_id == NOT_FINITE else _NOTHING_LEFT)
        asking = [i for i, state in enumerate(states) if state.params.logprobs is not None and i not in errors]
        found = dict(zip(asking, self._logprobs(originals, asking, ids, states), strict=True))
        drawn = []
        for index, (seq_id, state, token_id) in enumerate(zip(seq_ids, states, ids, strict=True)):
            if index in errors:
                drawn.append(Drawn(seq_id, [], error=errors[index]))
                continue
            drawn.append(_taken(seq_id, state, token_id, found.get(index)))
        return drawn

    def _masks(self, seq_ids: Sequence[int], settled: dict[int, Drawn]) -> list[Mask]:
        """What constraints allow, in order of seq_ids. Who draws nothing, being at its end or in error, goes into `settled`."""
        masks: list[Mask] = [None] * len(seq_ids)
        for index, seq_id in enumerate(seq_ids):
            state = self._states.get(seq_id)
            if state is None or state.guide is None:
                continue
            try:
                masks[index] = self._mask_thread.mask(seq_id, state.guide)
            except Exception as error:  # whatever it is, the other sequences go on
                settled[seq_id] = Drawn(seq_id, [], error=_reason(error))
                continue
            if state.guide.is_complete:
                settled[seq_id] = Drawn(seq_id, [], ends=True)
        return masks

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Log-probabilities of targets[i] in logits[i] of [R, V], with `num` alternatives each; R may exceed the
        targets.

        A row that is not finite gives NaN, rank 0 and no alternatives.
        """
        if not targets:
            return []
        matrix = as_rows(logits[: len(targets)])
        found = logprobs(row_addresses(matrix, range(len(targets))), matrix.shape[1], targets, [num] * len(targets))
        return [_token_logprobs(target, entry) for target, entry in zip(targets, found, strict=True)]

    def _take_largest(self, seq_id: int, state: SequenceState, token_id: int, logit: float) -> Drawn:
        if not np.isfinite(logit):
            return Drawn(seq_id, [], error=_NOTHING_LEFT if logit == -np.inf else _NOT_FINITE)
        return _taken(seq_id, state, token_id)

    def _adjusted(
        self, states: Sequence[SequenceState], rows: Ids, masks: Sequence[Mask]
    ) -> tuple[Ids, dict[int, str]]:
        """The rows as they are drawn from: at their own addresses where nothing changes them, else copies in this sampler's
        scratch; and by index in the batch what went wrong."""
        changed = [i for i, state in enumerate(states) if masks[i] is not None or state.adjusts]
        errors: dict[int, str] = {}
        if not changed:
            return rows, errors
        if len(self._scratch) < len(changed):
            self._scratch = np.empty((len(changed), self._vocab_size), dtype=np.float32)
        copies = self._scratch[: len(changed)]
        allowed: list[Words | None] = [None] * len(changed)
        edits: list[list[Edits]] = [[] for _ in changed]
        for place, index in enumerate(changed):
            try:
                allowed[place] = _allowed(states[index], masks[index])
                with np.errstate(all="ignore"):
                    edits[place] = states[index].edits()
            except Exception as error:  # whatever it is, the other sequences go on
                errors[index] = _reason(error)
        adjust_rows(rows[changed], allowed, edits, copies)
        sources = rows.copy()
        sources[changed] = row_addresses(copies, range(len(changed)))
        return sources, errors

    def _logprobs(
        self, rows: Ids, asking: Sequence[int], ids: Sequence[int], states: Sequence[SequenceState]
    ) -> list[list[TokenLogprobs]]:
        """Of the token drawn by each of those asking, in the model's own logits."""
        if not asking:
            return []
        num_top = [states[i].params.logprobs or 0 for i in asking]
        token_ids = [ids[i] for i in asking]
        found = logprobs(rows[asking], self._vocab_size, token_ids, num_top)
        return [[_token_logprobs(token_id, entry)] for token_id, entry in zip(token_ids, found, strict=True)]


def _taken(seq_id: int, state: SequenceState, token_id: int, logprobs: list[TokenLogprobs] | None = None) -> Drawn:
    try:
        state.append(token_id)
    except RequestError as error:
        return Drawn(seq_id, [], error=error.message)
    return Drawn(seq_id, [token_id], logprobs, ends=state.guide is not None and state.guide.is_complete)


def _reason(error: Exception) -> str:
    if isinstance(error, NanovllmError):
        return error.message
    return f"sampling failed: {type(error).__name__}: {error}"


def _allowed(state: SequenceState, mask: Mask) -> Words | None:
    """The ids that both a sequence's parameters and its mask allow; None for all."""
    if mask is None:
        return state.allowed
    words = mask if isinstance(mask, np.ndarray) else mask_words(mask)
    if state.allowed is None:
        return words
    both = min(len(words), len(state.allowed))
    return words[:both] & state.allowed[:both]


def _settings(states: Sequence[SequenceState]) -> NDArray[np.float64]:
    """What each draw needs of its request, with its random number, and without XTC where its chance does not come up."""
    settings = np.array([state.draw_settings for state in states])
    if settings[:, TEMPERATURE].any():
        settings[:, UNIFORM] = _uniforms(states, DRAW_TOKEN)
    if settings[:, XTC_THRESHOLD].any():
        chances = np.array([state.params.xtc_probability for state in states])
        settings[_uniforms(states, EXCLUDE_TOP_CHOICES) >= chances, XTC_THRESHOLD] = 0.0
    return settings


def _uniforms(states: Sequence[SequenceState], purpose: int) -> NDArray[np.float64]:
    return philox_uniforms([state.seed for state in states], [state.position for state in states], purpose)


def _token_logprobs(token_id: int, found: RowLogprobs | None) -> TokenLogprobs:
    if found is None:
        return TokenLogprobs(token_id, math.nan, 0, ())
    return TokenLogprobs(token_id, found.logprob, found.rank, tuple(zip(found.top_ids, found.top_logprobs, strict=True)))
