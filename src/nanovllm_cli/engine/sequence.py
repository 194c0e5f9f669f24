"""What is being generated: a `Request` and its `n` sequences.

This is the scheduler's bookkeeping and nothing else: tokens, how many of them are computed, and the blocks that hold
them. Texts, stop rules and log-probabilities of an answer live in `answer.py`.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_left, bisect_right, insort
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.plan import NewSequence, Numbers, TokenLogprobs
from nanovllm_cli.leading import Lead
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import PlacedImage, Sound

NO_STATE = -1
NO_RANK = (0.0, -1)
_HELD = (
    "num_computed", "block_table", "block_digests", "num_registered", "last_uid", "state", "state_source", "kept_states",
    "parting", "near_start", "near_end", "near_table",
)  # fmt: skip
Salt = tuple[str | None, tuple[float, ...]]
"""What must be equal, beside the tokens, where cached K and V are shared: `cache_salt` and `lora` of a request."""


class Status(Enum):
    """PENDING: shares a prompt that another sequence of its request is computing. WAITING: holds no blocks."""

    PENDING = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """What was asked for, and what is common to its `n` sequences.

    max_len: most tokens of prompt and answer together. stop_ids: ids that end an answer.
    priority: lower is more urgent. rank: place in the one order that decides who runs first and who is preempted
    last; lower is more urgent. It never changes.
    lora: see `Scheduled`; what is cached of a prompt depends on it, too. images: of the prompt, in their order.
    lead: of these, what is in front of it for layers that look at them. asked_ids: the prompt as it was asked, where that is what
    an encoder reads.
    stages_left: of those that have been looked at, by their digests.
    prompt_logprobs: entries collected so far (the first token has none), or None when they were not asked for.
    whole: all of its tokens are computed in one step, as they see those behind them. pooling: for a text that is embedded, or
    whose times are wanted, and draws nothing. second: where the second of two texts begins that are read together, or 0. pooled:
    what its chunks gave so far.
    runs_ahead: its tokens can be fed to the next step before they are read. prepared: what had to be made for it, kept alive.
    The last six fields feed `RequestMetrics`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_len: int
    stop_ids: tuple[int, ...]
    arrival: float
    priority: int = 0
    rank: tuple[float, int] = NO_RANK
    cache_salt: str | None = None
    lora: tuple[float, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    lead: Lead | None = None
    asked_ids: tuple[int, ...] = ()
    stages_left: dict[bytes, int] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    whole: bool = False
    pooling: Pooled | Alignment | None = None
    second: int = 0
    pooled: Numbers | None = None
    runs_ahead: bool = False
    prepared: Future[Any] | None = None
    first_scheduled: float | None = None
    num_cached_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_guessed_tokens: int = 0
    num_held_tokens: int = 0

    def images_within(self, start: int, end: int) -> tuple[PlacedImage, ...]:
        """Those that some of the tokens from `start` to before `end` stand for."""
        first = bisect_right(self.images, start, key=lambda each: each.end)
        return self.images[first : bisect_left(self.images, end, lo=first, key=lambda each: each.start)]

    def shift(self, place: int) -> int:
        """See `Scheduled`, of the token at `place`, or the beginning of the image that it stands for."""
        return sum([each.extent - each.num_tokens for each in self.images if each.end <= place])

    def uncut(self, start: int, num_tokens: int) -> int:
        """So many tokens from `start` on, or fewer, or where that would be none more, so that no image is cut that is whole. A
        step may be longer for that than it was to be, by an image."""
        for each in self.images_within(start + num_tokens - 1, start + num_tokens):
            if each.whole and each.end > start + num_tokens:
                return (each.start if each.start > start else each.end) - start
        return num_tokens

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Of the prompt, what the text begins with that is written: not what an encoder reads."""
        first = self.images[0].image if self.images else None
        return self.prompt_ids[self.images[0].end :] if isinstance(first, Sound) and first.is_text else self.prompt_ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are left whose log-probabilities nobody has reported."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def wants_every_row(self) -> bool:
        """Whether its prompt must be computed from the beginning, whatever the prefix cache holds."""
        return self.wants_prompt_logprobs or isinstance(self.pooling, str)

    @property
    def most_found(self) -> int:
        """How many of its first tokens may come from the prefix cache: where times are wanted, a sound's alone."""
        return self.images[0].end if isinstance(self.pooling, Alignment) else len(self.prompt_ids) + self.max_len

    def begin_again(self) -> None:
        """Forgets what was collected of the prompt: it is computed anew."""
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = [None]
        self.pooled = None
        self.stages_left.clear()  # what was made of them may be gone

    @property
    def embedding(self) -> Numbers | None:
        """Of the whole text, where it is embedded and computed; where nothing is pooled, of one token behind the other."""
        if self.pooled is None or self.num_computed_prompt_tokens < len(self.prompt_ids):
            return None
        if self.pooling == "each":
            return self.pooled
        count = len(self.prompt_ids) if self.pooling == "mean" else 1
        return [number / count for number in self.pooled]

    def pool(self, chunk: Numbers) -> None:
        """Adds what a chunk of the prompt gave."""
        if self.pooled is None or self.pooling == "last":
            self.pooled = chunk
        elif self.pooling == "each":
            self.pooled.extend(chunk)
        elif self.pooling == "mean":
            self.pooled = [a + b for a, b in zip(self.pooled, chunk, strict=True)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making.

    token_ids: the prompt and what was drawn. num_computed: how many of them have their K and V in `block_table`. num_held: how
    many of those, the last ones, the latest step had guessed.
    pending: sequences that will draw their first token from the row that ends this one's prompt.
    block_digests, num_registered, last_uid: this sequence's way through the prefix cache (see `prefix_cache.py`).
    state: of a model that keeps one, this sequence's, or NO_STATE. state_source: another one, which is to be copied to it before
    it runs again. kept_states: copies of it behind so many tokens, which nobody finds yet (see `states.py`). parting: of how many
    tokens others have had blocks, where that is far behind their last state; or 0.
    near_start, near_end: which of its blocks' near parts it holds; near_table: these parts (see `near.py`).
    past: what its strategy remembers of it. step: the last step that scheduled it. announced: a plan has named it to the
    worker; registered: that plan succeeded.
    """

    seq_id: int
    request: Request
    index: int
    seed: int
    token_ids: list[int]
    status: Status = Status.WAITING
    num_computed: int = 0
    num_held: int = 0
    block_table: list[int] = field(default_factory=list)
    pending: list[Sequence] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    last_uid: int = 0
    step: int = 0
    announced: bool = False
    registered: bool = False
    state: int = NO_STATE
    state_source: int = NO_STATE
    kept_states: list[tuple[int, int]] = field(default_factory=list)
    parting: int = 0
    near_start: int = 0
    near_end: int = 0
    near_table: list[int] = field(default_factory=list)
    past: Any = None
    rank: tuple[float, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rank = (*self.request.rank, self.index)

    def advance(self, num_tokens: int, num_known: int) -> None:
        """So many tokens more are computed, of which the first were no guesses."""
        self.num_computed += num_tokens
        self.num_held = max(0, num_tokens - num_known)

    def inherit(self, parent: Sequence) -> None:
        """Has from now on what the parent holds, with whose computed tokens its own begin; the parent what it has: nothing."""
        for name in _HELD:
            own, held = getattr(self, name), getattr(parent, name)
            setattr(self, name, held)
            setattr(parent, name, own)

    def announce(self) -> NewSequence:
        """What a plan tells the worker of it."""
        self.announced = True
        request = self.request
        drawn = self.token_ids[len(request.prompt_ids) :]
        return NewSequence(self.seq_id, list(request.own_ids), request.params, self.seed, request.stop_ids, drawn)

    @property
    def group(self) -> list[Sequence]:
        """This one and those that draw from the row that ends its prompt."""
        return [self, *self.pending]

    @property
    def salt(self) -> Salt:
        return self.request.cache_salt, self.request.lora


def by_rank(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.rank


class Line(list[Sequence]):
    """Those that wait, in order of rank."""

    def put(self, sequence: Sequence) -> None:
        insort(self, sequence, key=by_rank)

    def take_out(self, sequence: Sequence) -> None:
        index = bisect_left(self, sequence.rank, key=by_rank)
        assert self[index] is sequence
        del self[index]


def seed_of(seed: int | None, index: int) -> int:
    """The seed of answer `index`: the request's own for the first, then the first 63 bits of BLAKE2b("seed:index")."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "big") >> 1
