"""From logits to tokens, on the worker's side. Knows nothing of schedules, and of text only what two hooks tell it.

A sequence is registered once, with its prompt and its seed, and forgotten when it finishes; a preempted one stays
registered. The sampler appends what it draws. What happens to a row of logits, in this order:

    logprobs                 read from the model's own logits, before anything else
    mask                     a structured-output constraint, or the rules of a transcript: everything else is banned
    allowed_token_ids        everything else is banned
    bad_words                the token that would complete one is banned
    min_tokens               stop ids are banned
    logit_bias               added
    penalties                repetition, then frequency and presence
    DRY                      subtracted
    (temperature 0)          the largest logit wins, the lowest id of equal ones; the rest is for other temperatures
    temperature              logits are divided by it
    top_n_sigma              of all that may be drawn
    min_p, top_k             as in vLLM, where min_p comes first; both cut at a place in the order by logit
    typical_p, top_p, XTC    in llama.cpp's order, each on what is left, renormalized
    draw

**A constraint is asked afterwards** where its answer is most likely yes: where it allowed the last draw's largest logit. What is
drawn without a mask and turns out to be allowed is kept; if it is not, the mask is computed, and the draw repeated under it with
another random number. For a greedy request that is the same token. For one that filters nothing it is the same distribution: p of
a token, and its share of what is refused, p + (1 - A) * p / A = p / A, where A is what is allowed. Filters choose among what is
allowed: of what they left without a mask, the likeliest are asked about until they decide what would be left under one
(`kernels.cpu_sampling.draw_allowed`), and drawn from by the same random number. Which way a draw goes depends on the
sequence's own past alone.

vLLM's parameters come in vLLM's order; top_n_sigma, typical_p and XTC stand where llama.cpp has them, before, between and
behind top_k and top_p, on probabilities at the given temperature. What names another order, or has no place in this one, draws
step by step (`sampling_chain`). `kernels/cpu_sampling.py` says how a token is drawn, and why the batch cannot matter. All rows
of a step are changed and drawn from together, in compiled code; a sequence by itself only keeps the list of what its own
tokens change (`sampling_state`).

A row that holds NaN or +inf, or where nothing may be drawn, ends its own sequence and no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_cli.constrain.compiler import Compiler
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.masks import MaskThreads
from nanovllm_cli.engine.plan import Drawn, NewSequence, Scheduled, TokenLogprobs
from nanovllm_cli.engine.sampling_dry import BreakerVocabulary, DryBreakers, DryPrompt, no_breakers
from nanovllm_cli.engine.sampling_random import DRAW_AGAIN, DRAW_TOKEN, EXCLUDE_TOP_CHOICES, philox_uniforms
from nanovllm_cli.engine.sampling_state import Ban, SequenceState, bad_word_ids, completion_bans
from nanovllm_cli.errors import NanovllmError, RequestError, UnmeetableError, UsageError
from nanovllm_cli.kernels.cpu_sampling import (
    MAX_VOCABULARY,
    Edits,
    Ids,
    RowLogprobs,
    Words,
    as_rows,
    draw_allowed,
    draw_tokens,
    edit_rows,
    has_bit,
    largest,
    logprobs,
    mask_words,
    row_addresses,
)
from nanovllm_cli.kernels.cpu_sampling_rows import (
    NOT_FINITE,
    NOTHING_LEFT,
    NUM_KEPT,
    TEMPERATURE,
    UNIFORM,
    XTC_THRESHOLD,
)

Mask = torch.Tensor | Words | None

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
        # What requests ask for by text is looked up once for all their answers. None of the caches refers to this object.
        self._bans = None
        if encode is not None:
            self._bans = lru_cache(maxsize=8)(lambda words: completion_bans(bad_word_ids(words, encode, vocab_size)))
        self._breakers = None
        if encode is not None and token_bytes is not None:
            self._breakers = lru_cache(maxsize=8)(BreakerVocabulary(vocab_size, encode, token_bytes).breakers)
        self._dry_prompts: WeakValueDictionary[tuple[tuple[int, ...], DryBreakers], DryPrompt] = WeakValueDictionary()
        self._compiler = compiler
        self._mask_threads = MaskThreads()
        self._states: dict[int, SequenceState] = {}
        self._refused: dict[int, Exception] = {}
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
            self._refused[new.seq_id] = error

    def _state(self, new: NewSequence) -> SequenceState:
        params = new.params
        vocab_size = self._vocab_size
        params.check_vocabulary(vocab_size)
        for token_id in (min(new.prompt_ids, default=0), max(new.prompt_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise UsageError(f"the prompt holds token id {token_id}, outside the vocabulary of {vocab_size} tokens")
        bad_words: Sequence[Ban] = ()
        if params.bad_words:
            if self._bans is None:
                raise UsageError("bad_words needs a tokenizer, and this engine runs without one")
            bad_words = self._bans(tuple(params.bad_words))
        dry_prompt = self._dry_prompt(new) if params.has_dry else None
        return SequenceState(new, vocab_size, bad_words, dry_prompt, self.guide(new))

    def _dry_prompt(self, new: NewSequence) -> DryPrompt:
        """One for all answers to a prompt, for as long as any of them is registered."""
        texts = tuple(new.params.dry_sequence_breakers)
        breakers = no_breakers(self._vocab_size)
        if texts:
            if self._breakers is None:
                raise UsageError("dry_multiplier needs a tokenizer, and this engine runs without one")
            breakers = self._breakers(texts)
        key = tuple(new.prompt_ids), breakers
        prompt = self._dry_prompts.get(key)
        if prompt is None:
            prompt = self._dry_prompts[key] = DryPrompt(new.prompt_ids, breakers)
        return prompt

    def guide(self, new: NewSequence) -> Guide | None:
        """A sequence's way through its constraint, at its beginning; None without one."""
        if not new.params.is_guided:
            return None
        if self._compiler is None:
            raise UsageError("a constraint needs a tokenizer, and this engine runs without one")
        return self._compiler.guide(new.params, new.stop_ids)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; one that was never registered is no matter."""
        self._states.pop(seq_id, None)
        self._refused.pop(seq_id, None)

    def keep(self, scheduled: Sequence[Scheduled]) -> None:
        """Forgets what steps that were broken off drew for these."""
        for share in scheduled if self._states else ():
            for seq_id in share.draws:
                state = self._states.get(seq_id)
                if state is not None and state.position > share.num_drawn:
                    anew = self._state(state.new)
                    anew.repeat(state, share.num_drawn)
                    self._states[seq_id] = anew  # when it is whole: this may be broken off, too

    def start_masks(self, seq_ids: Sequence[int]) -> None:
        """Begins to compute what constraints allow these sequences, while the model runs elsewhere; where it is not called,
        that is done when it is needed. Those that draw first are asked about afterwards."""
        states = ((seq_id, self._states.get(seq_id)) for seq_id in seq_ids)
        guides = {seq_id: state.guide for seq_id, state in states if state and state.guide and not state.draws_first}
        if guides:
            self._mask_threads.start(guides)

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
        draws = [
            _Draw(seq_id, self._states[seq_id], row)
            for seq_id, row in zip(seq_ids, rows, strict=True)
            if seq_id not in self._refused
        ]
        if masks is None:
            for draw in draws:
                if draw.state.rules is not None:
                    draw.mask = draw.state.rules.allowed(as_rows(logits)[draw.row], draw.state.output_ids)
            guided = [draw for draw in draws if draw.state.guide is not None]
            first = [draw for draw in guided if draw.state.draws_first]
            self._put_masks([draw for draw in guided if not draw.state.draws_first])
            self._draw(draws, logits, DRAW_TOKEN)
            self._ask_constraints(first, logits)
        else:
            given = dict(zip(seq_ids, masks, strict=True))
            for draw in draws:
                draw.mask = given[draw.seq_id]
            self._draw(draws, logits, DRAW_TOKEN)
        self._put_logprobs(draws, logits)
        drawn = {draw.seq_id: draw.taken() for draw in draws}
        return [drawn.get(seq_id) or failed_draw(seq_id, self._refused[seq_id]) for seq_id in seq_ids]

    def _put_masks(self, draws: Sequence[_Draw]) -> None:
        """What constraints allow. Whoever draws nothing, being at its end or in error, is settled."""
        if not draws:
            return
        guides = {draw.seq_id: draw.state.guide for draw in draws if draw.state.guide is not None}
        self._mask_threads.finish(guides)
        for draw in draws:
            guide = guides[draw.seq_id]
            try:
                draw.mask = self._mask_threads.mask(draw.seq_id, guide)
                draw.ends = guide.is_complete
            except Exception as error:  # whatever it is, the other sequences go on
                draw.error = error

    def _ask_constraints(self, draws: Sequence[_Draw], logits: torch.Tensor) -> None:
        """Of what was drawn without a mask, keeps what is allowed; the rest is drawn again under its mask."""
        unknown = [draw for draw in draws if draw.is_open and not draw.is_known_allowed()]
        unknown = [draw for draw in unknown if draw.is_open]  # a matcher that gives up when it is asked ends its draw
        if not unknown:
            return
        self._put_masks(unknown)
        self._draw([draw for draw in unknown if draw.state.is_filtered], logits, DRAW_TOKEN)
        self._draw([draw for draw in unknown if not (draw.state.is_filtered or draw.is_in_mask)], logits, DRAW_AGAIN)

    def _draw(self, draws: Sequence[_Draw], logits: torch.Tensor, purpose: int) -> None:
        """A token for each that is not settled, by the random numbers of this purpose."""
        draws = [draw for draw in draws if draw.is_open]
        self._draw_by_steps([draw for draw in draws if draw.state.chain is not None], logits)
        draws = [draw for draw in draws if draw.state.chain is None]
        if all(draw.state.takes_the_largest and draw.mask is None for draw in draws):
            best, values = largest(logits) if draws else ([], [])
            for draw in draws:
                value = values[draw.row]
                draw.found(best[draw.row] if math.isfinite(value) else NOTHING_LEFT if value == -math.inf else NOT_FINITE)
            return
        states = [draw.state for draw in draws]
        allowed: list[Words | None] = [None] * len(draws)
        edits: list[list[Edits]] = [[] for _ in draws]
        for index, draw in enumerate(draws):
            try:
                allowed[index] = _allowed(draw.state, draw.mask)
                with np.errstate(all="ignore"):
                    edits[index] = draw.state.edits()
            except Exception as error:  # whatever it is, the other sequences go on
                draw.error = error
        matrix = as_rows(logits)
        assert matrix.shape[1] == self._vocab_size
        sources, scratch = self._edited(row_addresses(matrix, [draw.row for draw in draws]), edits, allowed)
        settings = _settings(states, purpose)
        drawn = draw_tokens(sources, self._vocab_size, settings, allowed, scratch)
        for index, (draw, token_id) in enumerate(zip(draws, drawn.ids.tolist(), strict=True)):
            draw.found(token_id)
            draw.kept, draw.setting = drawn.kept[index], settings[index]
            if draw.mask is not None:
                is_told = not draw.state.is_filtered or bool(draw.kept[NUM_KEPT])
                draw.expects_allowed = bool(drawn.largest_allowed[index]) and is_told

    def _draw_by_steps(self, draws: Sequence[_Draw], logits: torch.Tensor) -> None:
        """Of those that go through steps in an order of their own."""
        if not draws:
            return
        states, matrix = [draw.state for draw in draws], as_rows(logits)
        numbers = zip(_uniforms(states, DRAW_TOKEN), _uniforms(states, EXCLUDE_TOP_CHOICES), strict=True)
        for draw, (uniform, chance) in zip(draws, numbers, strict=True):
            state = draw.state
            assert state.chain is not None
            try:
                allowed = _allowed(state, draw.mask)
                row, bans = matrix[draw.row], state.bans()
                draw.found(state.chain.draw(row, bans, allowed, state.edits_of, float(uniform), float(chance)))
            except Exception as error:  # whatever it is, the other sequences go on
                draw.error = error

    def _edited(
        self, rows: Ids, edits: Sequence[Sequence[Edits]], allowed: Sequence[Words | None]
    ) -> tuple[Ids, Ids]:
        """Where rows are drawn from, which is at their own addresses where nothing edits them, and where a masked one may be
        written: copies in this sampler's scratch."""
        edited = [index for index, parts in enumerate(edits) if any(map(len, parts))]
        masked = [index for index, words in enumerate(allowed) if words is not None and index not in edited]
        places = edited + masked
        if not places:
            return rows, rows
        if len(self._scratch) < len(places):
            self._scratch = np.empty((len(places), self._vocab_size), dtype=np.float32)
        if edited:
            edit_rows(rows[edited], [edits[index] for index in edited], self._scratch[: len(edited)])
        sources, scratch = rows.copy(), rows.copy()
        scratch[places] = row_addresses(self._scratch, range(len(places)))
        sources[edited] = scratch[edited]
        return sources, scratch

    def _put_logprobs(self, draws: Sequence[_Draw], logits: torch.Tensor) -> None:
        """Of the token drawn by each of those asking, in the model's own logits; of a transcript among what its rules leave."""
        if not (asking := [draw for draw in draws if draw.is_open and draw.state.params.logprobs is not None]):
            return
        rows = row_addresses(matrix := as_rows(logits), [draw.row for draw in asking])
        num_top = [draw.state.params.logprobs or 0 for draw in asking]
        found = logprobs(rows, matrix.shape[1], [draw.token_id for draw in asking], num_top)
        for draw, entry in zip(asking, found, strict=True):
            told, rules = _token_logprobs(draw.token_id, entry, draw.state.left), draw.state.rules
            draw.logprobs = [told if rules is None else told._replace(top=rules.likeliest(matrix[draw.row], len(told.top)))]

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


