"""Files and batches of OpenAI's API: lines of requests that are answered by this server's own routes, beside whatever else it is
asked. In memory only, gone with the server; each API key sees its own.

A file that has anything wrong in it fails as a whole, before a line of it is asked. One batch runs at a time, a part of its lines
at once; what else is asked is worked on beside them. Nothing is forgotten to make room: who has no room is told.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nanovllm_cli.errors import UsageError
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.in_process import Answered, is_of_the_end
from nanovllm_cli.server.routing import parse_json
from nanovllm_cli.text.batch_form import ID, Answer, Request, answer_of, failed, request_of, told_of_broken, usage_of
from nanovllm_cli.together import together

Tenant = str | None
Post = Callable[[str, Any], Coroutine[Any, Any, Answered]]
"""Asks this server, as the holder of a key: a path, and a body."""
MAX_BYTES, MAX_FILES, MAX_BATCHES = 256 << 20, 1024, 1024
MAX_LINES = 50_000
"""Of a batch, as OpenAI has it."""
MAX_TOLD = 100
"""Lines whose faults are told."""
MOST_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    purpose: str
    data: bytes
    id: str = field(default_factory=lambda: f"file-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def told(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "file", "bytes": len(self.data), "created_at": self.created, "expires_at": None,
            "filename": self.name, "purpose": self.purpose, "status": "processed", "status_details": None,
        }  # fmt: skip


@dataclass
class Batch:
    """times: by OpenAI's names, when it came to what. faults: what is wrong with its file, or kept it from its end."""

    tenant: Tenant
    input_file: StoredFile
    endpoint: str
    metadata: dict[str, str] | None
    id: str = field(default_factory=lambda: f"batch_{secrets.token_hex(12)}")
    status: str = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created_at": int(time.time())})
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def come_to(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")

    def told(self) -> dict[str, Any]:
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "input_file_id": self.input_file.id,
            "completion_window": "24h", "status": self.status, "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id, "created_at": self.times["created_at"], "expires_at": None,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "errors": {"object": "list", "data": self.faults} if self.faults else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.prompt_tokens, "output_tokens": self.answer_tokens,
                "total_tokens": self.prompt_tokens + self.answer_tokens,
            },
            "metadata": self.metadata,
        }  # fmt: skip


T = TypeVar("T", StoredFile, Batch)

logger = logging.getLogger(__name__)


