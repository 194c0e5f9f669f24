"""What OpenAI's routes take: chat completions, completions, embeddings, llama-server's completion and infill, and Jina's rerank.

Only shapes and bounds; what the fields mean is the routes' and `schemas_sampling`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Required

from pydantic import Field, StringConstraints, with_config
from typing_extensions import TypedDict

from nanovllm_cli.sampling_params import MAX_LOGPROBS, MAX_TOKENS
from nanovllm_cli.server.function_tools import NAME
from nanovllm_cli.server.schemas_common import (
    FIRST_ERROR,
    MAX_MESSAGES,
    OPEN,
    STOP_BESIDE_TOOLS,
    ChosenByModel,
    Effort,
    ImageDetail,
    JsonObject,
    ModelName,
    Priority,
    ShortText,
    StrictModel,
    TokenId,
    Tolerated,
    Unsupported,
    explained,
)
from nanovllm_cli.server.schemas_sampling import SamplingFields, Stop, bounded
from nanovllm_cli.text.tool_calls import MAX_TOOLS

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 512
MAX_INPUTS = 2048
MAX_ID_LIST = 1 << 22

SomeText = Annotated[str, StringConstraints(min_length=1)]
TokenLimit = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1, le=MAX_TOKENS)],
    explained("a number of tokens, more than 0, or -1 until the context is full"),
]
NativeLimit = Annotated[
    Literal[-1] | Annotated[int, Field(ge=0, le=MAX_TOKENS)],
    explained("a number of tokens, 0 for the prompt alone, or -1 until the context is full"),
]
Budget = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
PingInterval = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None, explained("a number of seconds, more than 0, or -1 for none")
]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ID_LIST)]


@with_config(OPEN)
class ImageUrl(TypedDict, total=False):
    """url: a data URL with the image in base64; none is opened. detail: without effect, an image is made the size that the model
    was trained with."""

    url: Required[str]
    detail: ImageDetail | None


@with_config(OPEN)
class VideoUrl(TypedDict, total=False):
    """url: a data URL with the video in base64; none is opened."""

    url: Required[str]


@with_config(OPEN)
class InputAudio(TypedDict, total=False):
    """data: a sound's file in base64. format: what its client calls it, which is not relied on."""

    data: Required[str]
    format: ShortText | None


@with_config(OPEN)
class ContentPart(TypedDict, total=False):
    """Of a message. Which kinds can be read is said by text/content_parts.py."""

    type: Required[ShortText]
    text: str
    image_url: str | ImageUrl | None
    input_audio: InputAudio | None
    video_url: str | VideoUrl | None


@with_config(OPEN)
class FunctionCall(TypedDict, total=False):
    name: Required[ShortText]
    arguments: str | JsonObject | None


@with_config(OPEN)
class ToolCall(TypedDict, total=False):
    id: ShortText | None
    type: Literal["function"]
    function: Required[FunctionCall]


