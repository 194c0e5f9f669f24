"""/v1/responses: OpenAI's Responses API, as its packages and Codex CLI use it.

Tools that are not functions are skipped: Codex sends local_shell and web_search to everybody. Responses are kept (`store`, true
unless said otherwise) in memory, for previous_response_id and for the routes below /v1/responses/ID.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.logprobs import ContentTokens
from nanovllm_cli.server.ports import ChatAsked, ServedModel, Usage
from nanovllm_cli.server.reading import invalid, off_loop, unsupported
from nanovllm_cli.server.responses_items import Item, conversation_of, read_items, without_images
from nanovllm_cli.server.responses_request import ToolsAsked, form_of, new_response, style_of, tools_of
from nanovllm_cli.server.responses_store import ResponseStore, StoredResponse
from nanovllm_cli.server.responses_stream import ResponseBuilder, StreamEvent
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_responses import (
    DeletedAnswer,
    Include,
    InputTokensAnswer,
    InputTokensRequest,
    ItemListAnswer,
    ResponseAnswer,
    ResponsesRequest,
)
from nanovllm_cli.server.schemas_streams import ResponseErrorEvent, ResponseEvent
from nanovllm_cli.server.sse import named_frame, named_frames, read_through, while_connected

_INCLUDE = "message.input_image.image_url: with images, which are null otherwise"


def router(context: ServerContext) -> APIRouter:
    routes = api_router()
    store = ResponseStore()

    def found(response_id: str, exchange: Exchange) -> StoredResponse:
        response = store.get(exchange.tenant, response_id)
        if response is None:
            raise ApiError(404, "no such response is kept", code="response_not_found", param="response_id")
        return response

    @routes.post("/responses", include_in_schema=False)
    @routes.post("/v1/responses", responses=answers(ResponseAnswer, streams=ResponseEvent, error=ResponseErrorEvent))
    async def create_response(body: ResponsesRequest, request: Request, exchange: CurrentExchange) -> Response:
        """An answer, as items."""
        before, items = await _items(body, request, store, exchange.tenant)
        tools = tools_of(body)
        form = await form_of(body, context)
        _logprobs(body, tools)
        answering = _Answering(context, exchange, body, before, items, tools, form, store)
        body.input = ""
        del before, items
        if body.stream:
            return context.stream(named_frames(answering.events()), answering.error_frames)
        return JsonResponse(await while_connected(request, answering.whole()))

    @routes.post("/responses/input_tokens", include_in_schema=False)
    @routes.post("/v1/responses/input_tokens", responses=answers(InputTokensAnswer))
    async def count_input_tokens(
        body: InputTokensRequest, request: Request, exchange: CurrentExchange
    ) -> Response:
        """How many tokens the prompt of such a request has."""
        before, items = await _items(body, request, store, exchange.tenant)
        tools = tools_of(body)
        form = await form_of(body, context)
        async with context.models.peek(body.model) as model:
            asked = _chat_asked(body, before, items, tools, form, SamplingParams(), model)
            count = await context.num_prompt_tokens(model, asked, exchange)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": count})

    @routes.get("/v1/responses/{response_id}", responses=answers(ResponseAnswer))
    async def get_response(response_id: str, exchange: CurrentExchange, stream: bool = False) -> Response:
        if stream:
            raise unsupported("stream", "a kept response is given whole")
        return Response(found(response_id, exchange).body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}", responses=answers(DeletedAnswer))
    async def delete_response(response_id: str, exchange: CurrentExchange) -> Response:
        found(response_id, exchange)
        store.delete(exchange.tenant, response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.get("/v1/responses/{response_id}/input_items", responses=answers(ItemListAnswer))
    async def list_input_items(
        response_id: str,
        exchange: CurrentExchange,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        include: Annotated[list[Include] | None, Query(description=_INCLUDE)] = None,
        included: Annotated[list[Include] | None, Query(alias="include[]", description="include, as clients write it")] = None,
    ) -> Response:
        items = list(found(response_id, exchange).input_items)
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid("after", "is not the id of an item of this response")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        if "message.input_image.image_url" not in [*(include or ()), *(included or ())]:
            page = list(map(without_images, page))
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        more = len(items) > limit
        return JsonResponse({"object": "list", "data": page, "has_more": more, "first_id": first, "last_id": last})

    return routes


@dataclass
class _Answering:
    """One request on its way. before, items: what was said, and what it brought itself."""

    context: ServerContext
    exchange: Exchange
    body: ResponsesRequest
    before: Sequence[Item]
    items: Sequence[Item]
    tools: ToolsAsked
    form: Constraint | None
    store: ResponseStore
    builder: ResponseBuilder = field(init=False)
    tokens: ContentTokens | None = None
    begun: bool = False
    usage: Usage = field(default=Usage(0, 0, 0, 0))

    async def whole(self) -> dict[str, Any]:
        await read_through(self.events())
        return self.builder.response

    def error_frames(self, error: ApiError) -> bytes:
        """A failure behind the first event is an event itself."""
        if self.begun:
            return b"".join([named_frame(event["type"], event) for event in self.builder.fail(error, self.usage)])
        told = {"code": error.code, "message": error.message, "param": error.param}
        return named_frame("error", {"type": "error", "sequence_number": 0, **told})

    async def events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """Those of each step. Nothing is said before the engine has taken the request."""
        cut_off = False
        context, name = self.context, self.body.model
        async with context.use(name) as model, context.generation(model, self._asked(model), self.exchange) as generation:
            self.before = ()  # images are not to wait for the end of the answer
            if self.body.store is False:
                self.items = ()
            async for step in generation:
                events = self._begin()
                for event in step:
                    events += self.builder.take(event, self.tokens.take(event) if self.tokens is not None else [])
                    cut_off = cut_off or event.finish_reason in ("length", "repetition")
                self.usage = generation.usage
                if events:
                    yield events
            self.usage = generation.usage
        events = self._begin() + self.builder.complete(cut_off, self.usage)
        if self.body.store is not False:
            self._keep()
        yield events

    def _asked(self, model: ServedModel) -> ChatAsked:
        body, num_top = self.body, _logprobs(self.body, self.tools)
        params = body.sampling(model, n=1, max_tokens=body.max_output_tokens, logprobs=num_top)
        self.builder = ResponseBuilder(
            new_response(body, self.tools, model.id, params.temperature, params.top_p),
            seals_reasoning="reasoning.encrypted_content" in (body.include or ()),
        )
        self.tokens = None if num_top is None else ContentTokens(model.tokenizer, params, model.visible_ids)
        asked = _chat_asked(body, self.before, self.items, self.tools, self.form, params, model)
        return replace(asked, priority=body.priority or 0, cache_salt=body.cache_salt)

    def _begin(self) -> list[StreamEvent]:
        if self.begun:
            return []
        self.begun = True
        return self.builder.begin()

    def _keep(self) -> None:
        """Before the client is told the end, so that its next request finds it."""
        response = self.builder.response
        items = [*self.items, *response["output"]]
        body = msgspec.json.encode(response)
        kept = StoredResponse(response["id"], body, items, len(self.items), self.body.previous_response_id)
        self.store.put(self.exchange.tenant, kept)


def _logprobs(body: ResponsesRequest, tools: ToolsAsked) -> int | None:
    """How many alternatives to report beside each token; None for no log-probabilities at all."""
    if not body.top_logprobs and "message.output_text.logprobs" not in (body.include or ()):
        return None
    if tools.tools:
        raise unsupported("include", "log-probabilities do not go with tools")
    return body.top_logprobs or 0


async def _items(
    body: InputTokensRequest, request: Request, store: ResponseStore, tenant: str | None
) -> tuple[list[Item], list[Item]]:
    """What was said before, and what this request brings."""
    items = await off_loop(request, lambda: read_items(body.input, lambda item_id: store.item(tenant, item_id)))
    if body.previous_response_id is None:
        return [], items
    before = store.conversation(tenant, body.previous_response_id)
    if before is None:
        message = "the previous response, or one before it, is not kept (any more)"
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return before, items


def _chat_asked(
    body: InputTokensRequest,
    before: Sequence[Item],
    items: Sequence[Item],
    tools: ToolsAsked,
    form: Constraint | None,
    params: SamplingParams,
    model: ServedModel,
) -> ChatAsked:
    thinking, variables = style_of(body, model)
    conversation = conversation_of(before, items, body.instructions)
    return ChatAsked(
        conversation.messages,
        params,
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel=body.parallel_tool_calls is not False,
        whole_calls=isinstance(body, ResponsesRequest) and not body.stream,
        form=form,
        template_kwargs=variables,
        thinking=thinking,
        param="input",
        image_paths=conversation.image_paths,
    )
