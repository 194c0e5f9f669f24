"""/v1/files and /v1/batches: files of requests, and batches of them (`batches.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query, Request
from starlette.responses import Response

from nanovllm_cli.server.batches import Batches, StoredFile, page_of
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange
from nanovllm_cli.server.forms import FormRoute
from nanovllm_cli.server.in_process import Routes
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_batches import (
    BatchAnswer,
    BatchList,
    BatchRequest,
    FileAnswer,
    FileDeleted,
    FileList,
    FileRequest,
)

Form = Annotated[FileRequest, Body(media_type="multipart/form-data")]
Limit = Annotated[int, Query(ge=1, le=10_000)]


def router(context: ServerContext) -> APIRouter:
    routes = api_router()
    kept = Batches(context.settings.max_json_depth)

    async def upload(body: Form, exchange: CurrentExchange) -> Response:
        """A file of requests, for a batch."""
        return JsonResponse(kept.keep(exchange.tenant, StoredFile(body.file_name, "batch", body.file)).told())

    routes.add_api_route(
        "/v1/files", upload, methods=["POST"], responses=answers(FileAnswer), route_class_override=FormRoute
    )

    @routes.get("/v1/files", responses=answers(FileList))
    async def list_files(
        exchange: CurrentExchange,
        purpose: Literal["batch", "batch_output"] | None = None,
        limit: Limit = 10_000,
        after: str | None = None,
    ) -> Response:
        files = kept.files(exchange.tenant)
        return JsonResponse(page_of(files, after, limit, lambda each: purpose is None or each.purpose == purpose))

    @routes.get("/v1/files/{file_id}", responses=answers(FileAnswer))
    async def get_file(file_id: str, exchange: CurrentExchange) -> Response:
        return JsonResponse(kept.file(exchange.tenant, file_id).told())

    @routes.get("/v1/files/{file_id}/content", responses=answers())
    async def get_content(file_id: str, exchange: CurrentExchange) -> Response:
        """Its bytes."""
        return Response(kept.file(exchange.tenant, file_id).data, media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}", responses=answers(FileDeleted))
    async def delete_file(file_id: str, exchange: CurrentExchange) -> Response:
        kept.delete(exchange.tenant, file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})

    @routes.post("/v1/batches", responses=answers(BatchAnswer))
    async def begin(body: BatchRequest, request: Request, exchange: CurrentExchange) -> Response:
        """Answers a file's requests, one batch after the other."""
        post = Routes(request.app, exchange.tenant).post
        return JsonResponse(kept.begin(exchange.tenant, body.input_file_id, body.endpoint, body.metadata, post).told())

    @routes.get("/v1/batches", responses=answers(BatchList))
    async def list_batches(
        exchange: CurrentExchange, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> Response:
        return JsonResponse(page_of(kept.batches(exchange.tenant), after, limit))

    @routes.get("/v1/batches/{batch_id}", responses=answers(BatchAnswer))
    async def get_batch(batch_id: str, exchange: CurrentExchange) -> Response:
        return JsonResponse(kept.batch(exchange.tenant, batch_id).told())

    @routes.post("/v1/batches/{batch_id}/cancel", responses=answers(BatchAnswer))
    async def cancel(batch_id: str, exchange: CurrentExchange) -> Response:
        """Ends it; what was answered is kept."""
        return JsonResponse(kept.cancel(exchange.tenant, batch_id).told())

    return routes
