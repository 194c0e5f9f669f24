"""POST /infill and /completion, as llama-server has them: what an editor asks for at the cursor, and a text to go on with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.samplers import ORDER, STEPS, chain_of
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError, invalid_value, too_long
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.fim import fill_in_the_middle
from nanovllm_cli.server.logprobs import TextTokens, native_form
from nanovllm_cli.server.merging import merged
from nanovllm_cli.server.openai_answers import reading_fields, timings_fields
from nanovllm_cli.server.ports import Event, Generation, ServedModel, TextAsked
from nanovllm_cli.server.routes_chat import checked_form
from nanovllm_cli.server.routes_completions import MAX_ANSWERS
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_openai import (
    MAX_PROMPTS,
    ContinueRequest,
    InfillRequest,
    NativePrompt,
    NativeRequest,
    several_prompts,
)
from nanovllm_cli.server.schemas_openai_answers import NativeAnswer, NativeAnswers
from nanovllm_cli.server.schemas_sampling import first_given
from nanovllm_cli.server.sse import data_frame, read_through, while_connected
from nanovllm_cli.text.tokenizer import Tokenizer


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.post("/infill", responses=answers(NativeAnswers, streams=NativeAnswer))
    async def infill(body: InfillRequest, request: Request, exchange: CurrentExchange) -> Response:
        """What lies between two texts."""
        return await _answer(context, body, request, exchange)

    @routes.post("/completions", include_in_schema=False)
    @routes.post("/completion", responses=answers(NativeAnswers, streams=NativeAnswer))
    async def completion(body: ContinueRequest, request: Request, exchange: CurrentExchange) -> Response:
        """What follows a text, or several. /v1/completions is OpenAI's form of it."""
        return await _answer(context, body, request, exchange)

    return routes


async def _answer(context: ServerContext, body: NativeRequest, request: Request, exchange: Exchange) -> Response:
    num_prompts = len(several_prompts(body.prompt)) if isinstance(body, ContinueRequest) else 1
    if num_prompts > MAX_PROMPTS:
        raise invalid_value(f"{num_prompts} prompts are more than one request may bring, {MAX_PROMPTS}", "prompt")
    num_answers = num_prompts * _num_answers(body)
    if num_answers > MAX_ANSWERS:
        raise invalid_value(f"{num_answers} answers are more than one request may ask for, {MAX_ANSWERS}", "n_cmpl")
    if body.prompt_logprobs is not None:
        raise ApiError(400, "/v1/completions gives log-probabilities", code="unsupported", param="prompt_logprobs")
    if body.stream:
        return context.stream(_frames(context, body, exchange), ping_interval=body.sse_ping_interval)
    return await while_connected(request, _whole(context, body, exchange))


async def _whole(context: ServerContext, body: NativeRequest, exchange: Exchange) -> Response:
    async with _begun(context, body, exchange) as begun:
        await asyncio.gather(*(read_through(one.steps()) for one in begun))
        told = await asyncio.to_thread(lambda: [answer for one in begun for answer in one.answers()])
        return JsonResponse(told[0] if len(told) == 1 else told)


