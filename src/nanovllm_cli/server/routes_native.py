"""POST /infill and /completion, as llama-server has them: what an editor asks for at the cursor, and a text to go on with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.fim import fill_in_the_middle
from nanovllm_cli.server.logprobs import TextTokens, native_form
from nanovllm_cli.server.openai_answers import off_loop, timings_fields
from nanovllm_cli.server.ports import Event, Generation, ServedModel, TextAsked
from nanovllm_cli.server.routes_chat import checked_form
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_openai import ContinueRequest, InfillRequest, NativeRequest
from nanovllm_cli.server.schemas_openai_answers import NativeAnswer
from nanovllm_cli.server.schemas_sampling import first_given
from nanovllm_cli.server.sse import data_frame, while_connected


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.post("/infill", responses=answers(NativeAnswer, streams=NativeAnswer))
    async def infill(body: InfillRequest, request: Request, exchange: CurrentExchange) -> Response:
        """What lies between two texts."""
        return await _answer(context, body, request, exchange)

    @routes.post("/completions", include_in_schema=False)
    @routes.post("/completion", responses=answers(NativeAnswer, streams=NativeAnswer))
    async def completion(body: ContinueRequest, request: Request, exchange: CurrentExchange) -> Response:
        """What follows a text. /v1/completions is OpenAI's form of it."""
        return await _answer(context, body, request, exchange)

    return routes


async def _answer(context: ServerContext, body: NativeRequest, request: Request, exchange: Exchange) -> Response:
    if (body.n or 1) != 1:
        raise ApiError(400, "there is one answer; /v1/completions gives several", code="unsupported", param="n")
    if body.prompt_logprobs is not None:
        raise ApiError(400, "/v1/completions gives log-probabilities", code="unsupported", param="prompt_logprobs")
    if body.stream:
        return context.stream(_frames(context, body, exchange))
    return await while_connected(request, _whole(context, body, exchange))


async def _whole(context: ServerContext, body: NativeRequest, exchange: Exchange) -> Response:
    async with _generation(context, body, exchange) as (generation, progress):
        async for event in _until_late(generation, progress):
            progress.take(event)
        return JsonResponse(await off_loop(progress.params, lambda: progress.answer(generation)))


async def _frames(context: ServerContext, body: NativeRequest, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    async with _generation(context, body, exchange) as (generation, progress):
        async for event in _until_late(generation, progress):
            progress.take(event)
            if progress.has_news:
                yield data_frame(progress.piece(generation))
        yield data_frame(progress.answer(generation))


@contextlib.asynccontextmanager
async def _generation(
    context: ServerContext, body: NativeRequest, exchange: Exchange
) -> AsyncIterator[tuple[Generation, _Progress]]:
    async with context.models.use(body.model) as model:
        params = body.sampling(model, max_tokens=1 if _limit(body) == 0 else _limit(body), logprobs=body.n_probs or None)
        prompt = await _prompt(model, body)
        form = await checked_form(body, context)
        asked = TextAsked(prompt, params, form, body.priority or 0, body.cache_salt)
        generation = await context.generates.complete(body.model, asked, exchange.caller)
        async with contextlib.aclosing(generation):
            exchange.follow(generation)
            yield generation, _Progress(body, params, TextTokens(model.tokenizer, params))


async def _prompt(model: ServedModel, body: NativeRequest) -> str | Sequence[int]:
    if isinstance(body, ContinueRequest):
        return body.prompt
    assert isinstance(body, InfillRequest)
    files = [(extra["filename"], extra["text"]) for extra in body.input_extra or ()]
    return await asyncio.to_thread(
        fill_in_the_middle, model.tokenizer, body.input_prefix, body.input_suffix, files, body.prompt or ""
    )


async def _until_late(generation: Generation, progress: _Progress) -> AsyncIterator[Event]:
    async for events in generation:
        for event in events:
            yield event
        if progress.is_late:
            return


@dataclass(slots=True)
class _Progress:
    """How far an answer is, and what of it has not been told. llama-server's time limit counts from the first token, and waits
    for the end of a line. params.logprobs: None for no probabilities at all."""

    body: NativeRequest
    params: SamplingParams
    tokens: TextTokens
    first: float | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    saw_newline: bool = False
    last: Event | None = None

    @property
    def draws(self) -> bool:
        """Whether its client wants any tokens, or the prompt in the cache alone."""
        return _limit(self.body) != 0

    @property
    def has_news(self) -> bool:
        return any(self.text)

    @property
    def is_late(self) -> bool:
        limit = self.body.t_max_predict_ms
        if not limit or self.first is None or not self.saw_newline:
            return False
        return (time.monotonic() - self.first) * 1000 > limit

    def take(self, event: Event) -> None:
        self.last = event
        if not self.draws:
            return
        if self.first is None and event.token_ids:
            self.first = time.monotonic()
        self.text.append(event.text)
        self.token_ids += event.token_ids
        self.saw_newline |= "\n" in event.text
        if self.params.logprobs is not None:
            self.entries += self.tokens.take(event)

    def piece(self, generation: Generation) -> dict[str, Any]:
        """What is new since the last one."""
        return self._told(generation, stops=False)

    def answer(self, generation: Generation) -> dict[str, Any]:
        """The end, with all that has not been told."""
        told = self._told(generation, stops=True)
        return told if self.body.response_fields is None else _selected(told, self.body.response_fields)

    def _told(self, generation: Generation, *, stops: bool) -> dict[str, Any]:
        usage, reason = generation.usage, None if self.last is None else self.last.finish_reason
        stopped_by = self.last.stop_reason if self.last is not None and self.draws else None
        kind = "limit"
        if reason == "stop" and self.draws:
            kind = "word" if isinstance(stopped_by, str) else "eos"
        told = {
            "index": 0,
            "content": "".join(self.text),
            "tokens": self.token_ids if self.body.stream or self.body.return_tokens else [],
            "stop": stops,
            "model": generation.model.id,
            "tokens_predicted": usage.completion_tokens if self.draws else 0,
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


def _limit(body: NativeRequest) -> int | None:
    return first_given(body.n_predict, body.max_tokens)


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
