"""The fields of a request that say how to draw, under vLLM's and llama.cpp's names; every OpenAI route has them.
Bounds are SamplingParams' own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import Field, StringConstraints, with_config
from typing_extensions import TypedDict

from nanovllm_cli.config import MAX_LORA_MODULES, MAX_SCALE
from nanovllm_cli.constraint import MAX_CONSTRAINT_CHARS, Constraint
from nanovllm_cli.errors import UsageError
from nanovllm_cli.samplers import sampler_names
from nanovllm_cli.sampling_fields import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES
from nanovllm_cli.sampling_params import (
    FLOAT_BOUNDS,
    ID_LISTS,
    INT_BOUNDS,
    MAX_REPEAT_SIZE,
    MAX_TOKENS,
    OPTIONAL_INT_BOUNDS,
    STRING_LISTS,
    SamplingParams,
)
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.ports import ServedModel
from nanovllm_cli.server.schemas_common import (
    FIRST_ERROR,
    OPEN,
    SHORT,
    JsonObject,
    Priority,
    ShortText,
    StrictModel,
    TokenId,
    Tolerated,
    Unsupported,
    at_most,
    explained,
)
from nanovllm_cli.text.tokenizer import Tokenizer

T = TypeVar("T")


def first_given(*values: T | None) -> T | None:
    """Of several names for one thing, the first that is there."""
    return next((value for value in values if value is not None), None)


def bounded(name: str) -> Any:
    """A field with SamplingParams' bounds for it."""
    bounds = FLOAT_BOUNDS.get(name) or INT_BOUNDS.get(name) or OPTIONAL_INT_BOUNDS[name]
    return Field(default=None, ge=bounds[0], le=bounds[1])


# In this order: a union that looks for the best fit takes 0 as False.
Bias = Annotated[
    Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)] | Literal[False], Field(union_mode="left_to_right")
]
_MAX_BIASED_TEXTS = STRING_LISTS["bad_words"][0]


def _strings(name: str) -> Any:
    return StringConstraints(min_length=1, max_length=STRING_LISTS[name][1])


Stop = Annotated[
    Annotated[str, _strings("stop")]
    | Annotated[list[Annotated[str, _strings("stop")]], Field(max_length=STRING_LISTS["stop"][0])]
    | None,
    explained("a string of 1 to {} characters, or at most {} of them".format(*STRING_LISTS["stop"][::-1])),
]


class StructuredOutputs(StrictModel):
    """vLLM's object: one of these."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, max_length=MAX_CONSTRAINT_CHARS)
    choice: Annotated[list[str], FIRST_ERROR] | None = Field(default=None, min_length=1, max_length=100_000)
    grammar: str | None = Field(default=None, max_length=MAX_CONSTRAINT_CHARS)
    json_object: bool | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


@with_config(OPEN)
class NamedSchema(TypedDict, total=False):
    name: str
    schema: JsonObject
    strict: bool | None
    description: str | None


class ResponseFormat(StrictModel):
    """OpenAI's; `schema` beside json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")


class RepetitionDetection(StrictModel):
    """vLLM's object, for max_repeats and its sizes. A size of 0 is off, as a least one 1."""

    max_pattern_size: int = Field(default=0, ge=0, le=MAX_REPEAT_SIZE)
    min_pattern_size: int = Field(default=0, ge=0, le=MAX_REPEAT_SIZE)
    min_count: int = Field(default=0, ge=0, le=MAX_TOKENS)

    @property
    def fields(self) -> dict[str, int]:
        if not self.max_pattern_size:
            return {"max_repeats": 0}
        if self.min_count < 2:
            raise invalid_value("repetition_detection: min_count must be at least 2", "repetition_detection")
        if self.min_pattern_size > self.max_pattern_size:
            raise invalid_value("repetition_detection: min_pattern_size is above max_pattern_size", "repetition_detection")
        least = max(1, self.min_pattern_size)
        return {"max_repeats": self.min_count, "max_repeat_size": self.max_pattern_size, "min_repeat_size": least}


class LoraScale(StrictModel):
    id: int = Field(ge=0, lt=MAX_LORA_MODULES)
    scale: float = Field(ge=-MAX_SCALE, le=MAX_SCALE)


