"""POST /v1/audio/transcriptions: what is said in a sound, by a model that hears; /v1/audio/translations: in English, by a
Whisper.

Of a model that chats it is a turn of a conversation that holds the sound and what its family is asked by (`text/transcripts.py`).
What such a model writes in front of the transcript (Qwen3-ASR: the language) is its reasoning to us, and no part of the answer. A
Whisper is asked window by window (`dictations.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from starlette.responses import PlainTextResponse, Response

from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.dictations import TIMED, Dictation, Turns, whole
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.forms import form_router
from nanovllm_cli.server.ports import ChatAsked, Event, Generation, ServedModel
from nanovllm_cli.server.routing import answers
from nanovllm_cli.server.schemas_audio import (
    SAMPLING,
    SoundRequest,
    TranscriptEvent,
    TranscriptionAnswer,
    TranscriptionRequest,
    TranslationRequest,
)
from nanovllm_cli.server.sse import DONE, data_frame, while_connected
from nanovllm_cli.sounds.source import SOUND
from nanovllm_cli.text.scribe import Task
from nanovllm_cli.text.transcripts import asks

Form = Annotated[TranscriptionRequest, Body(media_type="multipart/form-data")]
TranslationForm = Annotated[TranslationRequest, Body(media_type="multipart/form-data")]


def router(context: ServerContext) -> APIRouter:
    routes, turns = form_router(), Turns()

    @routes.post("/audio/transcriptions", include_in_schema=False)
    @routes.post("/v1/audio/transcriptions", responses=answers(TranscriptionAnswer, streams=TranscriptEvent))
    async def transcriptions(body: Form, request: Request, exchange: CurrentExchange) -> Response:
        """A sound's words."""
        return await answer(body, "transcribe", request, exchange)

    @routes.post("/audio/translations", include_in_schema=False)
    @routes.post("/v1/audio/translations", responses=answers(TranscriptionAnswer, streams=TranscriptEvent))
    async def translations(body: TranslationForm, request: Request, exchange: CurrentExchange) -> Response:
        """A sound's words, in English."""
        return await answer(body, "translate", request, exchange)

    async def answer(body: SoundRequest, task: Task, request: Request, exchange: Exchange) -> Response:
        if body.timestamp_granularities and body.response_format != "verbose_json":
            told = "response_format verbose_json tells times of segments and words, and no other does"
            raise ApiError(400, told, param="timestamp_granularities")
        if body.stream:
            if body.response_format in TIMED:
                raise ApiError(400, f"response_format {body.response_format!r} is not streamed", param="response_format")
            return context.stream(_frames(context, body, task, exchange, turns))
        return await while_connected(request, _whole(context, body, task, exchange, turns))

    return routes


async def _whole(
    context: ServerContext, body: SoundRequest, task: Task, exchange: Exchange, turns: Turns
) -> Response:
    async with context.use(body.model) as model:
        if (dictation := _dictation(context, model, body, task, exchange, turns)) is not None:
            await whole(dictation)
            if body.response_format == "json":
                return JsonResponse({"text": dictation.text, "usage": dictation.usage})
            if body.response_format == "verbose_json":
                return JsonResponse(dictation.verbose)
            return PlainTextResponse(dictation.written())
        async with _generation(context, model, body, exchange) as generation:
            text = "".join([_said(events, body) async for events in generation])
            if body.response_format == "text":
                return PlainTextResponse(text + "\n")
            return JsonResponse({"text": text, "usage": _usage(generation)})


async def _frames(
    context: ServerContext, body: SoundRequest, task: Task, exchange: Exchange, turns: Turns
) -> AsyncGenerator[bytes, None]:
    pieces: list[str] = []
    async with context.use(body.model) as model:
        if (dictation := _dictation(context, model, body, task, exchange, turns)) is not None:
            async with aclosing(dictation.pieces()) as further:
                async for piece in further:
                    pieces.append(piece)
                    yield data_frame({"type": "transcript.text.delta", "delta": piece})
            yield data_frame({"type": "transcript.text.done", "text": dictation.text, "usage": dictation.usage}) + DONE
            return
        async with _generation(context, model, body, exchange) as generation:
            async for events in generation:
                if piece := _said(events, body):
                    pieces.append(piece)
                    yield data_frame({"type": "transcript.text.delta", "delta": piece})
            done = {"type": "transcript.text.done", "text": "".join(pieces), "usage": _usage(generation)}
            yield data_frame(done) + DONE


def _dictation(
    context: ServerContext, model: ServedModel, body: SoundRequest, task: Task, exchange: Exchange, turns: Turns
) -> Dictation | None:
    """Of a Whisper; None for a model that is asked in a conversation. Raises ApiError for what such a one can't do."""
    hearing = model.facts.hearing
    if hearing is not None and hearing.leads:
        return Dictation(context, model, body, task, exchange, turns)
    if hearing is not None and task == "translate":
        told = f"the model {model.id!r} is no Whisper, and is asked for a translation in a conversation"
        raise ApiError(400, told, code="unsupported", param="model")
    if hearing is not None and body.response_format in TIMED:
        told = f"response_format {body.response_format!r} has times, which {model.id!r} does not tell: json and text are there"
        raise ApiError(400, told, code="unsupported", param="response_format")
    return None


@contextlib.asynccontextmanager
async def _generation(
    context: ServerContext, model: ServedModel, body: SoundRequest, exchange: Exchange
) -> AsyncIterator[Generation]:
    begun = context.generation(model, await asyncio.to_thread(_asked, body, model), exchange)  # a file may have 64 MiB
    body.file = b""  # nor need it wait for the end of the answer
    async with begun as generation:
        yield generation


def _asked(body: SoundRequest, model: ServedModel) -> ChatAsked:
    hearing = model.facts.hearing
    if hearing is None:
        raise ApiError(400, f"the model {model.id!r} hears nothing", code="unsupported", param="model")
    try:
        sound = {"type": "audio_url", "audio_url": {"url": SOUND.data_url(body.file, "file")}}
    except NanovllmError as error:
        raise ApiError.of(error, "file") from None
    try:
        messages, begins = asks(hearing.transcript, model.tokenizer, sound, body.language, body.prompt)
    except UsageError as error:
        raise ApiError.of(error, "language") from None
    except NanovllmError as error:
        raise ApiError.of(error, "prompt" if body.prompt else "model") from None
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    params = model.default_params.under({"temperature": 0.0, **given, "n": 1, "logprobs": None})
    return ChatAsked(messages=messages, params=params, begins=begins, param="file", sound_path="file")


def _said(events: list[Event], body: SoundRequest) -> str:
    """Raises ApiError where the text is not all there, and nobody asked for less."""
    if body.max_completion_tokens is None and any(event.finish_reason == "length" for event in events):
        told = "the transcript is longer than this server's limits: send the sound in pieces"
        raise ApiError(400, told, code="context_length_exceeded", param="file")
    return "".join(event.content for event in events)


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
