"""Bodies of the server's own endpoints. Where llama-server or vLLM has the endpoint, its fields have the same names here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel, StrictBool

from nanovllm_cli.server.errors import ErrorAnswer
from nanovllm_cli.server.schemas_common import MAX_MESSAGES, ModelName, TokenId, Unsupported
from nanovllm_cli.text.tool_calls import MAX_TOOLS

AnyMessage = dict[str, Any]


class TokenizeRequest(BaseModel):
    """One of: content (as llama-server has it), prompt, messages (both as vLLM has them, with the switches of its chats).

    add_special: the tokens that the model begins a text with; by default only for a prompt. parse_special: control tokens in the
    text count as such; in messages they never do.
    """

    model: ModelName | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[AnyMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_special: StrictBool | None = None
    add_special_tokens: StrictBool | None = None
    parse_special: StrictBool = True
    with_pieces: StrictBool = False
    return_token_strs: StrictBool = False
    continue_final_message: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    chat_template: Unsupported = None


class Piece(BaseModel):
    """piece: text, or bytes where a token is not whole characters."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(BaseModel):
    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 20)]


class DetokenizeAnswer(BaseModel):
    """The text, under the names that llama-server and vLLM have for it."""

    content: str
    prompt: str


class ApplyTemplateRequest(BaseModel):
    model: ModelName | None = None
    messages: Annotated[list[AnyMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class ApplyTemplateAnswer(BaseModel):
    prompt: str


class Architecture(BaseModel):
    input_modalities: list[Literal["text", "image", "audio", "video"]]


class ModelAnswer(BaseModel):
    """architecture: OpenRouter's, tells clients whether they may send images; left out until the model was loaded once."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    max_model_len: int | None
    state: str
    architecture: Architecture | None = None


class ModelsAnswer(BaseModel):
    object: Literal["list"]
    data: list[ModelAnswer]


class LoraAdapter(BaseModel):
    """One that requests may choose, by its id or its name, which is also a model's. scale: of requests that choose none."""

    id: int
    name: str
    scale: float


class LoraAdaptersAnswer(RootModel[list[LoraAdapter]]):
    """All of them."""


class AnthropicModelAnswer(BaseModel):
    """created_at: RFC 3339. max_input_tokens: null until the model was loaded once."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None


class AnthropicModelsAnswer(BaseModel):
    data: list[AnthropicModelAnswer]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnyModelAnswer(RootModel[ModelAnswer | AnthropicModelAnswer]):
    """As the client's API has it."""


class AnyModelsAnswer(RootModel[ModelsAnswer | AnthropicModelsAnswer]):
    """As the client's API has it."""


class Healthy(BaseModel):
    status: Literal["ok"]


class Unhealthy(ErrorAnswer):
    status: Literal["loading", "restarting", "stuck", "failed", "stopped", "draining"]


class VersionAnswer(BaseModel):
    version: str


class GenerationSettings(BaseModel):
    n_ctx: int
    params: dict[str, Any]


class Modalities(BaseModel):
    vision: bool
    audio: bool
    video: bool


class Slot(BaseModel):
    """Room for one answer. n_ctx: tokens of prompt and answer together."""

    id: int
    n_ctx: int
    is_processing: bool


class SlotsAnswer(RootModel[list[Slot]]):
    pass


class PropsAnswer(BaseModel):
    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str | None
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
