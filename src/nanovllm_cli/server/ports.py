"""The borders inside the server: what routes stand on, and what an engine looks like from the event loop.

    routes ── Generator (generation.py) ── Models ── ServedModel ── EnginePort ── (socket pair) ── engine process

Everything here is called from one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from nanovllm_cli.config import Lora
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import PromptTooLongError
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import invalid_value, too_long
from nanovllm_cli.server.messages import Facts, Output
from nanovllm_cli.text.answer_format import AnswerFormat
from nanovllm_cli.text.chat_template import ChatTemplate, Message
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.tool_calls import ToolCallDelta, ToolChoice
from nanovllm_cli.vision_spec import TokenIds
from nanovllm_cli.weights.classes import Classes
from nanovllm_cli.weights.scoring import Scoring

LATEST = ":latest"
"""What Ollama's clients call a model by that has one form."""
_MOST_SHORTENED = 4
"""Characters of a text that a normalizer may make one of."""


class EngineState(StrEnum):
    """ASLEEP: unloaded, and loaded again by the next request. STUCK: it runs requests and has made no step for long."""

    LOADING = "loading"
    READY = "ready"
    STUCK = "stuck"
    RESTARTING = "restarting"
    ASLEEP = "asleep"
    FAILED = "failed"
    STOPPED = "stopped"


class Stream(Protocol):
    """One request's outputs. Ends behind the one that is `finished`. Outputs that came while nobody read are joined into one, so
    that a slow reader costs no more than its answer. Raises ApiError where the request was refused, or its engine died."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def abort(self) -> None:
        """No more of it. Also behind its end, and more than once."""


class EnginePort(Protocol):
    """One engine process."""

    @property
    def state(self) -> EngineState: ...

    @property
    def facts(self) -> Facts | None:
        """None until it was ready once."""

    @property
    def stats(self) -> EngineStats | None: ...

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tells_reading: bool = False,
    ) -> Stream:
        """tells_reading: see ChatAsked. Raises ApiError 503 where it cannot take requests now."""

    async def embed(
        self,
        prompt_ids: Sequence[int],
        pooling: Pooled | Alignment,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: Sequence[Lora] = (),
    ) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """What counts in a conversation whose request does not say. variables: of the template. reasoning_budget: most tokens of
    reasoning; None sets no limit."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_budget: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, as routes use it. default_params: its own generation settings under those of the command line.

    thinking_switch: the template's variable that turns reasoning on and off, if it has one. format: how it writes reasoning and
    calls; None where it has no template. scoring: of a reranker, which embeds nothing; classes: of one with labels.
    generation_config: its files', which say how a Whisper writes. lora_modules: names of the adapters that its requests may
    choose; one of them under its own name is chosen by default_params.
    """

    id: str
    created: int
    engine: EnginePort
    facts: Facts
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    default_params: SamplingParams
    thinking_switch: str | None = None
    format: AnswerFormat | None = None
    scoring: Scoring | None = None
    classes: Classes | None = None
    chat_defaults: ChatDefaults = ChatDefaults()
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    lora_modules: tuple[str, ...] = ()

    @property
    def visible_ids(self) -> Sequence[int]:
        """Special tokens that its answers' texts show: the tags of reasoning and calls."""
        return () if self.format is None else self.format.visible_ids(calls=True)

    def template_reads(self, variable: str) -> bool:
        """Whether its template has something to do with a variable."""
        return self.chat_template is not None and variable in self.chat_template.source

    def cut_to(self, most: int | None) -> int | None:
        """Tokens that a request's `truncate_prompt_tokens` leaves of a text; None: all. Raises ApiError."""
        limit = self.facts.context_len
        if most is not None and (most == 0 or most > limit):
            raise invalid_value(f"texts are cut to between 1 and {limit} tokens, which -1 means too", "truncate_prompt_tokens")
        return limit if most == -1 else most

    def most_chars(self, num_tokens: int) -> int:
        """No text that has more of them is so few tokens."""
        return num_tokens * self.tokenizer.longest_token * _MOST_SHORTENED

    def check_length(self, num_chars: int, param: str) -> None:
        """Refuses what could not fit whatever its characters are: rendering and tokenizing megabytes takes minutes."""
        least, limit = num_chars // self.most_chars(1), self.facts.context_len
        if least >= limit:
            raise too_long(least, limit, param, at_least=True)

    def check_texts(self, texts: Sequence[str], param: str) -> None:
        """The same of all of them together, and of the beginning of each as it is tokenized."""
        limit = self.facts.context_len
        self.check_length(sum(map(len, texts)), param)
        try:
            for text in texts:
                self.tokenizer.check_fits(text, limit)
        except PromptTooLongError as error:
            raise too_long(error.prompt_len, limit, param, at_least=True) from error


