"""ServerContext: what every route is given.

Each `routes_x.py` offers `def router(context: ServerContext) -> APIRouter`, and `app.create_app` takes them all in. A route:

    def router(context: ServerContext) -> APIRouter:
        routes = api_router()                                  # routing.py: bodies parsed once, with bounds

        @routes.post("/v1/things", responses=answers(Thing))   # what /openapi.json says; `streams=Event` for event streams
        async def make_thing(body: ThingRequest, exchange: CurrentExchange) -> Response:
            async with await context.generates.chat(body.model, asked, exchange.caller) as generation:
                exchange.follow(generation)                    # its tokens stand in the log line
                ...
            return JsonResponse(thing)                         # msgspec; routes never return models for FastAPI to write

        return routes

Failures are raised: ApiError, or any typed error of errors.py (a UsageError is a 400). They are written in one place
(errors.py), in Anthropic's form under /v1/messages, in Ollama's under /api and in OpenAI's elsewhere. What takes long
(tokenizing, templates) runs in `asyncio.to_thread`, so that the event loop goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.metrics import Metrics
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.ports import ConstraintPool, Generates, Models
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
