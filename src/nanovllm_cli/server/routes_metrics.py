"""`/metrics` for Prometheus, `/status.json` for the status page. Both are behind the API key, as everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from nanovllm_cli import __version__
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exposition import CONTENT_TYPE, Exposition
from nanovllm_cli.server.metrics import Latencies, Metrics
from nanovllm_cli.server.ports import EnginePort, ModelCard, Models
from nanovllm_cli.server.routing import answers, api_router

PERCENTILES = (50, 95)


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


def status(metrics: Metrics, models: Models) -> dict[str, Any]:
    """Counts are since the start, seconds are seconds. Latencies are of each model's last requests that finished."""
    engines = models.engines()
    return {
        "version": __version__,
        "seconds": metrics.seconds,
        "http": {"in_flight": metrics.http_in_flight, "finished": sum(metrics.http_requests.values())},
        "models": [_model(card, engines[card.id], metrics) for card in models.cards() if card.id in engines],  # no aliases
    }


def _model(card: ModelCard, engine: EnginePort, metrics: Metrics) -> dict[str, Any]:
    counts, facts, stats = metrics.of(card.id), engine.facts, engine.stats
    kept = ("device", "dtype", "num_parameters", "weight_bytes", "kv_bytes", "block_size")
    return {
        "id": card.id,
        "state": card.state.value,
        "context_len": card.context_len,
        "facts": None if facts is None else {name: getattr(facts, name) for name in kept},
        "running": None if stats is None else stats.running,
        "waiting": None if stats is None else stats.waiting,
        "blocks": None if stats is None else {
            "used": stats.used_blocks, "cached": stats.cached_blocks, "free": stats.free_blocks
        },
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.generated_tokens,
        "prefix_cache": {"queries": counts.queried_tokens, "hits": counts.cached_tokens},
        "finished": counts.finished,
        "refused": sum(counts.refused.values()),
        "preemptions": counts.preemptions,
        "restarts": counts.restarts,
        "latencies": _latencies(list(counts.recent)),
    }  # fmt: skip


def _latencies(recent: list[Latencies]) -> dict[str, Any]:
    return {"of": len(recent)} | {
        name: _percentiles(getattr(each, name) for each in recent) for name in Latencies._fields
    }


def _percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """The nearest rank: the smallest value that so many percent of all do not exceed."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return {f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTILES}
