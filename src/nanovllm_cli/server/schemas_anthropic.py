"""What /v1/messages takes, field by field. Content blocks are read by `anthropic_messages.py`.

Harmless, and without effect: metadata, service_tier and speed; cache_control anywhere (prompts are cached by what is in them);
the headers anthropic-version and anthropic-beta. What cannot be done is 400 by name. Fields that nobody knows are let by.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.anthropic_messages import MESSAGES_SCHEMA, SYSTEM_SCHEMA, TOOLS_SCHEMA
from nanovllm_cli.server.reading import object_schema
from nanovllm_cli.server.schemas_common import STOP_BESIDE_TOOLS, ChosenByModel, ModelName, StrictModel, Unsupported

_DISPLAY = {"display": {"enum": ["summarized", "omitted", None]}}
_BUDGET = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_THINKING: dict[str, Any] = {
    "anyOf": [
        object_schema({"type": {"const": "enabled"}, "budget_tokens": _BUDGET}, _DISPLAY),
        object_schema(
            {"type": {"enum": ["disabled", "adaptive"]}}, {"budget_tokens": {"type": ["integer", "null"]}, **_DISPLAY}
        ),
    ]
}
_FORMAT = object_schema({"type": {"const": "json_schema"}, "schema": {"type": "object"}})


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=128)] | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Any, WithJsonSchema(_FORMAT)] = None


class CountTokensRequest(StrictModel):
    """What makes the prompt."""

    model: ModelName
    messages: Annotated[Any, WithJsonSchema(MESSAGES_SCHEMA)]
    system: Annotated[Any, WithJsonSchema(SYSTEM_SCHEMA)] = None
    tools: Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Any, WithJsonSchema(_THINKING)] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[Any, WithJsonSchema(_FORMAT)] = None
    context_management: Any = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: Unsupported = None
    thread: Unsupported = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=64)] | None
    ) = STOP_BESIDE_TOOLS
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    compaction: Unsupported = None
    lora: ChosenByModel = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """What is said of how to draw, over a model's defaults. A message is one answer."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "max_tokens": self.max_tokens}
        said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.stop_sequences is not None:
            said["stop"] = tuple(self.stop_sequences)
        return defaults.under({"n": 1, **said})


class UsageAnswer(BaseModel):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(BaseModel):
    """A message, as Anthropic's API has it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: UsageAnswer


class CountAnswer(BaseModel):
    input_tokens: int
