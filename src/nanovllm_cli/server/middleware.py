"""What every request passes on its way to a route, as plain ASGI: a stream costs one more call for each piece.

    Exchanges   gives it an id, tells logs and observers of it, and answers for whatever nobody else answered for
    (CORS)      only where it was asked for
    Doors       Host, draining, API key, how many are under way: refused here, before a byte of the body is read
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm_cli.server.api_error import ApiError, draining, late
from nanovllm_cli.server.errors import as_api_error, error_response
from nanovllm_cli.server.exchange import SCOPE_KEY, Exchange
from nanovllm_cli.server.gate import Gate, Turnstile
from nanovllm_cli.server.keys import Keys
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.server.sse import ABORT

PUBLIC = {"/health", "/v1/health", "/", "/status"}
"""Answered to GET without a key: the health of the server, and pages that hold no secret and ask for the key."""

UNCOUNTED = PUBLIC | {"/metrics", "/status.json"}
"""Answered however much is under way."""

CLIENT_LEFT = 499
ADMITTED = "nanovllm.admitted"
"""In a scope that this process has made itself: the tenant whose key it counts as having."""
REFUSED = "nanovllm.refused"
"""In a scope: the ApiError by which the protocol has already refused it."""

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_LONGEST_PATH = 256

logger = logging.getLogger(__name__)


class Exchanges:
    """The outermost. ended: told of every exchange when it is over, for the log."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, observer: Observer, ended: Callable[[Exchange], None]
    ) -> None:
        self._app, self._settings, self._observer, self._ended = app, settings, observer, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(_request_id(headers), scope["method"], _shown_path(scope))
        if scope["method"] == "HEAD":  # a GET to everybody but the protocol, which leaves the body out
            scope = {**scope, "method": "GET"}
        exchange.traceparent, exchange.tracestate = headers.get("traceparent"), headers.get("tracestate")
        scope[SCOPE_KEY] = exchange
        request_id = exchange.request_id.encode()
        id_headers = [(b"x-request-id", request_id)]
        if scope["path"].startswith("/v1/messages"):
            id_headers.append((b"request-id", request_id))  # where Anthropic's clients look for it

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_headers]
            elif exchange.first_byte is None and message.get("body") and message.get("more_body"):
                exchange.first_byte = time.monotonic()
            await send(message)

        self._observer.http_started()
        try:
            async with asyncio.timeout(self._settings.request_seconds) as limit:
                exchange.limit, exchange.seconds = limit, self._settings.request_seconds
                await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # the server ends, and did not wait any longer
            if exchange.status is None:
                await error_response(draining(), scope["path"], exchange.request_id)(scope, receive, watched)
            raise
        except ClientDisconnect:
            exchange.status = exchange.status or CLIENT_LEFT
        except Exception as failure:
            error = self._error_of(failure, exchange, limit.expired())
            if exchange.status is None:
                await error_response(error, scope["path"], exchange.request_id)(scope, receive, watched)
            elif limit.expired() and ABORT in scope:  # closed, the connection would wait for a client that takes nothing
                scope[ABORT]()
        finally:
            exchange.ended = time.monotonic()
            exchange.route = getattr(scope.get("route"), "path", None)
            exchange.status = exchange.status or CLIENT_LEFT
            self._observer.http_ended(
                exchange.method, exchange.route, exchange.status, exchange.ended - exchange.started
            )
            self._ended(exchange)
            exchange.forget()

    def _error_of(self, failure: Exception, exchange: Exchange, timed_out: bool) -> ApiError:
        if timed_out:
            exchange.error = "timeout"
            return late(self._settings.request_seconds or 0.0)
        error = as_api_error(failure)
        exchange.error = error.label
        if error.status >= 500 and not isinstance(failure, ApiError):
            logger.error("request %s failed: %s", exchange.request_id, type(failure).__name__, exc_info=failure)
        return error


class Doors:
    """Who gets in. What does counts as under way in `gate`."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, gate: Gate, observer: Observer) -> None:
        self._app, self._settings, self._gate, self._observer = app, settings, gate, observer
        self._turnstile = Turnstile()
        self._keys = Keys(settings.api_keys, settings.key_file)
        self._hosts = {name.lower() for name in settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange: Exchange = scope[SCOPE_KEY]
        try:
            counts = self._admit(scope, exchange)
        except ApiError as error:
            exchange.error = error.label
            if error.status in (429, 503):
                self._observer.refused(None, error)
            await error_response(error, scope["path"], exchange.request_id)(scope, receive, send)
            return
        if not counts:
            await self._app(scope, receive, send)
            return
        with self._gate.passing():
            await self._turnstile.turn()
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, exchange: Exchange) -> bool:
        """Whether it counts as under way. Raises ApiError for one that does not get in."""
        if REFUSED in scope:
            raise scope[REFUSED]
        if ADMITTED in scope:
            exchange.tenant = scope[ADMITTED]
        else:
            self._check_host(scope)
            exchange.tenant = self._tenant_of(scope)
        if scope["path"] in UNCOUNTED:
            return False
        if self._gate.draining:
            raise draining()
        if self._gate.in_flight >= self._settings.max_requests:
            raise ApiError(429, "too many requests are under way", code="too_many_requests", retry_after=1)
        return True

    def _check_host(self, scope: Scope) -> None:
        """A page of another site can reach this machine under a name of its own that it lets point here (DNS rebinding): names
        must be known. Addresses cannot be lent like that, and with keys such a page has none."""
        if self._settings.unix_socket is not None:
            return
        named = Headers(scope=scope).getlist("host")
        if len(named) > 1 or (not named and scope["http_version"] != "1.0"):
            raise ApiError(400, "there must be one Host header", code="invalid_host")
        if not named or (self._settings.needs_key and not self._hosts):
            return
        host = _host_name(named[0])
        if not (host in self._hosts or "*" in self._hosts or host == self._settings.host.lower() or _is_own(host)):
            raise ApiError(403, "this Host is not served here; start with --allowed-host NAME", code="host_not_allowed")

    def _tenant_of(self, scope: Scope) -> str | None:
        """Whose key it is. Raises ApiError 401, for paths that do not exist as well."""
        if not self._settings.needs_key or (scope["path"] in PUBLIC and scope["method"] == "GET"):
            return None
        given = _given_keys(scope)
        tenant = next((found for key in given if (found := self._keys.tenant_of(key)) is not None), None)
        if tenant is None:
            text = "the API key is not known here" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key")
        return tenant


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else new_id()


def new_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def _shown_path(scope: Scope) -> str:
    """As it came, percent signs and all: so no line break gets into a log. Without the query, where people put keys."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    text = raw.decode("ascii", "replace")[:_LONGEST_PATH]
    return text if text.isprintable() else ascii(text)


def _given_keys(scope: Scope) -> list[bytes]:
    """What was given as a key. `x-api-key` is Anthropic's header, whose clients may send another service's key there, too."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    given = (key if kind.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
    return [key.strip() for key in given if key.strip()]


def _host_name(header: str) -> str:
    """`Host` without its port, lower case; empty for nonsense."""
    matched = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::[0-9]*)?", header.lower())
    return matched[1].strip("[]").rstrip(".") if matched else ""


def _is_own(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