@with_config(OPEN)
class ChatMessage(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None
    name: ShortText | None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None
    tool_call_id: ShortText | None
    reasoning_content: str | None


@with_config(OPEN)
class FunctionDefinition(TypedDict, total=False):
    name: Required[Annotated[str, StringConstraints(pattern=f"^{NAME}$")]]
    description: str | None
    parameters: JsonObject | None
    strict: bool | None


@with_config(OPEN)
class Tool(TypedDict, total=False):
    type: Required[Literal["function"]]
    function: Required[FunctionDefinition]


class NamedFunction(TypedDict):
    name: ShortText


class NamedTool(TypedDict):
    type: Literal["function"]
    function: NamedFunction


class ToolSelection(TypedDict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(TypedDict):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSelection


class StreamOptions(StrictModel):
    """continuous_usage_stats: usage on every chunk (vLLM's)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Tolerated = None


class StreamFields(StrictModel):
    """return_token_ids: shows the ids of prompt and answer (vLLM's). llama-server's are timings_per_token: a stream's timings on
    every chunk; return_progress: a stream tells how far the prompt is read; sse_ping_interval: seconds of silence before a
    stream is pinged."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    sse_ping_interval: PingInterval = None
    return_tokens_as_token_ids: Literal[False] | None = None


class Reasoning(StrictModel):
    """reasoning_effort as Ollama's server takes it, too."""

    effort: Effort | None = None


class ChatRequest(StreamFields, SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None
    n_cmpl: int | None = bounded("n")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stop: Stop = STOP_BESIDE_TOOLS

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
        explained("none, auto, required, a function by name, or allowed_tools"),
    ] = None
    parallel_tool_calls: bool | None = None

    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    reasoning_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_control: Literal[False] | None = None
    reasoning_budget_message: Unsupported = None
    parse_tool_calls: Literal[True] | None = None
    include_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None

    chat_template_kwargs: JsonObject | None = Field(default=None, max_length=64)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    prediction: Tolerated = None
    modalities: Annotated[list[Literal["text"]], FIRST_ERROR] | None = Field(default=None, max_length=8)
    verbosity: Literal["medium"] | None = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None
    return_prompt_text: Literal[False] | None = None


class CompletionRequest(StreamFields, SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
        explained(f"a text, a list of token ids, or a list of at most {MAX_PROMPTS} of one of these"),
    ]
    max_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    n_predict: TokenLimit | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(default=None, ge=1, le=128)
    add_special_tokens: Literal[True] | None = None
    prompt_embeds: Unsupported = None


def several_texts(given: Any) -> list[str | list[int]]:
    """One text or several, told apart by what is inside."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


@with_config(OPEN)
class InputFile(TypedDict, total=False):
    filename: Required[ShortText]
    text: Required[str]


class NativeRequest(SamplingFields):
    """What llama-server's own endpoints take. t_max_predict_ms: ends the answer at the end of a line, once it took so long.
    n_indent: ends it at a line, not the first, that is indented by fewer blanks. response_fields: what of the answer is wanted;
    `timings/prompt_n` is that of `timings`. return_progress: see StreamFields."""

    model: ModelName | None = None
    stream: bool | None = None
    n_predict: NativeLimit | None = None
    max_tokens: NativeLimit | None = None
    max_completion_tokens: NativeLimit | None = None
    n_cmpl: int | None = bounded("n")
    n_probs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    t_max_predict_ms: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    n_indent: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    return_tokens: bool | None = None
    response_fields: Annotated[list[ShortText], FIRST_ERROR] | None = Field(default=None, max_length=256)
    return_progress: bool | None = None
    sse_ping_interval: PingInterval = None
    reasoning_budget_tokens: Literal[-1] | None = None
    image_data: Unsupported = None
    t_max_prompt_ms: Tolerated = None


class InfillRequest(NativeRequest):
    """POST /infill. What lies between prefix and suffix begins with `prompt`. Of `samplers`, which editors always send, infill is
    left out: generation_settings tell those that were applied."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InputFile] | None = Field(default=None, max_length=256)
    prompt: str | None = None

    steps_left_out: ClassVar[Sequence[str]] = ("infill",)


@with_config(OPEN)
class PromptString(TypedDict):
    """llama-server's object, which may hold images there."""

    prompt_string: str
    multimodal_data: NotRequired[Unsupported]


MixedIds = Annotated[list[TokenId | str], Field(fail_fast=True, min_length=1, max_length=MAX_ID_LIST)]
NativePrompt = str | PromptString | MixedIds


class ContinueRequest(NativeRequest):
    """POST /completion. A list with texts alone is several prompts, one with ids among them is one."""

    prompt: Annotated[
        str
        | PromptString
        | Annotated[list[str | PromptString | MixedIds], Field(fail_fast=True, min_length=1)]
        | MixedIds,
        explained(f"a text, a list of token ids and texts, or a list of at most {MAX_PROMPTS} of one of these"),
    ]


def several_prompts(given: Any) -> list[NativePrompt]:
    """One prompt or several, told apart by what is inside."""
    one = not isinstance(given, list) or any(isinstance(piece, int) for piece in given)
    return [given] if one else list(given)


EmbeddingInput = Annotated[
    SomeText
    | TokenIds
    | Annotated[list[SomeText], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)],
    explained(f"a text, a list of token ids, or a list of at most {MAX_INPUTS} of one of these, none of them empty"),
]


class PooledFields(StrictModel):
    """pooling: of the hidden states of a text's tokens."""

    model: ModelName | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    priority: Priority | None = None
    lora: ChosenByModel = None


class CutFields(PooledFields):
    """truncate_prompt_tokens: vLLM's, texts are cut to so many tokens, by -1 to what the context holds."""

    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    truncation_side: Literal["right"] | None = None
    use_activation: Literal[True] | None = None
    mm_processor_kwargs: Unsupported = None
    user: Tolerated = None


class EmbeddingRequest(CutFields):
    """POST /v1/embeddings."""

    input: EmbeddingInput
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=1 << 20)
    normalize: Literal[True] | None = None
    embd_normalize: Literal[2] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    add_special_tokens: Literal[True] | None = None


class NativeEmbeddingRequest(PooledFields):
    """POST /embeddings. One of content and input. embd_normalize: -1 leaves vectors as they are, 0 makes their largest magnitude
    32760 (16 bits), p makes their p-norm 1."""

    content: EmbeddingInput | None = None
    input: EmbeddingInput | None = None
    embd_normalize: int | None = Field(default=None, ge=-1, le=64)


SeveralTexts = Annotated[
    SomeText | Annotated[list[SomeText], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)],
    explained(f"a text, or a list of at most {MAX_INPUTS}, none of them empty"),
]


@with_config(OPEN)
class RerankDocument(TypedDict, total=False):
    text: Required[SomeText]


class ScoringFields(CutFields):
    """What vLLM has for scores, and is not here."""

    max_tokens_per_query: Unsupported = None
    max_tokens_per_doc: Unsupported = None
    instruction: Unsupported = None
    chat_template_kwargs: Unsupported = None


class ScoreRequest(ScoringFields):
    """POST /v1/score, as vLLM has it: texts in pairs, or one beside many."""

    text_1: SeveralTexts
    text_2: SeveralTexts


class RerankRequest(ScoringFields):
    """POST /v1/rerank, as Jina and Cohere have it."""

    query: str = Field(min_length=1)
    documents: Annotated[list[SomeText | RerankDocument], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_INPUTS)
    top_n: int | None = Field(default=None, ge=1, le=MAX_INPUTS)
    return_documents: bool | None = None
    rank_fields: Unsupported = None
