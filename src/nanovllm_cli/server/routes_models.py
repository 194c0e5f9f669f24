"""/v1/models: which models there are, as OpenAI's clients list them, and Anthropic's, whose requests have `anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.ports import ModelCard, spellings
from nanovllm_cli.server.reading import invalid
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_own import AnyModelAnswer, AnyModelsAnswer

AnthropicVersion = Annotated[str | None, Header(description="Where it is there, answers have Anthropic's form.")]


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.get("/models", include_in_schema=False)
    @routes.get("/v1/models", responses=answers(AnyModelsAnswer))
    async def models(
        anthropic_version: AnthropicVersion = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> Response:
        """All of them. limit, after_id and before_id are Anthropic's, and cut a page out of them."""
        cards = context.models.cards()
        page = _page(cards, limit, after_id, before_id)
        if anthropic_version is None:
            return JsonResponse({"object": "list", "data": [_openai(card) for card in page]})
        ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
        outermost = cards[:1] if before_id is not None else cards[-1:]
        more = bool(page) and outermost[0] not in page
        return JsonResponse({"data": [_anthropic(card) for card in page], "has_more": more, **ends})

    @routes.get("/v1/models/{model:path}", responses=answers(AnyModelAnswer))
    async def model(model: str, anthropic_version: AnthropicVersion = None) -> Response:
        cards = {card.id: card for card in context.models.cards()}
        for name in spellings(model):
            if name in cards:
                card = cards[name]
                return JsonResponse(_openai(card) if anthropic_version is None else _anthropic(card))
        raise ApiError(404, "no such model is served here; /v1/models lists them", code="model_not_found", param="model")

    return routes


def _page(cards: Sequence[ModelCard], limit: int, after: str | None, before: str | None) -> Sequence[ModelCard]:
    """The first so many behind `after`, or the last so many ahead of `before`."""
    if before is not None:
        return cards[: _place(cards, before, "before_id")][-limit:]
    start = 0 if after is None else _place(cards, after, "after_id") + 1
    return cards[start : start + limit]


def _place(cards: Sequence[ModelCard], name: str, param: str) -> int:
    names = [card.id for card in cards]
    if name not in names:
        raise invalid(param, "no such model is served here")
    return names.index(name)


def _openai(card: ModelCard) -> Mapping[str, Any]:
    """What nobody knows of a model that was never loaded is left out: clients take no null there."""
    seen = {} if card.modalities is None else {"architecture": {"input_modalities": list(card.modalities)}}
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "nanovllm",
        "parent": card.parent,
        "max_model_len": card.context_len,
        "state": card.state.value,
        **seen,
    }


def _anthropic(card: ModelCard) -> Mapping[str, Any]:
    return {
        "id": card.id,
        "type": "model",
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context_len,
    }
