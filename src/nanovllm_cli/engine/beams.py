"""Answers that are looked for instead of drawn: a search by beams.

Of `num_beams` beginnings of an answer each is gone on with by its likeliest tokens, and of what all of them come to the likeliest
are the next beginnings. One that ends, or is as long as it may be, is an answer, if it is among the first num_beams then; its
score is the sum of its log-probabilities over its length to the power of `length_penalty`. The search is over when there are
num_beams answers, none of which the likeliest beginning would better if it ended now (transformers' `early_stopping=False`).

It goes in rounds, as vLLM's does: in each, every beginning is a sequence of its own that draws one token, and goes on from the
blocks of the one whose beginning it takes further. Where it can't, as one of them was preempted or there is no seat, it waits as
others do, and what the prefix cache has of it is not computed again. So caches and workers know no beams.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Set
from dataclasses import replace
from typing import NamedTuple

from nanovllm_cli.engine.plan import Drawn, TokenLogprobs
from nanovllm_cli.engine.sampling_ngrams import WrittenNgrams
from nanovllm_cli.engine.scheduler import Scheduler
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import MAX_LOGPROBS, SamplingParams


class Beam(NamedTuple):
    """A beginning of an answer. total: of its tokens' log-probabilities. parent: the place of the one that it takes further."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    parent: int = 0


class BeamSearch:
    """Of one prompt. beams: what is gone on with, the likeliest first. found: answers, the best first, with their scores.

    end_ids: tokens that end an answer. max_tokens: of the longest one. own: tokens that it begins behind, of which the last
    `told` count as its own where it is scored: languages that a decoder is told, for transformers draws them.
    """

    def __init__(
        self, params: SamplingParams, end_ids: Collection[int], max_tokens: int, own: tuple[int, ...] = (), told: int = 0
    ) -> None:
        self._num_beams, self._length_penalty = params.num_beams, params.length_penalty
        self._end_ids, self._max_tokens = frozenset(end_ids), max_tokens
        self._min_tokens, self._ngram, self._own, self._told = params.min_tokens, params.no_repeat_ngram_size, own, told
        self.beams = [Beam()]
        self.found: list[tuple[float, Beam]] = []

    @property
    def num_tops(self) -> int:
        """How many of a beam's next tokens have to be known: as many as there are beams, all that might end it, and all that are
        banned."""
        most = max(len(self._repeats(beam)) for beam in self.beams) if self._ngram else 0
        return self._num_beams + len(self._end_ids) + most

    def _repeats(self, beam: Beam) -> Set[int]:
        return WrittenNgrams(self._ngram, (*self._own, *beam.token_ids)).banned

    def _banned(self, beam: Beam) -> Set[int]:
        ends = self._end_ids if len(beam.token_ids) < self._min_tokens else frozenset()
        return ends | self._repeats(beam) if self._ngram else ends

    def go_on(self, rows: list[TokenLogprobs]) -> bool:
        """rows: of each beam, its likeliest next tokens. Whether the search goes on."""
        order: list[tuple[float, int, int]] = []
        for i, beam in enumerate(self.beams):
            banned = self._banned(beam)
            order += [(beam.total + logprob, i, j) for j, (token_id, logprob) in enumerate(rows[i].top) if token_id not in banned]
        order.sort(key=lambda each: (-each[0], *each[1:]))
        kept: list[Beam] = []
        length = len(self.beams[0].token_ids) + 1
        for place, (total, i, j) in enumerate(order):
            is_first, (token_id, logprob) = place < self._num_beams, rows[i].top[j]
            ends = token_id in self._end_ids or length == self._max_tokens
            if not (is_first if ends else len(kept) < self._num_beams):
                continue
            beam, told = self.beams[i], TokenLogprobs(token_id, logprob, j + 1, rows[i].top)
            longer = Beam((*beam.token_ids, token_id), (*beam.logprobs, told), total, i)
            if ends:
                self.found.append((self._score(total, length), longer))
            else:
                kept.append(longer)
        self.found = sorted(self.found, key=lambda each: -each[0])[: self._num_beams]
        self.beams = kept
        if not kept or len(self.found) < self._num_beams:
            return bool(kept)
        return self._score(kept[0].total, length) > self.found[-1][0]

    def _score(self, total: float, length: int) -> float:
        return float(total / (length + self._told) ** self._length_penalty)


def check_beams(params: SamplingParams, end_ids: Collection[int], vocab_size: int) -> None:
    """Raises UsageError for more than can be looked at."""
    if params.num_beams > 1 and params.no_repeat_ngram_size == 1:
        raise UsageError("no_repeat_ngram_size: 1 bans all that was said, which beams don't look beyond", "2 or more")
    if params.num_beams > 1 and params.num_beams + len(end_ids) > min(MAX_LOGPROBS, vocab_size):
        what = f"num_beams: {params.num_beams} of them, and {len(end_ids)} tokens that end an answer"
        raise UsageError(what, f"{min(MAX_LOGPROBS, vocab_size)} are looked at behind each")


