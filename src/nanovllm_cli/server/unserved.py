"""The server's routes without a server: one model, and an application that nobody reaches but this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nanovllm_cli.constrain.pool import CheckPool
from nanovllm_cli.server.app import build_routes, create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.in_process import Routes
from nanovllm_cli.server.messages import Facts, Loading
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.served_models import ModelSettings, ServedModels
from nanovllm_cli.server.settings import ServeSettings


@asynccontextmanager
async def routes_of(
    model: ModelSettings, *, max_requests: int, max_body_bytes: int, on_loading: Callable[[str, Loading], None]
) -> AsyncIterator[tuple[Routes, Facts]]:
    """Within, the model is loaded: its routes, and what it can do. max_requests: most that are under way at once. Raises what
    loading raises."""
    observer, pool = Observer(), CheckPool(max_waiting=max_requests)
    models = ServedModels([model], observer=observer, on_loading=on_loading)
    settings = ServeSettings(max_requests=max_requests, max_body_bytes=max_body_bytes)
    app = create_app(ServerContext(settings, models, Generator(pool, observer), pool, observer))
    try:
        await asyncio.gather(models.start(), build_routes(app))
        facts = models.engines()[model.names[0]].facts
        assert facts is not None, "it is loaded"
        yield Routes(app), facts
    finally:
        await models.close()
        await pool.close()
