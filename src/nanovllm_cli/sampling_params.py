"""What a request may ask of the sampler. Every field is bounded here, before anything else sees it.

Plain data only: numbers, strings and tuples of them, so that a `SamplingParams` crosses to a worker inside a Plan and
can be a dict key. What the fields do to the logits, and in which order, is `engine/sampler.py`'s docstring.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from nanovllm_cli.config import Lora
from nanovllm_cli.constraint import Constraint, ReasoningPhase, TranscriptRules
from nanovllm_cli.errors import CheckpointError, UsageError
from nanovllm_cli.samplers import MAX_STEPS, sampler_names
from nanovllm_cli.sampling_fields import (
    HABITS,
    MAX_TOKEN_ID,
    OTHER_NAMES,
    adapters,
    bans_of,
    check_language,
    number,
    refused,
    shown,
    strings,
    token_biases,
    token_ids,
    whole_number,
)

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's limit): dividing logits by them leaves nothing but the largest."""

MAX_LOGPROBS = 100
MAX_SEQUENCES = 128
MAX_BEAMS = 64
MAX_TOKENS = 2**31 - 1
MAX_REPEAT_SIZE = 1024

# Inclusive bounds by field. Every number that a request can carry is in one of these two tables.
FLOAT_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 1.0),
    "length_penalty": (-4.0, 8.0),
}
INT_BOUNDS: dict[str, tuple[int, int]] = {
    "top_k": (-1, MAX_TOKEN_ID),
    "penalty_last_n": (-1, MAX_TOKENS),
    "dry_allowed_length": (0, MAX_TOKENS),
    "dry_penalty_last_n": (-1, MAX_TOKENS),
    "mirostat": (0, 2),
    "n": (1, MAX_SEQUENCES),
    "num_beams": (1, MAX_BEAMS),
    "min_tokens": (0, MAX_TOKENS),
    "no_repeat_ngram_size": (0, 64),
    "max_repeats": (0, MAX_TOKENS),
    "max_repeat_size": (1, MAX_REPEAT_SIZE),
    "min_repeat_size": (1, MAX_REPEAT_SIZE),
}
OPTIONAL_INT_BOUNDS: dict[str, tuple[int, int]] = {
    "seed": (-1, 2**64 - 1),
    "max_tokens": (1, MAX_TOKENS),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_PLAIN = {"constraint": Constraint, "reasoning": ReasoningPhase, "transcript": TranscriptRules}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
# Field -> most strings, most characters in each.
STRING_LISTS: dict[str, tuple[int, int]] = {
    "stop": (64, 1024),
    "bad_words": (256, 256),
    "dry_sequence_breakers": (16, 40),
}
# Field -> most ids.
ID_LISTS: dict[str, int] = {"stop_token_ids": 1024, "allowed_token_ids": 2**20}

NOT_WITH_BEAMS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "xtc_probability", "mirostat",
    "adaptive_target", "samplers", "logit_bias", "bad_words", "allowed_token_ids", "stop", "max_repeats",
    "prompt_logprobs", "constraint",
)  # fmt: skip
"""Fields that change what is drawn, or where an answer ends. Beams go by the model's own probabilities, of what is not banned."""
ONLY_GGUF = (
    "penalty_last_n", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "samplers",
)  # fmt: skip
"""Fields that a GGUF file has something for, and generation_config.json has not."""
_FROM_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    **{name: name for name in ONLY_GGUF},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    **{name: name for name in ("length_penalty", "no_repeat_ngram_size")},
}