class SamplingFields(StrictModel):
    """What SamplingParams has, but for what each route names in its own way (how many tokens, log-probabilities)."""

    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    min_p: float | None = bounded("min_p")
    top_n_sigma: float | None = bounded("top_n_sigma")
    typical_p: float | None = bounded("typical_p")
    repetition_penalty: float | None = bounded("repetition_penalty")
    repeat_penalty: float | None = bounded("repetition_penalty")
    repeat_last_n: int | None = bounded("penalty_last_n")
    penalty_last_n: int | None = bounded("penalty_last_n")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    dry_multiplier: float | None = bounded("dry_multiplier")
    dry_base: float | None = bounded("dry_base")
    dry_allowed_length: int | None = bounded("dry_allowed_length")
    dry_penalty_last_n: int | None = bounded("dry_penalty_last_n")
    dry_sequence_breakers: Annotated[list[Annotated[str, _strings("dry_sequence_breakers")]], FIRST_ERROR] | None = Field(
        default=None, max_length=STRING_LISTS["dry_sequence_breakers"][0]
    )
    xtc_probability: float | None = bounded("xtc_probability")
    xtc_threshold: float | None = bounded("xtc_threshold")
    dynatemp_range: float | None = bounded("dynatemp_range")
    dynatemp_exponent: float | None = bounded("dynatemp_exponent")
    mirostat: int | None = bounded("mirostat")
    mirostat_tau: float | None = bounded("mirostat_tau")
    mirostat_eta: float | None = bounded("mirostat_eta")
    adaptive_target: float | None = bounded("adaptive_target")
    adaptive_decay: float | None = bounded("adaptive_decay")
    logit_bias: (
        Annotated[
            dict[Annotated[str, _strings("bad_words")], Bias]
            | Annotated[
                list[Annotated[list[TokenId | Annotated[str, _strings("bad_words")] | Bias], Field(min_length=2, max_length=2)]],
                FIRST_ERROR,
            ],
            at_most(MAX_LOGIT_BIASES),
        ]
        | None
    ) = Field(default=None, max_length=MAX_LOGIT_BIASES)
    bad_words: Annotated[list[Annotated[str, _strings("bad_words")]], FIRST_ERROR] | None = Field(
        default=None, max_length=STRING_LISTS["bad_words"][0]
    )
    allowed_token_ids: Annotated[list[int], FIRST_ERROR] | None = Field(default=None, max_length=ID_LISTS["allowed_token_ids"])
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    n: int | None = bounded("n")
    n_cmpl: int | None = Field(default=None, ge=1, le=1)
    samplers: Annotated[
        Annotated[list[ShortText], FIRST_ERROR, Field(max_length=64)] | ShortText | None,
        explained("names of steps in their order, or one text of their letters"),
    ] = None
    min_tokens: int | None = bounded("min_tokens")
    no_repeat_ngram_size: int | None = bounded("no_repeat_ngram_size")
    source_language: ShortText | None = None
    target_language: ShortText | None = None
    num_beams: int | None = bounded("num_beams")
    use_beam_search: bool | None = None
    length_penalty: float | None = bounded("length_penalty")
    stop: Stop = None
    stop_token_ids: Annotated[list[int], FIRST_ERROR] | None = Field(default=None, max_length=ID_LISTS["stop_token_ids"])
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = bounded("prompt_logprobs")

    lora: Annotated[
        Annotated[list[LoraScale], FIRST_ERROR, Field(max_length=MAX_LORA_MODULES)] | dict[str, float] | ShortText | None,
        explained("an adapter's name, an object of names and scales, or a list of {id, scale} as /lora-adapters counts them"),
    ] = None
    priority: Priority | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=SHORT)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = Field(default=None, max_length=MAX_CONSTRAINT_CHARS)
    guided_choice: Annotated[list[str], FIRST_ERROR] | None = Field(default=None, min_length=1, max_length=100_000)
    guided_grammar: str | None = Field(default=None, max_length=MAX_CONSTRAINT_CHARS)
    json_schema: JsonObject | str | None = None
    grammar: str | None = Field(default=None, max_length=MAX_CONSTRAINT_CHARS)

    user: Tolerated = None
    metadata: Tolerated = None
    service_tier: Tolerated = None
    store: Tolerated = None
    safety_identifier: Tolerated = None
    prompt_cache_key: Tolerated = None
    prompt_cache_retention: Tolerated = None
    prompt_cache_options: Tolerated = None
    request_id: Tolerated = None
    session_id: Tolerated = None
    stream_interval: Tolerated = None
    spaces_between_special_tokens: Tolerated = None
    truncation_side: Tolerated = None
    backend_sampling: Tolerated = None
    cache_prompt: Tolerated = None
    id_slot: Tolerated = None

    logprob_token_ids: Unsupported = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: Literal[False] | None = None
    ec_transfer_params: Unsupported = None
    min_keep: Literal[0] | None = None
    n_indent: int | None = Field(default=None, ge=0, le=0)
    t_max_predict_ms: int | None = Field(default=None, ge=-1, le=0)
    n_probs: int | None = Field(default=None, ge=0, le=0)
    post_sampling_probs: Literal[False] | None = None
    verbose: Literal[False] | None = None
    grammar_lazy: Literal[False] | None = None
    grammar_triggers: Unsupported = None
    preserved_tokens: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    logits_processors: Unsupported = None
    vllm_xargs: Unsupported = None
    kv_transfer_params: Unsupported = None

    steps_left_out: ClassVar[Sequence[str]] = ()
    """Of `samplers`, names that are passed over."""

    def sampling(self, model: ServedModel, **more: Any) -> SamplingParams:
        """These fields over the model's defaults. more: what a route names in its own way; None leaves the default. A max_tokens
        of -1 is no limit, and logprobs of -1 are none, whatever the defaults are.

        Raises ApiError.
        """
        given = {name: value for name, value in more.items() if value is not None}
        for name in ("max_tokens", "logprobs"):
            if given.get(name) == -1:
                given[name] = None
        for name in _SAID_AS_THEY_ARE:
            value = first_given(getattr(self, name), getattr(self, _OTHER_NAMES.get(name, name)))
            if value is not None:
                given[name] = value
        if self.use_beam_search is not None:
            given |= self._beams(given)
        if self.repetition_detection is not None:
            given |= self.repetition_detection.fields
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias, model.tokenizer)
        if self.lora is not None:
            given["lora"] = _lora(self.lora, model)
        if self.seed is not None:  # OpenAI's are signed
            given["seed"] = self.seed if self.seed >= -1 else self.seed + 2**64
        try:
            if self.samplers is not None:
                given["samplers"] = sampler_names(self.samplers, self.steps_left_out)
            params = model.default_params.under(given)
            params.check_vocabulary(model.facts.vocab_size)
        except UsageError as error:  # begins with the field
            raise ApiError.of(error, re.split(r"\W", error.message, maxsplit=1)[0]) from None
        return params

    def _beams(self, given: dict[str, Any]) -> dict[str, Any]:
        """vLLM's: as many as best_of says, else as answers. One alone is what a draw at temperature 0 is."""
        if not self.use_beam_search:
            if given.get("num_beams", 1) > 1:
                raise invalid_value("use_beam_search is false, and there are to be num_beams", "use_beam_search")
            return {"num_beams": 1}
        count = given.get("num_beams") or getattr(self, "best_of", None) or given.get("n", 1)
        return {"num_beams": count} if count > 1 else {"num_beams": 1, "temperature": 0.0}

    def form(self) -> tuple[Constraint | None, str | None]:
        """What the answer must look like, and the field that says so. Raises ApiError, which names that field."""
        vllm = self.structured_outputs or StructuredOutputs()
        said: list[tuple[str, Any, Callable[[Any], Constraint | None]]] = [
            ("response_format", self.response_format, _of_format),
            ("structured_outputs", vllm.json_, _schema),
            ("structured_outputs", vllm.regex, _regex),
            ("structured_outputs", vllm.choice, _choice),
            ("structured_outputs", vllm.grammar, _grammar),
            ("structured_outputs", vllm.json_object or None, lambda _: Constraint("json_object")),
            ("guided_json", self.guided_json, _schema),
            ("guided_regex", self.guided_regex, _regex),
            ("guided_choice", self.guided_choice, _choice),
            ("guided_grammar", self.guided_grammar, _grammar),
            ("json_schema", self.json_schema, _schema),
            ("grammar", self.grammar or None, _grammar),  # llama.cpp's clients say none by an empty one
        ]
        forms: list[tuple[Constraint, str]] = []
        for name, value, make in said:
            try:
                form = None if value is None else make(value)
            except UsageError as error:
                raise ApiError.of(error, name) from None
            if form is not None:
                forms.append((form, name))
        if len(forms) > 1:
            raise invalid_value(f"{forms[0][1]} and {forms[1][1]}: an answer has one form", forms[1][1])
        return forms[0] if forms else (None, None)


