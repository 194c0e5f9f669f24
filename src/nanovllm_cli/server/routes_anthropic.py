"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, as its packages and Claude Code use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.anthropic_messages import chat_messages, chat_tools
from nanovllm_cli.server.anthropic_stream import MessageBuilder, StreamEvent
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.chat_turns import Conversation
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.errors import AnthropicErrorAnswer, JsonResponse, anthropic_form
from nanovllm_cli.server.exchange import CurrentExchange, Exchange
from nanovllm_cli.server.function_tools import checked_tools
from nanovllm_cli.server.ports import ChatAsked, ServedModel
from nanovllm_cli.server.reading import invalid, kind_of, off_loop, read, schema_form, shown, unsupported
from nanovllm_cli.server.routing import answers, api_router
from nanovllm_cli.server.schemas_anthropic import (
    CountAnswer,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
)
from nanovllm_cli.server.schemas_streams import MessageEvent
from nanovllm_cli.server.sse import named_frame, named_frames, read_through, while_connected
from nanovllm_cli.text.tool_calls import ToolChoice

_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def router(context: ServerContext) -> APIRouter:
    routes = api_router(AnthropicErrorAnswer)

    @routes.post("/v1/messages", responses=answers(MessageAnswer, streams=MessageEvent, error=AnthropicErrorAnswer))
    async def create_message(body: MessagesRequest, request: Request, exchange: CurrentExchange) -> Response:
        _check_edits(body)
        form = _form(body)
        checked_tools(chat_tools(body.tools), _choice(body))
        _thinking(body)
        if form is not None:
            await context.check(form, "output_config.format")
        conversation = await off_loop(request, lambda: chat_messages(body.system, body.messages))
        answering = _Answering(context, exchange, body, conversation, form)
        body.messages = []
        del conversation
        if not body.stream:
            return JsonResponse(await while_connected(request, answering.whole()))

        def error_frame(error: ApiError) -> bytes:
            return named_frame("error", anthropic_form(error, exchange.request_id))

        return context.stream(named_frames(answering.events()), error_frame)

    @routes.post("/v1/messages/count_tokens", responses=answers(CountAnswer))
    async def count_tokens(body: CountTokensRequest, request: Request, exchange: CurrentExchange) -> Response:
        _check_edits(body)
        conversation = await off_loop(request, lambda: chat_messages(body.system, body.messages))
        async with context.models.peek(body.model) as model:
            asked = _chat_asked(body, conversation, SamplingParams(), _form(body), model)
            count = await context.num_prompt_tokens(model, asked, exchange)
        return JsonResponse({"input_tokens": count})

    return routes


@dataclass
class _Answering:
    """One request on its way."""

    context: ServerContext
    exchange: Exchange
    body: MessagesRequest
    conversation: Conversation | None
    form: Constraint | None
    builder: MessageBuilder = field(init=False)

    async def whole(self) -> dict[str, Any]:
        await read_through(self.events())
        return self.builder.message

    async def events(self) -> AsyncGenerator[Sequence[StreamEvent], None]:
        """Those of each step. Nothing is said before the engine has taken the request."""
        begun = False
        context, name = self.context, self.body.model
        async with context.use(name) as model, context.generation(model, self._asked(model), self.exchange) as generation:
            async for step in generation:
                events = [] if begun else self.builder.begin(generation.usage)
                begun = True
                for event in step:
                    events += self.builder.take(event)
                if events:
                    yield events
            usage = generation.usage
        yield [*([] if begun else self.builder.begin(usage)), *self.builder.complete(usage, self.body.max_tokens)]

    def _asked(self, model: ServedModel) -> ChatAsked:
        """Only once: images are not to wait for the end of the answer."""
        conversation, self.conversation = self.conversation, None
        assert conversation is not None
        self.builder = MessageBuilder(model.id, shows_thinking=_thinking(self.body).display != "omitted")
        return _chat_asked(self.body, conversation, self.body.sampling(model.default_params), self.form, model)


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"] = "disabled"
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class _Edit(msgspec.Struct):
    type: str


class _Edits(msgspec.Struct):
    edits: list[_Edit] = []


class _JsonFormat(msgspec.Struct):
    schema: dict[str, Any]


def _chat_asked(
    body: CountTokensRequest,
    conversation: Conversation,
    params: SamplingParams,
    form: Constraint | None,
    model: ServedModel,
) -> ChatAsked:
    tools, choice = checked_tools(chat_tools(body.tools), _choice(body))
    thinking = _thinking(body)
    effort = body.output_config.effort if body.output_config is not None else None
    return ChatAsked(
        conversation.messages,
        params,
        tools=tools,
        tool_choice=choice,
        parallel=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        whole_calls=isinstance(body, MessagesRequest) and not body.stream,
        form=form,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        thinking=_wants_thinking(thinking, model),
        reasoning_budget=_budget(thinking, model),
        continues=conversation.messages[-1]["role"] == "assistant",
        image_paths=conversation.image_paths,
    )


def _thinking(body: CountTokensRequest) -> _Thinking:
    """Left out is disabled, as Anthropic has it."""
    if body.thinking is None:
        return _Thinking()
    kind = kind_of(body.thinking, "thinking")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise unsupported("thinking.type", f"{shown(kind)} is not one of enabled, disabled, adaptive")
    thinking = read(_Thinking, body.thinking, "thinking")
    if kind == "enabled" and (thinking.budget_tokens is None or not 1 <= thinking.budget_tokens < 2**31):
        raise invalid("thinking.budget_tokens", "must be a number of tokens, at least 1")
    return thinking


def _wants_thinking(thinking: _Thinking, model: ServedModel) -> bool | None:
    """`adaptive` leaves it to the model: it may, where the template has a switch for that."""
    if thinking.type == "adaptive":
        return None if model.thinking_switch is None else True
    return thinking.type == "enabled"


def _budget(thinking: _Thinking, model: ServedModel) -> int | None:
    """A model that always thinks is stopped at once where it must not."""
    if thinking.type == "disabled":
        return 0 if model.thinking_switch is None else None
    return thinking.budget_tokens if thinking.type == "enabled" else None


def _choice(body: CountTokensRequest) -> ToolChoice:
    if body.tool_choice is None:
        return "auto"
    if body.tool_choice.type != "tool":
        return _CHOICES[body.tool_choice.type]
    if not body.tool_choice.name:
        raise invalid("tool_choice.name", "must say which tool")
    return body.tool_choice.name


def _form(body: CountTokensRequest) -> Constraint | None:
    """Of output_config.format, or output_format, which is its older name."""
    asked = body.output_config.format if body.output_config is not None else None
    path = "output_format" if asked is None else "output_config.format"
    asked = body.output_format if asked is None else asked
    if asked is None:
        return None
    if kind_of(asked, path) != "json_schema":
        raise unsupported(f"{path}.type", "json_schema is the only one")
    return schema_form(read(_JsonFormat, asked, path).schema, f"{path}.schema")


def _check_edits(body: CountTokensRequest) -> None:
    """Which thinking of earlier turns is read is the template's decision, so that edits of it change nothing; others are
    refused."""
    if body.context_management is not None:
        for edit in read(_Edits, body.context_management, "context_management").edits:
            if not edit.type.startswith("clear_thinking_"):
                raise unsupported("context_management.edits", f"{shown(edit.type)} is not supported; send what shall be read")
