"""The engine: requests in, outputs out, one step at a time.

It joins the scheduler (who runs), an executor (which computes) and the answers (when they end). It knows token ids;
texts only as what a detokenizer makes of them, and nothing of models, devices or tensors. It is not thread-safe: one
thread calls add, step and abort.

Room. The context of a request is the smaller of the model's and what the whole KV cache holds. A prompt must be
shorter than that, or it is refused with PromptTooLongError; `max_tokens` is cut to what is left behind the prompt,
and an answer that gets there ends with "length". `n` needs no room of its own: where blocks are short its answers are
computed one after another.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nanovllm_cli.config import EngineConfig, Lora
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.answer import Answer, DetokenizerFactory, detokenizers_of
from nanovllm_cli.engine.beams import Searching, check_beams
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.checked_images import READ_HINT, Seeing, checked_images, led_prompt
from nanovllm_cli.engine.executor import Executor, Prepare, RunsAhead
from nanovllm_cli.engine.kv_file import KvFiles
from nanovllm_cli.engine.looking import Looking
from nanovllm_cli.engine.outputs import EngineStats, RequestMetrics, RequestOutput
from nanovllm_cli.engine.plan import Drawn, Numbers
from nanovllm_cli.engine.pooling import check_pooling
from nanovllm_cli.engine.preparing import Preparing
from nanovllm_cli.engine.scheduler import Scheduler
from nanovllm_cli.engine.sequence import Request, Sequence, Status, seed_of
from nanovllm_cli.engine.stepper import Stepper
from nanovllm_cli.engine.strategy import Strategy, strategy_of
from nanovllm_cli.errors import PromptTooLongError, UnsupportedError, UsageError
from nanovllm_cli.leading import lead_in
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.samplers import settled
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.tokenizer import Tokenizer

MAX_PRIORITY = 2**31
_EMBEDS = SamplingParams(max_tokens=1)
Further = Callable[[Numbers], tuple[float, ...]]
"""What a pooled vector goes through behind the model."""


@dataclass(slots=True, eq=False)
class _Live:
    """A request and its answers, until somebody has taken its last output. vector: of a text that is embedded. search: of one
    whose answers are not drawn. Moments on the engine's clock."""

    request: Request
    answers: list[Answer]
    search: Searching | None = None
    first_token: float | None = None
    finished: float | None = None
    vector: tuple[float, ...] | None = None


