"""What OpenAI's routes answer, for /openapi.json. Nothing is validated against these while it is sent: the tests do that."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class UsageAnswer(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class PromptProgress(BaseModel):
    """Of a prompt's tokens so far: total, cache (were there already) and processed (those included); since it first ran."""

    total: int
    cache: int
    processed: int
    time_ms: float


class Timings(BaseModel):
    """In the engine, its queue not counted. cache_n: tokens of the prompt that were there already, and are not among prompt_n.
    draft_n: tokens guessed ahead, where there were any."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class CallAnswer(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessageAnswer(BaseModel):
    """content: null where there are calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CallAnswer] | None = None


class Ended(BaseModel):
    """How an answer ended. stop_reason: the stop string or id that did it, if one did. completion_tokens: of this one, where
    `usage` counts all. token_ids: where they were asked for."""

    stop_reason: str | int | None
    completion_tokens: int
    token_ids: list[int] | None = None


class ChatChoice(Ended):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "repetition", "tool_calls"]


class OpenAIAnswer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageAnswer
    timings: Timings | None = None


class ChatAnswer(OpenAIAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    """The first token of an echoed prompt has none: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Ended):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class TextAnswer(OpenAIAnswer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ReadUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(BaseModel):
    """embedding: base64 of float32 numbers, lowest byte first, where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(BaseModel):
    object: Literal["list"]
    model: str
    data: list[EmbeddingEntry]
    usage: ReadUsage


class NativeEmbedding(BaseModel):
    """embedding: one vector, in a list, since llama-server may give one for each token."""

    index: int
    embedding: list[list[float]]


class NativeEmbeddings(RootModel[list[NativeEmbedding]]):
    """In the order of the texts."""


class ScoreEntry(BaseModel):
    """score: as `relevance_score` of /v1/rerank."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: ReadUsage


class RankedDocument(BaseModel):
    text: str


class RankEntry(BaseModel):
    """relevance_score: the cosine of the angle between the two embeddings, or, of a reranker, the probability of "yes"."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(BaseModel):
    id: str
    model: str
    results: list[RankEntry]
    usage: ReadUsage


class NativeAlternative(BaseModel):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeProbability(NativeAlternative):
    top_logprobs: list[NativeAlternative]


class NativeAnswer(BaseModel):
    """tokens: their ids, in a stream and where they were asked for. stop_type: what ended it; none while a stream goes on.
    completion_probabilities: with n_probs, of each token. prompt_progress: in a stream, ahead of the first token. prompt and
    generation_settings: at the end of an answer."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    stop_type: Literal["none", "eos", "word", "limit"]
    stopping_word: str
    completion_probabilities: list[NativeProbability] | None = None
    timings: Timings
    prompt_progress: PromptProgress | None = None
    prompt: str | None = None
    generation_settings: dict[str, Any] | None = None


class NativeAnswers(RootModel[NativeAnswer | list[NativeAnswer]]):
    """A list for several prompts, or several answers."""
