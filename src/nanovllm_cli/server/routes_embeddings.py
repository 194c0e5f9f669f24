"""POST /v1/embeddings, /embeddings, /v1/rerank and /v1/score: texts as vectors, and how near texts are to others.

Nearness is the cosine of embeddings, as embedding models mean it; a reranker reads query and document together
(`weights/scoring.py`).
"""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.engine.vectors import by_score, nearness, unit
from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.server.api_error import ApiError, invalid_value, too_long
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.ports import Caller, ServedModel
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_openai import (
    EmbeddingRequest,
    NativeEmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    several_texts,
)
from nanovllm_cli.server.schemas_openai_answers import EmbeddingAnswer, NativeEmbeddings, RerankAnswer, ScoreAnswer
from nanovllm_cli.server.sse import while_connected
from nanovllm_cli.weights.scoring import Scoring

_PAIRS_AT_ONCE = 16
"""A client that has left is not read for further than these."""

_TOKENS_AT_ONCE = 1 << 17
"""A long query beside each of thousands of documents is read again with each."""

T = TypeVar("T")


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.post("/v1/embeddings", responses=answers(EmbeddingAnswer))
    async def embeddings(body: EmbeddingRequest, request: Request, exchange: CurrentExchange) -> Response:
        """A vector for each text."""
        return await while_connected(request, _embed(context, body, exchange))

    @routes.post("/embedding", include_in_schema=False)
    @routes.post("/embeddings", responses=answers(NativeEmbeddings))
    async def native_embeddings(body: NativeEmbeddingRequest, request: Request, exchange: CurrentExchange) -> Response:
        """The same as llama-server has it."""
        return await while_connected(request, _embed_natively(context, body, exchange))

    @routes.post("/v1/reranking", include_in_schema=False)
    @routes.post("/reranking", include_in_schema=False)
    @routes.post("/v2/rerank", include_in_schema=False)
    @routes.post("/rerank", include_in_schema=False)
    @routes.post("/v1/rerank", responses=answers(RerankAnswer))
    async def rerank(body: RerankRequest, request: Request, exchange: CurrentExchange) -> Response:
        """Documents, the nearest to the query first."""
        return await while_connected(request, _rerank(context, body, exchange))

    @routes.post("/score", include_in_schema=False)
    @routes.post("/v1/score", responses=answers(ScoreAnswer))
    async def score(body: ScoreRequest, request: Request, exchange: CurrentExchange) -> Response:
        """How near texts are, pair by pair, or all to one."""
        return await while_connected(request, _score(context, body, exchange))

    return routes


async def _embed(context: ServerContext, body: EmbeddingRequest, exchange: Exchange) -> Response:
    async with context.use(body.model) as model:
        check_embeds(model)
        if body.dimensions is not None and body.dimensions > model.facts.vector_size:
            raise invalid_value(f"this model's vectors have {model.facts.vector_size} dimensions", "dimensions")
        vectors, num_tokens = await context.generates.embed(
            model, several_texts(body.input), body.pooling or model.facts.pooling, exchange.caller,
            priority=body.priority or 0, most=body.truncate_prompt_tokens,
        )  # fmt: skip
        exchange.count(model.id, num_tokens)
        return JsonResponse(
            {
                "object": "list",
                "model": model.id,
                "data": await asyncio.to_thread(_data, vectors, body),
                "usage": _usage(num_tokens),
            }
        )


def _data(vectors: Sequence[Sequence[float]], body: EmbeddingRequest) -> list[msgspec.Raw]:
    """JSON of each. All together may be millions of numbers: that is done in a thread."""
    data = []
    for index, vector in enumerate(vectors):
        shown = first_numbers(vector, body.dimensions)
        embedding = _base64(shown) if body.encoding_format == "base64" else list(shown)
        data.append(msgspec.Raw(msgspec.json.encode({"object": "embedding", "index": index, "embedding": embedding})))
    return data


