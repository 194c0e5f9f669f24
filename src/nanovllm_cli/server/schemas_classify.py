"""Bodies and answers of /classify, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool

from nanovllm_cli.server.schemas_common import MAX_MESSAGES, Unsupported
from nanovllm_cli.server.schemas_openai import CutFields, EmbeddingInput
from nanovllm_cli.server.schemas_openai_answers import ReadUsage


class ClassifyRequest(CutFields):
    """POST /classify. One of input and messages, a conversation. use_activation: False for the numbers before probabilities."""

    input: EmbeddingInput | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    pooling: Unsupported = None
    use_activation: StrictBool | None = None  # type: ignore[assignment]
    add_generation_prompt: StrictBool | None = None
    add_special_tokens: Literal[True] | None = None
    chat_template: Unsupported = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class ClassEntry(BaseModel):
    """label: that of the largest of probs, which are in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyUsage(ReadUsage):
    completion_tokens: int


class ClassifyAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassEntry]
    usage: ClassifyUsage
