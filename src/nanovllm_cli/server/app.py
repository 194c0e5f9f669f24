"""create_app: the routes, and what every request passes before it reaches one.

The OpenAPI description at /openapi.json is what is true of the server: bodies, answers and every status that is sent.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match

from nanovllm_cli import __version__
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.server import (
    routes_anthropic,
    routes_audio,
    routes_batches,
    routes_chat,
    routes_classify,
    routes_completions,
    routes_embeddings,
    routes_metrics,
    routes_models,
    routes_native,
    routes_ollama,
    routes_own,
    routes_pages,
    routes_responses,
)
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import (
    AnthropicErrorAnswer,
    ErrorAnswer,
    OllamaErrorAnswer,
    as_api_error,
    error_response,
)
from nanovllm_cli.server.exchange import SCOPE_KEY, Exchange
from nanovllm_cli.server.gate import Gate
from nanovllm_cli.server.logs import log_exchange
from nanovllm_cli.server.middleware import PUBLIC, Doors, Exchanges

_MOST_NAMES = 8  # of a path that is looked into
ROUTERS = (
    routes_chat.router,
    routes_completions.router,
    routes_responses.router,
    routes_anthropic.router,
    routes_embeddings.router,
    routes_classify.router,
    routes_audio.router,
    routes_batches.router,
    routes_native.router,
    routes_ollama.router,
    routes_models.router,
    routes_own.router,
    routes_metrics.router,
    routes_pages.router,
)


def create_app(context: ServerContext) -> FastAPI:
    """The application. `state.gate` says what is under way, and lets nobody new in once it is told to drain."""
    settings, gate = context.settings, Gate()
    middleware = [Middleware(Exchanges, settings=settings, observer=context.observer, ended=log_exchange)]
    if settings.cors_origins:
        middleware.append(_cors(settings.cors_origins))
    middleware.append(Middleware(Doors, settings=settings, gate=gate, observer=context.observer))
    app = FastAPI(
        title="nanovllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers=dict.fromkeys((ApiError, NanovllmError, HTTPException, RequestValidationError), _tell),
    )
    app.state.settings, app.state.gate = settings, gate
    app.state.max_body_bytes = lambda: settings.body_bytes(reads_more=_may_read_more(context))
    routers = [router(context) for router in ROUTERS]
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    app.openapi = lambda: _description(app, needs_key=settings.needs_key)  # type: ignore[method-assign]
    return app


def _may_read_more(context: ServerContext) -> bool:
    """Whether one of the models reads images or hears, as far as anybody knows of those that have not been loaded."""
    all_facts = [engine.facts for engine in context.models.engines().values()]
    return any(facts is None or facts.senses is not None for facts in all_facts)


async def build_routes(app: FastAPI) -> None:
    """What FastAPI builds when the first request comes, a fifth of a second for all routes: this is one that nobody sent."""
    scope = {"type": "http", "app": app, "method": "GET", "path": "/-", "root_path": "", "headers": [], "query_string": b""}

    async def unused(*_: Any) -> Any:
        raise AssertionError("no route has this path")

    with suppress(HTTPException):
        await app.router(scope, unused, unused)


async def _tell(request: Request, failure: Exception) -> Response:
    exchange: Exchange = request.scope[SCOPE_KEY]
    error = as_api_error(failure)
    if error.code == "unknown_path" and (meant := _meant(request)):
        error = ApiError(404, f"no such path; {meant} is one", code="unknown_path")
    taken = ", ".join(_methods(request)) if error.status == 405 else ""
    if taken:
        error = ApiError(405, f"this path takes {taken}", code="method_not_allowed")
    exchange.error = error.label
    response = error_response(error, request.scope["path"], exchange.request_id)
    if taken:
        response.headers["allow"] = taken
    return response


def _meant(request: Request) -> str | None:
    """The path that this one is but for slashes too many, or for what a base URL has in front (/v1 twice, another server's
    prefix, an endpoint): clients' usual mistakes."""
    paths = {route.path for route in request.app.state.routes}
    names = [name for name in request.scope["path"].split("/") if name][-_MOST_NAMES:]
    behind = ["/" + "/".join(names[start:]) for start in range(len(names))]
    return next((path for path in behind[:1] + behind[1:-1] if path in paths), None)  # a last name alone may mean anything


def _methods(request: Request) -> list[str]:
    """What this path takes, by all of its routes (the router itself tells of the first alone); where routes name it outright, by
    those alone."""
    fitting = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    own = [route for route in fitting if route.path == request.url.path] or fitting
    methods = {method for route in own for method in getattr(route, "methods", None) or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _cors(origins: tuple[str, ...]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_private_network=True,  # pages of the network that were named may reach this machine
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
        max_age=600,
    )


def _description(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """OpenAPI, once: with the ways to give a key where one is needed, without the 422 that FastAPI adds and nobody sends."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, operations in described["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if needs_key and path in PUBLIC:
                    operation["security"] = []
        components = described["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        for form in (ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer):
            schema = form.model_json_schema(ref_template="#/components/schemas/{model}")
            components["schemas"] |= schema.pop("$defs", {}) | {form.__name__: schema}
        if needs_key:
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            described["security"] = [{"bearer": []}, {"x-api-key": []}]
        app.openapi_schema = described
    return app.openapi_schema
