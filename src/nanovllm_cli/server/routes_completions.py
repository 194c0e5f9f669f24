"""POST /v1/completions: texts to go on with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.fim import fill_in_the_middle
from nanovllm_cli.server.logprobs import check_prompt_logprobs
from nanovllm_cli.server.merging import merged
from nanovllm_cli.server.openai_answers import Answer, Head, gather, off_loop, timings_fields, total, usage_fields
from nanovllm_cli.server.openai_texts import Echo, TextFrames, TextStyle, text_choice
from nanovllm_cli.server.ports import Generation, ServedModel, TextAsked, Usage
from nanovllm_cli.server.routes_chat import check_streaming, checked_form, shown_by
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_openai import CompletionRequest, several_texts
from nanovllm_cli.server.schemas_openai_answers import TextAnswer
from nanovllm_cli.server.schemas_sampling import first_given
from nanovllm_cli.server.schemas_streams import TextChunk
from nanovllm_cli.server.sse import DONE, while_connected

MAX_ANSWERS = 4096


class Begun(NamedTuple):
    """One prompt's answers on their way."""

    prompt: str | Sequence[int]
    params: SamplingParams
    generation: Generation


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.post("/v1/completions", responses=answers(TextAnswer, streams=TextChunk))
    async def completions(body: CompletionRequest, request: Request, exchange: CurrentExchange) -> Response:
        """What follows a text, or several."""
        _check(body)
        if body.stream:
            return context.stream(_frames(context, body, exchange), ping_interval=body.sse_ping_interval)
        return await while_connected(request, _whole(context, body, exchange))

    return routes


def _check(body: CompletionRequest) -> None:
    check_streaming(body)
    num_answers = len(several_texts(body.prompt)) * max(body.n or 1, body.best_of or 1)
    if num_answers > MAX_ANSWERS:
        raise invalid_value(f"{num_answers} answers are more than one request may ask for, {MAX_ANSWERS}", "n")
    if first_given(body.n_predict, body.max_tokens) == 0 and not body.echo:
        raise invalid_value("max_tokens 0 without echo would answer nothing", "max_tokens")
    if body.best_of is not None and body.stream:
        raise invalid_value("best_of does not go with stream", "best_of")
    if body.return_progress and body.echo:
        raise invalid_value("return_progress does not go with echo", "return_progress")
    if body.suffix and body.echo:
        raise invalid_value("echo does not go with suffix", "suffix")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_value("prompt_logprobs does not go with stream", "prompt_logprobs")


async def _whole(context: ServerContext, body: CompletionRequest, exchange: Exchange) -> Response:
    async with _generations(context, body, exchange) as (style, begun):
        drawn = await asyncio.gather(*(gather(one.generation, one.params) for one in begun))
        return JsonResponse(await off_loop(begun[0].params, lambda: _answer(body, style, begun, drawn)))


def _answer(body: CompletionRequest, style: TextStyle, begun: list[Begun], drawn: list[list[Answer]]) -> dict[str, Any]:
    head = Head.new("cmpl-", "text_completion", begun[0].generation.model)
    choices: list[dict[str, Any]] = []
    for (prompt, _, generation), found in zip(begun, drawn, strict=True):
        echo = Echo.of(prompt, generation, style)
        for answer in _best(found, body.n or style.params.n):
            choices.append(text_choice(head, style, echo, len(choices), answer, generation))
    return {**head.fields(), "choices": choices, "usage": usage_fields(_usage(begun, style)), **_timings(begun, style)}


def _best(found: list[Answer], count: int) -> list[Answer]:
    """The likeliest of more answers than were wanted, by the mean log-probability of their tokens."""
    if len(found) <= count:
        return found
    return sorted(found, key=lambda answer: -sum(e.logprob for e in answer.entries) / max(1, len(answer.entries)))[:count]


async def _frames(context: ServerContext, body: CompletionRequest, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    async with _generations(context, body, exchange) as (style, begun):
        head = Head.new("cmpl-", "text_completion", begun[0].generation.model)
        writers: dict[int, TextFrames] = {}
        async with contextlib.aclosing(merged([one.generation for one in begun])) as steps:
            async for position, events in steps:
                if position not in writers:
                    make = partial(_writer, head, style, begun[position], position * style.params.n)
                    writers[position] = await off_loop(style.params, make)
                if frames := writers[position].frames(events):
                    yield frames
        yield (head.usage_frame(_usage(begun, style), _timings(begun, style)) if style.usage else b"") + DONE


def _writer(head: Head, style: TextStyle, begun: Begun, base: int) -> TextFrames:
    return TextFrames(head, begun.generation, style, Echo.of(begun.prompt, begun.generation, style), base)


@contextlib.asynccontextmanager
async def _generations(
    context: ServerContext, body: CompletionRequest, exchange: Exchange
) -> AsyncIterator[tuple[TextStyle, list[Begun]]]:
    """All prompts of a request, under way."""
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(context.use(body.model))
        style, params = _style(body, model)
        form = await checked_form(body, context)
        begun: list[Begun] = []
        for prompt in several_texts(body.prompt):
            text = await _with_suffix(model, prompt, body.suffix)
            tells = bool(body.stream and body.return_progress)
            asked = TextAsked(text, params, form, body.priority or 0, body.cache_salt, tells_reading=tells)
            generation = await stack.enter_async_context(context.generation(model, asked, exchange))
            begun.append(Begun(prompt, params, generation))
            check_prompt_logprobs(sum(len(each.generation.prompt_ids) for each in begun), params)
        yield style, begun


async def _with_suffix(model: ServedModel, prompt: str | list[int], suffix: str | None) -> str | list[int]:
    if not suffix:
        return prompt

    def middle() -> list[int]:
        model.check_texts([prompt, suffix] if isinstance(prompt, str) else [suffix], "suffix")
        return fill_in_the_middle(model.tokenizer, prompt, suffix)

    try:
        return await asyncio.to_thread(middle)
    except NanovllmError as error:
        raise ApiError.of(error, "suffix") from None


def _style(body: CompletionRequest, model: ServedModel) -> tuple[TextStyle, SamplingParams]:
    """What to show, and what to draw for it."""
    limit = first_given(body.n_predict, body.max_tokens)
    draws = limit != 0
    max_tokens = limit if draws else 1
    params = body.sampling(model, max_tokens=max_tokens, logprobs=body.logprobs)
    shown = {"echo": bool(body.echo), "prompt_logprobs": body.prompt_logprobs is not None, **shown_by(body)}
    style = TextStyle(params=params, draws=draws, **shown)
    if body.echo and params.logprobs is not None:
        most = max(params.logprobs, body.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=most)
    if body.best_of is not None and body.best_of < params.n:
        raise invalid_value(f"best_of must be at least n, which is {params.n}", "best_of")
    if body.best_of is not None and params.num_beams not in (1, body.best_of):
        told = f"best_of is how many answers are drawn, and num_beams, {params.num_beams}, how many beginnings are gone on with"
        raise invalid_value(told, "best_of")
    if body.best_of is not None and body.best_of > params.n and params.num_beams == 1:
        params = replace(params, n=body.best_of, logprobs=params.logprobs or 0)
    return style, params


def _timings(begun: Sequence[Begun], style: TextStyle) -> dict[str, Any]:
    """Of one prompt; those of several run at once, and have no sum."""
    return timings_fields(begun[0].generation) if len(begun) == 1 and style.draws else {}


def _usage(begun: Sequence[Begun], style: TextStyle) -> Usage:
    summed = total([one.generation.usage for one in begun])
    return summed if style.draws else summed._replace(completion_tokens=0, reasoning_tokens=0)