class Searching:
    """A request whose answers are looked for, and who waits to compute it. seq_ids: numbers for its sequences. vocab_size: of the
    model."""

    def __init__(self, request: Request, scheduler: Scheduler, seq_ids: Iterator[int], vocab_size: int) -> None:
        params = request.params
        self._request, self._scheduler, self._seq_ids = request, scheduler, seq_ids
        self._vocab_size = vocab_size
        max_tokens = request.max_len - len(request.prompt_ids)
        own, is_read = request.own_ids, len(request.own_ids) < len(request.prompt_ids)
        self._search = BeamSearch(params, request.stop_ids, max_tokens, own, len(own) - 1 if is_read else 0)
        self._drawn: dict[int, TokenLogprobs] = {}
        self._sequences: list[Sequence] = []
        self._add()

    def take(self, sequence: Sequence, drawn: Drawn | None) -> list[Drawn]:
        """What a step did to one of its sequences. Gives all tokens of each of its `n` answers, the best first, when they are
        found; what failed, for each, where something did; else nothing."""
        self._heed(sequence.request)
        if drawn is None:
            return []
        row = None if not drawn.logprobs else drawn.logprobs[0]
        if drawn.error is not None or row is None or math.isnan(row.logprob):
            self._scheduler.finish(sequence)
            error = drawn.error or "the model's log-probabilities are not finite"
            return [Drawn(sequence.seq_id, [], error=error, unmeetable=drawn.unmeetable)] * self._request.params.n
        self._drawn[sequence.index] = row
        if len(self._drawn) < len(self._sequences):
            return []
        if self._search.go_on([self._drawn[i] for i in range(len(self._sequences))]):
            if self._search.num_tops > MAX_LOGPROBS:
                error = f"no_repeat_ngram_size bans so much that more than {MAX_LOGPROBS} tokens would have to be looked at"
                return [Drawn(sequence.seq_id, [], error=error, unmeetable=True)] * self._request.params.n
            self._add()
            return []
        return [self._answer(beam) for _, beam in self._search.found[: self._request.params.n]]

    def rest(self) -> None:
        """A step is over: those that have drawn in it, and wait for others of their round, hold nothing."""
        for index in self._drawn:
            self._scheduler.finish(self._sequences[index])

    def drop(self) -> None:
        """Nobody waits for it any more."""
        for sequence in self._sequences:
            self._scheduler.finish(sequence)

    def _add(self) -> None:
        """A round: a sequence for each beam, whose tokens are behind the prompt as if it had drawn them."""
        whole, parents, self._sequences, self._drawn = self._request, self._sequences, [], {}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=min(self._search.num_tops, self._vocab_size), ignore_eos=True,
            lora=whole.params.lora, transcript=whole.params.transcript,
        )  # fmt: skip
        for index, beam in enumerate(self._search.beams):
            token_ids = [*whole.prompt_ids, *beam.token_ids]
            request = replace(
                whole, params=params, max_len=len(token_ids) + 1, stop_ids=(), sequences=[], stages_left={},
                runs_ahead=False, num_preemptions=0, num_cached_tokens=0, num_computed_prompt_tokens=0,
            )  # fmt: skip
            sequence = Sequence(next(self._seq_ids), request, index, 0, token_ids)
            request.sequences = [sequence]
            self._sequences.append(sequence)
        if parents:
            heirs = [(parents[beam.parent], each) for beam, each in zip(self._search.beams, self._sequences, strict=True)]
            self._scheduler.go_on_from(parents, heirs)
        else:
            self._scheduler.add(request)
            whole.rank = request.rank  # its later rounds take no other's turn, and nobody takes theirs

    def _heed(self, request: Request) -> None:
        """What the whole request's metrics take from one of its rounds."""
        whole = self._request
        if whole.first_scheduled is None:
            whole.first_scheduled, whole.num_cached_tokens = request.first_scheduled, request.num_cached_tokens
        whole.num_computed_prompt_tokens = max(whole.num_computed_prompt_tokens, request.num_computed_prompt_tokens)
        whole.num_preemptions, request.num_preemptions = whole.num_preemptions + request.num_preemptions, 0

    def _answer(self, beam: Beam) -> Drawn:
        count = self._request.params.logprobs
        logprobs = None if count is None else [each._replace(top=each.top[:count]) for each in beam.logprobs]
        return Drawn(-1, list(beam.token_ids), logprobs)
