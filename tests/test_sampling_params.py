"""Every field is bounded, normalised to plain immutable data, and refused in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from nanovllm_cli.config import Lora
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.errors import CheckpointError, UsageError
from nanovllm_cli.sampling_params import SamplingParams

FLOATS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_n_sigma": (-1, 100),
    "typical_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0, 100),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 10),
    "adaptive_target": (-1, 1),
    "adaptive_decay": (0, 1),
    "length_penalty": (-4, 8),
}
INTS = {
    "top_k": (-1, 2**31 - 1),
    "penalty_last_n": (-1, 2**31 - 1),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "mirostat": (0, 2),
    "n": (1, 128),
    "num_beams": (1, 64),
    "min_tokens": (0, 2**31 - 1),
    "no_repeat_ngram_size": (0, 64),
    "max_repeats": (0, 2**31 - 1),
    "max_repeat_size": (1, 1024),
    "min_repeat_size": (1, 1024),
    "seed": (-1, 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 100),
    "prompt_logprobs": (0, 100),
}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
STRINGS = {"stop": (64, 1024), "bad_words": (256, 256), "dry_sequence_breakers": (16, 40)}
LANGUAGES = ("source_language", "target_language")
IDS = {"stop_token_ids": 1024, "allowed_token_ids": 2**20}


def make(name: str, value: object) -> SamplingParams:
    return SamplingParams(**{name: value})  # type: ignore[arg-type]


def refusal(name: str, value: object) -> str:
    with pytest.raises(UsageError) as caught:
        make(name, value)
    message = caught.value.message
    assert name in message
    assert "\n" not in message
    assert len(message) < 300
    return message


def test_every_field_is_bounded_by_some_test_here() -> None:
    elsewhere = {"samplers", "transcript"}  # test_sampling_chain.py, test_whisper.py
    tested = {*FLOATS, *INTS, *FLAGS, *STRINGS, *IDS, *LANGUAGES, *elsewhere, "logit_bias", "lora", "constraint", "reasoning"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == tested


@pytest.mark.parametrize(
    "value",
    [None, 3, "", "x" * 201, ["a", "a"], [3], [["a", 1, 2]], {"a": "1"}, {"a": True}, {"a": math.nan}, {"a": 1e7}, {3: 1.0},
     [str(i) for i in range(65)], ["\ud800"]],
)  # fmt: skip
def test_adapters_are_names_and_scales(value: object) -> None:
    refusal("lora", value)


def test_adapters_become_names_and_scales() -> None:
    for value in ("a", ["a"], {"a": 1}, [("a", 1.0)], (Lora("a"),)):
        assert SamplingParams(lora=value).lora == (Lora("a", 1.0),)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("value", ["", "x" * 65, 3, True, ["de"], b"de", "\ud800", "de\n"])
def test_languages_are_short_words(name: str, value: object) -> None:
    refusal(name, value)
    assert getattr(make(name, "x" * 64), name) == "x" * 64


@pytest.mark.parametrize("name", ["constraint", "reasoning"])
@pytest.mark.parametrize("value", ["{}", {}, 1, True, ["regex", "a"]])
def test_forms_are_values_of_their_own_type(name: str, value: object) -> None:
    refusal(name, value)


@pytest.mark.parametrize(
    "make_bad",
    [
        lambda: Constraint("xml", "a"),
        lambda: Constraint("regex", "a" * (2**18 + 1)),
        lambda: Constraint("regex", 7),
        lambda: ReasoningPhase("", "</think>"),
        lambda: ReasoningPhase("<think>", "x" * 65),
        lambda: ReasoningPhase("<think>", "</think>", budget=-1),
        lambda: ReasoningPhase("<think>", "</think>", budget=2**31),
        lambda: ReasoningPhase("<think>", "</think>", budget=True),
    ],
)
def test_a_form_out_of_bounds_is_refused(make_bad: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make_bad()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e308, -5, 2**63, "1", "", None, True, [], {}, 1j, b"1"]
)
def test_a_number_that_is_none_is_refused(name: str, value: object) -> None:
    refusal(name, value)


@pytest.mark.parametrize(("name", "bounds"), FLOATS.items())
def test_numbers_are_taken_up_to_their_bounds_and_stored_as_floats(name: str, bounds: tuple[float, float]) -> None:
    for bound in bounds:
        stored = getattr(make(name, bound), name)
        assert stored == (0.0 if (name, bound) == ("top_n_sigma", -1) else bound)  # which is how llama.cpp says no
        assert type(stored) is float
    refusal(name, math.nextafter(bounds[0], -math.inf))
    refusal(name, math.nextafter(bounds[1], math.inf))


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("value", [math.nan, 1.0, 1.5, 2**64, -2, -(2**63), "1", True, False, [1], {}, b"1"])
def test_a_whole_number_that_is_none_is_refused(name: str, value: object) -> None:
    refusal(name, value)


@pytest.mark.parametrize(("name", "bounds"), INTS.items())
def test_whole_numbers_are_taken_up_to_their_bounds(name: str, bounds: tuple[int, int]) -> None:
    make(name, bounds[0])
    assert getattr(make(name, bounds[1]), name) == bounds[1]
    refusal(name, bounds[0] - 1)
    refusal(name, bounds[1] + 1)


@pytest.mark.parametrize("kind", [numpy.float32, numpy.float64, numpy.int64, numpy.uint8])
def test_numbers_of_numpy_are_numbers(kind: Any) -> None:
    """Sweeps come out of numpy; what is stored is Python's own, whose repr and JSON are those of numbers."""
    for name in FLOATS:
        assert type(getattr(make(name, kind(1)), name)) is float
    for name in INTS if issubclass(kind, numpy.integer) else ():
        assert type(getattr(make(name, kind(2)), name)) is int
    refusal("temperature", kind(101))
    refusal("temperature", numpy.float32("nan"))
    refusal("top_k", numpy.float64(1))
    refusal("top_k", numpy.bool_(True))
    params = SamplingParams(stop_token_ids=[numpy.int64(5)], logit_bias={numpy.int64(5): numpy.float32(0.5)})  # type: ignore[dict-item]
    assert repr(params.stop_token_ids) == "(5,)"
    assert repr(params.logit_bias) == "{5: 0.5}"


