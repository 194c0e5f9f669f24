"""What /v1/responses takes, field by field. Items of the input are read by `responses_items.py`.

Harmless, and without effect: metadata, user, safety_identifier and service_tier (sent back), prompt_cache_key,
prompt_cache_retention and prompt_cache_options (prompts are cached by what is in them), max_tool_calls (it counts hosted tools,
and there are none),
reasoning.summary (reasoning is sent in full, as reasoning_text), what `include` lists of hosted tools and of images (a response
has none; the list of its input does), and an image's detail. What cannot be done is 400 by name. Fields that nobody knows are let
by.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, WithJsonSchema

from nanovllm_cli.server.function_tools import CHOICES, NAME
from nanovllm_cli.server.reading import described, object_schema
from nanovllm_cli.server.responses_items import INPUT_SCHEMA
from nanovllm_cli.server.schemas_common import STOP_BESIDE_TOOLS, Effort, ModelName, StrictModel, Unsupported, at_most
from nanovllm_cli.server.schemas_sampling import SamplingFields, Stop
from nanovllm_cli.text.tool_calls import MAX_TOOLS

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
Text = Annotated[str, Field(max_length=512)]


class FunctionTool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{NAME}$"})]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct):
    name: str


class AllowedFunctions(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class JsonSchemaFormat(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


_OTHER = object_schema({"type": {"type": "string", "not": {"const": "function"}}}) | {"description": "Skipped"}
_TOOL = {"anyOf": [*described({"function": FunctionTool})["anyOf"], _OTHER]}
_TOOLS: dict[str, Any] = {"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}
_CHOICES = described({"function": NamedFunction, "allowed_tools": AllowedFunctions})["anyOf"]
_TOOL_CHOICE: dict[str, Any] = {"anyOf": [{"enum": list(CHOICES)}, *_CHOICES]}
_TEXTS = object_schema({"type": {"enum": ["text", "json_object"]}})
_FORMAT: dict[str, Any] = {"anyOf": [_TEXTS, *described({"json_schema": JsonSchemaFormat})["anyOf"]]}


class ReasoningAsked(StrictModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextAsked(StrictModel):
    format: Annotated[Any, WithJsonSchema(_FORMAT)] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None


class InputTokensRequest(StrictModel):
    """What makes the prompt."""

    model: ModelName | None = None
    input: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)] = None
    instructions: str | None = None
    previous_response_id: Text | None = None
    tools: Annotated[Any, WithJsonSchema(_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: TextAsked | None = None
    reasoning: ReasoningAsked | None = None
    truncation: Literal["disabled"] | None = None
    conversation: Unsupported = None


class ResponsesRequest(SamplingFields, InputTokensRequest):
    """POST /v1/responses; how to draw, beyond what OpenAI has, as in chat completions."""

    n: Literal[1] | None = None
    stop: Stop = STOP_BESIDE_TOOLS
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tool_calls: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    prompt_logprobs: Unsupported = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16),
            at_most(16),
        ]
        | None
    ) = None
    user: Text | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    service_tier: Text | None = None
    background: Literal[False] | None = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None


class ResponseAnswer(BaseModel):
    """A response, as OpenAI's specification has it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


class InputTokensAnswer(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedAnswer(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemListAnswer(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str
    last_id: str