class Batches:
    """Used from one event loop. max_depth: of a line's JSON."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._files: dict[tuple[Tenant, str], StoredFile] = {}
        self._held = 0  # bytes of answers of the batch that runs
        self._batches: dict[tuple[Tenant, str], Batch] = {}
        self._turn = asyncio.Semaphore(1)

    # ---- files ----

    def keep(self, tenant: Tenant, file: StoredFile) -> StoredFile:
        """Raises ApiError 400 where there is no room."""
        if not self._has_room(len(file.data)):
            raise self._no_room()
        if len(self._files) >= MAX_FILES:
            raise ApiError(400, f"{MAX_FILES} files are kept at the most; delete some", code="no_room_for_files")
        self._files[tenant, file.id] = file
        return file

    def _has_room(self, size: int) -> bool:
        return sum(len(each.data) for each in self._files.values()) + self._held + size <= MAX_BYTES

    def _no_room(self) -> ApiError:
        return ApiError(400, f"all files together may have {MAX_BYTES >> 20} MiB; delete some", code="no_room_for_files")

    def file(self, tenant: Tenant, file_id: str) -> StoredFile:
        return _found(self._files, tenant, file_id, "file")

    def files(self, tenant: Tenant) -> list[StoredFile]:
        """The latest first."""
        return [each for (owner, _), each in reversed(self._files.items()) if owner == tenant]

    def delete(self, tenant: Tenant, file_id: str) -> None:
        self.file(tenant, file_id)
        del self._files[tenant, file_id]

    # ---- batches ----

    def begin(self, tenant: Tenant, file_id: str, endpoint: str, metadata: dict[str, str] | None, post: Post) -> Batch:
        """Raises ApiError 404 for a file that there is not, 400 where too many batches wait."""
        batch = Batch(tenant, self.file(tenant, file_id), endpoint, metadata)
        if len(self._batches) >= MAX_BATCHES:
            oldest = next((key for key, each in self._batches.items() if each.is_over), None)
            if oldest is None:
                raise ApiError(400, f"{MAX_BATCHES} batches wait already", code="too_many_batches")
            del self._batches[oldest]
        self._batches[tenant, batch.id] = batch
        batch.task = asyncio.create_task(self._run(batch, post))
        return batch

    def batch(self, tenant: Tenant, batch_id: str) -> Batch:
        return _found(self._batches, tenant, batch_id, "batch")

    def batches(self, tenant: Tenant) -> list[Batch]:
        """The latest first."""
        return [each for (owner, _), each in reversed(self._batches.items()) if owner == tenant]

    def cancel(self, tenant: Tenant, batch_id: str) -> Batch:
        """What is under way ends; what was answered is kept. Raises ApiError 400 for one that is over."""
        batch = self.batch(tenant, batch_id)
        if batch.is_over:
            raise ApiError(400, f"the batch is {batch.status} already", code="batch_is_over")
        assert batch.task is not None
        if batch.status != "cancelling":
            batch.come_to("cancelling")
            batch.task.cancel()
        return batch

    async def _run(self, batch: Batch, post: Post) -> None:
        answers: dict[int, tuple[bool, bytes]] = {}
        ended = "completed"
        try:
            async with self._turn:
                batch.faults = await asyncio.to_thread(self._faults, batch)
                if batch.faults:
                    batch.come_to("failed")
                    return
                batch.come_to("in_progress")
                async with aclosing(self._answers(batch, post)) as found:
                    async for number, answer in found:
                        line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
                        if not self._has_room(len(line)):
                            raise self._no_room()
                        self._held += len(line)
                        answers[number] = failed(answer), line
                        _count(batch, answer)
                batch.come_to("finalizing")
        except ApiError as error:  # what was answered until then is kept
            batch.faults, ended = [_fault(error.code or "", error.message, None)], "failed"
        except asyncio.CancelledError:
            if batch.status != "cancelling":  # the server ends
                raise
            ended = "cancelled"
        except Exception:
            logger.exception("the batch %s failed", batch.id)
            batch.faults, ended = [_fault("server_error", "the server failed", None)], "failed"
        self._write(batch, [answers[number] for number in sorted(answers)])
        batch.come_to(ended)

    def _faults(self, batch: Batch) -> list[dict[str, Any]]:
        """All that is wrong with a file, as far as it is told. Sets how many lines it has."""
        faults: list[dict[str, Any]] = []
        total = 0
        for request in self._requests(batch):
            total += 1
            if request.broken is not None:
                faults.append(_fault("invalid_request", told_of_broken(request), request.number))
            elif request.path != batch.endpoint:
                told = f"line {request.number}: its url is {request.path}, and the batch's endpoint {batch.endpoint}"
                faults.append(_fault("mismatched_url", told, request.number))
            if len(faults) == MAX_TOLD or total > MAX_LINES:
                break
        if total > MAX_LINES:
            faults.append(_fault("too_many_requests", f"a batch has at most {MAX_LINES:,} lines", None))
        if not total:
            faults.append(_fault("empty_file", "the file has no requests", None))
        batch.total = total
        return faults

    def _requests(self, batch: Batch) -> Iterator[Request]:
        lines: dict[str, int] = {}
        data, start, number = batch.input_file.data, 0, 0
        while start < len(data):
            end = data.find(b"\n", start) + 1 or len(data)
            number += 1
            if (line := data[start:end]).strip():
                yield request_of(number, line, self._parsed, lines)
            start = end

    def _parsed(self, data: bytes) -> Any:
        try:
            return parse_json(data.removeprefix(b"\xef\xbb\xbf"), self._max_depth)
        except ApiError as error:
            raise UsageError(error.message.replace("the body is not valid JSON", "not JSON")) from error

    async def _answers(self, batch: Batch, post: Post) -> AsyncGenerator[tuple[int, Answer], None]:
        async def one(request: Request) -> tuple[int, Answer]:
            answered = await post(request.path, request.body)
            if is_of_the_end(answered.status, answered.body):
                raise asyncio.CancelledError
            key = f"{ID}{secrets.token_hex(16)}"
            return request.number, answer_of(key, request, answered.status, answered.request_id, answered.body)

        async with aclosing(together(map(one, self._requests(batch)), MOST_AT_ONCE)) as found:
            async for each in found:
                yield each

    def _write(self, batch: Batch, answers: list[tuple[bool, bytes]]) -> None:
        """What was answered and what failed are files of their own, as OpenAI has them. Their room was held for them."""
        fine, wrong = (b"".join([line for is_wrong, line in answers if is_wrong is of]) for of in (False, True))
        batch.output_file_id = self._written(batch, "output", fine)
        batch.error_file_id = self._written(batch, "error", wrong)
        self._held -= len(fine) + len(wrong)

    def _written(self, batch: Batch, what: str, data: bytes) -> str | None:
        if not data:
            return None
        file = StoredFile(f"{batch.id}_{what}.jsonl", "batch_output", data)
        self._files[batch.tenant, file.id] = file
        return file.id


def _count(batch: Batch, answer: Answer) -> None:
    is_wrong = failed(answer)
    batch.failed += is_wrong
    batch.completed += not is_wrong
    prompt, written = usage_of(answer)
    batch.prompt_tokens += prompt
    batch.answer_tokens += written


def _fault(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}


def _found(kept: dict[tuple[Tenant, str], T], tenant: Tenant, wanted: str, what: str) -> T:
    found = kept.get((tenant, wanted))
    if found is None:
        raise ApiError(404, f"there is no {what} {wanted[:100]!r}", code=f"{what}_not_found")
    return found


def page_of(all_of_them: list[T], after: str | None, limit: int, fits: Callable[[T], bool] = lambda each: True) -> dict[str, Any]:
    """A list as OpenAI has it. after: an id. Raises ApiError 400 for one that is not in it."""
    fitting = [each for each in all_of_them if fits(each)]
    if after is not None:
        ids = [each.id for each in fitting]
        if after not in ids:
            raise ApiError(400, "after: is not the id of one of these", code="invalid_value", param="after")
        fitting = fitting[ids.index(after) + 1 :]
    page = [each.told() for each in fitting[:limit]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(fitting) > limit}
