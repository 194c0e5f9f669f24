"""Bodies and answers of /v1/files and /v1/batches, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.schemas_common import STRICT, ShortText, StrictModel, Unsupported

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages"
]
Label = Annotated[str, Field(max_length=64)]
LabelText = Annotated[str, Field(max_length=512)]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]


def _of_a_batch(value: object) -> object:
    if value != "batch":
        raise ApiError(400, "purpose: files are those of batches here: batch", code="unsupported", param="purpose")
    return value


class FileRequest(StrictModel):
    """POST /v1/files: lines of requests."""

    model_config = ConfigDict(**{**STRICT, "strict": False})

    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    file_name: Annotated[str, Field(max_length=1024, alias="file.name", json_schema_extra={"readOnly": True})] = "file"
    purpose: Annotated[Literal["batch"], BeforeValidator(_of_a_batch)]
    expires_after: Unsupported = None


class BatchRequest(StrictModel):
    """POST /v1/batches. completion_window: there is one, and here it sets no limit."""

    input_file_id: ShortText
    endpoint: Endpoint
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[Label, LabelText], Field(max_length=16)] | None = None
    output_expires_after: Unsupported = None


class FileAnswer(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchFault(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(BaseModel):
    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchUsage(BaseModel):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class BatchAnswer(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    errors: BatchFaults | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, Any] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