@dataclass(slots=True, eq=False)
class _Draw:
    """One sequence's draw of a step, from one row of logits. mask: what it may draw; None for everything. kept, setting: what
    filters left, and what they were. ends: it draws nothing, its constraint being fulfilled. expects_allowed: what becomes its
    state's."""

    seq_id: int
    state: SequenceState
    row: int
    mask: Mask = None
    token_id: int = -1
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None
    kept: Ids | None = None
    setting: NDArray[np.float64] | None = None
    ends: bool = False
    expects_allowed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.expects_allowed = self.state.expects_allowed

    @property
    def is_open(self) -> bool:
        return self.error is None and not self.ends

    @property
    def is_in_mask(self) -> bool:
        return isinstance(self.mask, np.ndarray) and has_bit(self.mask, self.token_id)

    def is_known_allowed(self) -> bool:
        """Whether this is a draw under its constraint, as far as that can be told without its mask. A filtered one then is."""
        assert self.state.guide is not None
        try:
            if not self.state.is_filtered:
                return self.state.guide.allows(self.token_id) is True
            assert self.kept is not None
            assert self.setting is not None
            token_id = draw_allowed(self.kept, self.setting, self.state.guide.allows)
            self.token_id = self.token_id if token_id is None else token_id
            return token_id is not None
        except Exception as error:  # whatever it is, the other sequences go on
            self.error = error
            return False

    def found(self, token_id: int) -> None:
        self.token_id = token_id
        if token_id < 0 and self.error is None:
            self.error = nothing_drawn(is_finite=token_id != NOT_FINITE)

    def taken(self) -> Drawn:
        """Moves the sequence on. Until here its state is as it was: what is broken off is drawn again alike."""
        if self.error is None and not self.ends:
            self.state.expects_allowed = self.expects_allowed
            try:
                self.state.append(self.token_id)
            except NanovllmError as error:
                self.error = error
        if self.error is not None:
            return failed_draw(self.seq_id, self.error)
        if self.ends:
            return Drawn(self.seq_id, [], ends=True)
        guide = self.state.guide
        return Drawn(self.seq_id, [self.token_id], self.logprobs, ends=guide is not None and guide.is_complete)


