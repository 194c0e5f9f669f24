"""What a request to /v1/responses asks of a conversation: its tools, the form of its answer, and what is sent back of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.function_tools import CHOICES, Tool, checked_tools, function_tool
from nanovllm_cli.server.ports import ServedModel
from nanovllm_cli.server.reading import invalid, kind_of, listed, read, schema_form, shown, unsupported
from nanovllm_cli.server.responses_items import new_id
from nanovllm_cli.server.routes_chat import checked_form, effort_of
from nanovllm_cli.server.schemas_responses import (
    AllowedFunctions,
    FunctionTool,
    InputTokensRequest,
    JsonSchemaFormat,
    NamedFunction,
    ResponsesRequest,
)
from nanovllm_cli.text.tool_calls import MAX_TOOLS, ToolChoice


class ToolsAsked(NamedTuple):
    """tools: those that may be called; choice: of them."""

    tools: Sequence[Tool]
    choice: ToolChoice


def tools_of(body: InputTokensRequest) -> ToolsAsked:
    """Raises ApiError 400."""
    tools: list[Tool] = []
    for place, tool in enumerate(listed([] if body.tools is None else body.tools, "tools", MAX_TOOLS)):
        path = f"tools[{place}]"
        if kind_of(tool, path) == "function":
            given = read(FunctionTool, tool, path)
            tools.append(function_tool(given.name, given.description, given.parameters, given.strict, path))
    return ToolsAsked(*_chosen(body.tool_choice, tools))


def _chosen(choice: Any, tools: Sequence[Tool]) -> tuple[Sequence[Tool], ToolChoice]:
    if choice is None or choice in CHOICES:
        return checked_tools(tools, choice or "auto")
    if isinstance(choice, str):
        raise invalid("tool_choice", f"must be {', '.join(CHOICES)}, or an object that names a function")
    kind = kind_of(choice, "tool_choice")
    if kind == "function":
        return checked_tools(tools, read(NamedFunction, choice, "tool_choice").name)
    if kind == "allowed_tools":
        given = read(AllowedFunctions, choice, "tool_choice")
        wanted = [str(tool.get("name")) for tool in given.tools if tool.get("type") == "function"]
        return checked_tools(tools, given.mode, wanted)
    raise unsupported("tool_choice.type", f"{shown(kind)} is not supported; functions are the only tools here")


async def form_of(body: InputTokensRequest, context: ServerContext) -> Constraint | None:
    """What the answer must look like, tried out. Raises ApiError 400."""
    form = _text_format(body)
    named = await checked_form(body, context) if isinstance(body, ResponsesRequest) else None
    if form is not None and named is not None:
        raise invalid("text.format", "an answer has one form, and another field says one too")
    if form is not None:
        await context.check(form, "text.format")
    return form or named


def _text_format(body: InputTokensRequest) -> Constraint | None:
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    kind = kind_of(form, "text.format")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object")
    if kind != "json_schema":
        raise unsupported("text.format.type", f"{shown(kind)} is not one of text, json_object, json_schema")
    return schema_form(read(JsonSchemaFormat, form, "text.format").schema, "text.format.schema")


def style_of(body: InputTokensRequest, model: ServedModel) -> tuple[bool | None, dict[str, Any]]:
    """What `reasoning` and `text.verbosity` mean with this model, as `effort_of` says it. Raises ApiError 400 for what the model
    knows nothing of."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    thinking, variables = effort_of(effort, None, model, "reasoning.effort")
    verbosity = body.text.verbosity if body.text is not None else None
    if verbosity is not None and model.template_reads("verbosity"):
        return thinking, {**variables, "verbosity": verbosity}
    if verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", f"{model.id} knows no verbosity")
    return thinking, variables


def new_response(body: ResponsesRequest, asked: ToolsAsked, model: str, temperature: float, top_p: float) -> dict[str, Any]:
    """The response before anything was generated. temperature, top_p: what is drawn with."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": temperature,
        "text": _text(body),
        "tool_choice": asked.choice if asked.choice in CHOICES else {"type": "function", "name": asked.choice},
        "tools": [{"type": "function", "description": None, "strict": False, **tool["function"]} for tool in asked.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": "disabled",
        **({} if body.user is None else {"user": body.user}),
    }


def _text(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    text: dict[str, Any] = {"format": {"type": form["type"] if form is not None else "text"}}
    if text["format"]["type"] == "json_schema":
        given = read(JsonSchemaFormat, form, "text.format")
        text["format"] |= {"name": given.name, "schema": given.schema, "strict": True}
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    return text