class TextSide(NamedTuple):
    """What a model is beside its weights; the fields are those of `ServedModel`."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    default_params: SamplingParams
    thinking_switch: str | None
    format: AnswerFormat | None
    scoring: Scoring | None = None
    classes: Classes | None = None
    chat_defaults: ChatDefaults = ChatDefaults()
    generation_config: Mapping[str, Any] = MappingProxyType({})


class FileFacts(NamedTuple):
    """What a model's files say, whether it is loaded or not. architecture: as GGUF names it. stored: as what its weights are
    computed with: what they are rounded to, else what they mostly are. context_len: the most that could be served. digest: the
    same for the same files; modified: Unix seconds. embeds: whether it is made for that: by what it says of pooling, or for want
    of a head."""

    format: Literal["gguf", "safetensors"]
    architecture: str
    num_parameters: int
    num_bytes: int
    stored: str
    context_len: int
    hidden_size: int
    num_layers: int
    has_head: bool
    embeds: bool
    reads_images: bool
    digest: str
    modified: float


class ModelAbout(NamedTuple):
    """All that is known of a model without waking it. id: its name, or an alias. facts: None until it was loaded once. parent: as
    a card has it. sleeps: Unix seconds when it will be put to sleep if nobody asks for it; None where it is not loaded, or
    stays."""

    id: str
    state: EngineState
    text: TextSide
    files: FileFacts
    facts: Facts | None
    parent: str | None = None
    sleeps: float | None = None


class ModelCard(NamedTuple):
    """A line of /v1/models. created: Unix seconds, when this server first had it. parent: the model that an adapter is for.
    modalities: what it reads, by OpenRouter's names; None until it was loaded once, as context_len is."""

    id: str
    created: int
    state: EngineState
    context_len: int | None
    parent: str | None = None
    modalities: tuple[str, ...] | None = None