def nothing_drawn(*, is_finite: bool) -> NanovllmError:
    """Why a row gave no token."""
    if is_finite:
        return UnmeetableError("no token is left to draw: every one is banned")
    return RequestError("the model's logits are not finite: NaN or infinity")


def failed_draw(seq_id: int, error: Exception) -> Drawn:
    """What is said of a sequence that this ends."""
    if isinstance(error, NanovllmError):
        return Drawn(seq_id, [], error=error.message, unmeetable=isinstance(error, UsageError))
    return Drawn(seq_id, [], error=f"sampling failed: {type(error).__name__}: {error}")


def _allowed(state: SequenceState, mask: Mask) -> Words | None:
    """The ids that both a sequence's parameters and its mask allow; None for all."""
    if mask is None:
        return state.allowed
    words = mask if isinstance(mask, np.ndarray) else mask_words(mask)
    if state.allowed is None:
        return words
    both = min(len(words), len(state.allowed))
    return words[:both] & state.allowed[:both]


def _settings(states: Sequence[SequenceState], purpose: int) -> NDArray[np.float64]:
    """What each draw needs of its request, with its random number, and without XTC where its chance does not come up."""
    settings = np.array([state.draw_settings for state in states])
    if settings[:, TEMPERATURE].any():
        settings[:, UNIFORM] = _uniforms(states, purpose)
    if settings[:, XTC_THRESHOLD].any():
        chances = np.array([state.params.xtc_probability for state in states])
        settings[_uniforms(states, EXCLUDE_TOP_CHOICES) >= chances, XTC_THRESHOLD] = 0.0
    return settings


def _uniforms(states: Sequence[SequenceState], purpose: int) -> NDArray[np.float64]:
    return philox_uniforms([state.seed for state in states], [state.position for state in states], purpose)


def _token_logprobs(token_id: int, found: RowLogprobs | None, left: float = 0.0) -> TokenLogprobs:
    if found is None:
        return TokenLogprobs(token_id, math.nan, 0, ())
    return TokenLogprobs(token_id, found.logprob - left, found.rank, tuple(zip(found.top_ids, found.top_logprobs, strict=True)))
