"""Bodies and answers of /classify, as vLLM has them, and of /v1/spans."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool

from nanovllm_cli.server.schemas_common import (
    MAX_MESSAGES,
    ChosenByModel,
    ModelName,
    Priority,
    StrictModel,
    Tolerated,
    Unsupported,
    explained,
)
from nanovllm_cli.server.schemas_openai import MAX_INPUTS, CutFields, EmbeddingInput
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


class SpansRequest(StrictModel):
    """POST /v1/spans. Each text fits into the context."""

    model: ModelName | None = None
    input: Annotated[
        str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)],
        explained(f"a text, or a list of at most {MAX_INPUTS}"),
    ]
    priority: Priority | None = None
    lora: ChosenByModel = None
    user: Tolerated = None


class MarkedSpan(BaseModel):
    """start, end: in characters of the text."""

    label: str
    start: int
    end: int
    score: float
    text: str


class SpansEntry(BaseModel):
    index: int
    spans: list[MarkedSpan]


class SpansAnswer(BaseModel):
    object: Literal["list"]
    model: str
    data: list[SpansEntry]
    usage: ReadUsage


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
