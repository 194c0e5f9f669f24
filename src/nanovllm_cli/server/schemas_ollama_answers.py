"""What the routes under /api answer, for /openapi.json. Like others these are validated by tests, not while they are sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class OllamaTokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob):
    top_logprobs: list[OllamaTokenLogprob]


class OllamaAnswered(BaseModel):
    """What stands on each line; from done_reason on, on the last one alone, or in an answer that is no stream. Nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[OllamaLogprob] | None = None
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaCalledAnswer(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallAnswer(BaseModel):
    id: str
    function: OllamaCalledAnswer


class OllamaMessageAnswer(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCallAnswer] | None = None


class OllamaChatAnswer(OllamaAnswered):
    message: OllamaMessageAnswer


class OllamaGenerateAnswer(OllamaAnswered):
    """context: the whole conversation's tokens, for the next request; of prompts that the template wrote, without images."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaEmbedAnswer(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(BaseModel):
    embedding: list[float]


class OllamaDetails(BaseModel):
    """parent_model: of an adapter, which requests choose by its name."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int | None = None
    embedding_length: int | None = None


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[Literal["completion", "tools", "insert", "thinking", "vision", "embedding"]]


class TagsAnswer(BaseModel):
    models: list[OllamaModel]


class RunningModel(BaseModel):
    """size_vram: what of it is on a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class PsAnswer(BaseModel):
    models: list[RunningModel]


class ShowAnswer(BaseModel):
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
