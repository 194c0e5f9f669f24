"""What the routes under /api take, field by field: Ollama's API, as its api/types.go and docs/openapi.yaml have it.

Harmless, and without effect: how a model is loaded and kept (num_gpu, num_thread, num_batch, use_mmap, …; keep_alive with a
request that is answered), which is the server's own options' to say; num_keep, as nothing is ever left out of a prompt. What
cannot be done is 400 by name. Fields that nobody knows are let by, as Ollama does.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Required

from pydantic import Field, StringConstraints, field_validator, with_config
from typing_extensions import TypedDict

from nanovllm_cli.sampling_params import MAX_TOKENS, SamplingParams
from nanovllm_cli.server.schemas_common import (
    MAX_MESSAGES,
    OPEN,
    JsonObject,
    ModelName,
    ShortText,
    StrictModel,
    TokenId,
    Tolerated,
    Unsupported,
    explained,
)
from nanovllm_cli.server.schemas_openai import MAX_ID_LIST, MAX_INPUTS, MAX_TOP_LOGPROBS, FunctionDefinition
from nanovllm_cli.server.schemas_sampling import Stop, bounded, first_given
from nanovllm_cli.text.tool_calls import MAX_TOOLS

_DURATION = r"^[+-]?(0|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$"
"""Of Go: 5m, 1h30m, -1s, 0."""
KeepAlive = Annotated[
    float | Annotated[str, StringConstraints(pattern=_DURATION)] | None,
    explained("seconds, or a duration such as 5m, 1h30m or -1s"),
]
Images = Annotated[list[str], Field(fail_fast=True)]
"""In base64, with or without the head of a data URL."""
Think = Annotated[
    bool | Literal["low", "medium", "high", "max"] | None, explained("true, false, 'low', 'medium', 'high' or 'max'")
]
Format = Annotated[Literal["", "json"] | JsonObject | None, explained("'json', or a JSON schema")]
TokenLimit = Annotated[int, Field(ge=-2, le=MAX_TOKENS)]
"""Up to 0: until the context is full."""


OPTION_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "penalty_last_n": "repeat_last_n",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "num_predict",
}
"""By fields of SamplingParams, those with one value."""


def unloads(keep_alive: float | str | None) -> bool:
    """Whether it is no time at all, which asks for the model to be unloaded."""
    return keep_alive is not None and not re.search("[1-9]", str(keep_alive))


class OllamaOptions(StrictModel):
    """Over the model's own defaults. num_ctx: most tokens of prompt and answer together. Clients send it out of habit, whatever
    there is room for: one that is more than is served (or 0) asks for nothing, and only a prompt that doesn't fit is refused."""

    num_ctx: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    num_predict: TokenLimit | None = None
    temperature: float | None = bounded("temperature")
    top_k: int | None = bounded("top_k")
    top_p: float | None = bounded("top_p")
    min_p: float | None = bounded("min_p")
    typical_p: float | None = bounded("typical_p")
    repeat_last_n: int | None = bounded("penalty_last_n")
    repeat_penalty: float | None = bounded("repetition_penalty")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    mirostat: int | None = bounded("mirostat")
    mirostat_tau: float | None = bounded("mirostat_tau")
    mirostat_eta: float | None = bounded("mirostat_eta")
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    stop: Stop = None

    num_keep: Tolerated = None
    num_batch: Tolerated = None
    num_gpu: Tolerated = None
    main_gpu: Tolerated = None
    num_thread: Tolerated = None
    numa: Tolerated = None
    low_vram: Tolerated = None
    use_mmap: Tolerated = None
    use_mlock: Tolerated = None
    draft_num_predict: Tolerated = None

    tfs_z: Literal[1] | None = None
    penalize_newline: Literal[True] | None = None

    @field_validator("num_ctx", "num_predict", "top_k", "repeat_last_n", "seed", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """Ollama takes 8192.0 for a whole number, and clients send it; of 40.7 it cuts the rest."""
        return int(value) if isinstance(value, float) and math.isfinite(value) else value

    def sampling(self, defaults: SamplingParams, num_logprobs: int | None) -> SamplingParams:
        """What is said of how to draw, over a model's defaults: one answer, log-probabilities only where they were asked for."""
        said = {field: value for field, name in OPTION_NAMES.items() if (value := getattr(self, name)) is not None}
        if self.num_predict is not None and self.num_predict <= 0:
            said["max_tokens"] = None
        if self.stop is not None:
            said["stop"] = self.stop
        if self.seed is not None:
            said["seed"] = self.seed if self.seed >= -1 else self.seed + 2**64
        return defaults.under({"n": 1, "logprobs": num_logprobs, "prompt_logprobs": None, **said})


class AnsweredRequest(StrictModel):
    """What chat and generate have in common. stream: true where it isn't said. truncate, shift: true there, and nothing else can
    be had by it: a prompt that doesn't fit is an error, a full context ends the answer with "length". Nothing is left out in
    silence."""

    model: ModelName
    stream: bool | None = None
    format: Format = None
    think: Think = None
    keep_alive: KeepAlive = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate: bool | None = None
    shift: bool | None = None
    debug_render_only: Annotated[Literal[False] | None, Field(alias="_debug_render_only")] = None


@with_config(OPEN)
class OllamaCalled(TypedDict, total=False):
    name: Required[ShortText]
    arguments: JsonObject | None


@with_config(OPEN)
class OllamaCall(TypedDict, total=False):
    id: ShortText | None
    function: Required[OllamaCalled]


@with_config(OPEN)
class OllamaMessage(TypedDict, total=False):
    """tool_name, tool_call_id: of a tool's result, which call it belongs to: the first one that waits, where both are missing."""

    role: Required[ShortText]
    content: str | None
    thinking: str | None
    images: Images | None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None
    tool_name: ShortText | None
    tool_call_id: ShortText | None


@with_config(OPEN)
class OllamaTool(TypedDict, total=False):
    type: Literal["function"]
    function: Required[FunctionDefinition]


class OllamaChatRequest(AnsweredRequest):
    """POST /api/chat. Without messages the model is loaded, or unloaded where keep_alive is 0."""

    messages: Annotated[list[OllamaMessage] | None, Field(fail_fast=True, max_length=MAX_MESSAGES)] = None
    tools: Annotated[list[OllamaTool] | None, Field(fail_fast=True, max_length=MAX_TOOLS)] = None


class OllamaGenerateRequest(AnsweredRequest):
    """POST /api/generate. Without a prompt likewise. suffix: what lies between both is wanted. context: that of the answer
    before. raw: the prompt goes to the model as it is."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[TokenId] | None, Field(fail_fast=True, max_length=MAX_ID_LIST)] = None
    raw: bool | None = None
    images: Images | None = None
    width: Unsupported = None
    height: Unsupported = None
    steps: Unsupported = None


class OllamaEmbedRequest(StrictModel):
    """POST /api/embed. truncate: true where it isn't said; false refuses a text that is too long."""

    model: ModelName
    input: Annotated[
        str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)] | None,
        explained(f"a text, or at most {MAX_INPUTS} of them"),
    ] = None
    truncate: bool | None = None
    dimensions: int | None = Field(default=None, ge=0, le=1 << 20)
    keep_alive: KeepAlive = None
    options: OllamaOptions | None = None


class OllamaEmbeddingsRequest(StrictModel):
    """POST /api/embeddings, the older one: a text, whose vector has whatever length it has."""

    model: ModelName
    prompt: str | None = None
    keep_alive: KeepAlive = None
    options: OllamaOptions | None = None


class ShowRequest(StrictModel):
    """POST /api/show. name: the model's older name. verbose adds nothing: no lists of tokens are told."""

    model: Annotated[str, StringConstraints(max_length=4096)] | None = None
    name: Annotated[str, StringConstraints(max_length=4096)] | None = None
    verbose: Tolerated = None

    @property
    def asked(self) -> str | None:
        return first_given(self.model or None, self.name or None)
