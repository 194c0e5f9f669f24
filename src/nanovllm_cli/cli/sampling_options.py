"""How tokens are chosen: the options that say so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.command import SAMPLING, option
from nanovllm_cli.cli.options import default_of, of_same_name
from nanovllm_cli.errors import UsageError
from nanovllm_cli.samplers import LLAMA_ORDER, sampler_names
from nanovllm_cli.sampling_params import SamplingParams


def _sampling(name: str, *flags: str, help: str, **more: Any) -> Any:
    return option(
        *flags, help=f"{help} [the model's own, else {default_of(SamplingParams, name)}]", panel=SAMPLING, **more
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen. Fields that say nothing here are the model's own, or SamplingParams' defaults."""

    predict: int | None = option(
        "-n", "--predict", "--n-predict",
        help="Most tokens of an answer; -1 or -2 until the context is full. [the model's own, or -1]",
        panel=SAMPLING, envvar="NANOVLLM_PREDICT",
    )
    temperature: float | None = _sampling("temperature", "--temp", help="Temperature; 0 takes the likeliest token.")
    top_k: int | None = _sampling("top_k", "--top-k", help="Only the k likeliest tokens; 0 takes all.")
    top_p: float | None = _sampling("top_p", "--top-p", help="Only the likeliest tokens that make up p.")
    min_p: float | None = _sampling("min_p", "--min-p", help="Only tokens of at least this share of the likeliest one.")
    top_n_sigma: float | None = _sampling(
        "top_n_sigma", "--top-nsigma", help="Only tokens at most n standard deviations below the likeliest; 0 takes all."
    )
    typical_p: float | None = _sampling("typical_p", "--typical", help="Locally typical sampling.")
    seed: int | None = option(
        "-s", "--seed", help="The same seed gives the same answer. [-1: a new one]", panel=SAMPLING
    )
    repetition_penalty: float | None = _sampling(
        "repetition_penalty", "--repeat-penalty", help="Divides the logits of tokens that occurred."
    )
    presence_penalty: float | None = _sampling(
        "presence_penalty", "--presence-penalty", help="Subtracted once a token has occurred."
    )
    frequency_penalty: float | None = _sampling(
        "frequency_penalty", "--frequency-penalty", help="Subtracted for each time it occurred."
    )
    penalty_last_n: int | None = _sampling(
        "penalty_last_n", "--repeat-last-n", help="How far back penalties look; -1 is everything."
    )
    dry_multiplier: float | None = _sampling("dry_multiplier", "--dry-multiplier", help="DRY: strength; 0 is off.")
    dry_base: float | None = _sampling("dry_base", "--dry-base", help="DRY: growth with the repeated length.")
    dry_allowed_length: int | None = _sampling(
        "dry_allowed_length", "--dry-allowed-length", help="DRY: repeats up to this length are free."
    )
    dry_penalty_last_n: int | None = _sampling(
        "dry_penalty_last_n", "--dry-penalty-last-n", help="DRY: how far back; -1 is everything."
    )
    dry_sequence_breaker: list[str] | None = option(
        "--dry-sequence-breaker", help=r"""DRY: ends a repeat. Repeatable; 'none' for none. [\n : " *]""",
        panel=SAMPLING, metavar="TEXT",
    )
    xtc_probability: float | None = _sampling("xtc_probability", "--xtc-probability", help="XTC: how often; 0 is off.")
    xtc_threshold: float | None = _sampling("xtc_threshold", "--xtc-threshold", help="XTC: what counts as likely.")
    samplers: str | None = option(
        "--samplers",
        help=f"The steps from logits to a token in this order, and no others, as llama.cpp has them: {'; '.join(LLAMA_ORDER)}; "
        "adaptive_p. [all, as vLLM orders them]",
        panel=SAMPLING, metavar="NAMES",
    )
    sampler_seq: str | None = option(
        "--sampler-seq", "--sampling-seq", help="The same by letters, such as edskypmxt.", panel=SAMPLING, metavar="LETTERS"
    )
    dynatemp_range: float | None = _sampling(
        "dynatemp_range", "--dynatemp-range", help="How far the temperature follows the entropy, up and down; 0 is off."
    )
    dynatemp_exponent: float | None = _sampling(
        "dynatemp_exponent", "--dynatemp-exponent", "--dynatemp-exp", help="To which power of the entropy's share."
    )
    mirostat: int | None = _sampling(
        "mirostat", "--mirostat", help="Mirostat 1 or 2, in place of all that leaves tokens out; 0 is off."
    )
    mirostat_tau: float | None = _sampling(
        "mirostat_tau", "--mirostat-tau", "--mirostat-ent", help="Mirostat: the surprise it aims at, in bits."
    )
    mirostat_eta: float | None = _sampling(
        "mirostat_eta", "--mirostat-eta", "--mirostat-lr", help="Mirostat: how fast it learns."
    )
    adaptive_target: float | None = _sampling(
        "adaptive_target", "--adaptive-target", help="Adaptive-p: favours tokens near this probability; below 0 is off."
    )
    adaptive_decay: float | None = _sampling(
        "adaptive_decay", "--adaptive-decay", help="Adaptive-p: how long it remembers; 0 to 0.99."
    )
    logit_bias: list[Any] | None = option(
        "-l", "--logit-bias", help="Adds to a token's logit: 15043+1, 15043-1.5. Repeatable.",
        panel=SAMPLING, metavar="ID+BIAS", parser=parsers.logit_bias,
    )
    ignore_eos: bool = option("--ignore-eos", help="Go on past the model's own end.", default=False, panel=SAMPLING)
    stop: list[str] | None = option(
        "--stop", help=r"Ends the answer before this text; \n and \t are understood. Repeatable.",
        panel=SAMPLING, metavar="TEXT",
    )
    max_repeats: int | None = _sampling(
        "max_repeats", "--max-repeats", help="Ends an answer that says the same so many times over; 0 is off."
    )
    max_repeat_size: int | None = _sampling(
        "max_repeat_size", "--max-repeat-size", help="Most tokens of what is said over and over."
    )
    min_repeat_size: int | None = _sampling("min_repeat_size", "--min-repeat-size", help="The fewest.")
    bad_word: list[str] | None = option("--bad-word", help="Never said. Repeatable.", panel=SAMPLING, metavar="TEXT")
    min_tokens: int | None = _sampling("min_tokens", "--min-tokens", help="No end before this many tokens.")
    no_repeat_ngram_size: int | None = _sampling(
        "no_repeat_ngram_size", "--no-repeat-ngram-size", help="No so many tokens in a row are said twice; 0 is off."
    )
    num_beams: int | None = _sampling(
        "num_beams", "--beams", "--num-beams", "--beam-size",
        help="From 2 on, nothing is drawn: the likeliest answer is looked for among so many beginnings, and comes at once.",
    )
    length_penalty: float | None = _sampling(
        "length_penalty", "--length-penalty", help="Beams: a score is divided by the answer's length to this power."
    )
    source_language: str | None = option(
        "--source-language", "--src-lang",
        help="Of the prompt, to a model that translates and is told it, a code or a name: en, German. [as its files say]",
        panel=SAMPLING, metavar="NAME",
    )
    target_language: str | None = option(
        "--target-language", "--tgt-lang", help="Of the answer, alike.", panel=SAMPLING, metavar="NAME"
    )

    @parsers.by_their_flags()
    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams that were asked for, and nothing else. Raises UsageError for what no model could
        do."""
        others = ("ignore_eos", "logit_bias", "samplers", "stop")  # of the same name, in another form
        same = of_same_name(SamplingParams, self).items()
        fields = {name: value for name, value in same if value is not None and name not in others}
        if self.predict is not None:
            if self.predict < 1 and self.predict not in (-1, -2):
                wanted = f"--predict must be a whole number from 1 on, -1 or -2, not {self.predict}"
                raise UsageError(wanted, "-1 and -2: no limit but the context")
            fields["max_tokens"] = None if self.predict in (-1, -2) else self.predict
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.logit_bias:
            fields["logit_bias"] = dict(self.logit_bias)
        if self.stop:
            fields["stop"] = tuple(parsers.escaped(text) for text in self.stop)
        if self.bad_word:
            fields["bad_words"] = tuple(self.bad_word)
        if self.dry_sequence_breaker:
            breakers = [parsers.escaped(text) for text in self.dry_sequence_breaker]
            fields["dry_sequence_breakers"] = () if breakers == ["none"] else tuple(breakers)
        if self.samplers is not None and self.sampler_seq is not None:
            raise UsageError("--samplers and --sampler-seq cannot be used together")
        if self.samplers is not None:
            fields["samplers"] = sampler_names([name for name in re.split(r"[;,\s]+", self.samplers) if name])
        if self.sampler_seq is not None:
            try:
                fields["samplers"] = sampler_names(self.sampler_seq)
            except UsageError as error:
                raise UsageError(error.message.replace("samplers", "--sampler-seq", 1), error.hint) from error
        SamplingParams(**fields)  # refuses what is out of bounds, long before the model is there
        return fields


@dataclass(frozen=True, slots=True)
class AnswersOptions(SamplingOptions):
    """The same, with what a conversation has no place for."""

    n: int | None = _sampling("n", "-N", "--num-answers", help="How many answers.")
    logprobs: int | None = option(
        "--logprobs", help="Log-probabilities of the likeliest k at each token, where answers are JSON.", panel=SAMPLING
    )
