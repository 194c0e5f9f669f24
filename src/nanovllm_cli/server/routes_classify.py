"""POST /classify: which of its labels a model gives to texts, as vLLM has it (`weights/classes.py`), and POST /v1/spans: what one
marks in them that gives labels to tokens (`text/spans.py`)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.ports import Caller, ChatAsked, ServedModel
from nanovllm_cli.server.reading import template_variables
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_classify import ClassifyAnswer, ClassifyRequest, SpansAnswer, SpansRequest
from nanovllm_cli.server.schemas_openai import several_texts
from nanovllm_cli.server.sse import while_connected
from nanovllm_cli.text.spans import WINDOW, Marking, Span, joined, pieces
from nanovllm_cli.weights.classes import Classes

_NOTHING_DRAWN = SamplingParams()


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.post("/v1/classify", include_in_schema=False)
    @routes.post("/classify", responses=answers(ClassifyAnswer))
    async def classify(body: ClassifyRequest, request: Request, exchange: CurrentExchange) -> Response:
        """Probabilities of a model's labels, for each text or for a conversation."""
        if (body.input is None) == (body.messages is None):
            raise ApiError(400, "give one of input and messages", param="input" if body.input is None else "messages")
        return await while_connected(request, _classify(context, body, exchange))

    @routes.post("/v1/spans", responses=answers(SpansAnswer))
    async def spans(body: SpansRequest, request: Request, exchange: CurrentExchange) -> Response:
        """Parts of each text that a model marks: names, addresses."""
        return await while_connected(request, _spans(context, body, exchange))

    return routes


async def _spans(context: ServerContext, body: SpansRequest, exchange: Exchange) -> Response:
    texts = [body.input] if isinstance(body.input, str) else body.input
    async with context.use(body.model) as model:
        classes, tokenizer = model.classes, model.tokenizer
        if classes is None or not classes.each:
            raise ApiError(400, f"{model.id} gives tokens no labels, and marks nothing", code="unsupported")
        model.check_texts(texts, "input")
        placed = await asyncio.to_thread(lambda: [tokenizer.placed(text) for text in texts])
        read = list(pieces(tokenizer, placed, min(model.facts.context_len, WINDOW)))
        rows, num_tokens = await context.generates.embed(
            model, [piece.ids for piece in read], "each", exchange.caller, priority=body.priority or 0, normalize=False
        )
        exchange.count(model.id, num_tokens)

        def found() -> list[list[Span]]:
            numbers = joined(tokenizer, len(texts), len(classes.labels), zip(read, rows, strict=True))
            marking = Marking.of(classes.labels)
            return [marking.spans(*each) for each in zip(texts, placed, numbers, strict=True)]

        told = [
            {"index": index, "spans": [each._asdict() | {"text": text[each.start : each.end]} for each in of_text]}
            for index, (text, of_text) in enumerate(zip(texts, await asyncio.to_thread(found), strict=True))
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JsonResponse({"object": "list", "model": model.id, "data": told, "usage": usage})


async def _classify(context: ServerContext, body: ClassifyRequest, exchange: Exchange) -> Response:
    async with context.use(body.model) as model:
        classes = model.classes
        if classes is None or classes.each:
            does = "has no labels, and classifies nothing" if classes is None else "labels tokens, and no texts: POST /v1/spans"
            raise ApiError(400, f"{model.id} {does}", code="unsupported")
        prompts = await _prompts(context, model, classes, body, exchange.caller)
        rows, num_tokens = await context.generates.embed(
            model, prompts, model.facts.pooling, exchange.caller,
            priority=body.priority or 0, normalize=False, most=body.truncate_prompt_tokens,
        )  # fmt: skip
        exchange.count(model.id, num_tokens)
        found = [classes.of(row, activation=body.use_activation is not False) for row in rows]
        data = [
            {"index": index, "label": each.label, "probs": each.probs, "num_classes": each.num_classes}
            for index, each in enumerate(found)
        ]
        return JsonResponse(
            {
                "id": "classify-" + secrets.token_hex(12),
                "object": "list",
                "created": int(time.time()),
                "model": model.id,
                "data": data,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
            }
        )


async def _prompts(
    context: ServerContext, model: ServedModel, classes: Classes, body: ClassifyRequest, caller: Caller
) -> list[Sequence[int]]:
    """Token ids of what is read; a conversation is one text, whose next turn is not begun."""
    if body.messages is not None:
        asked = ChatAsked(
            messages=body.messages,
            params=_NOTHING_DRAWN,
            template_kwargs=template_variables(body.chat_template_kwargs),
            opens=body.add_generation_prompt is True,
            draws=False,
        )
        return [await context.generates.encode_chat(model, asked, caller)]
    assert body.input is not None
    texts, cut = several_texts(body.input), model.cut_to(body.truncate_prompt_tokens)
    if cut is None:
        model.check_texts([text for text in texts if isinstance(text, str)], "input")

    def read() -> list[Sequence[int]]:
        most = None if cut is None else model.most_chars(cut)
        return [classes.prompt(model.tokenizer, text[:most]) if isinstance(text, str) else text for text in texts]

    return await asyncio.to_thread(read)