@pytest.mark.parametrize("name", ["top_k", "n", "min_tokens", "penalty_last_n"])
def test_none_is_no_whole_number(name: str) -> None:
    refusal(name, None)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    refusal(name, value)


@pytest.mark.parametrize(("name", "limits"), STRINGS.items())
def test_lists_of_strings_are_bounded_in_number_and_length(name: str, limits: tuple[int, int]) -> None:
    most, longest = limits
    assert getattr(make(name, ["x" * longest] * most), name) == ("x" * longest,) * most
    assert getattr(make(name, "one"), name) == ("one",)
    assert getattr(make(name, []), name) == ()
    refusal(name, ["x"] * (most + 1))
    refusal(name, ["x" * (longest + 1)])
    for wrong in ([""], [1], [None], [["x"]], {"x": 1}, 5, False, b"x", [b"x"], ["\ud800"], ["ok", True]):
        refusal(name, wrong)


def test_no_list_is_an_empty_one_as_in_vllm_but_of_what_has_a_default() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, allowed_token_ids=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
    refusal("dry_sequence_breakers", None)


def test_half_a_million_stop_strings_are_refused_without_a_look_at_them() -> None:
    refusal("stop", [object()] * 500_000)


@pytest.mark.parametrize(("name", "most"), IDS.items())
def test_lists_of_ids_are_bounded(name: str, most: int) -> None:
    assert getattr(make(name, [3, 0, 2**31 - 1]), name) == (3, 0, 2**31 - 1)
    refusal(name, [1] * (most + 1))
    for wrong in ([-1], [2**31], [2**63], [1.0], ["1"], [True], [None], "12", {1: 2}, 5):
        refusal(name, wrong)


@pytest.mark.parametrize("name", [*FLOATS, *INTS, "stop", "stop_token_ids", "logit_bias"])
def test_a_number_too_long_to_print_is_refused_like_others(name: str) -> None:
    refusal(name, {10**5000: 1.0} if name == "logit_bias" else 10**5000)