async def _embed_natively(context: ServerContext, body: NativeEmbeddingRequest, exchange: Exchange) -> Response:
    given = [name for name in ("content", "input") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of content and input", param=given[1] if given else "content")
    texts, norm = several_texts(getattr(body, given[0])), 2 if body.embd_normalize is None else body.embd_normalize
    async with context.use(body.model) as model:
        check_embeds(model)
        vectors, num_tokens = await context.generates.embed(
            model, texts, body.pooling or model.facts.pooling, exchange.caller, priority=body.priority or 0, normalize=norm == 2
        )
        exchange.count(model.id, num_tokens)
        return JsonResponse(await asyncio.to_thread(_native_data, vectors, norm))


def _native_data(vectors: Sequence[Sequence[float]], norm: int) -> list[msgspec.Raw]:
    told = ({"index": index, "embedding": [_normalized(vector, norm)]} for index, vector in enumerate(vectors))
    return [msgspec.Raw(msgspec.json.encode(each)) for each in told]


def _normalized(vector: Sequence[float], norm: int) -> list[float]:
    """norm: embd_normalize. Vectors of length 1 have come so."""
    if norm in (-1, 2):
        return list(vector)
    largest = max(map(abs, vector))
    if largest == 0:
        return list(vector)
    scaled = [number / largest for number in vector]  # or powers of them would overflow
    size = 1 / 32760 if norm == 0 else math.fsum(abs(number) ** norm for number in scaled) ** (1 / norm)
    return [number / size for number in scaled]


async def _rerank(context: ServerContext, body: RerankRequest, exchange: Exchange) -> Response:
    documents = [document if isinstance(document, str) else document["text"] for document in body.documents]
    async with context.use(body.model) as model:
        scores, num_tokens = await _scores(context, model, body, exchange.caller, [body.query], documents)
        exchange.count(model.id, num_tokens)
        best = by_score(scores)[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in best]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        return JsonResponse(
            {
                "id": "rerank-" + secrets.token_hex(12),
                "model": model.id,
                "results": results,
                "usage": _usage(num_tokens),
            }
        )


async def _score(context: ServerContext, body: ScoreRequest, exchange: Exchange) -> Response:
    one, two = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(one) != len(two) and len(one) > 1:
        raise invalid_value(f"{len(one)} and {len(two)} texts make no pairs: as many, or one in text_1", "text_1")
    async with context.use(body.model) as model:
        scores, num_tokens = await _scores(context, model, body, exchange.caller, one, two)
        exchange.count(model.id, num_tokens)
        return JsonResponse(
            {
                "id": "score-" + secrets.token_hex(12),
                "object": "list",
                "created": int(time.time()),
                "model": model.id,
                "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
                "usage": _usage(num_tokens),
            }
        )


async def _scores(
    context: ServerContext,
    model: ServedModel,
    body: RerankRequest | ScoreRequest,
    caller: Caller,
    queries: Sequence[str],
    documents: Sequence[str],
) -> tuple[list[float], int]:
    """Of each document beside its query, or the only one; and how many tokens were read."""
    embed, priority = context.generates.embed, body.priority or 0
    scoring, most = model.scoring, body.truncate_prompt_tokens
    if scoring is None:
        check_embeds(model)
        asked, pooling = [*queries, *documents], body.pooling or model.facts.pooling
        vectors, count = await embed(model, asked, pooling, caller, priority=priority, most=most)
        pairs = zip(_each(vectors[: len(queries)], documents), vectors[len(queries) :], strict=True)
        return [nearness(query, vector) for query, vector in pairs], count
    if body.pooling is not None:
        raise invalid_value("this model ranks, and pools as its head wants it", "pooling")
    together, limit = list(zip(_each(queries, documents), documents, strict=True)), model.cut_to(most)
    params = ("query", "documents") if isinstance(body, RerankRequest) else ("text_1", "text_2")
    rows: list[Sequence[float]] = []
    waiting: list[list[int]] = []
    count = 0

    def prompts_of(pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        return [_prompt(model, scoring, *pair, limit, params) for pair in pairs]

    for end in range(_PAIRS_AT_ONCE, len(together) + _PAIRS_AT_ONCE, _PAIRS_AT_ONCE):
        try:
            waiting += await asyncio.to_thread(prompts_of, together[end - _PAIRS_AT_ONCE : end])
        except NanovllmError as error:  # of its template, or of a text that is no valid Unicode
            raise ApiError.of(error, params[1]) from error
        if end >= len(together) or sum(map(len, waiting)) >= _TOKENS_AT_ONCE:
            found, read = await embed(model, waiting, model.facts.pooling, caller, priority=priority, normalize=False)
            rows += found
            count += read
            waiting = []
    return [scoring.score(row) for row in rows], count


def _prompt(
    model: ServedModel, scoring: Scoring, query: str, document: str, limit: int | None, params: tuple[str, str]
) -> list[int]:
    """limit: tokens to which the document is cut; None: not at all. params: what the two are called in the request. No text is
    read that can't fit."""
    tokenizer, most = model.tokenizer, model.facts.context_len
    if limit is not None:
        document = document[: model.most_chars(limit)]
    model.check_texts([query], params[0])
    if limit is None:
        model.check_texts([query, document], params[1])
    if limit is None:
        ids = scoring.prompt(tokenizer, query, document)
        if len(ids) > most:
            raise too_long(len(ids), most, params[1])
        return ids
    ids = scoring.fitting(tokenizer, query, document, limit)
    if len(ids) > limit:
        raise UsageError(f"the query leaves no room for a document in {limit} tokens", "shorten it")
    return ids


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _each(queries: Sequence[T], documents: Sequence[object]) -> Sequence[T]:
    """As many queries as documents: the only one for all of them."""
    return list(queries) * len(documents) if len(queries) == 1 else queries


def check_embeds(model: ServedModel) -> None:
    if model.scoring is not None:
        raise ApiError(400, f"{model.id} is a reranker, which makes no vectors: POST /v1/rerank", code="unsupported")
    if model.classes is not None:
        does = "labels tokens (POST /v1/spans)" if model.classes.each else "is a classifier (POST /classify)"
        raise ApiError(400, f"{model.id} {does}, and makes no vectors", code="unsupported")


def first_numbers(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """So many numbers of it, of length 1 again (what models trained for it expect)."""
    return vector if dimensions is None or dimensions == len(vector) else unit(vector[:dimensions])


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