class Models(Protocol):
    """The models behind one address."""

    def cards(self) -> list[ModelCard]: ...

    def use(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        """The model of that name, loaded if it must be, and kept while in use; a request uses it once. None: the only one, or the
        first.

        Raises ApiError: 404 for an unknown name, 503 while it cannot be loaded.
        """

    def peek(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        """As `use`, for what needs its tokenizer, template and facts alone: a model that sleeps sleeps on."""

    async def about(self, name: str) -> ModelAbout:
        """What there is to tell of it; a model that sleeps sleeps on. Raises ApiError: 404, 503 where its files can't be read."""

    async def put_to_sleep(self, name: str) -> None:
        """Unloads it; the next request loads it again. Raises ApiError: 404, 503 for one that is in use, or being loaded."""

    def engines(self) -> Mapping[str, EnginePort]: ...


class Caller(NamedTuple):
    """Who asks. tenant: keeps the prefix caches of different API keys apart; None without keys.

    traceparent, tracestate: the headers of these names (W3C Trace Context), as they came.
    """

    request_id: str
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """A conversation whose next turn is wanted, whatever API it came by.

    messages: in OpenAI's form; tools: {"type": "function", "function": {name, description, parameters, strict}}.
    params: without constraint and reasoning. form: what the answer's content must look like.
    thinking: None leaves it to the server and the template. reasoning_budget: most tokens of reasoning; -1 sets no limit, None
    leaves it to the server.
    continues: the last message is an answer to go on with. splits_reasoning: False leaves it in the content, tags and all.
    whole_calls: for who does not stream: a call counts once it is complete, and is content where it turns out broken.
    before: tokens of a conversation so far, which the prompt is put behind. most_tokens: of prompt and answer together, where
    that is to be less than the model can. begins: tokens that the answer is given to begin with, and that are no part of it.
    param: what the conversation is called in its client's request, for errors. image_paths: where the images of its messages are
    in that request, in their order; empty where that is their place in `messages`. sound_path: the same of its only sound.
    tells_reading: steps that only read the prompt are told, too: without events, by `Generation.reading`.
    opens: the prompt ends where the next turn begins. draws: and that is drawn; else the model judges what it reads.
    """

    messages: Sequence[Message]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel: bool = True
    whole_calls: bool = False
    form: Constraint | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    reasoning_budget: int | None = None
    continues: bool = False
    splits_reasoning: bool = True
    priority: int = 0
    cache_salt: str | None = None
    before: Sequence[int] = ()
    most_tokens: int | None = None
    begins: Sequence[int] = ()
    param: str = "messages"
    image_paths: Sequence[str] = ()
    sound_path: str | None = None
    tells_reading: bool = False
    opens: bool = True
    draws: bool = True


@dataclass(frozen=True, slots=True)
class TextAsked:
    """A text to go on with. prompt: text or ids, TokenIds with what some stand for. most_tokens, tells_reading: see ChatAsked."""

    prompt: str | Sequence[int]
    params: SamplingParams
    form: Constraint | None = None
    priority: int = 0
    cache_salt: str | None = None
    most_tokens: int | None = None
    tells_reading: bool = False


FinishReason = Literal["stop", "length", "repetition", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Event:
    """What one answer got. A step that only decided part of a character has an empty text.

    text: as drawn, tags included; reasoning, content, calls: the same, taken apart (chat only; elsewhere content is text).
    finish_reason: on an answer's last event: stop, length or tool_calls. stop_reason: the stop string or id, if one ended it.
    num_held: characters at the end of the text so far that are not decided: they may become content, or a tag, or nothing.
    """

    index: int
    text: str
    reasoning: str
    content: str
    calls: tuple[ToolCallDelta, ...]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_held: int = 0


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


class Timings(NamedTuple):
    """Seconds from when the prompt first ran to the first token, and from there on. Tokens that were guessed ahead, and how many
    of these were right."""

    prompt: float = 0.0
    answer: float = 0.0
    num_guessed: int = 0
    num_held: int = 0


class Reading(NamedTuple):
    """How far a prompt is read: tokens, those from the cache included, and seconds since it first ran."""

    num_tokens: int
    seconds: float


class Generation(Protocol):
    """Answers on their way. Iterate over it, then read `usage` and `timings`; close it in any case, which aborts what is
    unfinished. Iterating raises ApiError where an answer fails."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs | None] | None: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Timings: ...

    @property
    def reading(self) -> Reading | None:
        """Of the prompt so far, where that is told."""

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        """The events of a step, together; none of a step that only read the prompt."""

    async def cut(self) -> None:
        """Closes it where its client's own rules say that enough is there: what is unfinished has stopped."""

    async def aclose(self) -> None: ...


class ConstraintPool(Protocol):
    """Where constraints are tried out, outside the engine, before a request is taken."""

    async def check(self, constraint: Constraint) -> None:
        """Raises UsageError or UnsupportedError for what is no valid schema, grammar or expression, or takes too much."""


class Generates(Protocol):
    """What routes ask for (generation.Generator), of a model that they use until all of it has come. All raise ApiError and
    typed errors, before anything has been sent."""

    async def chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> Generation: ...

    async def complete(self, model: ServedModel, asked: TextAsked, caller: Caller) -> Generation: ...

    async def encode_chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> list[int]:
        """The prompt's ids, for counting."""

    async def embed(
        self,
        model: ServedModel,
        texts: Sequence[str | Sequence[int]],
        pooling: Pooled,
        caller: Caller,
        *,
        priority: int = 0,
        normalize: bool = True,
        most: int | None = None,
    ) -> tuple[list[Sequence[float]], int]:
        """A vector for each text, of length 1 where they are normalized, and how many tokens they had. most: to so many texts are
        cut, -1: to what the context holds."""

    async def align(self, model: ServedModel, prompt: TokenIds, wanted: Alignment, caller: Caller) -> Sequence[float]:
        """What an Alignment finds of a prompt, as a part of a request that is counted elsewhere."""


def spellings(name: str) -> tuple[str, str, str]:
    """What a request may mean by it, the likeliest first: Ollama's clients say `:latest`, or leave it out."""
    return name, name.removesuffix(LATEST), name + LATEST