def test_an_empty_list_of_allowed_ids_is_refused() -> None:
    refusal("allowed_token_ids", [])


@pytest.mark.parametrize(
    "value",
    [
        {1: 101.0}, {1: -100.5}, {1: math.nan}, {1: math.inf}, {1: "5"}, {1: True}, {1: None}, {"1": 5.0}, {-1: 5.0},
        {2**31: 1.0}, {True: 1.0}, {1.0: 1.0}, [(1, 2.0)], "x", 5, dict.fromkeys(range(1025), 0.0),
    ],
)  # fmt: skip
def test_bad_logit_biases_are_refused(value: object) -> None:
    refusal("logit_bias", value)


def test_logit_bias_is_a_mapping_that_does_not_follow_the_one_it_was_made_of() -> None:
    given = {7: 1, 3: -2.5}
    params = SamplingParams(logit_bias=given)
    given[9] = 5
    assert params.logit_bias == {3: -2.5, 7: 1.0}
    assert list(params.logit_bias or ()) == [3, 7]
    assert "3: -2.5" in repr(params)


def test_params_are_hashable_equal_by_value_and_frozen() -> None:
    one = SamplingParams(logit_bias={1: 2.0}, stop=["a"], bad_words=["b"], allowed_token_ids=[1, 2])
    same = SamplingParams(logit_bias={1: 2}, stop=("a",), bad_words=("b",), allowed_token_ids=(1, 2))
    assert one == same
    assert hash(one) == hash(same)
    assert {one: 1}[same] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.n = 2  # type: ignore[misc]


def test_a_changed_copy_is_checked_again() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, seed=5)
    assert dataclasses.replace(params, n=3) == SamplingParams(logit_bias={1: 2.0}, seed=5, n=3)
    with pytest.raises(UsageError):
        dataclasses.replace(params, n=0)


def test_minus_one_is_stored_as_what_it_means() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None


def test_a_floor_above_the_ceiling_is_refused() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).max_tokens == 5
    with pytest.raises(UsageError, match=r"min_tokens \(6\) must not be above max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_temperature_near_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": [5, 100]}, {"stop_token_ids": [100]}, {"logit_bias": {100: 1.0, 4: 0.0}}]
)
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, Any]) -> None:
    SamplingParams(**params).check_vocabulary(101)
    with pytest.raises(UsageError, match="token id 100 is outside the vocabulary of 100 tokens"):
        SamplingParams(**params).check_vocabulary(100)


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    params.check_vocabulary(1)
    assert [params.is_greedy, params.has_penalties, params.has_dry, params.has_xtc] == [False] * 4
    assert not SamplingParams(repetition_penalty=1.5, penalty_last_n=0).has_penalties


def test_generation_config_gives_the_defaults_and_overrides_win() -> None:
    config = json.loads(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "repetition_penalty": 1, "do_sample": true,'
        ' "eos_token_id": [1, 2], "max_new_tokens": 64, "max_length": 20, "typical_p": 0.9, "unheard_of": {}}'
    )
    assert SamplingParams.from_generation_config(config) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=64, typical_p=0.9
    )
    assert SamplingParams.from_generation_config(config, top_k=0, max_tokens=None, seed=4) == SamplingParams(
        temperature=0.6, top_p=0.95, typical_p=0.9, seed=4
    )


def test_do_sample_false_is_greedy_unless_a_temperature_is_given() -> None:
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.7}).is_greedy
    assert SamplingParams.from_generation_config({"do_sample": False}, temperature=0.7).temperature == 0.7
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    assert SamplingParams.from_generation_config({"temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize(
    ("config", "override"),
    [
        ({"temperature": -1}, {"temperature": 1.0}),
        ({"top_p": "0.9"}, {"top_p": 0.9}),
        ({"top_k": 2**63}, {"top_k": 5}),
        ({"min_p": math.nan}, {"min_p": 0.0}),
        ({"max_new_tokens": 0}, {"max_tokens": 7}),
        ({"repetition_penalty": [1]}, {"repetition_penalty": 1.0}),
    ],
)
def test_a_broken_generation_config_is_named_and_can_be_overridden(
    config: dict[str, Any], override: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(config))}"):
        SamplingParams.from_generation_config(config)
    SamplingParams.from_generation_config(config, **override)


