"""What crosses between the scheduler and a worker: plain ints, floats and strings, in both directions.

A `Plan` says what one step computes, a `StepOutput` what came of it. Nothing here holds a tensor, so both can cross
to another process as they are; logits never cross.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from types import MappingProxyType
from typing import NamedTuple

from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.leading import Lead
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import Image, PlacedImage, Sound

DRAWN_BEFORE = -1
"""As a fed token: the one that the sequence drew in the step before, which only the worker knows yet."""

DRAFTED = -2
"""As a fed token: one that the worker guesses, or leaves out."""


class NewSequence(NamedTuple):
    """A sequence that the worker's sampler has not seen: what penalties, seeds and constraints need to begin.

    stop_ids: ids that end the sequence (EOS included unless ignored); the sampler bans them while min_tokens is not
        reached.
    drawn: tokens that are behind the prompt already, as if it had drawn them.
    """

    seq_id: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    drawn: Sequence[int] = ()


class Scheduled(NamedTuple):
    """One sequence's share of one step: `token_ids` are fed at positions start, start + 1, … In a step that is planned ahead
    they are [DRAWN_BEFORE].

    block_table: the blocks that hold positions 0 … start + len(token_ids) - 1, in order. near_table: the parts that layers with a
        window have in their place, where these are not one (see `near.py`).
    draws: ids of the sequences that draw a token from the logits of the last row. Empty for a prefill chunk that is
        not the prompt's last; several where `n > 1` sequences share the prompt that this row ends.
    prompt_logprobs: how many alternatives to report for each prompt token that this chunk's rows predict; None for
        none.
    targets: the tokens that follow each row, known for prompt_logprobs (the last row of the prompt has no target).
    prompt_len: tokens of the whole prompt, which length-dependent rope scaling goes by.
    pooling: what becomes of the hidden rows of a text that is embedded; or what is asked of one that is said in a sound.
    num_guesses: how many of token_ids, the last ones, are guesses: the sequence draws from the row before each as well, as long
        as they turn out right.
    drafted: token_ids are guesses of a model that drafts, which a state is to take back as well, though nobody draws behind them.
    every_row: rows of all tokens are wanted behind the last norm, though only the last is drawn from: such a step is recorded.
    state: the sequence's, of a model that keeps some. second: see `Request`.
    lora: what this sequence's rows take of each adapter that requests choose from; empty where they take none.
    images: those that some of the tokens stand for. shift: what rotary positions of the first token are off by, as images before
    it take fewer of them than tokens. lead: what is in front of its text for layers that look at images.
    keeps_hidden: the runner keeps the rows of all tokens behind the last norm, for what guesses by them (`engine/mtp.py`).
    keeps_drawn: or of those that are drawn from (`engine/assistant.py`).
    """

    seq_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    draws: tuple[int, ...]
    prompt_logprobs: int | None = None
    targets: tuple[int, ...] = ()
    prompt_len: int = 0
    pooling: Pooled | Alignment | None = None
    num_guesses: int = 0
    drafted: bool = False
    every_row: bool = False
    state: int = 0
    second: int = 0
    keeps_hidden: bool = False
    keeps_drawn: bool = False
    lora: tuple[float, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    shift: int = 0
    near_table: Sequence[int] = ()
    lead: Lead | None = None

    @property
    def known(self) -> list[int]:
        return self.token_ids[: len(self.token_ids) - self.num_guesses]

    @property
    def guesses(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.num_guesses :]

    @property
    def known_len(self) -> int:
        """Tokens of the sequence up to the last that is fed and no guess."""
        return self.start + (0 if self.drafted else len(self.token_ids) - self.num_guesses)

    @property
    def num_drawn(self) -> int:
        """Tokens behind the prompt up to the last that is fed and no guess: what those that draw here have drawn before."""
        return self.start + len(self.token_ids) - self.num_guesses - self.prompt_len

    @property
    def draws_from_all(self) -> bool:
        """Whether every row is drawn from, if guesses hold, or is wanted as if it were."""
        return self.every_row or (bool(self.draws) and len(self.token_ids) == 1 + self.num_guesses)

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept: all `wanted_rows`."""
        return self.keeps_hidden or self.keeps_drawn

    @property
    def wanted_rows(self) -> range:
        """Rows of this share that are needed behind the last norm."""
        count = len(self.token_ids)
        if self.prompt_logprobs is not None or self.pooling in ("mean", "each") or self.every_row or self.keeps_hidden:
            return range(count)
        if self.pooling == "cls":
            return range(1 if self.start == 0 else 0)
        return range(count - 1 - self.num_guesses, count) if self.draws or self.pooling == "last" else range(0)


class Look(NamedTuple):
    """An image, or a piece of a sound, of a sequence's prompt of which so many stages are computed, for a later step that has its
    tokens."""

    seq_id: int
    image: Image | Sound
    num_stages: int


class Copy(NamedTuple):
    """A block to be copied to another, and the near part of the one to that of the other (see `near.py`)."""

    source: int
    target: int
    source_part: int
    target_part: int


class Plan(NamedTuple):
    """One step. Order of effects: look at an image, forget `finished`, register `new`, copy blocks and states, run, sample."""

    scheduled: list[Scheduled]
    new: list[NewSequence]
    finished: list[int]
    copies: list[Copy]
    state_copies: Sequence[tuple[int, int]] = ()
    look: Look | None = None


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and of the most likely ones. Natural logarithm, before temperature and filters
    (vLLM's "raw_logprobs"); that of a transcript's token is among what its rules leave. top: (token id, logprob) from the most
    likely down. rank: 1 for the most likely token."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Drawn(NamedTuple):
    """What one sequence drew in this step: several tokens where guesses held. `error` ends that sequence alone, behind its
    token_ids. `ends`: its constraint is fulfilled and nothing can follow, so that the answer ends here; token_ids may be empty
    then, too. `unmeetable`: the error is what the request asked for."""

    seq_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    ends: bool = False
    unmeetable: bool = False


Numbers = MutableSequence[float]


class StepOutput(NamedTuple):
    """drawn: one entry per id in the plan's `draws`. prompt_logprobs: seq id -> entries for its chunk's targets. pooled: seq id
    -> the sum of its chunk's hidden rows ("mean"), or the row that its pooling takes from the chunk, or all rows one behind the
    other ("each"); or, with the last chunk, what an Alignment finds. guesses: seq id -> what the worker fed in place of DRAFTED.
    stages_left: of the image that is looked at."""

    drawn: list[Drawn]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    pooled: Mapping[int, Numbers] = MappingProxyType({})
    guesses: Mapping[int, list[int]] = MappingProxyType({})
    stages_left: int = 0

    def fed(self, share: Scheduled) -> list[int]:
        """What a share's tokens turned out to be, where the worker guessed some of them."""
        guesses = self.guesses.get(share.seq_id)
        return share.token_ids if guesses is None else [*share.known, *guesses]
