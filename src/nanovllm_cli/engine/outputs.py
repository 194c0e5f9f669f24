"""What the engine hands to its callers: the state of a request after a step, and its own counts.

Texts and id lists are cumulative; `delta_text` and `delta_ids` are what the last step added, so that a stream costs
what it prints. A caller that keeps an output keeps a snapshot: nothing that it can read here changes after it was handed
out. Ids and logprobs are copied when somebody reads them, so that a step's cost does not grow with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from nanovllm_cli.engine.plan import TokenLogprobs

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` answers to a request.

    ids, all_logprobs: the answer's own lists, which grow on; `token_ids` and `logprobs` are the first `num_tokens` of them,
        by default as many as there are now.
    finish_reason: None while it runs. "stop": an end id, a stop id or a stop string; "length": max_tokens or the
        context; "repetition": max_repeats.
    stop_reason: the stop string or stop id that ended it; None for the model's own end.
    error: what failed, with finish_reason "error". unmeetable: it is what the request asked for, and fails again.
    """

    index: int
    text: str
    ids: Sequence[int] = field(repr=False)
    delta_text: str
    delta_ids: tuple[int, ...]
    all_logprobs: Sequence[TokenLogprobs] | None = field(default=None, repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    unmeetable: bool = False
    num_tokens: int = -1

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            object.__setattr__(self, "num_tokens", len(self.ids))

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.ids[: self.num_tokens])

    @cached_property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One for each token, where they were asked for."""
        return None if self.all_logprobs is None else tuple(self.all_logprobs[: self.num_tokens])

    @property
    def cumulative_logprob(self) -> float | None:
        """Of the whole answer: the sum of its tokens', where they were asked for."""
        return None if self.logprobs is None else sum(each.logprob for each in self.logprobs)

    @property
    def delta_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Those of `delta_ids`."""
        if self.all_logprobs is None:
            return None
        return tuple(self.all_logprobs[self.num_tokens - len(self.delta_ids) : self.num_tokens])


class RequestMetrics(NamedTuple):
    """Seconds on time.monotonic's clock; counts in tokens.

    arrival: when it was added. first_scheduled: when its prompt first ran. first_token, finished: None until they
        happen.
    num_cached_tokens: prompt tokens that came from the prefix cache. num_computed_prompt_tokens: prompt tokens done
        so far.
    num_preemptions: how often any of its sequences lost its blocks.
    num_guessed_tokens, num_held_tokens: how many were guessed ahead, and how many of these were right.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_guessed_tokens: int = 0
    num_held_tokens: int = 0


class RequestOutput(NamedTuple):
    """A request after a step in which something of it changed (a prefill chunk counts).

    pooled: [hidden] of a text that was embedded, with its last output; not normalised. prompt: what `LLM` was given, where that
    was a text.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: tuple[float, ...] | None = None
    prompt: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return self.metrics.num_cached_tokens


class EngineStats(NamedTuple):
    """Counts, the last five since the start. running and waiting are sequences.

    used + cached + free blocks are the whole cache; the cached ones are kept for later requests and can be evicted.
    prefix_hit_tokens: found instead of computed. scheduled_tokens: computed. generated_tokens: drawn.
    """

    running: int
    waiting: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    scheduled_tokens: int
    generated_tokens: int