def test_do_sample_that_is_no_flag_is_named() -> None:
    with pytest.raises(CheckpointError, match="do_sample must be true or false"):
        SamplingParams.from_generation_config({"do_sample": "no"})


def test_suppressed_tokens_of_the_vocabulary_are_biases() -> None:
    params = SamplingParams.from_generation_config({"suppress_tokens": [7, 5, 400]}, vocab_size=400)
    assert params.logit_bias == {5: -100.0, 7: -100.0}
    for nothing in (None, [], [400]):
        assert SamplingParams.from_generation_config({"suppress_tokens": nothing}, vocab_size=400) == SamplingParams()
    assert SamplingParams.from_generation_config({"suppress_tokens": [7]}, logit_bias={5: 1}).logit_bias == {5: 1.0}


@pytest.mark.parametrize("suppressed", [7, "7", [-1], [1.5], [True], [[7]], {"7": 1}, list(range(1025))])
def test_suppressed_tokens_that_are_none_are_named(suppressed: Any) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: suppress_tokens"):
        SamplingParams.from_generation_config({"suppress_tokens": suppressed})


def test_what_is_given_keeps_the_models_biases_of_other_tokens() -> None:
    own = SamplingParams(temperature=0.5, logit_bias={5: -100, 7: -100})
    assert own.under({"top_k": 3}) == SamplingParams(temperature=0.5, top_k=3, logit_bias={5: -100, 7: -100})
    assert own.under({"logit_bias": {7: 0, 9: 2}}).logit_bias == {5: -100.0, 7: 0.0, 9: 2.0}
    assert own.under({"logit_bias": None}).logit_bias is None
    assert SamplingParams().under({"logit_bias": {7: 1}}).logit_bias == {7: 1.0}
    with pytest.raises(UsageError):
        own.under({"logit_bias": {7: 101}})


def test_a_given_floor_lifts_the_files_ceiling() -> None:
    own = SamplingParams(min_tokens=5, max_tokens=10)
    assert own.under({"max_tokens": 3}).min_tokens == 3
    assert (own.under({"min_tokens": 20}).max_tokens, own.under({"max_tokens": None}).min_tokens) == (20, 5)
    with pytest.raises(UsageError, match=r"min_tokens \(6\) must not be above max_tokens \(4\)"):
        own.under({"min_tokens": 6, "max_tokens": 4})
    params = SamplingParams.from_generation_config({"max_new_tokens": 10}, min_tokens=20)
    assert (params.min_tokens, params.max_tokens) == (20, 20)
    with pytest.raises(UsageError):
        SamplingParams.from_generation_config({"max_new_tokens": 10}, min_tokens="20")


def test_an_unknown_override_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="there is no sampling parameter 'topp'"):
        SamplingParams.from_generation_config({}, topp=0.5)


def test_the_module_loads_no_torch() -> None:
    code = "import sys, nanovllm_cli.sampling_params; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "did you mean max_tokens?"), ("temprature", "did you mean temperature?"),
        ("repeat_penalty", "did you mean repetition_penalty?"), ("beam_width", "did you mean num_beams?"),
        ("structured_outputs", 'constraint=Constraint("json_schema", …), of nanovllm_cli.constraint'),
        ("best_of", "num_beams looks for the likeliest answers, n draws several"), ("detokenize", "leave it out"),
        ("frobnicate", "known: adaptive_decay, adaptive_target, "),
    ],
)  # fmt: skip
def test_a_field_that_there_is_not_is_told_with_what_there_is(name: str, hint: str) -> None:
    """What scripts for vLLM and transformers say, and what is mistyped."""
    for make_it in (lambda: SamplingParams(**{name: 1}), lambda: SamplingParams.from_generation_config({}, **{name: 1})):  # type: ignore[arg-type]
        with pytest.raises(UsageError) as caught:
            make_it()
        assert caught.value.message == f"there is no sampling parameter {name!r}"
        assert str(caught.value.hint).startswith(hint)


def test_params_are_copied_and_pickled_like_other_values() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, num_beams=1)
    for again in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert again == params
