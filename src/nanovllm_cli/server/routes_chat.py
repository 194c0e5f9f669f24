"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import JsonResponse
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.function_tools import Tool, checked_tools, name_of
from nanovllm_cli.server.openai_answers import ChatFrames, ChatStyle, chat_answer
from nanovllm_cli.server.ports import ChatAsked, Generation, ServedModel
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_openai import ChatRequest, StreamFields
from nanovllm_cli.server.schemas_openai_answers import ChatAnswer
from nanovllm_cli.server.schemas_responses import InputTokensAnswer
from nanovllm_cli.server.schemas_sampling import SamplingFields, first_given
from nanovllm_cli.server.schemas_streams import ChatChunk
from nanovllm_cli.server.sse import while_connected
from nanovllm_cli.text.tool_calls import ToolChoice


def router(context: ServerContext) -> APIRouter:
    routes = api_router()

    @routes.post("/chat/completions", include_in_schema=False)
    @routes.post("/v1/chat/completions", responses=answers(ChatAnswer, streams=ChatChunk))
    async def chat_completions(body: ChatRequest, request: Request, exchange: CurrentExchange) -> Response:
        """The next turn of a conversation."""
        check_streaming(body)
        if body.stream:
            return context.stream(_frames(context, body, exchange), ping_interval=body.sse_ping_interval)
        return await while_connected(request, _whole(context, body, exchange))

    @routes.post("/chat/completions/input_tokens", include_in_schema=False)
    @routes.post("/v1/chat/completions/input_tokens", responses=answers(InputTokensAnswer))
    async def count_input_tokens(body: ChatRequest, exchange: CurrentExchange) -> Response:
        """How many tokens the prompt of such a request has, as llama-server tells."""
        async with context.models.peek(body.model) as model:
            count = await context.num_prompt_tokens(model, await asked_of(body, model, context), exchange)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": count})

    return routes


async def _whole(context: ServerContext, body: ChatRequest, exchange: Exchange) -> Response:
    async with _generation(context, body, exchange) as (generation, style):
        return JsonResponse(await chat_answer(generation, style))


async def _frames(context: ServerContext, body: ChatRequest, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    async with _generation(context, body, exchange) as (generation, style):
        writer = ChatFrames(generation, style)
        async for events in generation:
            if frames := writer.frames(events):
                yield frames
        yield writer.end()


@contextlib.asynccontextmanager
async def _generation(
    context: ServerContext, body: ChatRequest, exchange: Exchange
) -> AsyncIterator[tuple[Generation, ChatStyle]]:
    async with context.use(body.model) as model:
        asked = await asked_of(body, model, context)
        style = ChatStyle(params=asked.params, reasoning=body.include_reasoning is not False, **shown_by(body))
        begun = context.generation(model, asked, exchange)
        body.messages = []  # images and sounds, which need not wait for the end of the answer
        del asked
        async with begun as generation:
            yield generation, style


async def asked_of(body: ChatRequest, model: ServedModel, context: ServerContext) -> ChatAsked:
    """What a request means with this model. Raises ApiError and UsageError."""
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs needs logprobs: true", "top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs does not go with stream", code="unsupported", param="prompt_logprobs")
    tools, choice = _tools(body)
    effort = first_given(body.reasoning_effort, None if body.reasoning is None else body.reasoning.effort)
    thinking, variables = effort_of(effort, body.enable_thinking, model, "reasoning_effort")
    budget = first_given(
        body.thinking_budget,
        body.reasoning_budget,
        body.thinking_token_budget,
        body.thinking_budget_tokens,
        body.reasoning_budget_tokens,
    )
    return ChatAsked(
        messages=body.messages,
        params=body.sampling(
            model,
            max_tokens=first_given(body.max_completion_tokens, body.n_predict, body.max_tokens),
            logprobs=_num_logprobs(body),
        ),
        tools=tools,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
        whole_calls=not body.stream,
        form=await checked_form(body, context),
        template_kwargs={**variables, **(body.chat_template_kwargs or {})},
        thinking=thinking,
        reasoning_budget=budget,
        continues=continues(body.messages, body.continue_final_message, body.add_generation_prompt),
        splits_reasoning=body.reasoning_format != "none",
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        tells_reading=bool(body.stream and body.return_progress),
    )


def _num_logprobs(body: ChatRequest) -> int | None:
    """As `sampling` takes it."""
    if body.logprobs is None:
        return None
    return (body.top_logprobs or 0) if body.logprobs else -1


def _tools(body: ChatRequest) -> tuple[Sequence[Tool], ToolChoice]:
    """The tools that may be called, and whether one must be."""
    tools, choice = list(body.tools or ()), body.tool_choice or "auto"
    if isinstance(choice, str):
        return checked_tools(tools, choice)
    if choice["type"] == "function":
        return checked_tools(tools, choice["function"]["name"])
    selection = choice["allowed_tools"]
    return checked_tools(tools, selection["mode"], [name_of(tool) for tool in selection["tools"]])


# ---- shared with other routes ----


def continues(
    messages: Sequence[Mapping[str, Any]], continue_final_message: bool | None, add_generation_prompt: bool | None
) -> bool:
    """Whether the last message is an answer to go on with (vLLM's two switches). Raises ApiError 400."""
    if continue_final_message:
        if add_generation_prompt:
            raise invalid_value("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
        if messages[-1].get("role") != "assistant":
            raise invalid_value("the last message is not the assistant's", "continue_final_message")
        return True
    if add_generation_prompt is False:
        message = "a chat without a generation prompt is not supported"
        raise ApiError(400, message, code="unsupported", param="add_generation_prompt")
    return False


def effort_of(
    effort: str | None, thinking: bool | None, model: ServedModel, param: str
) -> tuple[bool | None, dict[str, Any]]:
    """What `reasoning_effort` means with a model: whether to reason, and variables of the template, which alone knows how much.
    thinking: what was asked for beside it.

    A template with a switch and no effort takes `none` as off and the rest as on. Raises ApiError 400 for an effort that the
    model knows nothing of.
    """
    if effort is None:
        return thinking, {}
    if model.template_reads("reasoning_effort"):
        return thinking, {"reasoning_effort": effort}
    if model.thinking_switch is not None:
        return effort != "none" if thinking is None else thinking, {}
    if effort == "none":
        return thinking, {}
    raise ApiError(400, f"{model.id} knows no {param}", code="unsupported", param=param)


def shown_by(body: StreamFields) -> dict[str, bool]:
    """`Style`'s fields."""
    options = body.stream_options
    return {
        "usage": bool(options and options.include_usage),
        "usage_everywhere": bool(options and options.continuous_usage_stats),
        "timings_everywhere": bool(body.timings_per_token),
        "token_ids": bool(body.return_token_ids),
    }


def check_streaming(body: StreamFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options is only allowed with stream: true", "stream_options")


async def checked_form(body: SamplingFields, context: ServerContext) -> Constraint | None:
    """The form that the answer must have, tried out. Raises ApiError 400 with the field that asked for it."""
    form, param = body.form()
    if form is not None:
        await context.check(form, param)
    return form
