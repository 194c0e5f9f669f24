"""/api/…: Ollama's API, as its packages and the many front-ends that speak it use it.

Models are served here, not managed: what would fetch, make, copy or delete one is refused, and says what to do instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse, OllamaErrorAnswer, ollama_form
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.ollama_answers import AnswerWriter, Said, Took, joined, nothing_said
from nanovllm_cli.server.ollama_models import about_all, running, shown, tag
from nanovllm_cli.server.ollama_prompts import chat_asked, form_of, generate_asked, num_logprobs
from nanovllm_cli.server.ports import Caller, ChatAsked, Generation, ServedModel, TextAsked
from nanovllm_cli.server.reading import off_loop
from nanovllm_cli.server.routes_embeddings import check_embeds, first_numbers
from nanovllm_cli.server.routing import UntypedRoute, answers, api_router
from nanovllm_cli.server.schemas_ollama import (
    AnsweredRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    ShowRequest,
    unloads,
)
from nanovllm_cli.server.schemas_ollama_answers import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaGenerateAnswer,
    PsAnswer,
    ShowAnswer,
    TagsAnswer,
)
from nanovllm_cli.server.schemas_own import VersionAnswer
from nanovllm_cli.server.sse import LINES, line_frame, while_connected

VERSION = "0.32.15"
"""Of Ollama, whose API this is: clients compare it with the version that they need. That of this program is at /version."""

_INSTEAD = {
    "pull": "nanovllm models pull NAME downloads one, nanovllm serve NAME serves it",
    "push": "models are not published from here",
    "create": "nanovllm convert and nanovllm quantize make models, nanovllm serve NAME serves them",
    "copy": "nanovllm serve NAME --alias OTHER serves a model by another name",
    "delete": "nanovllm models rm NAME deletes one",
    "blobs": "nanovllm serve PATH serves a file as it is",
}


def router(context: ServerContext) -> APIRouter:
    routes = api_router(OllamaErrorAnswer, route=UntypedRoute)

    @routes.post("/api/chat", responses=answers(OllamaChatAnswer, lines=OllamaChatAnswer, error=OllamaErrorAnswer))
    async def chat(body: OllamaChatRequest, request: Request, exchange: CurrentExchange) -> Response:
        """The next turn of a conversation, as a stream unless it is declined."""
        if not body.messages:
            return await _without_prompt(context, body, request, chats=True)
        return await _answer(context, body, request, exchange, lambda model, form: chat_asked(body, model, form))

    @routes.post("/api/generate", responses=answers(OllamaGenerateAnswer, lines=OllamaGenerateAnswer, error=OllamaErrorAnswer))
    async def generate(body: OllamaGenerateRequest, request: Request, exchange: CurrentExchange) -> Response:
        """The answer to a prompt, or what goes on with a text."""
        if not (body.prompt or body.suffix or body.images):
            return await _without_prompt(context, body, request, chats=False)
        return await _answer(context, body, request, exchange, lambda model, form: generate_asked(body, model, form))

    @routes.post("/api/embed", responses=answers(OllamaEmbedAnswer))
    async def embed(body: OllamaEmbedRequest, request: Request, exchange: CurrentExchange) -> Response:
        """A vector for each text, of length 1."""
        return await while_connected(request, _embed(context, body, exchange))

    @routes.post("/api/embeddings", responses=answers(OllamaEmbeddingsAnswer))
    async def embeddings(body: OllamaEmbeddingsRequest, request: Request, exchange: CurrentExchange) -> Response:
        """The vector of one text, of any length."""
        return await while_connected(request, _embed_one(context, body, exchange))

    @routes.get("/api/tags", responses=answers(TagsAnswer))
    async def tags() -> Response:
        """The models that are served, by all of their names."""
        names = [card.id for card in context.models.cards()]
        return JsonResponse({"models": [tag(about) for about in await about_all(context.models, names)]})

    @routes.get("/api/ps", responses=answers(PsAnswer))
    async def ps() -> Response:
        """Those that are loaded, once each."""
        found = [running(about) for about in await about_all(context.models, context.models.engines())]
        return JsonResponse({"models": [each for each in found if each is not None]})

    @routes.post("/api/show", responses=answers(ShowAnswer))
    async def show(body: ShowRequest) -> Response:
        """What a model is."""
        if body.asked is None:
            raise invalid_value("model: must be there", "model")
        return JsonResponse(shown(await context.models.about(body.asked)))

    @routes.get("/api/version", responses=answers(VersionAnswer))
    async def version() -> Response:
        return JsonResponse({"version": VERSION})

    def refuse(name: str) -> Callable[[], Any]:
        async def refused() -> Response:
            message = f"models are not managed by this server ({name} is not supported): {_INSTEAD[name]}"
            raise ApiError(400, message, code="unsupported")

        return refused

    for name in ("pull", "push", "create", "copy"):
        routes.post(f"/api/{name}", include_in_schema=False)(refuse(name))
    routes.delete("/api/delete", include_in_schema=False)(refuse("delete"))
    routes.api_route("/api/blobs/{digest}", methods=["GET", "POST"], include_in_schema=False)(refuse("blobs"))
    return routes


async def _without_prompt(context: ServerContext, body: AnsweredRequest, request: Request, *, chats: bool) -> Response:
    """Nothing to answer: the model is loaded, or unloaded where it shall be kept for no time."""
    if unloads(body.keep_alive):
        if context.settings.key_file is not None or len(context.settings.api_keys) > 1:
            raise ApiError(403, "keep_alive: several keys share these models, and no one of them unloads any", param="keep_alive")
        await context.models.put_to_sleep(body.model)
        return JsonResponse(nothing_said(body.model, "unload", chats=chats))

    async def load() -> None:
        async with context.use(body.model):
            pass

    await while_connected(request, load())
    return JsonResponse(nothing_said(body.model, "load", chats=chats))


async def _answer(
    context: ServerContext,
    body: AnsweredRequest,
    request: Request,
    exchange: Exchange,
    ask: Callable[[ServedModel, Constraint | None], ChatAsked | TextAsked],
) -> Response:
    num_logprobs(body)
    form = form_of(body)
    if form is not None:
        await context.check(form, "format")
    answering = _Answering(context, exchange, request, body, lambda model: ask(model, form))
    if body.stream is not False:
        return context.stream(answering.frames(), lambda error: line_frame(ollama_form(error)), framing=LINES)
    return JsonResponse(await while_connected(request, answering.whole()))


@dataclass
class _Answering:
    """One request on its way."""

    context: ServerContext
    exchange: Exchange
    request: Request
    body: AnsweredRequest
    ask: Callable[[ServedModel], ChatAsked | TextAsked]

    async def whole(self) -> dict[str, Any]:
        async with self._begun() as (generation, writer):
            return writer.last(joined([writer.take(step) async for step in generation]))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with self._begun() as (generation, writer):
            async for step in generation:
                if said := writer.take(step):
                    yield line_frame(writer.line(said))
            yield line_frame(writer.last(Said()))

    @asynccontextmanager
    async def _begun(self) -> AsyncIterator[tuple[Generation, AnswerWriter]]:
        began, body = time.monotonic(), self.body
        async with self.context.use(body.model) as model:
            took = Took(self.exchange.started, time.monotonic() - began)
            asked = await off_loop(self.request, lambda: self.ask(model))
            chats, params = isinstance(body, OllamaChatRequest), asked.params
            tells_context = not chats and isinstance(asked, ChatAsked) and not asked.image_paths
            begun = self.context.generation(model, asked, self.exchange)
            del asked  # images need not wait for the end of the answer
            if isinstance(body, OllamaChatRequest):
                body.messages = None
            elif isinstance(body, OllamaGenerateRequest):
                body.images = None
            async with begun as generation:
                yield generation, AnswerWriter(body.model, params, generation, took, chats=chats, tells_context=tells_context)


async def _embed(context: ServerContext, body: OllamaEmbedRequest, exchange: Exchange) -> Response:
    texts = ([body.input] if body.input else []) if isinstance(body.input, str | None) else body.input
    begun = time.monotonic()
    async with context.use(body.model) as model:
        took = Took(exchange.started, time.monotonic() - begun)
        check_embeds(model)
        vectors, count = await _vectors(context, model, texts, exchange.caller, body.options, truncate=body.truncate is not False)
        exchange.count(model.id, count)
        numbers = min(body.dimensions or model.facts.vector_size, model.facts.vector_size)
        answer = {
            "model": body.model,
            "embeddings": await asyncio.to_thread(_rows, vectors, numbers),
            **took.fields(),
            "prompt_eval_count": count,
        }
    return JsonResponse(answer)


async def _embed_one(context: ServerContext, body: OllamaEmbeddingsRequest, exchange: Exchange) -> Response:
    async with context.use(body.model) as model:
        check_embeds(model)
        texts = [body.prompt] if body.prompt else []
        vectors, count = await _vectors(context, model, texts, exchange.caller, body.options, truncate=False, normalize=False)
        exchange.count(model.id, count)
    return JsonResponse({"embedding": list(vectors[0]) if vectors else []})


async def _vectors(
    context: ServerContext,
    model: ServedModel,
    texts: Sequence[str],
    caller: Caller,
    options: OllamaOptions | None,
    *,
    truncate: bool,
    normalize: bool = True,
) -> tuple[list[Sequence[float]], int]:
    """None of no text, which only loads the model."""
    if not texts:
        return [], 0
    most = None
    if truncate:
        asked = (options.num_ctx if options is not None else None) or model.facts.context_len
        most = min(asked, model.facts.context_len)
    return await context.generates.embed(model, texts, model.facts.pooling, caller, normalize=normalize, most=most)


def _rows(vectors: Sequence[Sequence[float]], numbers: int) -> list[msgspec.Raw]:
    """JSON of each; all together may be millions of numbers."""
    return [msgspec.Raw(msgspec.json.encode(list(first_numbers(vector, numbers)))) for vector in vectors]