_OTHER_NAMES = {"repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n", "n": "n_cmpl"}
_SAID_AS_THEY_ARE = [
    each.name
    for each in fields(SamplingParams)
    if each.name in SamplingFields.model_fields.keys() - {"logit_bias", "lora", "samplers", "seed"}
]


def _lora(given: str | dict[str, float] | list[LoraScale], model: ServedModel) -> dict[str, float]:
    """What a request chooses, in place of what its model's name says."""
    names = model.lora_modules
    if isinstance(given, list):
        if (most := max((each.id for each in given), default=-1)) >= len(names):
            raise invalid_value(f"lora: there is no adapter {most}; /lora-adapters lists them", "lora")
        chosen = {names[each.id]: each.scale for each in given}
        if len(chosen) < len(given):
            raise invalid_value("lora: an adapter is there twice", "lora")
        return chosen
    chosen = {given: 1.0} if isinstance(given, str) else given
    if (stranger := next((name for name in chosen if name not in names), None)) is not None:
        raise invalid_value(f"lora: no adapter is called {stranger[:100]!r}; /lora-adapters lists them", "lora")
    return chosen


def _biases(given: dict[str, float] | list[list[Any]], tokenizer: Tokenizer) -> dict[int, float]:
    """By OpenAI's object, or by llama.cpp's pairs; a text stands for each of its tokens, and false is never."""
    pairs: Any = [(_number_in(key), bias) for key, bias in given.items()] if isinstance(given, dict) else given
    for key, bias in pairs:
        if isinstance(key, float | bool) or isinstance(bias, str):
            raise invalid_value("logit_bias: a pair is a token's id, or a text, and a bias", "logit_bias")
    if sum(isinstance(key, str) for key, _ in pairs) > _MAX_BIASED_TEXTS:
        raise invalid_value(f"logit_bias: has more than {_MAX_BIASED_TEXTS} texts", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        ids = [key] if isinstance(key, int) else tokenizer.encode(key, add_special_tokens=False, parse_special=False)
        biases |= dict.fromkeys(ids, -MAX_LOGIT_BIAS if bias is False else bias)
    return biases


def _number_in(key: str) -> int | str:
    """What looks like an id is one, or wrong: never a text."""
    return int(key) if re.fullmatch(r"-?[0-9]+", key) else key


def _of_format(wanted: ResponseFormat) -> Constraint | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json_object") if wanted.schema_ is None else _schema(wanted.schema_)
    schema = (wanted.json_schema or {}).get("schema", wanted.schema_)
    if schema is None:
        raise invalid_value("json_schema lacks its schema", "response_format.json_schema.schema")
    return _schema(schema)


def _schema(schema: JsonObject | str) -> Constraint:
    text = _said(schema, "the JSON schema") if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Constraint("json_schema", text)


def _regex(pattern: str) -> Constraint:
    return Constraint("regex", _said(pattern, "the regular expression"))


def _choice(choices: list[str]) -> Constraint:
    return Constraint("choice", msgspec.json.encode(choices).decode())


def _grammar(grammar: str) -> Constraint:
    """GBNF defines its rules by `::=`, Lark by a colon."""
    return Constraint("gbnf" if "::=" in grammar else "lark", _said(grammar, "the grammar"))


def _said(text: str, what: str) -> str:
    """What is empty would leave only an empty answer, which nobody asks for."""
    if not text:
        raise UsageError(f"{what} is empty", "leave it out for an answer of any form")
    return text
