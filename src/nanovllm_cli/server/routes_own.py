"""The server's own endpoints: what it is, how it does, and its tokenizer and template by themselves.

`/health` is the only one that needs no key. Tokenizing and templates run in threads, so that nobody waits for a long text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli import __version__
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.senses import kinds_of
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse, openai_form
from nanovllm_cli.server.exchange import CurrentExchange
from nanovllm_cli.server.gate import Gate
from nanovllm_cli.server.ports import Caller, ChatAsked, EngineState, ModelCard, ServedModel
from nanovllm_cli.server.reading import template_variables
from nanovllm_cli.server.routes_chat import continues
from nanovllm_cli.server.routes_native import generation_settings
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_own import (
    ApplyTemplateAnswer,
    ApplyTemplateRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    Healthy,
    LoraAdaptersAnswer,
    PropsAnswer,
    SlotsAnswer,
    TokenizeAnswer,
    TokenizeRequest,
    Unhealthy,
    VersionAnswer,
)
from nanovllm_cli.server.schemas_sampling import first_given
from nanovllm_cli.text.content_parts import ImagePart
from nanovllm_cli.text.messages import template_messages, template_tools
from nanovllm_cli.text.tokenizer import Tokenizer

_UNHEALTHY = {
    "loading": "a model is being loaded",
    "restarting": "the engine is being started again",
    "stuck": "the engine stands still",
    "failed": "no model can be loaded",
    "stopped": "the engine has ended",
    "draining": "the server is about to end",
}
_UNSET = SamplingParams()

_LEAST_CHARS, _CHARS_A_TOKEN = 1 << 19, 8
_TOKENIZING = 2
"""Texts at once: each takes some 150 bytes of memory for a token."""


def router(context: ServerContext) -> APIRouter:
    routes = api_router()
    tokenizing = asyncio.Semaphore(_TOKENIZING)

    unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": Unhealthy}}

    @routes.get("/v1/health", include_in_schema=False)
    @routes.get("/health", responses=answers(Healthy) | unhealthy)
    async def health(request: Request) -> Response:
        gate: Gate = request.app.state.gate
        status = "draining" if gate.draining else _health(context.models.cards())
        if status == "ok":
            return JsonResponse({"status": status})
        error = ApiError(503, _UNHEALTHY[status], code=status)
        return JsonResponse({"status": status, **openai_form(error)}, 503, {"retry-after": "1"})

    @routes.get("/version", responses=answers(VersionAnswer))
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @routes.get("/props", responses=answers(PropsAnswer))
    async def props(model: str | None = None) -> Response:
        async with context.models.peek(model) as served:
            return JsonResponse(_props(served))

    @routes.get("/slots", responses=answers(SlotsAnswer))
    async def slots(model: str | None = None, fail_on_no_slot: int = 0) -> Response:
        """As llama-server has them: there is room for so many answers at once. fail_on_no_slot: 503 where all are taken."""
        async with context.models.peek(model) as served:
            stats, count = served.engine.stats, served.facts.max_num_seqs
            num_running = 0 if stats is None else stats.running
            if fail_on_no_slot and num_running >= count:
                raise ApiError(503, "no slot is free", code="no_slot_available", retry_after=1)
            rows = [{"id": i, "n_ctx": served.facts.context_len, "is_processing": i < num_running} for i in range(count)]
            return JsonResponse(rows)

    @routes.get("/lora-adapters", responses=answers(LoraAdaptersAnswer))
    async def lora_adapters(model: str | None = None) -> Response:
        """As llama-server counts them, for the field `lora` of a request."""
        async with context.models.peek(model) as served:
            chosen = dict(served.default_params.lora)
            rows = enumerate(served.lora_modules)
            return JsonResponse([{"id": i, "name": name, "scale": chosen.get(name, 0.0)} for i, name in rows])

    @routes.post("/tokenize", responses=answers(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest, exchange: CurrentExchange) -> Response:
        given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise ApiError(400, "give one of content, prompt and messages", param=given[1] if given else "content")
        async with context.models.peek(body.model) as served, tokenizing:
            ids = await _token_ids(context, served, body, exchange.caller)
            exchange.count(served.id, len(ids))
            return JsonResponse(await asyncio.to_thread(_tokenized, served, body, ids))

    @routes.post("/detokenize", responses=answers(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest, exchange: CurrentExchange) -> Response:
        async with context.models.peek(body.model) as served:
            if max(body.tokens, default=0) >= served.facts.vocab_size:
                raise ApiError(400, f"the vocabulary has {served.facts.vocab_size} tokens", param="tokens")
            text = await asyncio.to_thread(served.tokenizer.decode, body.tokens, skip_special_tokens=False)
            exchange.count(served.id, len(body.tokens))
            return JsonResponse({"content": text, "prompt": text})

    @routes.post("/apply-template", responses=answers(ApplyTemplateAnswer))
    async def apply_template(body: ApplyTemplateRequest) -> Response:
        async with context.models.peek(body.model) as served:
            return JsonResponse({"prompt": await asyncio.to_thread(_rendered, served, body)})

    return routes


def _health(cards: Sequence[ModelCard]) -> str:
    """A stuck engine is told of whatever the others do; else one model that can answer is enough."""
    states = {card.state for card in cards}
    if EngineState.STUCK in states:
        return "stuck"
    if states & {EngineState.READY, EngineState.ASLEEP}:
        return "ok"
    order = (EngineState.LOADING, EngineState.RESTARTING, EngineState.FAILED, EngineState.STOPPED)
    return next((state.value for state in order if state in states), "failed")


def _props(served: ServedModel) -> dict[str, Any]:
    params = generation_settings(served, served.default_params)
    return {
        "default_generation_settings": {"n_ctx": served.facts.context_len, "params": params},
        "total_slots": served.facts.max_num_seqs,
        "model_alias": served.id,
        "chat_template": None if served.chat_template is None else served.chat_template.source,
        "bos_token": served.tokenizer.bos_token,
        "eos_token": served.tokenizer.eos_token,
        "modalities": {
            "vision": served.facts.vision is not None,
            "audio": served.facts.hearing is not None,
            "video": served.facts.vision is not None and served.facts.vision.video is not None,
        },
        "build_info": f"nanovllm {__version__}",
    }


async def _token_ids(context: ServerContext, served: ServedModel, body: TokenizeRequest, caller: Caller) -> list[int]:
    if body.messages is not None:
        asked = ChatAsked(
            messages=body.messages,
            params=_UNSET,
            tools=body.tools or (),
            template_kwargs=body.chat_template_kwargs or {},
            continues=continues(body.messages, body.continue_final_message, body.add_generation_prompt),
        )
        return await context.generates.encode_chat(served, asked, caller)
    text = body.content if body.content is not None else body.prompt or ""
    limit = max(_LEAST_CHARS, _CHARS_A_TOKEN * served.facts.context_len)
    if len(text) > limit:
        param = "content" if body.content is not None else "prompt"
        raise ApiError(400, f"{param}: has more than {limit} characters: give it in pieces", code="too_long", param=param)
    special = first_given(body.add_special, body.add_special_tokens)
    return await asyncio.to_thread(
        served.tokenizer.encode,
        text,
        add_special_tokens=body.content is None if special is None else special,
        parse_special=body.parse_special,
    )


def _tokenized(served: ServedModel, body: TokenizeRequest, ids: list[int]) -> dict[str, Any]:
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": served.facts.context_len}
    if body.with_pieces:
        answer["tokens"] = [{"id": each, "piece": _piece(served.tokenizer, each)} for each in ids]
    if body.return_token_strs:
        answer["token_strs"] = [served.tokenizer.id_to_token(each) or "" for each in ids]
    return answer


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    raw = tokenizer.id_to_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _rendered(served: ServedModel, body: ApplyTemplateRequest) -> str:
    if served.chat_template is None:
        raise ApiError(400, f"{served.id} has no chat template", code="unsupported")
    variables = {**served.chat_defaults.variables, **template_variables(body.chat_template_kwargs)}
    template = served.chat_template.for_tools(body.tools)
    known, given = None if served.format is None else served.format.tools, body.tools or ()
    images, kinds = list[ImagePart](), kinds_of(served.facts.senses)
    messages = template_messages(body.messages, template, images, kinds, tools=given, known=known)
    tools = template_tools(given, template, known) if given else None
    return template.render(messages, tools=tools, add_generation_prompt=body.add_generation_prompt, **variables)
