"""One server: which models it has, and streams of answers, with every way in which it can fail as a typed error.

A server that is too busy (429, 503) is asked again, as often as MOST_RETRIES says and when it says. Nothing is asked again once
an answer has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from nanovllm_cli.client.events import EventReader, StreamError, StreamRefusal, said, token_count
from nanovllm_cli.client.http import Exchange, HttpError, Server, exchange, lost
from nanovllm_cli.client.wire import AnswerStream, Delta
from nanovllm_cli.errors import (
    AccessRefusedError,
    DoesNotFitError,
    ModelNotFoundError,
    NanovllmError,
    ServerError,
    UsageError,
)

CONNECT_SECONDS = 30.0
MOST_RETRIES = 4
MOST_WAIT_SECONDS = 30.0
MAX_ERROR_BYTES = 64 << 10
MAX_MODELS_BYTES = 4 << 20
MAX_ANSWER_BYTES = 256 << 20
"""Vectors of a whole request, as JSON."""
KEY_HINT = "give the key by NANOVLLM_API_KEY or OPENAI_API_KEY, or by --api-key"
RUNNING_HINT = "is it running? nanovllm serve MODEL starts one; --url says where it is"
_BUSY = (429, 503)
_MOVED = (301, 302, 303, 307, 308)
_TELL_READING = ("nanovllm", "llamacpp")
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")  # by OpenSSL's version
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error")
_TOO_LONG_WORDS = ("maximum context length", "context length exceeded", "exceeds the available context")

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServedModel(NamedTuple):
    """context_len: tokens of prompt and answer together, where the server says. is_adapter: of another one that it has.
    tells_reading: whether its server is one that can tell how far a prompt is read."""

    id: str
    context_len: int | None
    is_adapter: bool = False
    tells_reading: bool = False


class Posted(NamedTuple):
    """What a server answered. request_id: as it calls the request, where it says."""

    status: int
    request_id: str | None
    body: bytes


def checked_key(key: str | None) -> str | None:
    """Raises UsageError for what could not stand in a header."""
    if key is not None and not all("!" <= c <= "~" for c in key):
        raise UsageError("the API key has characters that no key has", KEY_HINT)
    return key


@dataclass(frozen=True, slots=True)
class Endpoint:
    """patience: most seconds in which nothing comes, from a server that is connected. The key is not shown."""

    server: Server
    api_key: str | None = field(default=None, repr=False)
    patience: float = 600.0

    async def models(self) -> list[ServedModel]:
        """What /v1/models lists, at least one. Raises AccessRefusedError and ServerError."""
        url = f"{self.server.url}/models"
        try:
            async with asyncio.timeout(min(self.patience, CONNECT_SECONDS)):
                async with exchange(self.server, "GET", "/models", self._headers) as reply:
                    status = await reply.status()
                    content = await reply.read(MAX_MODELS_BYTES)
        except TimeoutError as failure:
            raise ServerError(f"{url} does not answer", "is it the right port?") from failure
        except (HttpError, OSError) as failure:
            raise self._unreachable(failure, url) from failure
        if status in (401, 403):
            raise AccessRefusedError(f"{url}: HTTP {status}: {said(content)}", KEY_HINT)
        if status in _MOVED and "location" in reply.headers:
            raise _moved(url, reply.headers["location"])
        try:
            models = [_model(each) for each in json.loads(content)["data"]]
        except (ValueError, RecursionError, LookupError, TypeError):
            models = []
        if not models:
            hint = "name it by --model, if it has one"
            if status == 404:
                hint = f"--url is what stands before /v1, such as http://127.0.0.1:8080; if that is right, {hint}"
            raise ServerError(f"{url} lists no model (HTTP {status})", hint)
        return models

    async def stream(
        self, path: str, body: Mapping[str, Any], answer: AnswerStream
    ) -> AsyncGenerator[list[Delta], None]:
        """The deltas of an answer, as they come; an empty list where only a sign of life did. `answer` learns of the rest.

        Raises UsageError (the server refuses the request), DoesNotFitError (more than its context holds), ModelNotFoundError,
        AccessRefusedError, ServerError.
        """
        content = json.dumps(body).encode()
        for attempt in range(MOST_RETRIES + 1):
            with self._typed():
                async with exchange(
                    self.server, "POST", path, self._headers, content, connect_seconds=CONNECT_SECONDS
                ) as reply:
                    status = await self._soon(reply.status())
                    if status == 200:
                        async for deltas in self._deltas(reply, answer):
                            yield deltas
                        if not answer.is_whole(body.get("n") or 1):
                            raise ServerError("the answer ended before it was complete")
                        return
                    refusal = await self._soon(reply.read(MAX_ERROR_BYTES))
            wait = self._wait(path, status, reply.headers, attempt)
            if wait is None:
                raise await self._refused(status, refusal, str(body.get("model")))
            await self._sleep(wait, status, refusal)

    async def post(self, path: str, body: Mapping[str, Any]) -> Posted:
        """An answer as a whole, whatever its status, but for what has to do with the server and not with the request.

        Raises AccessRefusedError, ServerError.
        """
        content = json.dumps(body).encode()
        attempt = 0
        while True:
            with self._typed():
                async with exchange(
                    self.server, "POST", path, self._headers, content, connect_seconds=CONNECT_SECONDS
                ) as reply:
                    status = await self._soon(reply.status())
                    answer = await self._whole(reply)
            if status in (401, 403):
                raise AccessRefusedError(f"{self.server.url}: HTTP {status}: {said(answer)}", KEY_HINT)
            wait = self._wait(path, status, reply.headers, attempt)
            if wait is None:
                return Posted(status, reply.headers.get("x-request-id"), answer)
            await self._sleep(wait, status, answer)
            attempt += 1

    def _wait(self, path: str, status: int, headers: Mapping[str, str], attempt: int) -> float | None:
        """Seconds before the same is asked again; None where it is not. Raises ServerError for a server that has moved."""
        if status in _MOVED and "location" in headers:
            raise _moved(self.server.url + path, headers["location"])
        return None if attempt == MOST_RETRIES else _seconds_to_wait(status, headers, attempt)

    async def _sleep(self, seconds: float, status: int, refusal: bytes) -> None:
        logger.warning("not yet: HTTP %d: %s; the server is asked again in %g s", status, said(refusal), seconds)
        await asyncio.sleep(seconds)

    async def _whole(self, reply: Exchange) -> bytes:
        content = bytearray()
        while (piece := await self._soon(reply.piece())) is not None:
            content += piece.data
            if len(content) > MAX_ANSWER_BYTES:
                raise ServerError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        return bytes(content)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        """What goes wrong on the way is raised as what it means to the person who asked."""
        try:
            yield
        except TimeoutError as failure:
            told = f"nothing came from {self.server.url} for {self.patience:g} s"
            raise ServerError(told, "--timeout waits longer") from failure
        except StreamRefusal as failure:
            raise UsageError(str(failure)) from failure
        except StreamError as failure:
            raise ServerError(str(failure)) from failure
        except (HttpError, OSError) as failure:
            raise self._unreachable(failure) from failure

    async def _deltas(self, reply: Exchange, answer: AnswerStream) -> AsyncGenerator[list[Delta], None]:
        kind = reply.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            raise StreamError(f"the server does not stream: its answer is of the type {kind[:60]!r}")
        events = EventReader()
        while not answer.done and (piece := await self._soon(reply.piece())) is not None:
            found: list[Delta] = []
            try:
                for data in events.feed(piece.data):
                    found += answer.read(data)
            except StreamError:
                yield found  # what came before it is a part of the answer
                raise
            yield found

    async def _soon(self, coming: Awaitable[T]) -> T:
        async with asyncio.timeout(self.patience):
            return await coming

    async def _refused(self, status: int, content: bytes, model: str) -> NanovllmError:
        """What a refusal means to the person who asked."""
        text = said(content)
        if status in (401, 403):
            return AccessRefusedError(f"{self.server.url}: HTTP {status}: {text}", KEY_HINT)
        if status == 404:
            return await self._not_found(text, model)
        if status in (400, 413, 422):
            if _is_too_long(content, text):
                return DoesNotFitError(text, "shorten the prompt, or ask for a shorter answer by -n")
            return UsageError(f"the server refuses the request: {text}")
        return ServerError(f"the server failed: HTTP {status}: {text}", "try again in a while" if status in _BUSY else None)

    async def _not_found(self, text: str, model: str) -> NanovllmError:
        try:
            names = [each.id for each in await self.models()]
        except NanovllmError:
            return ServerError(f"{self.server.url}: HTTP 404: {text}", "is it an OpenAI-compatible server?")
        if model in names:
            return ServerError(f"{self.server.url} has no such endpoint: {text}", "--raw and chats are two of them")
        return unknown_model(model, names)

    def _unreachable(self, failure: HttpError | OSError, url: str | None = None) -> ServerError:
        url = url or self.server.url
        if isinstance(failure, HttpError):
            return ServerError(f"{url}: {failure}", "is it an OpenAI-compatible server?")
        if isinstance(failure, ssl.SSLError) and failure.reason in _NO_TLS:
            return ServerError(f"{url}: that port does not speak TLS", "try http:// instead of https://")
        if isinstance(failure, ssl.SSLError):
            return ServerError(f"{url}: {lost(failure)}", "SSL_CERT_FILE names a file with certificates to trust")
        if isinstance(failure, ConnectionResetError | BrokenPipeError):
            return ServerError(f"the connection to {url} was lost")
        return ServerError(f"cannot reach {url}: {lost(failure)}", RUNNING_HINT)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def unknown_model(name: str, names: list[str]) -> ModelNotFoundError:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
    return ModelNotFoundError(f"the server has no model {name[:200]}", hint)


def _moved(url: str, location: str) -> ServerError:
    """Nothing is sent after it: a key is for the server that the person named."""
    return ServerError(f"{url} has moved to {location[:200]}", "the key goes nowhere but to --url: name what answers")


def _model(entry: Any) -> ServedModel:
    name = entry["id"]
    if not isinstance(name, str) or not name:
        raise TypeError("a model without a name")
    # vLLM's name for it, llama-server's
    meta = entry.get("meta")
    known = [entry.get("max_model_len"), meta.get("n_ctx_train") if isinstance(meta, dict) else None]
    context_len = next((count for value in known if (count := token_count(value))), None)
    return ServedModel(name, context_len, isinstance(entry.get("parent"), str), entry.get("owned_by") in _TELL_READING)


def _seconds_to_wait(status: int, headers: Mapping[str, str], attempt: int) -> float | None:
    """Before the same is asked again; None where that is of no use."""
    if status not in _BUSY or headers.get("x-should-retry", "").lower() == "false":
        return None
    try:
        wait = float(headers.get("retry-after", ""))
    except ValueError:  # absent, or a date
        wait = 0.5 * 2**attempt
    return wait if 0 <= wait <= MOST_WAIT_SECONDS else None


def _is_too_long(content: bytes, text: str) -> bool:
    try:
        error = json.loads(content)["error"]
        kinds = [error.get("code"), error.get("type")]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        kinds = []
    return any(kind in _TOO_LONG for kind in kinds) or any(words in text.lower() for words in _TOO_LONG_WORDS)
