"""`/metrics` for Prometheus, `/status.json` for the status page. Both are behind the API key, as everything else."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exposition import CONTENT_TYPE, Exposition
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.status import status


class Http(BaseModel):
    in_flight: int
    finished: int


class Status(BaseModel):
    """See docs/metrics.md."""

    version: str
    seconds: float
    http: Http
    models: list[dict[str, Any]]


def router(context: ServerContext) -> APIRouter:
    routes = api_router()
    exposition = Exposition(context.metrics, context.models.engines)

    text = {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @routes.get("/metrics", responses={200: text})
    async def metrics() -> Response:
        return Response(exposition.text(), headers={"content-type": CONTENT_TYPE})

    @routes.get("/status.json", responses=answers(Status))
    async def status_now() -> Response:
        return JsonResponse(status(context.metrics, context.models))

    return routes
