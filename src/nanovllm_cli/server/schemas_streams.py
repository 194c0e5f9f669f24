"""What the events of streams bring, for /openapi.json. Like answers they are validated by tests, not while they are sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from nanovllm_cli.server.schemas_openai_answers import ChatLogprobs, PromptProgress, TextLogprobs, Timings, UsageAnswer


class Chunk(BaseModel):
    """usage: on the last one, whose choices are empty, where it was asked for; on all where that was. timings: likewise, but
    always on the last one. prompt_progress: on those that tell of nothing else."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageAnswer | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None


class Ends(BaseModel):
    """finish_reason comes at an answer's end, and with it stop_reason and completion_tokens. token_ids: of this chunk."""

    index: int
    finish_reason: Literal["stop", "length", "repetition", "tool_calls"] | None
    stop_reason: str | int | None = None
    completion_tokens: int | None = None
    token_ids: list[int] | None = None


class CalledDelta(BaseModel):
    """arguments: a piece of the JSON text."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """id, type and the name come with the first piece of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledDelta


class ChatDelta(BaseModel):
    """role: on an answer's first chunk alone."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Ends):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class TextChunkChoice(Ends):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = None


class TextChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class ResponseEvent(BaseModel):
    """Which fields are there follows from the type, as OpenAI's specification has it (ResponseStreamEvent)."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: dict[str, Any] | None = None
    output_index: int | None = None
    item: dict[str, Any] | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseErrorEvent(BaseModel):
    """Of what failed before the response began."""

    type: Literal["error"]
    sequence_number: int
    code: str | None
    message: str
    param: str | None


class MessageEvent(BaseModel):
    """Which fields are there follows from the type, as Anthropic's API has it."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
