"""ServerContext: what every route is given.

Each `routes_x.py` offers `def router(context: ServerContext) -> APIRouter`, and `app.create_app` takes them all in. A route:

    def router(context: ServerContext) -> APIRouter:
        routes = api_router()                                  # routing.py: bodies parsed once, with bounds

        @routes.post("/v1/things", responses=answers(Thing))   # what /openapi.json says; `streams=Event` for event streams
        async def make_thing(body: ThingRequest, exchange: CurrentExchange) -> Response:
            async with context.use(body.model) as model, context.generation(model, asked, exchange) as generation:
                ...
            return JsonResponse(thing)                         # msgspec; routes never return models for FastAPI to write

        return routes

Failures are raised: ApiError, or any typed error of errors.py (a UsageError is a 400). They are written in one place
(errors.py), in Anthropic's form under /v1/messages, in Ollama's under /api and in OpenAI's elsewhere. What takes long
(tokenizing, templates) runs in `asyncio.to_thread`, so that the event loop goes on.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.errors import as_api_error
from nanovllm_cli.server.exchange import Exchange
from nanovllm_cli.server.metrics import Metrics
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.ports import ChatAsked, ConstraintPool, Generates, Generation, Models, ServedModel, TextAsked
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.server.sse import EVENTS, EventStream, Frames, Framing, openai_error_frames


@dataclass(frozen=True, slots=True)
class ServerContext:
    """observer: is told what happens. metrics: what /metrics shows; it counts where it is the observer, or part of it."""

    settings: ServeSettings
    models: Models
    generates: Generates
    pool: ConstraintPool
    observer: Observer = field(default_factory=Observer)
    metrics: Metrics = field(default_factory=Metrics)

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model of a request; see `Models.use`. Of a request that fails before an engine took it the observer is told, and
        typed errors become ApiErrors."""
        model = None
        try:
            async with self.models.use(name) as model:
                yield model
        except (ApiError, NanovllmError) as error:
            told = as_api_error(error)
            if not told.was_taken:
                self.observer.refused(None if model is None else model.id, told)
            if told is not error:
                raise told from error
            raise

    @asynccontextmanager
    async def generation(self, model: ServedModel, asked: ChatAsked | TextAsked, exchange: Exchange) -> AsyncIterator[Generation]:
        """What a request asks for, on its way, and closed at the end. Its tokens are part of the exchange.

        Who calls this keeps no `asked`: its images and sounds, which may have megabytes, need not wait for the end of the answer.
        """
        generates, caller = self.generates, exchange.caller
        if isinstance(asked, ChatAsked):
            generation = await generates.chat(model, asked, caller)
        else:
            generation = await generates.complete(model, asked, caller)
        del asked
        async with aclosing(generation):
            exchange.follow(generation)
            yield generation

    async def num_prompt_tokens(self, model: ServedModel, asked: ChatAsked, exchange: Exchange) -> int:
        """Counted, and part of the exchange."""
        count = len(await self.generates.encode_chat(model, asked, exchange.caller))
        exchange.count(model.id, count)
        return count

    async def check(self, form: Constraint, param: str | None) -> None:
        """Tries out the form that an answer is to have. Raises ApiError with the field that asked for it."""
        try:
            await self.pool.check(form)
        except NanovllmError as error:
            raise ApiError.of(error, param) from None

    def stream(
        self,
        frames: Frames,
        error_frames: Callable[[ApiError], bytes] = openai_error_frames,
        *,
        ping_interval: int | None = None,
        framing: Framing = EVENTS,
    ) -> EventStream:
        """An answer that comes in pieces, with this server's limits. ping_interval: seconds that a request asks for, -1 none."""
        ping = self.settings.ping_seconds if ping_interval is None else math.inf if ping_interval == -1 else float(ping_interval)
        write = self.settings.write_seconds
        return EventStream(frames, ping_seconds=ping, write_seconds=write, error_frames=error_frames, framing=framing)