class Engine:
    """add() a request, step() while has_unfinished(); abort() whenever. Who wants few outputs of many steps calls advance(), and
    take() when they are wanted.

    vocab_size, max_model_len, num_blocks: as the loaded model and its KV cache have them. eos_ids: the ids that end an answer
    unless it ignores them. detokenizer_factory: makes the detokenizer of one answer; by default one of `tokenizer`. Without both,
    texts are empty and stop strings find nothing. ahead: where the executor can run a step ahead. prepare: what a request waits
    for, beside the others, before it is scheduled. draws: whether the model has a head; without one texts are embedded, and
    nothing else. embeds_whole: a text's tokens see those behind them. embedding_refusal: why texts can't be embedded, where they
    can't. further: gives what a pooled vector becomes. second_text: where a prompt's second text begins, or 0, of a model that
    tells two texts apart. seeing: of a model that reads images.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int,
        max_model_len: int,
        num_blocks: int,
        eos_ids: tuple[int, ...] = (),
        detokenizer_factory: DetokenizerFactory | None = None,
        strategy: Strategy | None = None,
        ahead: RunsAhead | None = None,
        prepare: Prepare | None = None,
        draws: bool = True,
        embeds_whole: bool = False,
        embedding_refusal: UnsupportedError | None = None,
        further: Further | None = None,
        second_text: Callable[[tuple[int, ...]], int] | None = None,
        seeing: Seeing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._ahead = ahead
        self._config = config
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._context_len = min(max_model_len, num_blocks * config.block_size)
        self._eos_ids = eos_ids
        self._detokenizer_factory = detokenizer_factory or (detokenizers_of(tokenizer) if tokenizer else None)
        self._clock = clock
        self._blocks = BlockManager(
            num_blocks,
            config.block_size,
            num_states=executor.num_states,
            near=executor.near,
            enable_prefix_caching=config.enable_prefix_caching,
            secret=config.cache_salt_secret,
        )
        self.kv_files = KvFiles(self._blocks, executor)
        looking = Looking() if seeing is None else Looking(seeing.senses, seeing.token_work)
        self._scheduler = Scheduler(config, self._blocks, strategy or strategy_of(config, executor), clock, looking)
        self._stepper = Stepper(executor, self._scheduler, ahead)
        self._prepare = prepare
        self._draws = draws
        self._embeds_whole = embeds_whole
        self._embedding_refusal = embedding_refusal
        self._further = further
        self._second_text = second_text or (lambda ids: 0)
        self._seeing = seeing
        self._hearing, self._reading = (None, None) if seeing is None else (seeing.senses.hearing, seeing.senses.reading)
        self._preparing = Preparing()
        self._live: dict[str, _Live] = {}
        self._moved: dict[str, _Live] = {}
        self._seq_ids = itertools.count()
        self._generated_tokens = 0

    def add(
        self,
        request_id: str,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a request. prompt_ids: TokenIds where some stand for images. priority: lower is more urgent. cache_salt: cached
        prompts are shared only where it is equal.

        Raises UsageError for what has no meaning, PromptTooLongError for what can never run, UnsupportedError where the model
        draws no tokens; nothing is queued then.
        """
        if not self._draws:
            raise UnsupportedError(
                "this model embeds, ranks or labels texts: it has no head to draw tokens from",
                "nanovllm embed, classify or redact MODEL: `nanovllm models show MODEL` says which; a server has all three",
            )
        self._check_id(request_id)
        self._check_priority(priority)
        params = settled(params)
        params.check_vocabulary(self._vocab_size)
        lora = self._lora(params.lora)
        asked = self._checked_prompt(prompt_ids)
        prompt, images = led_prompt(self._seeing, prompt_ids, asked, cache_salt, params)
        if params.prompt_logprobs is not None and any(each.leads for each in images):
            raise UnsupportedError("prompt_logprobs of a text that an encoder reads, or behind sounds and images", "leave it out")
        room = self._context_len - len(prompt)
        if self._reading is not None and self._reading.most_written is not None:
            room = min(room, self._reading.most_written - self._reading.num_begun(prompt, images))
        if room < 1:  # a language's token has come beside what was asked
            raise PromptTooLongError(len(prompt), self._context_len)
        answer_len = room if params.max_tokens is None else min(params.max_tokens, room)
        eos_ids = () if params.ignore_eos else self._eos_ids
        request = Request(
            request_id=request_id,
            prompt_ids=prompt,
            params=params,
            max_len=len(prompt) + answer_len,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
            arrival=self._clock(),
            priority=priority,
            cache_salt=cache_salt,
            lora=lora,
            images=images,
            lead=lead_in(images),
            asked_ids=asked,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            runs_ahead=self._ahead is not None and self._ahead.draws_unseen(params),
        )
        check_beams(params, request.stop_ids, self._vocab_size)
        self._begin(request, self._detokenizer_factory)

    def embed(
        self,
        request_id: str,
        prompt_ids: Iterable[int],
        pooling: Pooled | Alignment,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: Iterable[Lora] = (),
    ) -> None:
        """Queues a text whose hidden state is wanted: the `pooled` of its last output. An Alignment: or when its tokens are said.
        lora: see SamplingParams. Raises as `add` does."""
        self._check_id(request_id)
        self._check_priority(priority)
        scales = self._lora(lora)
        prompt = self._checked_prompt(prompt_ids, room=0)
        images = checked_images(self._seeing, prompt_ids, prompt, cache_salt) if isinstance(pooling, Alignment) else ()
        check_pooling(pooling, prompt_ids, self._hearing, self._embedding_refusal, self._config.tensor_parallel_size)
        request = Request(
            request_id, prompt, _EMBEDS, len(prompt) + 1, (), self._clock(), priority=priority,
            whole=self._embeds_whole, pooling=pooling, second=self._second_text(prompt), lora=scales, images=images,
            cache_salt=cache_salt,
        )  # fmt: skip
        self._begin(request, None)

    def step(self) -> list[RequestOutput]:
        """Computes one step. Returns an output for every request that it moved on; empty where nothing is left to
        do, or nothing yet.
        """
        self.advance()
        return [self.take(request_id) for request_id in list(self._moved)]

    def advance(self) -> None:
        """Computes one step, if anything is left to do. `moved` then has the requests that it moved on, too."""
        self._schedule_prepared()
        results = self._stepper.step()
        while results is not None and not results:  # a step ahead, for sequences that had ended
            results = self._stepper.step()
        for sequence, drawn in results or ():
            request_id = sequence.request.request_id
            if sequence.status is Status.FINISHED:  # of a search that has ended with another one's result
                continue
            live = self._moved[request_id] = self._live[request_id]
            if live.search is not None:
                self._look_further(live, live.search.take(sequence, drawn), drew=drawn is not None)
                continue
            answer = live.answers[sequence.index]
            if drawn is not None:
                self._generated_tokens += answer.take(drawn)
                if live.first_token is None and drawn.token_ids:
                    live.first_token = self._clock()
            elif live.request.pooling is not None and sequence.num_computed == len(live.request.prompt_ids):
                live.vector = self._vector(live.request)
                if live.vector is None:
                    answer.fail("the model's hidden states are not finite: NaN or infinity")
                else:
                    answer.complete()
            if answer.finish_reason is not None:
                self._end(live, answer)
        for live in self._moved.values():
            if live.search is not None:
                live.search.rest()

    @property
    def moved(self) -> dict[str, bool]:
        """The requests of which an output is to be had, and whether it is the last one."""
        return {request_id: live.finished is not None for request_id, live in self._moved.items()}

    def take(self, request_id: str) -> RequestOutput:
        """Of one that has moved: where it is now. Its deltas are what came since the last output."""
        return self._output(self._moved[request_id])

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """Ends a request, or one of its answers, now, and returns its output (no step will). None if it is not
        there.
        """
        live = self._live.get(request_id) or self._moved.get(request_id)
        if live is None:
            return None
        for answer in live.answers if index is None else live.answers[index : index + 1]:
            if answer.finish_reason is None:
                answer.abort()
                self._end(live, answer)
        return self._output(live)

    @property
    def context_len(self) -> int:
        """Most tokens of prompt and answer together, in this model and this KV cache."""
        return self._context_len

    def check_length(self, num_tokens: int, room: int = 1) -> None:
        """Raises PromptTooLongError for a prompt of so many tokens. room: tokens that are to fit behind it."""
        if self._reading is not None:
            if self._reading.most_read is not None and num_tokens > self._reading.most_read:
                raise PromptTooLongError(num_tokens, self._reading.most_read, READ_HINT)
            num_tokens = self._reading.num_tokens(num_tokens)
        if num_tokens + room > self._context_len:
            hint = "that fills the KV cache: give it more memory" if self._context_len < self._max_model_len else None
            raise PromptTooLongError(num_tokens, self._context_len, hint)

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def close(self) -> None:
        self._executor.close()

    def stats(self) -> EngineStats:
        scheduler, blocks = self._scheduler, self._blocks
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._preparing),
            free_blocks=blocks.num_available - blocks.num_cached,
            used_blocks=blocks.num_used,
            cached_blocks=blocks.num_cached,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            preemptions=scheduler.num_preemptions,
            steps=scheduler.num_steps,
            scheduled_tokens=self._stepper.num_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _lora(self, chosen: Iterable[Lora]) -> tuple[float, ...]:
        """What the request takes of each adapter that may be chosen; empty for none."""
        scales = dict.fromkeys([module.name for module in self._config.lora_modules], 0.0)
        for name, scale in chosen:
            if name not in scales:
                raise UsageError(
                    f"lora: no adapter is called {name[:100]!r}",
                    f"known: {', '.join(scales)}" if scales else "the engine has none: lora_modules names some",
                )
            scales[name] = scale
        return tuple(scales.values()) if any(scales.values()) else ()

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise UsageError("a request needs an id, which is a string")
        if request_id in self._live or request_id in self._moved:
            raise UsageError(f"request id {request_id!r} is already in use", "wait until it is finished, or abort it")

    def _begin(self, request: Request, detokenizers: DetokenizerFactory | None) -> None:
        params, prompt = request.params, request.prompt_ids
        request.sequences = [
            Sequence(next(self._seq_ids), request, index, seed_of(params.seed, index), list(prompt))
            for index in range(params.n)
        ]
        answers = [
            Answer(sequence, self._eos_ids, detokenizers(params, request.own_ids) if detokenizers else None)
            for sequence in request.sequences
        ]
        live = self._live[request.request_id] = _Live(request, answers)
        request.prepared = self._prepare(params) if self._prepare is not None else None
        if params.num_beams > 1:
            for sequence in request.sequences:
                sequence.status = Status.FINISHED  # in their place those of a search are scheduled
            live.search = Searching(request, self._scheduler, self._seq_ids, self._vocab_size)
        elif request.prepared is None:
            self._scheduler.add(request)
        else:
            self._preparing.add(request, request.prepared)

    def _look_further(self, live: _Live, found: list[Drawn], *, drew: bool) -> None:
        """One of a search's sequences has moved. found: its answers, once they are."""
        if drew and live.first_token is None:
            live.first_token = self._clock()
        for answer, drawn in zip(live.answers, found, strict=False):
            if answer.finish_reason is None:
                self._generated_tokens += answer.take(drawn)
                self._end(live, answer)

    def _schedule_prepared(self) -> None:
        """Schedules the requests that wait for nothing more; those that waited in vain are over."""
        for request, error, unmeetable in self._preparing.ready(is_idle=not (self._scheduler.running or self._scheduler.waiting)):
            if error is None:
                self._scheduler.add(request)
                continue
            live = self._moved[request.request_id] = self._live[request.request_id]
            for answer in live.answers:
                if answer.finish_reason is None:
                    answer.fail(error, unmeetable=unmeetable)
            self._settle(live)

    def _end(self, live: _Live, answer: Answer) -> None:
        """Nobody goes on computing for this answer, which has ended."""
        if not self._preparing.drop(answer.sequence):
            self._scheduler.finish(answer.sequence)
        self._settle(live)

    def _settle(self, live: _Live) -> None:
        if live.finished is None and all(answer.finish_reason is not None for answer in live.answers):
            live.finished = self._clock()
            live.request.prepared = None
            if live.search is not None:
                live.search.drop()
            del self._live[live.request.request_id]

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and self._config.policy != "priority":
            hint = 'set policy "priority", or serve with --scheduling-policy priority'
            raise UsageError("this engine takes requests in order; priorities mean nothing", hint)
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise UsageError(f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}")

    def _checked_prompt(self, prompt_ids: Iterable[int], room: int = 1) -> tuple[int, ...]:
        """room: tokens that are to fit behind it."""
        try:
            prompt = tuple(map(operator.index, prompt_ids))
        except TypeError:
            raise UsageError("a prompt is a list of token ids, which are integers") from None
        if not prompt:
            raise UsageError("the prompt is empty", "give it at least one token")
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < self._vocab_size:
                raise UsageError(f"token id {token_id} is not in the vocabulary, which has {self._vocab_size}")
        self.check_length(len(prompt), room)
        return prompt

    def _vector(self, request: Request) -> tuple[float, ...] | None:
        """Of a text that is computed, where its numbers are finite."""
        if (numbers := request.embedding) is None:
            return None
        goes_on = self._further is not None and isinstance(request.pooling, str)
        vector = self._further(numbers) if goes_on else tuple(numbers)  # type: ignore[misc]
        return vector if all(map(math.isfinite, vector)) else None

    def _output(self, live: _Live) -> RequestOutput:
        request = live.request
        self._moved.pop(request.request_id, None)
        outputs = tuple([answer.output() for answer in live.answers])
        if live.finished is None:
            for answer in live.answers:
                if answer.finish_reason == "error":  # perhaps since it was looked at
                    self._end(live, answer)
        prompt_logprobs = None if request.wants_prompt_logprobs else request.prompt_logprobs
        asked = request.asked_ids or request.prompt_ids
        return RequestOutput(
            request.request_id,
            asked,
            outputs,
            live.finished is not None,
            RequestMetrics(
                request.arrival,
                request.first_scheduled,
                live.first_token,
                live.finished,
                min(request.num_cached_tokens, len(asked)),  # which may fill up blocks
                min(request.num_computed_prompt_tokens, len(asked)),
                request.num_preemptions,
                request.num_guessed_tokens,
                request.num_held_tokens,
            ),
            None if prompt_logprobs is None else tuple(prompt_logprobs),
            live.vector,
        )