_DEFAULTS: dict[str, Any] = {}
"""Of all fields; filled behind the class."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling settings. A value out of bounds raises UsageError; lists become tuples, numpy's numbers Python's.

    As vLLM means them:

    temperature: divides the logits; 0 (anything below 1e-5) takes the most likely token, whatever the filters say.
    top_k: keep the k most likely tokens; 0 and -1 keep all (stored as 0). Of equal logits at the border the lower ids
        stay (vLLM keeps all of them; llama.cpp keeps k).
    top_p: keep the most likely tokens until they hold this share of what earlier filters left; 1 keeps all, 0 one.
    min_p: keep tokens at least this times as likely as the most likely one; 0 keeps all.
    repetition_penalty: logits of tokens seen in prompt or output are divided by it where positive, else multiplied.
    presence_penalty, frequency_penalty: subtracted from tokens seen in the output: once, and once for each time seen.
    logit_bias: token id -> added to its logit, -100 to 100.
    bad_words: strings that may not appear; the token that would complete one is banned.
    allowed_token_ids: nothing else may be drawn. None allows all.
    seed: 0 to 2**64 - 1; None and -1 (stored as None) let the engine draw one.
    n: answers to this prompt, each with a seed of its own.
    min_tokens: end and stop ids are banned until so many tokens are out.
    no_repeat_ngram_size: a token is banned that would complete so many in a row which are there already, in the prompt (which an
        encoder's is no part of) or the answer; 0 bans none (transformers).
    max_tokens: longest answer; None goes as far as the context does.
    stop: strings that end the answer. include_stop_str_in_output: leave the string in the text.
    stop_token_ids: ids that end the answer.
    ignore_eos: the model's own end ids do not end the answer.
    max_repeats: an answer ends whose last tokens are the same so many times over; 0 never.
    max_repeat_size, min_repeat_size: of how many tokens that is looked for, at the most and at the least.
    logprobs: report this many alternatives beside each drawn token; 0 reports the drawn token only, None nothing.
        Natural logarithms of the model's own distribution, before any of the above (vLLM's "raw_logprobs").
    prompt_logprobs: the same for the prompt's tokens.
    skip_special_tokens: leave special tokens out of the text.
    lora: which of the engine's adapters (`EngineConfig.lora_modules`) compute it: a name, a list of names, or a mapping of names
        to what each is multiplied by.
    source_language, target_language: of a model that translates and is told so: of the prompt, and of the answer, by the model's
        own code, another standard's or an English name ("deu_Latn", "de", "German").
    num_beams: from 2 on, answers are not drawn: of so many beginnings the likeliest are gone on with, token by token, and of the
        answers that they come to the `n` best are given, at once and in the order of their scores (`engine/beams.py`), as
        transformers' do_sample=False with num_beams does. length_penalty: a score is the sum of an answer's log-probabilities
        over its length to this power. What changes logits, but for min_tokens and no_repeat_ngram_size, and
        what cuts answers short, has no part in it.
    constraint: the form that the answer must have. reasoning: that it may begin with reasoning, and how much of it. transcript:
        that it is a Whisper's, with or without times.

    As llama.cpp means them:

    top_n_sigma: keep the tokens whose logit is at most so many standard deviations of all of them below the largest (Tang et
        al. 2024); 0 keeps all, as anything below does.
    typical_p: keep the tokens whose surprise is nearest to the expected one, until they hold this much (locally typical
        sampling, Meister et al. 2022); 1 keeps all.
    penalty_last_n: how many of the last tokens the three penalties look at; -1 all of them, 0 none.
    dry_multiplier, dry_base, dry_allowed_length: a token that would continue a repetition of m >= dry_allowed_length
        tokens loses multiplier * base ** (m - dry_allowed_length); multiplier 0 is off.
    dry_penalty_last_n: how far back repetitions are looked for; -1 all, 0 off.
    dry_sequence_breakers: strings across which no repetition is counted.
    xtc_probability, xtc_threshold: with this chance at each token, drop all tokens at least this likely but the least
        likely of them ("exclude top choices"); probability 0 and thresholds above 0.5 are off.
    samplers: the steps from logits to a token in their order, by name, or as one text of letters (`samplers.STEPS`); those that
        are not named are left out. None: all, in the order of `engine/sampler.py`.

    The following go in llama.cpp's order where `samplers` names no other (`samplers.LLAMA_ORDER`, the temperature last):

    dynatemp_range, dynatemp_exponent: the temperature is at most so far from `temperature`, by the entropy of what is left, as a
        share of the largest that it could be, to this power; range 0 is off.
    mirostat: 1 or 2 draws by that version of Mirostat (Basu et al. 2021), in place of all that leaves tokens out; 0 is off.
    mirostat_tau, mirostat_eta: the surprise that it aims at, in bits, and how fast it learns.
    adaptive_target, adaptive_decay: tokens near this probability are favoured, and the more so the further off those before it
        were on average ("adaptive-p"), each counting so much less than the one behind it, at most 0.99; below 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    samplers: Sequence[str] | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_repeats: int = 0
    max_repeat_size: int = 64
    min_repeat_size: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    lora: Sequence[Lora] = ()
    source_language: str | None = None
    target_language: str | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    constraint: Constraint | None = None
    reasoning: ReasoningPhase | None = None
    transcript: TranscriptRules | None = None

    def __new__(cls, *values: object, **given: object) -> Self:
        """Raises UsageError for a field that there is not."""
        for name in sorted(given.keys() - _DEFAULTS.keys()):
            near = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, _DEFAULTS, n=1)), None)
            hint = HABITS.get(name) or (f"did you mean {near}?" if near else f"known: {', '.join(sorted(_DEFAULTS))}")
            raise UsageError(f"there is no sampling parameter {name!r}", hint)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (low, high) in FLOAT_BOUNDS.items():
            self._set(name, number(name, getattr(self, name), low, high))
        for name, bounds in INT_BOUNDS.items():
            self._set(name, whole_number(name, getattr(self, name), *bounds))
        for name, bounds in OPTIONAL_INT_BOUNDS.items():
            if getattr(self, name) is not None:
                self._set(name, whole_number(name, getattr(self, name), *bounds))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise refused(name, getattr(self, name), "true or false")
        for name, (most, longest) in STRING_LISTS.items():
            said = getattr(self, name)
            self._set(name, strings(name, () if said is None and name != "dry_sequence_breakers" else said, most, longest))
        for name, most in ID_LISTS.items():
            if name != "allowed_token_ids" or self.allowed_token_ids is not None:
                said = getattr(self, name)
                self._set(name, token_ids(name, () if said is None else said, most))
        if self.allowed_token_ids == ():
            raise UsageError("allowed_token_ids is empty: nothing could be drawn")
        if self.samplers is not None:
            said = self.samplers
            self._set("samplers", sampler_names(said if isinstance(said, str) else strings("samplers", said, MAX_STEPS, 256)))
        if self.logit_bias is not None:
            self._set("logit_bias", token_biases(self.logit_bias))
        self._set("lora", adapters(self.lora))
        for name in ("source_language", "target_language"):
            check_language(name, getattr(self, name))
        for name, kind in _PLAIN.items():
            if not isinstance(getattr(self, name), kind | None):
                raise refused(name, getattr(self, name), f"a {kind.__name__}")
        if self.transcript is not None and self.is_guided:
            raise UsageError("a transcript has rules of its own, and takes no constraint and no budget")
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.top_n_sigma < 0.0:
            self._set("top_n_sigma", 0.0)
        if self.adaptive_target < 0.0:
            self._set("adaptive_target", -1.0)
        if self.seed == -1:
            self._set("seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})")
        if self.max_repeats == 1:
            raise UsageError("max_repeats must be 0 or at least 2: what is there once is no repetition")
        if self.max_repeats and self.min_repeat_size > self.max_repeat_size:
            wrong = f"min_repeat_size ({self.min_repeat_size}) must not be above max_repeat_size ({self.max_repeat_size})"
            raise UsageError(wrong)
        if self.num_beams > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        if self.n > self.num_beams:
            raise UsageError(f"n ({self.n}) must not be above num_beams ({self.num_beams}), which is how many answers there are")
        for name in NOT_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                raise UsageError(f"{name} has no part in a search by beams", "leave one of them out")
        if self.is_guided:
            raise UsageError("reasoning has no budget in a search by beams", "leave one of them out")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW and self._takes("temperature")

    @property
    def has_penalties(self) -> bool:
        """True where repetition, presence or frequency change a logit."""
        unchanged = self.repetition_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return not unchanged and self.penalty_last_n != 0 and self._takes("penalties")

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0 and self._takes("dry")

    @property
    def has_xtc(self) -> bool:
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5 and self._takes("xtc")

    def _takes(self, step: str) -> bool:
        return self.samplers is None or step in self.samplers

    @property
    def is_guided(self) -> bool:
        """Whether what was drawn decides what may be drawn next: a constraint, or a budget for reasoning."""
        return self.constraint is not None or (self.reasoning is not None and self.reasoning.budget is not None)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UsageError if an id lies outside a vocabulary of `vocab_size` tokens."""
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            ids: Iterable[int] = getattr(self, name) or ()
            worst = max(ids, default=0)
            if worst >= vocab_size:
                raise UsageError(f"{name}: token id {worst} is outside the vocabulary of {vocab_size} tokens")

    @classmethod
    def from_generation_config(
        cls, config: Mapping[str, Any], *, vocab_size: int = MAX_TOKEN_ID + 1, **overrides: Any
    ) -> SamplingParams:
        """Defaults from a model's generation_config.json, under what the user gave in `overrides`.

        Read: temperature, top_k, top_p, min_p, typical_p, repetition_penalty, length_penalty, no_repeat_ngram_size,
        max_new_tokens and min_new_tokens (max_tokens and min_tokens here),
        suppress_tokens (biases here, of those in the vocabulary), what GGUF files say besides, under its names here, and
        `do_sample: false`, which is greedy as in transformers; where do_sample is absent the other fields decide. The rest is
        ignored, and so is null. A value that makes no sense raises CheckpointError, unless an override takes its place.
        """
        defaults: dict[str, Any] = {}
        for theirs, ours in _FROM_GENERATION_CONFIG.items():
            if config.get(theirs) is not None and ours not in overrides:
                defaults[ours] = _trusted(cls, theirs, ours, config[theirs])
        if (suppressed := config.get("suppress_tokens")) is not None and "logit_bias" not in overrides:
            defaults["logit_bias"] = bans_of(suppressed, vocab_size)
        do_sample = config.get("do_sample")
        if not isinstance(do_sample, bool | None):
            raise CheckpointError(f"generation_config.json: do_sample must be true or false, not {shown(do_sample)}")
        if do_sample is False and "temperature" not in overrides:
            defaults["temperature"] = 0.0
        if (most := defaults.get("max_tokens")) is not None and most < defaults.get("min_tokens", 0):
            defaults["min_tokens"] = most  # ends are banned up to the last token then, as in transformers
        return cls(**defaults).under(overrides)

    def under(self, given: Mapping[str, Any]) -> SamplingParams:
        """With what is `given` in its place; of the biases those of other tokens stay, as a model's own must. Where it leaves no
        room for the max_tokens or min_tokens that are here, these follow it; a model's own penalties and biases have no part in a
        search by beams."""
        if given.get("num_beams", self.num_beams) not in (None, 1):
            given = {**{name: _DEFAULTS[name] for name in NOT_WITH_BEAMS}, **given}
        if self.logit_bias and (biases := given.get("logit_bias")):
            given = {**given, "logit_bias": {**self.logit_bias, **biases}}
        least, most = given.get("min_tokens"), given.get("max_tokens")
        if "max_tokens" not in given and isinstance(least, int) and least > (self.max_tokens or least):
            given = {**given, "max_tokens": least}
        elif "min_tokens" not in given and isinstance(most, int) and 0 < most < self.min_tokens:
            given = {**given, "min_tokens": most}
        return replace(self, **given)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_DEFAULTS.update({each.name: each.default for each in fields(SamplingParams)})


def params_for(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One for each of so many prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise UsageError("params is a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise UsageError(f"{count} prompts and {len(params)} sampling parameters", "give one for all, or one for each")
    return list(params)


def _trusted(cls: type[SamplingParams], theirs: str, ours: str, value: object) -> Any:
    try:
        return getattr(cls(**{ours: value}), ours)  # type: ignore[arg-type]
    except UsageError as error:
        raise CheckpointError(
            f"generation_config.json: {theirs}: {error.message}", f"correct the file, or give {ours} yourself"
        ) from error