async def _frames(context: ServerContext, body: NativeRequest, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    async with _begun(context, body, exchange) as begun, contextlib.aclosing(merged([_told(one) for one in begun])) as frames:
        async for _, frame in frames:
            yield frame


async def _told(begun: _Begun) -> AsyncGenerator[bytes, None]:
    """The frames of one prompt."""
    async with contextlib.aclosing(begun.steps()) as steps:
        async for has_events in steps:
            if not has_events:
                yield data_frame({**begun.progress[0].piece(begun.generation), **reading_fields(begun.generation)})
            for progress in begun.progress:
                if progress.has_news:
                    yield data_frame(progress.piece(begun.generation))
    for answer in await asyncio.to_thread(begun.answers):
        yield data_frame(answer)


@contextlib.asynccontextmanager
async def _begun(context: ServerContext, body: NativeRequest, exchange: Exchange) -> AsyncIterator[list[_Begun]]:
    """All prompts of a request, under way."""
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(context.use(body.model))
        limit, count = _limit(body), _num_answers(body)
        num_probs = first_given(body.n_probs, body.logprobs)
        params = body.sampling(model, max_tokens=1 if limit == 0 else limit, logprobs=-1 if num_probs == 0 else num_probs)
        params = replace(params, n=count)
        form = await checked_form(body, context)
        begun: list[_Begun] = []
        for prompt in await asyncio.to_thread(_prompts, model, body):
            tells = bool(body.stream and body.return_progress)
            asked = TextAsked(prompt, params, form, body.priority or 0, body.cache_salt, tells_reading=tells)
            generation = await stack.enter_async_context(context.generation(model, asked, exchange))
            base = len(begun) * count
            tokens = [TextTokens(model.tokenizer, params, model.visible_ids) for _ in range(count)]
            progress = [_Progress(body, params, model.tokenizer, each, base + index) for index, each in enumerate(tokens)]
            begun.append(_Begun(params, generation, progress))
        yield begun


def _num_answers(body: NativeRequest) -> int:
    return first_given(body.n_cmpl, body.n) or 1


def _prompts(model: ServedModel, body: NativeRequest) -> list[str | list[int]]:
    if isinstance(body, ContinueRequest):
        return [_prompt(model, prompt) for prompt in several_prompts(body.prompt)]
    assert isinstance(body, InfillRequest)
    files = [(extra["filename"], extra["text"]) for extra in body.input_extra or ()]
    texts = [body.input_prefix, body.input_suffix, body.prompt or "", *(text for file in files for text in file)]
    model.check_texts(texts, "input_prefix")
    return [fill_in_the_middle(model.tokenizer, body.input_prefix, body.input_suffix, files, body.prompt or "")]


def _prompt(model: ServedModel, prompt: NativePrompt) -> str | list[int]:
    """Texts among ids become ids; only one at the beginning is begun as the model begins texts."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        return prompt["prompt_string"]
    limit = model.facts.context_len
    model.check_length(sum(len(piece) for piece in prompt if isinstance(piece, str)), "prompt")
    ids: list[int] = []
    for place, piece in enumerate(prompt):
        if len(ids) >= limit:
            raise too_long(len(ids), limit, "prompt", at_least=True)
        if isinstance(piece, str):
            model.check_texts([piece], "prompt")
            ids += model.tokenizer.encode(piece, add_special_tokens=place == 0)
        else:
            ids.append(piece)
    return ids


@dataclass(frozen=True, slots=True)
class _Begun:
    """One prompt's answers on their way."""

    params: SamplingParams
    generation: Generation
    progress: Sequence[_Progress]

    async def steps(self) -> AsyncGenerator[bool, None]:
        """Until all have ended, or are long enough: whether one had events, or only read the prompt."""
        async for events in self.generation:
            for event in events:
                self.progress[event.index].take(event)
            yield bool(events)
            if all(each.is_over for each in self.progress):
                break
        await self.generation.cut()  # others may go on

    def answers(self) -> list[dict[str, Any]]:
        prompt = self.generation.model.tokenizer.decode(self.generation.prompt_ids, skip_special_tokens=False)
        return [each.answer(self.generation, prompt) for each in self.progress]


@dataclass(slots=True)
class _Progress:
    """How far an answer is, and what of it has not been told. llama-server's time limit counts from the first token, and waits
    for the end of a line. params.logprobs: None for no probabilities at all. index: among all answers of the request. indent: the
    blanks of a line that has only those so far; None in one that is indented enough, as the first is. is_cut: another was not."""

    body: NativeRequest
    params: SamplingParams
    tokenizer: Tokenizer
    tokens: TextTokens
    index: int
    first: float | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    saw_newline: bool = False
    indent: int | None = None
    is_cut: bool = False
    last: Event | None = None

    @property
    def draws(self) -> bool:
        """Whether its client wants any tokens, or the prompt in the cache alone."""
        return _limit(self.body) != 0

    @property
    def has_news(self) -> bool:
        return any(self.text)

    @property
    def is_over(self) -> bool:
        if self.is_cut or (self.last is not None and self.last.finish_reason is not None):
            return True
        limit = self.body.t_max_predict_ms or 0
        if limit <= 0 or self.first is None or not self.saw_newline:
            return False
        return (time.monotonic() - self.first) * 1000 > limit

    def take(self, event: Event) -> None:
        if self.is_cut:  # others go on
            return
        self.last = event
        if not self.draws:
            return
        if self.first is None and event.token_ids:
            self.first = time.monotonic()
        text = self._indented(event.text)
        if self.is_cut:
            event = self._shortened(event, text)
        self.text.append(text)
        self.token_ids += event.token_ids
        self.num_tokens += len(event.token_ids)
        self.saw_newline |= "\n" in event.text
        if self.params.logprobs is not None:
            self.entries += self.tokens.take(event)

    def _shortened(self, event: Event, text: str) -> Event:
        """With the tokens that begin within the text, which may have come together with more."""
        size, count, begin = len(text.encode()), 0, 0
        while count < len(event.token_ids) and begin < size:
            begin += len(self.tokenizer.id_to_bytes(event.token_ids[count]))
            count += 1
        logprobs = None if event.logprobs is None else event.logprobs[:count]
        return replace(event, text=text, token_ids=event.token_ids[:count], logprobs=logprobs)

    def _indented(self, text: str) -> str:
        """Of what comes next, all ahead of the first character that is not indented enough; an empty line is not, either."""
        if not self.body.n_indent:
            return text
        for place, character in enumerate(text):
            if self.indent is not None and character in " \t":
                self.indent += 1
            elif self.indent is not None and self.indent < self.body.n_indent:
                self.is_cut = True
                return text[:place]
            else:
                self.indent = 0 if character == "\n" else None
        return text

    def piece(self, generation: Generation) -> dict[str, Any]:
        """What is new since the last one."""
        return self._told(generation, stops=False)

    def answer(self, generation: Generation, prompt: str) -> dict[str, Any]:
        """The end, with all that has not been told."""
        told = self._told(generation, stops=True)
        told["prompt"] = prompt
        told["generation_settings"] = generation_settings(generation.model, self.params, draws=self.draws)
        return told if self.body.response_fields is None else _selected(told, self.body.response_fields)

    def _told(self, generation: Generation, *, stops: bool) -> dict[str, Any]:
        usage, reason = generation.usage, None if self.last is None else self.last.finish_reason
        by_itself = self.draws and not self.is_cut
        stopped_by = self.last.stop_reason if self.last is not None and by_itself else None
        kind = "limit"
        if reason == "stop" and by_itself:
            kind = "word" if isinstance(stopped_by, str) else "eos"
        told = {
            "index": self.index,
            "content": "".join(self.text),
            "tokens": self.token_ids if self.body.stream or self.body.return_tokens else [],
            "stop": stops,
            "model": generation.model.id,
            "tokens_predicted": self.num_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": kind if stops else "none",
            "stopping_word": stopped_by if isinstance(stopped_by, str) else "",
            **timings_fields(generation, draws=self.draws),
        }
        if self.params.logprobs is not None:
            told["completion_probabilities"] = native_form(generation.model.tokenizer, self.entries, self.params.logprobs)
        self.text, self.token_ids, self.entries = [], [], []
        return told


_NOT_SHOWN = ("constraint", "reasoning", "transcript", "logit_bias")


def generation_settings(model: ServedModel, params: SamplingParams, *, draws: bool = True) -> dict[str, Any]:
    """What a request is answered with, as /props says it of one that names nothing; llama-server's names are there, too."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    values = dataclasses.asdict(replace(params, logit_bias=None))
    kept = {name: value for name, value in values.items() if name not in _NOT_SHOWN}
    steps = chain_of(params)
    return {
        **kept,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": params.penalty_last_n,
        "n_probs": params.logprobs or 0,
        "samplers": [name for name in (ORDER if steps is None else steps) if name in STEPS],
        "n_ctx": model.facts.context_len,
        "n_predict": limit if draws else 0,
        "model": model.id,
    }


def _limit(body: NativeRequest) -> int | None:
    return first_given(body.n_predict, body.max_completion_tokens, body.max_tokens)


def _selected(told: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What is there of it, under the names that were given."""
    selected: dict[str, Any] = {}
    for name in names:
        value: Any = told
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            selected[name] = value
    return selected
