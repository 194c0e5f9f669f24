"""What routes ask for, whatever API they speak: from messages or a text to events, through one model's engine.

Templates and tokenizing run in two threads: more would only keep the event loop from the interpreter's lock. A constraint is
tried out in the pool before the engine sees it. What is here knows nothing of HTTP but the status of a failure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from nanovllm_cli.constrain.gbnf import lark_of_gbnf
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.engine.vectors import unit
from nanovllm_cli.errors import UsageError
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError, too_long
from nanovllm_cli.server.chat_prompt import MOST_AT_ONCE, chat_prompt
from nanovllm_cli.server.logprobs import check_logprobs, check_prompt_logprobs
from nanovllm_cli.server.messages import Output, Piece
from nanovllm_cli.server.observer import Observer, Operation, Watch
from nanovllm_cli.server.ports import (
    Caller,
    ChatAsked,
    ConstraintPool,
    Event,
    FinishReason,
    Reading,
    ServedModel,
    Stream,
    TextAsked,
    Timings,
    Usage,
)
from nanovllm_cli.server.reading import json_text
from nanovllm_cli.server.reasoning_tokens import ReasoningTokens
from nanovllm_cli.text.answer_format import AnswerDelta, AnswerParser
from nanovllm_cli.text.reasoning import prompt_tail
from nanovllm_cli.text.tool_calls import Tool, placed, tools_of
from nanovllm_cli.vision_spec import TokenIds

TEXT_THREADS = IMAGE_THREADS = 2

T = TypeVar("T")


class Generator:
    """See ports.Generates."""

    def __init__(self, checks: ConstraintPool, observer: Observer | None = None) -> None:
        self._checks = checks
        self._observer = observer or Observer()
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "text")
        self._image_threads = ThreadPoolExecutor(IMAGE_THREADS, "images")
        self._image_turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> LiveGeneration:
        prompt_ids = await self.encode_chat(model, asked, caller)
        if asked.before:
            prompt_ids = TokenIds(_behind(asked.before, prompt_ids, model))
        prompt_ids += list(asked.begins)
        tail = prompt_tail(model.tokenizer, prompt_ids)
        tools = tools_of(asked.tools) if asked.tool_choice != "none" else ()
        known = model.format
        assert known is not None, "a model that chats has a format"
        form = await self._form(asked, tools)
        constraint = known.constraint(tools, asked.tool_choice, parallel=asked.parallel, form=form)
        bound = [tool for tool in tools if tool.strict or asked.tool_choice in ("required", tool.name)]
        phase = None
        if known.reasoning is not None:
            to_content = constraint is not None and constraint is form
            default = model.chat_defaults.reasoning_budget
            budget = default if asked.reasoning_budget is None else asked.reasoning_budget
            phase = known.reasoning.phase(tail, None if budget == -1 else budget, to_content=to_content)
        # Of an answer that must be a call a stop string would only cut the arguments.
        stop = asked.params.stop if asked.tool_choice in ("auto", "none") else ()
        params = dataclasses.replace(asked.params, constraint=constraint, reasoning=phase, stop=stop)
        parser = partial(
            known.parser,
            tail,
            tools,
            parallel=asked.parallel,
            splits_reasoning=asked.splits_reasoning,
            whole_calls=asked.whole_calls,
        )
        parsers = [parser() for _ in range(params.n)]
        return await self._begin(model, prompt_ids, params, asked, caller, "chat", parsers, bound)

    async def complete(self, model: ServedModel, asked: TextAsked, caller: Caller) -> LiveGeneration:
        prompt_ids = await self._in_thread(partial(_text_ids, model, asked.prompt, "prompt"))
        params = dataclasses.replace(asked.params, constraint=asked.form)
        plain: list[AnswerParser] = [_Plain() for _ in range(params.n)]
        return await self._begin(model, prompt_ids, params, asked, caller, "text_completion", plain)

    async def encode_chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> TokenIds:
        salt = _salt(asked, caller)
        return await chat_prompt(model, asked, salt, self._text_threads, self._image_threads, self._image_turns)

    async def embed(
        self,
        model: ServedModel,
        texts: Sequence[str | Sequence[int]],
        pooling: Pooled,
        caller: Caller,
        *,
        priority: int = 0,
        normalize: bool = True,
        most: int | None = None,
    ) -> tuple[list[Sequence[float]], int]:
        cut = model.cut_to(most)
        each = await self._in_thread(lambda: [_text_ids(model, text, "input", cut) for text in texts])
        for ids in each:
            _check_fits(ids, model, "input", room=0)
        watches = [self._observer.accepted(model.id, "embeddings", len(ids), None, caller) for ids in each]
        told: ApiError | None = None

        async def vector_of(ids: Sequence[int], watch: Watch) -> Sequence[float]:
            vector = await model.engine.embed(ids, pooling, priority=priority, lora=model.default_params.lora)
            watch.embedded()
            return vector

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(vector_of(*pair)) for pair in zip(each, watches, strict=True)]
        except* ApiError as failed:
            told = next(error for error in failed.exceptions if isinstance(error, ApiError))
            told.was_taken = not told.by_engine
        finally:
            for watch in watches:
                watch.end(told)
        if told is not None:
            raise told
        vectors = [task.result() for task in tasks]
        return await self._in_thread(lambda: list(map(unit, vectors))) if normalize else vectors, sum(map(len, each))

    async def align(self, model: ServedModel, prompt: TokenIds, wanted: Alignment, caller: Caller) -> Sequence[float]:
        return await model.engine.embed(prompt, wanted, cache_salt=caller.tenant, lora=model.default_params.lora)

    async def _form(self, asked: ChatAsked, tools: Sequence[Tool]) -> Constraint | None:
        """Beside calls a grammar is a part of a greater one, which is Lark."""
        if asked.form is None or asked.form.kind != "gbnf" or not tools or asked.tool_choice != "auto":
            return asked.form
        return Constraint("lark", await self._in_thread(partial(lark_of_gbnf, asked.form.text)))

    async def _check(self, constraint: Constraint, tools: Sequence[Tool]) -> None:
        """Tries it out. tools: whose schemas are parts of it; of these the first is named that it fails for."""
        try:
            await self._checks.check(constraint)
        except UsageError as error:
            for tool in tools:
                try:
                    await self._checks.check(Constraint("json_schema", json_text(tool.parameters)))
                except UsageError as found:
                    told = UsageError(f"the parameters of {tool.name!r}: {found.message}", found.hint)
                    raise ApiError.of(told, "tools") from None
            raise ApiError.of(error, "tools" if tools else None) from None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    async def _begin(
        self,
        model: ServedModel,
        prompt_ids: list[int],
        params: SamplingParams,
        asked: ChatAsked | TextAsked,
        caller: Caller,
        operation: Operation,
        parsers: Sequence[AnswerParser],
        tools: Sequence[Tool] = (),
    ) -> LiveGeneration:
        param = asked.param if isinstance(asked, ChatAsked) else "prompt"
        _check_fits(prompt_ids, model, param)
        check_prompt_logprobs(len(prompt_ids), params)
        if asked.most_tokens is not None:
            params = _within(asked.most_tokens, len(prompt_ids), params, param)
        if params.constraint is not None:
            await self._check(params.constraint, tools)
        salt, tells = _salt(asked, caller), asked.tells_reading
        stream = model.engine.generate(prompt_ids, params, priority=asked.priority, cache_salt=salt, tells_reading=tells)
        watch = self._observer.accepted(model.id, operation, len(prompt_ids), params, caller)
        # A copy, without the images: they need not wait for the end of the answer.
        counters: list[ReasoningTokens] = []
        if operation == "chat" and model.format is not None and (known := model.format.reasoning) is not None:
            hidden = model.tokenizer.special_ids.difference(model.visible_ids) if params.skip_special_tokens else ()
            comes_again = known.anywhere or known.messages is not None
            counters = [ReasoningTokens(model.tokenizer, hidden, comes_again=comes_again) for _ in parsers]
        return LiveGeneration(model, list(prompt_ids), stream, parsers, counters, watch)


@dataclass
class _Counts:
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    logprobs: int = 0


class LiveGeneration:
    """See ports.Generation. counters: one for each parser, or none where nothing is reasoning."""

    def __init__(
        self,
        model: ServedModel,
        prompt_ids: Sequence[int],
        stream: Stream,
        parsers: Sequence[AnswerParser],
        counters: Sequence[ReasoningTokens],
        watch: Watch,
    ) -> None:
        self.model = model
        self.prompt_ids = prompt_ids
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self.reading: Reading | None = None
        self._stream = stream
        self._parsers, self._counters = parsers, counters
        self._watch: Watch | None = watch
        self._counts = _Counts()
        self._first_heard: float | None = None
        self._last: Output | None = None

    @property
    def usage(self) -> Usage:
        counts = self._counts
        return Usage(len(self.prompt_ids), counts.cached, counts.completion, counts.reasoning)

    @property
    def timings(self) -> Timings:
        """As the engine has it; of an answer that is not at its end, as it was heard here."""
        if self._last is None or self._first_heard is None:
            return Timings()
        begun, first, end = self._last.times
        prompt = first - begun if begun is not None and first is not None else 0.0
        heard = time.monotonic() - self._first_heard
        answer = end - first if end is not None and first is not None else heard
        return Timings(prompt, answer, self._last.num_guessed_tokens, self._last.num_held_tokens)

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        try:
            async for output in self._stream:
                if output.reading is not None:
                    self.reading, self._counts.cached = Reading(*output.reading), output.num_cached_tokens
                    yield []
                    continue
                if self._watch is not None:
                    self._watch.output(output)
                # What was drawn before a failure is told first, whether it was heard together with it or not.
                if events := self._events(output):
                    yield events
                check_logprobs(self._counts.logprobs)
                for piece in output.pieces:
                    if piece.error is not None:
                        raise _failure(piece)
        except ApiError as error:
            error.was_taken = not error.by_engine
            self._end(error)
            raise

    async def cut(self) -> None:
        if self._watch is not None:
            self._watch.cut()
        await self.aclose()

    async def aclose(self) -> None:
        self._stream.abort()
        self._end(None)

    def _end(self, error: ApiError | None) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end(error)

    def _events(self, output: Output) -> list[Event]:
        self._counts.cached = output.num_cached_tokens
        self._last = output
        if self._first_heard is None:
            self._first_heard = time.monotonic()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        return [self._event(piece) for piece in output.pieces if piece.error is None or piece.text or piece.token_ids]

    def _event(self, piece: Piece) -> Event:
        parser = self._parsers[piece.index]
        reasoning, content, calls = parser.push(piece.text)
        finish: FinishReason | None = None
        if piece.finish_reason is not None:
            last = parser.finish()
            calls += placed(last.calls, len(content))
            reasoning, content = reasoning + last.reasoning, content + last.content
            finish = self._finish_reason(piece, parser)
        num_held = parser.num_held if finish is None else 0
        self._counts.completion += len(piece.token_ids)
        if piece.logprobs is not None:
            self._counts.logprobs += sum(1 + len(each.top) for each in piece.logprobs)
        if self._counters:
            counter, ends = self._counters[piece.index], bool(content or calls)
            self._counts.reasoning += counter.take(piece.token_ids, piece.text, reasoning, ends=ends, num_held=num_held)
        return Event(
            piece.index,
            piece.text,
            reasoning,
            content,
            calls,
            piece.token_ids,
            piece.logprobs,
            finish,
            piece.stop_reason,
            num_held,
        )

    def _finish_reason(self, piece: Piece, parser: AnswerParser) -> FinishReason | None:
        """A call that a stop string or id broke off is none to follow."""
        if piece.error is not None:
            return None
        if piece.finish_reason in ("length", "repetition"):
            return piece.finish_reason
        return "tool_calls" if parser.saw_calls and not (parser.broke_off and piece.stop_reason is not None) else "stop"


class _Plain:
    """Of a text that goes on: all is content."""

    saw_calls = broke_off = False
    num_held = 0

    def push(self, text: str) -> AnswerDelta:
        return AnswerDelta("", text, ())

    def finish(self) -> AnswerDelta:
        return AnswerDelta("", "", ())


def _salt(asked: ChatAsked | TextAsked, caller: Caller) -> str | None:
    """Nobody with another one can tell by the time that an answer takes what was asked before."""
    salts = [salt for salt in (caller.tenant, asked.cache_salt) if salt is not None]
    return ":".join(salts) if salts else None


def _failure(piece: Piece) -> ApiError:
    if piece.unmeetable:
        return ApiError(400, f"what is asked for cannot be had: {piece.error}", code="unmeetable")
    return ApiError(500, f"the answer failed: {piece.error}", code="generation_failed")


def _text_ids(model: ServedModel, prompt: str | Sequence[int], param: str, cut: int | None = None) -> list[int]:
    """cut: see `ServedModel.cut_to`. No more of a text is read than could be so many tokens."""
    if isinstance(prompt, str) and cut is not None:
        prompt = prompt[: model.most_chars(cut)]
    elif isinstance(prompt, str):
        model.check_texts([prompt], param)
    if isinstance(prompt, TokenIds):
        return prompt
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ApiError(400, "the text is empty", param=param)
    if not 0 <= min(ids) <= max(ids) < model.facts.vocab_size:
        raise ApiError(400, f"a token id is not in the vocabulary of {model.facts.vocab_size}", param=param)
    return ids if cut is None else model.tokenizer.truncated(ids, cut)


def _behind(before: Sequence[int], ids: Sequence[int], model: ServedModel) -> list[int]:
    """A prompt that goes on with a conversation: what begins a text is not there again."""
    if not 0 <= min(before) <= max(before) < model.facts.vocab_size:
        raise ApiError(400, f"a token id is not in the vocabulary of {model.facts.vocab_size}", param="context")
    begins = bool(ids) and model.tokenizer.bos_id is not None and ids[0] == model.tokenizer.bos_id
    return [*before, *ids[begins:]]


def _within(most: int, num_prompt: int, params: SamplingParams, param: str) -> SamplingParams:
    """So that prompt and answer are no more tokens than that. Raises ApiError 400 where the prompt is."""
    room = most - num_prompt
    if room < 1:
        message = f"the request asks for a context of {most} tokens, and the prompt has {num_prompt}"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    return params.under({"max_tokens": min(room, params.max_tokens or room)})


def _check_fits(ids: Sequence[int], model: ServedModel, param: str, room: int = 1) -> None:
    """room: tokens that are to fit behind them."""
    limit = model.facts.context_len
    if len(ids) + room > limit:
        raise too_long(len(ids), limit, param)
